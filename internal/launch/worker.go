package launch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/launch/waits"
)

const (
	// channelFD is the first descriptor after the standard three; see exec.Cmd.ExtraFiles.
	channelFD = 3
	// helloTime bounds the wait for the hello, which the launcher writes at once.
	helloTime = 30 * time.Second
	// maxReport bounds the error text of a worker.
	maxReport = 64 << 10
)

// ErrNotLaunched is the error of Attach in a process that no launcher started.
var ErrNotLaunched = errors.New("this is cprun's own worker mode, which only cprun itself starts; " +
	"run: cprun train.yaml")

// Secret is the key of one job, 32 bytes. It is not printed.
type Secret []byte

// Format hides the secret for every verb.
func (Secret) Format(f fmt.State, _ rune) { fmt.Fprint(f, "(secret)") }

// MarshalJSON hides it from files.
func (Secret) MarshalJSON() ([]byte, error) { return []byte(`"(secret)"`), nil }

// Process describes one worker of a job. Its launcher sends it.
type Process struct {
	RunID          string `json:"run_id"`
	Rank           int    `json:"rank"`       // among all nodes
	WorldSize      int    `json:"world_size"` // of all nodes
	LocalRank      int    `json:"local_rank"` // on this node
	LocalWorldSize int    `json:"local_world_size"`
	NodeRank       int    `json:"node_rank"`
	Node           string `json:"node"`       // name of the node, for messages
	Device         int    `json:"device"`     // number of its GPU among the visible GPUs
	Restart        int    `json:"restart"`    // restarts of the job so far
	SocketDir      string `json:"socket_dir"` // private to the job; names in it may have 40 bytes
	// Listen is the address of this host for ranks of other nodes; "": there is one node.
	Listen  string   `json:"listen,omitempty"`
	Hosts   []string `json:"hosts,omitempty"` // host of each rank; nil: all share one
	Payload []byte   `json:"payload"`         // Job.Payload
}

// Worker is a worker's connection to its launcher. Its methods may be called from any goroutine.
type Worker struct {
	Process
	Secret Secret // authenticates the workers to each other

	core     *int // to which it is pinned on a CPU, or nil
	conn     net.Conn
	stop     chan struct{}
	failed   chan Failed   // capacity 1
	peers    chan []string // capacity 1
	stopOnce sync.Once
	signals  chan os.Signal

	status  atomic.Pointer[func() waits.WaitState] // set by OnStatus
	dumping atomic.Bool                            // stacks are being sent

	mu     sync.Mutex
	closed bool // guarded by mu
}

// Attach connects a worker to its launcher, and reports that it is ready.
//
// lost is called on its own goroutine when the launcher is dead. It must end the process at once: the other workers end
// as well.
//
// From then on SIGINT is ignored (Ctrl-C is for the launcher). SIGTERM, SIGUSR1 and SIGHUP ask this worker to stop,
// like the launcher's stop command.
func Attach(lost func(cause error)) (*Worker, error) {
	if lost == nil {
		return nil, errors.New("attach: no function for the loss of the launcher")
	}
	runID := os.Getenv(envRunID)
	if runID == "" || !isUnixStream(channelFD) {
		return nil, ErrNotLaunched
	}
	file := os.NewFile(channelFD, "launcher")
	conn, err := net.FileConn(file) // a copy, closed on exec
	file.Close()
	if err != nil {
		return nil, fmt.Errorf("channel to the launcher: %w", err)
	}
	w, frames, err := greet(conn, runID)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("channel to the launcher: %w", err)
	}
	signal.Ignore(syscall.SIGINT)
	sigs := []os.Signal{syscall.SIGTERM, syscall.SIGUSR1}
	if !signal.Ignored(syscall.SIGHUP) {
		sigs = append(sigs, syscall.SIGHUP)
	}
	signal.Notify(w.signals, sigs...)
	go w.receive(frames, lost) // ended by the end of the channel
	go w.onSignals()           // ended by Close
	if err := w.Send(Event{Kind: EventReady}); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

// isUnixStream distinguishes the launcher's socket from another use of the descriptor: the Go runtime opens descriptors
// before main.
func isUnixStream(fd int) bool {
	addr, err := unix.Getsockname(fd)
	if _, local := addr.(*unix.SockaddrUnix); err != nil || !local {
		return false
	}
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	return err == nil && kind == unix.SOCK_STREAM
}

func greet(conn net.Conn, runID string) (*Worker, *frameReader, error) {
	frames := newFrameReader(conn)
	conn.SetReadDeadline(time.Now().Add(helloTime))
	line, err := frames.next()
	if err != nil {
		return nil, nil, fmt.Errorf("hello: %w", err)
	}
	conn.SetReadDeadline(time.Time{})
	c, err := decodeCommand(line)
	switch {
	case err != nil:
		return nil, nil, err
	case c.Kind != commandHello:
		return nil, nil, fmt.Errorf("%s before the hello", c.Kind)
	case c.Hello.RunID != runID:
		return nil, nil, fmt.Errorf("hello of run %q in a process of run %q", c.Hello.RunID, runID)
	}
	h := c.Hello
	return &Worker{
		Process: h.Process, Secret: h.Secret, core: h.Core,
		conn: conn, stop: make(chan struct{}), failed: make(chan Failed, 1), peers: make(chan []string, 1),
		signals: make(chan os.Signal, 4),
	}, frames, nil
}

func (w *Worker) receive(frames *frameReader, lost func(error)) {
	for {
		line, err := frames.next()
		var c command
		if err == nil {
			c, err = decodeCommand(line)
		}
		if err == nil && c.Kind == commandHello {
			err = fmt.Errorf("second %s", c.Kind)
		}
		if err != nil {
			w.mu.Lock()
			closed := w.closed
			w.mu.Unlock()
			if errors.Is(err, io.EOF) {
				err = errors.New("it has ended")
			}
			if !closed {
				lost(fmt.Errorf("launcher is gone: %w", err))
			}
			return
		}
		switch c.Kind {
		case commandStop:
			w.requestStop()
		case commandStatus:
			go w.answer(c) // ends by itself
		case commandPeers:
			select {
			case w.peers <- c.Addrs:
			default: // one value is enough
			}
		case commandFailed:
			select {
			case w.failed <- Failed{c.Rank, c.Reason}:
			default:
			}
		}
	}
}

func (w *Worker) onSignals() {
	for range w.signals {
		w.requestStop()
	}
}

func (w *Worker) requestStop() { w.stopOnce.Do(func() { close(w.stop) }) }

// Stop returns a channel that is closed at the first request to write a checkpoint and end. The ranks see it at
// different times and must agree on the step.
func (w *Worker) Stop() <-chan struct{} { return w.stop }

// Failed describes the first failed rank known to the launcher.
type Failed struct {
	Rank   int    // -1: no single rank
	Reason string // "": the ranks learn it from each other
}

// Failed returns a channel that gets the first failed rank. Connected ranks learn of it from each other, and sooner.
// The channel is for ranks that are not connected yet, or whose peers died silently.
func (w *Worker) Failed() <-chan Failed { return w.failed }

// Listening reports the address, "host:port", at which ranks of other nodes connect to this one.
func (w *Worker) Listening(addr string) error { return w.SendData(EventListening, 0, addr) }

// Peers returns a channel that gets the addresses of all ranks once all listen; "" is a rank of this node.
func (w *Worker) Peers() <-chan []string { return w.peers }

// Send sends an event to the launcher. It returns after the kernel has the event, so that it arrives even if the
// process ends at once.
func (w *Worker) Send(e Event) error {
	err := e.check()
	var frame []byte
	if err == nil {
		frame, err = encodeFrame(e)
	}
	if err != nil {
		return fmt.Errorf("event %q: %w", e.Kind, err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, err := w.conn.Write(frame); err != nil {
		return fmt.Errorf("event %q to the launcher: %w", e.Kind, err)
	}
	return nil
}

// SendData sends like Send, with data that is marshalled to JSON.
func (w *Worker) SendData(kind string, step int64, data any) error {
	raw, err := json.Marshal(data)
	if err != nil {
		return fmt.Errorf("event %q: %w", kind, err)
	}
	return w.Send(Event{Kind: kind, Step: step, Data: raw})
}

// Fail reports why this worker is about to exit with a status other than 0.
func (w *Worker) Fail(r FailureReport) error {
	r.Error, r.Step = string(clip([]byte(r.Error), maxReport)), max(r.Step, 0)
	return w.SendData(EventFailed, r.Step, r)
}

// Done reports that all work is done: the worker is about to exit with status 0.
func (w *Worker) Done() error { return w.Send(Event{Kind: EventDone}) }

// Stopped reports a complete checkpoint of step: the worker is about to exit with status 0, on request.
func (w *Worker) Stopped(step int64) error { return w.Send(Event{Kind: EventStopped, Step: step}) }

// Close ends the connection; lost is not called afterwards. A worker that exits need not call it.
func (w *Worker) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil
	}
	w.closed = true
	signal.Stop(w.signals)
	close(w.signals)
	return w.conn.Close()
}

// maxStacks bounds the sent stacks: some hundred goroutines, and half a frame when quoted.
const maxStacks = 256 << 10

// OnStatus sets f, which is called on its own goroutine when the launcher requests this worker's work and waits. f must
// not block.
func (w *Worker) OnStatus(f func() waits.WaitState) { w.status.Store(&f) }

// answer sends this worker's waits and, on request, the stacks of its goroutines, which stops all of them for a moment.
// receive detects a dead launcher.
func (w *Worker) answer(c command) {
	var s waits.WaitState
	if f := w.status.Load(); f != nil {
		s = (*f)()
	}
	if w.SendData(EventStatus, 0, s) != nil || !c.Stacks || !w.dumping.CompareAndSwap(false, true) {
		return
	}
	defer w.dumping.Store(false)
	buf := make([]byte, maxStacks)
	buf = buf[:runtime.Stack(buf, true)]
	_ = w.SendData(EventStacks, 0, string(bytes.ToValidUTF8(buf, nil)))
}
