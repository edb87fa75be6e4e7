package cpu

import (
	"math"
	"slices"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// params panics unless vs are dense and of the type of parameters beside activations x.
func params(op string, x tensor.View, vs ...tensor.View) {
	dtype := tensor.F32
	if x.DType() == tensor.F64 {
		dtype = tensor.F64
	}
	dense(op, dtype, vs...)
}

// ints panics unless all views are dense and int32.
func ints(op string, vs ...tensor.View) {
	for _, v := range vs {
		shape.Must(v.DType() == tensor.I32 && v.IsDense(), op, vs...)
	}
}

// optional returns the elements of v, nil for the zero View.
func optional[T tensor.Element](v tensor.View) []T {
	if v.IsZero() {
		return nil
	}
	return tensor.Data[T](v)
}

// eachRow queues f for blocks of rows of n elements, from lo to hi.
func (c *Kernels) eachRow(op string, rows, n int, f func(s *scratch, lo, hi int)) {
	size := rowBlock(n)
	c.queue(op, func() {
		c.split(blocks(rows, size), func(s *scratch, i int) { f(s, i*size, min(rows, (i+1)*size)) })
	})
}

// Route chooses k experts of each row of logits [T, E], by falling score plus correction, of equal ones the first, and
// sets their weights. A NaN counts as the largest score.
func (c *Kernels) Route(weight, choice, logits, correction tensor.View, r kernels.Router) {
	const op = "route"
	checkRoute(op, weight, choice, logits, r)
	if !correction.IsZero() {
		dense(op, logits.DType(), correction)
		shape.Must(correction.Size() == logits.Cols(), op, logits, correction)
	}
	forType(logits, route[float64], route[float32])(c, weight, choice, logits, correction, r)
}

func checkRoute(op string, weight, choice, logits tensor.View, r kernels.Router) {
	all := []tensor.View{weight, choice, logits}
	n, k := logits.Cols(), choice.Cols()
	dense(op, logits.DType(), weight, logits)
	ints(op, choice)
	shape.Must(choice.Rows() == logits.Rows() && weight.Size() == choice.Size() && 0 < k && k <= n, op, all...)
	if r.Groups > 1 {
		shape.Must(n%r.Groups == 0 && r.Kept <= r.Groups && k <= r.Kept*(n/r.Groups), op, all...)
	}
}

func route[T tensor.Float](c *Kernels, weight, choice, logits, correction tensor.View, r kernels.Router) {
	ws, cs, ls := tensor.Data[T](weight), tensor.Data[int32](choice), tensor.Data[T](logits)
	add, n, k := optional[T](correction), logits.Cols(), choice.Cols()
	c.eachRow("route", logits.Rows(), n, func(_ *scratch, lo, hi int) {
		scores, keys, groups := make([]float64, n), make([]float64, n), newGroups(r, n)
		for row := lo; row < hi; row++ {
			setScores(scores, ls[row*n:][:n], r)
			copy(keys, scores)
			for i, x := range add {
				keys[i] += float64(x)
			}
			chosen := cs[row*k:][:k]
			groups.choose(chosen, keys)
			scale, sum := factors(scores, chosen, r)
			for i, e := range chosen {
				ws[row*k+i] = T(scale * scores[e] / sum)
			}
		}
	})
}

// ScaleChoices sets y to x times the element of scale of each choice, and unless it is the zero View, terms to x times
// weight. y may be x.
func (c *Kernels) ScaleChoices(y, terms, x, weight, choice, scale tensor.View) {
	const op = "scale choices"
	dense(op, scale.DType(), y, x)
	ints(op, choice)
	shape.Must(y.Size() == choice.Size() && x.Size() == y.Size(), op, y, x, choice)
	if !terms.IsZero() {
		dense(op, scale.DType(), terms, weight)
		shape.Must(terms.Size() == y.Size() && weight.Size() == y.Size(), op, terms, weight, y)
	}
	forType(scale, scaleChoices[float64], scaleChoices[float32])(c, y, terms, x, weight, choice, scale)
}

func scaleChoices[T tensor.Float](c *Kernels, y, terms, x, weight, choice, scale tensor.View) {
	to, more, xs, ws := tensor.Data[T](y), optional[T](terms), tensor.Data[T](x), optional[T](weight)
	cs, by := tensor.Data[int32](choice), tensor.Data[T](scale)
	c.queue("scale choices", func() {
		for i, v := range xs {
			if more != nil {
				more[i] = v * ws[i]
			}
			to[i] = v * by[cs[i]]
		}
	})
}

// setScores sets the scores of a row of logits, in float64.
func setScores[T tensor.Float](scores []float64, logits []T, r kernels.Router) {
	if r.Sigmoid {
		for i, x := range logits {
			scores[i] = 1 / (1 + math.Exp(-float64(x)))
		}
		return
	}
	top, sum := slices.Max(logits), 0.0
	for i, x := range logits {
		scores[i] = math.Exp(float64(x) - float64(top))
		sum += scores[i]
	}
	for i := range scores {
		scores[i] /= sum
	}
}

// factors returns the factor and the divisor that make weights of scores.
func factors(scores []float64, chosen []int32, r kernels.Router) (scale, sum float64) {
	if scale = r.Scale; scale == 0 {
		scale = 1
	}
	if !r.Normalize {
		return scale, 1
	}
	for _, e := range chosen {
		sum += scores[e]
	}
	if r.Sigmoid {
		sum += 1e-20
	}
	return scale, sum
}

// expertGroups holds a router's groups of equal size.
type expertGroups struct {
	size int
	sums []float64 // of each group's two largest keys
	kept []int32
}

func newGroups(r kernels.Router, experts int) expertGroups {
	if r.Groups <= 1 {
		return expertGroups{size: experts, kept: []int32{0}}
	}
	return expertGroups{experts / r.Groups, make([]float64, r.Groups), make([]int32, r.Kept)}
}

// choose sets top to the largest of the keys in the groups with the largest sums.
func (g expertGroups) choose(top []int32, keys []float64) {
	if len(g.sums) > 0 {
		var best [2]int32
		for i := range g.sums {
			n := 0
			for e := i * g.size; e < (i+1)*g.size; e++ {
				n = insert(best[:], n, e, keys)
			}
			g.sums[i] = keys[best[0]]
			if n == 2 {
				g.sums[i] += keys[best[1]]
			}
		}
		n := 0
		for i := range g.sums {
			n = insert(g.kept, n, i, g.sums)
		}
		slices.Sort(g.kept) // of equal keys the first is chosen
	}
	n := 0
	for _, i := range g.kept {
		for e := int(i) * g.size; e < (int(i)+1)*g.size; e++ {
			n = insert(top, n, e, keys)
		}
	}
}

// insert adds index i to the indices of the n largest keys before it, in falling order, and returns their new number.
func insert(top []int32, n, i int, keys []float64) int {
	at := n
	for at > 0 && above(keys[i], keys[top[at-1]]) {
		at--
	}
	if at == len(top) {
		return n
	}
	n = min(n+1, len(top))
	copy(top[at+1:n], top[at:])
	top[at] = int32(i)
	return n
}

// above reports whether a is larger than b; NaN is the largest.
func above(a, b float64) bool { return a > b || a != a && b == b }

// RouteBackward sets dlogits, of the type of activations, given dweight. For the tokens of Count it adds the gradient
// given dshare as that of the softmax of each row, unless that is the zero View.
func (c *Kernels) RouteBackward(dlogits, dweight, choice, logits, dshare, tokens tensor.View, r kernels.Router) {
	const op = "route backward"
	checkRoute(op, dweight, choice, logits, r)
	denseActivations(op, dlogits)
	params(op, dlogits, logits)
	shape.Must(dlogits.Rows() == logits.Rows() && dlogits.Cols() == logits.Cols(), op, dlogits, logits)
	checkCounted(op, choice, tokens)
	if !dshare.IsZero() {
		dense(op, logits.DType(), dshare)
		shape.Must(dshare.Size() == logits.Cols(), op, dshare, logits)
	}
	forType(logits, routeBackward[float64], routeBackward[float32])(c, dlogits, dweight, choice, logits, dshare, tokens, r)
}

// routeBackward follows weights back to scores and logits. With scores s, and the factor f and divisor d of weights:
// ds = f/d * (dw - sum(dw*s)/d), where the sum is 0 unless weights are normalised, then ds*s*(1-s) for the sigmoid, or
// s*(ds - sum(ds*s)) for the softmax. That last sum is 0 for normalised weights.
func routeBackward[T tensor.Float](c *Kernels, dlogits, dweight, choice, logits, dshare, tokens tensor.View,
	r kernels.Router) {
	dls, dws, ds := memoryOf[T](dlogits), tensor.Data[T](dweight), optional[T](dshare)
	cs, ls, n, k := tensor.Data[int32](choice), tensor.Data[T](logits), logits.Cols(), choice.Cols()
	numbers := optional[int32](tokens)
	c.eachRow("route backward", logits.Rows(), n, func(s *scratch, lo, hi int) {
		mem := open[T](s, n)
		out, scores, grads := mem.take(n), make([]float64, n), make([]float64, n)
		for row := lo; row < hi; row++ {
			setScores(scores, ls[row*n:][:n], r)
			chosen, dw := cs[row*k:][:k], dws[row*k:][:k]
			scale, sum := factors(scores, chosen, r)
			inner := 0.0 // sum(dw*s)
			for i, e := range chosen {
				inner += float64(dw[i]) * scores[e]
			}
			mean := scale * inner
			if r.Normalize {
				mean = 0
			}
			clear(grads)
			for i, e := range chosen {
				if grads[e] = scale * float64(dw[i]); r.Normalize {
					grads[e] = scale / sum * (float64(dw[i]) - inner/sum)
				}
			}
			for e, x := range scores {
				if r.Sigmoid {
					grads[e] *= x * (1 - x)
				} else {
					grads[e] = x * (grads[e] - mean)
				}
			}
			if ds != nil && counted(numbers, row) {
				setScores(scores, ls[row*n:][:n], kernels.Router{})
				mean := 0.0
				for e, x := range scores {
					mean += x * float64(ds[e])
				}
				for e, x := range scores {
					grads[e] += x * (float64(ds[e]) - mean)
				}
			}
			for e, x := range grads {
				out[e] = T(x)
			}
			dls.store(row*n, out)
		}
	})
}

// Count adds the choices of each expert to load, float64 [1, 1, 1, E], and unless it is the zero View, the softmax of
// each row of logits to share, likewise. It counts the rows with tokens >= 0, or all with the zero View.
func (c *Kernels) Count(load, share, choice, logits, tokens tensor.View) {
	const op = "count"
	dense(op, logits.DType(), logits)
	dense(op, tensor.F64, load)
	checkCounted(op, choice, tokens)
	shape.Must(load.Size() == logits.Cols() && choice.Rows() == logits.Rows(), op, load, choice, logits)
	if !share.IsZero() {
		dense(op, tensor.F64, share)
		shape.Must(share.Size() == load.Size(), op, load, share)
	}
	forType(logits, count[float64], count[float32])(c, load, share, choice, logits, tokens)
}

// checkCounted panics unless choice and tokens, or the zero View, have the same rows.
func checkCounted(op string, choice, tokens tensor.View) {
	ints(op, choice)
	if !tokens.IsZero() {
		ints(op, tokens)
		shape.Must(tokens.Size() == choice.Rows(), op, tokens, choice)
	}
}

func counted(tokens []int32, row int) bool { return tokens == nil || tokens[row] >= 0 }

func count[T tensor.Float](c *Kernels, load, share, choice, logits, tokens tensor.View) {
	loads, shares := tensor.Data[float64](load), optional[float64](share)
	cs, ls, numbers := tensor.Data[int32](choice), tensor.Data[T](logits), optional[int32](tokens)
	rows, n, k := logits.Rows(), logits.Cols(), choice.Cols()
	c.queue("count", func() {
		for i, e := range cs {
			if counted(numbers, i/k) {
				loads[e]++
			}
		}
		if shares == nil {
			return
		}
		size := max(rowBlock(n), blocks(rows, normParts))
		partial := grow(&c.sums, blocks(rows, size)*n)
		clear(partial)
		c.blocks(rows, size, func(part, lo, hi int) {
			sum, scores := partial[part*n:][:n], make([]float64, n)
			for row := lo; row < hi; row++ {
				if counted(numbers, row) {
					setScores(scores, ls[row*n:][:n], kernels.Router{})
					simd.LoopsOf[float64](c.level).AddTo(sum, sum, scores)
				}
			}
		})
		for i, x := range partial {
			shares[i%n] += x
		}
	})
}

// GroupAdd adds to each row of y [P, n] its expert's row of bias [1, 1, 1, E*n].
func (c *Kernels) GroupAdd(y, bias tensor.View, p kernels.Pairs) {
	forType(y, groupAdd[float64], groupAdd[float32])(c, y, bias, p)
}

func groupAdd[T tensor.Float](c *Kernels, y, bias tensor.View, p kernels.Pairs) {
	const op = "group add"
	g, n := pairsOf(op, p), y.Cols()
	denseActivations(op, y)
	params(op, y, bias)
	shape.Must(y.Rows() == len(g.tokens) && bias.Size() == g.experts()*n, op, y, bias, p.Starts)
	l, ys, bs := simd.LoopsOf[T](c.level), memoryOf[T](y), tensor.Data[T](bias)
	c.eachRow(op, y.Rows(), n, func(s *scratch, lo, hi int) {
		mem := open[T](s, n)
		wide := mem.take(n)
		g.each(lo, hi, func(i, e int) {
			ys.load(wide, i*n)
			l.AddTo(wide, wide, bs[e*n:][:n])
			ys.store(i*n, wide)
		})
	})
}

// GroupSum adds to each expert's row of sum [1, 1, 1, E*n] the sum of its rows of dy, each times its weight unless that
// is the zero View.
func (c *Kernels) GroupSum(sum tensor.View, dy kernels.Operand, weight tensor.View, p kernels.Pairs) {
	forType(sum, groupSum[float64], groupSum[float32])(c, sum, dy, weight, p)
}

func groupSum[T tensor.Float](c *Kernels, sum tensor.View, dy kernels.Operand, weight tensor.View, p kernels.Pairs) {
	const op = "group sum"
	g, n := checkBias(op, sum, dy, weight, p)
	to, xs, ws := tensor.Data[T](sum), operandOf[T](dy, g), optional[T](weight)
	across := blocks(n, rowSumBlock)
	c.queue(op, func() {
		c.each(g.experts()*across, func(piece int) {
			e, col := piece/across, piece%across*rowSumBlock
			width := min(rowSumBlock, n-col)
			var sums [rowSumBlock]float64
			var wide [rowSumBlock]T
			lo, hi := g.of(e)
			for i := lo; i < hi; i++ {
				w := 1.0
				if ws != nil {
					w = float64(ws[g.pair(i)])
				}
				xs.read(wide[:], i, col, 1, width)
				for j, x := range wide[:width] {
					sums[j] += w * float64(x)
				}
			}
			for j, x := range to[e*n+col:][:width] {
				to[e*n+col+j] = T(float64(x) + sums[j])
			}
		})
	})
}

// checkBias panics unless bias [1, 1, 1, E*n], dy [P or T, n], and weight, one for each pair or the zero View, match.
func checkBias(op string, bias tensor.View, dy kernels.Operand, weight tensor.View, p kernels.Pairs) (g pairs, n int) {
	g, n = pairsOf(op, p), dy.Cols()
	denseActivations(op, dy.View)
	params(op, dy.View, bias)
	g.holds(op, dy)
	shape.Must(bias.Size() == g.experts()*n, op, bias, dy.View, p.Starts)
	if !weight.IsZero() {
		params(op, dy.View, weight)
		shape.Must(weight.Size() == len(g.places), op, weight, p.Places)
	}
	return g, n
}

// GroupDot adds to the element of each pair in dweight the product of its rows of dy and of bias [1, 1, 1, E*n].
func (c *Kernels) GroupDot(dweight tensor.View, dy kernels.Operand, bias tensor.View, p kernels.Pairs) {
	forType(bias, groupDot[float64], groupDot[float32])(c, dweight, dy, bias, p)
}

func groupDot[T tensor.Float](c *Kernels, dweight tensor.View, dy kernels.Operand, bias tensor.View, p kernels.Pairs) {
	const op = "group dot"
	g, n := checkBias(op, bias, dy, dweight, p)
	l, to, xs, bs := simd.LoopsOf[T](c.level), tensor.Data[T](dweight), operandOf[T](dy, g), tensor.Data[T](bias)
	c.eachRow(op, len(g.tokens), n, func(s *scratch, lo, hi int) {
		mem := open[T](s, n)
		wide := mem.take(n)
		g.each(lo, hi, func(i, e int) {
			at := g.pair(i)
			xs.read(wide, i, 0, 1, n)
			to[at] = T(float64(to[at]) + l.Dot(wide, bs[e*n:][:n]))
		})
	})
}

// GroupGLU sets y [P, I] to act(gate) * up, the halves of the columns of x [P, 2*I].
func (c *Kernels) GroupGLU(y, x tensor.View, act kernels.Activation) {
	forType(y, groupGLU[float64], groupGLU[float32])(c, y, x, act)
}

func groupGLU[T tensor.Float](c *Kernels, y, x tensor.View, act kernels.Activation) {
	const op = "group glu"
	n := y.Cols()
	denseActivations(op, y, x)
	shape.Must(y.Rows() == x.Rows() && x.Cols() == 2*n, op, y, x)
	ys, xs := memoryOf[T](y), memoryOf[T](x)
	f, _ := gluLoops[T](c, act)
	c.eachRow(op, y.Rows(), 2*n, func(s *scratch, lo, hi int) {
		mem := open[T](s, n, 2*n)
		out, in := mem.take(n), mem.take(2*n)
		for i := lo; i < hi; i++ {
			xs.load(in, i*2*n)
			f(out, in[:n], in[n:])
			ys.store(i*n, out)
		}
	})
}

// GroupGLUBackward sets, for y of GroupGLU and the weight w of a place's pair, dweight to the sum of da*y, dx to the
// gradient of x given w*da as that of y, and wy to w*y. dx may be x, and wy may be da.
func (c *Kernels) GroupGLUBackward(dx, wy, dweight, da, x, weight tensor.View, p kernels.Pairs,
	act kernels.Activation) {
	forType(x, groupGLUBackward[float64], groupGLUBackward[float32])(c, dx, wy, dweight, da, x, weight, p, act)
}

func groupGLUBackward[T tensor.Float](c *Kernels, dx, wy, dweight, da, x, weight tensor.View, p kernels.Pairs,
	act kernels.Activation) {
	const op = "group glu backward"
	g, n := pairsOf(op, p), da.Cols()
	denseActivations(op, dx, wy, da, x)
	params(op, x, dweight, weight)
	shape.Must(da.Rows() == len(g.tokens) && x.Rows() == da.Rows() && x.Cols() == 2*n && wy.Size() == da.Size() &&
		dx.Size() == x.Size(), op, dx, wy, da, x)
	shape.Must(dweight.Size() == len(g.places) && weight.Size() == len(g.places), op, dweight, weight, p.Places)
	l := simd.LoopsOf[T](c.level)
	forward, backward := gluLoops[T](c, act)
	dxs, wys, das, xs := memoryOf[T](dx), memoryOf[T](wy), memoryOf[T](da), memoryOf[T](x)
	dws, ws := tensor.Data[T](dweight), tensor.Data[T](weight)
	c.eachRow(op, da.Rows(), 2*n, func(s *scratch, lo, hi int) {
		mem := open[T](s, n, n, 2*n)
		y, d, in := mem.take(n), mem.take(n), mem.take(2*n)
		for i := lo; i < hi; i++ {
			pair := g.pair(i)
			xs.load(in, i*2*n)
			das.load(d, i*n)
			forward(y, in[:n], in[n:])
			dws[pair] = T(l.Dot(d, y))
			l.Scaled(d, d, ws[pair])
			backward(in[:n], in[n:], d, in[:n], in[n:])
			l.Scaled(y, y, ws[pair])
			dxs.store(i*2*n, in)
			wys.store(i*n, y)
		}
	})
}

// Combine sets out [T, n] to add plus the sum over a token's choices, in their order, of weight times its row of y
// [P, n]. Without weight, the zero View, it is 1; without add, 0. out may be add.
func (c *Kernels) Combine(out, add, y, weight tensor.View, p kernels.Pairs) {
	forType(y, combine[float64], combine[float32])(c, out, add, y, weight, p)
}

func combine[T tensor.Float](c *Kernels, out, add, y, weight tensor.View, p kernels.Pairs) {
	const op = "combine"
	g, n := pairsOf(op, p), y.Cols()
	denseActivations(op, out, y)
	shape.Must(y.Rows() == len(g.tokens) && out.Cols() == n && out.Rows()*g.k == y.Rows(), op, out, y, p.Places)
	if !add.IsZero() {
		denseActivations(op, out, add)
		shape.Must(add.Size() == out.Size(), op, out, add)
	}
	if !weight.IsZero() {
		params(op, out, weight)
		shape.Must(weight.Size() == len(g.places), op, weight, p.Places)
	}
	l, outs, ys, ws := simd.LoopsOf[T](c.level), memoryOf[T](out), memoryOf[T](y), optional[T](weight)
	var adds memory[T]
	if !add.IsZero() {
		adds = memoryOf[T](add)
	}
	c.eachRow(op, out.Rows(), n*g.k, func(s *scratch, lo, hi int) {
		mem := open[T](s, n, n)
		sum, wide := mem.take(n), mem.take(n)
		for t := lo; t < hi; t++ {
			if clear(sum); !add.IsZero() {
				adds.load(sum, t*n)
			}
			for i := t * g.k; i < (t+1)*g.k; i++ {
				if ys.load(wide, int(g.places[i])*n); ws != nil {
					l.Scaled(wide, wide, ws[i])
				}
				l.AddTo(sum, sum, wide)
			}
			outs.store(t*n, sum)
		}
	})
}
