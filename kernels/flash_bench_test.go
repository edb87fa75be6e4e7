//go:build cuda

package kernels

import (
	"context"
	"fmt"
	"math"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/partition"
)

// BenchmarkFlash is causal attention of 32:8 heads in bfloat16: 4 FLOPs forward for a visible
// pair, head and dim, 2.5 times that backward.
func BenchmarkFlash(b *testing.B) {
	for _, dim := range []int{128, 64} {
		for _, seq := range []int{4096, 8192, 16384} {
			x := newFlashBench(b, seq, dim)
			b.Run(fmt.Sprintf("forward/dim=%d/seq=%d", dim, seq), func(b *testing.B) { x.time(b, 4, x.forward(x.fast)) })
			b.Run(fmt.Sprintf("backward/dim=%d/seq=%d", dim, seq), func(b *testing.B) { x.time(b, 10, x.backward(x.fast)) })
			b.Run(fmt.Sprintf("backward, deterministic/dim=%d/seq=%d", dim, seq), func(b *testing.B) { x.time(b, 10, x.backward(x.ordered)) })
			b.Run(fmt.Sprintf("backward, small shapes/dim=%d/seq=%d", dim, seq), func(b *testing.B) { x.time(b, 10, x.backward(x.small)) })
		}
	}
}

// BenchmarkDeviceReference is the same by the reference, on a short sequence.
func BenchmarkDeviceReference(b *testing.B) {
	x := newFlashBench(b, 2048, 128)
	k := x.newDeviceReference()
	b.Run("forward", func(b *testing.B) { x.time(b, 4, x.forward(k)) })
	b.Run("backward", func(b *testing.B) { x.time(b, 10, x.backward(k)) })
}

type flashBench struct {
	*cudaRig
	fast, ordered  *Flash
	small          *Flash // as GPUs with little shared memory compute
	q, k, v, do, o View
	acc            attention.Partial
	delta          View
	grads          attention.Grads
	tiles          []partition.Tile
	p              attention.Softmax
}

func newFlashBench(b *testing.B, seq, dim int) *flashBench {
	b.Helper()
	x := &flashBench{cudaRig: newCUDARig(b), p: attention.Softmax{Scale: 1 / math.Sqrt(float64(dim))}}
	x.fast, x.ordered, x.small = x.newFlash(false), x.newFlash(true), x.newSmallFlash(false)
	of := func(dtype tensor.DType, heads, dim int) View {
		mem, err := x.loader.Device().Alloc(int64(seq * heads * dim * dtype.Size()))
		check(b, err)
		return tensor.Dense(mem, dtype, 0, [4]int{1, seq, heads, dim})
	}
	// Random numbers, as zeros would draw less power; the same rows again and again will do.
	random := func(heads int) View {
		const some = 256
		v := of(tensor.BF16, heads, dim)
		few, _ := x.normal(tensor.BF16, 1, some, heads, dim)
		for at := 0; at < seq; at += some {
			x.stream.Copy(cuda.Addr(v.Slice(tensor.Seq, at, at+some)), cuda.Addr(few), int64(few.Size())*2)
		}
		return v
	}
	x.q, x.k, x.v, x.do, x.o = random(32), random(8), random(8), random(32), of(tensor.BF16, 32, dim)
	x.acc = attention.Partial{O: of(tensor.F32, 32, dim), LSE: of(tensor.F32, 32, 1)}
	x.delta = of(tensor.F32, 32, 1)
	x.grads = attention.Grads{DQ: of(tensor.F32, 32, dim), DK: of(tensor.F32, 8, dim), DV: of(tensor.F32, 8, dim)}
	x.tiles = []partition.Tile{{Q: partition.Range{Hi: seq}, K: partition.Range{Hi: seq}, Band: partition.Band{Lo: -partition.Unbounded}}}
	return x
}

// forward is a forward call of a kernel, backward a backward call after one of those.
func (x *flashBench) forward(k attention.Kernel) func() error {
	return func() error { return k.Forward(x.acc, x.q, x.k, x.v, x.tiles, x.p) }
}

func (x *flashBench) backward(k attention.Kernel) func() error {
	for _, err := range []error{
		x.fast.Reset(x.acc), x.fast.Forward(x.acc, x.q, x.k, x.v, x.tiles, x.p), x.fast.Finish(x.o, x.acc),
		x.fast.Delta(x.delta, x.do, x.o), x.fast.ResetGrads(x.grads),
	} {
		check(x.t, err)
	}
	s := attention.Saved{O: x.o, LSE: x.acc.LSE, Delta: x.delta}
	return func() error { return k.Backward(x.grads, x.do, x.q, x.k, x.v, s, x.tiles, x.p) }
}

func (x *flashBench) time(b *testing.B, flops float64, call func() error) {
	sync := func() { check(b, x.stream.Sync(context.Background())) }
	check(b, call())
	sync()
	b.ResetTimer()
	for range b.N {
		check(b, call())
	}
	sync()
	b.StopTimer()
	work := flops * float64(x.tiles[0].Pairs()) * float64(x.q.Cols())
	b.ReportMetric(work*float64(b.N)/b.Elapsed().Seconds()/1e12, "TFLOP/s")
}
