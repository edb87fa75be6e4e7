//go:build cuda

package kernels

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/kernels/source"
	"github.com/cprun/cprun/partition"
)

// Flash is attention by our own kernels, for every GPU from sm_80 on: bfloat16 and float16 inputs,
// float32 accumulators, head dims up to 256 of any kind, any tiles, strides and soft cap. A
// call is one launch, whatever its tiles. It implements attention.Kernel. One goroutine calls it.
//
// Programs for a pair of head dims are loaded when they are first used; Preload does it earlier.
type Flash struct {
	deviceAttention
	deterministic bool
	shared        int // bytes of shared memory that a block may have
}

// NewFlash computes on stream. Deterministic repeats gradients bit for bit, for two products
// more of the five that a backward pass takes.
func NewFlash(stream *cuda.Stream, loader *Loader, deterministic bool) (*Flash, error) {
	d, err := newDeviceAttention(stream, loader)
	return &Flash{deviceAttention: d, deterministic: deterministic, shared: loader.Device().SharedPerBlock}, err
}

// Preload loads, and where they are not on disk compiles, the programs for these head dims of q
// and k, and of v.
func (f *Flash) Preload(dim, dimV int) error {
	forward, err := f.shapeFor("flash attention forward", dim, dimV, source.FlashShape.ForwardShared)
	if err != nil {
		return err
	}
	backward, err := f.shapeFor("flash attention backward", dim, dimV, f.backwardShared)
	if err != nil {
		return err
	}
	names := []string{commonProgram, forward.Forward().Name, backward.Backward().Name}
	if f.deterministic {
		names = append(names, backward.DQ().Name)
	}
	return f.loader.Preload(names...)
}

// shapeFor is the shape for a pass, which needs so much shared memory a block.
func (f *Flash) shapeFor(what string, dim, dimV int, needs func(source.FlashShape) int) (source.FlashShape, error) {
	s, ok := source.FlashShapeFor(dim, dimV, f.shared, needs)
	switch {
	case ok:
		return s, nil
	case max(dim, dimV) > source.FlashMaxDim:
		return s, fmt.Errorf("%s with head dims %d and %d: up to %d are compiled; use the reference backend", what, dim, dimV, source.FlashMaxDim)
	}
	return s, fmt.Errorf("%s with head dims %d and %d: what is compiled takes more than the %d bytes of shared memory that a block has on %v; use the reference backend",
		what, dim, dimV, f.shared, f.loader.Device())
}

// backwardShared is what the kernels of a backward pass need.
func (f *Flash) backwardShared(s source.FlashShape) int {
	if f.deterministic {
		return max(s.BackwardShared(), s.DQShared())
	}
	return s.BackwardShared()
}

// Forward folds the attention of q over one block of keys into acc; see attention.Kernel.
func (f *Flash) Forward(acc attention.Partial, q, k, v View, tiles []partition.Tile, p attention.Softmax) error {
	if err := attention.CheckForward(acc, q, k, v, tiles, p); err != nil {
		return err
	}
	c := flashCall{q: q, k: k, v: v, o: acc.O, lse: acc.LSE, p: p}
	if err := f.usable("flash attention forward", &c, source.FlashShape.ForwardShared, acc.O, acc.LSE); err != nil {
		return err
	}
	own := ownTiles(tiles, false)
	if q.Size() == 0 || len(own) == 0 {
		return nil
	}
	f.stream.Do("attention forward", func() error {
		grid := cuda.Dim{X: q.Len(tensor.Heads), Y: q.Len(tensor.Batch), Z: ceilDiv(q.Len(tensor.Seq), source.FlashQueries)}
		block := cuda.Dim{X: 32 * c.shape.Warps}
		return f.call(&c, own, c.shape.Forward().Name, "flash_forward", cuda.Launch{Grid: grid, Block: block, Shared: c.shape.ForwardShared()})
	})
	return nil
}

// Backward adds the gradients of one block of keys to acc; see attention.Kernel.
func (f *Flash) Backward(acc attention.Grads, do, q, k, v View, s attention.Saved, tiles []partition.Tile, p attention.Softmax) error {
	if err := attention.CheckBackward(acc, do, q, k, v, s, tiles, p); err != nil {
		return err
	}
	if do.DType() != q.DType() {
		return fmt.Errorf("flash attention backward: do is %v, q %v; they must be of one type", do.DType(), q.DType())
	}
	c := flashCall{q: q, k: k, v: v, do: do, lse: s.LSE, delta: s.Delta, dq: acc.DQ, dk: acc.DK, dv: acc.DV, p: p}
	if err := f.usable("flash attention backward", &c, f.backwardShared, do, s.LSE, s.Delta, acc.DQ, acc.DK, acc.DV); err != nil {
		return err
	}
	byKey := ownTiles(tiles, true)
	if q.Size() == 0 || len(byKey) == 0 {
		return nil
	}
	var byQuery []ownTile
	name := "flash_backward"
	if f.deterministic {
		byQuery, name = ownTiles(tiles, false), "flash_backward_ordered"
	}
	f.stream.Do("attention backward", func() error {
		grid := cuda.Dim{X: k.Len(tensor.Heads), Y: q.Len(tensor.Batch), Z: ceilDiv(k.Len(tensor.Seq), c.shape.Keys)}
		block := cuda.Dim{X: 32 * c.shape.BackwardWarps}
		err := f.call(&c, byKey, c.shape.Backward().Name, name, cuda.Launch{Grid: grid, Block: block, Shared: c.shape.BackwardShared()})
		if err != nil || byQuery == nil {
			return err
		}
		grid = cuda.Dim{X: q.Len(tensor.Heads), Y: q.Len(tensor.Batch), Z: ceilDiv(q.Len(tensor.Seq), source.FlashDQQueries)}
		block = cuda.Dim{X: 32 * source.FlashDQWarps}
		return f.call(&c, byQuery, c.shape.DQ().Name, "flash_dq", cuda.Launch{Grid: grid, Block: block, Shared: c.shape.DQShared()})
	})
	return nil
}

// maxFlashRows is what a grid of a shape's smallest blocks can count.
func maxFlashRows(s source.FlashShape) int { return 65535 * min(s.Keys, source.FlashDQQueries) }

// usable sets the call's shape, of a pass that needs so much shared memory a block, and is what is
// wrong with its inputs beyond what attention checks.
func (f *Flash) usable(what string, c *flashCall, needs func(source.FlashShape) int, others ...View) error {
	if t := c.q.DType(); t != tensor.BF16 && t != tensor.F16 {
		return fmt.Errorf("%s in %v: it computes in bfloat16 and float16; use the reference backend", what, t)
	}
	var err error
	if c.shape, err = f.shapeFor(what, c.q.Len(tensor.Dim), c.v.Len(tensor.Dim), needs); err != nil {
		return err
	}
	if n := max(c.q.Len(tensor.Seq), c.k.Len(tensor.Seq)); n > maxFlashRows(c.shape) {
		return fmt.Errorf("%s of %d positions: up to %d a rank; use more ranks", what, n, maxFlashRows(c.shape))
	}
	return f.onDevice(what, append([]View{c.q, c.k, c.v}, others...)...)
}

// flashCall is the tensors of a call; those that it does not have are zero.
type flashCall struct {
	q, k, v, do, o, lse, delta, dq, dk, dv View
	shape                                  source.FlashShape
	p                                      attention.Softmax
}

// Bits of FlashParams.flags in flash.cuh.
const (
	flashAligned      = 1
	flashAlignedFloat = 2
	flashScaled       = 4
	flashCapped       = 8
)

// call launches a kernel for the call.
func (f *Flash) call(c *flashCall, tiles []ownTile, program, name string, l cuda.Launch) error {
	list := uint64(0)
	if len(tiles) > source.FlashTiles {
		words := make([]int32, 0, ownTileWords*len(tiles))
		for _, t := range tiles {
			words = append(words, t[:]...)
		}
		var err error
		if list, err = f.upload(words, ownTileWords); err != nil {
			return err
		}
	}
	a := &cuda.Args{}
	for _, v := range []View{c.q, c.k, c.v, c.do, c.o, c.lse, c.delta, c.dq, c.dk, c.dv} {
		address(a, cuda.Addr(v), stridesOf(v))
	}
	flags, unit, inner, outer := c.scores()
	a.Addr(list).Int(len(tiles)).Int(c.q.Len(tensor.Seq)).Int(c.k.Len(tensor.Seq)).Int(c.q.Len(tensor.Heads)).Int(c.k.Len(tensor.Heads))
	a.Int(c.q.Len(tensor.Dim)).Int(c.v.Len(tensor.Dim)).Int(flags | c.alignment())
	a.Float(unit).Float(inner).Float(outer).Float(1 / outer).Float(c.p.Scale).Int(0)
	for i := range source.FlashTiles {
		var t ownTile
		if i < len(tiles) {
			t = tiles[i]
		}
		for _, w := range t {
			a.Int(int(w))
		}
	}
	return f.launch(program, name+"_"+typeNames[c.q.DType()], l, a)
}

// scores is how products become scores; see FlashParams. The kernel takes the largest product for
// that of the largest score, which needs a factor above 0.
func (c *flashCall) scores() (flags int, unit, inner, outer float64) {
	switch s := c.p.Scale; {
	case c.p.Softcap > 0:
		return flashCapped, math.Log2E, s / c.p.Softcap, c.p.Softcap
	case s > 0:
		return 0, s * math.Log2E, 1, 1
	default:
		return flashScaled, math.Log2E, s, 1
	}
}

func (c *flashCall) alignment() int {
	flags := 0
	if inPieces(8, present(c.q, c.k, c.v, c.do)...) {
		flags |= flashAligned
	}
	if inPieces(4, present(c.o, c.dq, c.dk, c.dv)...) {
		flags |= flashAlignedFloat
	}
	return flags
}

func present(vs ...View) []View { return slices.DeleteFunc(vs, View.IsZero) }

// ownTile is a Tile of flash.cuh: own range, other range, band, reach, unused.
type ownTile [ownTileWords]int32

const ownTileWords = 8

// ownTiles are the tiles as a kernel wants them whose blocks own queries or, byKey, keys.
func ownTiles(tiles []partition.Tile, byKey bool) []ownTile {
	list := make([]ownTile, 0, len(tiles))
	for _, t := range tiles {
		own, other, lo, hi := t.Q, t.K, t.Band.Lo, t.Band.Hi
		if byKey {
			own, other, lo, hi = t.K, t.Q, -t.Band.Hi, -t.Band.Lo
		}
		if t.Pairs() > 0 {
			list = append(list, ownTile{int32(own.Lo), int32(own.Hi), int32(other.Lo), int32(other.Hi), bound(lo), bound(hi)})
		}
	}
	slices.SortFunc(list, func(a, b ownTile) int { return cmp.Compare(a[0], b[0]) })
	reach := int32(0)
	for i := range list {
		reach = max(reach, list[i][1])
		list[i][6] = reach
	}
	return list
}

// bound is a bound of a band as the device has it: sums with indices do not overflow.
func bound(x int) int32 { return int32(min(max(x, -1<<29), 1<<29)) }

var _ attention.Kernel = (*Flash)(nil)
