//go:build cuda

package gpu

import (
	"context"
	"fmt"
	"math"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// BenchmarkFlash measures causal attention of 32:8 heads in bfloat16. A visible pair takes 4 FLOPs per head and dim
// forward, and 2.5 times that backward.
func BenchmarkFlash(b *testing.B) { benchmarkFlash(b, tensor.BF16, 4096, 8192, 16384) }

// BenchmarkFlashWide does the same for wide head dims.
func BenchmarkFlashWide(b *testing.B) {
	for _, dims := range [][2]int{{192, 128}, {256, 256}} {
		for _, seq := range []int{8192, 16384} {
			x := newFlashBench(b, tensor.BF16, seq, dims[0], dims[1])
			x.run(b, fmt.Sprintf("dim=%d,%d/seq=%d", dims[0], dims[1], seq))
		}
	}
}

// BenchmarkFlash512 does the same for whole passes of head dim 512, with the heads of Gemma 4's global layers, and for
// packed documents.
func BenchmarkFlash512(b *testing.B) {
	for _, heads := range [][2]int{{16, 2}, {32, 4}} {
		for _, seq := range []int{8192, packTokens, 32768} {
			x := newFlashBenchOf(b, tensor.BF16, seq, heads[0], heads[1], 512, 512)
			name := "causal"
			if seq == packTokens {
				name = "documents"
				x.tiles = packTiles(b)
			}
			of := fmt.Sprintf("%s/heads=%d,%d/seq=%d", name, heads[0], heads[1], seq)
			b.Run("forward/"+of, func(b *testing.B) { x.time(b, 2, 2, x.whole(x.fast, false)) })
			b.Run("both/"+of, func(b *testing.B) { x.time(b, 8, 6, x.whole(x.fast, true)) })
		}
	}
}

// packTiles returns the tiles of pack on one rank.
func packTiles(b *testing.B) []partition.Tile {
	mask, err := partition.NewMask(true, -1, packTokens, packTokens, pack)
	check(b, err)
	return partition.Plan(partition.Shape{SeqQ: packTokens, SeqKV: packTokens, Size: 1,
		Layout: partition.Contiguous{}, Mask: mask}, 0, 0)
}

// BenchmarkFlashMargin does the same on a part of the SMs.
func BenchmarkFlashMargin(b *testing.B) {
	x := newFlashBench(b, tensor.BF16, 16384, 128, 128)
	for _, margin := range []int{0, 1, 16} {
		x.fast.margin, x.ordered.margin = margin, margin
		x.run(b, fmt.Sprintf("margin=%d", margin))
	}
}

// BenchmarkFlashSections does the same for the forward pass of long sequences, in one launch and in launches of fewer
// keys.
func BenchmarkFlashSections(b *testing.B) {
	for _, seq := range []int{1 << 17, 1 << 18} {
		x := newFlashBench(b, tensor.BF16, seq, 128, 128)
		for _, keys := range []int{seq, 1 << 16, 1 << 15, 1 << 14} {
			x.fast.section = keys
			b.Run(fmt.Sprintf("seq=%d/keys=%d", seq, keys), func(b *testing.B) {
				x.time(b, 2, 2, x.whole(x.fast, false))
			})
		}
	}
}

// BenchmarkFlashDocuments does the same for packed documents with 64 query heads.
func BenchmarkFlashDocuments(b *testing.B) {
	x := newFlashBenchOf(b, tensor.BF16, packTokens, 64, 8, 128, 128)
	x.tiles = packTiles(b)
	x.run(b, fmt.Sprintf("seq=%d", packTokens))
}

// BenchmarkFlashFloat32 does the same in float32.
func BenchmarkFlashFloat32(b *testing.B) { benchmarkFlash(b, tensor.F32, 4096, 8192) }

func benchmarkFlash(b *testing.B, dtype tensor.DType, seqs ...int) {
	for _, dim := range []int{128, 64} {
		for _, seq := range seqs {
			x := newFlashBench(b, dtype, seq, dim, dim)
			x.run(b, fmt.Sprintf("dim=%d/seq=%d", dim, seq))
			small := fmt.Sprintf("backward, small shapes/dim=%d/seq=%d", dim, seq)
			b.Run(small, func(b *testing.B) { x.time(b, 6, 4, x.backward(x.small)) })
		}
	}
}

// BenchmarkDeviceReference does the same with the reference, on a short sequence.
func BenchmarkDeviceReference(b *testing.B) {
	x := newFlashBench(b, tensor.BF16, 2048, 128, 128)
	k := x.newDeviceReference()
	b.Run("forward", func(b *testing.B) { x.time(b, 2, 2, x.forward(k)) })
	b.Run("backward", func(b *testing.B) { x.time(b, 6, 4, x.backward(k)) })
}

type flashBench struct {
	*cudaRig
	fast, ordered  *Flash
	small          *Flash // with the shapes for little shared memory
	q, k, v, do, o View
	acc            attention.Partial
	delta          View
	grads          attention.Grads
	tiles          []partition.Tile
	p              attention.Softmax
}

func newFlashBench(b *testing.B, dtype tensor.DType, seq, dim, dimV int) *flashBench {
	b.Helper()
	return newFlashBenchOf(b, dtype, seq, 32, 8, dim, dimV)
}

func newFlashBenchOf(b *testing.B, dtype tensor.DType, seq, qHeads, kvHeads, dim, dimV int) *flashBench {
	b.Helper()
	x := &flashBench{cudaRig: newCUDARig(b), p: attention.Softmax{Scale: 1 / math.Sqrt(float64(dim))}}
	x.fast, x.ordered, x.small = x.newFlash(false), x.newFlash(true), x.newSmallFlash(false)
	of := func(dtype tensor.DType, heads, dim int) View {
		return place(b, x.loader.Device(), dtype, [4]int{1, seq, heads, dim})
	}
	// Random numbers, since zeros would draw less power. Repeated rows suffice.
	random := func(heads, dim int) View {
		const some = 256
		v := of(dtype, heads, dim)
		few, _ := x.normal(dtype, 1, some, heads, dim)
		for at := 0; at < seq; at += some {
			x.stream.Copy(v.Slice(tensor.Seq, at, at+some).Addr(), few.Addr(), int64(few.Size()*dtype.Size()))
		}
		return v
	}
	x.q, x.k, x.v = random(qHeads, dim), random(kvHeads, dim), random(kvHeads, dimV)
	x.do, x.o = random(qHeads, dimV), of(dtype, qHeads, dimV)
	x.acc = attention.Partial{O: of(tensor.F32, qHeads, dimV), LSE: of(tensor.F32, qHeads, 1)}
	x.delta = of(tensor.F32, qHeads, 1)
	x.grads = attention.Grads{DQ: of(tensor.F32, qHeads, dim), DK: of(tensor.F32, kvHeads, dim),
		DV: of(tensor.F32, kvHeads, dimV)}
	x.tiles = []partition.Tile{wholeTile(seq, causal)}
	return x
}

// run measures the passes.
func (x *flashBench) run(b *testing.B, of string) {
	b.Run("forward/"+of, func(b *testing.B) { x.time(b, 2, 2, x.forward(x.fast)) })
	b.Run("backward/"+of, func(b *testing.B) { x.time(b, 6, 4, x.backward(x.fast)) })
	b.Run("backward, deterministic/"+of, func(b *testing.B) { x.time(b, 6, 4, x.backward(x.ordered)) })
}

func (x *flashBench) block() attention.Block {
	return attention.Block{K: x.k, V: x.v, Tiles: x.tiles}
}

func (x *flashBench) keyGrads() attention.KeyGrads {
	return attention.KeyGrads{DK: x.grads.DK, DV: x.grads.DV}
}

// forward queues a block of a forward pass, and backward a block of a backward pass after one.
func (x *flashBench) forward(k attention.Kernel) func() error {
	pass, err := k.Forward(x.o, x.acc, x.q, x.p)
	check(x.t, err)
	return func() error { return pass.Block(x.block()) }
}

func (x *flashBench) backward(k attention.Kernel) func() error {
	forward, err := x.fast.Forward(x.o, x.acc, x.q, x.p)
	check(x.t, err)
	check(x.t, forward.Block(x.block()))
	check(x.t, forward.End())
	pass, err := k.Backward(x.grads.DQ, x.do, x.q, attention.Saved{O: x.o, LSE: x.acc.LSE, Delta: x.delta}, x.p)
	check(x.t, err)
	b := attention.GradBlock{Block: attention.Block{K: x.k, V: x.v}, KeyGrads: x.keyGrads()}
	first := b
	first.Fresh = span(0, x.k.Len(tensor.Seq))
	check(x.t, pass.Block(first))
	b.Tiles = x.tiles
	return func() error { return pass.Block(b) }
}

// time measures calls, given the FLOPs for each visible pair, head, and dim of q and k, and of v.
func (x *flashBench) time(b *testing.B, ofQK, ofV float64, call func() error) {
	sync := func() { check(b, x.stream.Sync(context.Background())) }
	check(b, call())
	sync()
	b.ResetTimer()
	for range b.N {
		check(b, call())
	}
	sync()
	b.StopTimer()
	work := float64(partition.Pairs(x.tiles)) * (ofQK*float64(x.q.Cols()) + ofV*float64(x.do.Cols()))
	b.ReportMetric(work*float64(b.N)/b.Elapsed().Seconds()/1e12, "TFLOP/s")
}
