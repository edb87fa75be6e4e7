package cpu

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

var halfTypes = []tensor.DType{tensor.BF16, tensor.F16}

// twins returns 16-bit views, and float32 views of the same values.
type twins struct {
	*Kernels
	t     *testing.T
	dtype tensor.DType
	rng   *rand.Rand
}

func newTwins(t *testing.T, dtype tensor.DType) *twins {
	return &twins{newTestCPU(t), t, dtype, rand.New(rand.NewPCG(1, 1))}
}

// draw returns random values in 16 bits, and the same values in float32.
func (x *twins) draw(shape ...int) (half, wide tensor.View) {
	wide = normal(x.rng, shape...)
	half = tensor.New(x.dtype, shape...)
	x.Copy(half, wide)
	x.Copy(wide, half)
	return half, wide
}

// equal fails unless half has the bits of wide, rounded.
func (x *twins) equal(what string, half, wide tensor.View) {
	x.t.Helper()
	shape := wide.Shape()
	want := tensor.New(half.DType(), shape[:]...)
	x.Copy(want, wide)
	settle(x.t, x.Kernels)
	if !slices.Equal(tensor.Bytes(half), tensor.Bytes(want)) {
		x.t.Errorf("%s of %v is not that of float32, rounded once", what, x.dtype)
	}
}

// TestHalfBlocks checks that 16-bit operations return the results of float32, rounded once, over several blocks.
func TestHalfBlocks(t *testing.T) {
	const rows, heads, dim, eps = 700, 8, 64, 1e-5 // not a multiple of halfBlock elements
	for _, dtype := range halfTypes {
		t.Run(dtype.String(), func(t *testing.T) {
			x := newTwins(t, dtype)
			a, a32 := x.draw(1, rows, heads, dim)
			b, b32 := x.draw(1, rows, heads, dim)
			y, y32 := x.draw(1, rows, heads, dim)
			z, z32 := x.draw(1, rows, heads, dim)
			w, inv, inv32 := normal(x.rng, dim), normal(x.rng, 1, rows, heads, 1), normal(x.rng, 1, rows, heads, 1)
			cos, sin := normal(x.rng, 1, rows, 1, dim/2), normal(x.rng, 1, rows, 1, dim/2)
			dw, dw32 := tensor.New(tensor.F32, dim), tensor.New(tensor.F32, dim)

			x.RMSNorm(y, inv, a, w, eps)
			x.RMSNorm(y32, inv32, a32, w, eps)
			x.equal("rmsnorm", y, y32)
			x.equal("inv", inv, inv32)
			x.RMSNormBackward(z, dw, b, a, inv, w, true)
			x.RMSNormBackward(z32, dw32, b32, a32, inv, w, true)
			x.equal("rmsnorm backward", z, z32)
			x.NormRope(y, inv, a, w, cos, sin, eps)
			x.NormRope(y32, inv32, a32, w, cos, sin, eps)
			x.equal("rope", y, y32)
			x.NormRopeBackward(y, dw, b32, a, inv, w, cos, sin)
			x.NormRopeBackward(y32, dw32, b32, a32, inv, w, cos, sin)
			x.equal("rope backward", y, y32)
			x.GLU(y, a, b, kernels.SiLU)
			x.GLU(y32, a32, b32, kernels.SiLU)
			x.equal("swiglu", y, y32)
			x.Add(a, b)
			x.Add(a32, b32)
			x.equal("sum", a, a32)
			x.Copy(a32, a)
			x.AddRMSNorm(y, inv, a, a, b, w, eps)
			x.Add(a32, b32)
			x.equal("sum of a norm", a, a32)
			x.Copy(a32, a) // the norm is of the rounded sum
			x.RMSNorm(y32, inv32, a32, w, eps)
			x.equal("norm of a sum", y, y32)
			x.GLUBackward(a, b, y, a, b, kernels.SiLU)
			x.Copy(y32, y)
			x.GLUBackward(a32, b32, y32, a32, b32, kernels.SiLU)
			x.equal("dgate", a, a32)
			x.equal("dup", b, b32)
			for i, got := range tensor.Data[float32](dw) { // each block adds a rounding error
				if want := tensor.Data[float32](dw32)[i]; !(max(got-want, want-got) <= 1e-5*max(1, want, -want)) {
					t.Errorf("dw[%d] is %g, want %g", i, got, want)
				}
			}
		})
	}
}

// TestHalfTokens checks the same of the embedding and the loss. An error names the position among all rows.
func TestHalfTokens(t *testing.T) {
	const rows, vocab, n = 700, 611, 512
	ids := tensor.New(tensor.I32, 1, rows, 1, 1)
	for i := range rows {
		tensor.Data[int32](ids)[i] = int32(i * 37 % vocab)
	}
	for _, dtype := range halfTypes {
		x := newTwins(t, dtype)
		table, table32 := x.draw(1, vocab, 1, n)
		y, y32 := x.draw(1, rows, 1, n)
		logits, logits32 := x.draw(1, rows, 1, vocab)
		grad, grad32 := tensor.New(tensor.F32, 1, vocab, 1, n), tensor.New(tensor.F32, 1, vocab, 1, n)
		loss, loss32 := tensor.New(tensor.F64, 1), tensor.New(tensor.F64, 1)
		x.EmbedBackward(grad, y, ids)
		x.EmbedBackward(grad32, y32, ids)
		x.equal("gradient of the table", grad, grad32)
		x.Embed(y, table, ids)
		x.Embed(y32, table32, ids)
		x.equal("rows", y, y32)
		x.CrossEntropy(loss, logits, ids, 0.5, 0, true)
		x.CrossEntropy(loss32, logits32, ids, 0.5, 0, true)
		x.equal("gradient of logits", logits, logits32)
		if got, want := tensor.Data[float64](loss)[0], tensor.Data[float64](loss32)[0]; got != want {
			t.Errorf("%v: loss %v, want %v", dtype, got, want)
		}
		bad := tensor.New(tensor.I32, 1, rows, 1, 1)
		tensor.Data[int32](bad)[690] = vocab
		for what, call := range map[string]func(c *Kernels){
			"embed":          func(c *Kernels) { c.Embed(y, table, bad) },
			"embed backward": func(c *Kernels) { c.EmbedBackward(grad, y, bad) },
			"cross entropy":  func(c *Kernels) { c.CrossEntropy(loss, logits, bad, 1, 0, true) },
		} {
			c := newTestCPU(t)
			call(c)
			if err := c.stream.Sync(context.Background()); err == nil ||
				!strings.Contains(err.Error(), fmt.Sprintf("%d at position 690", vocab)) {
				t.Errorf("%v, %s: error %v", dtype, what, err)
			}
		}
	}
}

// TestHalfProducts checks that 16-bit products are those of float32, rounded once, for any number of blocks in a sum.
func TestHalfProducts(t *testing.T) {
	for _, dtype := range halfTypes {
		x := newTwins(t, dtype)
		for _, s := range [][3]int{{131, 601, 195}, {64, 256, 64}, {1, 7, 3}, {5, 0, 4}} {
			m, k, n := s[0], s[1], s[2]
			in, in32 := x.draw(1, m, 1, k)
			w, w32 := x.draw(1, n, 1, k)
			out, out32 := x.draw(1, m, 1, n)
			add, add32 := x.draw(1, m, 1, n)
			dw := normal(x.rng, 1, n, 1, k)
			dw32 := tensor.New(tensor.F32, 1, n, 1, k)
			x.Copy(dw32, dw)
			x.LinearDW(dw, out, in, true)
			x.LinearDW(dw32, out32, in32, true)
			x.equal("dw", dw, dw32)
			x.Linear(out, in, w, tensor.View{})
			x.Linear(out32, in32, w32, tensor.View{})
			x.equal("y", out, out32)
			x.Linear(out, in, w, add)
			x.Linear(out32, in32, w32, add32)
			x.equal("y with a residual", out, out32)
			x.LinearDX(in, add, w, true)
			x.LinearDX(in32, add32, w32, true)
			x.equal("dx added", in, in32)
			x.LinearDX(in, add, w, false)
			x.LinearDX(in32, add32, w32, false)
			x.equal("dx", in, in32)
		}
	}
}

// TestHalfAttention checks that attention on 16 bits has the bits of float32, on any number of goroutines.
func TestHalfAttention(t *testing.T) {
	for _, dtype := range halfTypes {
		for procs := 1; procs <= 3; procs++ {
			func() {
				defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
				x := newTwins(t, dtype)
				wide, half := newProblem(300, 40), newProblem(300, 40)
				for i, v := range []*tensor.View{&half.q, &half.k, &half.v, &half.do} {
					shape := v.Shape()
					*v = tensor.New(dtype, shape[:]...)
					from := []tensor.View{wide.q, wide.k, wide.v, wide.do}[i]
					x.Copy(*v, from)
					x.Copy(from, *v)
				}
				o := tensor.New(dtype, 1, 300, 8, 40)
				pass, err := x.Forward(o, attention.Partial{O: half.acc.O, LSE: half.acc.LSE}, half.q, half.p)
				check(t, err)
				check(t, pass.Block(half.block()))
				check(t, pass.End())
				half.backward(t, x.Kernels)
				wide.forward(t, x.Kernels)
				wide.backward(t, x.Kernels)
				x.equal("o", o, wide.acc.O)
				x.equal("O", half.acc.O, wide.acc.O)
				x.equal("LSE", half.acc.LSE, wide.acc.LSE)
				x.equal("dq", half.grads.DQ, wide.grads.DQ)
				x.equal("dk", half.grads.DK, wide.grads.DK)
				x.equal("dv", half.grads.DV, wide.grads.DV)
			}()
		}
	}
}

// TestHalfFaults checks that mismatched types panic with the types in the message.
func TestHalfFaults(t *testing.T) {
	c := newTestCPU(t)
	b := func(shape ...int) tensor.View { return tensor.New(tensor.BF16, shape...) }
	h := func(shape ...int) tensor.View { return tensor.New(tensor.F16, shape...) }
	f := func(shape ...int) tensor.View { return tensor.New(tensor.F32, shape...) }
	for name, call := range map[string]func(){
		"linear":           func() { c.Linear(b(2, 5), b(2, 3), f(5, 3), tensor.View{}) },
		"linear dx":        func() { c.LinearDX(b(2, 3), h(2, 5), b(5, 3), true) },
		"linear dw":        func() { c.LinearDW(h(5, 3), b(2, 5), b(2, 3), true) },
		"rmsnorm":          func() { c.RMSNorm(b(2, 4), f(2, 1), b(2, 4), b(4), 1) },
		"add rmsnorm":      func() { c.AddRMSNorm(b(2, 4), f(2, 1), f(2, 4), b(2, 4), b(2, 4), f(4), 1) },
		"rmsnorm backward": func() { c.RMSNormBackward(b(2, 4), f(4), f(2, 4), b(2, 4), f(2, 1), f(4), false) },
		"rope": func() {
			c.NormRope(b(1, 2, 3, 4), tensor.View{}, h(1, 2, 3, 4), tensor.View{}, f(1, 2, 1, 2), f(1, 2, 1, 2), 0)
		},
		"glu":   func() { c.GLU(b(3), b(3), h(3), kernels.SiLU) },
		"embed": func() { c.Embed(b(1, 2, 1, 4), f(1, 9, 1, 4), tensor.New(tensor.I32, 1, 2, 1, 1)) },
		"cross entropy": func() {
			c.CrossEntropy(tensor.New(tensor.F64, 1), b(1, 2, 1, 4), tensor.New(tensor.I32, 1, 3, 1, 1), 1, 0, false)
		},
		"add":            func() { c.Add(b(3), h(3)) },
		"sum of squares": func() { c.SumSquares(tensor.New(tensor.F64, 1), b(3)) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				message := fmt.Sprint(recover())
				if !strings.Contains(message, name) || !strings.Contains(message, "float16") {
					t.Errorf("panic %q", message)
				}
			}()
			call()
		})
	}
}
