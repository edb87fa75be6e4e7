package heap

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/tensor"
)

// blocks allocates a heap's blocks and counts them.
func blocks(taken *int) func(int64) (tensor.Memory, error) {
	return func(n int64) (tensor.Memory, error) {
		*taken++
		return tensor.NewHost(n), nil
	}
}

func alloc(h *Heap, n int) tensor.View { return must.Have(h.Alloc(tensor.U8, n)) }

func TestHeapTakesTheSmallestGap(t *testing.T) {
	taken := 0
	h := New(64*align, blocks(&taken))
	large, a := alloc(h, 4*align), alloc(h, 1)
	small, b := alloc(h, 2*align), alloc(h, 1)
	h.Free(large)
	h.Free(small)
	if v := alloc(h, align+1); v.Offset() != small.Offset() {
		t.Errorf("it lies at %d, the smallest gap at %d", v.Offset(), small.Offset())
	}
	if v := alloc(h, 3*align); v.Offset() != large.Offset() {
		t.Errorf("it lies at %d, the gap that is left at %d", v.Offset(), large.Offset())
	}
	if a.Offset() == b.Offset() || taken != 1 {
		t.Errorf("%d blocks", taken)
	}
}

func TestHeapJoinsGaps(t *testing.T) {
	for _, order := range [][3]int{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}} {
		taken := 0
		h := New(3*align, blocks(&taken))
		vs := [3]tensor.View{alloc(h, 1), alloc(h, 0), alloc(h, align)}
		for _, i := range order {
			h.Free(vs[i])
		}
		if v := alloc(h, 3*align); v.Offset() != 0 || taken != 1 {
			t.Errorf("freed in order %v: the whole block is at %d, of %d blocks", order, v.Offset(), taken)
		}
	}
}

func TestHeapTakesBlocks(t *testing.T) {
	taken := 0
	h := New(align, blocks(&taken))
	a := alloc(h, 10*align) // more than a block
	b := alloc(h, 1)
	if taken != 2 || a.Memory() == b.Memory() {
		t.Errorf("%d blocks", taken)
	}
	h.Free(a.Reshape([4]int{10, align, 1, 1}))
	h.Free(b)
	if alloc(h, 10*align); taken != 2 {
		t.Errorf("%d blocks", taken)
	}
}

func TestHeapTellsWhatItCannotHave(t *testing.T) {
	full := errors.New("full")
	h := New(1, func(int64) (tensor.Memory, error) { return nil, full })
	if _, err := h.Alloc(tensor.F32, 3); err != full {
		t.Errorf("%v, want %v", err, full)
	}
}

func TestHeapTakesBackOnlyItsOwn(t *testing.T) {
	taken := 0
	h := New(1<<12, blocks(&taken))
	v := alloc(h, 1000)
	h.Free(v)
	inside := alloc(h, 1000).Slice(tensor.Dim, 256, 512)
	for name, wrong := range map[string]tensor.View{"twice": v.Slice(tensor.Dim, 300, 400),
		"foreign": tensor.New(tensor.U8, 10), "part": inside} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			h.Free(wrong)
		}()
	}
}

// For any order of calls, views do not overlap, are aligned and lie inside their block, every byte is in a gap or held,
// gaps are not adjacent, and the same calls return the same addresses.
func TestHeapInAnyOrder(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		taken := 0
		h, again := New(1<<14, blocks(&taken)), New(1<<14, blocks(new(int)))
		type twice struct{ v, again tensor.View }
		var out []twice
		for range 300 {
			if len(out) > 0 && rng.IntN(100) < 45 {
				i := rng.IntN(len(out))
				h.Free(out[i].v)
				again.Free(out[i].again)
				out = slices.Delete(out, i, i+1)
			} else {
				dtype, n := []tensor.DType{tensor.U8, tensor.BF16, tensor.F32, tensor.F64}[rng.IntN(4)], rng.IntN(1<<rng.IntN(12))
				x := twice{must.Have(h.Alloc(dtype, n)), must.Have(again.Alloc(dtype, n))}
				if x.v.Offset() != x.again.Offset() {
					t.Fatalf("seed %d: the same calls give %d and %d", seed, x.v.Offset(), x.again.Offset())
				}
				out = append(out, x)
			}
			check(t, seed, h)
		}
		for _, x := range out {
			h.Free(x.v)
		}
		for i := range h.blocks {
			if b := h.blocks[i]; len(b.gaps) != 1 || b.gaps[0] != (gap{0, b.mem.Bytes()}) {
				t.Fatalf("seed %d: block %d of %d is not whole again: %v", seed, i, taken, b.gaps)
			}
		}
	}
}

// check verifies the blocks of a heap.
func check(t *testing.T, seed uint64, h *Heap) {
	t.Helper()
	for i := range h.blocks {
		b, at, views, gaps := &h.blocks[i], int64(0), 0, 0
		for at < b.mem.Bytes() {
			n, held := b.held[at]
			switch {
			case held:
				views++
			case gaps < len(b.gaps) && b.gaps[gaps].off == at:
				n = b.gaps[gaps].bytes
				gaps++
				if gaps < len(b.gaps) && b.gaps[gaps].off <= at+n {
					t.Fatalf("seed %d: gaps touch: %v", seed, b.gaps)
				}
			}
			if n <= 0 || at%align != 0 {
				t.Fatalf("seed %d: byte %d of block %d is nobody's", seed, at, i)
			}
			at += n
		}
		if at != b.mem.Bytes() || views != len(b.held) || gaps != len(b.gaps) {
			t.Fatalf("seed %d: block %d of %d bytes: %d of %d views and %d of %d gaps come to %d", seed, i, b.mem.Bytes(), views,
				len(b.held), gaps, len(b.gaps), at)
		}
	}
}
