package ring_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// folder is the CPU's kernel as an attention.Folder. It really leaves out what it may leave out: what
// is held is in memory of its own until AddGrads.
type folder struct {
	attention.Kernel
	t          *testing.T
	into       tensor.View
	next, held attention.Grads
	own        attention.Grads // holds what belongs into held
}

func (f *folder) Into(o tensor.View)       { f.into = o }
func (f *folder) Hold(acc attention.Grads) { f.alone("Hold"); f.next = acc }
func (f *folder) alone(call string) {
	if !f.held.DK.IsZero() {
		f.t.Errorf("%s, with gradients held for AddGrads", call)
	}
}

func (f *folder) Finish(o tensor.View, acc attention.Partial) error {
	if f.into != o {
		f.t.Error("Finish writes somewhere else than Into said")
	}
	return f.Kernel.Finish(o, acc)
}

func (f *folder) FinishGrads(g attention.Grads) error {
	f.alone("FinishGrads")
	return f.Kernel.FinishGrads(g)
}

func (f *folder) ResetGrads(g attention.Grads) error {
	f.alone("ResetGrads")
	return f.Kernel.ResetGrads(g)
}

func (f *folder) Backward(acc attention.Grads, do, q, k, v tensor.View, s attention.Saved, tiles []partition.Tile, p attention.Softmax) error {
	f.alone("Backward")
	next := f.next
	f.next = attention.Grads{}
	if next.DK.IsZero() {
		return f.Kernel.Backward(acc, do, q, k, v, s, tiles, p)
	}
	if next != acc {
		f.t.Error("Backward has other accumulators than Hold")
	}
	f.held, f.own = acc, attention.Grads{DQ: acc.DQ, DK: like(k, k.Len(1), k.Len(2), k.Len(3)), DV: like(v, v.Len(1), v.Len(2), v.Len(3))}
	return f.Kernel.Backward(f.own, do, q, k, v, s, tiles, p)
}

func (f *folder) AddGrads(dst, src attention.Grads) error {
	for _, x := range [][2]tensor.View{{f.held.DK, f.own.DK}, {f.held.DV, f.own.DV}, {dst.DK, src.DK}, {dst.DV, src.DV}} {
		if x[0].IsZero() {
			continue
		}
		if err := f.Kernel.Add(x[0], x[1]); err != nil {
			return err
		}
	}
	f.held = attention.Grads{}
	return nil
}

// A kernel that is told what comes next gives the same.
func TestRingTellsAFolderWhatComesNext(t *testing.T) {
	rng := rand.New(rand.NewPCG(13, 14))
	for _, m := range masks {
		for _, size := range []int{1, 3, 4} {
			for _, shape := range m.shapes(t, size) {
				for _, algorithm := range ring.Algorithms {
					p := problem{
						q: random(rng, tensor.F64, 2, m.sq, 2, 8), k: random(rng, tensor.F64, 2, m.skv, 1, 8),
						v: random(rng, tensor.F64, 2, m.skv, 1, 6), do: random(rng, tensor.F64, 2, m.sq, 2, 6),
						shape: shape, softmax: attention.Softmax{Scale: 0.4},
					}
					what := fmt.Sprintf("%s, %s, %s, %d ranks", m.name, algorithm, shape.Layout.Name(), size)
					folding := func(s *tensor.HostStream) attention.Kernel { return &folder{Kernel: kernels.NewCPU(s), t: t} }
					compare(t, what, run(t, p, algorithm, folding), run(t, p, algorithm, cpu), 1e-13)
				}
			}
		}
	}
}
