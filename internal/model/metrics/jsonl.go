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

	"github.com/cprun/cprun/internal/base/files"
)

const (
	// MaxJSONL is the longest metrics.jsonl that is read, in bytes: three million steps.
	MaxJSONL = 1 << 30
	// maxLine bounds a line of metrics or of a trace, in bytes; a run writes lines of 500.
	maxLine = 64 << 10
	// maxForeign bounds the lines without a step before the file counts as another kind of file. A crash
	// leaves one.
	maxForeign = 1000
)

// JSONL appends steps to a file of JSON lines. Each line is one write at the end, so that a reader
// (tail -f) never sees half a line of a run that is alive, and a run that is killed loses nothing
// it has logged, except lines that a full disk keeps in memory. JSONL writes a removed file again, whole.
type JSONL struct {
	f    appender
	dir  *os.Root
	name string
	warn func(string)
	buf  bytes.Buffer
}

// OpenJSONL opens a file of a run directory for the steps after resumed. Lines of later steps,
// which a run wrote after its last checkpoint and trains again now, are left out, and so is a line
// torn by a crash: the file holds each step once. OpenJSONL writes a new file and renames it, so a
// crash here leaves the old or the new one. Anything else of that name stays as it was. dir must stay
// open as long as the file. JSONL calls warn, unless nil, after it wrote a removed file again and when
// the disk is full.
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
	if err == nil { // a checkpoint counts on what Sync puts on the disk, name and all
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

// restore writes the file again if its name is gone. If another file has the name, restore leaves it
// alone and fails: the run would log to a file without a name.
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

// copyJSONL copies the lines of steps up to last from the file that is there to the one that takes
// its place.
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

// copyLines copies the lines of steps up to last.
func copyLines(dst io.Writer, src io.Reader, last int64) error {
	w, foreign := bufio.NewWriter(dst), 0
	err := eachLine(src, func(line []byte) error {
		s, ok := wholeStep(line)
		switch {
		case ok && s.Step <= last:
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

// eachLine calls f with every line and its end. One of more than maxLine bytes comes as nil.
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
