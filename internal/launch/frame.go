package launch

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/cprun/cprun/internal/launch/waits"
)

// maxFrame is the longest frame, with its newline, that either side sends or accepts.
const maxFrame = 1 << 20

var errFrameLength = fmt.Errorf("frame is longer than %d bytes", maxFrame)

// Kinds of events that the launcher handles. It passes all other kinds to Job.OnEvent.
const (
	EventReady      = "ready"      // attached; sent by Attach
	EventListening  = "listening"  // Data is the address for ranks of other nodes
	EventProgress   = "progress"   // Step has been reached
	EventCheckpoint = "checkpoint" // a checkpoint of Step is complete
	EventStopped    = "stopped"    // about to exit on request, with a checkpoint
	EventDone       = "done"       // about to exit, all work done
	EventFailed     = "failed"     // about to exit; Data is a FailureReport
	EventStatus     = "standing"   // Data is a waits.WaitState, for the launcher
	EventStacks     = "stacks"     // Data is text for the worker's log, for the launcher
)

// Event is a worker's message to the launcher.
type Event struct {
	Kind string          `json:"kind"`
	Step int64           `json:"step,omitempty"` // counted from 1; 0: not about a step
	Data json.RawMessage `json:"data,omitempty"`
}

// FailureReport is the data of EventFailed.
type FailureReport struct {
	Error  string `json:"error"`
	Remote bool   `json:"remote"` // the cause came from another rank
	Phase  string `json:"phase,omitempty"`
	Step   int64  `json:"step,omitempty"`
	// TimedOut reports that a rank waited for another for too long. WaitState is then this rank's work and waits; nil:
	// unknown.
	TimedOut  bool             `json:"timed_out,omitempty"`
	WaitState *waits.WaitState `json:"standing,omitempty"`
}

// A command is the launcher's message to a worker: first one hello, later at most one of each kind, and any number of
// status requests.
type command struct {
	Kind  string `json:"kind"`
	Hello *hello `json:"hello,omitempty"`
	// of a stop: the name of the signal; of failed: why, if ranks cannot learn it from each other
	Reason string   `json:"reason,omitempty"`
	Rank   int      `json:"rank,omitempty"`   // of failed: which
	Addrs  []string `json:"addrs,omitempty"`  // of peers: by rank; "": of this node
	Stacks bool     `json:"stacks,omitempty"` // of status: also the stacks of all goroutines
}

const (
	commandHello  = "hello"
	commandStop   = "stop"
	commandFailed = "failed"
	commandPeers  = "peers"
	commandStatus = "tell" // asks for the worker's work and waits
)

// commandKinds is the number of commands that a worker gets at most once.
const commandKinds = 4

// A hello is the first frame for a worker.
type hello struct {
	Process
	Interface string `json:"interface,omitempty"`
	Core      *int   `json:"core,omitempty"` // to which a rank on a CPU is pinned
	Secret    []byte `json:"secret"`
}

func (h *hello) check() error {
	switch {
	case h.RunID == "" || h.SocketDir == "":
		return errors.New("hello has no run id or no socket directory")
	case h.Rank < 0 || h.Rank >= h.WorldSize:
		return fmt.Errorf("hello with rank %d of %d", h.Rank, h.WorldSize)
	case h.LocalRank < 0 || h.LocalRank >= h.LocalWorldSize || h.LocalWorldSize > h.WorldSize:
		return fmt.Errorf("hello with local rank %d of %d in a world of %d", h.LocalRank, h.LocalWorldSize, h.WorldSize)
	case h.NodeRank < 0 || h.Restart < 0:
		return fmt.Errorf("hello with node rank %d, restart %d", h.NodeRank, h.Restart)
	case h.Core != nil && (*h.Core < 0 || *h.Core >= maxCores):
		return fmt.Errorf("hello with core %d, of at most %d", *h.Core, maxCores)
	case len(h.Secret) != secretSize:
		return fmt.Errorf("hello with a secret of %d bytes, %d are needed", len(h.Secret), secretSize)
	}
	return nil
}

func encodeFrame(v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode frame: %w", err)
	}
	if len(b)+1 > maxFrame {
		return nil, fmt.Errorf("frame of %d bytes: %w", len(b)+1, errFrameLength)
	}
	return append(b, '\n'), nil
}

// A frameReader splits a stream into lines and buffers at most maxFrame bytes.
type frameReader struct{ r *bufio.Reader }

func newFrameReader(r io.Reader) *frameReader {
	return &frameReader{bufio.NewReaderSize(r, 4096)}
}

// next returns the next line without its newline; the caller owns it. io.EOF is an end between frames,
// io.ErrUnexpectedEOF one inside a frame.
func (f *frameReader) next() ([]byte, error) {
	var line []byte
	for {
		part, err := f.r.ReadSlice('\n')
		if len(line)+len(part) > maxFrame {
			return nil, errFrameLength
		}
		line = append(line, part...)
		switch {
		case err == nil:
			return line[:len(line)-1], nil
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF) && len(line) > 0:
			return nil, io.ErrUnexpectedEOF
		default:
			return nil, err
		}
	}
}

func decodeEvent(line []byte) (Event, error) {
	var e Event
	if err := DecodeStrict(line, &e); err != nil {
		return Event{}, fmt.Errorf("event frame: %w", err)
	}
	if err := e.check(); err != nil {
		return Event{}, fmt.Errorf("event frame: %w", err)
	}
	return e, nil
}

func (e *Event) check() error {
	if e.Kind == "" || len(e.Kind) > 64 || e.Step < 0 {
		return fmt.Errorf("kind of %d bytes (1 to 64 are allowed), step %d", len(e.Kind), e.Step)
	}
	return nil
}

func decodeCommand(line []byte) (command, error) {
	var c command
	if err := DecodeStrict(line, &c); err != nil {
		return command{}, fmt.Errorf("command frame: %w", err)
	}
	switch c.Kind {
	case commandHello:
		if c.Hello == nil {
			return command{}, errors.New("command frame: hello without its body")
		}
		if err := c.Hello.check(); err != nil {
			return command{}, fmt.Errorf("command frame: %w", err)
		}
	case commandStop, commandFailed, commandPeers, commandStatus:
	default:
		return command{}, fmt.Errorf("command frame: unknown kind %q", c.Kind)
	}
	return c, nil
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
