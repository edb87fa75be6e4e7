//go:build cuda

package gpu

import (
	"context"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/cuda/dnn"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// BenchmarkFused measures a rank's work in the hops of a causal zigzag, 32:8 heads of 128: the calls of cuDNN in
// TFLOP/s (4 FLOPs per pair, head and dim forward, 2.5 times that backward), and the passes over memory around them in
// GB/s.
func BenchmarkFused(b *testing.B) {
	for _, seq := range []int{4096, 8192, 32768} {
		x, half := newFusedBench(b, seq), seq/2
		for _, hop := range []struct {
			name string
			q, k partition.Range
			band partition.Band
		}{
			{"causal", span(0, seq), span(0, seq), causal},
			{"half keys", span(0, seq), span(0, half), partition.Full()},
			{"half queries", span(half, seq), span(0, seq), partition.Full()},
		} {
			tile := partition.Tile{Q: hop.q, K: hop.k, Band: hop.band}
			b.Run(fmt.Sprintf("forward/%s/%d", hop.name, seq), func(b *testing.B) { x.forward(b, tile) })
			b.Run(fmt.Sprintf("backward/%s/%d", hop.name, seq), func(b *testing.B) { x.backward(b, tile) })
		}
		for _, parts := range []int{1, 2, 4} {
			b.Run(fmt.Sprintf("finish/%d parts/%d", parts, seq), func(b *testing.B) { x.finish(b, parts) })
			b.Run(fmt.Sprintf("finish gradients/%d parts/%d", parts, seq), func(b *testing.B) { x.finishGrads(b, parts) })
		}
		b.Run(fmt.Sprintf("add keys/%d", seq), func(b *testing.B) { x.addKeys(b) })
		b.Run(fmt.Sprintf("unified forward/%d", seq), func(b *testing.B) { x.unified(b) })
	}
}

// pack is MagiAttention's first pack of 16K tokens.
var pack = []int{216, 1536, 1536, 762, 350, 75, 75, 150, 350, 150, 75, 30, 3072, 30, 4096, 3881}

const packTokens = 16384

// packShare returns the keys that rank 0 gathers of the pack, and the number of its rows.
func packShare(b *testing.B, ranks int) (g partition.Gathered, rows int) {
	b.Helper()
	mask, err := partition.NewMask(true, -1, packTokens, packTokens, pack)
	check(b, err)
	shape := partition.Shape{SeqQ: packTokens, SeqKV: packTokens, Size: ranks,
		Layout: partition.Document{Docs: pack}, Mask: mask}
	return partition.NewIndex(shape).Gather(0), partition.Count(shape.Layout.Spans(packTokens, ranks, 0))
}

// BenchmarkFusedDocuments measures forward passes of packed documents with 64:8 heads of 128, on one GPU, and on the
// first of two GPUs.
func BenchmarkFusedDocuments(b *testing.B) {
	const heads = 64
	for _, ranks := range []int{1, 2} {
		g, rows := packShare(b, ranks)
		mine, keys := span(0, rows), span(0, g.Rows)
		b.Run(fmt.Sprintf("%d ranks", ranks), func(b *testing.B) {
			x := newFusedBenchOf(b, packTokens, heads, true)
			q, o := seqRows(x.q, mine), seqRows(x.o, mine)
			acc := attention.Partial{O: seqRows(x.acc.O, mine), LSE: seqRows(x.acc.LSE, mine)}
			block := attention.Block{K: seqRows(x.k, keys), V: seqRows(x.v, keys), Tiles: g.Tiles, First: true, Last: true}
			flops := 4 * float64(partition.Pairs(g.Tiles)) * heads * 128 / 1e12
			x.time(b, flops, "TFLOP/s", func() {
				pass, err := x.Forward(o, acc, q, x.p)
				check(b, err)
				check(b, pass.Block(block))
				check(b, pass.End())
			})
		})
	}
}

type fusedBench struct {
	fusedRig
	rankTensors
	saved attention.Saved
	p     attention.Softmax
}

func newFusedBench(b *testing.B, seq int) *fusedBench { return newFusedBenchOf(b, seq, 32, false) }

func newFusedBenchOf(b *testing.B, seq, heads int, packed bool) *fusedBench {
	const kvHeads, dim = 8, 128
	shape := trainingShape(seq, heads, kvHeads, dim, dim)
	shape.Calls, shape.Packed = 4, packed
	x := &fusedBench{fusedRig: newFused(b, FusedOptions{Packed: packed, Workspace: FusedWorkspace(shape)})}
	x.p.Scale = 1 / math.Sqrt(dim)
	x.q, x.do, x.o = x.random(b, seq, heads, dim), x.random(b, seq, heads, dim), x.random(b, seq, heads, dim)
	x.k, x.v = x.random(b, seq, kvHeads, dim), x.random(b, seq, kvHeads, dim)
	float := func(heads, dim int) View { return x.empty(b, tensor.F32, seq, heads, dim) }
	x.acc = attention.Partial{O: float(heads, dim), LSE: float(heads, 1)}
	x.grads = attention.Grads{DQ: float(heads, dim), DK: float(kvHeads, dim), DV: float(kvHeads, dim)}
	x.saved = attention.Saved{O: x.o, LSE: x.acc.LSE, Delta: float(heads, 1)}
	pass, err := x.Forward(x.o, x.acc, x.q, x.p)
	check(b, err)
	check(b, pass.End())
	return x
}

// random returns a tensor of noise. It repeats some rows.
func (x *fusedBench) random(b *testing.B, seq, heads, dim int) View {
	const some = 256
	n := some * heads * dim
	v, first := x.empty(b, tensor.BF16, seq, heads, dim), x.put(b, noise(n, heads), allRows(some), heads, dim)
	for at := 0; at < seq; at += some {
		x.stream.Copy(v.Slice(tensor.Seq, at, at+some).Addr(), first.Addr(), int64(n)*2)
	}
	return v
}

// time runs f repeatedly and reports work in TFLOP/s or GB/s.
func (x *fusedBench) time(b *testing.B, work float64, unit string, f func()) {
	f()
	check(b, x.stream.Sync(context.Background()))
	b.ResetTimer()
	for range b.N {
		f()
	}
	check(b, x.stream.Sync(context.Background()))
	b.StopTimer()
	b.ReportMetric(work*float64(b.N)/b.Elapsed().Seconds(), unit)
}

func (x *fusedBench) flops(t partition.Tile) float64 {
	return 4 * float64(t.Pairs()) * float64(x.q.Len(tensor.Heads)*x.q.Len(tensor.Dim)) / 1e12
}

func (x *fusedBench) block(t partition.Tile) attention.Block {
	return attention.Block{K: x.k, V: x.v, Tiles: []partition.Tile{t}, First: true, Last: true}
}

// begin begins a forward pass of the block.
func (x *fusedBench) begin(b *testing.B, t partition.Tile) attention.ForwardPass {
	pass, err := x.Forward(x.o, x.acc, x.q, x.p)
	check(b, err)
	check(b, pass.Block(x.block(t)))
	return pass
}

func (x *fusedBench) forward(b *testing.B, t partition.Tile) {
	x.time(b, x.flops(t), "TFLOP/s", func() { x.begin(b, t) })
}

func (x *fusedBench) backward(b *testing.B, t partition.Tile) {
	check(b, x.begin(b, wholeTile(x.q.Len(tensor.Seq), partition.Full())).End())
	x.time(b, 2.5*x.flops(t), "TFLOP/s", func() {
		pass, err := x.Backward(x.grads.DQ, x.do, x.q, x.saved, x.p)
		check(b, err)
		grads := attention.KeyGrads{DK: x.grads.DK, DV: x.grads.DV}
		check(b, pass.Block(attention.GradBlock{Block: x.block(t), KeyGrads: grads}))
	})
	d := x.backwardOf(t)
	plan, err := x.dnn.Plan(d)
	check(b, err)
	b.ReportMetric(float64(plan.Workspace)/(1<<20), "MiB")
}

// backwardOf returns the problem of a tile with one piece.
func (x *fusedBench) backwardOf(t partition.Tile) dnn.Desc {
	c := fusedCall{q: x.q, k: x.k, v: x.v, do: x.do, saved: x.saved, dk: x.grads.DK, dv: x.grads.DV, scale: x.p.Scale,
		backward: true}
	g := grouped(cutTiles([]partition.Tile{t}), false, false)[0]
	return x.piece(&c, g, g.pieces[0])
}

// BenchmarkFusedPlan measures the building of plans, each for another length.
func BenchmarkFusedPlan(b *testing.B) {
	x := newFusedBench(b, 4096)
	d := x.backwardOf(wholeTile(4096, causal))
	for _, pass := range []string{"forward", "backward"} {
		b.Run(pass, func(b *testing.B) {
			d.Backward = pass == "backward"
			for range b.N {
				d.SeqQ += 128
				if _, err := x.dnn.Plan(d); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// parts returns n partial results of all rows.
func (x *fusedBench) parts(b *testing.B, n int) []fusedPart {
	seq, heads := x.q.Len(tensor.Seq), x.q.Len(tensor.Heads)
	var parts []fusedPart
	for range n {
		at, err := x.scratch.alloc(int64(x.q.Size()) * 2)
		check(b, err)
		lse, err := x.scratch.alloc(int64(seq*heads) * 4)
		check(b, err)
		x.kernels.fill32(x.stream, lse, seq*heads, 1)
		parts = append(parts, fusedPart{x: at, lse: lse, at: headsFirst(seq, heads), hi: seq})
	}
	return parts
}

func (x *fusedBench) finish(b *testing.B, n int) {
	parts := x.parts(b, n)
	x.time(b, float64(x.q.Size()*2*(n+1))/1e9, "GB/s", func() {
		pass, err := x.Forward(x.o, x.acc, x.q, x.p)
		check(b, err)
		x.held.parts = slices.Clone(parts)
		check(b, pass.End())
	})
}

func (x *fusedBench) finishGrads(b *testing.B, n int) {
	parts := x.parts(b, n)
	x.time(b, float64(x.q.Size()*(2*n+4))/1e9, "GB/s", func() {
		pass, err := x.Backward(x.grads.DQ, x.do, x.q, x.saved, x.p)
		check(b, err)
		x.held.parts = slices.Clone(parts)
		check(b, pass.End())
	})
}

// addKeys adds to initialised dK and dV.
func (x *fusedBench) addKeys(b *testing.B) {
	c := fusedCall{q: x.q, k: x.k, v: x.v, dk: x.grads.DK, dv: x.grads.DV}
	dk, dv, err := x.keyGrads(&c, x.k.Len(tensor.Seq))
	check(b, err)
	sum := keySum{f: x.Fused, c: &c}
	x.time(b, float64(x.k.Size()*2*(2+8))/1e9, "GB/s", func() {
		sum.add(dk, dv, partition.Range{Hi: x.k.Len(tensor.Seq)}, true)
	})
}

// unified measures the single-node forward pass of a full hop in newer versions of cuDNN.
func (x *fusedBench) unified(b *testing.B) {
	c := fusedCall{q: x.q, k: x.k, v: x.v, scale: x.p.Scale}
	tile := wholeTile(x.q.Len(tensor.Seq), partition.Full())
	g := grouped(cutTiles([]partition.Tile{tile}), false, false)[0]
	d := x.piece(&c, g, g.pieces[0])
	d.Unified = true
	if _, err := x.dnn.Plan(d); err != nil {
		b.Skip(err)
	}
	part := x.parts(b, 1)[0]
	at := dnn.Pointers{dnn.Q: x.q.Addr(), dnn.K: x.k.Addr(), dnn.V: x.v.Addr(), dnn.O: part.x, dnn.Stats: part.lse}
	x.time(b, x.flops(tile), "TFLOP/s", func() { check(b, x.execute(d, &at)) })
}
