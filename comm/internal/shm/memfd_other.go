//go:build !linux || portable

package shm

import (
	"errors"
	"fmt"
	"os"
)

var errNoMemfd = fmt.Errorf("sealed memory (memfd): %w", errors.ErrUnsupported)

// New fails: without seals, one process could cut the memory off under the other.
func New() (*Area, *os.File, error) { return nil, nil, errNoMemfd }

// Open fails as New does.
func Open(*os.File) (*Area, error) { return nil, errNoMemfd }
