package main

import (
	"strings"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// ops emits the operations between products: each element for itself, or each row.
func ops(m machine) {
	m.addTo()
	loss(m)
	m.swiGLU()
	m.swiGLUBackward()
	norm(m)
	m.turn()
	m.adamW()
	halves(m)
}

// exported returns the name of the function that calls the one of that name.
func exported(name string) string { return strings.ToUpper(name[:1]) + name[1:] }

// elements begins a function that computes each element for itself. pointers are its parameters: n and one array
// each, which come back in registers.
func (m machine) elements(name, pointers, more string) (n reg.Register, arrays []reg.Register) {
	names := strings.Split(pointers, ", ")
	m.function(name, "n int, "+pointers+" *float32"+more, "computes n elements; see "+exported(name)+".")
	return m.argument("n"), m.arguments(names...)
}

func (m machine) addTo() {
	n, a := m.elements("addTo", "dst, a, b", "")
	m.over(n, "", 4).each(func(p piece) {
		x, y := p.load(a[1]), p.load(a[2])
		p.VADDPS(y, x, x)
		p.store(x, a[0])
	})
	m.end()
}

// sigmoid emits s(x) and, with all its digits, 1 - s(x) = s(-x). With t = e^-|x|, one is 1/(1+t) and the other t/(1+t).
type sigmoid struct {
	exponential
	sign Op
}

func (m machine) sigmoid() sigmoid { return sigmoid{m.exponential(), m.bits(1 << 31)} }

// A fraction is what sigmoids are quotients over: 1 + t as sum + rest, and 1/sum.
type fraction struct {
	t, sum, rest, over reg.VecVirtual
}

func (s sigmoid) fraction(x reg.VecVirtual) fraction {
	f := fraction{s.vec(), s.vec(), s.vec(), s.vec()}
	s.VORPS(s.sign, x, f.t)
	s.ofSmall(f.t)
	s.VADDPS(s.one, f.t, f.sum)
	s.VSUBPS(s.one, f.sum, f.rest)
	s.VSUBPS(f.rest, f.t, f.rest)
	s.VDIVPS(f.sum, s.one, f.over)
	return f
}

// quotient returns the sigmoid of x, or of -x: 1/(1+t) or t/(1+t), with one step of Newton's against what the sum, the
// reciprocal and the product were rounded by.
func (s sigmoid) quotient(x reg.VecVirtual, f fraction, negated bool) reg.VecVirtual {
	above, q := s.vec(), s.vec()
	var positive, negative reg.Register = s.one, f.t
	if negated {
		positive, negative = negative, positive
	}
	if s.wide {
		sign := s.K()
		s.VPMOVD2M(x, sign)
		s.VBLENDMPS(negative, positive, sign, above)
	} else {
		s.VBLENDVPS(x, negative, positive, above)
	}
	s.VMULPS(f.over, above, q)
	s.VFNMADD231PS(f.sum, q, above)
	s.VFNMADD231PS(f.rest, q, above)
	s.VFMADD231PS(f.over, above, q)
	return q
}

func (m machine) swiGLU() {
	n, a := m.elements("swiGLU", "y, gate, up", "")
	s := m.sigmoid()
	m.over(n, "", 1).each(func(p piece) {
		g := p.load(a[1])
		y := s.quotient(g, s.fraction(g), false)
		p.VMULPS(g, y, y)
		p.VMULPS(p.load(a[2]), y, y)
		p.store(y, a[0])
	})
	m.end()
}

// swiGLUBackward reads all of a vector before it writes, so that results may replace inputs.
func (m machine) swiGLUBackward() {
	n, a := m.elements("swiGLUBackward", "dgate, dup, dy, gate, up", "")
	s := m.sigmoid()
	m.over(n, "", 1).each(func(p piece) {
		g := p.load(a[3])
		f := s.fraction(g)
		sig, rest := s.quotient(g, f, false), s.quotient(g, f, true)
		dy, u := p.load(a[2]), p.load(a[4])
		p.VMULPS(dy, u, u)
		p.VMULPS(g, dy, dy)
		p.VMULPS(sig, dy, dy)
		p.VFMADD213PS(s.one, g, rest)
		p.VMULPS(sig, rest, rest)
		p.VMULPS(rest, u, u)
		p.store(u, a[0])
		p.store(dy, a[1])
	})
	m.end()
}

// adamW has the order of operations of torch.optim.AdamW, each rounded for itself.
func (m machine) adamW() {
	n, a := m.elements("adamW", "p, grad, m, v", ", step *float32")
	step := m.argument("step")
	c := make([]reg.VecVirtual, 8) // the fields of AdamStep
	for i := range c {
		c[i] = m.vec()
		m.VBROADCASTSS(at(step, 4*i), c[i])
	}
	factor, new1, old2, new2, keep, rate, root, eps := c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]
	m.over(n, "", 1).each(func(p piece) {
		g, m1, m2, x := p.load(a[1]), p.load(a[2]), p.load(a[3]), p.load(a[0])
		p.VMULPS(factor, g, g)
		d := p.vec()
		p.VSUBPS(m1, g, d)
		p.VMULPS(new1, d, d)
		p.VADDPS(d, m1, m1)
		p.VMULPS(g, g, g)
		p.VMULPS(new2, g, g)
		p.VMULPS(old2, m2, m2)
		p.VADDPS(g, m2, m2)
		p.store(m1, a[2])
		p.store(m2, a[3])
		p.VSQRTPS(m2, m2)
		p.VDIVPS(root, m2, m2)
		p.VADDPS(eps, m2, m2)
		p.VMULPS(rate, m1, m1)
		p.VDIVPS(m2, m1, m1)
		p.VMULPS(keep, x, x)
		p.VSUBPS(m1, x, x)
		p.store(x, a[0])
	})
	m.end()
}
