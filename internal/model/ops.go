package model

import (
	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto device memory; see package tensor.
type View = tensor.View

// Ops are the operations of a training step on a device, except attention and communication, by topic. kernels/cpu and
// kernels/gpu implement it; opstest has their common tests. Calls are queued on the device's stream without waiting.
//
// No call returns an error. A fault of shape or type is a mistake of the caller and panics before anything is queued.
// The stream's Sync returns later faults, such as a token outside the vocabulary or a fault of the device.
//
// An activation is [batch, seq, heads, dim], as a matrix of batch*seq rows and heads*dim columns. A weight is [1, out,
// 1, in]. Activations have the compute type; updated parameters, their gradients, norms and losses are float32. Views
// are dense, except in Add, Zero, Copy and Conv.
type Ops interface {
	Products
	ScaledProducts
	Norms
	Tokens
	Elementwise
	Experts
	Recurrent
	attention.Sinks
}

// Products are the matrix products.
type Products interface {
	// Linear sets y [rows, out] to x [rows, in] times w transposed, plus add, of the shape of y, which may be y. With the
	// zero View as add it adds nothing. y may be float32 with x and w of 16 bits.
	Linear(y, x, w, add View)
	// LinearDX sets dx [rows, in] to dy [rows, out] times w, or adds it.
	LinearDX(dx, dy, w View, accumulate bool)
	// LinearDW sets dw [out, in] to dy transposed times x, or adds it.
	LinearDW(dw, dy, x View, accumulate bool)
	// SumRows adds the sum of the rows of x to sum, [1, 1, 1, n] of the type of parameters: the gradient of a bias.
	SumRows(sum, x View)
}

// ScaledProducts are products of matrices in E4M3 with a factor for each row.
type ScaledProducts interface {
	// Quantize sets byRow to x [R, C], each column times its element of by, float32, unless that is the zero View, and
	// byColumn to the transpose of x, [C, N] with N the next multiple of kernels.ScaledUnit from R, whose columns from R
	// are 0. One of them may be zero. Elements are float32, rounded after by.
	Quantize(byRow, byColumn kernels.Scaled, x, by View)
	// Transpose sets dst [C, R] to the transpose of src [R, C], of bytes. kernels.ScaledUnit divides R and C.
	Transpose(dst, src View)
	// ScaledLinear sets y [M, N] to a [M, K] times b [N, K] transposed, plus add, of the shape and type of y, which may be
	// y. With the zero View as add it adds nothing. y has the type of activations or of parameters. kernels.ScaledUnit
	// divides N and K. Sums are float32.
	ScaledLinear(y View, a, b kernels.Scaled, add View)

	// GroupQuantize sets to [P, C] to the row of x [P or T, C] of each place, times its expert's part of by, float32
	// [1, E*C, 1, 1], as float32. kernels.ScaledUnit divides C.
	GroupQuantize(to kernels.Scaled, x kernels.Operand, by View, p kernels.Pairs)
	// GroupScaledLinear sets y [P, N] to each row of a [P or T, K] times the transpose of its expert's rows of b [E*N, K]
	// or, if b has no factors, of its columns of b [N, E*K]. kernels.ScaledUnit divides N and K. Sums are float32.
	GroupScaledLinear(y View, a kernels.Operand, b kernels.Scaled, p kernels.Pairs)
}

// Norms are RMSNorms, of rows and of heads, and the rotation after head norms.
type Norms interface {
	// RMSNorm normalises over the last axis: y = x * inv * w with inv = 1 / sqrt(mean(x^2)
	// + eps), kept as float32 [batch, seq, heads, 1] for the backward pass. w: [1, 1, 1, dim].
	RMSNorm(y, inv, x, w View, eps float64)
	// AddRMSNorm sets sum = a + b and y = RMSNorm(sum). sum may be a.
	AddRMSNorm(y, inv, sum, a, b, w View, eps float64)
	// RMSNormBackward sets dx to the gradient of x, or adds it, and adds the gradient of w to dw. dx may be x.
	RMSNormBackward(dx, dw, dy, x, inv, w View, accumulate bool)

	// NormRope sets y [batch, seq, heads, dim] to the rotation of RMSNorm(x), in Hugging Face's form: (x1*cos - x2*sin,
	// x2*cos + x1*sin) of the halves. cos, sin: float32 [batch, seq, 1, pairs]; inv: float32 [batch, seq, heads, 1], as
	// in RMSNorm. The halves are of the first 2*pairs elements of a head, and the others stay. With zero Views as cos and
	// sin nothing rotates. With the zero View as w there is no norm and inv is unused; then y may be x.
	NormRope(y, inv, x, w, cos, sin View, eps float64)
	// NormRopeBackward sets dx, of the type of x, to its gradient given dy, of that type or float32, and adds the
	// gradient of w to dw. dx may be dy, if they agree in type. With the zero View as w, inv, x and dw are unused.
	NormRopeBackward(dx, dw, dy, x, inv, w, cos, sin View)
}

// Tokens are the operations on token ids: embedding and loss.
type Tokens interface {
	// Embed sets row i of y to row ids[i] of table [vocab, hidden]. ids: int32 [batch, seq, 1, 1].
	Embed(y, table, ids View)
	// EmbedBackward adds row i of dy to row ids[i] of dtable.
	EmbedBackward(dtable, dy, ids View)

	// CrossEntropy adds to loss, a float64 scalar, the sum of -log softmax(logits)[target]
	// over rows with target >= 0. With grad, logits becomes scale times the gradient of that
	// sum; rows without target become 0. targets: int32 [batch, seq, 1, 1]. If softcap is not 0,
	// logits are results of SoftCap, and the gradient is that of its arguments.
	CrossEntropy(loss, logits, targets View, scale, softcap float64, grad bool)
}

// Elementwise are the operations without rows.
type Elementwise interface {
	// GLU sets y = act(gate) * up.
	GLU(y, gate, up View, act kernels.Activation)
	// GLUBackward sets dgate and dup; they may be gate and up.
	GLUBackward(dgate, dup, dy, gate, up View, act kernels.Activation)
	// Gate sets y = x * sigmoid(gate). gate has the columns of x, or one for all of them. y may be x.
	Gate(y, x, gate View)
	// GateBackward sets dx and dgate. dx may be dy, and dgate may be gate.
	GateBackward(dx, dgate, dy, x, gate View)
	// Affine sets y = x * scale + shift, of one type. y may be x.
	Affine(y, x View, scale, shift float64)
	// Scale sets y = x * by, of one type. by is one element of the type of parameters. y may be x.
	Scale(y, x, by View)
	// SoftCap replaces x by limit * tanh(x / limit).
	SoftCap(x View, limit float64)
	// Dropout sets y to d of x; y may be x. tokens: int32 [batch, seq, 1, 1], the numbers of the rows for d.Random.
	Dropout(y, x, tokens View, d kernels.Dropout)
	// Add adds src to dst, of one shape: of the same type, or 16 bits to float32.
	Add(dst, src View)
	// Zero sets views of any type to 0.
	Zero(vs ...View)
	// Copy copies src to dst, converting between float types.
	Copy(dst, src View)
}

// Experts are the operations of mixtures of experts, for T tokens with k of E experts each. kernels.Pairs and Operand
// describe the operands. Stacked weights are [1, E*out, 1, in]. logits, weight, dweight and
// dshare have the type of parameters.
type Experts interface {
	// Route chooses k experts of each row of logits [T, E], by falling score plus correction, of equal ones the first. It
	// sets choice, int32 [1, T, k, 1], and weight, [1, T, k, 1]. correction: [1, 1, 1, E], or the zero View. A NaN counts
	// as the largest score.
	Route(weight, choice, logits, correction View, r kernels.Router)
	// RouteBackward sets dlogits, of the type of activations, given dweight. For the tokens of Count it adds the gradient
	// given dshare, [1, 1, 1, E], as that of the softmax of each row, unless that is the zero View.
	RouteBackward(dlogits, dweight, choice, logits, dshare, tokens View, r kernels.Router)
	// ScaleChoices sets y to x times the element of scale, [1, 1, 1, E], of each choice, and unless it is the zero View,
	// terms to x times weight: with gradients as x, the terms of the gradient of scale. y, terms, x and weight, [1, T, k,
	// 1], and scale have the type of parameters. y may be x.
	ScaleChoices(y, terms, x, weight, choice, scale View)
	// Count adds the choices of each expert to load, float64 [1, 1, 1, E], and unless it is the zero View, the softmax of
	// each row of logits to share, likewise. It counts the rows with tokens >= 0, int32 [1, T, 1, 1], or all with the zero
	// View.
	Count(load, share, choice, logits, tokens View)
	// Sort sets p for the choices.
	Sort(p kernels.Pairs, choice View)

	// GroupLinear sets y [P, out] to each row of x [P or T, in] times the transpose of its expert's rows of w, or adds it.
	GroupLinear(y View, x kernels.Operand, w View, p kernels.Pairs, accumulate bool)
	// GroupLinearDX sets dx [P, in] to each row of dy [P or T, out] times its expert's rows of w, or adds it.
	GroupLinearDX(dx View, dy kernels.Operand, w View, p kernels.Pairs, accumulate bool)
	// GroupLinearDW sets each expert's rows of dw to its rows of dy transposed times those of x, or adds it. Without
	// tokens the product is 0.
	GroupLinearDW(dw View, dy, x kernels.Operand, p kernels.Pairs, accumulate bool)
	// GroupAdd adds to each row of y [P, n] its expert's row of bias [1, 1, 1, E*n], of the type of parameters.
	GroupAdd(y, bias View, p kernels.Pairs)
	// GroupSum adds to each expert's row of sum [1, 1, 1, E*n] the sum of its rows of dy [P or T, n], each times its
	// weight unless that is the zero View.
	GroupSum(sum View, dy kernels.Operand, weight View, p kernels.Pairs)
	// GroupDot adds to the element of each pair in dweight the product of its rows of dy [P or T, n] and of bias.
	GroupDot(dweight View, dy kernels.Operand, bias View, p kernels.Pairs)
	// GroupGLU sets y [P, I] to act(gate) * up, the halves of the columns of x [P, 2*I].
	GroupGLU(y, x View, act kernels.Activation)
	// GroupGLUBackward sets, for y of GroupGLU and the weight w of a place's pair, dweight [1, T, k, 1] to the sum of da*y
	// over I, dx to the gradient of x given w*da as that of y, and wy to w*y. dx may be x, and wy may be da.
	GroupGLUBackward(dx, wy, dweight, da, x, weight View, p kernels.Pairs, act kernels.Activation)
	// Combine sets out [T, n] to add plus the sum over a token's choices, in their order, of weight times its row of y
	// [P, n]. Without weight, the zero View, it is 1; without add, 0. out may be add.
	Combine(out, add, y, weight View, p kernels.Pairs)
}

// FusedExperts does two operations of Experts in one pass over memory. A method returns false, and does nothing, if it
// does not support a call. If the operand has factors, w is as in GroupScaledLinear, which it then does.
type FusedExperts interface {
	// GroupLinearGLU does GroupLinear, to x, and GroupGLU.
	GroupLinearGLU(y, x View, from kernels.Operand, w kernels.Scaled, p kernels.Pairs, act kernels.Activation) bool
	// GroupLinearDXGLUBackward does GroupLinearDX, to wy, and GroupGLUBackward, with wy as da and dx in place of x.
	GroupLinearDXGLUBackward(x, wy, dweight View, dy kernels.Operand, w kernels.Scaled, weight View, p kernels.Pairs,
		act kernels.Activation) bool
}

// Recurrent are the operations of gated delta nets around their recurrence.
type Recurrent interface {
	// Conv sets y to silu of the causal depthwise convolution of x, [batch, seq, 1, n], in each segment of the seq axis:
	// y_t = silu(sum over j < width of w_j * r_(t-width+1+j)). r are the rows of x in the segment, after the rows of
	// before, [segments*batch, width-1, 1, n]: sample b of segment s has index s*batch+b. w: [1, n, 1, width] of the type
	// of parameters, with width from 2 to 8. Segments are not empty. Rows outside of them stay. x, y and before may be
	// columns of wider rows: only their last axis is contiguous. y must not overlap x.
	Conv(y, x, before, w View, segments []partition.Range)
	// ConvBackward sets dx and dbefore, of the shapes of x and before, and adds to dw, of shape and type of w, unless that
	// is the zero View. dx must not overlap x or dy.
	ConvBackward(dx, dbefore, dw, dy, x, before, w View, segments []partition.Range)
	// Gates sets g = -exp(aLog) * softplus(a + dt) and beta = sigmoid(b), of the type of parameters. a, b, g and beta:
	// [batch, seq, heads, 1]; aLog, dt: [1, 1, 1, heads] of the type of parameters.
	Gates(g, beta, a, b, aLog, dt View)
	// GatesBackward sets da and db, of the type of activations, given dg and dbeta, and adds to daLog and ddt, unless one
	// is the zero View.
	GatesBackward(da, db, daLog, ddt, dg, dbeta, g, beta, a, aLog, dt View)
}

// Softmax returns the parameters of a model's attention.
func Softmax(cfg *hf.Config) attention.Softmax {
	return attention.Softmax{Scale: cfg.SoftmaxScale(), Softcap: cfg.AttnLogitSoftcapping}
}

// Attention is one layer's attention over all ranks that share the sequence. The views hold this rank's positions; o,
// do: [batch, seq, heads, headDim]; gradients have the shapes of their inputs.
type Attention interface {
	// Forward sets the uninitialised out: O in the type of q, LSE in float32.
	Forward(layer int, out attention.Partial, q, k, v View) error
	// Backward sets the uninitialised gradients in float32, given out of Forward.
	Backward(layer int, grads attention.Grads, do, q, k, v View, out attention.Partial) error
}
