package launch

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const (
	maxLine   = 1 << 20 // bytes of a line on the console; the log file has the rest
	tailLines = 20      // of the first failing rank, shown at the end
	maxTail   = 4 << 10 // bytes of one of those lines
)

// relay takes the output of one worker: all of it, as it is, to the log file, and line by
// line, sanitised, to the console or to the tail that is kept for the report of a failure.
type relay struct {
	src    *os.File
	log    *os.File
	con    *console
	prefix string
	show   bool
	// abandon is closed when the worker is dead and the console still has not taken its
	// output: from then on the log gets it alone.
	abandon chan struct{}
	done    chan struct{} // closed when src has ended; what follows is then safe to read

	tail   [][]byte
	crash  string // first line of a Go panic or fatal error
	line   []byte // of the current line, at most maxLine
	cut    int    // bytes of the current line beyond that
	logErr error
}

// openLog opens a rank's log to append. Logs are private, since they may hold text of the
// corpus; a link in their place is refused, since it could point anywhere.
func openLog(dir string, rank int) (*os.File, error) {
	path := filepath.Join(dir, fmt.Sprintf("rank-%04d.log", rank))
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, fmt.Errorf("log of rank %d: %w", rank, err)
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("log of rank %d: %w", rank, err)
	}
	return f, nil
}

// run ends with the pipe. It never stops reading before, since a worker that cannot write
// its output stands still.
func (r *relay) run() {
	defer close(r.done)
	defer r.log.Close()
	defer r.src.Close()
	buf := make([]byte, 64<<10)
	for {
		n, err := r.src.Read(buf)
		if n > 0 {
			if _, e := r.log.Write(buf[:n]); e != nil && r.logErr == nil {
				r.logErr = e
				r.con.write(fmt.Appendf(nil, "cprun: log of %s is incomplete: %v\n", r.prefix, e), r.abandon)
			}
			r.split(buf[:n])
		}
		if err != nil {
			break
		}
	}
	if len(r.line)+r.cut > 0 {
		r.flush()
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
	text := sanitize(r.line)
	if r.cut > 0 {
		text = fmt.Appendf(text, " [%d bytes more in the log]", r.cut)
	}
	if r.crash == "" && (bytes.HasPrefix(text, []byte("panic: ")) || bytes.HasPrefix(text, []byte("fatal error: "))) {
		r.crash = string(clip(text, maxTail))
	}
	if r.show {
		r.con.write(fmt.Appendf(nil, "[%s] %s\n", r.prefix, text), r.abandon)
	}
	r.tail = append(r.tail, bytes.Clone(clip(text, maxTail)))
	if len(r.tail) > tailLines {
		r.tail = r.tail[1:]
	}
	r.line, r.cut = r.line[:0], 0
}

// ended returns the tail and the crash line, or nothing where the output could not be read to
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
