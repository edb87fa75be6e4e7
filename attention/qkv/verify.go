package qkv

import (
	"errors"
	"fmt"

	"github.com/cprun/cprun/tensor"
)

// Verify returns what is wrong with a declared layout: nil where it gives the address of every
// element of q, k and v, wherever in their memory they begin. The error names each tensor
// and axis, with the stride or offset that the layout demands and the one that was found.
func Verify(declared Layout, q, k, v tensor.View) error {
	t := Describe(q, k, v)
	return t.Verify(declared)
}

// Verify returns what is wrong with a declared layout; see the function Verify.
func (t *QKV) Verify(declared Layout) error {
	if !declared.Valid() {
		return fmt.Errorf("%v is not a known layout", declared)
	}
	c := layoutChecker{t: t, l: declared}
	n, ok := t.Dims()
	if !ok {
		return t.faults()
	}
	if why := declared.cannotHold(&n); why != "" {
		c.fault("%s; q has shape %v, k %v, v %v", why, t.Q.viewShape(), t.K.viewShape(), t.V.viewShape())
		return errors.Join(c.found...)
	}
	if got, want := t.Q.Shape[axisBatch], declared.batchQ(&n); got != want {
		c.fault("q has batch %d, the layout demands %d", got, want)
		return errors.Join(c.found...)
	}
	q, k, v := declared.spots(&n)
	c.place("q", &t.Q, &q, declared.Q)
	c.place("k", &t.K, &k, declared.KV)
	c.place("v", &t.V, &v, declared.KV)
	if len(c.found) == 0 && t.overlap(&k, &v) {
		c.fault("tensors that the layout keeps apart overlap in memory")
	}
	if fit, _ := t.fits(declared, &n); fit == Strided && len(c.found) == 0 {
		c.fault("an element lies outside its memory")
	}
	return errors.Join(c.found...)
}

type layoutChecker struct {
	t     *QKV
	l     Layout
	found []error
}

func (c *layoutChecker) fault(format string, args ...any) {
	c.found = append(c.found, fmt.Errorf("layout %v declared: "+format, append([]any{c.l}, args...)...))
}

// place checks memory, offset and strides of one of the three.
func (c *layoutChecker) place(name string, d *TensorDesc, s *spot, f Format) {
	first := [...]*TensorDesc{&c.t.Q, &c.t.K, &c.t.V}[s.buffer]
	firstName := [...]string{"q", "k", "v"}[s.buffer]
	if d.Memory != first.Memory {
		c.fault("%s lies in other memory than %s, the layout has both in one tensor", name, firstName)
	} else if got, want := d.Offset-first.Offset, s.off; got != want {
		c.fault("%s begins %d elements behind %s, the layout demands %d", name, got, firstName, want)
	}
	want := s.strides(f, d.Shape[axisBatch], d.Shape[axisSeq])
	for a, n := range d.Shape {
		if n > 1 && d.Strides[a] != want[a] {
			c.fault("%s has stride %d on axis %s, the layout demands %d", name, d.Strides[a], axisNames[a], want[a])
		}
	}
}

// faults is why no layout could hold q, k and v, copied or not.
func (t *QKV) faults() error {
	found := []error{t.mismatch()}
	for i, d := range []*TensorDesc{&t.Q, &t.K, &t.V} {
		if d.Memory != nil && d.DType != tensor.Invalid && !d.couldBeDense() {
			found = append(found, fmt.Errorf("layout of attention: %c has shape %v, more elements than its memory of %d bytes "+
				"has from element %d on, so some overlap", "qkv"[i], d.viewShape(), d.Memory.Bytes(), d.Offset))
		}
	}
	return errors.Join(found...)
}

// mismatch is why q, k and v are no inputs of one call of attention, or nil.
func (t *QKV) mismatch() error {
	var found []error
	fault := func(format string, args ...any) {
		found = append(found, fmt.Errorf("layout of attention: "+format, args...))
	}
	for i, d := range []*TensorDesc{&t.Q, &t.K, &t.V} {
		if d.Memory == nil || d.DType == tensor.Invalid {
			fault("%c is no tensor", "qkv"[i])
		}
	}
	if t.Q.DType != t.K.DType || t.K.DType != t.V.DType {
		fault("q is %v, k %v, v %v; they must be of one type", t.Q.DType, t.K.DType, t.V.DType)
	}
	q, k, v := t.Q.viewShape(), t.K.viewShape(), t.V.viewShape()
	if k[0] != v[0] || k[1] != v[1] || k[2] != v[2] {
		fault("k has shape %v, v %v; batch, seq and heads must be equal", k, v)
	}
	if q[0] != k[0] && q[0] != 1 {
		fault("q has batch %d, k %d; they must be equal, or that of q 1 where it is thd", q[0], k[0])
	}
	if q[3] != k[3] {
		fault("q has head dim %d, k %d; they must be equal", q[3], k[3])
	}
	if t.Q.Shape[axisGroup] != t.K.Shape[axisGroup] || t.K.Shape[axisHead] != 1 || t.V.Shape[axisHead] != 1 || q[2] == 0 {
		fault("q has %d heads in %d groups, k %d heads; the query heads must be a multiple of the KV heads, one group for each",
			q[2], t.Q.Shape[axisGroup], k[2])
	}
	return errors.Join(found...)
}

func (d *TensorDesc) viewShape() [4]int {
	n := d.Shape
	return [4]int{n[axisBatch], n[axisSeq], n[axisGroup] * n[axisHead], n[axisDim]}
}
