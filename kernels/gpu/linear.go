//go:build cuda

package gpu

import (
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/base/cuda/blas"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

func openBlas(stream *cuda.Stream) (*blas.Handle, error) {
	work, err := stream.Device().Alloc(LinearWorkspace)
	if err != nil {
		return nil, fmt.Errorf("workspace of matrix products: %w", err)
	}
	return blas.Open(stream, work)
}

// Linear sets y [rows, out] to x [rows, in] times w [out, in] transposed, plus add unless that is the zero View. y and
// add are float32 or have the type of the activations.
func (c *Ops) Linear(y, x, w, add View) { c.multiply("linear", linearProblem(y, x, w, add)) }

// LinearDX sets dx [rows, in] to dy [rows, out] times w [out, in], or adds it.
func (c *Ops) LinearDX(dx, dy, w View, accumulate bool) {
	c.multiply("linear dx", linearDXProblem(dx, dy, w, accumulate))
}

// LinearDW sets dw [out, in] to dy [rows, out] transposed times x [rows, in], or adds it. dw is float32 or has the type
// of the activations.
func (c *Ops) LinearDW(dw, dy, x View, accumulate bool) {
	c.multiply("linear dw", linearDWProblem(dw, dy, x, accumulate))
}

func linearProblem(y, x, w, add View) blas.Problem {
	denseActivations("linear", x, w)
	shape.Must((y.DType() == tensor.F32 || y.DType() == x.DType()) && y.IsDense(), "linear", y, x, w)
	shape.Must(y.Rows() == x.Rows() && x.Cols() == w.Cols() && y.Cols() == w.Rows(), "linear", y, x, w)
	p := blas.Problem{
		M: y.Rows(), N: y.Cols(), K: x.Cols(), TransB: true, In: x.DType(), Out: y.DType(),
		A: matrix(x), B: matrix(w), D: matrix(y),
	}
	if !add.IsZero() {
		denseActivations("linear", y, add)
		shape.Must(add.Rows() == y.Rows() && add.Cols() == y.Cols(), "linear", y, add)
		p.C = matrix(add)
	}
	return p
}

func linearDXProblem(dx, dy, w View, accumulate bool) blas.Problem {
	denseActivations("linear dx", dx, dy, w)
	shape.Must(dx.Rows() == dy.Rows() && dx.Cols() == w.Cols() && dy.Cols() == w.Rows(), "linear dx", dx, dy, w)
	p := blas.Problem{
		M: dx.Rows(), N: dx.Cols(), K: dy.Cols(), In: dx.DType(), Out: dx.DType(),
		A: matrix(dy), B: matrix(w), D: matrix(dx),
	}
	if accumulate {
		p.C = p.D
	}
	return p
}

func linearDWProblem(dw, dy, x View, accumulate bool) blas.Problem {
	denseActivations("linear dw", dy, x)
	shape.Must((dw.DType() == tensor.F32 || dw.DType() == x.DType()) && dw.IsDense(), "linear dw", dw, dy, x)
	shape.Must(dy.Rows() == x.Rows() && dw.Cols() == x.Cols() && dw.Rows() == dy.Cols(), "linear dw", dw, dy, x)
	p := blas.Problem{
		M: dw.Rows(), N: dw.Cols(), K: x.Rows(), TransA: true, In: x.DType(), Out: dw.DType(),
		A: matrix(dy), B: matrix(x), D: matrix(dw),
	}
	if accumulate {
		p.C = p.D
	}
	return p
}

func matrix(v View) blas.Matrix { return blas.Matrix{Addr: v.Addr(), Stride: int64(v.Cols())} }

// multiply queues a product on cuBLASLt, or on cprun's own kernel if cuBLASLt does not support it.
func (c *Ops) multiply(name string, p blas.Problem) {
	switch {
	case p.M == 0 || p.N == 0 || p.K == 0 && p.C == p.D:
		return
	case p.K > 0 && c.blas.Multiply(name, p):
		return
	}
	c.stream.Do(name, func() error { return c.simple(p) })
}

// simple queues the product by gemm_simple.cu.
func (c *Ops) simple(p blas.Problem) error {
	args := new(cuda.Args).Addr(p.D.Addr).Int64(p.D.Stride).Addr(p.C.Addr).Int64(p.C.Stride)
	// The kernel takes A as m by k and B as n by k, with any strides.
	for _, x := range []struct {
		blas.Matrix
		transposed bool
	}{{p.A, p.TransA}, {p.B, !p.TransB}} {
		m := source.Matrix{At: x.Addr, Row: x.Stride, Column: 1}
		if x.transposed {
			m.Row, m.Column = 1, x.Stride
		}
		cuda.Struct(args, &m)
	}
	args.Int64(int64(p.M)).Int64(int64(p.N)).Int64(int64(p.K))
	const tile, most = 64, 65535 // most blocks along y; the kernel loops over the rest
	grid := cuda.Dim{X: ceilDiv(p.N, tile), Y: min(ceilDiv(p.M, tile), most)}
	return c.launch("gemm_simple", "gemm_"+typeNames[p.In]+"_"+typeNames[p.Out], grid, cuda.Dim{X: 16, Y: 16}, args)
}

// The blocks of SumSquares set the order of the sum, so they are the same on every GPU.
const (
	squaresBlocks = 4096    // at most
	squaresShare  = 1 << 12 // elements of a block, if there are fewer
)

// SumSquares adds the sum of the squares of g, dense float32, to sum, a float64 scalar. It computes in float64. The
// order depends on the size of g and on its alignment to 16 bytes.
func (c *Ops) SumSquares(sum, g View) {
	denseFloats("sum of squares", g)
	shape.Must(sum.Size() == 1 && sum.DType() == tensor.F64, "sum of squares", sum, g)
	if g.Size() == 0 {
		return
	}
	c.stream.Do("sum of squares", func() error {
		whole := g.Size() / 4 * 4
		if !aligned16(g) {
			whole = 0
		}
		parts := 0
		for _, part := range []struct {
			kernel string
			lo, n  int
		}{{"squares_fp32", 0, whole}, {"squares_any_fp32", whole, g.Size() - whole}} {
			blocks := min(ceilDiv(part.n, squaresShare), squaresBlocks)
			args := new(cuda.Args).Addr(c.work() + uint64(8*parts)).Addr(elementOf(g, part.lo)).Int64(int64(part.n))
			if err := c.launch("ops_optim", part.kernel, cuda.Dim{X: blocks}, cuda.Dim{X: flatThreads},
				args); err != nil {
				return err
			}
			parts += blocks
		}
		return c.addScalars(sum, parts)
	})
}

// AdamW updates p, m and v, dense float32, in place by one step with gradient g, by the formulas of the CPU. With
// MaxNorm > 0, it first scales g by min(1, MaxNorm / (sqrt(sum) + 1e-6)); sum is a float64 scalar, read when the step
// runs. With Scale > 0, it divides g and sqrt(sum) by Scale, and changes nothing if sum is not finite; the device
// checks that. It copies the new p to copied, in copied's type, unless that is the zero View.
func (c *Ops) AdamW(p, copied, g, m, v, sum View, h kernels.AdamStep) {
	denseFloats("adamw", p, g, m, v)
	shape.Must(p.Size() == g.Size() && p.Size() == m.Size() && p.Size() == v.Size(), "adamw", p, g, m, v)
	shape.Must(h.MaxNorm <= 0 && h.Scale <= 0 || sum.Size() == 1 && sum.DType() == tensor.F64, "adamw", sum)
	name, all := "none", []View{p, g, m, v}
	if !copied.IsZero() {
		denseActivations("adamw", copied)
		shape.Must(copied.Size() == p.Size(), "adamw", p, copied)
		name, all = typeNames[copied.DType()], append(all, copied)
	}
	k := flat{program: "ops_optim", name: "adamw_" + name, any: "adamw_any_" + name, lanes: 4, vectors: 2}
	step := adamStep(h)
	c.stream.Do("adamw", func() error {
		return c.flat(k, p.Size(), aligned16(all...), func(lo, n int) *cuda.Args {
			a := new(cuda.Args)
			for _, x := range []View{p, copied, g, m, v} {
				a.Addr(elementOf(x, lo))
			}
			return cuda.Struct(a.View(sum).Int64(int64(n)), &step)
		})
	})
}

// adamStep returns the kernel's parameters of a step, each rounded once.
func adamStep(h kernels.AdamStep) source.AdamStep {
	t, unscale := float64(h.Step+1), 0.0
	if h.Scale > 0 {
		unscale = 1 / h.Scale
	}
	return source.AdamStep{
		MaxNorm: h.MaxNorm, Keep: float32(1 - h.LR*h.Decay),
		Rate: float32(h.LR / (1 - math.Pow(h.Beta1, t))), Root: float32(math.Sqrt(1 - math.Pow(h.Beta2, t))),
		New1: float32(1 - h.Beta1), Old2: float32(h.Beta2), New2: float32(1 - h.Beta2),
		Eps: float32(h.Eps), Unscale: float32(unscale),
	}
}

// NormRope sets y [batch, seq, heads, dim] to RoPE of RMSNorm(x), in the layout of halves:
// (x1*cos - x2*sin, x2*cos + x1*sin). cos, sin: float32 [batch, seq, 1, pairs]; inv: float32 [batch, seq, heads, 1].
// The halves are of the first 2*pairs elements of a head, and the others stay; cos and sin may be zero Views. If w is
// the zero View, there is no norm, and inv is unused. y may be x.
func (c *Ops) NormRope(y, inv, x, w, cos, sin View, eps float64) {
	checkCUDARope("rope", inv, w, cos, sin, y, x)
	c.stream.Do("norm and rope", func() error {
		var args cuda.Args
		name := typeNames[x.DType()]
		r := newRope(x, cos, lanesOf(x.DType()), aligned16(y, x, w, cos, sin))
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

// NormRopeBackward sets dx to the gradient of x, in its type, given dy, of that type or float32. It adds the gradient
// of w to dw. dx may be dy if their types are equal. If w is the zero View, inv, x and dw are unused.
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
		r := newRope(dx, cos, lanes, aligned16(dx, dy, x, w, cos, sin))
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
		return c.addColumns(dw, c.work(), parts)
	})
}

func checkCUDARope(op string, inv, w, cos, sin View, xs ...View) {
	denseActivations(op, xs...)
	x := xs[0]
	shape.Must(shape.SameShape(xs...) && x.Len(tensor.Dim) > 0 && x.Len(tensor.Dim)%2 == 0, op, xs...)
	if !cos.IsZero() || !sin.IsZero() {
		denseFloats(op, cos, sin)
		shape.Must(shape.SameShape(cos, sin) && cos.Rows() == x.Rows() && 2*cos.Cols() <= x.Len(tensor.Dim), op,
			append(xs, cos, sin)...)
	}
	if !w.IsZero() {
		checkCUDANorm(op, inv, w, xs...)
	}
}

const (
	ropeThreads = 256
	ropeHeads   = 4 // heads that a group of lanes processes at once in the forward pass
)

// rope holds the fields of source.Rope. lanes 0 selects the kernels for any head dim.
type rope struct{ tokens, heads, half, turned, lanes int }

// newRope uses vectors of lanes elements if they divide the halves of a head and of its rotated part.
func newRope(x, cos View, lanes int, vectors bool) rope {
	r := rope{tokens: x.Rows(), heads: x.Len(tensor.Heads), half: x.Len(tensor.Dim) / 2, turned: cos.Cols()}
	if vecs := r.half / lanes; vectors && r.half%lanes == 0 && r.turned%lanes == 0 && vecs <= 32 {
		r.lanes = 1 << bits.Len(uint(vecs-1))
	}
	return r
}

func (r rope) args(a *cuda.Args) *cuda.Args {
	return cuda.Struct(a, &source.Rope{Tokens: int32(r.tokens), Heads: int32(r.heads), Half: int32(r.half),
		Turned: int32(r.turned), Lanes: int32(r.lanes)})
}

// grid returns the blocks, if a group of lanes processes that number of heads at once.
func (r rope) grid(heads int) cuda.Dim {
	return cuda.Dim{X: ceilDiv(r.tokens*ceilDiv(r.heads, heads), ropeThreads/r.lanes)}
}

// SumRows adds the sum of the rows of x to sum, float32 [1, 1, 1, n].
func (c *Ops) SumRows(sum, x View) {
	const op = "sum of rows"
	denseActivations(op, x)
	denseFloats(op, sum)
	rows, n := x.Rows(), x.Cols()
	shape.Must(sum.Size() == n, op, sum, x)
	if rows == 0 || n == 0 {
		return
	}
	c.stream.Do(op, func() error {
		const threads = 256
		name := "sum_rows_" + typeNames[x.DType()]
		parts, err := c.parts("ops_optim", name, threads, rows, n)
		if err != nil {
			return err
		}
		args := new(cuda.Args).Addr(c.work()).View(x).Int(rows).Int(n)
		if err := c.launch("ops_optim", name, cuda.Dim{X: parts}, cuda.Dim{X: threads}, args); err != nil {
			return err
		}
		return c.addColumns(sum, c.work(), parts)
	})
}

// gluNames has the kernels' prefixes.
var gluNames = map[kernels.Activation]string{
	kernels.SiLU: "swiglu_", kernels.GELU: "geglu_", kernels.ClampedSiLU: "clamped_",
}

// GLU sets y = act(gate) * up.
func (c *Ops) GLU(y, gate, up View, act kernels.Activation) {
	denseActivations("glu", y, gate, up)
	shape.Must(shape.SameShape(y, gate, up), "glu", y, gate, up)
	prefix, name := gluNames[act], typeNames[y.DType()]
	k := flat{program: "ops_glu", name: prefix + name, any: prefix + "any_" + name, lanes: lanesOf(y.DType()),
		vectors: 4, anyElements: 1}
	c.stream.Do("glu", func() error {
		return c.flat(k, y.Size(), aligned16(y, gate, up), func(lo, n int) *cuda.Args {
			return new(cuda.Args).Addr(elementOf(y, lo)).Addr(elementOf(gate, lo)).Addr(elementOf(up,
				lo)).Int64(int64(n))
		})
	})
}

// Gate sets y = x * sigmoid(gate). gate has the columns of x, or one for all of them. y may be x.
func (c *Ops) Gate(y, x, gate View) { c.gate("gate", "gate_", gate, []View{y, x}, []View{gate}) }

// GateBackward sets dx and dgate. dx may be dy, and dgate may be gate.
func (c *Ops) GateBackward(dx, dgate, dy, x, gate View) {
	c.gate("gate backward", "gate_backward_", gate, []View{dx, dy, x}, []View{dgate, gate})
}

// gate queues a kernel with views of the shape of x, then those of the gate's.
func (c *Ops) gate(op, kernel string, gate View, wide, gates []View) {
	x, args, all := wide[len(wide)-1], new(cuda.Args), slices.Concat(wide, gates)
	rows, n, m := x.Rows(), x.Cols(), gate.Cols()
	denseActivations(op, all...)
	shape.Must(gate.Rows() == rows && (m == n || m == 1) && shape.SameShape(wide...) && shape.SameShape(gates...), op,
		all...)
	for _, v := range all {
		args.View(v)
	}
	if m == n {
		wide = all
	}
	c.rowwise(op, "ops_glu", kernel, "", eachPlace(rows), n, args.Int(rows).Int(n).Int(int(cInt(m == n))), wide...)
}

// GLUBackward sets dgate = dy * up * act'(gate) and dup = dy * act(gate). dgate may be gate, and dup may be up.
func (c *Ops) GLUBackward(dgate, dup, dy, gate, up View, act kernels.Activation) {
	denseActivations("glu backward", dgate, dup, dy, gate, up)
	shape.Must(shape.SameShape(dgate, dup, dy, gate, up), "glu backward", dgate, dup, dy, gate, up)
	prefix, name := gluNames[act]+"backward_", typeNames[dy.DType()]
	k := flat{program: "ops_glu", name: prefix + name, any: prefix + "any_" + name, lanes: lanesOf(dy.DType()),
		vectors: 2, anyElements: 1}
	c.stream.Do("glu backward", func() error {
		return c.flat(k, dy.Size(), aligned16(dgate, dup, dy, gate, up), func(lo, n int) *cuda.Args {
			return new(cuda.Args).Addr(elementOf(dgate, lo)).Addr(elementOf(dup, lo)).Addr(elementOf(dy,
				lo)).Addr(elementOf(gate, lo)).Addr(elementOf(up, lo)).Int64(int64(n))
		})
	})
}
