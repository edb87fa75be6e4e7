package call

import (
	"slices"

	"github.com/cprun/cprun/kernels/source"
	"github.com/cprun/cprun/tensor"
)

// Map says to the copy engine how a view lies in memory, and that a copy takes a box of Columns elements of
// so many Rows of a head.
type Map struct {
	View          View
	Columns, Rows int
}

// panel is how many 16-bit elements of a row lie beside each other in shared memory.
const panel = 64

// TakesHopper reports whether the copy engine can bring all of a call's tensors in 16 bits: their rows are
// made of pieces of 16 bytes, and no two elements lie in one place.
func (f *Flash) TakesHopper(more ...View) bool {
	if t := f.Q.DType(); t != tensor.BF16 && t != tensor.F16 {
		return false
	}
	const most = 1 << 38 // elements of four bytes that a stride of the engine's goes over
	for _, v := range []View{f.Q, f.K, f.V, f.DO, f.DQ} {
		for a := tensor.Batch; a < tensor.Dim && !v.IsZero(); a++ {
			if v.Len(a) > 1 && (v.Stride(a) <= 0 || v.Stride(a) >= most) {
				return false
			}
		}
	}
	return InPieces(8, append(more, f.Q, f.K, f.V, f.DO)...) && InPieces(4, f.O, f.DQ, f.DK, f.DV)
}

// HopperForward is a launch of the forward pass on Hopper.
type HopperForward struct {
	Program, Kernel string
	Threads, Shared int
	Blocks          int    // of queries, of all heads; a grid has no more
	Maps            [3]Map // Q, K, V
	Params          source.HopperForward
	// Tiles, and Order, how the blocks of queries of a head are taken, go to memory where there are any.
	Tiles []source.FlashTile
	Order []int32
}

// HopperForward returns the launch of a block of a forward pass; ok is false where there is nothing to do.
// first says that the accumulators hold nothing yet, and last that O goes to out, which has 16 bits.
func (f *Flash) HopperForward(s source.HopperShape, out View, first, last bool) (l HopperForward, ok bool) {
	own := ownTiles(f.Tiles, false)
	if f.Q.Size() == 0 || len(own) == 0 {
		return l, false
	}
	heads := f.Q.Len(tensor.Heads) * f.Q.Len(tensor.Batch)
	blocks := (f.Q.Len(tensor.Seq) + s.Rows() - 1) / s.Rows()
	p := &l.Params
	p.P, l.Tiles = f.params(own)
	capped := needsMore(&p.P)
	keys := s.Keys(capped)
	l.Program, l.Kernel = s.Forward(capped).Name, "hopper_forward_"+flashTypes[f.Q.DType()]
	l.Threads, l.Shared, l.Blocks = 128*(s.Groups+1), s.ForwardShared(capped), blocks*heads
	l.Maps = [3]Map{{f.Q, panel, s.Rows()}, {f.K, panel, keys}, {f.V, panel, keys}}
	l.Order = longestFirst(own, blocks, s.Rows(), keys)
	p.Blocks, p.AllHeads, p.HeadsBeside = int32(blocks), int32(heads), int32(f.headsBeside())
	if first {
		p.Pass |= source.HopperFirst
	}
	if last {
		p.Pass |= source.HopperLast
		p.Out = Strided(out)
	}
	return l, true
}

// needsMore reports whether scores need more than a factor.
func needsMore(p *source.FlashParams) bool {
	return p.Flags&(source.FlashCapped|source.FlashScaled) != 0
}

// HopperBackward is a launch of the backward pass on Hopper.
type HopperBackward struct {
	Program, Kernel string
	Grid            [3]int
	Threads, Shared int
	Maps            [5]Map // Q, K, V, dO, dQ
	Params          source.HopperBackward
	Tiles           []source.FlashTile // as in HopperForward
	Progress        int                // how many numbers Params.Progress is to have, each 0
}

// HopperBackward returns the launch of a block of a backward pass; ok is false where there is nothing to do.
func (f *Flash) HopperBackward(s source.HopperShape) (l HopperBackward, ok bool) {
	return f.hopperBackward(s, false)
}

func (f *Flash) hopperBackward(s source.HopperShape, ordered bool) (l HopperBackward, ok bool) {
	own := ownTiles(f.Tiles, true)
	if f.Q.Size() == 0 || len(own) == 0 {
		return l, false
	}
	p, more := f.params(own)
	capped := needsMore(&p)
	queries, dqRows, _ := s.BackwardBoxes(capped)
	const floats = panel / 2 // of dQ, in as many bytes
	return HopperBackward{
		Program: s.Backward(capped, ordered).Name, Kernel: "hopper_backward_" + flashTypes[f.Q.DType()],
		Grid:    [3]int{(f.K.Len(tensor.Seq) + s.OwnKeys() - 1) / s.OwnKeys(), f.K.Len(tensor.Heads), f.K.Len(tensor.Batch)},
		Threads: 128 * (s.KeyGroups + 1), Shared: s.BackwardShared(capped),
		Maps:   [5]Map{{f.Q, panel, queries}, {f.K, panel, s.OwnKeys()}, {f.V, panel, s.OwnKeys()}, {f.DO, panel, queries}, {f.DQ, floats, dqRows}},
		Params: source.HopperBackward{P: p}, Tiles: more,
	}, true
}

// keptBytes is how much of K and V blocks of the grid read beside each other: what the L2 holds of it, which
// keeps what its halves share twice, beside all else.
const keptBytes = 8 << 20

// headsBeside is how many heads of queries are taken beside each other before the next ones are: those of
// as many KV heads as stay in the L2, a divisor of all.
func (f *Flash) headsBeside() int {
	kv := f.K.Len(tensor.Heads)
	group := f.Q.Len(tensor.Heads) / kv
	bytes := f.K.Len(tensor.Seq) * (f.K.Len(tensor.Dim) + f.V.Len(tensor.Dim)) * f.K.DType().Size()
	count := 1
	for n := 1; n <= kv; n++ {
		if kv%n == 0 && n*bytes <= keptBytes {
			count = n
		}
	}
	if count == kv && kv*bytes*f.Q.Len(tensor.Batch) <= keptBytes {
		count *= f.Q.Len(tensor.Batch)
	}
	return count * group
}

// longestFirst returns the blocks of so many own rows, those that walk over the most others first, in steps of so many;
// nil where that is from the last to the first.
func longestFirst(tiles []source.FlashTile, blocks, rows, step int) []int32 {
	steps := make([]int, blocks)
	for _, t := range tiles {
		for b := int(t.OwnLo) / rows; b < min(blocks, (int(t.OwnHi)+rows-1)/rows); b++ {
			lo, hi := max(b*rows, int(t.OwnLo)), min((b+1)*rows, int(t.OwnHi))
			from, to := max(int(t.OtherLo), lo+int(t.Lo)), min(int(t.OtherHi), hi+int(t.Hi))
			steps[b] += max(0, to-from+step-1) / step
		}
	}
	order := make([]int32, blocks)
	for i := range order {
		order[i] = int32(blocks - 1 - i)
	}
	down := func(a, b int32) int { return steps[b] - steps[a] }
	if slices.IsSortedFunc(order, down) {
		return nil
	}
	slices.SortStableFunc(order, down)
	return order
}
