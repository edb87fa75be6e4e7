package launch

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// maxFrame is the longest frame, with its newline, that either side sends or accepts.
const maxFrame = 1 << 20

// Kinds of events that the launcher handles. It passes all other kinds to Job.OnEvent.
const (
	EventReady      = "ready"      // attached; sent by Attach
	EventListening  = "listening"  // Data is the address for ranks of other nodes
	EventProgress   = "progress"   // Step has been reached
	EventCheckpoint = "checkpoint" // a checkpoint of Step is complete
	EventStopped    = "stopped"    // about to exit on request, with a checkpoint
	EventDone       = "done"       // about to exit, all work done
	EventFailed     = "failed"     // about to exit; Data is a Failure as its worker knows it
	EventStatus     = "standing"   // Data is a waits.WaitState, for the launcher; the text is older than the name
	EventStacks     = "stacks"     // Data is text for the worker's log, for the launcher
)

// Event is a worker's message to the launcher.
type Event struct {
	Kind string          `json:"kind"`
	Step int64           `json:"step,omitempty"` // counted from 1; 0: not about a step
	Data json.RawMessage `json:"data,omitempty"`
}

// A command is the launcher's message to a worker. First comes Hello, then at most one Stop, one Failed and one Peers,
// and any number of Tell.
type command struct {
	Hello  *hello   `json:"hello,omitempty"`
	Stop   string   `json:"stop,omitempty"` // asks for a checkpoint and an end; the name of the signal
	Failed *Failed  `json:"failed,omitempty"`
	Peers  []string `json:"peers,omitempty"`  // the addresses of all ranks; "": of this node
	Tell   bool     `json:"tell,omitempty"`   // asks for the worker's work and waits
	Stacks bool     `json:"stacks,omitempty"` // with Tell: also the stacks of all goroutines
}

// commandKinds counts the commands that a worker gets at most once: each except Tell.
const commandKinds = 4

// A hello is the first frame for a worker.
type hello struct {
	Process
	Interface string `json:"interface,omitempty"`
	Core      *int   `json:"core,omitempty"` // to which a rank on a CPU is pinned
	Secret    []byte `json:"secret"`
}

func encodeFrame(v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode frame: %w", err)
	}
	if len(b)+1 > maxFrame {
		return nil, fmt.Errorf("frame of %d bytes, at most %d: %w", len(b)+1, maxFrame, bufio.ErrTooLong)
	}
	return append(b, '\n'), nil
}

// newFrames returns a scanner of a stream's frames. A frame without its newline, at the end, does not count.
func newFrames(r io.Reader) *bufio.Scanner {
	s := bufio.NewScanner(r)
	s.Buffer(nil, maxFrame)
	s.Split(func(data []byte, _ bool) (advance int, frame []byte, err error) {
		if i := bytes.IndexByte(data, '\n'); i >= 0 {
			return i + 1, data[:i], nil
		}
		return 0, nil, nil
	})
	return s
}

// DecodeStrict decodes exactly one JSON value and refuses unknown fields.
func DecodeStrict(line []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("data after the object")
	}
	return nil
}
