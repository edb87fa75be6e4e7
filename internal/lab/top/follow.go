package top

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/model/metrics"
)

const (
	// maxBehind bounds the first read of a long metrics.jsonl, from its end, in bytes: 130,000 steps.
	maxBehind = 64 << 20
	// maxLine bounds a line of metrics, in bytes; a run writes 500.
	maxLine = 64 << 10
)

// follower reads the new lines of a metrics.jsonl. The run may be on another host, and the file may be replaced
// (a run that goes on from a checkpoint leaves out the steps after it), cut, or gone.
type follower struct {
	root   *os.Root
	add    func(metrics.Step)
	forget func() // all that came before: the file is another one

	file   fs.FileInfo // that was read last; nil: none
	offset int64       // bytes read
	begun  []byte      // a line without its end
	skip   bool        // the line that has begun is none: too long, or its beginning was left out
}

// poll reads the new lines. An absent file is no error.
func (f *follower) poll() error {
	// opened each time, since only then a network file system looks anew
	file, err := files.OpenIn(f.root, "metrics.jsonl")
	if errors.Is(err, fs.ErrNotExist) {
		f.reset(nil)
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	now, err := file.Stat()
	if err != nil {
		return fmt.Errorf("metrics.jsonl: %w", err)
	}
	if f.file == nil || !os.SameFile(now, f.file) || now.Size() < f.offset {
		f.reset(now)
		if f.offset = max(0, now.Size()-maxBehind); f.offset > 0 {
			f.skip = true
		}
	}
	if now.Size() == f.offset {
		return nil
	}
	if _, err := file.Seek(f.offset, io.SeekStart); err != nil {
		return fmt.Errorf("metrics.jsonl: %w", err)
	}
	n, err := io.Copy(lines{f}, io.LimitReader(file, maxBehind))
	f.offset += n
	if err != nil {
		return fmt.Errorf("metrics.jsonl: %w", err)
	}
	return nil
}

// reset begins with another file.
func (f *follower) reset(now fs.FileInfo) {
	if f.file != nil {
		f.forget()
	}
	f.file, f.offset, f.begun, f.skip = now, 0, nil, false
}

// lines is a writer that cuts its input into lines.
type lines struct{ *follower }

func (l lines) Write(p []byte) (int, error) {
	for rest := p; ; {
		line, after, whole := bytes.Cut(rest, []byte("\n"))
		if !l.skip {
			l.begun = append(l.begun, line...)
			l.skip = len(l.begun) > maxLine
		}
		if !whole {
			return len(p), nil
		}
		if s, ok := metrics.ParseStep(l.begun); ok && !l.skip {
			l.add(s)
		}
		l.begun, l.skip, rest = l.begun[:0], false, after
	}
}
