package launch

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
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

	"github.com/cprun/cprun/internal/base/terminal"
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

	core        *int // to which it is pinned on a CPU, or nil
	stop        context.Context
	requestStop func()
	failed      chan Failed   // capacity 1: the launcher sends one
	peers       chan []string // as failed

	status atomic.Pointer[func() waits.WaitState] // set by OnStatus

	mu   sync.Mutex
	conn net.Conn // writes are guarded by mu
}

// Attach connects a worker to its launcher, and reports that it is ready.
//
// lost is called on its own goroutine when the launcher is dead. It must end the process at once: the other workers end
// as well.
//
// From then on SIGINT is ignored (Ctrl-C is for the launcher). SIGTERM, SIGUSR1 and SIGHUP ask this worker to stop,
// like the launcher's stop command.
func Attach(lost func(cause error)) (*Worker, error) {
	runID := os.Getenv(envRunID)
	if runID == "" || !isUnixStream(channelFD) {
		return nil, ErrNotLaunched
	}
	signal.Ignore(syscall.SIGINT)
	stop := make(chan os.Signal, 4)
	signal.Notify(stop, stopSignals()...)
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
	go func() { // ends with the process, as receive does
		for range stop {
			w.requestStop()
		}
	}()
	go w.receive(frames, lost)
	return w, w.Send(Event{Kind: EventReady})
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

// greet waits for the hello.
func greet(conn net.Conn, runID string) (*Worker, *bufio.Scanner, error) {
	frames := newFrames(conn)
	conn.SetReadDeadline(time.Now().Add(helloTime))
	if !frames.Scan() {
		return nil, nil, fmt.Errorf("hello: %w", cmp.Or(frames.Err(), io.ErrUnexpectedEOF))
	}
	conn.SetReadDeadline(time.Time{})
	var c command
	err := DecodeStrict(frames.Bytes(), &c)
	switch h := c.Hello; {
	case err != nil:
		return nil, nil, fmt.Errorf("command frame: %w", err)
	case h == nil:
		return nil, nil, fmt.Errorf("%q before the hello", frames.Bytes())
	case h.RunID != runID || len(h.Secret) != secretSize:
		return nil, nil, fmt.Errorf("hello of run %q, with a secret of %d bytes, in a process of run %q", h.RunID,
			len(h.Secret), runID)
	}
	w := &Worker{
		Process: c.Hello.Process, Secret: c.Hello.Secret, core: c.Hello.Core, conn: conn,
		failed: make(chan Failed, 1), peers: make(chan []string, 1),
	}
	w.stop, w.requestStop = context.WithCancel(context.Background())
	return w, frames, nil
}

// receive handles the launcher's commands. It ends with the channel.
func (w *Worker) receive(frames *bufio.Scanner, lost func(error)) {
	for frames.Scan() {
		var c command
		if err := DecodeStrict(frames.Bytes(), &c); err != nil {
			lost(fmt.Errorf("command frame of the launcher: %w", err))
			return
		}
		switch {
		case c.Stop != "":
			w.requestStop()
		case c.Tell:
			go w.answer(c) // ends by itself
		case c.Peers != nil:
			w.peers <- c.Peers
		case c.Failed != nil:
			w.failed <- *c.Failed
		}
	}
	lost(fmt.Errorf("launcher is gone: %w", cmp.Or(frames.Err(), errors.New("it has ended"))))
}

// Stop returns a channel that is closed at the first request to write a checkpoint and end. The ranks see it at
// different times and must agree on the step.
func (w *Worker) Stop() <-chan struct{} { return w.stop.Done() }

// Failed describes the first failed rank known to the launcher.
type Failed struct {
	Rank   int    `json:"rank"`             // -1: no single rank
	Reason string `json:"reason,omitempty"` // "": the ranks learn it from each other
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
	frame, err := encodeFrame(e)
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

// Fail reports why this worker is about to exit with a status other than 0: Cause, Remote, TimedOut, Phase, Step and
// WaitState. The launcher adds the rest.
func (w *Worker) Fail(f Failure) error {
	f.Cause = terminal.Clip(f.Cause, maxReport)
	return w.SendData(EventFailed, f.Step, f)
}

// Done reports that all work is done: the worker is about to exit with status 0.
func (w *Worker) Done() error { return w.Send(Event{Kind: EventDone}) }

// Stopped reports a complete checkpoint of step: the worker is about to exit with status 0, on request.
func (w *Worker) Stopped(step int64) error { return w.Send(Event{Kind: EventStopped, Step: step}) }

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
	if w.SendData(EventStatus, 0, s) != nil || !c.Stacks {
		return
	}
	buf := make([]byte, maxStacks)
	buf = buf[:runtime.Stack(buf, true)]
	_ = w.SendData(EventStacks, 0, string(bytes.ToValidUTF8(buf, nil)))
}
