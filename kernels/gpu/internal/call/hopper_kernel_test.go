//go:build cuda

package call

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"unsafe"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// hostHopper computes attention with the kernels for Hopper on a host, as gpu.Flash does on such a GPU. In the same
// pass, hostFlash computes the calls with tensors that TMA does not support.
type hostHopper struct {
	*hostFlash
	shape  source.HopperShape  // of a program for tests, in place of the usual one, if set
	sms    int                 // number of SMs of the emulated GPU
	leaves int                 // number of these to leave free
	keys   int                 // of a launch of a forward pass; 0: as many as on such a GPU
	late   *int                // counts waits for keys that arrive during kernels; nil: all have arrived before
	fault  *source.HopperFault // if set, the first backward item never ends, and a waiting block reports it
}

func (k hostHopper) processors() SMs { return SMs{k.sms, k.sms - k.leaves} }

// hopper returns a rig with the kernels for Hopper, on 4 SMs unless x says otherwise.
func (h *host) hopper(deterministic bool, x hostHopper) attentiontest.Rig {
	x.hostFlash, x.sms = &hostFlash{h, deterministic, large}, cmp.Or(x.sms, 4)
	rig := x.rig()
	rig.Kernel = x
	return rig
}

// shapeOf returns source.HopperShapeFor a call, or the shape for tests.
func (k hostHopper) shapeOf(c *Flash) (source.HopperShape, bool) {
	s, ok := source.HopperShapeFor(c.Q.Len(tensor.Dim), c.V.Len(tensor.Dim))
	return cmp.Or(k.shape, s), ok
}

func (k hostHopper) Forward(o View, acc attention.Partial, q View, p attention.Softmax) (attention.ForwardPass, error) {
	f, err := k.hostFlash.Forward(o, acc, q, p)
	if err != nil {
		return nil, err
	}
	each(acc.O, func(float32, [4]int) float32 { return float32(math.NaN()) }) // until the first block
	each(acc.LSE, func(float32, [4]int) float32 { return float32(math.NaN()) })
	return &hopperForward{hostForward: f.(*hostForward), k: k, fresh: true}, nil
}

type hopperForward struct {
	*hostForward
	k           hostHopper
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
	gates, arrived, err := f.k.arrive(b.K, b.V)
	if err != nil {
		return err
	}
	defer arrived()
	c := f.call(b)
	c.Gates = gates
	s, ok := f.k.shapeOf(&c)
	rounds := f.o != f.acc.O && f.o.DType() == f.q.DType()
	if !ok || !c.TakesHopper() || rounds && !c.TakesHopper(f.o) {
		arrived()
		f.settle()
		return f.hostForward.Block(b)
	}
	defer spoilBlock(b, f.q)()
	sections := c.Sections(cmp.Or(f.k.keys, c.SectionKeys()))
	for i := range sections {
		c.Tiles = sections[i]
		last := b.Last && rounds && i == len(sections)-1
		l, some := c.HopperForward(s, f.o, f.fresh, last)
		if !some {
			break
		}
		f.fresh, f.done = false, last
		if err := f.k.launchForward(l); err != nil {
			return err
		}
	}
	return nil
}

func (f *hopperForward) End() error {
	f.settle()
	if f.done {
		return nil
	}
	return f.hostForward.End()
}

// words copies words to the kernels' memory and returns their address there.
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

// encode converts maps to the form of testdata/host's TMA.
func (h *host) encode(maps []Map, to ...*source.TensorMap) {
	for i, m := range maps {
		x := h.mapOf(m.View, m.Rows)
		x.Box[0], x.Permutation = uint64(m.Columns), uint64(m.Columns*m.View.DType().Size())
		*to[i] = *(*source.TensorMap)(unsafe.Pointer(&x))
	}
}

// complete converts a call's addresses and copies its lists.
func (h *host) complete(p *source.FlashParams, l HopperLists, order, needs, gates *uint64) error {
	h.move(&p.Q.At, &p.K.At, &p.V.At, &p.Dout.At, &p.O.At, &p.LSE.At, &p.Delta.At, &p.DQ.At, &p.DK.At, &p.DV.At)
	var errs []error
	put := func(to *uint64, words []uint32) {
		if len(words) > 0 {
			at, err := h.words(words)
			*to, errs = at, append(errs, err)
		}
	}
	put(&p.Tiles, Words(l.Tiles))
	put(order, Words(l.Order))
	put(needs, l.Needs)
	put(gates, Words(l.Gates))
	return errors.Join(errs...)
}

func (k *hostFlash) launchForward(l HopperForward) error {
	p := &l.Params
	k.encode(l.Maps[:], &p.Q, &p.K, &p.V)
	k.move(&p.Out.At)
	err := k.complete(&p.P, l.Lists, &p.Order, &p.Needs, &p.Gates)
	if err == nil {
		p.Next, err = k.words([]uint32{0})
	}
	if err != nil {
		return err
	}
	const grid = 2
	return k.start(l.Program, l.Kernel, [3]int{min(grid, l.Blocks), 1, 1}, [2]int{l.Threads, 1}, l.Shared,
		argumentsOf(p))
}

func (k hostHopper) Backward(dq, do, q View, s attention.Saved, p attention.Softmax) (attention.BackwardPass, error) {
	f, err := k.hostFlash.Backward(dq, do, q, s, p)
	if err != nil {
		return nil, err
	}
	return &hopperBackward{f.(*hostBackward), k}, nil
}

// spoilBlock does what spoil does, for K and V of a block, and for tensors of queries.
func spoilBlock(b attention.Block, queries ...View) (restore func()) {
	keys := func(t partition.Tile) partition.Range { return t.K }
	undo := []func(){spoil(b.K, b.Tiles, keys), spoil(b.V, b.Tiles, keys)}
	for _, v := range queries {
		undo = append(undo, spoil(v, b.Tiles, func(t partition.Tile) partition.Range { return t.Q }))
	}
	return func() {
		for _, f := range undo {
			f()
		}
	}
}

// spoil makes rows in no tile NaN, which must not affect any result. The returned function undoes it.
func spoil(v View, tiles []partition.Tile, of func(partition.Tile) partition.Range) (restore func()) {
	return spoilRows(v, func(row int) bool {
		return !slices.ContainsFunc(tiles, func(t partition.Tile) bool { return of(t).Lo <= row && row < of(t).Hi })
	})
}

// spoilRows makes some rows of a tensor NaN. The returned function undoes it.
func spoilRows(v View, some func(row int) bool) (restore func()) {
	var old []float32
	each(v, func(x float32, at [4]int) float32 {
		old = append(old, x)
		if some(at[tensor.Seq]) {
			return float32(math.NaN())
		}
		return x
	})
	return func() {
		i := -1
		each(v, func(x float32, at [4]int) float32 {
			if i++; some(at[tensor.Seq]) {
				return old[i]
			}
			return x
		})
	}
}

type hopperBackward struct {
	*hostBackward
	k hostHopper
}

func (f *hopperBackward) Block(b attention.GradBlock) error {
	if err := attention.CheckGradBlock(f.do, f.q, b, f.p); err != nil {
		return err
	}
	gates, arrived, err := f.k.arrive(b.K, b.V)
	if err != nil {
		return err
	}
	defer arrived()
	c := f.call(b)
	c.Gates = gates
	s, ok := f.k.shapeOf(&c)
	if !ok || !c.TakesHopper() || f.k.deterministic && !c.HasOrder(s) {
		arrived()
		return f.hostBackward.Block(b)
	}
	launch := c.HopperBackward
	if f.k.deterministic {
		launch = c.HopperOrdered
	}
	l := launch(s, f.k.processors(), b.Fresh)
	if !l.SetsFresh {
		clearFresh(b)
	}
	if l.Grid[0] == 0 {
		return nil
	}
	p := &l.Params
	f.k.encode(l.Maps[:], &p.Q, &p.K, &p.V, &p.Dout, &p.DQ)
	err = f.k.complete(&p.P, l.Lists, &p.Order, &p.Needs, &p.Gates)
	if err == nil && l.Progress > 0 {
		p.Progress, err = f.k.words(make([]uint32, l.Progress))
	}
	if err == nil && l.Next > 0 {
		next := make([]uint32, l.Next)
		if f.k.fault != nil {
			next[0] = 1
			p.Fault = uint64(uintptr(unsafe.Pointer(f.k.fault)))
			f.k.move(&p.Fault)
		}
		p.Next, err = f.k.words(next)
		f.k.ran["several items"] = l.Grid[0] < int(p.Blocks)*b.K.Len(tensor.Heads)
	}
	if err != nil {
		return err
	}
	defer spoilBlock(b.Block, f.q, f.do)()
	return f.k.start(l.Program, l.Kernel, l.Grid, [2]int{l.Threads, 1}, l.Shared, argumentsOf(p))
}

// TestHopperOnHost runs the conformance suite on the kernels for Hopper, without the cases that TMA does not support.
func TestHopperOnHost(t *testing.T) {
	h := newHost(t)
	for _, x := range []struct {
		dtype         tensor.DType
		deterministic bool
		keys          int
		short         bool // run with -short
	}{{tensor.BF16, false, 0, true}, {tensor.F16, true, 0, false}, {tensor.BF16, false, 24, false}} {
		if testing.Short() && !x.short {
			continue
		}
		name := fmt.Sprintf("%v, deterministic %t, launches of %d keys", x.dtype, x.deterministic, x.keys)
		t.Run(name, func(t *testing.T) {
			h.t = t
			rig := h.hopper(x.deterministic, hostHopper{keys: x.keys})
			attentiontest.TestKernel(t, func(testing.TB) attentiontest.Rig { return rig }, attentiontest.Options{
				DTypes: []tensor.DType{x.dtype}, MaxHeadDim: source.FlashMaxDim, NoScores: true,
				Leaves: func(c attentiontest.Case) bool { return c.Dim%8 != 0 || c.DimV%8 != 0 },
			})
		})
	}
}

// A shapeCase is a case for a shape.
type shapeCase struct {
	attentiontest.Case
	dtype tensor.DType
}

// isWide reports whether the suite has few cases of a shape, so that all its programs of the backward pass must run.
func isWide(s source.HopperShape) bool { return s.QK > 128 }

// denseCase returns a random case with those head dims, dense and without a cap.
func denseCase(seed uint64, dim, dimV int) attentiontest.Case {
	c := attentiontest.RandomCase(seed)
	c.Dim, c.DimV, c.Layout = dim, dimV, attentiontest.Dense
	c.Softmax = attention.Softmax{Scale: 1 / math.Sqrt(float64(dim))}
	return c
}

// shapeCases returns cases with a shape's head dims. For wide ones, they have both types, a cap or none, rows and keys
// in no tile, and narrower head dims also.
func shapeCases(s source.HopperShape) (list []shapeCase) {
	add := func(seed uint64, narrower int, dtype tensor.DType, softcap float64, in ...partition.Tile) {
		c := denseCase(seed, s.QK-narrower, s.V-narrower)
		if c.Softmax.Softcap = softcap; in != nil {
			c.Tiles = in
		}
		list = append(list, shapeCase{c, dtype})
	}
	if !isWide(s) {
		seeds := uint64(4)
		if testing.Short() {
			seeds = 1
		}
		for seed := range seeds {
			add(seed, 0, tensor.BF16, attentiontest.RandomCase(seed).Softmax.Softcap)
		}
		return list
	}
	add(3, 0, tensor.BF16, 0)
	add(1, 0, tensor.F16, 20, tile(3, 20, 10, 40, full),
		tile(66, 105, 60, 101, partition.Band{Lo: -partition.Unbounded, Hi: 10}))
	if !testing.Short() {
		add(13, 40, tensor.F16, 0)
		add(8, 24, tensor.BF16, 20)
	}
	return list
}

// TestHopperShapesOnHost runs bands, tiles and folds with head dims of every program.
func TestHopperShapesOnHost(t *testing.T) {
	h := newHost(t)
	for _, s := range source.HopperShapes {
		for _, deterministic := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d and %d, deterministic %t", s.QK, s.V, deterministic), func(t *testing.T) {
				h.t = t
				rig := h.hopper(deterministic, hostHopper{})
				for _, c := range shapeCases(s) {
					attentiontest.Check(t, rig, c.Case, c.dtype)
				}
			})
		}
		backward := []source.Program{s.Backward(false, false), s.Backward(true, false)}
		ordered := []source.Program{s.Backward(false, true), s.Backward(true, true)}
		some := [][]source.Program{{s.Forward(false), s.Forward(true)}, backward, ordered}
		if isWide(s) {
			for _, p := range slices.Concat(backward, ordered) {
				some = append(some, []source.Program{p})
			}
		}
		for _, list := range some {
			if !slices.ContainsFunc(list, func(p source.Program) bool { return h.ran[p.Name] }) {
				t.Errorf("%s has not run", list[0].Name)
			}
		}
	}
}

// TestHopperVariantsOnHost runs the kernels whose products read probabilities from shared memory, and the kernels in
// which every lane of a warp arrives at barriers.
func TestHopperVariantsOnHost(t *testing.T) {
	h := newHost(t)
	for _, s := range append(slices.Clone(source.HopperEveryLane), source.HopperSharedP) {
		seeds := []uint64{3}
		if s.SharedP {
			seeds = []uint64{0, 1, 2, 3}
		}
		for _, deterministic := range []bool{false, true} {
			if s.SharedP && !deterministic || testing.Short() && deterministic == isWide(s) {
				continue
			}
			rig := h.hopper(deterministic, hostHopper{shape: s})
			for _, seed := range seeds {
				attentiontest.Check(t, rig, denseCase(seed, s.QK, s.V), tensor.BF16)
			}
			for _, p := range []source.Program{s.Forward(false), s.Backward(false, deterministic)} {
				if !h.ran[p.Name] {
					t.Errorf("%s has not run", p.Name)
				}
			}
		}
	}
}

// TestBadRowsStayInTheirTileOnHost checks that a NaN in a row of a tile reaches no row outside of the tile, although
// kernels compute entire blocks.
func TestBadRowsStayInTheirTileOnHost(t *testing.T) {
	h := newHost(t)
	queries, keys := span(3, 50), span(10, 80)
	for _, deterministic := range []bool{false, true} {
		for _, bad := range []string{"q", "k", "v", "do"} {
			k := &hostFlash{h, deterministic, large}
			h.used = 0
			draw := func(name string, seq int) View {
				v := k.empty(tensor.BF16, seq, 1, 64)
				each(v, func(_ float32, at [4]int) float32 {
					if name == bad && at[tensor.Seq] == 30 {
						return float32(math.NaN())
					}
					return float32(at[tensor.Seq]%5+at[tensor.Dim]%3) / 8
				})
				return v
			}
			s := k.step(hostHopper{hostFlash: k, sms: 4}, draw("q", 70), draw("k", 96), draw("v", 96), draw("do", 70),
				partition.Tile{Q: queries, K: keys, Band: full})
			reached := 0
			for name, out := range map[string]View{"o": s.o, "dq": s.dq, "dk": s.dk, "dv": s.dv} {
				in := queries
				if name == "dk" || name == "dv" {
					in = keys
				}
				each(out, func(y float32, at [4]int) float32 {
					inside := in.Lo <= at[tensor.Seq] && at[tensor.Seq] < in.Hi
					if y != y && inside {
						reached++
					} else if y != 0 && !inside {
						t.Fatalf("deterministic %t, NaN in %s: row %d of %s is %g", deterministic, bad, at[tensor.Seq], name, y)
					}
					return y
				})
			}
			if reached == 0 {
				t.Errorf("deterministic %t: NaN in %s reaches nothing", deterministic, bad)
			}
		}
	}
}

// TestLostTurnOnHost checks that a block of keys that never gets its turn reports itself and the block for which it
// waited, in the rows of any of that block's tiles.
func TestLostTurnOnHost(t *testing.T) {
	for _, list := range []tiles{{doc(0, 300, full)}, {tile(0, 128, 0, 256, full), tile(128, 300, 0, 128, full)}} {
		k := &hostFlash{newHost(t), true, large} // a report ends it
		m, err := k.alloc(int64(unsafe.Sizeof(source.HopperFault{})))
		ok(t, err)
		x := hostHopper{hostFlash: k, sms: 4, fault: (*source.HopperFault)(m.Ptr())}
		v := func(dtype tensor.DType, dim int) View { return k.empty(dtype, 300, 1, dim) }
		q, do := v(tensor.BF16, 128), v(tensor.BF16, 128)
		saved := attention.Saved{O: v(tensor.F32, 128), LSE: v(tensor.F32, 1), Delta: v(tensor.F32, 1)}
		pass, err := x.Backward(v(tensor.F32, 128), do, q, saved, attention.Softmax{Scale: 1})
		ok(t, err)
		err = pass.Block(attention.GradBlock{
			Block:    attention.Block{K: q, V: do, Tiles: list},
			KeyGrads: attention.KeyGrads{DK: v(tensor.F32, 128), DV: v(tensor.F32, 128)}, Fresh: partition.Range{Hi: 300},
		})
		if want := (source.HopperFault{Keys1: 2}); err == nil || *x.fault != want {
			t.Errorf("%v: the error is %v, the report %+v, want %+v", list, err, *x.fault, want)
		}
	}
}

// TestLeavesOnHost runs a grid with fewer blocks than blocks of keys, so that each computes several.
func TestLeavesOnHost(t *testing.T) {
	h := newHost(t)
	for _, dim := range []int{128, 256, 512} {
		for _, deterministic := range []bool{false, true} {
			if testing.Short() && deterministic == (dim == 256) {
				continue
			}
			t.Run(fmt.Sprintf("%d, deterministic %t", dim, deterministic), func(t *testing.T) {
				h.t, h.ran = t, map[string]bool{}
				c := attentiontest.Case{
					Batch: 2, Heads: 4, KVHeads: 2, Dim: dim, DimV: dim, SeqQ: 300, SeqK: 300,
					Softmax: attention.Softmax{Scale: 0.125}, Tiles: tiles{doc(0, 300, causal)},
				}
				if dim > 256 { // which takes long
					c.Batch, c.Heads, c.KVHeads, c.SeqQ, c.SeqK, c.Tiles = 1, 2, 1, 140, 140, tiles{doc(0, 140, causal)}
				}
				attentiontest.Check(t, h.hopper(deterministic, hostHopper{leaves: 2}), c, tensor.BF16)
				if !h.ran["several items"] {
					t.Error("no block has done the work of several")
				}
			})
		}
	}
}
