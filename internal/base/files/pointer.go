package files

import (
	"bytes"
	"errors"
)

// pointer begins what git-lfs puts in the place of a file that it has not fetched.
var pointer = []byte("version https://git-lfs.github.com/spec/")

// Fetched returns an error if a file that begins with these bytes is a pointer of git-lfs.
func Fetched(begin []byte) error {
	if n := min(len(begin), len(pointer)); n >= 8 && bytes.Equal(begin[:n], pointer[:n]) {
		return errors.New("it is a git-lfs pointer, not the file: run git lfs pull in its directory")
	}
	return nil
}
