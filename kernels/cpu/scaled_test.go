package cpu

import (
	"testing"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// TestScaledFaults checks that operands that do not match panic before any work is queued.
func TestScaledFaults(t *testing.T) {
	c := newTestCPU(t)
	f := func(rows, cols int) tensor.View { return tensor.New(tensor.F32, 1, rows, 1, cols) }
	of := func(codes, factors tensor.View) kernels.Scaled { return kernels.Scaled{View: codes, Factors: factors} }
	u8 := func(rows, cols int) tensor.View { return tensor.New(tensor.U8, 1, rows, 1, cols) }
	q := func(rows, cols int) kernels.Scaled { return of(u8(rows, cols), f(rows, 1)) }
	atLeast := func(s kernels.Scaled, v tensor.View) kernels.Scaled { s.Least = v; return s }
	x, none, noAdd := f(5, 32), kernels.Scaled{}, tensor.View{}
	for name, call := range map[string]func(){
		"rows":               func() { c.Quantize(of(u8(6, 32), f(5, 1)), none, x, noAdd) },
		"cols":               func() { c.Quantize(q(5, 16), none, x, noAdd) },
		"rows of transpose":  func() { c.Quantize(none, q(16, 16), x, noAdd) },
		"padding":            func() { c.Quantize(none, q(32, 5), x, noAdd) },
		"x":                  func() { c.Quantize(q(5, 32), none, u8(5, 32), noAdd) },
		"codes":              func() { c.Quantize(of(x, f(5, 1)), none, x, noAdd) },
		"codes not dense":    func() { c.Quantize(of(u8(5, 64).Slice(tensor.Dim, 0, 32), f(5, 1)), none, x, noAdd) },
		"factors":            func() { c.Quantize(of(u8(5, 32), f(4, 1)), none, x, noAdd) },
		"type of factors":    func() { c.Quantize(of(u8(5, 32), tensor.New(tensor.F64, 5)), none, x, noAdd) },
		"factors not dense":  func() { c.Quantize(of(u8(5, 32), f(5, 2).Slice(tensor.Dim, 0, 1)), none, x, noAdd) },
		"factors of columns": func() { c.Quantize(q(5, 32), none, x, f(1, 31)) },
		"columns alone":      func() { c.Quantize(none, q(32, 16), x, f(1, 32)) },
		"least":              func() { c.Quantize(atLeast(q(5, 32), f(4, 1)), none, x, noAdd) },
		"shape of transpose": func() { c.Transpose(u8(32, 32), u8(16, 32)) },
		"unit of transpose":  func() { c.Transpose(u8(32, 8), u8(8, 32)) },
		"type of transpose":  func() { c.Transpose(f(32, 16), f(16, 32)) },
		"M":                  func() { c.ScaledLinear(x, q(4, 16), q(32, 16), noAdd) },
		"N":                  func() { c.ScaledLinear(x, q(5, 16), q(16, 16), noAdd) },
		"K":                  func() { c.ScaledLinear(x, q(5, 16), q(32, 32), noAdd) },
		"unit of N":          func() { c.ScaledLinear(f(5, 8), q(5, 16), q(8, 16), noAdd) },
		"unit of K":          func() { c.ScaledLinear(x, q(5, 8), q(32, 8), noAdd) },
		"y":                  func() { c.ScaledLinear(u8(5, 32), q(5, 16), q(32, 16), noAdd) },
		"addend":             func() { c.ScaledLinear(x, q(5, 16), q(32, 16), f(4, 32)) },
		"cols of addend":     func() { c.ScaledLinear(x, q(5, 16), q(32, 16), f(5, 16)) },
		"type of addend":     func() { c.ScaledLinear(x, q(5, 16), q(32, 16), tensor.New(tensor.BF16, 1, 5, 1, 32)) },
	} {
		refuses(t, name, "kernels: ", call)
	}

	// Five tokens with two of three experts each.
	p := dealt(c, 5, 3, 2, func() []int { return []int{2, 0} })
	settle(t, c)
	side := func(s kernels.Scaled, byToken bool) kernels.Operand {
		return kernels.Operand{View: s.View, Factors: s.Factors, ByToken: byToken}
	}
	rows := kernels.Operand{View: x, ByToken: true}
	for name, call := range map[string]func(){
		"places":             func() { c.GroupQuantize(q(5, 32), rows, f(3, 32), p) },
		"tokens":             func() { c.GroupQuantize(q(10, 32), kernels.Operand{View: x}, f(3, 32), p) },
		"factors of experts": func() { c.GroupQuantize(q(10, 32), rows, f(2, 32), p) },
		"type of factors":    func() { c.GroupQuantize(q(10, 32), rows, tensor.New(tensor.F64, 1, 3, 1, 32), p) },
		"unit of columns": func() {
			c.GroupQuantize(q(10, 8), kernels.Operand{View: f(5, 8), ByToken: true}, f(3, 8), p)
		},
		"codes":           func() { c.GroupQuantize(of(u8(10, 32), f(5, 1)), rows, f(3, 32), p) },
		"places of y":     func() { c.GroupScaledLinear(f(5, 32), side(q(5, 16), true), q(96, 16), p) },
		"places of a":     func() { c.GroupScaledLinear(f(10, 32), side(q(5, 16), false), q(96, 16), p) },
		"tokens of a":     func() { c.GroupScaledLinear(f(10, 32), side(q(10, 16), true), q(96, 16), p) },
		"factors of a":    func() { c.GroupScaledLinear(f(10, 32), kernels.Operand{View: u8(10, 16)}, q(96, 16), p) },
		"stacked":         func() { c.GroupScaledLinear(f(10, 32), side(q(10, 16), false), q(32, 16), p) },
		"stacked columns": func() { c.GroupScaledLinear(f(10, 32), side(q(10, 16), false), of(u8(96, 16), noAdd), p) },
		"depth":           func() { c.GroupScaledLinear(f(10, 32), side(q(10, 16), false), q(96, 32), p) },
		"unit of N":       func() { c.GroupScaledLinear(f(10, 8), side(q(10, 16), false), q(24, 16), p) },
		"unit of K":       func() { c.GroupScaledLinear(f(10, 32), side(q(10, 8), false), q(96, 8), p) },
		"y":               func() { c.GroupScaledLinear(u8(10, 32), side(q(10, 16), false), q(96, 16), p) },
	} {
		refuses(t, name, "kernels: ", call)
	}
	settle(t, c)
}
