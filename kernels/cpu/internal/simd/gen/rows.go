package main

import (
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// rows emits what attention does with a row of a head: whole vectors of it, while a caller does the rest.
func rows(m machine) {
	scaled(m)
	dot(m)
}

// vectors emits a loop over n vectors, with the position in bytes.
func (m machine) vectors(f func(x reg.Register)) {
	x, n := m.GP64(), m.argument("n")
	m.XORQ(x, x)
	m.Label("vectors")
	f(x)
	m.ADDQ(imm(m.bytes()), x)
	m.DECQ(n)
	m.JNZ(LabelRef("vectors"))
}

func scaled(m machine) {
	m.function("scaled", "dst, src *float32, n int, x float32", "sets n vectors of dst to src times x; see Scaled.")
	dst, src, factor := m.argument("dst"), m.argument("src"), m.vec()
	m.VBROADCASTSS(m.address("x"), factor)
	m.vectors(func(x reg.Register) {
		v := m.vec()
		m.VMULPS(indexed(src, x, 1, 0), factor, v)
		m.VMOVUPS(v, indexed(dst, x, 1, 0))
	})
	m.end()
}

func dot(m machine) {
	m.function("dot", "a, b *float32, n int, sums *float64", "adds up the products of n vectors by lane; see Dot.")
	a, b := m.argument("a"), m.argument("b")
	var sum [2]reg.Register
	for i := range sum {
		sum[i] = m.vec()
		m.zero(sum[i])
	}
	m.vectors(func(x reg.Register) {
		for i := range sum {
			p, q := m.vec(), m.vec()
			m.VCVTPS2PD(indexed(a, x, 1, i*m.bytes()/2), p)
			m.VCVTPS2PD(indexed(b, x, 1, i*m.bytes()/2), q)
			m.VFMADD231PD(p, q, sum[i])
		}
	})
	m.VADDPD(sum[1], sum[0], sum[0])
	m.VMOVUPD(sum[0], at(m.argument("sums"), 0))
	m.end()
}
