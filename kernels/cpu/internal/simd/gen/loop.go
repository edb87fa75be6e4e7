package main

import (
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// A loop emits code that visits n elements of one or more rows, a vector at a time.
type loop struct {
	machine
	name   string // prefix of its labels, unique in the function
	n      reg.Register
	unroll int // vectors in one iteration
}

// A piece is the loop's current vector: a full one, or the last one under a mask.
type piece struct {
	loop
	i    reg.Register // index of the iteration's first element
	u    int          // number of the vector in the iteration
	mask reg.Register // of the existing elements; nil: all
}

// each emits body for all elements: full vectors, then the rest under a mask. Both use the same arithmetic, so a result
// does not depend on an element's position.
func (l loop) each(body func(p piece)) {
	i, left := l.start()
	if l.unroll > 1 {
		l.turns("turns", i, left, l.unroll, body)
	}
	l.turns("turn", i, left, 1, body)
	done := l.name + "done"
	l.TESTQ(left, left)
	l.JZ(LabelRef(done))
	body(piece{l, i, 0, l.maskOf(left)})
	l.Label(done)
}

// whole does what each does, for a count that is a multiple of the lanes.
func (l loop) whole(body func(p piece)) {
	i, left := l.start()
	l.turns("turn", i, left, 1, body)
}

// start emits the initialisation: index 0 and the remaining count.
func (l loop) start() (i, left reg.Register) {
	i, left = l.GP64(), l.GP64()
	l.XORQ(i, i)
	l.MOVQ(l.n, left)
	return i, left
}

// turns emits iterations of count vectors, while that many remain.
func (l loop) turns(kind string, i, left reg.Register, count int, body func(p piece)) {
	top, end := l.name+kind, l.name+kind+"end"
	l.SUBQ(imm(count*l.lanes()), left)
	l.JL(LabelRef(end))
	l.Label(top)
	for u := range count {
		body(piece{l, i, u, nil})
	}
	l.ADDQ(imm(count*l.lanes()), i)
	l.SUBQ(imm(count*l.lanes()), left)
	l.JGE(LabelRef(top))
	l.Label(end)
	l.ADDQ(imm(count*l.lanes()), left)
}

// eachRow emits a loop over count rows. body must advance its pointers.
func (m machine) eachRow(count reg.Register, body func()) {
	m.Label("rows")
	m.SUBQ(imm(1), count)
	m.JL(LabelRef("end"))
	body()
	m.JMP(LabelRef("rows"))
	m.Label("end")
}

// maskOf returns a mask of the first left elements of a vector.
func (m machine) maskOf(left reg.Register) reg.Register {
	count, index := m.vec(), m.vec()
	m.splat(left, count)
	m.VMOVUPS(m.iota(), index)
	mask := reg.Register(index)
	if m.wide {
		mask = m.K()
	}
	m.VPCMPGTD(index, count, mask)
	return mask
}

// memory returns the address of p's elements in the row that begins at base.
func (p piece) memory(base reg.Register) Mem { return indexed(base, p.i, 4, p.u*p.bytes()) }

// load loads elements of a row, 0 beyond its end.
func (p piece) load(base reg.Register) reg.VecVirtual {
	v, from := p.vec(), p.memory(base)
	switch {
	case p.mask == nil:
		p.VMOVUPS(from, v)
	case p.wide:
		p.VMOVUPS_Z(from, p.mask, v)
	default:
		p.VMASKMOVPS(from, p.mask, v)
	}
	return v
}

// store writes elements of a row.
func (p piece) store(v, base reg.Register) {
	to := p.memory(base)
	switch {
	case p.mask == nil:
		p.VMOVUPS(v, to)
	case p.wide:
		p.VMOVUPS(v, p.mask, to)
	default:
		p.VMASKMOVPS(v, p.mask, to)
	}
}

// orElse sets the masked-out elements of v to other.
func (p piece) orElse(v, other reg.Register) {
	switch {
	case p.mask == nil:
	case p.wide:
		p.VBLENDMPS(v, other, p.mask, v)
	default:
		p.VBLENDVPS(p.mask, v, other, v)
	}
}

// bits returns the integer x in every lane: a register with AVX-512 and memory with AVX2.
func (m machine) bits(x uint32) Op {
	if !m.wide {
		return m.words(x)
	}
	v := m.vec()
	m.VBROADCASTSS(m.words(x), v)
	return v
}

// broadcast returns a parameter of type float32 in all elements of a vector.
func (m machine) broadcast(param string) reg.VecVirtual {
	v := m.vec()
	m.VBROADCASTSS(m.address(param), v)
	return v
}

// result returns the memory of a scalar result.
func (m machine) result(name string) Mem {
	b, err := m.Return(name).Resolve()
	if err != nil {
		panic(err)
	}
	return b.Addr
}

// arguments loads parameters of one word.
func (m machine) arguments(names ...string) []reg.Register {
	rs := make([]reg.Register, len(names))
	for i, name := range names {
		rs[i] = m.argument(name)
	}
	return rs
}

// over returns a loop over n elements, unroll vectors an iteration.
func (m machine) over(n reg.Register, name string, unroll int) loop { return loop{m, name, n, unroll} }
