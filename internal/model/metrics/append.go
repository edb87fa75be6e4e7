package metrics

import (
	"errors"
	"fmt"
	"os"
	"syscall"
)

// maxUnwritten bounds the memory for bytes that a full disk refuses: 2,000 steps of metrics.jsonl.
const maxUnwritten = 1 << 20

// appender appends to a file. A full disk does not end a run: the appender keeps the bytes, and the next
// append writes them first.
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
