package cpu

import (
	"math"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// 16-bit operations call those on float32, a block of rows at a time. They convert inputs to float32 in buffers that
// all blocks share and that stay in the cache, and round results as they copy them out. Blocks depend only on shapes,
// so results have the same bits on any number of processors.

const (
	halfBlock     = 1 << 16 // elements of a block
	leastHalfRows = 16      // rows of a block, so that long rows also occupy several processors
	halfSlots     = 5       // largest number of views that an operation converts
)

// HalfWorkspace returns the host bytes of the operations on 16 bits, for rows of at most widest elements.
func HalfWorkspace(widest int) int64 {
	return 4 * int64((halfSlots-1)*halfBlock+max(halfBlock, leastHalfRows*widest))
}

// halfRows calls f for each block of rows of n elements.
func halfRows(rows, n int, f func(b halfSpan)) {
	size := max(halfBlock/max(n, 1), leastHalfRows)
	for lo := 0; lo < rows; lo += size {
		f(halfSpan{lo, min(lo+size, rows)})
	}
}

// A halfSpan is a block of rows, on the Seq axis of views.
type halfSpan struct{ lo, hi int }

// of returns the block's part of a dense view of rows [heads, dim].
func (b halfSpan) of(v tensor.View, heads, dim int) tensor.View {
	if v.IsZero() {
		return v
	}
	return v.Reshape([4]int{1, v.Size() / (heads * dim), heads, dim}).Slice(tensor.Seq, b.lo, b.hi)
}

// wide returns an uninitialised float32 buffer of v's shape. The next block reuses the slot.
func (c *Kernels) wide(slot int, v tensor.View) tensor.View {
	if c.slots[slot].IsZero() || c.slots[slot].Size() < v.Size() {
		c.slots[slot] = tensor.New(tensor.F32, v.Size())
	}
	return c.slots[slot].Slice(tensor.Dim, 0, v.Size()).Reshape(v.Shape())
}

// widened copies v to a float32 buffer and returns it.
func (c *Kernels) widened(slot int, v tensor.View) tensor.View {
	w := c.wide(slot, v)
	c.Copy(w, v)
	return w
}

// An extent is memory with a size and no data.
type extent struct{ tensor.Memory }

func (extent) Bytes() int64 { return 1<<63 - 1 }

// standIn returns a dense float32 view without data of v's shape, for the checks of float32 operations.
func standIn(v tensor.View) tensor.View {
	return tensor.Dense(extent{v.Memory()}, tensor.F32, 0, v.Shape())
}

func standIns(vs ...tensor.View) []tensor.View {
	for i, v := range vs {
		vs[i] = standIn(v)
	}
	return vs
}

func (c *Kernels) halfNorm(y, inv, x, w tensor.View, eps float64) {
	denseHalves("rmsnorm", y, x)
	checkNorm("rmsnorm", inv, w, standIns(y, x)...)
	n := x.Len(tensor.Dim)
	halfRows(shape.RowsOver(x), n, func(b halfSpan) {
		to := b.of(y, 1, n)
		from, out := c.widened(0, b.of(x, 1, n)), c.wide(1, to)
		c.RMSNorm(out, b.of(inv, 1, 1), from, w, eps)
		c.Copy(to, out)
	})
}

// halfAddNorm normalises the rounded sum.
func (c *Kernels) halfAddNorm(y, inv, sum, x, add, w tensor.View, eps float64) {
	denseHalves("add rmsnorm", y, sum, x, add)
	checkNorm("add rmsnorm", inv, w, standIns(y, sum, x, add)...)
	n := x.Len(tensor.Dim)
	halfRows(shape.RowsOver(x), n, func(b halfSpan) {
		to, total := b.of(y, 1, n), b.of(sum, 1, n)
		wide, out := c.widened(0, b.of(x, 1, n)), c.wide(1, to)
		c.Add(wide, c.widened(2, b.of(add, 1, n)))
		c.Copy(total, wide)
		c.RMSNorm(out, b.of(inv, 1, 1), c.widened(0, total), w, eps)
		c.Copy(to, out)
	})
}

func (c *Kernels) halfNormBackward(dx, dw, dy, x, inv, w tensor.View, accumulate bool) {
	denseHalves("rmsnorm backward", dx, dy, x)
	checkNorm("rmsnorm backward", inv, w, standIns(dx, dy, x)...)
	n := x.Len(tensor.Dim)
	halfRows(shape.RowsOver(x), n, func(b halfSpan) {
		to := b.of(dx, 1, n)
		var out tensor.View
		if accumulate {
			out = c.widened(0, to)
		} else {
			out = c.wide(0, to)
		}
		from, grad := c.widened(1, b.of(x, 1, n)), c.widened(2, b.of(dy, 1, n))
		c.RMSNormBackward(out, dw, grad, from, b.of(inv, 1, 1), w, accumulate)
		c.Copy(to, out)
	})
}

func (c *Kernels) halfRope(y, inv, x, w, cos, sin tensor.View, eps float64) {
	denseHalves("rope", y, x)
	checkRope("rope", w, cos, sin, standIns(y, x)...)
	if w.IsZero() {
		inv = tensor.View{} // unused, of any shape
	} else {
		checkNorm("norm and rope", inv, w, standIns(y, x)...)
	}
	heads, dim := x.Len(tensor.Heads), x.Len(tensor.Dim)
	halfRows(x.Rows(), x.Cols(), func(b halfSpan) {
		to := b.of(y, heads, dim)
		from, out := c.widened(0, b.of(x, heads, dim)), c.wide(1, to)
		if w.IsZero() {
			out = from
		}
		c.NormRope(out, b.of(inv, heads, 1), from, w, b.of(cos, 1, cos.Cols()), b.of(sin, 1, sin.Cols()), eps)
		c.Copy(to, out)
	})
}

func (c *Kernels) halfRopeBackward(dx, dw, dy, x, inv, w, cos, sin tensor.View) {
	const op = "rope backward"
	denseHalves(op, dx)
	shape.Must((dy.DType() == dx.DType() || dy.DType() == tensor.F32) && dy.IsDense(), op, dx, dy)
	checkRope(op, w, cos, sin, standIns(dx, dy)...)
	if w.IsZero() {
		inv = tensor.View{}
	} else {
		denseHalves(op, dx, x)
		checkNorm(op, inv, w, standIns(dx, dy, x)...)
	}
	heads, dim := dx.Len(tensor.Heads), dx.Len(tensor.Dim)
	halfRows(dx.Rows(), dx.Cols(), func(b halfSpan) {
		to, from, grad := b.of(dx, heads, dim), tensor.View{}, b.of(dy, heads, dim)
		out := c.wide(0, to)
		if isHalf(grad.DType()) {
			grad = c.widened(1, grad)
		}
		if !w.IsZero() {
			from = c.widened(2, b.of(x, heads, dim))
		}
		c.NormRopeBackward(out, dw, grad, from, b.of(inv, heads, 1), w, b.of(cos, 1, cos.Cols()), b.of(sin, 1, sin.Cols()))
		c.Copy(to, out)
	})
}

func (c *Kernels) halfDropout(y, x, tokens tensor.View, d kernels.Dropout) {
	denseHalves("dropout", y, x)
	checkDropout(y, x, tokens)
	n := x.Cols()
	halfRows(x.Rows(), n, func(b halfSpan) {
		to := b.of(y, 1, n)
		out := c.wide(0, to)
		c.Dropout(out, c.widened(1, b.of(x, 1, n)), b.of(tokens, 1, 1), d)
		c.Copy(to, out)
	})
}

func (c *Kernels) halfGLU(y, gate, up tensor.View, act kernels.Activation) {
	denseHalves("glu", y, gate, up)
	shape.Must(shape.SameShape(y, gate, up), "glu", y, gate, up)
	halfRows(y.Size(), 1, func(b halfSpan) {
		to := b.of(y, 1, 1)
		out := c.wide(0, to)
		c.GLU(out, c.widened(1, b.of(gate, 1, 1)), c.widened(2, b.of(up, 1, 1)), act)
		c.Copy(to, out)
	})
}

func (c *Kernels) halfGLUBackward(dgate, dup, dy, gate, up tensor.View, act kernels.Activation) {
	denseHalves("glu backward", dgate, dup, dy, gate, up)
	shape.Must(shape.SameShape(dgate, dup, dy, gate, up), "glu backward", dgate, dup, dy, gate, up)
	halfRows(dy.Size(), 1, func(b halfSpan) {
		toGate, toUp := b.of(dgate, 1, 1), b.of(dup, 1, 1)
		outGate, outUp := c.wide(0, toGate), c.wide(1, toUp)
		c.GLUBackward(outGate, outUp, c.widened(2, b.of(dy, 1, 1)), c.widened(3, b.of(gate, 1, 1)),
			c.widened(4, b.of(up, 1, 1)), act)
		c.Copy(toGate, outGate)
		c.Copy(toUp, outUp)
	})
}

func (c *Kernels) halfEmbed(y, table, ids tensor.View) {
	denseHalves("embed", y, table)
	checkEmbed("embed", standIn(y), standIn(table), ids)
	embed[uint16](c, y, table, ids)
}

func (c *Kernels) halfEmbedBackward(dtable, dy, ids tensor.View) {
	denseHalves("embed backward", dy)
	checkEmbed("embed backward", standIn(dy), dtable, ids)
	n, vocab := dy.Cols(), dtable.Rows()
	c.stream.Do("embed backward", func() error {
		return inVocab("embed backward: token id", tensor.Data[int32](ids), 0, vocab)
	})
	halfRows(dy.Rows(), n, func(b halfSpan) {
		c.EmbedBackward(dtable, c.widened(0, b.of(dy, 1, n)), b.of(ids, 1, 1))
	})
}

func (c *Kernels) halfCrossEntropy(loss, logits, targets tensor.View, scale, softcap float64, grad bool) {
	const op = "cross entropy"
	denseHalves(op, logits)
	shape.Must(targets.Size() == logits.Rows() && targets.DType() == tensor.I32 &&
		targets.IsDense(), op, logits, targets)
	n := logits.Cols()
	c.stream.Do(op, func() error {
		return inVocab("cross entropy: target", tensor.Data[int32](targets), math.MinInt32, n)
	})
	halfRows(logits.Rows(), n, func(b halfSpan) {
		to := b.of(logits, 1, n)
		out := c.widened(0, to)
		c.CrossEntropy(loss, out, b.of(targets, 1, 1), scale, softcap, grad)
		if grad {
			c.Copy(to, out)
		}
	})
}

// halfAdd adds a 16-bit src to dst, of the same type or float32. The last axis of both must be contiguous.
func (c *Kernels) halfAdd(dst, src tensor.View) {
	const op = "add"
	one := dst.Len(tensor.Dim) <= 1 || dst.Stride(tensor.Dim) == 1 && src.Stride(tensor.Dim) == 1
	shape.Must(one && shape.SameShape(dst, src) && isHalf(src.DType()) &&
		(dst.DType() == src.DType() || dst.DType() == tensor.F32), op, dst, src)
	if dst.Size() == 0 {
		return
	}
	l, to, from := simd.LoopsOf[float32](c.level), memoryOf[float32](dst), memoryOf[float32](src)
	run := func(s *scratch, do, so int64, n int) {
		mem := open[float32](s, n, n)
		sum, x := mem.take(n), mem.take(n)
		to.load(sum, int(do))
		from.load(x, int(so))
		l.AddTo(sum, sum, x)
		to.store(int(do), sum)
	}
	size, dim := dst.Size(), dst.Len(tensor.Dim)
	if dst.IsDense() && src.IsDense() {
		c.queue(op, func() {
			c.split((size+elementBlock-1)/elementBlock, func(s *scratch, i int) {
				lo := i * elementBlock
				run(s, int64(lo), int64(lo), min(elementBlock, size-lo))
			})
		})
		return
	}
	c.heads(op, dst, src, func(s *scratch, do, so int64) { run(s, do, so, dim) })
}
