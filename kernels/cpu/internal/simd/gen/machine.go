package main

import (
	"fmt"

	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// machine emits for one width of vectors: 8 float32 with AVX2 and FMA, 16 with AVX-512 (F, BW, DQ, VL).
type machine struct {
	*build.Context
	wide bool
	made map[string]operand.Mem // constants of the file, by name
}

// lanes returns the float32 of a vector.
func (m machine) lanes() int {
	if m.wide {
		return 16
	}
	return 8
}

// bytes of a vector.
func (m machine) bytes() int { return 4 * m.lanes() }

// suffix names the functions of this width.
func (m machine) suffix() string {
	if m.wide {
		return "AVX512"
	}
	return "AVX2"
}

// vec returns a new vector register.
func (m machine) vec() reg.VecVirtual {
	if m.wide {
		return m.ZMM()
	}
	return m.YMM()
}

// function begins a function of the given name and parameters, with a line of documentation.
func (m machine) function(name, params, doc string) {
	m.Function(name + m.suffix())
	m.Attributes(nosplit)
	m.Pragma("noescape")
	m.SignatureExpr("func(" + params + ")")
	m.Doc(fmt.Sprintf("%s%s %s", name, m.suffix(), doc))
}

// end clears the upper halves of the vectors, so that what follows is not slowed down, and returns.
func (m machine) end() {
	m.VZEROUPPER()
	m.RET()
}

// argument loads a parameter of one word.
func (m machine) argument(name string) reg.Register { return m.Load(m.Param(name), m.GP64()) }

// zero sets v to 0.
func (m machine) zero(v reg.Register) { m.VXORPS(v, v, v) }

// at returns the memory at base + disp.
func at(base reg.Register, disp int) operand.Mem { return operand.Mem{Base: base, Disp: disp} }

// indexed returns the memory at base + index*scale + disp.
func indexed(base, index reg.Register, scale uint8, disp int) operand.Mem {
	return operand.Mem{Base: base, Index: index, Scale: scale, Disp: disp}
}

// imm returns an immediate operand in the shortest form that holds it.
func imm(n int) operand.Constant {
	if n == int(int8(n)) {
		return operand.I8(n)
	}
	return operand.I32(n)
}
