// Package heap allocates views of device memory that are freed in any order:
//
//	h := heap.New(1<<20, alloc)
//	v, err := h.Alloc(tensor.F32, 1000)
//	h.Free(v)
package heap

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/cprun/cprun/tensor"
)

// Heap allocates dense views from blocks of one device's memory. Memory that is freed in the reverse order of its
// allocation belongs in a tensor.Arena, which does not fragment. The address of a view depends only on the earlier
// calls. One goroutine at a time may use a Heap.
type Heap struct {
	alloc  func(bytes int64) (tensor.Memory, error)
	least  int64 // smallest size of a block, in bytes
	blocks []block
}

// A block is a block of memory. Each byte is in a gap or held.
type block struct {
	mem  tensor.Memory
	gaps []gap           // sorted by offset; no two are adjacent
	held map[int64]int64 // bytes of the allocated views, by offset
}

// A gap is free memory.
type gap struct{ off, bytes int64 }

const align = 256 // bytes, as in a tensor.Arena

// New returns a heap that allocates blocks with alloc, of at least block bytes each. It never frees blocks.
func New(block int64, alloc func(bytes int64) (tensor.Memory, error)) *Heap {
	return &Heap{alloc: alloc, least: block}
}

// Alloc returns a dense view of uninitialised elements, in the smallest gap that is large enough. An error comes from
// alloc.
func (h *Heap) Alloc(dtype tensor.DType, elements int) (tensor.View, error) {
	n := int64(elements) * int64(dtype.Size())
	n = max(1, (n+align-1)/align) * align // also for an empty view, whose address must be unique
	b, i, ok := h.best(n)
	if !ok {
		mem, err := h.alloc(max(n, h.least))
		if err != nil {
			return tensor.View{}, err
		}
		h.blocks = append(h.blocks, block{mem: mem, gaps: []gap{{0, mem.Bytes()}}, held: make(map[int64]int64)})
		b, i = len(h.blocks)-1, 0
	}
	off := h.blocks[b].take(i, n)
	return tensor.Dense(h.blocks[b].mem, dtype, off/int64(dtype.Size()), [4]int{1, 1, 1, elements}), nil
}

// best returns the first of the smallest gaps of at least n bytes.
func (h *Heap) best(n int64) (block, index int, ok bool) {
	least := int64(-1)
	for b := range h.blocks {
		for i, g := range h.blocks[b].gaps {
			if g.bytes >= n && (least < 0 || g.bytes < least) {
				block, index, least = b, i, g.bytes
			}
		}
	}
	return block, index, least >= 0
}

// take allocates the first n bytes of gap i and returns their offset.
func (b *block) take(i int, n int64) int64 {
	off := b.gaps[i].off
	b.gaps[i].off, b.gaps[i].bytes = off+n, b.gaps[i].bytes-n
	if b.gaps[i].bytes == 0 {
		b.gaps = slices.Delete(b.gaps, i, i+1)
	}
	b.held[off] = n
	return off
}

// Free frees a view from Alloc, in any shape that begins at the same element. The heap may reuse the memory at once, so
// queued work on it must precede all later uses. Free panics if the view is not from the heap, or is already free.
func (h *Heap) Free(v tensor.View) {
	off := v.Offset() * int64(v.DType().Size())
	for i := range h.blocks {
		if b := &h.blocks[i]; b.mem == v.Memory() {
			n, ok := b.held[off]
			if !ok {
				break
			}
			delete(b.held, off)
			b.give(off, n)
			return
		}
	}
	panic(fmt.Sprintf("heap: %v at byte %d is not from this heap, or is already free", v, off))
}

// give adds n bytes at off to the gaps and merges adjacent ones.
func (b *block) give(off, n int64) {
	i, _ := slices.BinarySearchFunc(b.gaps, off, func(g gap, off int64) int { return cmp.Compare(g.off, off) })
	b.gaps = slices.Insert(b.gaps, i, gap{off, n})
	if i+1 < len(b.gaps) && off+n == b.gaps[i+1].off {
		b.gaps[i].bytes += b.gaps[i+1].bytes
		b.gaps = slices.Delete(b.gaps, i+1, i+2)
	}
	if i > 0 && b.gaps[i-1].off+b.gaps[i-1].bytes == off {
		b.gaps[i-1].bytes += b.gaps[i].bytes
		b.gaps = slices.Delete(b.gaps, i, i+1)
	}
}
