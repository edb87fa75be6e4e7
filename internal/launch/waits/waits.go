// Package waits describes the work and the waits of each rank of a job, and prints the table that names the ranks that
// hold up others. WaitState is the type to know: each rank sends one to its launcher.
//
//	fmt.Print(waits.Table([]waits.WaitState{{Rank: 0, Waits: []waits.Wait{{Op: "exchange", …}}}, {Rank: 1, …}}))
package waits

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
)

// WaitState is one rank's own account of its work and waits. Its launcher adds the host, and writes the account of a
// rank that does not answer.
type WaitState struct {
	Rank      int           `json:"rank"`
	Host      string        `json:"host,omitempty"`
	PID       int           `json:"pid,omitempty"`
	State     string        `json:"state,omitempty"` // why it gave no account: "does not answer"; "" if it did
	Step      int64         `json:"step,omitempty"`  // the last completed one; 0: none
	Phase     string        `json:"phase,omitempty"` // the current phase: "step", "checkpoint"
	PhaseTime time.Duration `json:"in,omitempty"`    // time in that phase
	Work      *Work         `json:"work,omitempty"`  // its device's work; nil: none, or unknown
	Waits     []Wait        `json:"waits,omitempty"` // the calls that block the rank
}

// Work is a kernel or host computation in progress.
type Work struct {
	Name  string        `json:"name"`            // "attention forward"
	Label string        `json:"label,omitempty"` // "step 7/forward/layer 3/hop 2 owner 1"
	For   time.Duration `json:"for"`             // time since its start
}

// Wait is a call between ranks in progress.
type Wait struct {
	Op    string `json:"op"`
	Label string `json:"label,omitempty"` // as Work.Label
	Group uint64 `json:"group"`           // equal on all ranks of the group
	Via   string `json:"via,omitempty"`   // "nccl", "copy"; "": sockets
	Call  uint64 `json:"call"`            // number of the call in its group and transport
	// Open are its incomplete messages; More counts the omitted ones.
	Open []Open `json:"open,omitempty"`
	More int    `json:"more,omitempty"`
	// Unresolved: Open names all participants, since the missing ones are unknown.
	Unresolved bool          `json:"vague,omitempty"`
	Bytes      int64         `json:"bytes,omitempty"` // of all open messages
	Stalled    time.Duration `json:"stood"`           // time without progress of any message
}

// Open is an incomplete message.
type Open struct {
	Peer  int   `json:"peer"` // world rank
	Send  bool  `json:"send,omitempty"`
	Bytes int64 `json:"bytes,omitempty"`
}

// Bounds of a WaitState.
const (
	MaxWaits = 3
	MaxOpen  = 64
	maxText  = 96 // bytes of a name or a label
)

// Decode decodes a rank's state, and cleans it.
func Decode(data []byte) (s WaitState, err error) {
	if err := json.Unmarshal(data, &s); err != nil {
		return WaitState{}, fmt.Errorf("wait state: %w", err)
	}
	s.Clean()
	return s, nil
}

// Clean bounds a state received from another process, and removes control characters.
func (s *WaitState) Clean() {
	s.Rank, s.PID, s.Step = max(s.Rank, 0), max(s.PID, 0), max(s.Step, 0)
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
			o.Peer, o.Bytes = max(o.Peer, 0), max(o.Bytes, 0)
		}
	}
}

// Word returns s on one line, bounded, without control characters.
func Word(s string) string {
	s = strings.ReplaceAll(terminal.Clip(terminal.Line(s), maxText), "\t", " ")
	return strings.TrimSpace(s)
}

// String describes the first wait in one line, for the rank's log.
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
			text += fmt.Sprintf("; %s bytes to rank %d", readable.Count(o.Bytes), o.Peer)
		default:
			text += fmt.Sprintf("; %s bytes from rank %d", readable.Count(o.Bytes), o.Peer)
		}
		if i == maxListed-1 && len(w.Open)+w.More > maxListed {
			return text + fmt.Sprintf("; %d more", len(w.Open)+w.More-maxListed)
		}
	}
	return text
}

// maxListed bounds the messages in that line.
const maxListed = 8

// Position is a rank's position in a run. A part is "" if unknown or absent.
type Position struct {
	Step, Pass, Layer, Hop string // numbers, or words such as "head" and "home"
}

// phaseStep is the phase of a training rank: its calls and its work are more precise.
const phaseStep = "step"

// position returns the position of the call that blocks the rank, else of its work, else of its phase.
func (s *WaitState) position() Position {
	label := ""
	switch {
	case len(s.Waits) > 0:
		label = s.Waits[0].Label
	case s.Work != nil:
		label = s.Work.Label
	}
	p := parsePosition(label)
	if s.Phase != phaseStep && p.Step == "" {
		p.Pass = s.Phase
	}
	if p.Step == "" && (s.Step > 0 || s.Phase == phaseStep) {
		at := s.Step
		if s.Phase == phaseStep {
			at++ // the next step
		}
		p.Step = strconv.FormatInt(at, 10)
	}
	return p
}

// parsePosition parses a label such as "step 7/forward/layer 3/hop 2 owner 1". Parts other than the step may be
// missing; an unknown part is the pass.
func parsePosition(label string) (p Position) {
	for part := range strings.SplitSeq(label, "/") {
		if n, ok := strings.CutPrefix(part, "step "); ok && p.Step == "" {
			p.Step = n
		} else if n, ok := strings.CutPrefix(part, "validation after step "); ok && p.Step == "" {
			p.Step, p.Pass = n, "validation"
		} else if n, ok := strings.CutPrefix(part, "layer "); ok {
			p.Layer = n
		} else if n, ok := strings.CutPrefix(part, "hop "); ok {
			p.Hop, _, _ = strings.Cut(n, " ")
		} else if part == "gradients home" {
			p.Hop = "home"
		} else if part == "embedding" || part == "head" {
			p.Layer = part
		} else if p.Pass != "validation" {
			p.Pass = part
		}
	}
	return p
}

// String returns the position in words: "step 7, forward, layer 3, hop 2".
func (p Position) String() string {
	var parts []string
	add := func(before, text string) {
		if text != "" {
			if _, err := strconv.Atoi(text); err == nil {
				text = before + text
			}
			parts = append(parts, text)
		}
	}
	add("step ", p.Step)
	add("", p.Pass)
	add("layer ", p.Layer)
	if p.Hop == "home" {
		p.Hop = "gradients home"
	}
	add("hop ", p.Hop)
	return strings.Join(parts, ", ")
}

// activity describes the local work of a rank that waits for no other, and its duration.
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
