package data

import (
	"fmt"
	"io"
	"iter"
)

// text is a file of raw text: a byte is a token, the file a document.
type text struct {
	size int64
	eos  int // appended; -1: nothing is
}

func (t text) tokens() int64 {
	if t.eos >= 0 && t.size > 0 {
		return t.size + 1
	}
	return t.size // an empty file is no document
}

func (t text) where(at int64) string { return fmt.Sprintf("byte %d", at) }

func (t text) ends() iter.Seq[int64] {
	return func(yield func(int64) bool) {
		if t.size > 0 {
			yield(t.tokens())
		}
	}
}

func (t text) read(f io.ReaderAt, dst []int32, at int64) error {
	n := min(int64(len(dst)), t.size-at)
	if err := (tokenFile{width: 1}).read(f, dst[:n], at); err != nil {
		return err
	}
	if n < int64(len(dst)) {
		dst[n] = int32(t.eos)
	}
	return nil
}
