package main

import (
	"fmt"
	"math"

	"github.com/mmcloughlin/avo/attr"
	"github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// A pair is a vector of float32 as float64, in two vectors.
type pair [2]reg.VecVirtual

// half returns the register of half the width that v begins with.
func (m machine) half(v reg.VecVirtual) reg.Register {
	if m.wide {
		return v.AsY()
	}
	return v.AsX()
}

// doubles returns the float64 of v.
func (m machine) doubles(v reg.VecVirtual) pair {
	p := pair{m.vec(), m.vec()}
	upper := m.vec()
	m.upper(v, upper)
	m.VCVTPS2PD(m.half(v), p[0])
	m.VCVTPS2PD(m.half(upper), p[1])
	return p
}

// upper sets the lower half of to to the upper half of v.
func (m machine) upper(v, to reg.VecVirtual) {
	if m.wide {
		m.VEXTRACTF64X4(imm(1), v, to.AsY())
		return
	}
	m.VEXTRACTF128(imm(1), v, to.AsX())
}

// loadDoubles loads float64.
func (p piece) loadDoubles(base reg.Register) pair {
	if p.mask != nil {
		return p.doubles(p.load(base))
	}
	v, from := pair{p.vec(), p.vec()}, p.memory(base)
	p.VCVTPS2PD(from, v[0])
	p.VCVTPS2PD(from.Offset(p.bytes()/2), v[1])
	return v
}

// zeros returns n pairs of 0.
func (m machine) zeros(n int) []pair {
	ps := make([]pair, n)
	for i := range ps {
		for j := range ps[i] {
			ps[i][j] = m.vec()
			m.zero(ps[i][j])
		}
	}
	return ps
}

// sum returns the sum of all elements of ps, in the lowest element. It changes them.
func (m machine) sum(ps []pair) reg.VecVirtual {
	var vs []reg.VecVirtual
	for _, p := range ps {
		vs = append(vs, p[:]...)
	}
	for ; len(vs) > 1; vs = vs[:len(vs)/2] {
		for i := range len(vs) / 2 {
			m.VADDPD(vs[i+len(vs)/2], vs[i], vs[i])
		}
	}
	v, t := vs[0], m.vec()
	if m.wide {
		m.VEXTRACTF64X4(imm(1), v, t.AsY())
		m.VADDPD(t.AsY(), v.AsY(), v.AsY())
		m.VEXTRACTF64X2(imm(1), v.AsY(), t.AsX())
	} else {
		m.VEXTRACTF128(imm(1), v, t.AsX())
	}
	m.VADDPD(t.AsX(), v.AsX(), v.AsX())
	m.VPERMILPD(imm(1), v.AsX(), t.AsX())
	m.VADDSD(t.AsX(), v.AsX(), v.AsX())
	return v
}

// addDoubles adds x*y to the float64s of the row that begins at base.
func (p piece) addDoubles(base reg.Register, x pair, y reg.Register) {
	for i := range x {
		to := indexed(base, p.i, 8, (2*p.u+i)*p.bytes())
		v := p.vec()
		if p.mask == nil {
			p.VMOVUPD(to, v)
			p.VFMADD231PD(x[i], y, v)
			p.VMOVUPD(v, to)
			continue
		}
		if mask := p.maskDoubles(i); p.wide {
			p.VMOVUPD_Z(to, mask, v)
			p.VFMADD231PD(x[i], y, v)
			p.VMOVUPD(v, mask, to)
		} else {
			p.VMASKMOVPD(to, mask, v)
			p.VFMADD231PD(x[i], y, v)
			p.VMASKMOVPD(v, mask, to)
		}
	}
}

// maskDoubles returns the mask of a half of the elements, for float64.
func (p piece) maskDoubles(half int) reg.Register {
	if p.wide {
		mask := p.K()
		p.KSHIFTRW(U8(8*half), p.mask, mask)
		return mask
	}
	mask := p.vec()
	if half == 0 {
		p.VPMOVSXDQ(p.mask.(reg.VecVirtual).AsX(), mask)
		return mask
	}
	p.VEXTRACTI128(imm(1), p.mask, mask.AsX())
	p.VPMOVSXDQ(mask.AsX(), mask)
	return mask
}

// constant returns x in every lane: a register with AVX-512, which has 32 of them, and memory with AVX2.
func (m machine) constant(x float32) operand.Op {
	if m.wide {
		return m.register(x)
	}
	return m.memory(x)
}

// memory returns memory with x in every lane.
func (m machine) memory(x float32) operand.Mem {
	return m.words(math.Float32bits(x)) // bits, since the decimals that are printed might be others
}

// register returns a register with x in every lane.
func (m machine) register(x float32) reg.Register {
	v := m.vec()
	m.VBROADCASTSS(m.memory(x), v)
	return v
}

// words returns the integer x in every lane.
func (m machine) words(x uint32) operand.Mem {
	return m.data(fmt.Sprintf("u%08x", x), func(int) operand.Constant { return operand.U32(x) })
}

// iota returns 0, 1, 2 and so on.
func (m machine) iota() operand.Mem {
	return m.data("iota", func(i int) operand.Constant { return operand.U32(uint32(i)) })
}

// data is read-only memory of 16 words, made once for a file.
func (m machine) data(name string, at func(i int) operand.Constant) operand.Mem {
	if mem, ok := m.made[name]; ok {
		return mem
	}
	mem := m.StaticGlobal(name)
	m.DataAttributes(attr.RODATA | attr.NOPTR)
	for i := range 16 {
		m.AppendDatum(at(i))
	}
	m.made[name] = mem
	return mem
}

// address returns where a parameter of one number lies.
func (m machine) address(name string) operand.Mem {
	b, err := m.Param(name).Resolve()
	if err != nil {
		panic(err)
	}
	return b.Addr
}

// splat sets every lane of v to the low 32 bits of x.
func (m machine) splat(x, v reg.Register) {
	low := x.(reg.GP).As32()
	if m.wide {
		m.VPBROADCASTD(low, v)
		return
	}
	y := m.XMM()
	m.VMOVD(low, y)
	m.VPBROADCASTD(y, v)
}

// zeroWhere sets to 0 the lanes of v that equal x.
func (m machine) zeroWhere(v reg.Register, x operand.Op) {
	const notEqual = operand.U8(4) // true for NaN
	if m.wide {
		k := m.K()
		m.VCMPPS(notEqual, x, v, k)
		m.VMOVAPS_Z(v, k, v)
		return
	}
	mask := m.vec()
	m.VCMPPS(notEqual, x, v, mask)
	m.VANDPS(mask, v, v)
}

// storeWhereAbove stores the lanes of v where a or b is above 0.
func (m machine) storeWhereAbove(v, a, b reg.Register, to operand.Mem) {
	largest, zero := m.vec(), m.vec()
	m.VPMAXSD(a, b, largest)
	m.zero(zero)
	if m.wide {
		k := m.K()
		m.VPCMPGTD(zero, largest, k)
		m.VMOVUPS(v, k, to)
		return
	}
	mask := m.vec()
	m.VPCMPGTD(zero, largest, mask)
	m.VMASKMOVPS(v, mask, to)
}
