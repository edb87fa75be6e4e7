package model

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// cpuAttention computes attention of one rank with the CPU kernel.
type cpuAttention struct {
	kernel *cpu.Kernels
	docs   []int // lengths
	cfg    *hf.Config
	alone
}

func (c cpuAttention) tiles(layer int) (tiles []partition.Tile) {
	band := partition.Band{Lo: -partition.Unbounded}
	if w := c.cfg.Layer(layer).Mixer.Window; w >= 0 {
		band.Lo = -w
	}
	lo := 0
	for _, n := range c.docs {
		r := partition.Range{Lo: lo, Hi: lo + n}
		tiles = append(tiles, partition.Tile{Q: r, K: r, Band: band})
		lo += n
	}
	return tiles
}

func (c cpuAttention) Forward(layer int, out attention.Partial, q, k, v View) error {
	pass, err := c.kernel.Forward(out.O, out, q, Softmax(c.cfg))
	if err != nil {
		return err
	}
	if err := pass.Block(c.block(layer, k, v)); err != nil {
		return err
	}
	return pass.End()
}

func (c cpuAttention) block(layer int, k, v View) attention.Block {
	return attention.Block{K: k, V: v, Tiles: c.tiles(layer), First: true, Last: true}
}

func (c cpuAttention) Backward(layer int, g attention.Grads, do, q, k, v View, out attention.Partial) error {
	s := out.LSE.Shape()
	saved := attention.Saved{O: out.O, LSE: out.LSE, Delta: tensor.New(out.LSE.DType(), s[:]...)}
	pass, err := c.kernel.Backward(g.DQ, do, q, saved, Softmax(c.cfg))
	if err != nil {
		return err
	}
	b := attention.GradBlock{
		Block: c.block(layer, k, v), KeyGrads: attention.KeyGrads{DK: g.DK, DV: g.DV},
		Fresh: partition.Range{Hi: k.Len(tensor.Seq)},
	}
	if err := pass.Block(b); err != nil {
		return err
	}
	return pass.End()
}

// The model on the CPU kernels agrees with the reference operations. Recomputation changes no bit.
func TestModelOnCPUKernels(t *testing.T) {
	for name := range tinyModels {
		for dtype, tolerance := range map[tensor.DType]float64{tensor.F32: 2e-6, tensor.F64: 1e-13} {
			t.Run(fmt.Sprint(name, " ", dtype), func(t *testing.T) {
				wantLoss, want, _ := tinyCase(name, dtype).train(t, 0.5)
				var first []float64
				for _, mode := range []Recompute{RecomputeNone, RecomputeSelective, RecomputeFull} {
					c := tinyCase(name, dtype)
					c.opt = Options{Recompute: mode, LossChunk: 3}
					loss, grads, _, _ := c.trainOnCPU(t)
					near(t, "loss", loss, wantLoss, tolerance*wantLoss)
					if first == nil {
						first = slices.Clone(grads)
					}
					if !slices.Equal(grads, first) {
						t.Errorf("%s: gradients differ from those without recomputing", mode)
					}
					for i := range grads {
						grads[i] -= want[i]
					}
					near(t, "distance of the gradients", norm(grads), 0, tolerance*norm(want))
				}
			})
		}
	}
}

// trainOnCPU runs one pass on the CPU kernels, and moves activations. It returns loss, gradients, the peak of the arena,
// and the bytes moved.
func (c *testCase) trainOnCPU(t *testing.T) (loss float64, grads []float64, peak, moved int64) {
	t.Helper()
	put(c.params.Grads, make([]float64, c.params.Grads.Size()))
	stream := tensor.NewHostStream("compute")
	defer stream.Close()
	m := &mover{run: func(f func()) { stream.Do("move", func() error { f(); return nil }) }}
	c.opt.Hooks = m.hooks()
	cpu := cpu.New(stream)
	att := cpuAttention{kernel: cpu, docs: []int{4, 3}, cfg: c.cfg, alone: alone{cpu.Delta(), cpu, c.att.segments}}
	a, sum := c.arena(), tensor.New(tensor.F64, 1)
	if err := New(c.cfg, cpu, att, c.params, c.opt).ForwardBackward(a, c.batch, sum, 0.5); err != nil {
		t.Fatal(err)
	}
	if err := stream.Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
	return get(sum)[0], get(c.params.Grads), a.Peak(), m.bytes
}
