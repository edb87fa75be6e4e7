package model

import (
	"math"
	"slices"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// scores returns the scores of a row of logits.
func scores(logits []float64, sigmoid bool) []float64 {
	out, sum := make([]float64, len(logits)), 0.0
	for i, x := range logits {
		if out[i] = math.Exp(x - slices.Max(logits)); sigmoid {
			out[i] = 1 / (1 + math.Exp(-x))
		}
		sum += out[i]
	}
	for i := range out {
		if !sigmoid {
			out[i] /= sum
		}
	}
	return out
}

// norms returns the divisor and the factor of a row's weights.
func norms(s []float64, choice []int32, r kernels.Router) (sum, scale float64) {
	for _, e := range choice {
		sum += s[e]
	}
	if r.Sigmoid {
		sum += 1e-20
	}
	if !r.Normalize {
		sum = 1
	}
	if scale = r.Scale; scale == 0 {
		scale = 1
	}
	return sum, scale
}

func (refOps) Route(weight, choice, logits, correction View, r kernels.Router) {
	n, k := logits.Cols(), choice.Cols()
	L, C, W, add := get(logits), ints(choice), make([]float64, weight.Size()), make([]float64, n)
	if !correction.IsZero() {
		add = get(correction)
	}
	for t := range logits.Rows() {
		s, list := scores(L[t*n:t*n+n], r.Sigmoid), make([]int, n)
		for e := range list {
			list[e] = e
		}
		better := func(a, b int) int {
			switch x, y := s[a]+add[a], s[b]+add[b]; {
			case x > y:
				return -1
			case x < y:
				return 1
			}
			return 0
		}
		if r.Groups > 1 {
			size, sums, groups := n/r.Groups, make([]float64, r.Groups), make([]int, r.Groups)
			for g := range groups {
				groups[g] = g
				of := list[g*size : g*size+size]
				best := slices.Clone(of)
				slices.SortStableFunc(best, better)
				for _, e := range best[:min(2, size)] {
					sums[g] += s[e] + add[e]
				}
			}
			slices.SortStableFunc(groups, func(a, b int) int {
				switch {
				case sums[a] > sums[b]:
					return -1
				case sums[a] < sums[b]:
					return 1
				}
				return 0
			})
			list = slices.DeleteFunc(list, func(e int) bool { return !slices.Contains(groups[:r.Kept], e/size) })
		}
		slices.SortStableFunc(list, better)
		c := C[t*k : t*k+k]
		for j := range c {
			c[j] = int32(list[j])
		}
		sum, scale := norms(s, c, r)
		for j, e := range c {
			W[t*k+j] = scale * s[e] / sum
		}
	}
	put(weight, W)
}

// RouteBackward applies the chain rule to the definition: weights, scores, logits.
func (refOps) RouteBackward(dlogits, dweight, choice, logits, dshare, tokens View, r kernels.Router) {
	n, k := logits.Cols(), choice.Cols()
	L, C, DW, DL := get(logits), ints(choice), get(dweight), make([]float64, logits.Size())
	for t := range logits.Rows() {
		s, c, dw, ds := scores(L[t*n:t*n+n], r.Sigmoid), C[t*k:t*k+k], DW[t*k:t*k+k], make([]float64, n)
		sum, scale := norms(s, c, r)
		inner := 0.0
		for j, e := range c {
			ds[e] += dw[j] * scale / sum
			inner += dw[j] * scale * s[e] / (sum * sum)
		}
		for _, e := range c {
			if r.Normalize {
				ds[e] -= inner
			}
		}
		mean := 0.0
		for e := range s {
			mean += s[e] * ds[e]
		}
		for e := range s {
			if r.Sigmoid {
				DL[t*n+e] = ds[e] * s[e] * (1 - s[e])
			} else {
				DL[t*n+e] = s[e] * (ds[e] - mean)
			}
		}
		if dshare.IsZero() || !counted(tokens, t) {
			continue
		}
		p, g, mean := scores(L[t*n:t*n+n], false), get(dshare), 0.0
		for e := range p {
			mean += p[e] * g[e]
		}
		for e := range p {
			DL[t*n+e] += p[e] * (g[e] - mean)
		}
	}
	put(dlogits, DL)
}

func counted(tokens View, t int) bool { return tokens.IsZero() || ints(tokens)[t] >= 0 }

func (refOps) Count(load, share, choice, logits, tokens View) {
	n, L, add := logits.Cols(), get(load), func(v View, x []float64) {
		if !v.IsZero() {
			put(v, x)
		}
	}
	S := make([]float64, n)
	if !share.IsZero() {
		S = get(share)
	}
	for t := range logits.Rows() {
		if !counted(tokens, t) {
			continue
		}
		for _, e := range ints(choice)[t*choice.Cols():][:choice.Cols()] {
			L[e]++
		}
		for e, p := range scores(get(logits)[t*n:t*n+n], false) {
			S[e] += p
		}
	}
	add(load, L)
	add(share, S)
}

func (refOps) Sort(p kernels.Pairs, choice View) {
	tokens, places, starts, k, at := ints(p.Tokens), ints(p.Places), ints(p.Starts), choice.Cols(), int32(0)
	for e := range len(starts) - 1 {
		starts[e] = at
		for pair, c := range ints(choice) {
			if int(c) == e {
				tokens[at], places[pair] = int32(pair/k), at
				at++
			}
		}
	}
	starts[len(starts)-1] = at
}

// eachPlace calls f with each place's expert and its row of an operand.
func eachPlace(x kernels.Operand, p kernels.Pairs, f func(place, expert, row int)) {
	starts, tokens := ints(p.Starts), ints(p.Tokens)
	for e := range len(starts) - 1 {
		for i := int(starts[e]); i < int(starts[e+1]); i++ {
			row := i
			if x.ByToken {
				row = int(tokens[i])
			}
			f(i, e, row)
		}
	}
}

func stacked(p kernels.Pairs) int { return p.Starts.Size() - 1 }

func row(v View, i int) View { return rows(v).Slice(tensor.Seq, i, i+1) }

// expertOf returns an expert's rows of a stacked matrix.
func expertOf(w View, e, n int) View { return w.Slice(tensor.Seq, e*w.Rows()/n, (e+1)*w.Rows()/n) }

func (o refOps) GroupLinear(y View, x kernels.Operand, w View, p kernels.Pairs, accumulate bool) {
	eachPlace(x, p, func(i, e, from int) {
		add := View{}
		if accumulate {
			add = row(y, i)
		}
		o.Linear(row(y, i), row(x.View, from), expertOf(w, e, stacked(p)), add)
	})
}

func (o refOps) GroupLinearDX(dx View, dy kernels.Operand, w View, p kernels.Pairs, accumulate bool) {
	eachPlace(dy, p, func(i, e, from int) {
		o.LinearDX(row(dx, i), row(dy.View, from), expertOf(w, e, stacked(p)), accumulate)
	})
}

func (o refOps) GroupLinearDW(dw View, dy, x kernels.Operand, p kernels.Pairs, accumulate bool) {
	if !accumulate {
		o.Zero(dw)
	}
	of := map[int]int{}
	eachPlace(x, p, func(i, _, from int) { of[i] = from })
	eachPlace(dy, p, func(i, e, from int) {
		o.LinearDW(expertOf(dw, e, stacked(p)), row(dy.View, from), row(x.View, of[i]), true)
	})
}

func (refOps) GroupAdd(y, bias View, p kernels.Pairs) {
	Y, B, n := get(y), get(bias), y.Cols()
	eachPlace(kernels.Operand{View: y}, p, func(i, e, _ int) {
		for c := range n {
			Y[i*n+c] += B[e*n+c]
		}
	})
	put(y, Y)
}

// weightOf returns the weight of each place.
func weightOf(weight View, p kernels.Pairs) []float64 {
	out := make([]float64, p.Tokens.Size())
	for pair, place := range ints(p.Places) {
		if out[place] = 1; !weight.IsZero() {
			out[place] = get(weight)[pair]
		}
	}
	return out
}

func (refOps) GroupSum(sum View, dy kernels.Operand, weight View, p kernels.Pairs) {
	S, DY, W, n := get(sum), get(dy.View), weightOf(weight, p), dy.Cols()
	eachPlace(dy, p, func(i, e, from int) {
		for c := range n {
			S[e*n+c] += W[i] * DY[from*n+c]
		}
	})
	put(sum, S)
}

func (refOps) GroupDot(dweight View, dy kernels.Operand, bias View, p kernels.Pairs) {
	D, DY, B, n := get(dweight), get(dy.View), get(bias), dy.Cols()
	pair := map[int]int{}
	for i, place := range ints(p.Places) {
		pair[int(place)] = i
	}
	eachPlace(dy, p, func(i, e, from int) {
		for c := range n {
			D[pair[i]] += DY[from*n+c] * B[e*n+c]
		}
	})
	put(dweight, D)
}

// halves returns copies of the halves of a row.
func halves(x View, i int) (gate, up View) {
	n := x.Cols() / 2
	xs := get(row(x, i))
	gate, up = tensor.New(tensor.F64, 1, 1, 1, n), tensor.New(tensor.F64, 1, 1, 1, n)
	put(gate, xs[:n])
	put(up, xs[n:])
	return gate, up
}

func (o refOps) GroupGLU(y, x View, act kernels.Activation) {
	for i := range y.Rows() {
		gate, up := halves(x, i)
		o.GLU(row(y, i), gate, up, act)
	}
}

func (o refOps) GroupGLUBackward(dx, wy, dweight, da, x, weight View, p kernels.Pairs, act kernels.Activation) {
	W, DA, D, n := weightOf(weight, p), get(da), make([]float64, dweight.Size()), da.Cols()
	WY := make([]float64, len(DA))
	for pair, place := range ints(p.Places) {
		i := int(place)
		gate, up := halves(x, i)
		y, d := tensor.New(tensor.F64, 1, 1, 1, n), tensor.New(tensor.F64, 1, 1, 1, n)
		o.GLU(y, gate, up, act)
		scaled := make([]float64, n)
		for c, v := range get(y) {
			D[pair] += DA[i*n+c] * v
			WY[i*n+c], scaled[c] = W[i]*v, W[i]*DA[i*n+c]
		}
		put(d, scaled)
		o.GLUBackward(gate, up, d, gate, up, act)
		put(row(dx, i), append(get(gate), get(up)...))
	}
	put(wy, WY)
	put(dweight, D)
}

func (refOps) Combine(out, add, y, weight View, p kernels.Pairs) {
	n, k, W := out.Cols(), p.Places.Cols(), weightOf(weight, p)
	O, Y := make([]float64, out.Size()), get(y)
	if !add.IsZero() {
		O = get(add)
	}
	for pair, place := range ints(p.Places) {
		for c := range n {
			O[pair/k*n+c] += W[place] * Y[int(place)*n+c]
		}
	}
	put(out, O)
}
