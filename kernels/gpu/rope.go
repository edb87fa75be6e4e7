//go:build cuda

package gpu

import (
	"math/bits"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// NormRope sets y [batch, seq, heads, dim] to the rotation of RMSNorm(x), halves against halves:
// (x1*cos - x2*sin, x2*cos + x1*sin). cos, sin: float32 [batch, seq, 1, dim/2]; inv: float32
// [batch, seq, heads, 1]. With the zero View as w there is no norm, and inv is not used. y may
// be x.
func (c *Ops) NormRope(y, inv, x, w, cos, sin View, eps float64) {
	checkCUDARope("rope", inv, w, cos, sin, y, x)
	c.stream.Do("norm and rope", func() error {
		var args cuda.Args
		name := typeNames[x.DType()]
		r := newRope(x, lanesOf(x.DType()), aligned16(y, x, w, cos, sin))
		switch {
		case r.lanes == 0:
			args.View(y).View(inv).View(x).View(w).View(cos).View(sin)
			grid := cuda.Dim{X: ceilDiv(shape.RowsOver(x), 8)}
			return c.launch("ops_rope", "norm_rope_any_"+name, grid, cuda.Dim{X: 32, Y: 8}, r.args(&args).Float(eps))
		case w.IsZero():
			args.View(y).View(x).View(cos).View(sin)
			return c.launch("ops_rope", "rope_"+name, r.grid(ropeHeads), cuda.Dim{X: ropeThreads}, r.args(&args))
		}
		args.View(y).View(inv).View(x).View(w).View(cos).View(sin)
		return c.launch("ops_rope", "norm_rope_"+name, r.grid(ropeHeads), cuda.Dim{X: ropeThreads},
			r.args(&args).Float(eps))
	})
}

// NormRopeBackward sets dx, of the type of x, to its gradient given dy, of that type or float32,
// and adds that of w to dw. dx may be dy, if they agree in type. With the zero View as w, inv, x
// and dw are not used.
func (c *Ops) NormRopeBackward(dx, dw, dy, x, inv, w, cos, sin View) {
	norm := !w.IsZero()
	if !norm {
		x = dx
	}
	checkCUDARope("rope backward", inv, w, cos, sin, dx, x)
	shape.Must(dy.Shape() == dx.Shape() && dy.IsDense() && (dy.DType() == dx.DType() || dy.DType() == tensor.F32),
		"rope backward", dx, dy)
	if norm {
		denseFloats("rope backward", dw)
		shape.Must(dw.Size() == w.Size(), "rope backward", dw, w)
	}
	if dx.Size() == 0 {
		return
	}
	c.stream.Do("norm and rope backward", func() error {
		var args cuda.Args
		name := typeNames[dx.DType()] + "_" + typeNames[dy.DType()]
		lanes := lanesOf(dy.DType())
		r := newRope(dx, lanes, aligned16(dx, dy, x, w, cos, sin))
		if r.lanes > 0 && !norm {
			args.View(dx).View(dy).View(cos).View(sin)
			return c.launch("ops_rope", "rope_backward_"+name, r.grid(16/lanes), cuda.Dim{X: ropeThreads},
				r.args(&args))
		}
		kernel, threads, blocks := "norm_rope_backward_any_"+name, 32, shape.RowsOver(dx)
		if r.lanes > 0 {
			kernel, threads, blocks = "norm_rope_backward_"+name, ropeThreads, r.grid(16/lanes).X
		}
		parts, err := c.parts("ops_rope", kernel, threads, blocks, 2*r.half)
		if err != nil {
			return err
		}
		args.View(dx).Addr(c.work()).View(dy).View(x).View(inv).View(w).View(cos).View(sin)
		if err := c.launch("ops_rope", kernel, cuda.Dim{X: parts}, cuda.Dim{X: threads}, r.args(&args)); err != nil ||
			!norm {
			return err
		}
		return c.addColumns(dw, parts)
	})
}

func checkCUDARope(op string, inv, w, cos, sin View, xs ...View) {
	denseActivations(op, xs...)
	denseFloats(op, cos, sin)
	x := xs[0]
	shape.Must(shape.SameShape(cos, sin) && shape.SameShape(xs...) && cos.Rows() == x.Rows() &&
		2*cos.Cols() == x.Len(tensor.Dim) && cos.Cols() > 0, op, append(xs, cos, sin)...)
	if !w.IsZero() {
		checkCUDANorm(op, inv, w, xs...)
	}
}

const (
	ropeThreads = 256
	ropeHeads   = 4 // that a group of lanes takes at once in the forward pass
)

// rope is source.Rope; lanes 0 selects the kernels of any head dim.
type rope struct{ tokens, heads, half, lanes int }

// newRope takes vectors of that many elements where heads are made of them.
func newRope(x View, lanes int, vectors bool) rope {
	r := rope{tokens: x.Rows(), heads: x.Len(tensor.Heads), half: x.Len(tensor.Dim) / 2}
	if vecs := r.half / lanes; vectors && r.half%lanes == 0 && vecs <= 32 {
		r.lanes = 1 << bits.Len(uint(vecs-1))
	}
	return r
}

func (r rope) args(a *cuda.Args) *cuda.Args {
	return cuda.Struct(a, &source.Rope{Tokens: int32(r.tokens), Heads: int32(r.heads), Half: int32(r.half),
		Lanes: int32(r.lanes)})
}

// grid returns the blocks that take so many heads at once with each group of lanes.
func (r rope) grid(heads int) cuda.Dim {
	return cuda.Dim{X: ceilDiv(r.tokens*ceilDiv(r.heads, heads), ropeThreads/r.lanes)}
}

// SwiGLU sets y = silu(gate) * up.
func (c *Ops) SwiGLU(y, gate, up View) {
	denseActivations("swiglu", y, gate, up)
	shape.Must(shape.SameShape(y, gate, up), "swiglu", y, gate, up)
	name := typeNames[y.DType()]
	k := flat{program: "ops_swiglu", name: "swiglu_" + name, any: "swiglu_any_" + name, lanes: lanesOf(y.DType()),
		vectors: 4, anyElements: 1}
	c.stream.Do("swiglu", func() error {
		return c.flat(k, y.Size(), aligned16(y, gate, up), func(lo, n int) *cuda.Args {
			return new(cuda.Args).Addr(elementOf(y, lo)).Addr(elementOf(gate, lo)).Addr(elementOf(up,
				lo)).Int64(int64(n))
		})
	})
}

// SwiGLUBackward sets dgate = dy * up * s * (1 + gate * (1 - s)), with s = sigmoid(gate), and
// dup = dy * silu(gate). They may be gate and up.
func (c *Ops) SwiGLUBackward(dgate, dup, dy, gate, up View) {
	denseActivations("swiglu backward", dgate, dup, dy, gate, up)
	shape.Must(shape.SameShape(dgate, dup, dy, gate, up), "swiglu backward", dgate, dup, dy, gate, up)
	name := typeNames[dy.DType()]
	k := flat{program: "ops_swiglu", name: "swiglu_backward_" + name, any: "swiglu_backward_any_" + name,
		lanes: lanesOf(dy.DType()), vectors: 2, anyElements: 1}
	c.stream.Do("swiglu backward", func() error {
		return c.flat(k, dy.Size(), aligned16(dgate, dup, dy, gate, up), func(lo, n int) *cuda.Args {
			return new(cuda.Args).Addr(elementOf(dgate, lo)).Addr(elementOf(dup, lo)).Addr(elementOf(dy,
				lo)).Addr(elementOf(gate, lo)).Addr(elementOf(up, lo)).Int64(int64(n))
		})
	})
}
