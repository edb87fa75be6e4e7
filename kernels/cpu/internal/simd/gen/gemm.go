package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// gemm emits the products of a matrix with a packed panel: one function for each layout of the left factor and each
// panel width in vectors. A micro-kernel keeps rows x vectors sums in registers. It loads each vector of the panel once
// for all rows, and broadcasts each element of the left factor once for all vectors.
func gemm(m machine) {
	for _, byRow := range []bool{true, false} {
		for vectors := 1; vectors <= 2; vectors++ {
			panel(m, byRow, vectors)
		}
	}
}

// most returns the largest number of rows of a micro-kernel. With panels of two vectors, the sums, the panel's vectors
// and the broadcast element fill the registers.
func most(m machine) int {
	if m.wide {
		return 12
	}
	return 6
}

func panel(m machine, byRow bool, vectors int) {
	form := "Cols"
	if byRow {
		form = "Rows"
	}
	m.function(fmt.Sprintf("panel%s%d", form, vectors),
		"m, k int, a *float32, lda int, b, c *float32, ldc, mode int, scale *float32")
	p := &panelCode{machine: m, byRow: byRow, vectors: vectors,
		a: m.argument("a"), lda: m.argument("lda"), c: m.argument("c")}
	m.SHLQ(U8(2), p.lda)
	for n := most(m); n > 0; n = next(n) {
		p.loop(n)
	}
	m.end()
}

// next returns the number of rows of the next smaller micro-kernel.
func next(n int) int {
	switch {
	case n > 8:
		return 8
	case n > 4:
		return 4
	}
	return n / 2
}

// panelCode is the state of emitting one function.
type panelCode struct {
	machine
	byRow   bool
	vectors int

	a, lda, c reg.Register // parameters that are read once per block stay in the caller's frame
}

// loop emits the blocks of n rows.
func (p *panelCode) loop(n int) {
	top, end := fmt.Sprintf("rows%d", n), fmt.Sprintf("end%d", n)
	p.Label(top)
	rows := p.argument("m")
	p.SUBQ(imm(n), rows)
	p.JL(LabelRef(end))
	p.Store(rows, p.Param("m"))
	p.block(n)
	p.JMP(LabelRef(top))
	p.Label(end)
}

// block emits one micro-kernel of n rows and moves on by n rows.
func (p *panelCode) block(n int) {
	acc := make([][]reg.Register, n)
	for i := range acc {
		for range p.vectors {
			v := p.vec()
			p.zero(v)
			acc[i] = append(acc[i], v)
		}
	}
	p.fetch(n)
	p.inner(n, acc)
	p.store(n, acc)
	if p.byRow {
		step := p.GP64()
		p.IMUL3Q(imm(n), p.lda, step)
		p.ADDQ(step, p.a)
	} else {
		p.ADDQ(imm(4*n), p.a)
	}
}

// fetch prefetches the cache lines of c that the block adds to, during the computation of its sums.
func (p *panelCode) fetch(n int) {
	skip := fmt.Sprintf("set%d", n)
	p.CMPQ(p.argument("mode"), imm(0))
	p.JE(LabelRef(skip))
	row, ldc := p.GP64(), p.argument("ldc")
	p.SHLQ(U8(2), ldc)
	p.MOVQ(p.c, row)
	for range n {
		for line := 0; line < p.vectors*p.bytes(); line += 64 {
			p.PREFETCHT0(at(row, line))
		}
		p.ADDQ(ldc, row)
	}
	p.Label(skip)
}

// inner emits the loop over k, four steps an iteration.
func (p *panelCode) inner(n int, acc [][]reg.Register) {
	const unroll = 4
	left := p.leftFactor(n)
	b, k := p.argument("b"), p.argument("k")
	top, tail, done := fmt.Sprintf("k%d", n), fmt.Sprintf("tail%d", n), fmt.Sprintf("done%d", n)
	p.Label(top)
	p.CMPQ(k, imm(unroll))
	p.JL(LabelRef(tail))
	for u := range unroll {
		p.step(left, u, b, acc)
	}
	left.advance(unroll)
	p.ADDQ(imm(unroll*p.vectors*p.bytes()), b)
	p.SUBQ(imm(unroll), k)
	p.JMP(LabelRef(top))
	p.Label(tail)
	p.TESTQ(k, k)
	p.JZ(LabelRef(done))
	p.step(left, 0, b, acc)
	left.advance(1)
	p.ADDQ(imm(p.vectors*p.bytes()), b)
	p.DECQ(k)
	p.JMP(LabelRef(tail))
	p.Label(done)
}

// step adds one product of a column and a row.
func (p *panelCode) step(left *leftFactor, u int, b reg.Register, acc [][]reg.Register) {
	row := make([]reg.Register, p.vectors)
	for j := range row {
		row[j] = p.vec()
		p.VMOVUPS(at(b, (u*p.vectors+j)*p.bytes()), row[j])
	}
	for i := range acc {
		x := p.vec()
		p.VBROADCASTSS(left.element(i, u), x)
		for j := range row {
			p.VFMADD231PS(row[j], x, acc[i][j])
		}
	}
}

// store writes the sums to c by mode: set, add, or scale the rows of c and add. It advances c and scale.
func (p *panelCode) store(n int, acc [][]reg.Register) {
	scaled, add, end := fmt.Sprintf("scaled%d", n), fmt.Sprintf("add%d", n), fmt.Sprintf("stored%d", n)
	mode, ldc := p.argument("mode"), p.argument("ldc")
	p.SHLQ(U8(2), ldc)
	rows := func(f func(i int)) {
		for i := range n {
			f(i)
			for j, v := range acc[i] {
				p.VMOVUPS(v, at(p.c, j*p.bytes()))
			}
			p.ADDQ(ldc, p.c)
		}
	}
	p.CMPQ(mode, imm(1))
	p.JE(LabelRef(add))
	p.JG(LabelRef(scaled))
	rows(func(int) {})
	p.JMP(LabelRef(end))
	p.Label(add)
	rows(func(i int) {
		for j, v := range acc[i] {
			p.VADDPS(at(p.c, j*p.bytes()), v, v)
		}
	})
	p.JMP(LabelRef(end))
	p.Label(scaled)
	scale := p.argument("scale")
	rows(func(i int) {
		x := p.vec()
		p.VBROADCASTSS(at(scale, 4*i), x)
		for j, v := range acc[i] {
			p.VFMADD231PS(at(p.c, j*p.bytes()), x, v)
		}
	})
	p.ADDQ(imm(4*n), scale)
	p.Store(scale, p.Param("scale"))
	p.Label(end)
}

// leftFactor addresses n rows of the left factor. By rows, row i begins at i*lda. Three rows share a pointer, since an
// address is base + index*{1, 2, 4, 8}. By columns, element i of column k is at k*lda + i.
type leftFactor struct {
	p       *panelCode
	base    []reg.Register
	threeLd reg.Register
}

func (p *panelCode) leftFactor(n int) *leftFactor {
	l := &leftFactor{p: p}
	count := 1
	if p.byRow {
		count = (n + 2) / 3
	}
	l.base = make([]reg.Register, count)
	for i := range l.base {
		l.base[i] = p.GP64()
	}
	p.MOVQ(p.a, l.base[0])
	if p.byRow {
		for i := 1; i < count; i++ {
			p.LEAQ(indexed(l.base[i-1], p.lda, 2, 0), l.base[i])
			p.ADDQ(p.lda, l.base[i])
		}
		return l
	}
	l.threeLd = p.GP64()
	p.LEAQ(indexed(p.lda, p.lda, 2, 0), l.threeLd)
	return l
}

// element returns the address of row i, u steps after the pointers.
func (l *leftFactor) element(i, u int) Mem {
	if l.p.byRow {
		if i%3 == 0 {
			return at(l.base[i/3], 4*u)
		}
		return indexed(l.base[i/3], l.p.lda, uint8(i%3), 4*u)
	}
	switch u {
	case 0:
		return at(l.base[0], 4*i)
	case 3:
		return indexed(l.base[0], l.threeLd, 1, 4*i)
	}
	return indexed(l.base[0], l.p.lda, uint8(u), 4*i)
}

// advance moves the pointers u steps on, 1 or 4.
func (l *leftFactor) advance(u int) {
	if !l.p.byRow {
		l.p.LEAQ(indexed(l.base[0], l.p.lda, uint8(u), 0), l.base[0])
		return
	}
	for _, b := range l.base {
		l.p.ADDQ(imm(4*u), b)
	}
}
