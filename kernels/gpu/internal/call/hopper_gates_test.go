//go:build cuda

package call

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// arrive makes two thirds of the keys and values arrive while the next kernel runs, one third each time it waits for
// them. Until then they are NaN. arrived copies the rest.
func (k hostHopper) arrive(keys, values View) (gates []attention.Gate, arrived func(), err error) {
	if k.late == nil {
		return nil, func() {}, nil
	}
	type gate struct {
		open, waiting *uint64
		come          func()
	}
	const count = 1<<40 + 3
	all := make([]gate, 2)
	for i := range all {
		m, err := k.alloc(16)
		if err != nil {
			return nil, nil, err
		}
		words := unsafe.Slice((*uint64)(m.Ptr()), 2)
		clear(words)
		n := keys.Len(tensor.Seq)
		rows := partition.Range{Lo: (i + 1) * n / 3, Hi: (i + 2) * n / 3}
		in := func(row int) bool { return rows.Lo <= row && row < rows.Hi }
		restoreK, restoreV := spoilRows(keys, in), spoilRows(values, in)
		all[i] = gate{&words[0], &words[1], sync.OnceFunc(func() { restoreK(); restoreV() })}
		at := uint64(uintptr(m.Ptr()))
		k.move(&at)
		gates = append(gates, attention.Gate{Rows: rows, Gate: tensor.Gate{Word: at, Count: count}})
	}
	k.during = func(over <-chan struct{}) {
		for left := slices.Clone(all); len(left) > 0; {
			select {
			case <-over:
				return
			case <-time.After(100 * time.Microsecond):
			}
			left = slices.DeleteFunc(left, func(g gate) bool {
				if atomic.LoadUint64(g.waiting) == 0 {
					return false
				}
				g.come()
				atomic.StoreUint64(g.open, count)
				*k.late++
				return true
			})
		}
	}
	return gates, func() {
		for i := len(all) - 1; i >= 0; i-- {
			all[i].come()
		}
		k.during = nil
	}, nil
}

// TestGatesOnHost runs kernels that begin before their keys have arrived.
func TestGatesOnHost(t *testing.T) {
	h := newHost(t)
	for _, dim := range []int{64, 128, 256} {
		for _, deterministic := range []bool{false, true} {
			if testing.Short() && deterministic != (dim == 128) {
				continue
			}
			t.Run(fmt.Sprintf("%d, deterministic %t", dim, deterministic), func(t *testing.T) {
				h.t = t
				waits := 0
				k := &hostFlash{h, deterministic, large}
				rig := k.rig()
				rig.Kernel = hostHopper{hostFlash: k, sms: 4, late: &waits}
				seeds := uint64(4)
				if testing.Short() {
					seeds = 1
				}
				for seed := range seeds {
					c := attentiontest.RandomCase(seed)
					c.Dim, c.DimV, c.Layout, c.Softmax = dim, dim, attentiontest.Dense, attention.Softmax{
						Scale: 1 / math.Sqrt(float64(dim)),
					}
					attentiontest.Check(t, rig, c, tensor.BF16)
				}
				if waits == 0 {
					t.Error("no kernel has waited")
				}
			})
		}
	}
}

// TestGates checks the gates for which blocks wait, and that blocks of queries with gates come last.
func TestGates(t *testing.T) {
	s, _ := source.HopperShapeFor(128, 128)
	r := func(lo, hi int) partition.Range { return partition.Range{Lo: lo, Hi: hi} }
	q, k := tensor.New(tensor.BF16, 1, 512, 4, 128), tensor.New(tensor.BF16, 1, 1024, 2, 128)
	q32, k32 := tensor.New(tensor.F32, 1, 512, 4, 128), tensor.New(tensor.F32, 1, 1024, 2, 128)
	a, b := tensor.Gate{Word: 1 << 40, Count: 5}, tensor.Gate{Word: 1<<40 + 8, Count: 7}
	f := Flash{
		Tensors: Tensors{
			Q:     q,
			K:     k,
			V:     k,
			DO:    q,
			O:     q32,
			DQ:    q32,
			DK:    k32,
			DV:    k32,
			LSE:   tensor.New(tensor.F32, 1, 512, 4, 1),
			Delta: tensor.New(tensor.F32, 1, 512, 4, 1),
		},
		Tiles: []partition.Tile{
			{Q: r(0, 256), K: r(0, 300), Band: partition.Full()},
			{Q: r(256, 384), K: r(300, 640), Band: partition.Full()},
			{
				Q:    r(384, 512),
				K:    r(640, 1024),
				Band: partition.Band{Lo: -partition.Unbounded, Hi: 256},
			}, // causal: aligned to the ends of both, it would be 512
		},
		Gates: []attention.Gate{
			{Rows: r(300, 310), Gate: a},
			{Rows: r(310, 400), Gate: b},
			{Rows: r(640, 700), Gate: a},
		},
	}
	forward, ok := f.HopperForward(s, View{}, true, false)
	if !ok {
		t.Fatal("nothing to do")
	}
	gates := []source.HopperGate{
		{At: [2]uint32{0, 256}, Count: [2]uint32{5, 0}},
		{At: [2]uint32{8, 256}, Count: [2]uint32{7, 0}},
	}
	if l := forward.Lists; !slices.Equal(l.Needs, []uint32{0, 0, 3, 1}) || !slices.Equal(l.Gates, gates) ||
		forward.Params.Early != 2 {
		t.Errorf("forward: needs %v of %v, %d early", l.Needs, l.Gates, forward.Params.Early)
	}
	for i, block := range forward.Lists.Order {
		if late := forward.Lists.Needs[block] != 0; late != (i >= int(forward.Params.Early)) {
			t.Errorf("forward: blocks come in the order %v", forward.Lists.Order)
		}
	}
	backward := f.HopperBackward(s, SMs{132, 132}, partition.Range{})
	if l := backward.Lists; !slices.Equal(l.Needs, []uint32{0, 0, 3, 2, 0, 1, 0, 0}) || !slices.Equal(l.Gates, gates) {
		t.Errorf("backward: needs %v of %v", l.Needs, l.Gates)
	}
	// Blocks also wait for keys in their last step that no query sees, since the values must not be NaN.
	f.Tiles, f.Gates = []partition.Tile{
		{Q: r(0, 128), K: r(0, 1024), Band: partition.Band{Lo: -partition.Unbounded, Hi: 10}},
	}, []attention.Gate{
		{Rows: r(170, 180), Gate: a},
	}
	if forward, _ = f.HopperForward(s, View{}, true, false); forward.Lists.Needs[0] != 1 {
		t.Error("values that the last step brings may not be there yet")
	}
	for i := range 40 {
		f.Gates = append(f.Gates, attention.Gate{Rows: r(i, i+1), Gate: tensor.Gate{Word: uint64(i)}})
	}
	if within, before := HopperWaits(f.Gates); len(within) != source.HopperGates ||
		len(before) != 41-source.HopperGates {
		t.Errorf("of 41 gates %d are waited for in the kernel, and %d before", len(within), len(before))
	}
}
