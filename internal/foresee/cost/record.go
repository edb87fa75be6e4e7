package cost

import (
	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto device memory; see package tensor.
type View = tensor.View

// Work is one operation Op of a step, in elements of DType: a matrix product of Rows tokens from In to Out where Rows
// is set, else a pass over memory. Bytes counts the necessary reads and writes.
type Work struct {
	Op            string
	DType         tensor.DType
	Rows, In, Out int
	Bytes         int64
}

// FLOPs returns the floating-point operations of a product.
func (w Work) FLOPs() float64 { return 2 * float64(w.Rows) * float64(w.In) * float64(w.Out) }

// Recorder is a device that computes nothing and reports each operation of a model or an optimizer. So the same code
// counts the operations for measurements and for predictions. It implements model.Ops, optim.Device and delta.Kernel.
type Recorder func(Work)

func sizeOf(vs ...View) (n int64) {
	for _, v := range vs {
		if !v.IsZero() {
			n += int64(v.Size()) * int64(v.DType().Size())
		}
	}
	return n
}

func (r Recorder) pass(op string, t tensor.DType, n int64) {
	if n > 0 {
		r(Work{Op: op, DType: t, Bytes: n})
	}
}

// product records a product of rows of x [rows, in] and y [rows, out] with weights w. old is the result that it adds
// to, or the zero View.
func (r Recorder) product(op string, rows int, x, y, w, old View) {
	if n := int64(x.Cols() + y.Cols()); rows > 0 {
		r(Work{Op: op, DType: x.DType(), Rows: rows, In: x.Cols(), Out: y.Cols(),
			Bytes: n*int64(rows*x.DType().Size()) + sizeOf(w, old)})
	}
}

// added returns a result that is added to.
func added(v View, accumulate bool) View {
	if accumulate {
		return v
	}
	return View{}
}

// Linear and the others are as in model.Ops.
func (r Recorder) Linear(y, x, w, add View) { r.product("linear", x.Rows(), x, y, w, add) }

// LinearDX records the gradient of a product's input.
func (r Recorder) LinearDX(dx, dy, w View, accumulate bool) {
	r.product("linear dx", dy.Rows(), dx, dy, w, added(dx, accumulate))
}

// LinearDW records the gradient of a product's weight.
func (r Recorder) LinearDW(dw, dy, x View, accumulate bool) {
	r.product("linear dw", dy.Rows(), x, dy, dw, added(dw, accumulate))
}

// Quantize records a pass over x and its results.
func (r Recorder) Quantize(byRow, byColumn kernels.Scaled, x, _ View) {
	r.pass("quantize", x.DType(), sizeOf(x, byRow.View, byRow.Factors, byColumn.View, byColumn.Factors))
}

// Transpose records a pass over bytes.
func (r Recorder) Transpose(dst, src View) { r.pass("transpose", src.DType(), sizeOf(dst, src)) }

// ScaledLinear records a product of operands in E4M3.
func (r Recorder) ScaledLinear(y View, a, b kernels.Scaled, add View) {
	if rows := y.Rows(); rows > 0 {
		r(Work{Op: "scaled linear", DType: a.DType(), Rows: rows, In: a.Cols(), Out: y.Cols(),
			Bytes: sizeOf(y, a.View, b.View, add)})
	}
}

// GroupQuantize records a pass over x, of each place, and its result.
func (r Recorder) GroupQuantize(to kernels.Scaled, x kernels.Operand, _ View, _ kernels.Pairs) {
	r.pass("quantize", x.DType(), sizeOf(to.View, to.Factors)+int64(to.Size()*x.DType().Size()))
}

// GroupScaledLinear records a product of pairs in E4M3.
func (r Recorder) GroupScaledLinear(y View, a kernels.Operand, b kernels.Scaled, _ kernels.Pairs) {
	if rows := y.Rows(); rows > 0 {
		r(Work{Op: "group scaled linear", DType: a.DType(), Rows: rows, In: a.Cols(), Out: y.Cols(),
			Bytes: sizeOf(y, b.View) + int64(rows*a.Cols())})
	}
}

// SumRows records the gradient of a bias.
func (r Recorder) SumRows(_, x View) { r.pass("sum of rows", x.DType(), sizeOf(x)) }

// RMSNorm records a norm.
func (r Recorder) RMSNorm(y, _, x, _ View, _ float64) { r.pass("rmsnorm", x.DType(), sizeOf(y, x)) }

// AddRMSNorm records a sum and its norm.
func (r Recorder) AddRMSNorm(y, _, sum, a, b, _ View, _ float64) {
	r.pass("add rmsnorm", a.DType(), sizeOf(y, sum, a, b))
}

// RMSNormBackward records the gradients of a norm.
func (r Recorder) RMSNormBackward(dx, _, dy, x, _, _ View, accumulate bool) {
	r.pass("rmsnorm backward", x.DType(), sizeOf(dx, dy, x, added(dx, accumulate)))
}

// NormRope records a rotation, of normalised heads where w is given.
func (r Recorder) NormRope(y, _, x, w, cos, sin View, _ float64) {
	op := "norm rope"
	if w.IsZero() {
		op = "rope"
	}
	r.pass(op, x.DType(), sizeOf(y, x, cos, sin))
}

// NormRopeBackward records its gradients.
func (r Recorder) NormRopeBackward(dx, _, dy, x, _, w, cos, sin View) {
	op, n := "norm rope backward", sizeOf(dx, dy, cos, sin)
	if w.IsZero() {
		op = "rope backward"
	} else {
		n += sizeOf(x)
	}
	r.pass(op, dx.DType(), n)
}

// GLU records the gated activation of an MLP.
func (r Recorder) GLU(y, gate, up View, _ kernels.Activation) {
	r.pass("swiglu", y.DType(), sizeOf(y, gate, up))
}

// GLUBackward records its gradients.
func (r Recorder) GLUBackward(dgate, dup, dy, gate, up View, _ kernels.Activation) {
	r.pass("swiglu backward", dy.DType(), sizeOf(dgate, dup, dy, gate, up))
}

// Embed records a lookup of tokens.
func (r Recorder) Embed(y, _, _ View) { r.pass("embed", y.DType(), 2*sizeOf(y)) }

// EmbedBackward records its gradients.
func (r Recorder) EmbedBackward(_, dy, _ View) {
	r.pass("embed backward", dy.DType(), sizeOf(dy)+8*int64(dy.Size()))
}

// CrossEntropy records the loss of some tokens.
func (r Recorder) CrossEntropy(_, logits, _ View, _, _ float64, grad bool) {
	op, n := "cross entropy forward", sizeOf(logits)
	if grad {
		op, n = "cross entropy", 2*n
	}
	r.pass(op, logits.DType(), n)
}

// Gate records a product with sigmoids.
func (r Recorder) Gate(y, x, gate View) { r.pass("copy", y.DType(), sizeOf(y, x, gate)) }

// GateBackward records its gradients.
func (r Recorder) GateBackward(dx, dgate, dy, x, gate View) {
	r.pass("swiglu backward", dy.DType(), sizeOf(dx, dgate, dy, x, gate))
}

// Affine records a scaled and shifted copy.
func (r Recorder) Affine(y, x View, _, _ float64) { r.pass("copy", y.DType(), sizeOf(y, x)) }

// Scale records a product with one factor.
func (r Recorder) Scale(y, x, _ View) { r.pass("copy", y.DType(), sizeOf(y, x)) }

// SoftCap records a limit.
func (r Recorder) SoftCap(x View, _ float64) { r.pass("copy", x.DType(), 2*sizeOf(x)) }

// Dropout records a pass over activations.
func (r Recorder) Dropout(y, x, _ View, _ kernels.Dropout) {
	r.pass("dropout", x.DType(), sizeOf(y, x))
}

// Add records a sum.
func (r Recorder) Add(dst, src View) { r.pass("accumulate", dst.DType(), 2*sizeOf(dst)+sizeOf(src)) }

// Zero records views set to 0.
func (r Recorder) Zero(vs ...View) {
	for _, v := range vs {
		r.pass("zero", v.DType(), sizeOf(v))
	}
}

// Copy records a copy.
func (r Recorder) Copy(dst, src View) { r.pass("copy", dst.DType(), sizeOf(dst, src)) }

// FoldSink records a pass over attention's result.
func (r Recorder) FoldSink(o, _, _ View) error { r.pass("copy", o.DType(), 2*sizeOf(o)); return nil }

// SinkGrad records the gradient of sinks.
func (r Recorder) SinkGrad(_, do, o, _, _ View) error {
	r.pass("sum of rows", o.DType(), sizeOf(do, o))
	return nil
}

// SumSquares records the norm of a gradient.
func (r Recorder) SumSquares(_, g View) { r.pass("gradient norm", g.DType(), sizeOf(g)) }

// AdamW records a step of the optimizer. p, m and v are read and written.
func (r Recorder) AdamW(p, c, g, m, v, _ View, _ kernels.AdamStep) {
	r.pass("adamw", p.DType(), 2*sizeOf(p, m, v)+sizeOf(g, c))
}

// Route and the others are as in model.Experts. Grouped products take the time of one product over all pairs.
func (r Recorder) Route(_, _, logits, _ View, _ kernels.Router) {
	r.pass("copy", logits.DType(), 2*sizeOf(logits))
}

// ScaleChoices records a pass over weights of experts.
func (r Recorder) ScaleChoices(y, terms, x, weight, _, _ View) {
	r.pass("copy", y.DType(), sizeOf(y, terms, x, weight))
}

// RouteBackward records the gradient of logits.
func (r Recorder) RouteBackward(dlogits, _, _, logits, _, _ View, _ kernels.Router) {
	r.pass("copy", logits.DType(), sizeOf(dlogits, logits))
}

// Count records a pass over the logits.
func (r Recorder) Count(_, _, _, logits, _ View) { r.pass("copy", logits.DType(), 2*sizeOf(logits)) }

// Sort records the order of pairs.
func (r Recorder) Sort(p kernels.Pairs, choice View) {
	r.pass("copy", choice.DType(), sizeOf(p.Tokens, p.Places, choice))
}

// GroupLinear records a product of pairs.
func (r Recorder) GroupLinear(y View, x kernels.Operand, w View, _ kernels.Pairs, accumulate bool) {
	r.product("group linear", y.Rows(), x.View, y, w, added(y, accumulate))
}

// GroupLinearDX records the gradient of its input.
func (r Recorder) GroupLinearDX(dx View, dy kernels.Operand, w View, _ kernels.Pairs, accumulate bool) {
	r.product("group linear dx", dx.Rows(), dx, dy.View, w, added(dx, accumulate))
}

// GroupLinearDW records the gradient of its weights.
func (r Recorder) GroupLinearDW(dw View, dy, x kernels.Operand, p kernels.Pairs, accumulate bool) {
	r.product("group linear dw", p.Tokens.Rows(), x.View, dy.View, dw, added(dw, accumulate))
}

// GroupAdd records a sum with biases.
func (r Recorder) GroupAdd(y, _ View, _ kernels.Pairs) { r.pass("accumulate", y.DType(), 2*sizeOf(y)) }

// GroupSum records the gradient of biases.
func (r Recorder) GroupSum(_ View, dy kernels.Operand, _ View, p kernels.Pairs) { r.rows(dy, p) }

// GroupDot records products of rows.
func (r Recorder) GroupDot(_ View, dy kernels.Operand, _ View, p kernels.Pairs) { r.rows(dy, p) }

// rows records a pass over a row of each pair.
func (r Recorder) rows(dy kernels.Operand, p kernels.Pairs) {
	r.pass("sum of rows", dy.DType(), int64(p.Tokens.Rows()*dy.Cols()*dy.DType().Size()))
}

// GroupGLU records the gated activation of experts.
func (r Recorder) GroupGLU(y, x View, _ kernels.Activation) {
	r.pass("swiglu", y.DType(), sizeOf(y, x))
}

// GroupGLUBackward records its gradients.
func (r Recorder) GroupGLUBackward(dx, wy, _, da, x, _ View, _ kernels.Pairs, _ kernels.Activation) {
	r.pass("swiglu backward", da.DType(), sizeOf(dx, wy, da, x))
}

// Combine records the sum of a token's choices.
func (r Recorder) Combine(out, _, y, _ View, _ kernels.Pairs) {
	r.pass("copy", y.DType(), 2*sizeOf(out)+sizeOf(y))
}

// Conv records a pass over x.
func (r Recorder) Conv(y, x, _, _ View, _ []partition.Range) { r.pass("conv", x.DType(), sizeOf(y, x)) }

// ConvBackward records its gradients.
func (r Recorder) ConvBackward(dx, _, _, dy, x, _, _ View, _ []partition.Range) {
	r.pass("conv backward", x.DType(), sizeOf(dx, dy, x))
}

// Gates records the decay and the step of each head.
func (r Recorder) Gates(g, beta, a, b, _, _ View) { r.pass("copy", a.DType(), sizeOf(g, beta, a, b)) }

// GatesBackward records their gradients.
func (r Recorder) GatesBackward(da, db, _, _, dg, dbeta, g, beta, a, _, _ View) {
	r.pass("copy", a.DType(), sizeOf(da, db, dg, dbeta, g, beta, a))
}

// Summarize and the others are as in delta.Kernel.
func (r Recorder) Summarize(a delta.Args) error { return r.rule("delta summarize", a, 1) }

// Forward records the rule.
func (r Recorder) Forward(a delta.Args) error { return r.rule("delta forward", a, 1) }

// SummarizeBackward records the maps of gradients.
func (r Recorder) SummarizeBackward(a delta.Args) error {
	return r.rule("delta summarize backward", a, 1)
}

// Backward records the gradients, with the products of Forward again.
func (r Recorder) Backward(a delta.Args) error { return r.rule("delta backward", a, 3) }

// Compose records nothing: maps are small.
func (r Recorder) Compose(_, _, _ View) error { return nil }

// rule records products of 10 C d + 6 d^2 FLOPs for each row and value head, in chunks of C rows; and times as many.
func (r Recorder) rule(op string, a delta.Args, times int) error {
	d, rows := a.K.Len(tensor.Dim), 0
	for _, s := range a.Segments {
		rows += a.Q.Len(tensor.Batch) * s.Len()
	}
	if rows > 0 {
		r(Work{Op: op, DType: a.Q.DType(), Rows: rows, In: d, Out: times * a.V.Len(tensor.Heads) * (5*delta.Chunk + 3*d)})
	}
	return nil
}
