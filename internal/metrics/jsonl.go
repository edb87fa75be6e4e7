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
)

// JSONL appends steps to a file of JSON lines. Each line is one write to a file opened with
// O_APPEND, so that a reader (tail -f) never sees half a line of a run that is alive, and a
// run that is killed loses nothing it has logged.
type JSONL struct {
	f   *os.File
	buf bytes.Buffer
}

// OpenJSONL opens path for the steps after resumed. Lines of later steps, which a run wrote
// after its last checkpoint and which are trained again now, are dropped first, and so is a
// line torn by a crash: the file holds each step once. The file is replaced by renaming, so
// a crash here leaves the old or the new one.
func OpenJSONL(path string, resumed int64) (*JSONL, error) {
	if err := truncateJSONL(path, resumed); err != nil {
		return nil, fmt.Errorf("metrics of the steps before %d: %w", resumed+1, err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("metrics file: %w", err)
	}
	return &JSONL{f: f}, nil
}

// Write appends one line.
func (j *JSONL) Write(s Step) error {
	j.buf.Reset()
	if err := json.NewEncoder(&j.buf).Encode(s); err != nil {
		return fmt.Errorf("metrics of step %d: %w", s.Step, err)
	}
	if _, err := j.f.Write(j.buf.Bytes()); err != nil {
		return fmt.Errorf("metrics of step %d: %w", s.Step, err)
	}
	return nil
}

// Close closes the file.
func (j *JSONL) Close() error {
	if err := j.f.Close(); err != nil {
		return fmt.Errorf("metrics file: %w", err)
	}
	return nil
}

// truncateJSONL rewrites path without the lines of steps after last, and without what is not
// a line of metrics. A file that holds nothing of the kind is left as it is.
func truncateJSONL(path string, last int64) error {
	src, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer src.Close()
	beside := path + ".tmp"
	dst, err := os.Create(beside)
	if err != nil {
		return err
	}
	dropped, err := copyLines(dst, src, last)
	if err == nil && dropped {
		err = dst.Sync()
	}
	err = errors.Join(err, dst.Close())
	if err != nil || !dropped {
		return errors.Join(err, os.Remove(beside))
	}
	return os.Rename(beside, path)
}

func copyLines(dst io.Writer, src io.Reader, last int64) (dropped bool, err error) {
	r, w := bufio.NewReader(src), bufio.NewWriter(dst)
	for {
		line, err := r.ReadBytes('\n')
		if err != nil && err != io.EOF {
			return false, err
		}
		if len(line) > 0 {
			if keepLine(line, last) {
				if _, err := w.Write(line); err != nil {
					return false, err
				}
			} else {
				dropped = true
			}
		}
		if err == io.EOF {
			return dropped, w.Flush()
		}
	}
}

// keepLine reports whether line is a whole line of a step up to last.
func keepLine(line []byte, last int64) bool {
	var s struct {
		Step *int64 `json:"step"`
	}
	whole := line[len(line)-1] == '\n'
	return whole && json.Unmarshal(line, &s) == nil && s.Step != nil && *s.Step <= last
}
