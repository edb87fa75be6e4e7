package standing

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// A place is where in a run a rank is. Each part is "" where it is not known, or there is none.
type place struct {
	step, pass, layer, hop string
}

// phaseStep is the phase of a rank that trains: its calls and its work say more.
const phaseStep = "step"

// place is that of the call that the rank waits for, else of its work, else what its phase says.
func (s *Standing) place() place {
	label := ""
	switch {
	case len(s.Waits) > 0:
		label = s.Waits[0].Label
	case s.Work != nil:
		label = s.Work.Label
	}
	p := parse(label)
	if s.Phase != phaseStep && p.step == "" {
		p.pass = s.Phase
	}
	if p.step == "" && (s.Step > 0 || s.Phase == phaseStep) {
		at := s.Step
		if s.Phase == phaseStep {
			at++ // it is at the next
		}
		p.step = strconv.FormatInt(at, 10)
	}
	return p
}

// parse reads a label, "step 7/forward/layer 3/hop 2 owner 1": all parts but the step may be missing,
// and others are a pass.
func parse(label string) (p place) {
	for part := range strings.SplitSeq(label, "/") {
		if n, ok := strings.CutPrefix(part, "step "); ok && p.step == "" {
			p.step = n
		} else if n, ok := strings.CutPrefix(part, "validation after step "); ok && p.step == "" {
			p.step, p.pass = n, "validation"
		} else if n, ok := strings.CutPrefix(part, "layer "); ok {
			p.layer = n
		} else if n, ok := strings.CutPrefix(part, "hop "); ok {
			p.hop, _, _ = strings.Cut(n, " ")
		} else if part == "gradients home" {
			p.hop = "home"
		} else if part == "embedding" || part == "head" {
			p.layer = part
		} else if p.pass != "validation" {
			p.pass = part
		}
	}
	return p
}

// String returns the place in words: "step 7, forward, layer 3, hop 2".
func (p place) String() string {
	var parts []string
	add := func(before, text string) {
		if text != "" {
			if _, err := strconv.Atoi(text); err == nil {
				text = before + text
			}
			parts = append(parts, text)
		}
	}
	add("step ", p.step)
	add("", p.pass)
	add("layer ", p.layer)
	if p.hop == "home" {
		p.hop = "gradients home"
	}
	add("hop ", p.hop)
	return strings.Join(parts, ", ")
}

// doing returns what a rank that waits for nobody is at, and for how long.
func (s *Standing) doing() (what string, took time.Duration) {
	if w := s.Work; w != nil {
		return cmp.Or(w.Name, "work"), w.For
	}
	if s.Phase == phaseStep {
		return "its own work", s.In
	}
	return cmp.Or(s.Phase, "its own work"), s.In
}

// seconds returns a time as the table has it.
func seconds(d time.Duration) string { return fmt.Sprintf("%.1f", d.Seconds()) }

// grouped returns a number with its digits in groups of three.
func grouped(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
