//go:build cuda

package call

import (
	"fmt"
	"math"
	"testing"
	"unsafe"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/kernels/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// hostHopper is attention by the kernels for Hopper on a host: what gpu.Flash does on such a GPU. What the
// copy engine cannot bring is left to hostFlash, in the same pass.
type hostHopper struct{ *hostFlash }

func (k hostHopper) Forward(o View, acc attention.Partial, q View, p attention.Softmax) (attention.ForwardPass, error) {
	f, err := k.hostFlash.Forward(o, acc, q, p)
	if err != nil {
		return nil, err
	}
	each(acc.O, func(float32, [4]int) float32 { return float32(math.NaN()) }) // until the first block
	each(acc.LSE, func(float32, [4]int) float32 { return float32(math.NaN()) })
	return &hopperForward{hostForward: f.(*hostForward), fresh: true}, nil
}

type hopperForward struct {
	*hostForward
	fresh, done bool
}

func (f *hopperForward) settle() {
	if f.fresh {
		each(f.acc.O, func(float32, [4]int) float32 { return 0 })
		each(f.acc.LSE, func(float32, [4]int) float32 { return float32(math.Inf(-1)) })
	}
	f.fresh = false
}

func (f *hopperForward) Block(b attention.Block) error {
	if err := attention.CheckBlock(f.acc.O, f.q, b, f.p); err != nil {
		return err
	}
	c := Flash{Tensors: Tensors{Q: f.q, K: b.K, V: b.V, O: f.acc.O, LSE: f.acc.LSE}, Softmax: f.p, Tiles: b.Tiles}
	s, ok := source.HopperShapeFor(c.Q.Len(tensor.Dim), c.V.Len(tensor.Dim))
	rounds := f.o != f.acc.O && f.o.DType() == f.q.DType()
	if !ok || !c.TakesHopper() || rounds && !c.TakesHopper(f.o) {
		f.settle()
		return f.hostForward.Block(b)
	}
	l, some := c.HopperForward(s, f.o, f.fresh, b.Last && rounds)
	if !some {
		return nil
	}
	f.fresh, f.done = false, b.Last && rounds
	return f.k.launchForward(l)
}

func (f *hopperForward) End() error {
	f.settle()
	if f.done {
		return nil
	}
	return f.hostForward.End()
}

// words puts words where kernels reach them, and is their address there.
func (h *host) words(words []uint32) (uint64, error) {
	m, err := h.alloc(int64(4 * len(words)))
	if err != nil {
		return 0, err
	}
	copy(unsafe.Slice((*uint32)(m.Ptr()), len(words)), words)
	at := uint64(uintptr(m.Ptr()))
	h.move(&at)
	return at, nil
}

// encode makes maps as the copy engine of testdata/host reads them.
func (h *host) encode(maps []Map, to ...*source.TensorMap) {
	for i, m := range maps {
		*to[i] = *(*source.TensorMap)(unsafe.Pointer(new(h.mapOf(m.View, m.Rows))))
	}
}

// complete moves a call's tensors and brings its tiles.
func (h *host) complete(p *source.FlashParams, tiles []source.FlashTile) (err error) {
	h.move(&p.Q.At, &p.K.At, &p.V.At, &p.Dout.At, &p.O.At, &p.LSE.At, &p.Delta.At, &p.DQ.At, &p.DK.At, &p.DV.At)
	if tiles != nil {
		p.Tiles, err = h.words(Words(tiles))
	}
	return err
}

func (k *hostFlash) launchForward(l HopperForward) error {
	p := &l.Params
	k.encode(l.Maps[:], &p.Q, &p.K, &p.V)
	k.move(&p.Out.At)
	err := k.complete(&p.P, l.Tiles)
	if err == nil && l.Order != nil {
		p.Order, err = k.words(Words(l.Order))
	}
	if err == nil {
		p.Next, err = k.words([]uint32{0})
	}
	if err != nil {
		return err
	}
	const grid = 2
	return k.start(l.Program, l.Kernel, [3]int{min(grid, l.Blocks), 1, 1}, [2]int{l.Threads, 1}, l.Shared, argumentsOf(p))
}

func (k hostHopper) Backward(dq, do, q View, s attention.Saved, p attention.Softmax) (attention.BackwardPass, error) {
	f, err := k.hostFlash.Backward(dq, do, q, s, p)
	if err != nil {
		return nil, err
	}
	return &hopperBackward{f.(*hostBackward)}, nil
}

type hopperBackward struct{ *hostBackward }

func (f *hopperBackward) Block(b attention.GradBlock) error {
	if err := attention.CheckGradBlock(f.do, f.q, b, f.p); err != nil {
		return err
	}
	c := Flash{
		Tensors: Tensors{Q: f.q, K: b.K, V: b.V, DO: f.do, LSE: f.s.LSE, Delta: f.s.Delta, DQ: f.dq, DK: b.DK, DV: b.DV},
		Softmax: f.p, Tiles: b.Tiles,
	}
	s, ok := source.HopperShapeFor(c.Q.Len(tensor.Dim), c.V.Len(tensor.Dim))
	if !ok || s.Queries == 0 || !c.TakesHopper() {
		return f.hostBackward.Block(b)
	}
	fresh := b.KeyGrads.Rows(b.Fresh.Lo, b.Fresh.Hi)
	clear32(fresh.DK)
	clear32(fresh.DV)
	l, some := c.HopperBackward(s, f.k.deterministic)
	if !some {
		return nil
	}
	p := &l.Params
	f.k.encode(l.Maps[:], &p.Q, &p.K, &p.V, &p.Dout, &p.DQ)
	if err := f.k.complete(&p.P, l.Tiles); err != nil {
		return err
	}
	if err := f.k.start(l.Program, l.Kernel, l.Grid, [2]int{l.Threads, 1}, l.Shared, argumentsOf(p)); err != nil || !f.k.deterministic {
		return err
	}
	c.Shape = f.k.shapeFor(f.q.DType(), f.q.Len(tensor.Dim), b.V.Len(tensor.Dim), f.k.backwardNeeds)
	return f.k.launch(c.OrderedDQ())
}

// hopperSuite runs the conformance suite but for the cases that the copy engine cannot bring.
func (k *hostFlash) hopperSuite(t *testing.T, dtype tensor.DType, leaves func(attentiontest.Case) bool) {
	t.Run(fmt.Sprintf("%v, deterministic %t", dtype, k.deterministic), func(t *testing.T) {
		k.t = t
		rig := k.rig()
		rig.Kernel = hostHopper{k}
		attentiontest.TestKernel(t, func(testing.TB) attentiontest.Rig { return rig }, attentiontest.Options{
			DTypes: []tensor.DType{dtype}, MaxHeadDim: source.FlashMaxDim, NoScores: true,
			Leaves: func(c attentiontest.Case) bool { return c.Dim%8 != 0 || c.DimV%8 != 0 || leaves != nil && leaves(c) },
		})
	})
}

// TestHopperOnHost runs the conformance suite on the kernels for Hopper.
func TestHopperOnHost(t *testing.T) {
	h := newHost(t)
	(&hostFlash{h, false, large}).hopperSuite(t, tensor.BF16, nil)
	if !testing.Short() {
		(&hostFlash{h, true, large}).hopperSuite(t, tensor.F16, nil)
	}
}

// TestHopperShapesOnHost runs bands, tiles and folds with head dims of every program.
func TestHopperShapesOnHost(t *testing.T) {
	h := newHost(t)
	seeds := uint64(4)
	if testing.Short() {
		seeds = 1
	}
	for _, s := range source.HopperShapes {
		for _, deterministic := range []bool{false, true} {
			k := &hostFlash{h, deterministic, large}
			rig := k.rig()
			rig.Kernel = hostHopper{k}
			t.Run(fmt.Sprintf("%d and %d, deterministic %t", s.QK, s.V, deterministic), func(t *testing.T) {
				h.t = t
				for seed := range seeds {
					c := attentiontest.RandomCase(seed)
					c.Dim, c.DimV, c.Layout = s.QK, s.V, attentiontest.Dense
					c.Softmax.Scale = 1 / math.Sqrt(float64(c.Dim))
					attentiontest.Check(t, rig, c, tensor.BF16)
				}
			})
		}
		if !h.ran[s.Forward(false).Name] && !h.ran[s.Forward(true).Name] || s.Queries > 0 && !h.ran[s.Backward(false).Name] && !h.ran[s.Backward(true).Name] {
			t.Errorf("%+v has not run", s)
		}
	}
}

// TestLongestFirst holds that blocks which walk over more come first, and that nothing is said where that
// is the order from the last to the first.
func TestLongestFirst(t *testing.T) {
	causal := func(cuts ...int) (tiles []partition.Tile) {
		for i := range len(cuts) - 1 {
			r := partition.Range{Lo: cuts[i], Hi: cuts[i+1]}
			tiles = append(tiles, partition.Tile{Q: r, K: r, Band: partition.Band{Lo: -partition.Unbounded}})
		}
		return tiles
	}
	for _, c := range []struct {
		tiles []partition.Tile
		want  string
	}{
		{causal(0, 512), "[]"},
		{causal(0, 384, 512), "[2 1 3 0]"},
		{causal(0, 128, 256, 384, 512), "[]"},
		{causal(256, 512), "[]"},
		{causal(0, 256), "[1 0 3 2]"},
	} {
		if got := fmt.Sprint(longestFirst(ownTiles(c.tiles, false), 4, 128, 64)); got != c.want {
			t.Errorf("%v: %s, want %s", c.tiles, got, c.want)
		}
	}
}
