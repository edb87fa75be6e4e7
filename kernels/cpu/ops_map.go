package cpu

import (
	"math"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// Affine sets y = x * scale + shift. y may be x.
func (c *Kernels) Affine(y, x tensor.View, scale, shift float64) {
	c.pointwise("affine", y, x, func(x float64) float64 { return x*scale + shift })
}

// Scale sets y = x * by, of one element of the type of parameters. y may be x.
func (c *Kernels) Scale(y, x, by tensor.View) {
	params("scale", x, by)
	shape.Must(by.Size() == 1, "scale", y, by)
	factor := loader(by)
	c.pointwise("scale", y, x, func(x float64) float64 { return x * factor(0) })
}

// SoftCap replaces x by limit * tanh(x / limit).
func (c *Kernels) SoftCap(x tensor.View, limit float64) {
	c.pointwise("soft cap", x, x, func(x float64) float64 { return limit * math.Tanh(x/limit) })
}

// pointwise sets y to f of x. It computes in float64.
func (c *Kernels) pointwise(op string, y, x tensor.View, f func(float64) float64) {
	denseActivations(op, y, x)
	shape.Must(shape.SameShape(y, x), op, y, x)
	load, store := loader(x), storer(y)
	c.queue(op, func() {
		c.blocks(y.Size(), elementBlock, func(_, lo, hi int) {
			for i := int64(lo); i < int64(hi); i++ {
				store(i, f(load(i)))
			}
		})
	})
}

// Gate sets y = x * sigmoid(gate). gate has the columns of x, or one for all of them. y may be x.
func (c *Kernels) Gate(y, x, gate tensor.View) {
	c.gate("gate", y, tensor.View{}, tensor.View{}, x, gate)
}

// GateBackward sets dx and dgate. dx may be dy, and dgate may be gate.
func (c *Kernels) GateBackward(dx, dgate, dy, x, gate tensor.View) {
	const op = "gate backward"
	denseActivations(op, x, dy, dgate)
	shape.Must(dy.Size() == x.Size() && dgate.Size() == gate.Size(), op, dy, dgate, x, gate)
	c.gate(op, dx, dgate, dy, x, gate)
}

// gate sets y to x times the sigmoids, or given dy to the gradient of x, and dgate. It computes in float64.
func (c *Kernels) gate(op string, y, dgate, dy, x, gate tensor.View) {
	n, m := x.Cols(), gate.Cols()
	denseActivations(op, y, x, gate)
	shape.Must(y.Size() == x.Size() && gate.Rows() == x.Rows() && (m == n || m == 1), op, y, x, gate)
	load, gates, grads, store, storeGate := loader(x), loader(gate), loader(dy), storer(y), storer(dgate)
	sigmoid := func(i int64) float64 { return 1 / (1 + math.Exp(-gates(i))) }
	row := func(r int64) {
		s, sum, each := 0.0, 0.0, m == n
		if !each { // another goroutine may replace other gates
			s = sigmoid(r)
		}
		for i := r * int64(n); i < (r+1)*int64(n); i++ {
			if each {
				s = sigmoid(i)
			}
			v := load(i)
			if grads == nil {
				store(i, v*s)
				continue
			}
			d := grads(i)
			store(i, d*s)
			if sum += d * v * s * (1 - s); each {
				storeGate(i, sum)
				sum = 0
			}
		}
		if grads != nil && !each {
			storeGate(r, sum)
		}
	}
	c.queue(op, func() {
		c.blocks(x.Rows(), rowBlock(n), func(_, lo, hi int) {
			for r := lo; r < hi; r++ {
				row(int64(r))
			}
		})
	})
}

// gluLoops returns the loops of y = act(gate) * up and of its gradients. dgate may be gate, and dup may be up.
func gluLoops[T tensor.Float](c *Kernels, act kernels.Activation) (
	forward func(y, gate, up []T), backward func(dgate, dup, dy, gate, up []T)) {
	switch act {
	case kernels.GELU:
		return geGLU[T], geGLUBackward[T]
	case kernels.ClampedSiLU:
		return clampedGLU[T], clampedGLUBackward[T]
	}
	l := simd.LoopsOf[T](c.level)
	return l.SwiGLU, l.SwiGLUBackward
}

// A curve is a value and its derivative.
type curve struct{ value, slope float64 }

// gelu returns x * s with s = sigmoid(2u) and u = sqrt(2/pi) * (x + cubic * x^3), since 1 + tanh(u) = 2 sigmoid(2u).
func gelu(x float64) curve {
	const cubic, twice = 0.044715, 2 * 0.797884560802865355879892119869
	near := min(max(x, -geluReach), geluReach)
	s := 1 / (1 + math.Exp(-twice*near*(1+cubic*near*near)))
	return curve{x * s, s + near*s*(1-s)*twice*(1+3*cubic*near*near)}
}

// geluReach is beyond the x with s between 0 and 1 in float64. x^3 stays finite.
const geluReach = 64

func geGLU[T tensor.Float](y, gate, up []T) {
	for i, g := range gate {
		y[i] = T(gelu(float64(g)).value * float64(up[i]))
	}
}

func geGLUBackward[T tensor.Float](dgate, dup, dy, gate, up []T) {
	for i, g := range gate {
		c, d := gelu(float64(g)), float64(dy[i])
		dgate[i], dup[i] = T(d*float64(up[i])*c.slope), T(d*c.value)
	}
}

// gateLimit is the limit of gpt-oss's gate and up.
const gateLimit = 7

// clampedSiLU returns x * sigmoid(1.702 x).
func clampedSiLU(x float64) curve {
	const steep = 1.702
	s := 1 / (1 + math.Exp(-steep*x))
	return curve{x * s, s * (1 + steep*x*(1-s))}
}

func clampedGLU[T tensor.Float](y, gate, up []T) {
	for i, g := range gate {
		u := min(max(float64(up[i]), -gateLimit), gateLimit)
		y[i] = T((u + 1) * clampedSiLU(min(float64(g), gateLimit)).value)
	}
}

// clampedGLUBackward sets gradients to 0 beyond a limit, but not at it, as torch.clamp does.
func clampedGLUBackward[T tensor.Float](dgate, dup, dy, gate, up []T) {
	for i, g := range gate {
		d, u := float64(dy[i]), float64(up[i])
		c := clampedSiLU(min(float64(g), gateLimit))
		dg, du := d*(min(max(u, -gateLimit), gateLimit)+1)*c.slope, d*c.value
		if g > gateLimit {
			dg = 0
		}
		if u > gateLimit || u < -gateLimit {
			du = 0
		}
		dgate[i], dup[i] = T(dg), T(du)
	}
}
