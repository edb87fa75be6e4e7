package cpu

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// A problem is causal self-attention of seq tokens with 8 query heads and 2 KV heads.
type problem struct {
	q, k, v, do tensor.View
	acc         attention.Partial
	delta       tensor.View
	grads       attention.Grads
	tiles       []partition.Tile
	p           attention.Softmax
}

func newProblem(seq, dim int) *problem {
	rng := rand.New(rand.NewPCG(1, 2))
	draw := func(heads int) tensor.View {
		v := tensor.New(tensor.F32, 1, seq, heads, dim)
		for i, x := range tensor.Data[float32](v) {
			tensor.Data[float32](v)[i] = x + float32(rng.NormFloat64())
		}
		return v
	}
	empty := func(heads, dim int) tensor.View { return tensor.New(tensor.F32, 1, seq, heads, dim) }
	return &problem{
		q: draw(8), k: draw(2), v: draw(2), do: draw(8),
		acc: attention.Partial{O: empty(8, dim), LSE: empty(8, 1)}, delta: empty(8, 1),
		grads: attention.Grads{DQ: empty(8, dim), DK: empty(2, dim), DV: empty(2, dim)},
		tiles: []partition.Tile{{
			Q: partition.Range{Lo: 0, Hi: seq}, K: partition.Range{Lo: 0, Hi: seq},
			Band: partition.Band{Lo: -partition.Unbounded, Hi: 0},
		}},
		p: attention.Softmax{Scale: 1 / math.Sqrt(float64(dim))},
	}
}

func (x *problem) forward(t testing.TB, c *Kernels) {
	t.Helper()
	pass, err := c.Forward(x.acc.O, x.acc, x.q, x.p)
	check(t, err)
	check(t, pass.Block(x.block()))
	check(t, pass.End())
}

func (x *problem) block() attention.Block {
	return attention.Block{K: x.k, V: x.v, Tiles: x.tiles, First: true, Last: true}
}

func (x *problem) backward(t testing.TB, c *Kernels) {
	t.Helper()
	pass, err := c.Backward(x.grads.DQ, x.do, x.q, attention.Saved{O: x.acc.O, LSE: x.acc.LSE, Delta: x.delta}, x.p)
	check(t, err)
	check(t, pass.Block(attention.GradBlock{
		Block: x.block(), KeyGrads: attention.KeyGrads{DK: x.grads.DK, DV: x.grads.DV},
		Fresh: partition.Range{Hi: x.k.Len(tensor.Seq)},
	}))
	check(t, pass.End())
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func BenchmarkForward(b *testing.B)  { benchmark(b, 2, (*problem).forward) }
func BenchmarkBackward(b *testing.B) { benchmark(b, 5, (*problem).backward) }

// benchmark reports the floating point operations of visible pairs, given the number of matrix products.
func benchmark(b *testing.B, products int, run func(*problem, testing.TB, *Kernels)) {
	for _, seq := range []int{1024, 2048, 8192} {
		for _, dim := range []int{32, 64, 128} {
			b.Run(
				fmt.Sprintf("seq=%d/dim=%d", seq, dim),
				func(b *testing.B) { benchmarkShape(b, seq, dim, products, run) },
			)
		}
	}
}

func benchmarkShape(b *testing.B, seq, dim, products int, run func(*problem, testing.TB, *Kernels)) {
	c, x := newCPU(b), newProblem(seq, dim)
	x.forward(b, c)
	check(b, c.Stream().Sync(context.Background()))
	b.ReportAllocs()
	for b.Loop() {
		run(x, b, c)
		check(b, c.Stream().Sync(context.Background()))
	}
	flop := float64(products) * 2 * float64(x.tiles[0].Pairs()) * 8 * float64(dim)
	b.ReportMetric(flop*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
}
