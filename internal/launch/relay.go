package launch

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
)

const (
	maxLine   = 1 << 20 // bytes of a line on the console; the log file has the rest
	tailLines = 20      // of the first failing rank, shown at the end
	maxTail   = 4 << 10 // bytes of one of those lines
)

// crashLine matches the first words of Go's runtime on a program's end: a panic, a fault of its own,
// or a signal that it does not survive, as in "SIGSYS: bad system call".
var crashLine = regexp.MustCompile(`^(panic|fatal error|SIG[A-Z0-9]{2,8}): `)

// reported begins lines of a worker that its launcher prints at the end of the job; they are for the log.
const reported = "cprun worker: failed: "

// LogFailure writes the reason of a failure to the worker's log alone.
func LogFailure(err error) {
	fmt.Fprintln(os.Stderr, reported+strings.ReplaceAll(err.Error(), "\n", "\n"+reported))
}

// relay takes the output of one worker: all of it to the log file, and line by line to the console
// or to the tail that is kept for the report of a failure. Both get it without the characters that a terminal
// obeys, since users also read logs on one.
type relay struct {
	src    *os.File
	log    *os.File
	con    *console
	prefix string
	show   bool
	// abandon is closed when the worker is dead and the console still has not taken its
	// output: after that only the log gets it.
	abandon chan struct{}
	done    chan struct{} // closed when src has ended; what follows is then safe to read

	tail   [][]byte
	crash  string // first line of what Go's runtime says of a crash
	line   []byte // of the current line, at most maxLine
	cut    int    // bytes of the current line beyond that
	logErr error
}

// openLog opens a rank's log to append. Logs are private, since they may hold text of the
// corpus; a link in their place is refused, since it could point anywhere.
func openLog(dir *os.Root, rank int) (*os.File, error) {
	f, err := files.Append(dir, logName(rank))
	if err != nil {
		return nil, fmt.Errorf("log of rank %d: %w", rank, err)
	}
	return f, nil
}

func logName(rank int) string { return fmt.Sprintf("rank-%04d.log", rank) }

// run ends with the pipe. It never stops reading before, since a worker that cannot write
// its output stands still.
func (r *relay) run() {
	defer close(r.done)
	defer func() { r.incomplete(r.log.Close()) }() // a network file system may tell of an error of a write then
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

// incomplete says, once, that the log could not be written.
func (r *relay) incomplete(err error) {
	if err != nil && r.logErr == nil {
		r.logErr = err
		r.con.write(fmt.Appendf(nil, "cprun: log of %s is incomplete: %v\n", r.prefix, err), r.abandon)
	}
}

// split cuts the bytes into lines.
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
		text = fmt.Appendf(text, " [%d bytes more in the log]", r.cut)
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

// ended returns the tail and the crash line, or nothing if the output could not be read to
// its end.
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
