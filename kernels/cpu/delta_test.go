package cpu

import (
	"context"
	"math"
	"testing"

	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/attention/delta/deltatest"
	"github.com/cprun/cprun/tensor"
)

func newDeltaRig(t testing.TB) deltatest.Rig { return deltaRig(newCPU(t)) }

func deltaRig(c *Kernels) deltatest.Rig {
	return deltatest.HostRig(c.Delta(), func() error { return c.Stream().Sync(context.Background()) })
}

func TestDelta(t *testing.T) {
	deltatest.Test(t, newDeltaRig, tensor.F32, tensor.BF16, tensor.F64, tensor.F16)
	atLevels(t, func(t *testing.T) {
		if used, best := Instructions(); used != best {
			deltatest.Test(t, newDeltaRig, tensor.F32)
		}
		// Dims that are no multiples of a vector, with NaN in the scratch memory.
		c := deltatest.Case{Name: "odd", Batch: 1, KeyHeads: 1, Heads: 2, Segments: []delta.Segment{{Hi: 67}},
			Decay: 0.1, Beta: 1}
		k := newCPU(t)
		for _, dims := range [][2]int{{40, 40}, {5, 3}, {3, 21}} {
			c.Dim, c.DimV = dims[0], dims[1]
			deltatest.Check(t, deltaRig(k), c, tensor.F32)
			for _, s := range k.scratch {
				for i := range s.f32 {
					s.f32[i] = float32(math.NaN())
				}
			}
		}
	})
}

// TestDeltaElsewhere checks that views outside host memory are errors, except views that a call does not use.
func TestDeltaElsewhere(t *testing.T) {
	k, here, far := newCPU(t).Delta(), tensor.NewHostArena(1<<20), tensor.NewMeter()
	rows := func(dim int) tensor.View { return here.Alloc(tensor.F32, 1, 8, 1, dim) }
	a := delta.Args{Q: rows(8), K: rows(8), V: rows(8), G: rows(1), Beta: rows(1), O: rows(8), Scale: 1,
		State: here.Alloc(tensor.F32, 1, 1, 8, 8), DState: far.Alloc(tensor.F64, 1), Segments: []delta.Segment{{Hi: 8}},
		Entered: []int{0}}
	check(t, k.Forward(a))
	a.State = far.Alloc(tensor.F32, 1, 1, 8, 8)
	if k.Forward(a) == nil || k.Compose(a.State, far.Alloc(tensor.F32, 1, 1, 8, 16), a.State) == nil {
		t.Error("memory of another device is no error")
	}
}
