package launch

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"sync"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
)

// maxWaiting bounds the queued events before progress events are dropped. A stopped terminal must neither stop training
// nor fill the memory.
const maxWaiting = 4096

// A console prints to the launcher's stderr and calls the caller's functions, in order, on its own goroutine.
type console struct {
	w    io.Writer
	room chan struct{} // one for each queued line of a worker
	done chan struct{}

	mu      sync.Mutex
	wake    *sync.Cond
	waiting []func() // guarded by mu
	closed  bool     // guarded by mu
}

func newConsole(w io.Writer) *console {
	c := &console{w: w, room: make(chan struct{}, 32), done: make(chan struct{})}
	c.wake = sync.NewCond(&c.mu)
	go c.run() // ended by close, which waits for it
	return c
}

// put queues a call. A droppable call is dropped if too many wait.
func (c *console) put(droppable bool, call func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if droppable && len(c.waiting) >= maxWaiting {
		return
	}
	c.waiting = append(c.waiting, call)
	c.wake.Signal()
}

// write queues text. It waits for room until abandon is closed. Loop must not wait: it uses put.
func (c *console) write(text string, abandon <-chan struct{}) {
	select {
	case c.room <- struct{}{}:
		c.put(false, func() {
			io.WriteString(c.w, text) // an error does not affect the job
			<-c.room
		})
	case <-abandon:
	}
}

func (c *console) run() {
	defer close(c.done)
	for {
		c.mu.Lock()
		for len(c.waiting) == 0 && !c.closed {
			c.wake.Wait()
		}
		batch := c.waiting
		c.waiting = nil
		c.mu.Unlock()
		if len(batch) == 0 {
			return
		}
		for _, call := range batch {
			call()
		}
	}
}

// close waits for the queued calls.
func (c *console) close() {
	c.mu.Lock()
	c.closed = true
	c.wake.Signal()
	c.mu.Unlock()
	<-c.done
}

const (
	maxLine   = 64 << 10 // bytes of a line on the console; the log file has all
	tailLines = 20       // of the first failed rank, printed at the end
	maxTail   = 4 << 10  // bytes of one of those lines
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

	tail   []string
	crash  string // first line of a Go crash
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
	defer func() { r.incomplete(log.Flush()) }()
	lines := bufio.NewReaderSize(io.TeeReader(r.src, logWriter{r, log}), maxLine)
	for {
		line, more, err := lines.ReadLine()
		if err != nil {
			return
		}
		text, cut := terminal.Line(string(line)), 0
		for more && err == nil {
			line, more, err = lines.ReadLine()
			cut += len(line)
		}
		if cut > 0 {
			text += fmt.Sprintf(" [%d more bytes in the log]", cut)
		}
		r.pass(text)
	}
}

// A logWriter writes a relay's log. An error does not end the relay.
type logWriter struct {
	r   *relay
	log *terminal.Writer
}

func (w logWriter) Write(b []byte) (int, error) {
	_, err := w.log.Write(b)
	w.r.incomplete(err)
	return len(b), nil
}

// incomplete warns once that the log could not be written.
func (r *relay) incomplete(err error) {
	if err != nil && r.logErr == nil {
		r.logErr = err
		r.con.write(fmt.Sprintf("cprun: log of %s is incomplete: %v\n", r.prefix, err), r.abandon)
	}
}

// pass passes a line to the console or the tail.
func (r *relay) pass(text string) {
	if r.crash == "" && crashLine.MatchString(text) {
		r.crash = terminal.Clip(text, maxTail)
	}
	if strings.HasPrefix(text, reported) {
		return
	}
	if r.show {
		r.con.write(fmt.Sprintf("[%s] %s\n", r.prefix, text), r.abandon)
		return
	}
	r.tail = append(r.tail, terminal.Clip(text, maxTail))
	if len(r.tail) > tailLines {
		r.tail = r.tail[1:]
	}
}

// ended returns the tail and the crash line, or nothing if the output was not read to its end.
func (r *relay) ended() (tail []string, crash string) {
	select {
	case <-r.done:
		return r.tail, r.crash
	default:
		return nil, ""
	}
}
