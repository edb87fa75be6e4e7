package tensor

import "unsafe"

// Arena allocates dense views from blocks of one device's memory, like a stack: Mark, allocate, Release. A step that
// allocates in the same order gets the same places each time, so that the device allocates again only for a step larger
// than all before.
type Arena struct {
	alloc  func(bytes int64) Memory
	blocks []Memory
	at     Mark
	peak   int64
}

// Mark is a place in an arena to release to.
type Mark struct {
	block int
	off   int64
	used  int64
}

const arenaAlign = 256 // bytes, for vector loads of GPUs and NCCL

// NewArena returns an arena that gets its blocks from alloc: first one of size bytes, and more if needed.
func NewArena(size int64, alloc func(bytes int64) Memory) *Arena {
	return &Arena{alloc: alloc, blocks: []Memory{alloc(max(size, arenaAlign))}}
}

// NewHostArena returns an arena of host memory with a first block of size bytes.
func NewHostArena(size int64) *Arena {
	return NewArena(size, func(n int64) Memory { return NewHost(n) })
}

// NewMeter returns an arena without memory, for memory plans. Its views cannot be read; its Peak is the memory of a run
// of the same code.
func NewMeter() *Arena {
	return NewArena(1<<62, func(n int64) Memory { return virtual(n) })
}

// Within returns an arena of the memory of a dense view. It allocates from the start of the view. The caller must not
// exceed it.
func Within(v View) *Arena {
	return &Arena{blocks: []Memory{v.Memory()}, at: Mark{off: v.Offset() * int64(v.DType().Size())}}
}

// Alloc returns a dense view of uninitialised elements; New says how a short shape is padded.
func (a *Arena) Alloc(dtype DType, shape ...int) View {
	s := pad(shape)
	n := int64(s[0]) * int64(s[1]) * int64(s[2]) * int64(s[3]) * int64(dtype.Size())
	n = (n + arenaAlign - 1) / arenaAlign * arenaAlign
	for a.at.off+n > a.blocks[a.at.block].Bytes() {
		if a.at.block+1 == len(a.blocks) {
			a.blocks = append(a.blocks, a.alloc(max(n, a.blocks[0].Bytes()/4)))
		}
		a.at.block, a.at.off = a.at.block+1, 0
	}
	v := Dense(a.blocks[a.at.block], dtype, a.at.off/int64(dtype.Size()), s)
	a.at.off += n
	a.at.used += n
	a.peak = max(a.peak, a.at.used)
	return v
}

// Mark returns the present place.
func (a *Arena) Mark() Mark { return a.at }

// Release frees all allocations since m. Work queued later must not use their views. Work queued before runs before the
// next use of the memory if one stream orders both.
//
// If an arena is released as a whole and has grown to several blocks, one block of its peak and a quarter more replaces
// them. Otherwise steps of changing sizes, such as those of packed documents, would leave more and more blocks that are
// a little too small: a GPU's memory is never freed.
func (a *Arena) Release(m Mark) {
	a.at = m
	if m == (Mark{}) && len(a.blocks) > 1 {
		a.blocks = []Memory{a.alloc(a.peak + a.peak/4)}
	}
}

// Peak returns the most bytes that were in use at once.
func (a *Arena) Peak() int64 { return a.peak }

// virtual memory is only counted.
type virtual int64

func (virtual) Device() Device      { return Device{Kind: "none"} }
func (v virtual) Bytes() int64      { return int64(v) }
func (virtual) Ptr() unsafe.Pointer { return nil }
