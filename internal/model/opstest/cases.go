package opstest

import (
	"math"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// testLinear covers one row, no rows, odd sizes, sizes beyond one tile of any kernel, and empty sums, which are 0.
func testLinear(r *rig) {
	type shape struct{ batch, seq, heads, in, out int }
	shapes := []shape{{1, 1, 1, 1, 1}, {1, 0, 1, 5, 3}, {1, 1, 1, 7, 5}, {2, 3, 1, 17, 13},
		{1, 65, 3, 11, 129}, {3, 23, 2, 65, 389}, {1, 5, 1, 515, 3}, {1, 300, 1, 33, 20},
		{1, 3, 1, 0, 4}, {1, 3, 1, 4, 0}}
	each(r, shapes, func(r *rig, s shape) {
		rows, in := s.batch*s.seq, s.heads*s.in
		x, xs := r.random(r.act, s.batch, s.seq, s.heads, s.in)
		w, ws := r.random(r.act, 1, s.out, 1, in)
		dy, dys := r.random(r.act, s.batch, s.seq, 1, s.out)
		y := r.garbage(r.act, s.batch, s.seq, 1, s.out)
		r.ops.Linear(y, x, w, View{})
		want := refLinear(xs, ws, rows, in, s.out)
		r.close("y", y, want)
		add, adds := r.random(r.act, s.batch, s.seq, 1, s.out)
		y = r.garbage(r.act, s.batch, s.seq, 1, s.out)
		r.ops.Linear(y, x, w, add)
		r.close("y with a residual", y, plus(adds, want))
		r.ops.Linear(add, x, w, add)
		r.close("y in place of the residual", add, plus(adds, want))

		wantDX, wantDW := refLinearBackward(dys, xs, ws, rows, in, s.out)
		dx := r.garbage(r.act, s.batch, s.seq, s.heads, s.in)
		r.ops.LinearDX(dx, dy, w, false)
		r.close("dx", dx, wantDX)
		dx, before := r.random(r.act, s.batch, s.seq, s.heads, s.in)
		r.ops.LinearDX(dx, dy, w, true)
		r.close("dx added", dx, plus(before, wantDX))
		dw, before := r.random(r.par, 1, s.out, 1, in)
		r.ops.LinearDW(dw, dy, x, true)
		r.close("dw added", dw, plus(before, wantDW))
		r.ops.Zero(dw)
		r.ops.LinearDW(dw, dy, x, true)
		over := r.garbage(r.par, 1, s.out, 1, in)
		r.ops.LinearDW(over, dy, x, false)
		r.equal("dw in place of NaN", over, r.read(dw))
	})
}

// testNorm covers norms of the hidden state and of heads, with w float32 and inv kept.
func testNorm(r *rig) {
	shapes := [][4]int{{1, 1, 1, 1}, {2, 0, 1, 8}, {1, 1, 1, 33}, {2, 3, 5, 7}, {1, 129, 1, 67}, {2, 150, 4, 16},
		{1, 3, 1, 2051}}
	const eps = 1e-5
	each(r, shapes, func(r *rig, s [4]int) {
		n := s[3]
		x, xs := r.random(r.act, s[0], s[1], s[2], n)
		b, bs := r.random(r.act, s[0], s[1], s[2], n)
		w, ws := r.random(r.par, 1, 1, 1, n)
		dy, dys := r.random(r.act, s[0], s[1], s[2], n)
		y, inv := r.garbage(r.act, s[0], s[1], s[2], n), r.garbage(r.par, s[0], s[1], s[2], 1)
		r.ops.RMSNorm(y, inv, x, w, eps)
		wantY, wantInv := refNorm(xs, ws, eps)
		r.close("y", y, wantY)
		r.close("inv", inv, wantInv)

		wantDX, wantDW := refNormBackward(dys, xs, ws, eps)
		dx := r.garbage(r.act, s[0], s[1], s[2], n)
		dw, before := r.random(r.par, 1, 1, 1, n)
		r.ops.RMSNormBackward(dx, dw, dy, x, inv, w, false)
		r.close("dx", dx, wantDX)
		r.close("dw", dw, plus(before, wantDW))
		dx, before = r.random(r.act, s[0], s[1], s[2], n)
		r.ops.RMSNormBackward(dx, dw, dy, x, inv, w, true)
		r.close("dx added", dx, plus(before, wantDX))
		own, _ := r.put(r.act, xs, s[0], s[1], s[2], n)
		r.ops.RMSNormBackward(own, dw, dy, own, inv, w, false)
		r.close("dx in place of x", own, wantDX)

		r.addNorm(s, x, xs, b, bs, w, ws, eps)
	})
}

// addNorm checks AddRMSNorm into a separate sum and then in place. The norm is of the rounded sum.
func (r *rig) addNorm(s [4]int, a View, as []float64, b View, bs []float64, w View, ws []float64, eps float64) {
	r.t.Helper()
	y, inv := r.garbage(r.act, s[0], s[1], s[2], s[3]), r.garbage(r.par, s[0], s[1], s[2], 1)
	own := r.garbage(r.act, s[0], s[1], s[2], s[3])
	for _, sum := range []View{own, a} {
		r.ops.AddRMSNorm(y, inv, sum, a, b, w, eps)
		r.close("sum", sum, plus(as, bs))
		wantY, wantInv := refNorm(r.read(sum), ws, eps)
		r.close("y of the sum", y, wantY)
		r.close("inv of the sum", inv, wantInv)
	}
	r.equal("b", b, bs)
}

// ropeShapes lists [batch, seq, heads, dim, pairs]: one pair, no rows, odd sizes, a head of many lanes, and heads that
// rotate in part or not at all.
var ropeShapes = [][5]int{{1, 1, 1, 2, 1}, {1, 0, 2, 4, 2}, {2, 3, 5, 6, 3}, {1, 131, 3, 66, 33}, {1, 37, 4, 128, 64},
	{2, 3, 5, 6, 2}, {1, 7, 3, 96, 32}, {1, 37, 4, 128, 48}, {1, 5, 2, 66, 0}, {1, 37, 5, 128, 0}}

// angles returns random cos and sin of some rows; zero Views for no pairs.
func (r *rig) angles(s [5]int) (cos, sin View, coss, sins []float64) {
	if s[4] > 0 {
		cos, coss = r.random(r.par, s[0], s[1], 1, s[4])
		sin, sins = r.random(r.par, s[0], s[1], 1, s[4])
	}
	return cos, sin, coss, sins
}

func testRope(r *rig) {
	each(r, ropeShapes, func(r *rig, s [5]int) {
		cos, sin, coss, sins := r.angles(s)
		x, xs := r.random(r.act, s[0], s[1], s[2], s[3])
		want := refRope(xs, coss, sins, s[0]*s[1], s[2], s[3], false)
		y := r.garbage(r.act, s[0], s[1], s[2], s[3])
		r.ops.NormRope(y, View{}, x, View{}, cos, sin, 0)
		r.close("y", y, want)
		r.ops.NormRope(x, View{}, x, View{}, cos, sin, 0)
		r.close("y in place of x", x, want)
		for _, dtype := range []tensor.DType{r.par, r.act} { // accumulators, and activations in place
			dy, dys := r.random(dtype, s[0], s[1], s[2], s[3])
			dx := dy
			if dtype != r.act {
				dx = r.garbage(r.act, s[0], s[1], s[2], s[3])
			}
			r.ops.NormRopeBackward(dx, View{}, dy, View{}, View{}, View{}, cos, sin)
			r.close("dx of "+dtype.String(), dx, refRope(dys, coss, sins, s[0]*s[1], s[2], s[3], true))
		}
	})
}

// testNormRope compares the fused norm and rotation with the two operations in sequence.
func testNormRope(r *rig) {
	const eps = 1e-5
	each(r, ropeShapes, func(r *rig, s [5]int) {
		cos, sin, coss, sins := r.angles(s)
		x, xs := r.random(r.act, s[0], s[1], s[2], s[3])
		w, ws := r.random(r.par, 1, 1, 1, s[3])
		y, inv := r.garbage(r.act, s[0], s[1], s[2], s[3]), r.garbage(r.par, s[0], s[1], s[2], 1)
		r.ops.NormRope(y, inv, x, w, cos, sin, eps)
		normed, wantInv := refNorm(xs, ws, eps)
		r.close("y", y, refRope(normed, coss, sins, s[0]*s[1], s[2], s[3], false))
		r.close("inv", inv, wantInv)
		for _, dtype := range []tensor.DType{r.par, r.act} {
			dy, dys := r.random(dtype, s[0], s[1], s[2], s[3])
			dw, before := r.random(r.par, 1, 1, 1, s[3])
			dx := dy
			if dtype != r.act {
				dx = r.garbage(r.act, s[0], s[1], s[2], s[3])
			}
			r.ops.NormRopeBackward(dx, dw, dy, x, inv, w, cos, sin)
			wantDX, wantDW := refNormBackward(refRope(dys, coss, sins, s[0]*s[1], s[2], s[3], true), xs, ws, eps)
			r.close("dx of "+dtype.String(), dx, wantDX)
			r.close("dw of "+dtype.String(), dw, plus(before, wantDW))
		}
	})
}

// testBias covers the gradient of a bias, and the copy of a bias to all rows, a view that repeats one.
func testBias(r *rig) {
	shapes := [][4]int{{1, 1, 1, 1}, {1, 0, 1, 5}, {2, 3, 1, 37}, {1, 300, 2, 65}, {1, 70, 1, 515}}
	each(r, shapes, func(r *rig, s [4]int) {
		x, xs := r.random(r.act, s[0], s[1], s[2], s[3])
		n, rows := s[2]*s[3], s[0]*s[1]
		sum, before := r.random(r.par, 1, 1, 1, n)
		want, repeated := clone(before), []float64(nil)
		for row := range rows {
			want = plus(want, xs[row*n:(row+1)*n])
			repeated = append(repeated, before...)
		}
		y := r.garbage(r.act, 1, rows, 1, n)
		bias := tensor.NewView(sum.Memory(), sum.DType(), sum.Offset(), [4]int{1, rows, 1, n}, [4]int64{0, 0, 0, 1})
		r.ops.Copy(y, bias)
		r.close("bias of every row", y, repeated)
		r.ops.SumRows(sum, x)
		r.close("sum", sum, want)
	})
}

// testRopeConvention rotates one head of dim 4 by hand: the first pair, elements 0 and 2, by 90 degrees; the second, 1
// and 3, by 0.
func testRopeConvention(r *rig) {
	x, _ := r.put(r.act, []float64{1, 2, 3, 4}, 1, 1, 1, 4)
	cos, _ := r.put(r.par, []float64{0, 1}, 1, 1, 1, 2)
	sin, _ := r.put(r.par, []float64{1, 0}, 1, 1, 1, 2)
	r.ops.NormRope(x, View{}, x, View{}, cos, sin, 0)
	r.equal("x", x, []float64{-3, 2, 1, 4})
	r.ops.NormRopeBackward(x, View{}, x, View{}, View{}, View{}, cos, sin)
	r.equal("x turned back", x, []float64{1, 2, 3, 4})
}

// testRopeTranspose rotates the unit vectors to get the matrices of the rotation and of its inverse, and compares one
// with the transpose of the other, bit for bit.
func testRopeTranspose(r *rig) {
	const dim = 6
	angles, sines, units := zeros(dim*dim/2), zeros(dim*dim/2), zeros(dim*dim)
	for row := range dim {
		units[row*dim+row] = 1
		for i, c := range []float64{0.3, -0.7, 0.95} {
			angles[row*dim/2+i], sines[row*dim/2+i] = c, 0.5*c+0.1
		}
	}
	cos, _ := r.put(r.par, angles, 1, dim, 1, dim/2)
	sin, _ := r.put(r.par, sines, 1, dim, 1, dim/2)
	forward, _ := r.put(r.act, units, 1, dim, 1, dim)
	inverse, _ := r.put(r.act, units, 1, dim, 1, dim)
	r.ops.NormRope(forward, View{}, forward, View{}, cos, sin, 0)
	r.ops.NormRopeBackward(inverse, View{}, inverse, View{}, View{}, View{}, cos, sin)
	a, b := r.read(forward), r.read(inverse)
	for i := range dim {
		for j := range dim {
			if a[i*dim+j] != b[j*dim+i] {
				r.t.Fatalf("rotation [%d, %d] is %g, inverse [%d, %d] is %g", i, j, a[i*dim+j], j, i, b[j*dim+i])
			}
		}
	}
}

func testGLU(r *rig) {
	for _, act := range []kernels.Activation{kernels.SiLU, kernels.GELU} {
		r.glu(act)
		// These gates make exponentials infinite or 0, and their cubes infinite in float32.
		gate, _ := r.put(r.act, []float64{-1000, 1000, 0, -40000, 40000}, 1, 5, 1, 1)
		one, _ := r.put(r.act, []float64{1, 1, 1, 1, 1}, 1, 5, 1, 1)
		y := r.garbage(r.act, 1, 5, 1, 1)
		r.ops.GLU(y, gate, one, act)
		values := r.read(gate)
		r.close("y of large gates", y, []float64{0, values[1], 0, 0, values[4]})
		dup := r.garbage(r.act, 1, 5, 1, 1)
		r.ops.GLUBackward(gate, dup, one, gate, one, act)
		r.close("dgate of large gates", gate, []float64{0, 1, 0.5, 0, 1})
		r.close("dup of large gates", dup, []float64{0, values[1], 0, 0, values[4]})
	}
}

// glu checks a gated activation and its gradients, in place and not.
func (r *rig) glu(act kernels.Activation) {
	shapes := [][4]int{{1, 1, 1, 1}, {1, 0, 1, 9}, {2, 3, 1, 37}, {1, 130, 1, 257}}
	each(r, shapes, func(r *rig, s [4]int) {
		gate, gates := r.random(r.act, s[0], s[1], s[2], s[3])
		up, ups := r.random(r.act, s[0], s[1], s[2], s[3])
		dy, dys := r.random(r.act, s[0], s[1], s[2], s[3])
		y := r.garbage(r.act, s[0], s[1], s[2], s[3])
		r.ops.GLU(y, gate, up, act)
		r.close("y", y, refGLU(gates, ups, act))
		wantGate, wantUp := refGLUBackward(dys, gates, ups, act)
		dgate, dup := r.garbage(r.act, s[0], s[1], s[2], s[3]), r.garbage(r.act, s[0], s[1], s[2], s[3])
		r.ops.GLUBackward(dgate, dup, dy, gate, up, act)
		r.close("dgate", dgate, wantGate)
		r.close("dup", dup, wantUp)
		r.ops.GLUBackward(gate, up, dy, gate, up, act)
		r.close("dgate in place of gate", gate, wantGate)
		r.close("dup in place of up", up, wantUp)
	})
}

// testGate covers gates of each element and of each row, in place and not, and gates with a sigmoid of 0 or 1.
func testGate(r *rig) {
	shapes := [][4]int{{1, 1, 1, 1}, {1, 0, 1, 9}, {2, 3, 5, 7}, {1, 130, 1, 257}, {1, 9, 3, 64}, {1, 3, 1, 516}}
	for _, perRow := range []bool{false, true} {
		each(r, shapes, func(r *rig, s [4]int) {
			heads, dim := s[2], s[3]
			if perRow {
				heads, dim = 1, 1
			}
			x, xs := r.random(r.act, s[0], s[1], s[2], s[3])
			dy, dys := r.random(r.act, s[0], s[1], s[2], s[3])
			_, gates := r.random(r.act, s[0], s[1], heads, dim)
			if len(gates) > 2 {
				gates[0], gates[len(gates)-1] = -20000, 20000
			}
			gate, gates := r.put(r.act, gates, s[0], s[1], heads, dim)
			wantY, wantDX, wantGate := refGate(dys, xs, gates)
			y, dx := r.garbage(r.act, s[0], s[1], s[2], s[3]), r.garbage(r.act, s[0], s[1], s[2], s[3])
			dgate := r.garbage(r.act, s[0], s[1], heads, dim)
			r.ops.Gate(y, x, gate)
			r.close("y", y, wantY)
			r.ops.GateBackward(dx, dgate, dy, x, gate)
			r.close("dx", dx, wantDX)
			r.close("dgate", dgate, wantGate)
			r.ops.GateBackward(dy, gate, dy, x, gate)
			r.close("dx in place of dy", dy, wantDX)
			r.close("dgate in place of gate", gate, wantGate)
			gate, _ = r.put(r.act, gates, s[0], s[1], heads, dim)
			r.ops.Gate(x, x, gate)
			r.close("y in place of x", x, wantY)
		})
	}
}

// testMaps covers Affine, Scale and SoftCap, in place and not.
func testMaps(r *rig) {
	shapes := [][4]int{{1, 1, 1, 1}, {1, 0, 1, 9}, {2, 3, 5, 7}, {1, 130, 1, 257}}
	each(r, shapes, func(r *rig, s [4]int) {
		for _, dtype := range []tensor.DType{r.act, r.par} {
			x, xs := r.random(dtype, s[0], s[1], s[2], s[3])
			y := r.garbage(dtype, s[0], s[1], s[2], s[3])
			want := refMap(xs, func(x float64) float64 { return 5.5*x - 1 })
			r.ops.Affine(y, x, 5.5, -1)
			r.close("y", y, want)
			r.equal("x", x, xs)
			r.ops.Affine(x, x, 5.5, -1)
			r.close("y in place of x", x, want)
			by, _ := r.put(r.par, []float64{-0.75}, 1, 1, 1, 1)
			want = refMap(r.read(x), func(x float64) float64 { return -0.75 * x })
			r.ops.Scale(y, x, by)
			r.close("scaled", y, want)
			r.ops.Scale(x, x, by)
			r.close("scaled in place", x, want)
			// Twice the limit is far from linear.
			xs = r.read(x)
			r.ops.SoftCap(x, 2.5)
			r.close("capped", x, refMap(xs, func(x float64) float64 { return 2.5 * math.Tanh(x/2.5) }))
		}
	})
	nan, inf := math.NaN(), math.Inf(1)
	x, _ := r.put(r.act, []float64{inf, -inf, nan, 10000}, 1, 1, 1, 4)
	r.ops.SoftCap(x, 30)
	r.equal("capped", x, []float64{30, -30, nan, 30})
	by, _ := r.put(r.par, []float64{nan}, 1, 1, 1, 1)
	r.ops.Scale(x, x, by)
	r.equal("scaled", x, []float64{nan, nan, nan, nan})
}

// testScaleChoices scales weights, in place and not, and multiplies them by others.
func testScaleChoices(r *rig) {
	each(r, mixes(), func(r *rig, m mix) {
		d, shape := r.deal(m), []int{1, m.tokens, m.chosen, 1}
		x, xs := r.random(r.par, shape...)
		weight, ws := r.random(r.par, shape...)
		scale, ss := r.random(r.par, 1, 1, 1, m.experts)
		choice, y, terms := r.ints(d.choice, shape...), r.garbage(r.par, shape...), r.garbage(r.par, shape...)
		want, wantTerms := zeros(len(xs)), zeros(len(xs))
		for i, e := range d.choice {
			want[i], wantTerms[i] = xs[i]*ss[e], xs[i]*ws[i]
		}
		r.ops.ScaleChoices(y, View{}, x, View{}, choice, scale)
		r.close("scaled", y, want)
		r.equal("x", x, xs)
		r.ops.ScaleChoices(x, terms, x, weight, choice, scale)
		r.close("scaled in place", x, want)
		r.close("terms", terms, wantTerms)
	})
}

func testEmbed(r *rig) {
	type shape struct{ batch, seq, vocab, hidden int }
	shapes := []shape{{1, 1, 1, 1}, {1, 0, 5, 3}, {2, 3, 7, 5}, {2, 100, 11, 131}}
	each(r, shapes, func(r *rig, s shape) {
		ids := make([]int32, s.batch*s.seq)
		for i := range ids {
			ids[i] = int32(r.rng.IntN(s.vocab))
		}
		at := r.ints(ids, s.batch, s.seq, 1, 1)
		table, tables := r.random(r.act, 1, s.vocab, 1, s.hidden)
		y := r.garbage(r.act, s.batch, s.seq, 1, s.hidden)
		r.ops.Embed(y, table, at)
		r.equal("y", y, refEmbed(tables, ids, s.hidden))
		dy, dys := r.random(r.act, s.batch, s.seq, 1, s.hidden)
		dtable, before := r.random(r.par, 1, s.vocab, 1, s.hidden)
		r.ops.EmbedBackward(dtable, dy, at)
		r.close("dtable", dtable, plus(before, refEmbedBackward(dys, ids, s.vocab, s.hidden)))
	})
}

func testAddZero(r *rig) {
	shapes := [][4]int{{1, 1, 1, 1}, {1, 0, 2, 3}, {2, 3, 5, 7}, {1, 1, 1, 70001}}
	each(r, shapes, func(r *rig, s [4]int) {
		for _, dtype := range []tensor.DType{r.act, r.par} {
			dst, dsts := r.random(dtype, s[0], s[1], s[2], s[3])
			src, srcs := r.random(dtype, s[0], s[1], s[2], s[3])
			r.ops.Add(dst, src)
			r.close("sum", dst, plus(dsts, srcs))
			bad := r.garbage(dtype, s[0], s[1], s[2], s[3])
			r.ops.Zero(dst, bad)
			r.equal("zero", dst, zeros(len(dsts)))
			r.equal("zero of NaN", bad, zeros(len(dsts)))
		}
		for _, half := range []tensor.DType{tensor.BF16, tensor.F16} {
			dst, dsts := r.random(tensor.F32, s[0], s[1], s[2], s[3])
			xs := clone(dsts)
			for i := range xs {
				xs[i] = 3 * dsts[len(xs)-1-i]
			}
			copy(xs, []float64{math.NaN(), math.Inf(1), math.Inf(-1), math.Copysign(0, -1)})
			src, srcs := r.put(half, xs, s[0], s[1], s[2], s[3])
			r.ops.Add(dst, src)
			r.equal(half.String()+" to float32", dst, sum32(dsts, srcs))
		}
	})
}

// sum32 returns sums of values of float32, rounded to it.
func sum32(a, b []float64) []float64 {
	out := make([]float64, len(a))
	for i := range a {
		out[i] = float64(float32(a[i]) + float32(b[i]))
	}
	return out
}

func testCrossEntropy(r *rig) {
	type shape struct{ batch, seq, vocab int }
	shapes := []shape{{1, 1, 1}, {1, 0, 5}, {1, 1, 17}, {2, 3, 33}, {1, 70, 1031}}
	each(r, shapes, func(r *rig, s shape) {
		targets := make([]int32, s.batch*s.seq)
		for i := range targets {
			targets[i] = int32(r.rng.IntN(s.vocab))
			if i%5 == 3 {
				targets[i] = -100
			}
		}
		at := r.ints(targets, s.batch, s.seq, 1, 1)
		logits, values := r.random(r.act, s.batch, s.seq, 1, s.vocab)
		want, grad := refCrossEntropy(values, targets, s.vocab)
		const before, scale = 2.5, 0.125
		loss, _ := r.put(tensor.F64, []float64{before}, 1, 1, 1, 1)
		r.ops.CrossEntropy(loss, logits, at, scale, 0, false)
		r.close("loss", loss, []float64{before + want})
		r.equal("logits without grad", logits, values)
		r.ops.CrossEntropy(loss, logits, at, scale, 0, true)
		r.close("loss added twice", loss, []float64{before + 2*want})
		for i := range grad {
			grad[i] *= scale
		}
		r.close("grad", logits, grad)

		const softcap = 2.5
		logits, _ = r.random(r.act, s.batch, s.seq, 1, s.vocab)
		r.ops.SoftCap(logits, softcap)
		values = r.read(logits)
		want, grad = refCrossEntropy(values, targets, s.vocab)
		for i, y := range values {
			grad[i] *= scale * (1 - y*y/softcap/softcap)
		}
		loss, _ = r.put(tensor.F64, []float64{before}, 1, 1, 1, 1)
		r.ops.CrossEntropy(loss, logits, at, scale, softcap, true)
		r.close("loss of capped logits", loss, []float64{before + want})
		r.close("grad through the soft cap", logits, grad)
	})
}

// testCrossEntropyIgnored puts NaN and infinities into rows without a target: they must not reach the loss, and their
// gradient is 0, not 0 times NaN.
func testCrossEntropyIgnored(r *rig) {
	nan, inf := math.NaN(), math.Inf(1)
	logits, _ := r.put(r.act, []float64{nan, nan, nan, 0, 0, 0, inf, -inf, nan}, 1, 3, 1, 3)
	loss, _ := r.put(tensor.F64, []float64{0}, 1, 1, 1, 1)
	at := r.ints([]int32{-1, 2, -100}, 1, 3, 1, 1)
	r.ops.CrossEntropy(loss, logits, at, 3, 0, false)
	r.close("loss", loss, []float64{math.Log(3)})
	r.ops.CrossEntropy(loss, logits, at, 3, 0, true)
	r.close("loss with grad", loss, []float64{2 * math.Log(3)})
	r.close("grad", logits, []float64{0, 0, 0, 1, 1, -2, 0, 0, 0})
	got := r.read(logits)
	for _, i := range []int{0, 1, 2, 6, 7, 8} {
		if got[i] != 0 {
			r.t.Errorf("gradient %d of a row without target is %g, want 0", i, got[i])
		}
	}
	// No row has a target: the loss keeps its bits.
	loss, _ = r.put(tensor.F64, []float64{0.1}, 1, 1, 1, 1)
	r.ops.CrossEntropy(loss, logits, r.ints([]int32{-1, -1, -1}, 1, 3, 1, 1), 3, 0, true)
	r.equal("loss without targets", loss, []float64{0.1})
}

// testCrossEntropyExtreme uses logits with exponentials that overflow or vanish, and NaN in a row with a target, which
// must reach the loss.
func testCrossEntropyExtreme(r *rig) {
	values := []float64{10000, 9984, 9984, -10000, 64, -10000, 0, 0, -30}
	targets := []int32{1, 1, 2}
	at := r.ints(targets, 1, 3, 1, 1)
	logits, values := r.put(r.act, values, 1, 3, 1, 3)
	loss, _ := r.put(tensor.F64, []float64{0}, 1, 1, 1, 1)
	want, grad := refCrossEntropy(values, targets, 3)
	r.ops.CrossEntropy(loss, logits, at, 1, 0, true)
	r.close("loss", loss, []float64{want})
	r.close("grad", logits, grad)

	logits, _ = r.put(r.act, []float64{0, math.NaN()}, 1, 1, 1, 2)
	r.ops.CrossEntropy(loss, logits, r.ints([]int32{0}, 1, 1, 1, 1), 1, 0, false)
	if got := r.read(loss)[0]; !math.IsNaN(got) {
		r.t.Errorf("loss of a NaN logit is %g", got)
	}
}

// testDropout compares the dropped elements with the definition, in place and not, and their share with P.
func testDropout(r *rig) {
	for _, c := range []struct {
		s [4]int
		p float64
	}{{[4]int{1, 0, 1, 9}, 0.5}, {[4]int{2, 3, 1, 37}, 0.3}, {[4]int{1, 130, 2, 64}, 0.1}, {[4]int{1, 5, 1, 8}, 0}} {
		d, rows := kernels.Dropout{P: c.p, Key: 1<<63 + 12345}, c.s[0]*c.s[1]
		x, xs := r.random(r.act, c.s[0], c.s[1], c.s[2], c.s[3])
		numbers := make([]int32, rows)
		for i := range numbers {
			numbers[i] = int32(i*i*i*4099 - 77)
		}
		tokens := r.ints(numbers, c.s[0], c.s[1], 1, 1)
		dropped, columns := 0, c.s[2]*c.s[3]
		for i := range xs {
			if xs[i] /= 1 - c.p; d.Random(numbers[i/columns], i%columns) < uint64(c.p*(1<<32)) {
				xs[i] = 0
				dropped++
			}
		}
		y := r.garbage(r.act, c.s[0], c.s[1], c.s[2], c.s[3])
		r.ops.Dropout(y, x, tokens, d)
		r.close("y", y, xs)
		r.ops.Dropout(x, x, tokens, d)
		r.close("y in place", x, xs)
		if n := float64(len(xs)); math.Abs(float64(dropped)-c.p*n) > 4*math.Sqrt(n) {
			r.t.Errorf("%d of %v elements were dropped with probability %v", dropped, n, c.p)
		}
	}
}
