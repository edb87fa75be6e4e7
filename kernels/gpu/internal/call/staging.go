package call

import (
	"github.com/cprun/cprun/internal/base/heap"
	"github.com/cprun/cprun/tensor"
)

// Staging is host memory from which a stream copies lists to the device. It reuses memory after its copy is done, and
// takes more if the host is far ahead of the device. So the host never waits.
type Staging struct {
	heap   *heap.Heap
	copies []stagedCopy // in the order of the stream
}

// A stagedCopy is memory that a copy reads until done.
type stagedCopy struct {
	from View
	done tensor.Event
}

// stagingBlock sizes one allocation of host memory: lists of 1,000 documents for 30 calls.
const stagingBlock = 1 << 20

// NewStaging returns staging that takes its memory from alloc. The device can copy from it.
func NewStaging(alloc func(bytes int64) (tensor.Memory, error)) *Staging {
	return &Staging{heap: heap.New(stagingBlock, alloc)}
}

// Copy calls queue with a copy of words, which queue copies to the device, and then record for an event of the stream.
func (s *Staging) Copy(words []uint32, queue func(from View), record func() tensor.Event) error {
	for len(s.copies) > 0 && s.copies[0].done.Done() {
		s.heap.Free(s.copies[0].from)
		s.copies = s.copies[1:]
	}
	from, err := s.heap.Alloc(tensor.I32, len(words))
	if err != nil {
		return err
	}
	to := tensor.Data[int32](from)
	for i, w := range words {
		to[i] = int32(w)
	}
	queue(from)
	s.copies = append(s.copies, stagedCopy{from, record()})
	return nil
}
