package qkv

import (
	"math"

	"github.com/cprun/cprun/tensor"
)

// Fit is how well a layout describes three tensors.
type Fit uint8

const (
	// Strided: no layout gives the address of every element. A kernel that knows only
	// layouts would read wrong numbers; the tensors must be copied first.
	Strided Fit = iota
	// Inside: the layout gives every address, but a tensor begins behind the first element
	// of its allocation. Whether the rest of the allocation is another tensor or the rest of
	// this one cannot be seen, nor does the address have the alignment of an allocation, so
	// this counts as known only where the caller has declared the layout.
	Inside
	// Exact: the layout gives every address, and each tensor begins its allocation.
	Exact
)

func (f Fit) String() string { return [...]string{"strided", "inside a buffer", "exact"}[f] }

// Detect returns the layout of three views [batch, seq, heads, dim], from their memory, offsets
// and strides alone. It returns a layout only where that layout gives the address of every
// element of q, k and v; tensors that overlap, such as views repeated by a stride of 0, fit
// none. Strides of axes of length 1 address nothing and may be anything.
//
// Where several layouts give the same addresses, the first packing in the order of Layouts
// is taken, and of its formats the one whose strides agree on the axes of length 1 too, or
// the first one. So thd, which at batch 1 is the same memory as bshd, is found by DetectAs.
func Detect(q, k, v tensor.View) (Layout, Fit) {
	t := Describe(q, k, v)
	return t.Detect()
}

// Detect returns the layout of t; see the function Detect.
func (t *QKV) Detect() (Layout, Fit) {
	return t.detect(func(Layout) bool { return true })
}

// DetectAs detects like Detect, among the layouts of these formats, for a caller that knows them: one
// that packs documents asks for thd.
func (t *QKV) DetectAs(q, kv Format) (Layout, Fit) {
	return t.detect(func(l Layout) bool { return l.Q == q && l.KV == kv })
}

// Layouts lists every layout that gives the address of every element, the preferred packing
// first. More than one fits where axes of length 1, or equal numbers of heads, make names
// differ that mean the same addresses.
func (t *QKV) Layouts() []Layout {
	var fits []Layout
	n, ok := t.Dims()
	if !ok {
		return nil
	}
	for i := range layouts {
		if fit, _ := t.fits(layouts[i].Layout, &n); fit != Strided {
			fits = append(fits, layouts[i].Layout)
		}
	}
	return fits
}

func (t *QKV) detect(asked func(Layout) bool) (Layout, Fit) {
	n, ok := t.Dims()
	if !ok {
		return Layout{}, Strided
	}
	best, bestFit := Layout{}, Strided
	for i := range layouts {
		l := layouts[i].Layout
		if bestFit != Strided && (l.Packing != best.Packing || l.Q != l.KV) {
			break
		}
		if !asked(l) {
			continue
		}
		fit, alike := t.fits(l, &n)
		if fit != Strided && alike {
			return l, fit
		}
		if fit != Strided && bestFit == Strided {
			best, bestFit = l, fit
		}
	}
	return best, bestFit
}

// Dims returns the lengths of t, and whether they are those of one call of attention whose
// tensors could lie in their memories without overlap. A tensor with more elements than its
// memory, which only strides of 0 make possible, is refused here, so that no product of
// lengths overflows later.
func (t *QKV) Dims() (n LayoutDims, ok bool) {
	q, k, v := &t.Q.Shape, &t.K.Shape, &t.V.Shape
	n = LayoutDims{
		Batch: k[axisBatch], SeqQ: q[axisSeq], SeqKV: k[axisSeq],
		Heads: q[axisGroup] * q[axisHead], KVHeads: k[axisGroup], HeadDim: q[axisDim], HeadDimV: v[axisDim],
	}
	ok = q[axisGroup] == k[axisGroup] && k[axisGroup] == v[axisGroup] && k[axisHead] == 1 && v[axisHead] == 1 &&
		k[axisBatch] == v[axisBatch] && k[axisSeq] == v[axisSeq] && q[axisDim] == k[axisDim] &&
		t.Q.DType == t.K.DType && t.K.DType == t.V.DType && t.Q.DType != tensor.Invalid &&
		t.Q.couldBeDense() && t.K.couldBeDense() && t.V.couldBeDense()
	return n, ok
}

// couldBeDense reports whether the memory has room for that many elements.
func (d *TensorDesc) couldBeDense() bool {
	if d.Memory == nil || d.Offset < 0 {
		return false
	}
	empty := false
	for _, m := range d.Shape {
		if m < 0 {
			return false
		}
		empty = empty || m == 0
	}
	if empty {
		return true
	}
	n, room := int64(1), min(d.Memory.Bytes()/int64(d.DType.Size()), math.MaxInt64>>4)-d.Offset
	for _, m := range d.Shape {
		if int64(m) > room/n {
			return false
		}
		n *= int64(m)
	}
	return true
}

func (d *TensorDesc) size() int64 {
	n := int64(1)
	for _, m := range d.Shape {
		n *= int64(m)
	}
	return n
}

// fits reports how well l describes t, whose lengths are n, and whether the strides agree on
// axes of length 1 too.
func (t *QKV) fits(l Layout, n *LayoutDims) (fit Fit, alike bool) {
	if l.cannotHold(n) != "" || t.Q.Shape[axisBatch] != l.batchQ(n) {
		return Strided, false
	}
	q, k, v := l.spots(n)
	if !t.together(l.Packing) || !t.relative(&q, &k, &v) || t.overlap(&k, &v) {
		return Strided, false
	}
	okQ, alikeQ := t.Q.strided(&q, l.Q)
	okK, alikeK := t.K.strided(&k, l.KV)
	okV, alikeV := t.V.strided(&v, l.KV)
	if !okQ || !okK || !okV || !t.Q.inBounds() || !t.K.inBounds() || !t.V.inBounds() {
		return Strided, false
	}
	alike = alikeQ && alikeK && alikeV
	if t.Q.Offset != q.off || t.K.Offset != k.off || t.V.Offset != v.off {
		return Inside, alike
	}
	return Exact, alike
}

// together reports whether what the packing puts in one tensor lies in one memory.
func (t *QKV) together(p Packing) bool {
	return p == Separate || t.K.Memory == t.V.Memory && (!p.oneTensor() || t.Q.Memory == t.K.Memory)
}

// relative reports whether the offsets within each tensor of the layout are right. The first
// of q, k and v in a tensor begins it.
func (t *QKV) relative(q, k, v *spot) bool {
	start := [3]int64{t.Q.Offset, t.K.Offset, t.V.Offset} // of each tensor in memory
	return t.Q.Offset == start[q.buffer]+q.off && t.K.Offset == start[k.buffer]+k.off && t.V.Offset == start[v.buffer]+v.off
}

// strided reports whether the strides are those of the spot on all axes that address
// something, and whether they are alike on the others too.
func (d *TensorDesc) strided(s *spot, f Format) (ok, alike bool) {
	want := s.strides(f, d.Shape[axisBatch], d.Shape[axisSeq])
	if want == d.Strides {
		return true, true
	}
	for a, n := range d.Shape {
		if n > 1 && d.Strides[a] != want[a] {
			return false, false
		}
	}
	return true, false
}

// inBounds reports whether every element is in the memory. A View always is; a description
// that somebody wrote need not be.
func (d *TensorDesc) inBounds() bool {
	last := d.Offset
	for a, n := range d.Shape {
		if n == 0 {
			return true
		}
		if n > 1 {
			last += int64(n-1) * d.Strides[a]
		}
	}
	return last < d.Memory.Bytes()/int64(d.DType.Size())
}

// region is the elements that one tensor of a layout takes.
type region struct {
	Base
	n int64
}

// overlap reports whether the tensors of the layout share elements.
func (t *QKV) overlap(k, v *spot) bool {
	at := [3]region{{t.Q.base(), t.Q.size()}, {t.K.base(), 0}, {t.V.base(), 0}}
	at[k.buffer].n += t.K.size()
	at[v.buffer].n += t.V.size()
	size := int64(t.Q.DType.Size())
	return at[0].meets(&at[1], size) || at[0].meets(&at[2], size) || at[1].meets(&at[2], size)
}

// meets compares addresses where there are any, because two allocations of their owners'
// making may be windows onto the same bytes.
func (r *region) meets(o *region, size int64) bool {
	if r.n == 0 || o.n == 0 {
		return false
	}
	if r.Memory == o.Memory {
		return r.Offset < o.Offset+o.n && o.Offset < r.Offset+r.n
	}
	a, b := uintptr(r.Memory.Ptr()), uintptr(o.Memory.Ptr())
	if a == 0 || b == 0 || r.Memory.Device() != o.Memory.Device() {
		return false
	}
	a += uintptr(r.Offset * size)
	b += uintptr(o.Offset * size)
	return a < b+uintptr(o.n*size) && b < a+uintptr(r.n*size)
}
