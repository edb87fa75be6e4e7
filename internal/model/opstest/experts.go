package opstest

import (
	"math"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// A mix is a number of tokens with some experts each. one: all tokens choose the same experts.
type mix struct {
	tokens, experts, chosen int
	one                     bool
}

// mixes returns the mixes to test; with -short, which CI repeats under the race detector, no large ones.
func mixes() []mix {
	return slices.DeleteFunc(slices.Clone(allMixes), func(m mix) bool {
		return testing.Short() && m.tokens*m.experts > 2500
	})
}

var allMixes = []mix{{0, 4, 2, false}, {1, 1, 1, false}, {1, 8, 2, false}, {3, 4, 1, false}, {3, 8, 8, false},
	{65, 4, 2, false}, {65, 128, 8, false}, {300, 8, 2, false}, {300, 4, 1, true}, {300, 8, 2, true},
	{9, 128, 8, false}, {300, 128, 8, false}}

// A deal holds the choices of a mix, sorted. Without one, the last quarter of the experts has no tokens if the others
// suffice.
type deal struct {
	mix
	choice []int32 // of each pair
	pair   []int   // of each place
	views  kernels.Pairs
}

func (r *rig) deal(m mix) deal {
	d := deal{mix: m}
	for range m.tokens {
		list := r.rng.Perm(max(m.chosen, m.experts-m.experts/4))[:m.chosen]
		for j, e := range list {
			if m.one {
				e = m.experts - 1 - j
			}
			d.choice = append(d.choice, int32(e))
		}
	}
	tokens, places, starts, pair := refSort(d.choice, m.experts, m.chosen)
	d.pair = pair
	d.views = kernels.Pairs{
		Tokens: r.ints(tokens, 1, len(tokens), 1, 1),
		Places: r.ints(places, 1, m.tokens, m.chosen, 1),
		Starts: r.ints(starts, 1, len(starts), 1, 1),
	}
	return d
}

func (d deal) pairs() int       { return len(d.pair) }
func (d deal) expert(i int) int { return int(d.choice[d.pair[i]]) }
func (d deal) token(i int) int  { return d.pair[i] / d.chosen }
func (d deal) of(byToken bool) int {
	if byToken {
		return d.tokens
	}
	return d.pairs()
}

// row returns the row of x, with n columns, that an operand has for a place.
func (d deal) row(x []float64, n, place int, byToken bool) []float64 {
	if byToken {
		place = d.token(place)
	}
	return x[place*n:][:n]
}

// operand returns a random operand of n columns.
func (r *rig) operand(d deal, n int, byToken bool) (kernels.Operand, []float64) {
	x, xs := r.random(r.act, 1, d.of(byToken), 1, n)
	return kernels.Operand{View: x, ByToken: byToken}, xs
}

func (r *rig) readInts(v View) []int32 {
	r.t.Helper()
	host, err := r.dev.Download(v)
	if err != nil {
		r.t.Fatalf("stream: %v", err)
	}
	return tensor.Data[int32](host)
}

func (r *rig) sameInts(what string, v View, want []int32) {
	r.t.Helper()
	if got := r.readInts(v); !slices.Equal(got, want) {
		r.t.Fatalf("%s is %v, want %v", what, got, want)
	}
}

// routers returns the routers that a mix can have.
func routers(m mix) []kernels.Router {
	list := []kernels.Router{{Scale: 3}, {Normalize: true, Scale: 0.5}, {Sigmoid: true},
		{Sigmoid: true, Normalize: true, Scale: 2.5}}
	if m.experts >= 8 && m.chosen < m.experts {
		list = append(list, kernels.Router{Sigmoid: true, Normalize: true, Groups: m.experts / 2, Kept: m.chosen},
			kernels.Router{Sigmoid: true, Groups: m.experts, Kept: m.chosen + 1}, kernels.Router{Groups: 4, Kept: 2},
			kernels.Router{Groups: 1, Kept: 1})
	}
	return list
}

// testRoute compares choices and weights with their definitions, and their gradients with the derivatives.
func testRoute(r *rig) {
	each(r, mixes(), func(r *rig, m mix) {
		for i, router := range routers(m) {
			logits, ls := r.random(r.par, 1, m.tokens, 1, m.experts)
			correction, cs := View{}, zeros(m.experts)
			if (i+m.tokens)%2 == 0 {
				correction, cs = r.random(r.par, 1, 1, 1, m.experts)
			}
			var wantChoice []int32
			var want []float64
			for row := range slices.Chunk(ls, m.experts) {
				chosen := refRoute(row, cs, m.chosen, router)
				wantChoice = append(wantChoice, chosen...)
				want = append(want, refWeights(row, chosen, router)...)
			}
			weight := r.garbage(r.par, 1, m.tokens, m.chosen, 1)
			choice := r.ints(make([]int32, len(want)), 1, m.tokens, m.chosen, 1)
			r.ops.Route(weight, choice, logits, correction, router)
			r.sameInts("choice", choice, wantChoice)
			r.close("weight", weight, want)
			r.routeBackward(m, router, choice, logits, ls)
		}
	})
}

// routeBackward checks the gradients of logits, given those of weights and of shares.
func (r *rig) routeBackward(m mix, router kernels.Router, choice, logits View, ls []float64) {
	r.t.Helper()
	dweight, dws := r.random(r.par, 1, m.tokens, m.chosen, 1)
	dshare, dss := r.random(r.par, 1, 1, 1, m.experts)
	tokens, numbers := r.someTokens(m.tokens)
	chosen := r.readInts(choice)
	var want, wantAll, wantSome []float64
	for t := range m.tokens {
		row := ls[t*m.experts:][:m.experts]
		grad := refRouteBackward(dws[t*m.chosen:][:m.chosen], row, chosen[t*m.chosen:][:m.chosen], router)
		share := refSoftmaxBackward(dss, row)
		want, wantAll = append(want, grad...), append(wantAll, plus(grad, share)...)
		if numbers[t] < 0 {
			share = zeros(m.experts)
		}
		wantSome = append(wantSome, plus(grad, share)...)
	}
	for _, c := range []struct {
		what           string
		dshare, tokens View
		want           []float64
	}{
		{"dlogits", View{}, tokens, want},
		{"dlogits with shares", dshare, View{}, wantAll},
		{"dlogits with shares of some tokens", dshare, tokens, wantSome},
	} {
		dlogits := r.garbage(r.act, 1, m.tokens, 1, m.experts)
		r.ops.RouteBackward(dlogits, dweight, choice, logits, c.dshare, c.tokens, router)
		r.close(c.what, dlogits, c.want)
	}
}

// someTokens returns numbers of tokens, some of which do not count.
func (r *rig) someTokens(n int) (View, []int32) {
	numbers := make([]int32, n)
	for i := range numbers {
		if numbers[i] = int32(i); i%3 == 1 {
			numbers[i] = -1
		}
	}
	return r.ints(numbers, 1, n, 1, 1), numbers
}

// testRouteExtreme routes equal logits, infinities and NaN.
func testRouteExtreme(r *rig) {
	nan, inf := math.NaN(), math.Inf(1)
	const chosen, experts = 3, 5
	logits, _ := r.put(r.par, []float64{
		1, 3, 3, 2, 3,
		0, 0, 0, 0, 0,
		-inf, 80, -inf, -inf, 80,
		-1, 0, nan, 2, 1,
		0, 0, 0, 0, 0,
	}, 1, 5, 1, experts)
	weight, choice := r.garbage(r.par, 1, 5, chosen, 1), r.ints(make([]int32, 15), 1, 5, chosen, 1)
	r.ops.Route(weight, choice, logits, View{}, kernels.Router{Sigmoid: true})
	half, s1, s2, s3 := 0.5, 1/(1+math.Exp(-1)), 1/(1+math.Exp(-2)), 1/(1+math.Exp(-3))
	r.sameInts("choice by sigmoids", choice, []int32{1, 2, 4, 0, 1, 2, 1, 4, 0, 2, 3, 4, 0, 1, 2})
	want := []float64{s3, s3, s3, half, half, half, 1, 1, 0, nan, s2, s1, half, half, half}
	r.same("weight by sigmoids", weight, want)

	r.ops.Route(weight, choice, logits, View{}, kernels.Router{Normalize: true})
	third := 1.0 / 3
	want = []float64{third, third, third, third, third, third, half, half, 0, nan, nan, nan, third, third, third}
	r.same("weight by softmax", weight, want)
	got := r.readInts(choice)
	row := slices.Sorted(slices.Values(got[9:12]))
	if row[0] < 0 || row[2] >= experts || row[0] == row[1] || row[1] == row[2] {
		r.t.Errorf("a row with NaN has the choices %v", got[9:12])
	}
	r.sameInts("choice by softmax", choice, slices.Concat([]int32{1, 2, 4, 0, 1, 2, 1, 4, 0}, got[9:12], []int32{0, 1, 2}))

	dweight, _ := r.random(r.par, 1, 5, chosen, 1)
	for _, router := range []kernels.Router{{}, {Normalize: true}, {Sigmoid: true}, {Sigmoid: true, Normalize: true}} {
		dlogits := r.garbage(r.act, 1, 5, 1, experts)
		r.ops.RouteBackward(dlogits, dweight, choice, logits, View{}, View{}, router)
		for i, x := range r.read(dlogits) {
			if row := i / experts; row != 3 && math.IsNaN(x) || row == 3 && !router.Sigmoid && !math.IsNaN(x) {
				r.t.Errorf("%+v: dlogit %d of row %d is %v", router, i%experts, row, x)
			}
		}
	}
	// The scores vanish beside the 1e-20 in the divisor of their sum.
	tiny, values := r.put(r.par, []float64{-60, -50, -70, -48, -80}, 1, 1, 1, experts)
	router := kernels.Router{Sigmoid: true, Normalize: true}
	weight, choice = r.garbage(r.par, 1, 1, chosen, 1), r.ints(make([]int32, chosen), 1, 1, chosen, 1)
	r.ops.Route(weight, choice, tiny, View{}, router)
	r.sameInts("choice of tiny scores", choice, []int32{3, 1, 0})
	r.close("weight of tiny scores", weight, refWeights(values, []int32{3, 1, 0}, router))
	one, ones := r.put(r.par, []float64{1, 2, 3}, 1, 1, chosen, 1)
	dlogits := r.garbage(r.act, 1, 1, 1, experts)
	r.ops.RouteBackward(dlogits, one, choice, tiny, View{}, View{}, router)
	r.close("dlogits of tiny scores", dlogits, refRouteBackward(ones, values, []int32{3, 1, 0}, router))
	// Groups with a NaN come first.
	logits, _ = r.put(r.par, []float64{5, 4, 0, nan, 3, 3}, 1, 1, 1, 6)
	weight, choice = r.garbage(r.par, 1, 1, 2, 1), r.ints(make([]int32, 2), 1, 1, 2, 1)
	r.ops.Route(weight, choice, logits, View{}, kernels.Router{Sigmoid: true, Groups: 3, Kept: 1})
	r.sameInts("choice of a group with NaN", choice, []int32{3, 2})
	// Among equal scores the first is chosen, also if its group has a smaller sum.
	logits, _ = r.put(r.par, []float64{1, 0, 1, 0.5, 0, 0}, 1, 1, 1, 6)
	r.ops.Route(weight, choice, logits, View{}, kernels.Router{Sigmoid: true, Groups: 3, Kept: 2})
	r.sameInts("choice of equal scores in two groups", choice, []int32{0, 2})
}

// testCount covers loads and shares of all tokens and of some.
func testCount(r *rig) {
	each(r, mixes(), func(r *rig, m mix) {
		d := r.deal(m)
		logits, ls := r.random(r.par, 1, m.tokens, 1, m.experts)
		choice := r.ints(d.choice, 1, m.tokens, m.chosen, 1)
		tokens, numbers := r.someTokens(m.tokens)
		load, loads := r.put(tensor.F64, refMap(zeros(m.experts), func(float64) float64 { return 7 }), 1, 1, 1, m.experts)
		share, shares := r.random(tensor.F64, 1, 1, 1, m.experts)
		for _, some := range []bool{false, true} {
			at := View{}
			if some {
				at = tokens
			}
			for t := range m.tokens {
				if some && numbers[t] < 0 {
					continue
				}
				for _, e := range d.choice[t*m.chosen:][:m.chosen] {
					loads[e]++
				}
				shares = plus(shares, refScores(ls[t*m.experts:][:m.experts], false))
			}
			r.ops.Count(load, share, choice, logits, at)
			r.equal("load", load, loads)
			r.close("share", share, shares)
		}
		for _, e := range d.choice {
			loads[e]++
		}
		r.ops.Count(load, View{}, choice, logits, View{})
		r.equal("load alone", load, loads)
	})
}

func testSort(r *rig) {
	each(r, mixes(), func(r *rig, m mix) {
		d := r.deal(m)
		bad := func(v View) View {
			xs := make([]int32, v.Size())
			for i := range xs {
				xs[i] = math.MinInt32
			}
			s := v.Shape()
			return r.ints(xs, s[:]...)
		}
		p := kernels.Pairs{Tokens: bad(d.views.Tokens), Places: bad(d.views.Places), Starts: bad(d.views.Starts)}
		r.ops.Sort(p, r.ints(d.choice, 1, m.tokens, m.chosen, 1))
		r.sameInts("starts", p.Starts, r.readInts(d.views.Starts))
		r.sameInts("tokens", p.Tokens, r.readInts(d.views.Tokens))
		r.sameInts("places", p.Places, r.readInts(d.views.Places))
	})
}

// A sized is a mix with the columns of an operand and of a result.
type sized struct {
	mix
	in, out int
}

// allSized returns the mixes with some sizes in turn.
func allSized(sizes ...[2]int) (list []sized) {
	for i, m := range mixes() {
		list = append(list, sized{m, sizes[i%len(sizes)][0], sizes[i%len(sizes)][1]})
	}
	return list
}

// testGroupLinear covers the three products of stacked matrices, for rows of places and of tokens, set and added.
func testGroupLinear(r *rig) {
	list := append(allSized([2]int{65, 1}, [2]int{1, 24}, [2]int{24, 65}), sized{mix{3, 4, 2, false}, 600, 5},
		sized{mix{3, 4, 2, false}, 5, 600}, sized{mix{9, 4, 2, false}, 6, 1024}, sized{mix{9, 4, 2, true}, 1024, 6},
		sized{mix{700, 4, 2, true}, 24, 17}, sized{mix{3, 4, 2, false}, 5, 0}, sized{mix{3, 4, 2, false}, 0, 5})
	each(r, list, func(r *rig, s sized) {
		d := r.deal(s.mix)
		for _, byToken := range []bool{false, true} {
			w, ws := r.random(r.act, 1, s.experts*s.out, 1, s.in)
			x, xs := r.operand(d, s.in, byToken)
			y := r.garbage(r.act, 1, d.pairs(), 1, s.out)
			want := refGroupLinear(d, xs, ws, s.in, s.out, byToken)
			r.ops.GroupLinear(y, x, w, d.views, false)
			r.close("y", y, want)
			y, before := r.random(r.act, 1, d.pairs(), 1, s.out)
			r.ops.GroupLinear(y, x, w, d.views, true)
			r.close("y added", y, plus(before, want))

			dy, dys := r.operand(d, s.out, byToken)
			dx := r.garbage(r.act, 1, d.pairs(), 1, s.in)
			want = refGroupLinearDX(d, dys, ws, s.in, s.out, byToken)
			r.ops.GroupLinearDX(dx, dy, w, d.views, false)
			r.close("dx", dx, want)
			dx, before = r.random(r.act, 1, d.pairs(), 1, s.in)
			r.ops.GroupLinearDX(dx, dy, w, d.views, true)
			r.close("dx added", dx, plus(before, want))

			for _, other := range []bool{false, true} {
				x, xs := r.operand(d, s.in, other)
				want := refGroupLinearDW(d, dys, xs, s.in, s.out, byToken, other)
				dw := r.garbage(r.par, 1, s.experts*s.out, 1, s.in)
				r.ops.GroupLinearDW(dw, dy, x, d.views, false)
				r.close("dw", dw, want)
				dw, before := r.random(r.par, 1, s.experts*s.out, 1, s.in)
				r.ops.GroupLinearDW(dw, dy, x, d.views, true)
				r.close("dw added", dw, plus(before, want))
			}
		}
	})
}

// testGroupBias covers the biases of experts and their gradients.
func testGroupBias(r *rig) {
	each(r, allSized([2]int{24}, [2]int{65}, [2]int{1}, [2]int{515}), func(r *rig, m sized) {
		d, n := r.deal(m.mix), m.in
		bias, bs := r.random(r.par, 1, 1, 1, m.experts*n)
		y, ys := r.random(r.act, 1, d.pairs(), 1, n)
		for i := range d.pairs() {
			copy(ys[i*n:], plus(ys[i*n:][:n], bs[d.expert(i)*n:][:n]))
		}
		r.ops.GroupAdd(y, bias, d.views)
		r.close("y", y, ys)
		for _, byToken := range []bool{false, true} {
			dy, dys := r.operand(d, n, byToken)
			weight, ws := r.random(r.par, 1, m.tokens, m.chosen, 1)
			dweight, dws := r.random(r.par, 1, m.tokens, m.chosen, 1)
			sum, want := r.random(r.par, 1, 1, 1, m.experts*n)
			weighted, wantWeighted := r.random(r.par, 1, 1, 1, m.experts*n)
			for i := range d.pairs() {
				for c, x := range d.row(dys, n, i, byToken) {
					at := d.expert(i)*n + c
					want[at] += x
					wantWeighted[at] += x * ws[d.pair[i]]
					dws[d.pair[i]] += x * bs[at]
				}
			}
			r.ops.GroupSum(sum, dy, View{}, d.views)
			r.close("sum", sum, want)
			r.ops.GroupSum(weighted, dy, weight, d.views)
			r.close("weighted sum", weighted, wantWeighted)
			r.ops.GroupDot(dweight, dy, bias, d.views)
			r.close("dweight", dweight, dws)
		}
	})
}

var activations = []kernels.Activation{kernels.SiLU, kernels.GELU, kernels.ClampedSiLU}

// testGroupGLU covers the gated activation of experts and its gradients, in place and not. Values exceed the clamps.
func testGroupGLU(r *rig) {
	for _, act := range activations {
		each(r, allSized([2]int{24}, [2]int{65}, [2]int{1}, [2]int{33}), func(r *rig, m sized) {
			d, n := r.deal(m.mix), m.in
			large := make([]float64, d.pairs()*2*n)
			for i := range large {
				if large[i] = r.rng.NormFloat64(); act == kernels.ClampedSiLU {
					large[i] *= 4
				}
			}
			x, xs := r.put(r.act, large, 1, d.pairs(), 1, 2*n)
			da, das := r.random(r.act, 1, d.pairs(), 1, n)
			weight, ws := r.random(r.par, 1, m.tokens, m.chosen, 1)
			y := r.garbage(r.act, 1, d.pairs(), 1, n)
			r.ops.GroupGLU(y, x, act)
			wantY, wantDX, wantWY, wantDW := refGroupGLU(d, xs, das, ws, n, act)
			r.close("y", y, wantY)

			dx, wy := r.garbage(r.act, 1, d.pairs(), 1, 2*n), r.garbage(r.act, 1, d.pairs(), 1, n)
			for _, inPlace := range []bool{false, true} {
				dweight := r.garbage(r.par, 1, m.tokens, m.chosen, 1)
				if inPlace {
					dx, wy = x, da
				}
				r.ops.GroupGLUBackward(dx, wy, dweight, da, x, weight, d.views, act)
				r.close("dx", dx, wantDX)
				r.close("wy", wy, wantWY)
				r.within("dweight", dweight, wantDW, 1) // y may be rounded
			}
		})
	}
}

// within compares results of rounded operands. Errors count in roundings of the largest result.
func (r *rig) within(what string, v View, want []float64, roundings float64) {
	r.t.Helper()
	if len(want) > 0 {
		share := roundings * max(64*epsilon(r.par), epsilon(r.act))
		if err := near.Within(r.read(v), want, near.Finite, share); err != nil {
			r.t.Fatalf("%s: %v", what, err)
		}
	}
}

// testFusedExperts covers products with gated activations, rounded between the two. Tiles of columns end anywhere.
func testFusedExperts(r *rig) {
	fused, ok := r.ops.(model.FusedExperts)
	if !ok {
		return
	}
	for _, act := range activations {
		sizes := allSized([2]int{72, 8}, [2]int{24, 264}, [2]int{24, 12}, [2]int{8, 520})
		each(r, append(sizes, allSized([2]int{80, 16}, [2]int{32, 272}, [2]int{16, 528})...), func(r *rig, m sized) {
			d, hidden, n := r.deal(m.mix), m.in, m.out
			from, xs, w, ws := r.fusedOperands(d, hidden, 2*n, true)
			x, y := r.garbage(r.act, 1, d.pairs(), 1, 2*n), r.garbage(r.act, 1, d.pairs(), 1, n)
			if fused.GroupLinearGLU(y, x, from, w, d.views, act) {
				r.close("x", x, refGroupLinear(d, xs, ws, hidden, 2*n, true))
				want, _, _, _ := refGroupGLU(d, r.read(x), zeros(d.pairs()*n), zeros(d.pairs()), n, act)
				r.close("y", y, want)
			}
			dy, dys, down, downs := r.fusedOperands(d, hidden, n, false)
			x, xs = r.random(r.act, 1, d.pairs(), 1, 2*n)
			weight, weights := r.random(r.par, 1, m.tokens, m.chosen, 1)
			wy, dweight := r.garbage(r.act, 1, d.pairs(), 1, n), r.garbage(r.par, 1, m.tokens, m.chosen, 1)
			if fused.GroupLinearDXGLUBackward(x, wy, dweight, dy, down, weight, d.views, act) {
				_, da := r.put(r.act, refGroupLinearDX(d, dys, downs, n, hidden, dy.ByToken), 1, d.pairs(), 1, n)
				_, wantDX, wantWY, wantDW := refGroupGLU(d, xs, da, weights, n, act)
				r.within("dx", x, wantDX, 2)
				r.close("wy", wy, wantWY)
				r.within("dweight", dweight, wantDW, 2)
			}
		})
	}
}

// testClamped covers the clamped gate in the operations for all tokens, with NaN, infinities and the limits themselves,
// where there is a gradient.
func testClamped(r *rig) {
	const act = kernels.ClampedSiLU
	r.glu(act)
	nan, inf := math.NaN(), math.Inf(1)
	gates := []float64{7, 7, 8, inf, -1000, nan, 1, 1, 1, 1}
	ups := []float64{7, -7, 1, 1, 2, 1, nan, 8, -8, inf}
	gate, gates := r.put(r.act, gates, 1, 1, 1, len(gates))
	up, ups := r.put(r.act, ups, 1, 1, 1, len(ups))
	dy, dys := r.put(r.act, refMap(zeros(len(ups)), func(float64) float64 { return 1 }), 1, 1, 1, len(ups))
	y := r.garbage(r.act, 1, 1, 1, len(ups))
	r.ops.GLU(y, gate, up, act)
	r.same("y of extreme gates", y, refGLU(gates, ups, act))
	dgate, dup := refGLUBackward(dys, gates, ups, act)
	r.ops.GLUBackward(gate, up, dy, gate, up, act)
	r.same("dgate of extreme gates", gate, dgate)
	r.same("dup of extreme gates", up, dup)
}

// testCombine covers sums over choices with weights and without, and with an addend, also in place.
func testCombine(r *rig) {
	each(r, allSized([2]int{24}, [2]int{65}, [2]int{1}, [2]int{515}), func(r *rig, m sized) {
		d, n := r.deal(m.mix), m.in
		y, ys := r.random(r.act, 1, d.pairs(), 1, n)
		weight, ws := r.random(r.par, 1, m.tokens, m.chosen, 1)
		add, adds := r.random(r.act, 1, m.tokens, 1, n)
		plain, weighted := zeros(m.tokens*n), zeros(m.tokens*n)
		for i := range d.pairs() {
			for c := range n {
				plain[d.token(i)*n+c] += ys[i*n+c]
				weighted[d.token(i)*n+c] += ws[d.pair[i]] * ys[i*n+c]
			}
		}
		out := r.garbage(r.act, 1, m.tokens, 1, n)
		r.ops.Combine(out, View{}, y, View{}, d.views)
		r.close("sum", out, plain)
		r.ops.Combine(out, View{}, y, weight, d.views)
		r.close("weighted sum", out, weighted)
		r.ops.Combine(out, add, y, weight, d.views)
		r.close("weighted sum with an addend", out, plus(adds, weighted))
		r.ops.Combine(add, add, y, View{}, d.views)
		r.close("sum in place of the addend", add, plus(adds, plain))
	})
}

// testWide covers products of 16-bit activations into float32: the logits of a router.
func testWide(r *rig) {
	each(r, [][3]int{{0, 5, 4}, {1, 7, 5}, {65, 33, 128}, {300, 515, 8}}, func(r *rig, s [3]int) {
		x, xs := r.random(r.act, 1, s[0], 1, s[1])
		w, ws := r.random(r.act, 1, s[2], 1, s[1])
		y, add := r.garbage(r.par, 1, s[0], 1, s[2]), View{}
		r.ops.Linear(y, x, w, add)
		want := refLinear(xs, ws, s[0], s[1], s[2])
		r.close("y", y, want)
		add, adds := r.random(r.par, 1, s[0], 1, s[2])
		r.ops.Linear(add, x, w, add)
		r.close("y in place of the residual", add, plus(adds, want))
	})
}

// testGroupNaN puts NaN into the row of one token. Only the results of this token, and sums over it, become NaN. All
// others keep their bits.
func testGroupNaN(r *rig) {
	const in, out, bad = 24, 17, 4
	d := r.deal(mix{30, 8, 2, false})
	w, _ := r.random(r.act, 1, d.experts*out, 1, in)
	weight, _ := r.random(r.par, 1, d.tokens, d.chosen, 1)
	clean, xs := r.random(r.act, 1, d.tokens, 1, in)
	dy, _ := r.random(r.act, 1, d.tokens, 1, out)
	xs[bad*in+3] = math.NaN()
	dirty, _ := r.put(r.act, xs, 1, d.tokens, 1, in)
	ofToken := func(place int) bool { return d.token(place) == bad }
	hit := func(e int) bool { return slices.Contains(d.choice[bad*d.chosen:][:d.chosen], int32(e)) }
	type result struct {
		what string
		v    View
		rows int
		bad  func(row int) bool
	}
	run := func(x View) []result {
		by := kernels.Operand{View: x, ByToken: true}
		y, dw := r.garbage(r.act, 1, d.pairs(), 1, out), r.garbage(r.par, 1, d.experts*out, 1, in)
		sum := r.garbage(r.par, 1, 1, 1, d.experts*in)
		r.ops.Zero(sum)
		r.ops.GroupLinear(y, by, w, d.views, false)
		r.ops.GroupLinearDW(dw, kernels.Operand{View: dy, ByToken: true}, by, d.views, false)
		r.ops.GroupSum(sum, by, weight, d.views)
		glu, combined := r.garbage(r.act, 1, d.pairs(), 1, out), r.garbage(r.act, 1, d.tokens, 1, out)
		two := r.garbage(r.act, 1, d.pairs(), 1, 2*out)
		for i := range 2 {
			r.ops.Copy(two.Slice(tensor.Dim, i*out, (i+1)*out), y)
		}
		r.ops.GroupGLU(glu, two, kernels.SiLU)
		r.ops.Combine(combined, View{}, glu, weight, d.views)
		dx, wy, dweight := r.garbage(r.act, 1, d.pairs(), 1, 2*out), r.garbage(r.act, 1, d.pairs(), 1, out),
			r.garbage(r.par, 1, d.tokens, d.chosen, 1)
		r.ops.GroupGLUBackward(dx, wy, dweight, glu, two, weight, d.views, kernels.SiLU)
		isBad := func(token int) bool { return token == bad }
		return []result{{"y", y, d.pairs(), ofToken}, {"dw", dw, d.experts, hit}, {"sum", sum, d.experts, hit},
			{"glu", glu, d.pairs(), ofToken}, {"combined", combined, d.tokens, isBad}, {"dx", dx, d.pairs(), ofToken},
			{"wy", wy, d.pairs(), ofToken}, {"dweight", dweight, d.tokens, isBad}}
	}
	want := run(clean)
	for i, got := range run(dirty) {
		a, b := r.read(got.v), r.read(want[i].v)
		n := len(a) / got.rows
		for row := range got.rows {
			some := false
			for c := row * n; c < (row+1)*n; c++ {
				some = some || math.IsNaN(a[c])
				if !got.bad(row) && a[c] != b[c] {
					r.t.Errorf("%s: element %d of row %d is %v, without NaN %v", got.what, c-row*n, row, a[c], b[c])
				}
			}
			if got.bad(row) != some {
				r.t.Errorf("%s: row %d has NaN: %v, want %v", got.what, row, some, got.bad(row))
			}
		}
	}
}
