package call

import (
	"cmp"
	"math"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Flash is a block of a pass for the flash kernels.
type Flash struct {
	Tensors
	Shape   source.FlashShape // for the head dims and the type of Q
	Softmax attention.Softmax
	Tiles   []partition.Tile
	Gates   []attention.Gate // of rows of K and V
}

// A Launch is the launch of a kernel of a program.
type Launch struct {
	Program, Kernel string
	Grid            [3]int
	Threads, Shared int // of a block; Shared in bytes
	Params          source.FlashParams
	// Tiles has the tiles if they do not fit Params. The caller copies them to the device and sets Params.Tiles.
	Tiles []source.FlashTile
}

// flashTypes names the types of Q in kernels' names.
var flashTypes = map[tensor.DType]string{tensor.F32: "fp32", tensor.BF16: "bf16", tensor.F16: "fp16"}

// TakesFlash reports whether flash kernels exist for the type of q, k and v.
func TakesFlash(t tensor.DType) bool { return flashTypes[t] != "" }

// MaxFlashRows returns the largest number of rows in a grid of the shape's smallest blocks.
func MaxFlashRows(s source.FlashShape) int { return 65535 * min(s.Rows, s.Keys, s.OrderedRows) }

// Forward returns the launches of a block of a forward pass, one or none.
func (f *Flash) Forward() []Launch {
	own := ownTiles(f.Tiles, false)
	if f.Q.Size() == 0 || len(own) == 0 {
		return nil
	}
	return []Launch{f.launch(own, f.Shape.Forward(), "flash_forward", f.Q, f.Shape.Rows, f.Shape.Warps,
		f.Shape.ForwardShared())}
}

// Backward returns the launches of a block of a backward pass, in order. If deterministic, a separate kernel computes
// dQ.
func (f *Flash) Backward(deterministic bool) []Launch {
	byKey := ownTiles(f.Tiles, true)
	if f.Q.Size() == 0 || len(byKey) == 0 {
		return nil
	}
	keys := func(name string) Launch {
		return f.launch(byKey, f.Shape.Backward(), name, f.K, f.Shape.Keys, f.Shape.BackwardWarps,
			f.Shape.BackwardShared())
	}
	if !deterministic {
		return []Launch{keys("flash_backward")}
	}
	queries := f.launch(ownTiles(f.Tiles, false), f.Shape.DQ(), "flash_dq", f.Q, f.Shape.OrderedRows,
		f.Shape.OrderedWarps, f.Shape.DQShared())
	return []Launch{keys("flash_backward_ordered"), queries}
}

// launch returns the launch of a kernel whose blocks own rows rows of the tensor owns each.
func (f *Flash) launch(tiles []source.FlashTile, program source.Program, kernel string, owns View, rows, warps,
	shared int) Launch {
	l := Launch{
		Program: program.Name, Kernel: kernel + "_" + flashTypes[f.Q.DType()],
		Grid:    [3]int{owns.Len(tensor.Heads), owns.Len(tensor.Batch), (owns.Len(tensor.Seq) + rows - 1) / rows},
		Threads: 32 * warps, Shared: shared,
	}
	l.Params, l.Tiles = f.params(tiles)
	return l
}

// params returns the arguments of a kernel. more has the tiles if they do not fit.
func (f *Flash) params(tiles []source.FlashTile) (p source.FlashParams, more []source.FlashTile) {
	flags, unit, inner, outer := f.scores()
	p = source.FlashParams{
		Q: Strided(f.Q), K: Strided(f.K), V: Strided(f.V), Dout: Strided(f.DO), O: Strided(f.O), LSE: Strided(f.LSE),
		Delta: Strided(f.Delta), DQ: Strided(f.DQ), DK: Strided(f.DK), DV: Strided(f.DV),
		TileCount: int32(len(tiles)), SeqQ: Length(f.Q, tensor.Seq), SeqK: Length(f.K, tensor.Seq),
		Heads: Length(f.Q, tensor.Heads), KVHeads: Length(f.K, tensor.Heads),
		Dim: Length(f.Q, tensor.Dim), DimV: Length(f.V, tensor.Dim), Flags: flags | f.alignment(),
		Unit: float32(unit), Inner: float32(inner), Outer: float32(outer), Inverse: float32(1 / outer),
		Scale: float32(f.Softmax.Scale),
	}
	if copy(p.Few[:], tiles) < len(tiles) {
		more = tiles
	}
	return p, more
}

// scores returns the factors of scores; see source.FlashParams. The kernel assumes that the largest product has the
// largest score, which requires a factor above 0.
func (f *Flash) scores() (flags int32, unit, inner, outer float64) {
	switch s := f.Softmax.Scale; {
	case f.Softmax.Softcap > 0:
		return source.FlashCapped, math.Log2E, s / f.Softmax.Softcap, f.Softmax.Softcap
	case s > 0:
		return 0, s * math.Log2E, 1, 1
	default:
		return source.FlashScaled, math.Log2E, s, 1
	}
}

// alignment returns the flags for rows that kernels may access 16 bytes at a time.
func (f *Flash) alignment() int32 {
	flags := int32(0)
	if InPieces(16/f.Q.DType().Size(), f.Q, f.K, f.V, f.DO) {
		flags |= source.FlashAligned
	}
	if InPieces(4, f.O, f.DQ, f.DK, f.DV) {
		flags |= source.FlashAlignedFloat
	}
	return flags
}

// ownTiles returns the tiles for a kernel whose blocks own queries or, with byKey, keys.
func ownTiles(tiles []partition.Tile, byKey bool) []source.FlashTile {
	list := make([]source.FlashTile, 0, len(tiles))
	for _, t := range tiles {
		own, other, lo, hi := t.Q, t.K, t.Band.Lo, t.Band.Hi
		if byKey {
			own, other, lo, hi = t.K, t.Q, -t.Band.Hi, -t.Band.Lo
		}
		if t.Pairs() > 0 {
			list = append(list, source.FlashTile{
				OwnLo: int32(own.Lo), OwnHi: int32(own.Hi), OtherLo: int32(other.Lo), OtherHi: int32(other.Hi),
				Lo: Bound(lo), Hi: Bound(hi),
			})
		}
	}
	slices.SortFunc(list, func(a, b source.FlashTile) int {
		return cmp.Or(cmp.Compare(a.OwnLo, b.OwnLo), cmp.Compare(a.OtherLo, b.OtherLo))
	})
	reach := int32(0)
	for i := range list {
		reach = max(reach, list[i].OwnHi)
		list[i].Reach = reach
	}
	return list
}
