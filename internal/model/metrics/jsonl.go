package metrics

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
	"time"

	"github.com/cprun/cprun/internal/base/files"
)

const (
	// MaxJSONL bounds a metrics.jsonl to read, in bytes: three million steps.
	MaxJSONL = 1 << 30
	// maxLine bounds a line of metrics or of a trace in bytes. Lines of a run have about 500.
	maxLine = 64 << 10
	// maxForeign bounds the lines without a step. A file with more of them is of another kind; a crash leaves one.
	maxForeign = 1000
)

// JSONL appends steps to a file of JSON lines. Each line is one write, so that a reader (tail -f) never sees half a
// line, and a killed run loses no line, except lines that a full disk keeps in memory. JSONL writes a removed file
// again, completely.
type JSONL struct {
	f    appender
	dir  *os.Root
	name string
	warn func(string)
	buf  bytes.Buffer
}

// OpenJSONL opens a file of a run directory for the steps after resumed. It drops lines of later steps, which the
// resumed run repeats, and a line torn by a crash, so that the file has each step once. It writes a new file and
// renames it, so that a crash leaves the old or the new one. It refuses another kind of file. dir must stay open as
// long as the file. JSONL calls warn, unless nil, if the file was removed or the disk is full.
func OpenJSONL(dir *os.Root, name string, resumed int64, warn func(string)) (*JSONL, error) {
	if warn == nil {
		warn = func(string) {}
	}

	d, err := files.Create(dir, name)
	if err != nil {
		return nil, fmt.Errorf("metrics file: %w", err)
	}
	err = copyJSONL(d, dir, name, resumed)
	if err == nil {
		err = d.Sync()
	}
	if err == nil {
		err = d.Rename()
	}
	if err == nil { // a checkpoint relies on Sync for the file and its name
		err = files.Sync(dir)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("metrics of the steps before %d: %w", resumed+1, err), d.Discard())
	}
	full := func() {
		warn(name + ": no space left on device; new lines stay in memory until there is room: free space there")
	}
	return &JSONL{f: appender{File: d.File, full: full}, dir: dir, name: name, warn: warn}, nil
}

// restore writes the file again if its name is gone. It fails if another file has the name, since the run would log to
// a file without a name.
func (j *JSONL) restore() error {
	now, err := j.dir.Stat(j.name)
	if err == nil {
		mine, err := j.f.Stat()
		if err == nil && !os.SameFile(now, mine) {
			err = fmt.Errorf("%s is another file than the run writes; give it another name", j.name)
		}
		return err
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	d, err := files.Create(j.dir, j.name)
	if err != nil {
		return err
	}
	if _, err = j.f.Seek(0, io.SeekStart); err == nil {
		_, err = io.Copy(d, j.f.File)
	}
	if err == nil {
		err = d.Rename()
	}
	if err != nil {
		return errors.Join(err, d.Discard())
	}
	j.warn(j.name + " was removed while the run writes it; it is written again, with all steps")
	old := j.f.File
	j.f.File = d.File
	return old.Close()
}

// Write appends one line.
func (j *JSONL) Write(s Step) error {
	j.buf.Reset()
	if err := json.NewEncoder(&j.buf).Encode(s); err != nil {
		return fmt.Errorf("metrics of step %d: %w", s.Step, err)
	}
	err := j.restore()
	if err == nil {
		err = j.f.append(j.buf.Bytes())
	}
	if err != nil {
		return fmt.Errorf("metrics of step %d: %w", s.Step, err)
	}
	return nil
}

// Sync waits until the lines are on the disk.
func (j *JSONL) Sync() error {
	err := j.restore()
	if err == nil {
		err = j.f.flush()
	}
	if err == nil {
		err = j.f.Sync()
	}
	if err != nil {
		return fmt.Errorf("metrics file: %w", err)
	}
	return nil
}

// Close closes the file.
func (j *JSONL) Close() error {
	if err := errors.Join(j.restore(), j.f.flush(), j.f.Close()); err != nil {
		return fmt.Errorf("metrics file: %w", err)
	}
	return nil
}

// copyJSONL copies the lines of steps up to last to the new file.
func copyJSONL(dst io.Writer, dir *os.Root, name string, last int64) error {
	src, err := files.OpenIn(dir, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer src.Close()
	if st, err := src.Stat(); err != nil {
		return err
	} else if st.Size() > MaxJSONL {
		return fmt.Errorf("%s has more than %d bytes; move it away", name, MaxJSONL)
	}
	err = copyLines(dst, src, last)
	if err != nil {
		err = fmt.Errorf("%s: %w", name, err)
	}
	return err
}

func copyLines(dst io.Writer, src io.Reader, last int64) error {
	w, foreign := bufio.NewWriter(dst), 0
	err := eachLine(src, func(line []byte) error {
		s, ok := wholeStep(line)
		switch {
		case ok && s.Step <= last && last > 0: // a run from step 0 writes that too
			_, err := w.Write(line)
			return err
		case !ok:
			if foreign++; foreign > maxForeign {
				return fmt.Errorf("more than %d lines of it are no metrics; move it away", maxForeign)
			}
		}
		return nil
	})
	return errors.Join(err, w.Flush())
}

// eachLine calls f with every line and its end. A line of more than maxLine bytes is nil.
func eachLine(src io.Reader, f func(line []byte) error) error {
	r := bufio.NewReaderSize(src, 64<<10)
	var line []byte
	long := false
	for {
		part, err := r.ReadSlice('\n')
		if long = long || len(line)+len(part) > maxLine; long {
			line = line[:0]
		} else {
			line = append(line, part...)
		}
		if err == bufio.ErrBufferFull {
			continue
		}
		if err != nil && err != io.EOF {
			return err
		}
		if long || len(line) > 0 {
			given := line
			if long {
				given = nil
			}
			if err := f(given); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		line, long = line[:0], false
	}
}

// maxUnwritten bounds the bytes kept in memory for a full disk: 2,000 steps of metrics.jsonl.
const maxUnwritten = 1 << 20

// An appender appends to a file. A full disk does not end a run: the appender keeps the bytes and writes them first in
// the next append.
type appender struct {
	*os.File
	full      func() // called when the appender begins to keep bytes
	unwritten []byte
}

// append writes b after all earlier bytes, or keeps the rest of them while the disk is full.
func (a *appender) append(b []byte) error {
	before := len(a.unwritten)
	a.unwritten = append(a.unwritten, b...)
	n, err := a.File.Write(a.unwritten)
	a.unwritten = append(a.unwritten[:0], a.unwritten[n:]...)
	if len(a.unwritten) > maxUnwritten || !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
		return err
	}
	if before == 0 {
		a.full()
	}
	return nil
}

// flush writes the bytes in memory, and fails if the disk is still full.
func (a *appender) flush() error {
	if len(a.unwritten) == 0 {
		return nil
	}
	err := a.append(nil)
	if n := len(a.unwritten); n > 0 && err == nil {
		err = fmt.Errorf("%w, and %d bytes are not written", syscall.ENOSPC, n)
	}
	return err
}

// ParseStep parses a line of a metrics.jsonl without its end. ok is false for a line without a step, such as a torn
// one.
func ParseStep(line []byte) (s Step, ok bool) {
	if len(line) < 2 || line[0] != '{' || line[len(line)-1] != '}' {
		return s, false
	}
	s = Untrained(time.Time{}, 0, 0)
	s.ValLoss, s.Step = nil, -1
	return s, json.Unmarshal(line, &s) == nil && s.Step >= 0
}

func wholeStep(line []byte) (s Step, ok bool) {
	line, ended := bytes.CutSuffix(line, []byte("\n"))
	s, ok = ParseStep(line)
	return s, ok && ended
}

// EachStep calls f with every complete line of a metrics.jsonl, in order. torn counts the other lines, such as the last
// one of a killed run.
func EachStep(src io.Reader, f func(Step)) (torn int, err error) {
	err = eachLine(src, func(line []byte) error {
		if s, ok := wholeStep(line); ok {
			f(s)
		} else {
			torn++
		}
		return nil
	})
	return torn, err
}

// A Slice is a piece of work in a trace.
type Slice struct {
	Rank   int
	Lane   string // the stream: compute, attention comm, ...
	Name   string // of the work; "wait" for another stream
	Label  string // place in the step: "step 2/forward/layer 0/hop 1 owner 3"
	Detail string // bytes and ranks of a transfer; the object of a wait
	Start  float64
	Took   float64 // seconds, like Start, since the start of the trace
}

// EachSlice calls f with every piece of work in a trace of this package, without the slices for parts of labels. It
// reads the trace of a killed rank up to its last complete line.
func EachSlice(src io.Reader, f func(Slice)) error {
	return eachLine(src, func(line []byte) error {
		e, ok := parseEvent(line)
		if !ok || e.Phase != "X" || e.Dur == nil || e.Args == nil {
			return nil
		}
		text := func(key string) string { s, _ := e.Args[key].(string); return s }
		f(Slice{
			Rank: e.PID, Lane: e.Category, Name: e.Name, Label: text("label"), Detail: text("detail"),
			Start: float64(e.TS) / 1e9, Took: float64(*e.Dur) / 1e9,
		})
		return nil
	})
}
