package call

import (
	"slices"

	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// A Map describes a TMA tensor map of a view. A copy takes a box of Columns elements of Rows rows of a head.
type Map struct {
	View          View
	Columns, Rows int
}

// panel is the number of adjacent 16-bit elements of a row in shared memory.
const panel = 64

// TakesHopper reports whether the kernels for Hopper can compute a call: its type has 16 bits, rows consist of aligned
// pieces of 16 bytes, strides are valid for TMA, and no two elements overlap.
func (f *Flash) TakesHopper(more ...View) bool {
	if t := f.Q.DType(); t != tensor.BF16 && t != tensor.F16 {
		return false
	}
	const most = 1 << 38 // largest stride of TMA, in elements of four bytes
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
	Blocks          int    // blocks of queries of all heads, the largest grid
	Maps            [3]Map // Q, K, V
	Params          source.HopperForward
	Lists           HopperLists
}

// HopperLists holds the lists that go to device memory, if any.
type HopperLists struct {
	Tiles []source.FlashTile
	Order []int32  // the order of a head's blocks
	Needs []uint32 // the gates of each block, as bits
	Gates []source.HopperGate
}

// HopperForward returns the launch of a block of a forward pass. ok is false if no query sees a key. first means that
// the accumulators are not initialised, and last that the kernel rounds O to out, which has 16 bits.
func (f *Flash) HopperForward(s source.HopperShape, out View, first, last bool) (l HopperForward, ok bool) {
	own := ownTiles(f.Tiles, false)
	if f.Q.Size() == 0 || len(own) == 0 {
		return l, false
	}
	heads := f.Q.Len(tensor.Heads) * f.Q.Len(tensor.Batch)
	blocks := (f.Q.Len(tensor.Seq) + s.Rows() - 1) / s.Rows()
	p := &l.Params
	p.P, l.Lists.Tiles = f.params(own)
	capped := needsMore(&p.P)
	keys := s.Keys(capped)
	l.Program, l.Kernel = s.Forward(capped).Name, "hopper_forward_"+flashTypes[f.Q.DType()]
	l.Threads, l.Shared, l.Blocks = s.Threads(), s.ForwardShared(capped), blocks*heads
	k, v := s.ForwardBoxes(capped)
	l.Maps = [3]Map{{f.Q, panel, s.Rows()}, {f.K, panel, k}, {f.V, panel, v}}
	l.Lists.Order = longestFirst(stepsOf(own, blocks, s.Rows(), keys), true)
	p.Blocks, p.AllHeads, p.HeadsBeside, p.Early = int32(blocks), int32(heads), int32(f.headsBeside()), int32(blocks)
	reads := func(t source.FlashTile, lo, hi int) partition.Range {
		r := others(t, lo, hi, keys)
		return partition.Range{Lo: r.Lo, Hi: min(r.Hi, int(t.OtherHi))}
	}
	if l.Lists.Needs, l.Lists.Gates = f.gates(own, blocks, s.Rows(), reads); l.Lists.Needs != nil {
		if l.Lists.Order == nil {
			l.Lists.Order = allBlocks(blocks, true)
		}
		p.Early = int32(lateLast(l.Lists.Order, l.Lists.Needs))
	}
	if first {
		p.Pass |= source.HopperFirst
	}
	if last {
		p.Pass |= source.HopperLast
		p.Out = Strided(out)
	}
	return l, true
}

// Sections divides the tiles of a forward pass by keys, for a launch each. One launch over many keys is slower,
// probably since blocks of queries that read the same keys drift apart, until the L2 no longer holds them
// (docs/hopper.md). A launch more costs a fold of O, so there is one unless queries see most keys each in the mean.
func (f *Flash) Sections(most int) (list [][]partition.Tile) {
	keys := f.K.Len(tensor.Seq)
	n := (keys + most - 1) / most
	if partition.Pairs(f.Tiles) < most*f.Q.Len(tensor.Seq) {
		n = 1
	}
	for i := range n {
		var tiles []partition.Tile
		for _, t := range f.Tiles {
			t.K = partition.Range{Lo: max(t.K.Lo, keys*i/n), Hi: min(t.K.Hi, keys*(i+1)/n)}
			if t.K.Len() > 0 && t.Pairs() > 0 {
				tiles = append(tiles, t)
			}
		}
		if len(tiles) > 0 {
			list = append(list, tiles)
		}
	}
	return list
}

// SectionKeys returns the number of keys of a launch: 64K of head dim 128 in 16 bits, by measurement.
func (f *Flash) SectionKeys() int {
	const bytes = 32 << 20
	return bytes / ((f.K.Len(tensor.Dim) + f.V.Len(tensor.Dim)) * f.K.DType().Size())
}

func needsMore(p *source.FlashParams) bool {
	return p.Flags&(source.FlashCapped|source.FlashScaled) != 0
}

// HopperBackward is a launch of the backward pass on Hopper.
type HopperBackward struct {
	Program, Kernel string
	Grid            [3]int // Grid[0] is 0 if no query sees a key
	Threads, Shared int
	Maps            [5]Map // Q, K, V, dO, dQ
	Params          source.HopperBackward
	Lists           HopperLists
	Progress, Next  int  // lengths of Params.Progress and Params.Next, which must be zeroed
	SetsFresh       bool // the kernel sets fresh gradients of keys, instead of adding to them
}

// SMs holds numbers of SMs.
type SMs struct {
	All, Taken int // of the GPU, and those that a kernel takes
}

// clusters returns the same numbers of clusters of blocks of the backward pass.
func (n SMs) clusters(s source.HopperShape) SMs {
	return SMs{n.All / s.Blocks(), max(1, n.Taken/s.Blocks())}
}

// share sets the grid to count pieces of work, for clusters of blocks. If the kernel does not take all SMs, the grid
// has as many clusters as fit those, at least one for each batch element. A cluster then takes several pieces.
func (l *HopperBackward) share(s source.HopperShape, count int, clusters SMs) {
	if n := max(1, clusters.Taken/l.Grid[2]); clusters.Taken < clusters.All && n < count {
		count, l.Next = n, l.Grid[2]
	}
	l.Grid[0] = count * s.Blocks()
}

// HopperBackward returns the launch of a block of a backward pass. The gradients of fresh keys are not initialised.
func (f *Flash) HopperBackward(s source.HopperShape, sms SMs, fresh partition.Range) HopperBackward {
	l, steps := f.hopperBackward(s, false, fresh)
	sms = sms.clusters(s)
	blocks, heads, p := working(steps), f.K.Len(tensor.Heads), &l.Params
	if blocks == 0 {
		return l
	}
	if o := f.sweeps(s, sms.Taken); o.fold > 0 {
		blocks = o.blocks
		p.Start, p.Fold, p.Beside = int32(o.start), int32(o.fold), int32(o.beside)
	} else {
		order, most := steps, f.stepsBeside(l.Maps[0].Rows)
		if longest, ok := f.documents(s, sms.Taken, len(steps)); ok {
			order, p.Beside = longest, 1
			most = min(most, slices.Max(steps)/3) // since they visit all heads at each step
		}
		if l.Lists.Order = longestFirst(order, false); l.Lists.Order != nil {
			l.Lists.Order = l.Lists.Order[:blocks]
		}
		p.Together = int32(shortLast(steps, heads, sms.Taken, most))
	}
	p.Blocks = int32(blocks)
	l.share(s, blocks*heads, sms)
	return l
}

// stepsBeside returns the largest number of steps, of the given queries, for which the reads and sums of concurrent
// blocks of all KV heads stay in the L2.
func (f *Flash) stepsBeside(queries int) int {
	const kept = 32 << 20
	row := f.Q.Len(tensor.Dim)*(f.Q.DType().Size()+f.DQ.DType().Size()) + f.DO.Len(tensor.Dim)*f.DO.DType().Size()
	return kept / (f.K.Len(tensor.Heads) * queries * row)
}

// hopperBackward returns the launch without the order of blocks, and the number of steps of each block of keys.
func (f *Flash) hopperBackward(s source.HopperShape, ordered bool, fresh partition.Range) (l HopperBackward,
	steps []int) {
	p, more := f.params(ownTiles(f.Tiles, true))
	capped := needsMore(&p)
	queries, dqRows, _ := s.BackwardBoxes(capped)
	const floats = panel / 2 // of dQ, in a row of a panel
	l = HopperBackward{
		Program: s.Backward(capped, ordered).Name, Kernel: "hopper_backward_" + flashTypes[f.Q.DType()],
		Grid:    [3]int{0, 1, f.K.Len(tensor.Batch)},
		Threads: 128 * (s.KeyGroups + 1), Shared: s.BackwardShared(capped),
		Maps: [5]Map{{f.Q, panel, queries}, {f.K, panel, s.OwnKeys()}, {f.V, panel, s.OwnKeys()},
			{f.DO, panel, queries}, {f.DQ, floats, dqRows}},
		Params: source.HopperBackward{P: p}, Lists: HopperLists{Tiles: more},
	}
	keys := s.OwnKeys()
	steps = stepsOf(ownTiles(f.Tiles, true), (f.K.Len(tensor.Seq)+keys-1)/keys, keys, queries)
	if f.Q.Size() == 0 {
		clear(steps)
	}
	all := func(_ source.FlashTile, lo, hi int) partition.Range { return partition.Range{Lo: lo, Hi: hi} }
	l.Lists.Needs, l.Lists.Gates = f.gates(ownTiles(f.Tiles, true), len(steps), keys, all)
	// A block without a step does not write its keys, and there may be more fresh gradients than keys.
	first, end := fresh.Lo/keys, (fresh.Hi+keys-1)/keys
	l.SetsFresh = fresh.Len() > 0 && end <= len(steps) && working(steps[first:end]) == end-first
	if l.SetsFresh {
		l.Params.FreshLo, l.Params.FreshHi = int32(fresh.Lo), int32(fresh.Hi)
	}
	return l, steps
}

// keptBytes bounds K and V of concurrent blocks, which stay in the L2. Each half of the L2 has a copy.
const keptBytes = 8 << 20

// headsBeside returns the number of query heads that run concurrently: the largest divisor of the KV heads whose K and
// V stay in the L2, times the group.
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
