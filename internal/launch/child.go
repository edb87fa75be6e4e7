package launch

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/launch/waits"
)

// flushTime bounds the wait for the ends of a dead worker's pipe and socket. Only a subprocess that left the worker's
// process group can hold them open.
const flushTime = 3 * time.Second

// A child is the launcher's side of one worker.
type child struct {
	rank       int
	cmd        *exec.Cmd
	sharesCore bool // with other ranks
	pid        int
	log        string
	conn       net.Conn
	commands   chan []byte   // read by send; a status command is sent only if it is empty, the others have room
	received   chan struct{} // closed after the last event
	relay      *relay
	dead       atomic.Bool // it has ended, perhaps before the launcher's next signal

	// Used by loop alone:
	evidence evidence
	lastStep int64
	addr     string // for ranks of other nodes; "": unknown
	ended    bool   // reaped, or never started
	sent     []syscall.Signal
	attached bool
	killed   string           // its state when the launcher killed it; "": it did not
	awaiting bool             // asked for its waits, and has not answered
	answer   *waits.WaitState // its last answer
	answered time.Time
}

// A message passes from a child's goroutines to loop. Without event and fault it is the last: the child has ended.
type message struct {
	child *child
	event *Event
	fault error // of the channel
}

// newChild prepares a worker. An error is the launcher's own.
func (t *attempt) newChild(local int) (*child, []byte, error) {
	l, s := t.nodeLauncher, &t.Start
	h := hello{
		Process: Process{
			RunID: cmp.Or(s.RunID, l.job.RunID), Rank: s.Ranks.FirstRank + local, WorldSize: s.Ranks.WorldSize,
			LocalRank: local, LocalWorldSize: l.job.NProc, NodeRank: s.Ranks.NodeRank, Node: l.job.Node,
			Device: l.job.Device + local, Restart: s.Number, SocketDir: t.dir.path, Listen: s.Listen, Hosts: s.Hosts,
			Payload: s.Payload,
		},
		Interface: l.job.Interface, Secret: s.Secret,
	}
	h.Core = h.chooseCore(os.Getenv(envMaxProcs) != "")
	greeting, err := encodeFrame(command{Hello: &h})
	if err != nil {
		return nil, nil, err
	}
	log, err := openLog(s.Logs, h.Rank)
	if err != nil {
		return nil, nil, err
	}
	if info, err := log.Stat(); err == nil && info.Size() > 0 {
		fmt.Fprintf(log, "\n--- run %s, restart %d, %s ---\n", h.RunID, s.Number, time.Now().UTC().Format(time.RFC3339))
	}
	cmd := exec.Command(l.program, l.job.Argv...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = workerEnv(os.Environ(), h)
	return &child{
		rank: h.Rank, cmd: cmd, sharesCore: h.Core != nil,
		log: terminal.Name(filepath.Join(s.Logs.Name(), logName(h.Rank))),
		relay: &relay{
			log: log, con: l.con, prefix: fmt.Sprintf("rank %d", h.Rank),
			show:    l.job.Show == ShowAll || l.job.Show == ShowFirst && h.Rank == 0,
			abandon: make(chan struct{}), done: make(chan struct{}),
		},
	}, greeting, nil
}

// start forks the worker on the caller's thread and starts its goroutines, which end with the process. The caller must
// receive from inbox until the last message.
func (c *child) start(greeting []byte, inbox chan<- message) error {
	ours, theirs, err := socketPair()
	if err != nil {
		return fmt.Errorf("socket pair: %w", err)
	}
	defer ours.Close()
	defer theirs.Close()
	out, in, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("pipe: %w", err)
	}
	defer in.Close()
	if c.conn, err = net.FileConn(ours); err != nil {
		out.Close()
		return fmt.Errorf("socket pair: %w", err)
	}
	c.cmd.Stdout, c.cmd.Stderr = in, in
	c.cmd.ExtraFiles = []*os.File{theirs} // becomes channelFD
	c.cmd.SysProcAttr = grouped()
	if c.sharesCore {
		defer withTimerSlack()()
	}
	if err := c.cmd.Start(); err != nil {
		out.Close()
		c.conn.Close()
		return fmt.Errorf("start process: %w", err)
	}
	c.pid, c.relay.src = c.cmd.Process.Pid, out
	c.received = make(chan struct{})
	c.commands = make(chan []byte, commandKinds+1)
	c.commands <- greeting
	go c.relay.run()
	go c.receive(inbox)
	go c.send()
	go c.awaitEnd(inbox)
	return nil
}

// socketPair returns two connected sockets that no other subprocess inherits.
func socketPair() (ours, theirs *os.File, err error) {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return nil, nil, err
	}
	unix.CloseOnExec(fds[0])
	unix.CloseOnExec(fds[1])
	return os.NewFile(uintptr(fds[0]), "launcher"), os.NewFile(uintptr(fds[1]), "worker"), nil
}

// receive passes the worker's events to loop, in order, until the worker closes its end or is dead.
func (c *child) receive(inbox chan<- message) {
	defer close(c.received)
	frames := newFrames(c.conn)
	for frames.Scan() {
		var e Event
		if err := DecodeStrict(frames.Bytes(), &e); err != nil {
			inbox <- message{child: c, fault: fmt.Errorf("event frame: %w", err)}
			return
		}
		if e.Kind == EventStacks {
			c.keepStacks(e.Data) // here, so that loop does not wait for a disk
		} else {
			inbox <- message{child: c, event: &e}
		}
	}
	if err := frames.Err(); errors.Is(err, bufio.ErrTooLong) {
		inbox <- message{child: c, fault: fmt.Errorf("event frame of more than %d bytes: %w", maxFrame, err)}
	}
}

// keepStacks appends a worker's goroutine stacks to its log.
func (c *child) keepStacks(data json.RawMessage) {
	var text string
	if json.Unmarshal(data, &text) != nil {
		return
	}
	_, err := fmt.Fprintf(c.relay.log, "--- stacks of rank %d, %s ---\n%s\n--- end of the stacks ---\n", c.rank,
		time.Now().UTC().Format(time.RFC3339), terminal.Text(text))
	if err != nil && !errors.Is(err, os.ErrClosed) {
		c.relay.con.write(fmt.Sprintf("cprun: stacks of rank %d are not in its log: %v\n", c.rank, err),
			c.relay.abandon)
	}
}

// send writes the commands to the worker, so that a slow worker does not delay the others.
func (c *child) send() {
	for frame := range c.commands {
		if _, err := c.conn.Write(frame); err != nil {
			return
		}
	}
}

// awaitEnd waits for the end of the process, then for the rest of its output and events. Only then may loop judge the
// worker, since its reason may still be in the socket.
func (c *child) awaitEnd(inbox chan<- message) {
	awaitExit(c.cmd)
	c.dead.Store(true)
	unix.Kill(-c.pid, unix.SIGKILL) // the worker's own subprocesses
	c.flush(flushTime)
	c.conn.Close()
	inbox <- message{child: c}
}

// flush waits for the ends of the socket and the output. After limit it stops copying to the console, so that a stopped
// terminal costs no line of the log. Then it closes both: a process outside the worker's group must hold them.
func (c *child) flush(limit time.Duration) {
	now := time.Now()
	c.conn.SetReadDeadline(now.Add(limit))
	c.relay.src.SetReadDeadline(now.Add(2 * limit))
	late := time.AfterFunc(limit, func() { close(c.relay.abandon) })
	defer late.Stop()
	ctx, cancel := context.WithDeadline(context.Background(), now.Add(3*limit))
	defer cancel()
	for _, ended := range []chan struct{}{c.received, c.relay.done} {
		select {
		case <-ended:
		case <-ctx.Done(): // the disk of the log hangs
		}
	}
}

// reap returns how the process ended. Its id and group were its own until now.
func (c *child) reap() syscall.WaitStatus {
	_ = c.cmd.Wait() // awaitExit may have done so
	return c.cmd.ProcessState.Sys().(syscall.WaitStatus)
}

// signal sends sig to the worker's process group.
func (c *child) signal(sig syscall.Signal) {
	if !c.ended && !c.dead.Load() {
		c.sent = append(c.sent, sig)
		unix.Kill(-c.pid, sig)
	}
}

// kill ends a worker, and keeps its state for the table of waits.
func (c *child) kill() {
	c.killed = cmp.Or(c.killed, c.observe())
	c.signal(unix.SIGKILL)
}

// endedByUs reports whether the launcher killed the worker, or asked it to end before it exited with an error.
func (c *child) endedByUs(exit syscall.WaitStatus) bool {
	return exit.Signaled() && slices.Contains(c.sent, exit.Signal()) ||
		exit.ExitStatus() > 0 && slices.Contains(c.sent, unix.SIGTERM)
}

// post sends a frame to a live worker. Each kind but the status is sent at most once, so there is room.
func (c *child) post(frame []byte) {
	if !c.ended {
		c.commands <- frame
	}
}

// States of ranks that give no account of themselves.
const (
	stateStarts  = "starts"
	stateStopped = "is stopped by a signal or a debugger"
	stateKernel  = "does not answer, and waits in the kernel"
	stateSilent  = "does not answer"
	stateEnded   = "has ended"
)

// observe returns why a worker may not answer.
func (c *child) observe() string {
	switch state := state(c.pid); {
	case c.killed != "":
		return c.killed
	case state == 'T' || state == 't':
		return stateStopped
	case c.ended || state == 'Z' || state == 'X':
		return stateEnded
	case state == 'D':
		return stateKernel
	case !c.attached:
		return stateStarts
	}
	return stateSilent
}

// state returns the kernel's state of a process, such as 'T' for stopped; 0: unknown.
func state(pid int) byte {
	stat, err := files.Read(fmt.Sprintf("/proc/%d/stat", pid), maxKernelFile)
	_, state, ok := bytes.Cut(stat, []byte(") ")) // after its name, which may contain anything
	if err != nil || !ok || len(state) == 0 {
		return 0
	}
	return state[0]
}

func (c *child) answeredSince(since time.Time) bool {
	return c.answer != nil && !c.answered.Before(since)
}

func (c *child) working() bool { return !c.ended && c.evidence.finished == "" }

// stoppedEarly reports that a request to stop killed a worker before it could handle one.
func (c *child) stoppedEarly() bool {
	asks := slices.Contains(stopSignals(unix.SIGINT), os.Signal(c.evidence.exit.Signal()))
	return c.ended && asks && !c.attached && !c.evidence.endedByUs
}
