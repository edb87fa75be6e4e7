//go:build cuda

package gpu

import (
	"fmt"

	"github.com/cprun/cprun/internal/base/cuda"
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

// checkCUDANorm panics unless xs have one shape and inv and w go with it.
func checkCUDANorm(op string, inv, w View, xs ...View) {
	denseActivations(op, xs...)
	denseFloats(op, inv, w)
	x := xs[0]
	shape.Must(shape.SameShape(xs...) && x.Len(tensor.Dim) > 0 && w.Size() == x.Len(tensor.Dim) &&
		inv.Size() == shape.RowsOver(x), op, append(xs, inv, w)...)
}

// norm queues the kernel of that name, which is given y, inv, xs and w.
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

// A rowShape shares a row in registers among threads.
type rowShape struct {
	threads int // of a row
	rows    int // of a block
	vectors int // of 16 bytes, of a thread
}

// maxNormVectors bounds the vectors of a thread.
const maxNormVectors = 16

// normShape gives a row to a warp, or to a block of a few if one's registers do not hold it; ok is false if none do.
// Warps need no barrier between them, and their loads of some KiB hide the latency of memory.
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

// RMSNormBackward sets dx to the gradient of x, or adds it, and adds that of w to dw.
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
		return c.addColumns(dw, parts)
	})
}

// normBackwardShape gives a row to a block, whose registers hold the sums of dw beside it.
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

// parts returns how many blocks go over that many rows, each of which leaves n float32 sums in the
// workspace: as many as the GPU holds.
func (c *Ops) parts(program, name string, threads, rows, n int) (int, error) {
	room := OpsWorkspace / (4 * n)
	if room == 0 {
		return 0, fmt.Errorf("rows of %d elements are more than the workspace of %d bytes is for", n, OpsWorkspace)
	}
	resident, err := c.resident(program, name, threads)
	return min(rows, resident, room), err
}

// addColumns adds the sum of the rows [parts, n] of the workspace to dw [n].
func (c *Ops) addColumns(dw View, parts int) error {
	var args cuda.Args
	n := dw.Size()
	return c.launch("ops_optim", "add_columns", cuda.Dim{X: ceilDiv(n, 32)}, cuda.Dim{X: 32, Y: 32},
		args.View(dw).Addr(c.work()).Int(parts).Int(n))
}
