package main

import (
	"fmt"
	"math"

	"github.com/mmcloughlin/avo/attr"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// constant is x in every lane: a register with AVX-512, which has 32 of them, and memory with AVX2.
func (m machine) constant(x float32) operand.Op {
	if m.wide {
		return m.register(x)
	}
	return m.memory(x)
}

// memory is memory with x in every lane.
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

// iota is 0, 1, 2 and so on.
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
