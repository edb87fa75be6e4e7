package launch

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
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
	rank, localRank int
	cmd             *exec.Cmd
	sharesCore      bool // with other ranks
	pid             int
	log             string
	conn            net.Conn
	commands        chan []byte   // read by send; a status command is sent only if it is empty, the others have room
	received        chan struct{} // closed after the last event
	relay           *relay

	mu     sync.Mutex
	reaped bool                    // guarded by mu: the system may have reused pid
	sent   map[syscall.Signal]bool // guarded by mu: signals sent by the launcher

	// Used by loop alone:
	evidence     evidence
	lastStep     int64
	addr         string // for ranks of other nodes; "": unknown
	ended        bool
	state        string           // why it cannot report; "" if unknown
	answer       *waits.WaitState // its answer to the current request
	awaiting     bool             // asked by poll, and has not answered
	lastAnswer   *waits.WaitState // its last answer to any request
	lastAnswerAt time.Time        // when it arrived
}

// A message passes from a child's goroutines to loop.
type message struct {
	child *child
	event *Event
	fault error      // of the channel
	exit  *exitState // a child's last message
}

type exitState struct {
	code   int            // -1: ended by a signal
	signal syscall.Signal // 0: exited
}

// start forks the worker on the caller's thread and starts its goroutines, which end with the process. The caller must
// receive from inbox until exit.
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
	if c.sharesCore {
		defer withTimerSlack()()
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

// receive passes the worker's events to loop, in order.
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
			c.keepStacks(e.Data) // here, so that loop does not wait for a disk
		case err == nil:
			inbox <- message{child: c, event: &e}
		case errors.Is(err, errFrameLength) || line != nil:
			inbox <- message{child: c, fault: err}
			return
		default: // the worker closed its end or is dead; reap reports it
			return
		}
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

// reap waits for the process, then for the rest of its output and events. Only then may loop judge the worker, since
// its reason may still be in the socket.
func (c *child) reap(inbox chan<- message) {
	awaitExit(c.cmd)
	c.mu.Lock()
	unix.Kill(-c.pid, unix.SIGKILL) // the worker's own subprocesses
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

// flush waits for the ends of the socket and the output. After the first deadline it stops copying to the console, so
// that a stopped terminal costs no line of the log. After the second it closes both: a process outside the worker's
// group must hold them.
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

// signal sends sig to the worker or its process group, unless it has been reaped.
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

const (
	maxLine   = 1 << 20 // bytes of a line on the console; the log file has all
	tailLines = 20      // of the first failed rank, printed at the end
	maxTail   = 4 << 10 // bytes of one of those lines
)

// crashLine matches the first line of a Go crash: a panic, a runtime error, or a fatal signal such as "SIGSYS: bad
// system call".
var crashLine = regexp.MustCompile(`^(panic|fatal error|SIG[A-Z0-9]{2,8}): `)

// reported starts lines for the log only: the launcher prints their text at the end of the job.
const reported = "cprun worker: failed: "

// LogFailure writes the reason of a failure to the worker's log only.
func LogFailure(err error) {
	fmt.Fprintln(os.Stderr, reported+strings.ReplaceAll(err.Error(), "\n", "\n"+reported))
}

// A relay copies one worker's output to its log file and, line by line, to the console or to the tail for a failure
// report. It removes terminal control characters, since users also read logs on a terminal.
type relay struct {
	src    *os.File
	log    *os.File
	con    *console
	prefix string
	show   bool
	// abandon is closed if the worker is dead and the console has not accepted its output. From then on only the log
	// gets it.
	abandon chan struct{}
	done    chan struct{} // closed at the end of src; the fields below are then safe to read

	tail   [][]byte
	crash  string // first line of a Go crash
	line   []byte // the current line, at most maxLine
	cut    int    // further bytes of the current line
	logErr error
}

// openLog opens a rank's log to append. Logs are private, since they may contain text of the corpus. A symbolic link is
// refused, since it could point anywhere.
func openLog(dir *os.Root, rank int) (*os.File, error) {
	f, err := files.Append(dir, logName(rank))
	if err != nil {
		return nil, fmt.Errorf("log of rank %d: %w", rank, err)
	}
	return f, nil
}

func logName(rank int) string { return fmt.Sprintf("rank-%04d.log", rank) }

// run copies until the end of the pipe. It never stops reading before, since a worker blocks when it cannot write.
func (r *relay) run() {
	defer close(r.done)
	defer func() { r.incomplete(r.log.Close()) }() // a network file system may report write errors at close
	defer r.src.Close()
	log := terminal.NewWriter(r.log)
	buf := make([]byte, 64<<10)
	for {
		n, err := r.src.Read(buf)
		if n > 0 {
			_, e := log.Write(buf[:n])
			r.incomplete(e)
			r.split(buf[:n])
		}
		if err != nil {
			break
		}
	}
	r.incomplete(log.Flush())
	if len(r.line)+r.cut > 0 {
		r.flush()
	}
}

// incomplete warns once that the log could not be written.
func (r *relay) incomplete(err error) {
	if err != nil && r.logErr == nil {
		r.logErr = err
		r.con.write(fmt.Appendf(nil, "cprun: log of %s is incomplete: %v\n", r.prefix, err), r.abandon)
	}
}

func (r *relay) split(b []byte) {
	for {
		i := bytes.IndexByte(b, '\n')
		if i < 0 {
			r.collect(b)
			return
		}
		r.collect(b[:i])
		r.flush()
		b = b[i+1:]
	}
}

func (r *relay) collect(b []byte) {
	n := min(len(b), maxLine-len(r.line))
	r.line = append(r.line, b[:n]...)
	r.cut += len(b) - n
}

func (r *relay) flush() {
	text := terminal.Line(r.line)
	if r.cut > 0 {
		text = fmt.Appendf(text, " [%d more bytes in the log]", r.cut)
	}
	if r.crash == "" && crashLine.Match(text) {
		r.crash = string(clip(text, maxTail))
	}
	r.line, r.cut = r.line[:0], 0
	if bytes.HasPrefix(text, []byte(reported)) {
		return
	}
	if r.show {
		r.con.write(fmt.Appendf(nil, "[%s] %s\n", r.prefix, text), r.abandon)
	}
	r.tail = append(r.tail, bytes.Clone(clip(text, maxTail)))
	if len(r.tail) > tailLines {
		r.tail = r.tail[1:]
	}
}

// ended returns the tail and the crash line, or nothing if the output was not read to its end.
func (r *relay) ended() (tail [][]byte, crash string) {
	select {
	case <-r.done:
		return r.tail, r.crash
	default:
		return nil, ""
	}
}

func clip(b []byte, n int) []byte {
	if len(b) <= n {
		return b
	}
	return bytes.ToValidUTF8(b[:n], nil)
}
