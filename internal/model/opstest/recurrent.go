package opstest

import (
	"math"
	"slices"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// refConv returns silu of the convolution of r with w [n, width]. r has rows of n columns, the first width-1 of them
// before the result's.
func refConv(r, w []float64, n, width int) []float64 {
	return refMap(refConvSums(r, w, n, width), func(x float64) float64 { return x / (1 + math.Exp(-x)) })
}

func refConvSums(r, w []float64, n, width int) []float64 {
	y := zeros(len(r) - (width-1)*n)
	for i := range y {
		for j := range width {
			y[i] += w[i%n*width+j] * r[i+j*n]
		}
	}
	return y
}

// refConvBackward returns the gradients of r and w given the gradient of the result.
func refConvBackward(dy, r, w []float64, n, width int) (dr, dw []float64) {
	dr, dw = zeros(len(r)), zeros(len(w))
	for i, x := range refConvSums(r, w, n, width) {
		s := 1 / (1 + math.Exp(-x))
		d := dy[i] * (s + x*s*(1-s))
		for j := range width {
			dr[i+j*n] += d * w[i%n*width+j]
			dw[i%n*width+j] += d * r[i+j*n]
		}
	}
	return dr, dw
}

// refGates returns the values of Gates.
func refGates(a, b, aLog, dt []float64) (g, beta []float64) {
	for i, x := range a {
		h := i % len(dt)
		g = append(g, -math.Exp(aLog[h])*(max(x+dt[h], 0)+math.Log1p(math.Exp(-math.Abs(x+dt[h])))))
		beta = append(beta, 1/(1+math.Exp(-b[i])))
	}
	return g, beta
}

// refGatesBackward returns the gradients of a, b, aLog and dt.
func refGatesBackward(dg, dbeta, a, b, aLog, dt []float64) (da, db, daLog, ddt []float64) {
	daLog, ddt = zeros(len(dt)), zeros(len(dt))
	g, beta := refGates(a, b, aLog, dt)
	for i, x := range a {
		h := i % len(dt)
		da = append(da, dg[i]*-math.Exp(aLog[h])/(1+math.Exp(-x-dt[h])))
		db = append(db, dbeta[i]*beta[i]*(1-beta[i]))
		ddt[h] += da[i]
		daLog[h] += dg[i] * g[i]
	}
	return da, db, daLog, ddt
}

// A convCase is a convolution of n columns over segments of some lengths. The rows have gap more columns, and the
// views begin at column from.
type convCase struct {
	batch, n, width int
	lengths         []int
	from, gap       int
}

func convCases() []convCase {
	return []convCase{{1, 1, 4, []int{1}, 0, 0}, {2, 16, 4, []int{1, 2, 3, 5, 100}, 0, 0}, {1, 200, 4, []int{70}, 8, 16},
		{2, 40, 4, []int{3, 37}, 3, 5}, {1, 131, 2, []int{5, 1, 33}, 0, 1}, {1, 8, 3, []int{2, 31}, 0, 0},
		{2, 33, 8, []int{3, 66, 1}, 0, 0}, {1, 4, 4, slices.Repeat([]int{1, 4}, 70), 0, 0}, {3, 0, 4, []int{2}, 0, 0}}
}

// A strip is columns of wider rows of a device, and all elements of these rows.
type strip struct {
	view, all View
	values    []float64 // of all
	c         convCase
}

// strip returns rows of the columns of a case. Values outside are NaN.
func (r *rig) strip(c convCase, batch, rows int, value func() float64) strip {
	wide := c.n + c.gap
	xs := zeros(batch * rows * wide)
	for i := range xs {
		if xs[i] = math.NaN(); i%wide >= c.from && i%wide < c.from+c.n {
			xs[i] = value()
		}
	}
	all, values := r.put(r.act, xs, batch, rows, 1, wide)
	return strip{all.Slice(tensor.Dim, c.from, c.from+c.n), all, values, c}
}

// rows calls f with each row's elements in values: those of sample b in [lo, hi).
func (s strip) rows(values []float64, b, lo, hi int, f func(row []float64)) {
	wide := s.c.n + s.c.gap
	for t := lo; t < hi; t++ {
		f(values[(b*s.all.Len(tensor.Seq)+t)*wide+s.c.from:][:s.c.n])
	}
}

// take returns these rows without gaps, after those of head.
func (s strip) take(head []float64, b, lo, hi int) []float64 {
	s.rows(s.values, b, lo, hi, func(row []float64) { head = append(head, row...) })
	return head
}

// expect sets these rows of the expected values to xs.
func (s strip) expect(xs []float64, b, lo, hi int) {
	s.rows(s.values, b, lo, hi, func(row []float64) { xs = xs[copy(row, xs):] })
}

// conv runs Conv and ConvBackward and compares all elements of the results, also the unchanged ones.
func (r *rig) conv(c convCase, change func(x, before, dy []float64)) {
	r.t.Helper()
	var segments []partition.Range
	rows := 1 // the first and the last belong to no segment
	for _, n := range c.lengths {
		segments = append(segments, partition.Range{Lo: rows, Hi: rows + n})
		rows += n
	}
	rows++
	nan := func() float64 { return math.NaN() }
	tail, heads := c.width-1, len(segments)*c.batch
	x, before, dy := r.strip(c, c.batch, rows, r.rng.NormFloat64), r.strip(c, heads, tail, r.rng.NormFloat64),
		r.strip(c, c.batch, rows, r.rng.NormFloat64)
	if change != nil {
		change(x.values, before.values, dy.values)
		for _, s := range []strip{x, before, dy} {
			v, _ := r.put(r.act, s.values, s.all.Len(tensor.Batch), s.all.Len(tensor.Seq), 1, c.n+c.gap)
			r.ops.Copy(s.all, v)
		}
	}
	y, dx, dbefore := r.strip(c, c.batch, rows, nan), r.strip(c, c.batch, rows, nan), r.strip(c, heads, tail, nan)
	w, ws := r.put(r.par, refMap(zeros(c.n*c.width), func(float64) float64 { return 0.1 + math.Abs(r.rng.NormFloat64()) }),
		1, c.n, 1, c.width)
	dw, wantDW := r.random(r.par, 1, c.n, 1, c.width)
	for i, s := range segments {
		for b := range c.batch {
			all := x.take(before.take(nil, i*c.batch+b, 0, tail), b, s.Lo, s.Hi)
			y.expect(refConv(all, ws, c.n, c.width), b, s.Lo, s.Hi)
			dr, more := refConvBackward(dy.take(nil, b, s.Lo, s.Hi), all, ws, c.n, c.width)
			dbefore.expect(dr, i*c.batch+b, 0, tail)
			dx.expect(dr[tail*c.n:], b, s.Lo, s.Hi)
			wantDW = plus(wantDW, more)
		}
	}
	list := slices.Clone(segments)
	r.ops.Conv(y.view, x.view, before.view, w, list)
	clear(list) // a caller may reuse it at once
	r.same("y", y.all, y.values)
	r.ops.ConvBackward(dx.view, dbefore.view, dw, dy.view, x.view, before.view, w, segments)
	r.same("dx", dx.all, dx.values)
	r.same("dbefore", dbefore.all, dbefore.values)
	r.same("dw", dw, wantDW)
	bits := r.read(dx.all)
	r.ops.Copy(dx.view, y.view)
	r.ops.ConvBackward(dx.view, dbefore.view, View{}, dy.view, x.view, before.view, w, segments)
	r.equal("dx with a frozen weight", dx.all, bits)
}

func testConv(r *rig) {
	each(r, convCases(), func(r *rig, c convCase) { r.conv(c, nil) })
}

// testConvNaN puts NaN and infinities beside the ends of segments.
func testConvNaN(r *rig) {
	for _, n := range []int{8, 3} {
		c := convCase{batch: 1, n: n, width: 4, lengths: []int{4, 6, 2, 1}}
		r.conv(c, func(x, before, dy []float64) {
			x[4*n] = math.NaN()      // the last row of the first segment
			x[5*n+1] = math.NaN()    // the first row of the second
			before[3*n] = math.NaN() // of the second segment, whose next rows are finite
			dy[5*n+2], dy[10*n+2] = math.NaN(), math.Inf(1)
		})
		r.conv(c, func(x, before, dy []float64) { before[len(before)-1] = math.NaN() })
	}
	c := convCase{batch: 1, n: 8, width: 4, lengths: []int{4, 6}}
	x := r.strip(c, 1, 10, r.rng.NormFloat64)
	x.values[3*8] = math.Inf(1)
	x.view, _ = r.put(r.act, x.values, 1, 10, 1, 8)
	before := r.strip(c, 2, 3, func() float64 { return 0 })
	w, ws := r.put(r.par, slices.Repeat([]float64{0.5, 1, 2, 0.25}, 8), 1, 8, 1, 4)
	y := r.garbage(r.act, 1, 10, 1, 8)
	segments := []partition.Range{{Lo: 0, Hi: 4}, {Lo: 4, Hi: 10}}
	r.ops.Conv(y, x.view, before.view, w, segments)
	r.same("y of an infinity", y, append(refConv(append(zeros(24), x.values[:32]...), ws, 8, 4),
		refConv(append(zeros(24), x.values[32:]...), ws, 8, 4)...))
}

func testGates(r *rig) {
	each(r, [][3]int{{1, 1, 1}, {1, 0, 3}, {2, 3, 16}, {1, 301, 48}}, func(r *rig, s [3]int) {
		a, as := r.random(r.act, s[0], s[1], s[2], 1)
		b, bs := r.random(r.act, s[0], s[1], s[2], 1)
		aLog, logs := r.random(r.par, 1, 1, 1, s[2])
		dt, dts := r.random(r.par, 1, 1, 1, s[2])
		g, beta := r.garbage(r.par, s[0], s[1], s[2], 1), r.garbage(r.par, s[0], s[1], s[2], 1)
		r.ops.Gates(g, beta, a, b, aLog, dt)
		wantG, wantBeta := refGates(as, bs, logs, dts)
		r.close("g", g, wantG)
		r.close("beta", beta, wantBeta)

		dg, dgs := r.random(r.par, s[0], s[1], s[2], 1)
		dbeta, dbetas := r.random(r.par, s[0], s[1], s[2], 1)
		da, db := r.garbage(r.act, s[0], s[1], s[2], 1), r.garbage(r.act, s[0], s[1], s[2], 1)
		daLog, logsBefore := r.random(r.par, 1, 1, 1, s[2])
		ddt, dtsBefore := r.random(r.par, 1, 1, 1, s[2])
		wantA, wantB, wantLog, wantDT := refGatesBackward(dgs, dbetas, as, bs, logs, dts)
		for _, frozen := range []int{0, 1, 2} {
			toLog, toDT := daLog, ddt
			if frozen == 1 {
				toLog = View{}
			} else {
				logsBefore = plus(logsBefore, wantLog)
			}
			if frozen == 2 {
				toDT = View{}
			} else {
				dtsBefore = plus(dtsBefore, wantDT)
			}
			r.ops.GatesBackward(da, db, toLog, toDT, dg, dbeta, g, beta, a, aLog, dt)
			r.close("da", da, wantA)
			r.close("db", db, wantB)
			r.close("daLog", daLog, logsBefore)
			r.close("ddt", ddt, dtsBefore)
		}
	})
	// Sums that make exponentials infinite or 0, and the decay so large that its exponential is 0.
	nan := math.NaN()
	a, as := r.put(r.act, []float64{1000, -1000, 30000, -30000, 100, nan}, 1, 1, 6, 1)
	zero, _ := r.put(r.par, zeros(6), 1, 1, 1, 6)
	one, _ := r.put(r.par, []float64{1, 1, 1, 1, 1, 1}, 1, 1, 6, 1)
	g, beta := r.garbage(r.par, 1, 1, 6, 1), r.garbage(r.par, 1, 1, 6, 1)
	r.ops.Gates(g, beta, a, a, zero, zero)
	for i, want := range []float64{-as[0], 0, -as[2], 0, -100, nan} {
		if got := r.read(g)[i]; !(math.Abs(got-want) <= 1e-6*math.Abs(want)) && !(math.IsNaN(got) && math.IsNaN(want)) {
			r.t.Errorf("g of %g is %g, want %g", as[i], got, want)
		}
	}
	r.same("beta", beta, []float64{1, 0, 1, 0, 1, nan})
	da, db := r.garbage(r.act, 1, 1, 6, 1), r.garbage(r.act, 1, 1, 6, 1)
	r.ops.GatesBackward(da, db, View{}, View{}, one, one, g, beta, a, zero, zero)
	r.same("da", da, []float64{-1, 0, -1, 0, -1, nan})
	r.same("db", db, []float64{0, 0, 0, 0, 0, nan})
}

// recurrentResults runs the operations on fixed inputs that are large enough to be split.
func (r *rig) recurrentResults() []View {
	const seq, n, width, heads = 333, 200, 4, 48
	random := func(dtype tensor.DType, shape ...int) View { v, _ := r.random(dtype, shape...); return v }
	segments := []partition.Range{{Lo: 0, Hi: 200}, {Lo: 200, Hi: seq}}
	x, y, dx := random(r.act, 1, seq, 1, n), random(r.act, 1, seq, 1, n), random(r.act, 1, seq, 1, n)
	before, dbefore := random(r.act, 2, width-1, 1, n), random(r.act, 2, width-1, 1, n)
	w, dw := random(r.par, 1, n, 1, width), random(r.par, 1, n, 1, width)
	r.ops.Conv(y, x, before, w, segments)
	r.ops.ConvBackward(dx, dbefore, dw, y, x, before, w, segments)

	a, b, da, db := random(r.act, 1, seq, heads, 1), random(r.act, 1, seq, heads, 1), random(r.act, 1, seq, heads, 1),
		random(r.act, 1, seq, heads, 1)
	g, beta := random(r.par, 1, seq, heads, 1), random(r.par, 1, seq, heads, 1)
	aLog, dt := random(r.par, 1, 1, 1, heads), random(r.par, 1, 1, 1, heads)
	daLog, ddt := random(r.par, 1, 1, 1, heads), random(r.par, 1, 1, 1, heads)
	r.ops.Gates(g, beta, a, b, aLog, dt)
	r.ops.GatesBackward(da, db, daLog, ddt, g, beta, g, beta, a, aLog, dt)
	return []View{y, dx, dbefore, dw, g, beta, da, db, daLog, ddt}
}
