package model

import (
	"hash/fnv"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// An adapter is a low-rank product beside a matrix: y = W x + scale * B A dropout(x) (arXiv:2106.09685).
type adapter struct {
	a, b weight
	name uint64  // hash of the matrix's name, for random numbers
	rate float64 // of dropout
	size float64 // scale
}

func nameHash(name string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(name)) // never fails
	return h.Sum64()
}

// adapt gives each matrix its adapter, by the name of the matrix in files. If files join several matrices, these share
// A, and each has its rows of B.
func (m *Model) adapt(adapters map[string]*adapter) {
	if len(adapters) == 0 {
		return
	}
	for _, t := range m.cfg.Tensors() {
		name, row, _ := t.Matrix()
		l := adapters[name]
		if l == nil {
			continue
		}
		part := *l
		for _, v := range []*View{&part.b.w, &part.b.g} {
			if !v.IsZero() {
				*v = v.Slice(tensor.Seq, row, row+t.Shape[0])
			}
		}
		m.at(Param{Tensor: t}).lora = &part
	}
}

// begin notes the pass in progress, for adapters. Only a pass with gradients drops elements.
func (m *Model) begin(a *tensor.Arena, b Batch, training bool) {
	m.arena, m.key, m.tokens = a, b.Key, View{}
	if training && !b.Tokens.IsZero() {
		m.tokens = rows(b.Tokens)
	}
}

// linear sets y to the product of x with a matrix and its adapter, plus add unless that is the zero View.
func (m *Model) linear(y, x View, w *weight, add View) {
	m.ops.Linear(y, x, w.w, add)
	if w.lora == nil {
		return
	}
	defer m.arena.Release(m.arena.Mark())
	m.ops.Linear(y, m.reduced(w.lora, m.dropped(w.lora, x)), w.lora.b.w, y)
}

// linearDX sets dx to the gradient of x, or adds it.
func (m *Model) linearDX(dx, dy View, w *weight, accumulate bool) {
	m.ops.LinearDX(dx, dy, w.w, accumulate)
	l := w.lora
	if l == nil {
		return
	}
	defer m.arena.Release(m.arena.Mark())
	du := m.reducedBack(l, dy)
	if m.tokens.IsZero() || l.rate == 0 {
		m.ops.LinearDX(dx, du, l.a.w, true)
		return
	}
	d := m.arena.Alloc(m.dtype, shape(dx)...)
	m.ops.LinearDX(d, du, l.a.w, false)
	m.drop(l, d, d)
	m.ops.Add(dx, d)
}

// linearDW adds to the gradients of a matrix and its adapter, unless they are frozen. The first of a fresh pass
// overwrites that of the matrix.
func (m *Model) linearDW(w *weight, dy, x View) {
	if !w.g.IsZero() {
		m.ops.LinearDW(w.g, dy, x, !w.fresh)
		w.fresh = false
	}
	l := w.lora
	if l == nil {
		return
	}
	defer m.arena.Release(m.arena.Mark())
	x = m.dropped(l, x)
	if !l.b.g.IsZero() {
		m.ops.LinearDW(l.b.g, dy, m.reduced(l, x), true)
	}
	if !l.a.g.IsZero() {
		m.ops.LinearDW(l.a.g, m.reducedBack(l, dy), x, true)
	}
}

// reduced returns scale * A x, [1, rows, 1, r].
func (m *Model) reduced(l *adapter, x View) View {
	u := m.arena.Alloc(m.dtype, 1, x.Rows(), 1, l.a.w.Rows())
	m.ops.Linear(u, x, l.a.w, View{})
	m.ops.Affine(u, u, l.size, 0)
	return u
}

// reducedBack returns the gradient of A x.
func (m *Model) reducedBack(l *adapter, dy View) View {
	du := m.arena.Alloc(m.dtype, 1, dy.Rows(), 1, l.a.w.Rows())
	m.ops.LinearDX(du, dy, l.b.w, false)
	m.ops.Affine(du, du, l.size, 0)
	return du
}

// dropped returns dropout(x), or x itself without dropout.
func (m *Model) dropped(l *adapter, x View) View {
	if m.tokens.IsZero() || l.rate == 0 {
		return x
	}
	y := m.arena.Alloc(m.dtype, shape(x)...)
	m.drop(l, y, x)
	return y
}

// drop sets y to x with the same dropped elements in each pass of a step.
func (m *Model) drop(l *adapter, y, x View) {
	tokens := m.tokens.Slice(tensor.Seq, m.row, m.row+x.Rows())
	m.ops.Dropout(y, x, tokens, kernels.Dropout{P: l.rate, Key: m.key ^ l.name})
}
