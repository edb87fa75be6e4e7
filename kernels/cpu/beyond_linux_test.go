package cpu

import (
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"
	"unsafe"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// sparse returns zeroed memory. Only pages with a write take memory.
func sparse(t *testing.T, bytes int) *tensor.Host {
	t.Helper()
	m, err := syscall.Mmap(-1, 0, bytes, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_PRIVATE|syscall.MAP_ANON|syscall.MAP_NORESERVE)
	check(t, err)
	t.Cleanup(func() { check(t, syscall.Munmap(m)) })
	check(t, syscall.Madvise(m, syscall.MADV_NOHUGEPAGE))
	return tensor.HostAt(unsafe.Pointer(unsafe.SliceData(m)), int64(bytes))
}

// Strides of a far tensor, in elements. Row 128, the second batch element and the second head each begin beyond 2^32
// elements. The terms below 2^25 keep rows of different tensors and types apart.
const (
	farSeq   = 1 << 25
	farBatch = 1<<32 + 1<<20
	farHead  = 1<<32 + 1<<21
	farRows  = 140
	farBytes = 4 * (farBatch + farHead + farRows*farSeq)
)

// A placer returns a new tensor of two batch elements.
type placer func(dtype tensor.DType, rows, heads, dim int) tensor.View

func placeNear(dtype tensor.DType, rows, heads, dim int) tensor.View {
	return tensor.New(dtype, 2, rows, heads, dim)
}

// placeFar returns a placer of far tensors in the same memory.
func placeFar(m tensor.Memory) placer {
	const slot = 512 // bytes of the longest row
	at := int64(0)
	return func(dtype tensor.DType, rows, heads, dim int) tensor.View {
		at += slot
		return tensor.NewView(m, dtype, at/int64(dtype.Size()), [4]int{2, rows, heads, dim},
			[4]int64{farBatch, farSeq, farHead, 1})
	}
}

// trained returns the results of a training step of attention over two blocks of keys, with sinks. Copies fill and read
// the tensors.
func trained(t *testing.T, dtype tensor.DType, place placer) (all [][]float32) {
	const heads, kvHeads, dim = 2, 1, 64
	c, rng := newTestCPU(t), rand.New(rand.NewPCG(1, 2))
	drawn := func(heads int) tensor.View {
		v := place(dtype, farRows, heads, dim)
		c.Copy(v, normal(rng, 2, farRows, heads, dim))
		return v
	}
	float := func(heads, dim int) tensor.View { return place(tensor.F32, farRows, heads, dim) }
	q, do, keys, values := drawn(heads), drawn(heads), drawn(kvHeads), drawn(kvHeads)
	acc, out := attention.Partial{O: float(heads, dim), LSE: float(heads, 1)}, place(dtype, farRows, heads, dim)
	p := attention.Softmax{Scale: 0.125}
	block := func(lo, hi int) attention.Block { // causal
		part := func(v tensor.View) tensor.View { return v.Slice(tensor.Seq, lo, hi) }
		return attention.Block{K: part(keys), V: part(values), Tiles: []partition.Tile{{
			Q: partition.Range{Hi: farRows}, K: partition.Range{Hi: hi - lo},
			Band: partition.Band{Lo: -partition.Unbounded, Hi: -lo}}}}
	}
	forward, err := c.Forward(out, acc, q, p)
	check(t, err)
	check(t, forward.Block(block(0, 4)))
	check(t, forward.Block(block(4, farRows)))
	check(t, forward.End())
	sink, dsink := normal(rng, 1, 1, heads, 1), tensor.New(tensor.F32, 1, 1, heads, 1)
	check(t, c.FoldSink(out, acc.LSE, sink))
	check(t, c.SinkGrad(dsink, do, out, acc.LSE, sink))

	saved, dq := attention.Saved{O: out, LSE: acc.LSE, Delta: float(heads, 1)}, float(heads, dim)
	grads := attention.KeyGrads{DK: float(kvHeads, dim), DV: float(kvHeads, dim)}
	backward, err := c.Backward(dq, do, q, saved, p)
	check(t, err)
	check(t, backward.Block(attention.GradBlock{Block: block(0, farRows), KeyGrads: grads,
		Fresh: partition.Range{Hi: farRows}}))
	check(t, backward.End())
	check(t, backward.Fold(attention.Fold{Dst: grads, Src: attention.KeyGrads{DK: grads.DV, DV: grads.DV}}))
	for _, v := range []tensor.View{out, acc.LSE, saved.Delta, dq, grads.DK, grads.DV, dsink} {
		shape := v.Shape()
		dense := tensor.New(tensor.F32, shape[:]...)
		c.Copy(dense, v)
		c.Zero(v)
		all = append(all, tensor.Data[float32](dense))
	}
	settle(t, c)
	return all
}

// TestAttentionBeyondInt32 compares tensors with offsets of more than 2^32 elements with dense ones, bit for bit.
func TestAttentionBeyondInt32(t *testing.T) {
	m := sparse(t, farBytes)
	atLevels(t, func(t *testing.T) {
		for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16} {
			want := trained(t, dtype, placeNear)
			for i, got := range trained(t, dtype, placeFar(m)) {
				if !slices.Equal(got, want[i]) {
					t.Errorf("%v: result %d differs from that of dense tensors", dtype, i)
				}
			}
		}
	})
}

// TestTokensBeyondInt32 uses an embedding and logits of more than 2^31 elements, and accesses only their last rows.
func TestTokensBeyondInt32(t *testing.T) {
	const rows, last, dim = 1<<31/1024 + 8, 8, 1024
	c, rng := newTestCPU(t), rand.New(rand.NewPCG(1, 2))
	table := tensor.Dense(sparse(t, 4*rows*dim), tensor.F32, 0, [4]int{1, rows, 1, dim})
	end := table.Slice(tensor.Seq, rows-last, rows)
	small, y := normal(rng, 1, last, 1, dim), normal(rng, 1, last, 1, dim)
	c.Copy(end, small)
	ids := tensor.New(tensor.I32, 1, last, 1, 1)
	targets := tensor.New(tensor.I32, 1, rows, 1, 1)
	for i := range rows {
		tensor.Data[int32](targets)[i] = -1
	}
	for i := range int32(last) {
		tensor.Data[int32](ids)[i] = rows - 1 - i
		tensor.Data[int32](targets)[rows-1-i] = 100 * i
	}
	loss, want := tensor.New(tensor.F64, 1), tensor.New(tensor.F64, 1)
	c.CrossEntropy(loss, table, targets, 1, 0, false)
	c.CrossEntropy(want, small, targets.Slice(tensor.Seq, rows-last, rows), 1, 0, false)
	c.EmbedBackward(table, y, ids)
	reversed := tensor.FromSlice([]int32{7, 6, 5, 4, 3, 2, 1, 0}, 1, last, 1, 1)
	c.EmbedBackward(small, y, reversed)
	c.Embed(y, table, ids)
	settle(t, c)
	check(t, near.Within(tensor.Data[float64](loss), tensor.Data[float64](want), near.Finite, 0))
	check(t, near.Within(tensor.Data[float32](end), tensor.Data[float32](small), near.Finite, 0))
	for i := range last {
		row := tensor.Data[float32](y.Slice(tensor.Seq, i, i+1))
		check(t, near.Within(row, tensor.Data[float32](end.Slice(tensor.Seq, last-1-i, last-i)), near.Finite, 0))
	}
}
