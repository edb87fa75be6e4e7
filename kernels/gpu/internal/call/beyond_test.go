//go:build cuda

package call

import (
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Strides of a far tensor, in elements. Row 128, the second batch element and the second head each begin beyond 2^32
// elements. The terms below 2^25 keep rows of different tensors and types apart.
const (
	farSeq   = 1 << 25
	farBatch = 1<<32 + 1<<20
	farHead  = 1<<32 + 1<<21
	farRows  = 140
	farBytes = 4 * (farBatch + farHead + farRows*farSeq)
)

// A placer returns a new tensor in the kernels' memory.
type placer func(dtype tensor.DType, rows, heads, dim int) View

// near places dense tensors.
func (h *host) near(dtype tensor.DType, rows, heads, dim int) View {
	h.t.Helper()
	m, err := h.alloc(int64(2 * rows * heads * dim * dtype.Size()))
	ok(h.t, err)
	return tensor.Dense(m, dtype, 0, [4]int{2, rows, heads, dim})
}

// far returns a placer of far tensors, which share one range of memory. Only the pages of their rows take memory.
func (h *host) far() placer {
	const slot = 512 // bytes of the longest row
	whole := tensor.HostAt(unsafe.Pointer(unsafe.SliceData(h.memory)), farBytes)
	h.used = farBytes
	at := int64(0)
	return func(dtype tensor.DType, rows, heads, dim int) View {
		at += slot
		return tensor.NewView(whole, dtype, at/int64(dtype.Size()), [4]int{2, rows, heads, dim},
			[4]int64{farBatch, farSeq, farHead, 1})
	}
}

// random fills v with normal values and returns it.
func random(rng *rand.Rand, v View) View {
	each(v, func(float32, [4]int) float32 { return float32(rng.NormFloat64()) })
	return v
}

// trained returns the results of a training step: of a kernel, and of sinks unless they are nil.
func (h *host) trained(k attention.Kernel, sinks attention.Sinks, dtype tensor.DType, place placer) (all [][]float32) {
	const heads, kvHeads, dim = 2, 1, 64
	rng := rand.New(rand.NewPCG(1, 2))
	drawn := func(heads int) View { return random(rng, place(dtype, farRows, heads, dim)) }
	float := func(heads, dim int) View { return place(tensor.F32, farRows, heads, dim) }
	q, do, keys, values := drawn(heads), drawn(heads), drawn(kvHeads), drawn(kvHeads)
	acc := attention.Partial{O: float(heads, dim), LSE: float(heads, 1)}
	out := acc.O
	if dtype != tensor.F32 {
		out = place(dtype, farRows, heads, dim)
	}
	p := attention.Softmax{Scale: 0.125}
	block := func(rows partition.Range) attention.Block { // causal, over some of the keys
		part := func(v View) View { return v.Slice(tensor.Seq, rows.Lo, rows.Hi) }
		return attention.Block{K: part(keys), V: part(values), First: rows.Lo == 0, Last: rows.Hi == farRows,
			Tiles: []partition.Tile{{Q: partition.Range{Hi: farRows}, K: partition.Range{Hi: rows.Len()},
				Band: partition.Band{Lo: -partition.Unbounded, Hi: -rows.Lo}}}}
	}
	forward, err := k.Forward(out, acc, q, p)
	ok(h.t, err)
	ok(h.t, forward.Block(block(partition.Range{Hi: 4})))
	ok(h.t, forward.Block(block(partition.Range{Lo: 4, Hi: farRows})))
	ok(h.t, forward.End())

	grads := attention.KeyGrads{DK: float(kvHeads, dim), DV: float(kvHeads, dim)}
	saved, dq := attention.Saved{O: out, LSE: acc.LSE, Delta: float(heads, 1)}, float(heads, dim)
	backward, err := k.Backward(dq, do, q, saved, p)
	ok(h.t, err)
	rows := partition.Range{Hi: farRows}
	ok(h.t, backward.Block(attention.GradBlock{Block: block(rows), KeyGrads: grads, Fresh: rows}))
	ok(h.t, backward.End())
	results := []View{out, acc.LSE, saved.Delta, dq, grads.DK, grads.DV}
	if sinks != nil {
		both := h.near(tensor.F32, 1, heads, 1) // of two batch elements: the sinks and their gradients
		sink, dsink := random(rng, both.Slice(tensor.Batch, 0, 1)), both.Slice(tensor.Batch, 1, 2)
		ok(h.t, sinks.FoldSink(out, acc.LSE, sink))
		ok(h.t, sinks.SinkGrad(dsink, do, out, acc.LSE, sink))
		results = append(results, dsink)
	}
	for _, v := range results {
		var list []float32
		each(v, func(x float32, _ [4]int) float32 { list = append(list, x); return x })
		all = append(all, list)
	}
	return all
}

// TestBeyondInt32OnHost runs the attention kernels on tensors with offsets of more than 2^32 elements, and compares
// with the bits for dense tensors. Their memory is a sparse file.
func TestBeyondInt32OnHost(t *testing.T) {
	h := newHostOf(t, farBytes+hostMemory)
	fast, ordered := &hostFlash{h, false, large}, &hostFlash{h, true, large}
	for _, c := range []struct {
		name   string
		kernel attention.Kernel
		sinks  attention.Sinks
		dtype  tensor.DType
	}{
		{"flash float32", fast, hostSinks{h}, tensor.F32},
		{"flash float32, ordered", ordered, nil, tensor.F32},
		{"flash", fast, hostSinks{h}, tensor.BF16},
		{"flash, ordered", ordered, nil, tensor.BF16},
		{"hopper", hostHopper{hostFlash: fast, sms: 4}, nil, tensor.BF16},
		{"hopper, ordered", hostHopper{hostFlash: ordered, sms: 4}, nil, tensor.BF16},
		{"reference", &hostReference{*fast}, nil, tensor.BF16},
	} {
		t.Run(c.name, func(t *testing.T) {
			h.t, h.used, h.started = t, 0, 0
			want := h.trained(c.kernel, c.sinks, c.dtype, h.near)
			place := h.far()
			h.started = 0 // the same order of threads
			for i, got := range h.trained(c.kernel, c.sinks, c.dtype, place) {
				if !slices.Equal(got, want[i]) {
					t.Errorf("result %d differs from that of dense tensors", i)
				}
			}
		})
	}
}
