// Package heap hands out views of device memory that is freed in any order.
package heap

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/cprun/cprun/tensor"
)

// Heap hands out dense views from blocks of one device's memory and takes them back in any order.
// Memory that is given back in the reverse order of its allocation belongs in a tensor.Arena, which never
// has holes. The place of a view depends only on the calls before. A Heap is used by one goroutine at
// a time.
type Heap struct {
	alloc  func(bytes int64) (tensor.Memory, error)
	least  int64 // bytes of a block
	blocks []block
}

// A block is a block of memory: each byte of it is in a gap or held.
type block struct {
	mem  tensor.Memory
	gaps []gap           // by offset; no two touch
	held map[int64]int64 // bytes of the views that are out, by offset
}

// gap is memory that is not handed out.
type gap struct{ off, bytes int64 }

const align = 256 // bytes, as in a tensor.Arena

// New returns a heap that takes blocks from alloc when it needs them, each of at least the given
// number of bytes. It keeps them.
func New(block int64, alloc func(bytes int64) (tensor.Memory, error)) *Heap {
	return &Heap{alloc: alloc, least: block}
}

// Alloc returns a dense view of uninitialised elements, in the smallest gap that is large enough. The error is that
// of alloc.
func (h *Heap) Alloc(dtype tensor.DType, elements int) (tensor.View, error) {
	n := int64(elements) * int64(dtype.Size())
	n = max(1, (n+align-1)/align) * align // an empty view has a place of its own too
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

// best finds the smallest gap of n bytes or more, and the first of several alike.
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

// take cuts n bytes from the front of gap i, and returns where they begin.
func (b *block) take(i int, n int64) int64 {
	off := b.gaps[i].off
	b.gaps[i].off, b.gaps[i].bytes = off+n, b.gaps[i].bytes-n
	if b.gaps[i].bytes == 0 {
		b.gaps = slices.Delete(b.gaps, i, i+1)
	}
	b.held[off] = n
	return off
}

// Free gives back what Alloc returned, in any shape that begins at the same element. The memory may be
// handed out again at once: work that is queued and uses it must come before all later uses. Free
// panics if the view is not of the heap, or was given back before.
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
	panic(fmt.Sprintf("heap: has not handed out %v at byte %d, or has it back already", v, off))
}

// give adds n bytes at off to the gaps, and joins those that touch.
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
