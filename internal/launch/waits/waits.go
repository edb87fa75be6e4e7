// Package waits describes the work and the waits of each rank of a job, and prints the table that names the ranks
// that hold up others.
package waits

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/base/terminal"
)

// Standing is one rank's work and waits, by its own account. Its launcher adds the host, and fills in for a rank that
// does not answer.
type WaitState struct {
	Rank      int           `json:"rank"`
	Host      string        `json:"host,omitempty"`
	PID       int           `json:"pid,omitempty"`
	State     string        `json:"state,omitempty"` // why it gave no account: "does not answer"; "" if it did
	Step      int64         `json:"step,omitempty"`  // the last that is done; 0: none
	Phase     string        `json:"phase,omitempty"` // its last phase: "step", "checkpoint"
	PhaseTime time.Duration `json:"in,omitempty"`    // that phase, for how long
	Work      *Work         `json:"work,omitempty"`  // its device's work; nil: none, or unknown
	// Waits are the calls without which it does not go on.
	Waits []Wait `json:"waits,omitempty"`
	// Beside is how many calls are on their way that it does not stand for.
	Background int `json:"beside,omitempty"`
}

// Work is a piece of work that is being done.
type Work struct {
	Name  string        `json:"name"`            // "attention forward"
	Label string        `json:"label,omitempty"` // "step 7/forward/layer 3/hop 2 owner 1"
	For   time.Duration `json:"for"`             // how long it has been at it
}

// Wait is a call between ranks that is not over.
type Wait struct {
	Op    string `json:"op"`
	Label string `json:"label,omitempty"` // as Work.Label
	Group uint64 `json:"group"`           // the same on all ranks of the group
	Via   string `json:"via,omitempty"`   // "nccl", "copy"; "": sockets
	Call  uint64 `json:"call"`            // the number among the calls of that group that go that way
	// Open are its messages that are not over; More is how many are left out.
	Open []Open `json:"open,omitempty"`
	More int    `json:"more,omitempty"`
	// Vague: Open names all that take part, since it is not known which of them have come.
	Unresolved bool          `json:"vague,omitempty"`
	Bytes      int64         `json:"bytes,omitempty"` // of all open messages
	Stalled    time.Duration `json:"stood"`           // for how long nothing of it has moved
}

// Open is a message that is not over.
type Open struct {
	Peer    int           `json:"peer"` // world rank
	Send    bool          `json:"send,omitempty"`
	Bytes   int64         `json:"bytes,omitempty"`
	Moved   bool          `json:"moved,omitempty"` // some of it has: the peer has come to it
	Stalled time.Duration `json:"stood"`           // for how long it has not moved
}

// Bounds of a rank's account.
const (
	MaxWaits = 3
	MaxOpen  = 64
	maxText  = 96 // bytes of a name or a label
)

// Decode reads the standing that a rank has told, and makes it fit to be shown.
func Decode(data []byte) (s WaitState, err error) {
	if err := json.Unmarshal(data, &s); err != nil {
		return WaitState{}, fmt.Errorf("standing: %w", err)
	}
	s.Clean()
	return s, nil
}

// Clean bounds what another process has told, and makes it fit to be shown.
func (s *WaitState) Clean() {
	s.Rank, s.PID, s.Step, s.Background = max(s.Rank, 0), max(s.PID, 0), max(s.Step, 0), max(s.Background, 0)
	s.Host, s.State, s.Phase, s.PhaseTime = Word(s.Host), Word(s.State), Word(s.Phase), max(s.PhaseTime, 0)
	if w := s.Work; w != nil {
		w.Name, w.Label, w.For = Word(w.Name), Word(w.Label), max(w.For, 0)
	}
	s.Waits = s.Waits[:min(len(s.Waits), MaxWaits)]
	for i := range s.Waits {
		w := &s.Waits[i]
		w.Op, w.Label, w.Via, w.Stalled = Word(w.Op), Word(w.Label), Word(w.Via), max(w.Stalled, 0)
		w.More, w.Bytes = max(w.More, 0), max(w.Bytes, 0)
		w.Open = w.Open[:min(len(w.Open), MaxOpen)]
		for j := range w.Open {
			o := &w.Open[j]
			o.Peer, o.Bytes, o.Stalled = max(o.Peer, 0), max(o.Bytes, 0), max(o.Stalled, 0)
		}
	}
}

// Word returns s without terminal control characters, on one line and bounded.
func Word(s string) string {
	s = strings.ReplaceAll(terminal.Clip(string(terminal.Line([]byte(s))), maxText), "\t", " ")
	return strings.TrimSpace(s)
}

// String returns what the rank waits for, in one line, as its log has it.
func (s *WaitState) String() string {
	p := s.position()
	text := strings.TrimSuffix(fmt.Sprintf("rank %d, %s", s.Rank, p), ", ")
	switch {
	case s.State != "":
		return text + ": " + s.State
	case len(s.Waits) == 0:
		return fmt.Sprintf("%s: waits for no other rank", text)
	}
	w := &s.Waits[0]
	text += fmt.Sprintf(": %s, %s s without progress", w.Op, seconds(w.Stalled))
	for i := range w.Open {
		o := &w.Open[i]
		switch {
		case w.Unresolved:
			text += fmt.Sprintf("; with rank %d", o.Peer)
		case o.Send:
			text += fmt.Sprintf("; %s bytes to rank %d for %s s", grouped(o.Bytes), o.Peer, seconds(o.Stalled))
		default:
			text += fmt.Sprintf("; %s bytes from rank %d for %s s", grouped(o.Bytes), o.Peer, seconds(o.Stalled))
		}
		if i == maxListed-1 && len(w.Open)+w.More > maxListed {
			return text + fmt.Sprintf("; %d more", len(w.Open)+w.More-maxListed)
		}
	}
	return text
}

// maxTold is how many messages of a call are told in one line.
const maxListed = 8

// A place is where in a run a rank is. Each part is "" where it is not known, or there is none.
type position struct {
	step, pass, layer, hop string
}

// phaseStep is the phase of a rank that trains: its calls and its work say more.
const phaseStep = "step"

// place returns the place of the call that the rank waits for, else of its work, else its phase.
func (s *WaitState) position() position {
	label := ""
	switch {
	case len(s.Waits) > 0:
		label = s.Waits[0].Label
	case s.Work != nil:
		label = s.Work.Label
	}
	p := parsePosition(label)
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
func parsePosition(label string) (p position) {
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
func (p position) String() string {
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

// doing returns what a rank that waits for no one is at, and for how long.
func (s *WaitState) activity() (what string, took time.Duration) {
	if w := s.Work; w != nil {
		return cmp.Or(w.Name, "work"), w.For
	}
	if s.Phase == phaseStep {
		return "its own work", s.PhaseTime
	}
	return cmp.Or(s.Phase, "its own work"), s.PhaseTime
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1f", d.Seconds()) }

func grouped(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
