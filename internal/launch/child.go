package launch

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/launch/standing"
)

// flushTime bounds the wait for the ends of a dead worker's pipe and socket. They end
// with it unless a process of its own has left its group and still holds them.
const flushTime = 3 * time.Second

// A child is the launcher's side of one worker.
type child struct {
	rank, localRank int
	cmd             *exec.Cmd
	shares          bool // its core with other ranks
	pid             int
	log             string
	conn            net.Conn
	commands        chan []byte   // read by send; tell is sent when it is empty, the others have room
	received        chan struct{} // closed when no event can come any more
	relay           *relay

	mu     sync.Mutex
	reaped bool                    // guarded by mu: the system may have given pid to another process
	sent   map[syscall.Signal]bool // guarded by mu: signals of ours

	// What follows belongs to loop.
	seen     seen
	lastStep int64
	addr     string // at which ranks of other nodes reach it; "": not known
	ended    bool
	state    string             // why it cannot report; "" if not known
	told     *standing.Standing // its answer to the current inquiry
	asked    bool               // by look, and has not answered
	glimpse  *standing.Standing // its last answer, to whatever request
	glimpsed time.Time          // when it came
}

// A message goes from the goroutines of a child to loop.
type message struct {
	child *child
	event *Event
	fault error      // of the channel
	exit  *exitState // the last message of a child
}

type exitState struct {
	code   int            // -1: signalled
	signal syscall.Signal // 0: exited
}

// start forks the worker, on the caller's thread, and starts its goroutines, which end when
// the process has. inbox is received from until exit has come.
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
	conn, err := net.FileConn(ours)
	if err != nil {
		out.Close()
		return fmt.Errorf("socket pair: %w", err)
	}
	c.cmd.Stdout, c.cmd.Stderr = in, in
	c.cmd.ExtraFiles = []*os.File{theirs} // becomes channelFD
	c.cmd.SysProcAttr = grouped()
	if c.shares {
		defer rarelyWoken()()
	}
	if err := c.cmd.Start(); err != nil {
		out.Close()
		conn.Close()
		return fmt.Errorf("start process: %w", err)
	}
	c.pid, c.conn, c.relay.src = c.cmd.Process.Pid, conn, out
	c.sent = map[syscall.Signal]bool{}
	c.received = make(chan struct{})
	c.commands = make(chan []byte, commandKinds+1)
	c.commands <- greeting
	go c.relay.run()
	go c.receive(inbox)
	go c.send()
	go c.reap(inbox)
	return nil
}

// socketPair returns two connected sockets that no other process inherits by chance.
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

// receive passes the events on, in order.
func (c *child) receive(inbox chan<- message) {
	defer close(c.received)
	frames := newFrameReader(c.conn)
	for {
		line, err := frames.next()
		var e Event
		if err == nil {
			e, err = decodeEvent(line)
		}
		switch {
		case err == nil && e.Kind == EventStacks:
			c.keepStacks(e.Data) // not on loop, which must not wait for a disk
		case err == nil:
			inbox <- message{child: c, event: &e}
		case errors.Is(err, errFrameLength) || line != nil:
			inbox <- message{child: c, fault: err}
			return
		default: // the worker has closed its end or is dead; reap says which
			return
		}
	}
}

// send writes the commands to the worker. A worker that does not read does not delay the others.
func (c *child) send() {
	for frame := range c.commands {
		if _, err := c.conn.Write(frame); err != nil {
			return
		}
	}
}

// reap waits for the process and then for the rest of its output and events. Only then may loop judge
// the worker, since its reason may still be in the socket when it is dead.
func (c *child) reap(inbox chan<- message) {
	awaitExit(c.cmd)
	c.mu.Lock()
	unix.Kill(-c.pid, unix.SIGKILL) // the worker's own child processes
	c.cmd.Wait()
	c.reaped = true
	c.mu.Unlock()

	c.flush()
	c.conn.Close()
	status := c.cmd.ProcessState.Sys().(syscall.WaitStatus)
	exit := exitState{code: status.ExitStatus()}
	if status.Signaled() {
		exit = exitState{code: -1, signal: status.Signal()}
	}
	inbox <- message{child: c, exit: &exit}
}

// flush waits for the ends of the socket and of the output. After the first deadline it
// stops copying to the console, so that a stopped terminal costs no line of the log. After the second,
// a process outside the worker's group must hold them, and flush closes them.
func (c *child) flush() {
	wait := func(ended <-chan struct{}) bool {
		deadline := time.NewTimer(flushTime)
		defer deadline.Stop()
		select {
		case <-ended:
			return true
		case <-deadline.C:
			return false
		}
	}
	if !wait(c.received) {
		c.conn.Close()
		<-c.received
	}
	if !wait(c.relay.done) {
		close(c.relay.abandon)
		if !wait(c.relay.done) {
			c.relay.src.Close()
			wait(c.relay.done)
		}
	}
}

// signal sends to the worker, or to its whole group, unless it has been reaped.
func (c *child) signal(sig syscall.Signal, group bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reaped {
		return
	}
	c.sent[sig] = true
	pid := c.pid
	if group {
		pid = -pid
	}
	unix.Kill(pid, sig)
}

func (c *child) sentSignal(sig syscall.Signal) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sent[sig]
}
