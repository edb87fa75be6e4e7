//go:build cuda

package gpu

import (
	"fmt"
	"math/bits"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// RMSNorm normalises over the last axis: y = x * inv * w with inv = 1 / sqrt(mean(x^2) + eps).
// inv: float32 [batch, seq, heads, 1]; w: float32 [1, 1, 1, dim].
func (c *Ops) RMSNorm(y, inv, x, w View, eps float64) {
	checkCUDANorm("rmsnorm", inv, w, y, x)
	c.norm("rmsnorm", "rmsnorm_", y, inv, []View{x}, w, eps)
}

// AddRMSNorm sets sum = a + b and y = RMSNorm(sum). sum may be a.
func (c *Ops) AddRMSNorm(y, inv, sum, a, b, w View, eps float64) {
	checkCUDANorm("add rmsnorm", inv, w, y, sum, a, b)
	c.norm("add rmsnorm", "add_rmsnorm_", y, inv, []View{sum, a, b}, w, eps)
}

// checkCUDANorm panics unless xs have the same shape, and inv and w match it.
func checkCUDANorm(op string, inv, w View, xs ...View) {
	denseActivations(op, xs...)
	denseFloats(op, inv, w)
	x := xs[0]
	shape.Must(shape.SameShape(xs...) && x.Len(tensor.Dim) > 0 && w.Size() == x.Len(tensor.Dim) &&
		inv.Size() == shape.RowsOver(x), op, append(xs, inv, w)...)
}

// norm queues a kernel with the arguments y, inv, xs and w.
func (c *Ops) norm(op, kernel string, y, inv View, xs []View, w View, eps float64) {
	rows, n := shape.RowsOver(y), y.Len(tensor.Dim)
	c.stream.Do(op, func() error {
		var args cuda.Args
		args.View(y).View(inv)
		for _, x := range xs {
			args.View(x)
		}
		args.View(w)
		name := kernel + typeNames[y.DType()]
		s, ok := normShape(n, lanesOf(y.DType()), maxNormVectors)
		if !ok || !aligned16(append(xs, y, w)...) {
			return c.launch("ops_norm", name+"_any", cuda.Dim{X: rows}, cuda.Dim{X: 256}, args.Int(n).Float(eps))
		}
		grid := cuda.Dim{X: ceilDiv(rows, s.rows)}
		return c.launch("ops_norm", fmt.Sprintf("%s_%d", name, s.vectors), grid, cuda.Dim{X: s.threads, Y: s.rows},
			args.Int(rows).Int(n).Float(eps))
	})
}

// A rowShape describes how threads hold a row in registers.
type rowShape struct {
	threads int // per row
	rows    int // per block
	vectors int // of 16 bytes, per thread
}

// maxNormVectors bounds the vectors of a thread.
const maxNormVectors = 16

// normShape assigns a row to one warp, or to a block of several if it does not fit the registers of one. ok is false if
// it fits no block. One warp per row needs no barrier, and its loads of a few KiB hide the latency of memory.
func normShape(n, lanes, most int) (s rowShape, ok bool) {
	vecs := n / lanes
	s = rowShape{threads: 32, rows: 4}
	for s.threads*most < vecs && s.threads < 256 {
		s.threads, s.rows = 2*s.threads, 1
	}
	for _, s.vectors = range []int{1, 2, 4, 8, 12, 16} {
		if s.threads*s.vectors >= vecs {
			return s, n%lanes == 0 && vecs > 0
		}
	}
	return s, false
}

// RMSNormBackward sets dx to the gradient of x, or adds it, and adds the gradient of w to dw.
func (c *Ops) RMSNormBackward(dx, dw, dy, x, inv, w View, accumulate bool) {
	checkCUDANorm("rmsnorm backward", inv, w, dx, dy, x)
	denseFloats("rmsnorm backward", dw)
	shape.Must(dw.Size() == w.Size(), "rmsnorm backward", dw, w)
	rows, n := shape.RowsOver(x), x.Len(tensor.Dim)
	if rows == 0 {
		return
	}
	c.stream.Do("rmsnorm backward", func() error {
		name, threads := "rmsnorm_backward_"+typeNames[x.DType()], 256
		if s, ok := normBackwardShape(n, lanesOf(x.DType())); ok && aligned16(dx, dy, x, w) {
			name, threads = fmt.Sprintf("%s_%d", name, s.vectors), s.threads
		} else {
			name += "_any"
		}
		parts, err := c.parts("ops_norm", name, threads, rows, n)
		if err != nil {
			return err
		}
		var args cuda.Args
		args.View(dx).Addr(c.work()).View(dy).View(x).View(inv).View(w).Int(rows).Int(n).Int(int(cInt(accumulate)))
		if err := c.launch("ops_norm", name, cuda.Dim{X: parts}, cuda.Dim{X: threads}, &args); err != nil {
			return err
		}
		return c.addColumns(dw, c.work(), parts)
	})
}

// normBackwardShape assigns a row to a block. Its registers also hold the sums of dw.
func normBackwardShape(n, lanes int) (s rowShape, ok bool) {
	vecs := n / lanes
	for _, s.vectors = range []int{1, 2, 4} {
		s.threads = ceilDiv(ceilDiv(vecs, s.vectors), 32) * 32
		if s.threads <= 512 {
			return s, n%lanes == 0 && vecs > 0
		}
	}
	return s, false
}

// parts returns the number of blocks for the rows, each of which writes n float32 sums to the workspace: at most the
// number that the GPU runs at once.
func (c *Ops) parts(program, name string, threads, rows, n int) (int, error) {
	most := OpsWorkspace / (4 * n)
	if most == 0 {
		return 0, fmt.Errorf("rows of %d elements do not fit the workspace of %d bytes", n, OpsWorkspace)
	}
	resident, err := c.resident(program, name, threads)
	return min(rows, resident, most), err
}

// addColumns adds the sum of the rows of partial [parts, n] to dw [n].
func (c *Ops) addColumns(dw View, partial uint64, parts int) error {
	var args cuda.Args
	n := dw.Size()
	return c.launch("ops_optim", "add_columns", cuda.Dim{X: ceilDiv(n, 32)}, cuda.Dim{X: 32, Y: 32},
		args.View(dw).Addr(partial).Int(parts).Int(n))
}

// Embed sets row i of y to row ids[i] of table [vocab, hidden], of the same type. ids: int32. For an id outside the
// vocabulary, which the data loader rejects, the row becomes NaN, and so does the loss.
func (c *Ops) Embed(y, table, ids View) {
	denseActivations("embed", y, table)
	checkIDs("embed", y, table, ids)
	n, size, kernel := y.Cols(), y.DType().Size(), "embed_16"
	if n*size%16 != 0 || !aligned16(y, table) {
		kernel = fmt.Sprintf("embed_%d", size)
	} else {
		size = 16
	}
	words := n * y.DType().Size() / size
	c.stream.Do("embed", func() error {
		var args cuda.Args
		args.View(y).View(table).View(ids).Int(y.Rows()).Int(words).Int(table.Rows())
		return c.launch("ops_embed", kernel, cuda.Dim{X: ceilDiv(y.Rows(), 8)}, cuda.Dim{X: 32, Y: 8}, &args)
	})
}

// checkIDs panics unless x [rows, hidden], table [vocab, hidden] and ids [rows] match.
func checkIDs(op string, x, table, ids View) {
	shape.Must(x.Cols() == table.Cols() && ids.Size() == x.Rows() && ids.DType() == tensor.I32 &&
		ids.IsDense(), op, x, table, ids)
}

// embedSegment is SEGMENT in ops_embed.cu: the sorted tokens of a block.
const embedSegment = 64

// EmbedBackward adds row i of dy to row ids[i] of dtable, float32. It adds the rows of an id in order, so that the sum
// has the same bits in every run, and skips ids outside the vocabulary.
func (c *Ops) EmbedBackward(dtable, dy, ids View) {
	denseActivations("embed backward", dy)
	denseFloats("embed backward", dtable)
	checkIDs("embed backward", dy, dtable, ids)
	n, rows := dy.Cols(), dy.Rows()
	if dy.Size() == 0 || dtable.Size() == 0 {
		return
	}
	c.stream.Do("embed backward", func() error {
		k, err := embedKeys(dtable.Rows(), n)
		if err != nil {
			return err
		}
		for lo := 0; lo < rows; lo += 1 << k.bits {
			k.count = min(rows-lo, 1<<k.bits)
			if err := c.embedChunk(k, dtable, elementOf(dy, lo*n), elementOf(ids, lo), dy.DType(), n); err != nil {
				return err
			}
		}
		return nil
	})
}

// A keySplit describes how ids and positions share the bits of a sort key; see source.Keys.
type keySplit struct{ count, bits, vocab int }

func (k keySplit) args(a *cuda.Args) *cuda.Args {
	return cuda.Struct(a, &source.Keys{Count: int32(k.count), Bits: int32(k.bits), Vocab: int32(k.vocab)})
}

// carryAt returns the offset of the carried sums in the workspace, after the sorted keys.
func (k keySplit) carryAt() int { return 4 << k.bits }

// embedKeys chooses the size of a chunk. Limits are the bits that a token's id leaves in a key, the quadratic sort, and
// the workspace.
func embedKeys(vocab, n int) (keySplit, error) {
	k := keySplit{vocab: vocab, bits: min(14, 32-bits.Len(uint(vocab)))}
	for ; k.bits >= 6; k.bits-- {
		if k.carryAt()+ceilDiv(1<<k.bits, embedSegment)*n*4 <= OpsWorkspace {
			return k, nil
		}
	}
	return k, fmt.Errorf("a vocabulary of %d or rows of %d elements are more than the kernel supports", vocab, n)
}

// embedChunk adds the rows of one chunk.
func (c *Ops) embedChunk(k keySplit, dtable View, dy, ids uint64, dtype tensor.DType, n int) error {
	const threads = 128
	sorted, carry := c.work(), c.work()+uint64(k.carryAt())
	sort := k.args(new(cuda.Args).Addr(sorted).Addr(ids))
	if err := c.launch("ops_embed", "embed_sort", cuda.Dim{X: ceilDiv(k.count, 256/8)}, cuda.Dim{X: 256},
		sort); err != nil {
		return err
	}
	name, lanes := "embed_sum_", lanesOf(dtype)
	if n%lanes != 0 || dy%16 != 0 || !aligned16(dtable) {
		name, lanes = "embed_sum_any_", 1
	}
	grid := cuda.Dim{X: ceilDiv(k.count, embedSegment), Y: ceilDiv(n, threads*lanes)}
	sum := k.args(new(cuda.Args).View(dtable).Addr(carry).Addr(dy).Addr(sorted)).Int(n)
	if err := c.launch("ops_embed", name+typeNames[dtype], grid, cuda.Dim{X: threads}, sum); err != nil {
		return err
	}
	grid.Y = ceilDiv(n, threads)
	rest := k.args(new(cuda.Args).View(dtable).Addr(carry).Addr(sorted)).Int(n)
	return c.launch("ops_embed", "embed_carry", grid, cuda.Dim{X: threads}, rest)
}

// CrossEntropy adds the sum of -log softmax(logits)[target] over rows with target >= 0 to loss, a float64 scalar. With
// grad, it replaces logits by scale times the gradient of that sum, and by 0 in rows without a target. If softcap is
// not 0, logits are the results of SoftCap, and the gradient is that of its arguments. targets: int32, one per row. A
// target outside the vocabulary, which the data loader rejects, makes the loss NaN.
func (c *Ops) CrossEntropy(loss, logits, targets View, scale, softcap float64, grad bool) {
	denseActivations("cross entropy", logits)
	shape.Must(loss.Size() == 1 && loss.DType() == tensor.F64 && targets.DType() == tensor.I32 &&
		targets.IsDense() && targets.Size() == logits.Rows(), "cross entropy", loss, logits, targets)
	rows, n := logits.Rows(), logits.Cols()
	if n == 0 {
		return
	}
	kernel := "cross_entropy_" + typeNames[logits.DType()]
	if grad {
		kernel = "cross_entropy_grad_" + typeNames[logits.DType()]
	}
	// Between the two passes over a row, shared memory keeps the logits that fit. 1024 bytes are for the kernel's own
	// arrays.
	held, most := 0, (c.loader.Device().SharedPerBlock-1024)/16
	if grad {
		held = min(n/lanesOf(logits.DType()), most)
	}
	c.stream.Do("cross entropy", func() error {
		f, err := c.loader.Function("ops_loss", kernel, most*16)
		if err != nil {
			return err
		}
		const chunk = OpsWorkspace / 8 // rows whose losses fit in the workspace
		for lo := 0; lo < rows; lo += chunk {
			count := min(chunk, rows-lo)
			row := new(cuda.Args).Addr(c.work()).Addr(elementOf(logits, lo*n)).Addr(elementOf(targets,
				lo)).Int(n).Float(scale).Int(held).Float(softcap)
			c.stream.Launch(f, cuda.Launch{Grid: cuda.Dim{X: count}, Block: cuda.Dim{X: 1024}, Shared: held * 16}, row)
			if err := c.addScalars(loss, count); err != nil {
				return err
			}
		}
		return nil
	})
}

// addScalars adds count float64 of the workspace to sum.
func (c *Ops) addScalars(sum View, count int) error {
	args := new(cuda.Args).View(sum).Addr(c.work()).Int(count)
	return c.launch("ops_optim", "add_scalars", cuda.Dim{X: 1}, cuda.Dim{X: 1024}, args)
}
