package command

import (
	"fmt"
	"os"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/launch"
)

// scratch is the temporary directory of a command that leaves nothing.
type scratch struct {
	path string
	root *os.Root
}

func newScratch(prefix string) (*scratch, error) {
	path, err := os.MkdirTemp("", prefix)
	if err != nil {
		return nil, fmt.Errorf("temporary directory: %w", err)
	}
	root, err := files.OpenDir(path)
	if err != nil {
		os.RemoveAll(path)
		return nil, fmt.Errorf("temporary directory: %w", err)
	}
	return &scratch{path, root}, nil
}

// end removes the directory unless the command has failed: the report of a failure names its logs.
func (s *scratch) end(status int) error {
	s.root.Close()
	if status == launch.ExitDone {
		return os.RemoveAll(s.path)
	}
	return nil
}
