//go:build cuda

package gpu

import (
	"fmt"

	"github.com/cprun/cprun/internal/base/cuda"
)

// fusedScratch is device memory that is handed out as from a stack. Work on the stream is in order,
// so that what is given back can be handed out again at once.
type fusedScratch struct {
	dev *cuda.Device
	mem *cuda.Memory
	at  int64
}

const scratchAlign = 256

func (s *fusedScratch) size() int64 {
	if s.mem == nil {
		return 0
	}
	return s.mem.Bytes()
}

// reserve makes room for bytes in one piece. Memory that it replaces stays until the device is
// closed, since results may lie in it: FusedWorkspace is there to reserve enough at once.
func (s *fusedScratch) reserve(bytes int64) error {
	if bytes <= s.size() {
		return nil
	}
	mem, err := s.dev.Alloc(bytes)
	if err != nil {
		return fmt.Errorf("workspace of fused attention: %w", err)
	}
	s.mem, s.at = mem, 0
	return nil
}

// alloc returns the address of so many bytes.
func (s *fusedScratch) alloc(bytes int64) (uint64, error) {
	bytes = roundUp64(bytes, scratchAlign)
	if s.at+bytes > s.size() {
		if err := s.reserve(grownScratch(s.size(), s.at+bytes)); err != nil {
			return 0, err
		}
	}
	at := s.at
	s.at += bytes
	return uint64(uintptr(s.mem.Ptr())) + uint64(at), nil
}
