package cpu

import (
	"testing"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// TestRecurrentFaults checks that mismatched views panic before the operation queues work.
func TestRecurrentFaults(t *testing.T) {
	c := newTestCPU(t)
	f := func(shape ...int) tensor.View { return tensor.New(tensor.F32, shape...) }
	half := func(shape ...int) tensor.View { return tensor.New(tensor.BF16, shape...) }
	const batch, rows, n, width, heads = 2, 9, 5, 4, 3
	x, w, before, none := f(batch, rows, 1, n), f(1, n, 1, width), f(2*batch, width-1, 1, n), tensor.View{}
	segments := []partition.Range{{Lo: 0, Hi: 4}, {Lo: 4, Hi: rows}}
	backward := func(dx, dbefore, dw, dy tensor.View) func() {
		return func() { c.ConvBackward(dx, dbefore, dw, dy, x, before, w, segments) }
	}
	segment := func(lo, hi int) func() {
		return func() { c.Conv(x, x, before, w, []partition.Range{{Lo: 0, Hi: 4}, {Lo: lo, Hi: hi}}) }
	}
	a, p, v := half(batch, rows, heads, 1), f(batch, rows, heads, 1), f(heads)
	gates := func(g, beta, a, b, aLog, dt tensor.View) func() { return func() { c.Gates(g, beta, a, b, aLog, dt) } }
	back := func(da, daLog, ddt, dg tensor.View) func() {
		return func() { c.GatesBackward(da, a, daLog, ddt, dg, p, p, p, a, v, v) }
	}
	for name, call := range map[string]func(){
		"rows of y": func() { c.Conv(f(batch, rows-1, 1, n), x, before, w, segments) },
		"type of y": func() { c.Conv(half(batch, rows, 1, n), x, before, w, segments) },
		"type of w": func() { c.Conv(x, x, before, half(1, n, 1, width), segments) },
		"int32": func() {
			i32 := func(shape ...int) tensor.View { return tensor.New(tensor.I32, shape...) }
			c.Conv(i32(0, 1, 1, n), i32(0, 1, 1, n), i32(0, width-1, 1, n), i32(1, n, 1, width), nil)
		},
		"heads":         func() { x := f(batch, rows, 2, n); c.Conv(x, x, before, w, segments) },
		"columns of w":  func() { c.Conv(x, x, before, f(1, n+1, 1, width), segments) },
		"w not dense":   func() { c.Conv(x, x, before, f(1, n, 1, 2*width).Slice(tensor.Dim, 0, width), segments) },
		"width 1":       func() { c.Conv(x, x, f(2*batch, 0, 1, n), f(1, n, 1, 1), segments) },
		"width 9":       func() { c.Conv(x, x, f(2*batch, 8, 1, n), f(1, n, 1, 9), segments) },
		"rows before":   func() { c.Conv(x, x, f(2*batch, width, 1, n), w, segments) },
		"batch before":  func() { c.Conv(x, x, f(2, width-1, 1, n), w, segments) },
		"type before":   func() { c.Conv(x, x, half(2*batch, width-1, 1, n), w, segments) },
		"apart":         func() { c.Conv(x, apart(x), before, w, segments) },
		"empty segment": segment(4, 4),
		"segment after": segment(4, rows+1),
		"negative":      segment(-1, 4),
		"dx":            backward(f(batch, rows+1, 1, n), before, w, x),
		"dbefore":       backward(x, f(2, width-1, 1, n), w, x),
		"dw":            backward(x, before, f(1, n, 1, width+1), x),
		"type of dw":    backward(x, before, half(1, n, 1, width), x),
		"dy":            backward(x, before, none, f(1, rows, 1, n)),
		"g":             gates(f(rows, heads, 1), p, a, a, v, v),
		"type of beta":  gates(p, a, a, a, v, v),
		"a and b":       gates(p, p, a, half(batch, rows, heads+1, 1), v, v),
		"types of a, b": gates(p, p, a, p, v, v),
		"aLog":          gates(p, p, a, a, f(heads+1), v),
		"dt":            gates(p, p, a, a, v, f(1)),
		"type of dt":    gates(p, p, a, a, v, half(heads)),
		"da":            back(half(1, rows, heads, 1), v, v, p),
		"daLog":         back(a, f(heads+1), none, p),
		"ddt":           back(a, none, half(heads), p),
		"dg":            back(a, none, none, f(rows, heads, 1)),
	} {
		refuses(t, name, "kernels: ", call)
	}
	settle(t, c)
}

// apart returns a view of x's shape with gaps between its elements.
func apart(x tensor.View) tensor.View {
	s := x.Shape()
	return tensor.NewView(tensor.NewHost(int64(8*x.Size())), x.DType(), 0, s,
		[4]int64{int64(2 * s[1] * s[3]), int64(2 * s[3]), 0, 2})
}
