package opstest

import (
	"math"

	"github.com/cprun/cprun/kernels"
)

// The references compute row-major matrices in float64, with one loop over each definition. They return new slices and
// change nothing.

// refLinear returns x [rows, in] times w [out, in] transposed.
func refLinear(x, w []float64, rows, in, out int) []float64 {
	y := zeros(rows * out)
	for r := range rows {
		for o := range out {
			for i := range in {
				y[r*out+o] += x[r*in+i] * w[o*in+i]
			}
		}
	}
	return y
}

// refLinearBackward returns the gradients of x and w given the gradient of y.
func refLinearBackward(dy, x, w []float64, rows, in, out int) (dx, dw []float64) {
	dx, dw = zeros(rows*in), zeros(out*in)
	for r := range rows {
		for o := range out {
			for i := range in {
				dx[r*in+i] += dy[r*out+o] * w[o*in+i]
				dw[o*in+i] += dy[r*out+o] * x[r*in+i]
			}
		}
	}
	return dx, dw
}

// refNorm returns RMSNorm of rows of len(w) elements, and inv.
func refNorm(x, w []float64, eps float64) (y, inv []float64) {
	n := len(w)
	for r := range len(x) / n {
		sum := 0.0
		for _, v := range x[r*n : (r+1)*n] {
			sum += v * v
		}
		scale := 1 / math.Sqrt(sum/float64(n)+eps)
		inv = append(inv, scale)
		for i, v := range x[r*n : (r+1)*n] {
			y = append(y, v*scale*w[i])
		}
	}
	return y, inv
}

// refNormBackward applies the chain rule through inv. The derivative of inv by x_i is -inv^3 * x_i / n.
func refNormBackward(dy, x, w []float64, eps float64) (dx, dw []float64) {
	n := len(w)
	dx, dw = zeros(len(x)), zeros(n)
	_, inv := refNorm(x, w, eps)
	for r := range inv {
		dinv := 0.0
		for i := range n {
			dinv += dy[r*n+i] * x[r*n+i] * w[i]
		}
		for i := range n {
			dw[i] += dy[r*n+i] * x[r*n+i] * inv[r]
			dx[r*n+i] = dy[r*n+i]*w[i]*inv[r] - dinv*math.Pow(inv[r], 3)*x[r*n+i]/float64(n)
		}
	}
	return dx, dw
}

// refRope rotates the first 2*pairs of the elements of x [rows, heads, dim] by cos, sin [rows, pairs], or by the
// transpose.
func refRope(x, cos, sin []float64, rows, heads, dim int, inverse bool) []float64 {
	y := clone(x)
	for r := range rows {
		pairs := len(cos) / rows
		for h := range heads {
			for i := range pairs {
				c, s := cos[r*pairs+i], sin[r*pairs+i]
				if inverse {
					s = -s
				}
				at := (r*heads + h) * dim
				y[at+i] = x[at+i]*c - x[at+pairs+i]*s
				y[at+pairs+i] = x[at+pairs+i]*c + x[at+i]*s
			}
		}
	}
	return y
}

// refActivation returns an activation and its derivative.
func refActivation(x float64, act kernels.Activation) (y, dy float64) {
	if act == kernels.SiLU {
		s := 1 / (1 + math.Exp(-x))
		return x * s, s + x*s*(1-s)
	}
	slope := math.Sqrt(2 / math.Pi)
	t := math.Tanh(slope * (x + 0.044715*math.Pow(x, 3)))
	return x / 2 * (1 + t), (1+t)/2 + x/2*(1-t*t)*slope*(1+3*0.044715*x*x)
}

func refGLU(gate, up []float64, act kernels.Activation) []float64 {
	y := zeros(len(gate))
	for i, g := range gate {
		a, _ := refActivation(g, act)
		y[i] = a * up[i]
	}
	return y
}

func refGLUBackward(dy, gate, up []float64, act kernels.Activation) (dgate, dup []float64) {
	dgate, dup = zeros(len(dy)), zeros(len(dy))
	for i, g := range gate {
		a, slope := refActivation(g, act)
		dgate[i], dup[i] = dy[i]*up[i]*slope, dy[i]*a
	}
	return dgate, dup
}

func refMap(xs []float64, f func(float64) float64) []float64 {
	ys := zeros(len(xs))
	for i, x := range xs {
		ys[i] = f(x)
	}
	return ys
}

// refEmbed returns the rows ids of table [vocab, n].
func refEmbed(table []float64, ids []int32, n int) []float64 {
	var y []float64
	for _, id := range ids {
		y = append(y, table[int(id)*n:(int(id)+1)*n]...)
	}
	return y
}

func refEmbedBackward(dy []float64, ids []int32, vocab, n int) []float64 {
	d := zeros(vocab * n)
	for r, id := range ids {
		for i := range n {
			d[int(id)*n+i] += dy[r*n+i]
		}
	}
	return d
}

// refCrossEntropy returns the sum of losses of rows with a target, and its gradient.
func refCrossEntropy(logits []float64, targets []int32, vocab int) (loss float64, grad []float64) {
	grad = zeros(len(logits))
	for r, target := range targets {
		if target < 0 {
			continue
		}
		row := logits[r*vocab : (r+1)*vocab]
		top, sum := math.Inf(-1), 0.0
		for _, l := range row {
			top = math.Max(top, l)
		}
		for _, l := range row {
			sum += math.Exp(l - top)
		}
		for i, l := range row {
			grad[r*vocab+i] = math.Exp(l-top) / sum
		}
		hit := row[target] - top - math.Log(sum)
		loss -= hit
		grad[r*vocab+int(target)] = math.Expm1(hit)
	}
	return loss, grad
}

func plus(a, b []float64) []float64 {
	c := zeros(len(a))
	for i := range a {
		c[i] = a[i] + b[i]
	}
	return c
}
