package model

import (
	"math"
	"slices"

	"github.com/cprun/cprun/kernels"
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
func (refOps) ScaleChoices(y, terms, x, weight, choice, scale View) {
	X, C, S := get(x), ints(choice), get(scale)
	Y := make([]float64, len(X))
	for i, e := range C {
		Y[i] = X[i] * S[e]
	}
	if !terms.IsZero() {
		W := get(weight)
		for i := range X {
			X[i] *= W[i]
		}
		put(terms, X)
	}
	put(y, Y)
}

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
	S, all := make([]float64, n), get(logits)
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
		for e, p := range scores(all[t*n:t*n+n], false) {
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

func (o refOps) GroupLinear(y View, x kernels.Operand, w View, p kernels.Pairs, accumulate bool) {
	X, W, Y, in, out := get(x.View), get(w), make([]float64, y.Size()), x.Cols(), y.Cols()
	if accumulate {
		Y = get(y)
	}
	eachPlace(x, p, func(i, e, from int) {
		for c := range out {
			for k := range in {
				Y[i*out+c] += X[from*in+k] * W[(e*out+c)*in+k]
			}
		}
	})
	put(y, Y)
}

func (o refOps) GroupLinearDX(dx View, dy kernels.Operand, w View, p kernels.Pairs, accumulate bool) {
	DY, W, DX, in, out := get(dy.View), get(w), make([]float64, dx.Size()), dx.Cols(), dy.Cols()
	if accumulate {
		DX = get(dx)
	}
	eachPlace(dy, p, func(i, e, from int) {
		for c := range out {
			for k := range in {
				DX[i*in+k] += DY[from*out+c] * W[(e*out+c)*in+k]
			}
		}
	})
	put(dx, DX)
}

func (o refOps) GroupLinearDW(dw View, dy, x kernels.Operand, p kernels.Pairs, accumulate bool) {
	DY, X, DW, in, out := get(dy.View), get(x.View), make([]float64, dw.Size()), x.Cols(), dy.Cols()
	if accumulate {
		DW = get(dw)
	}
	of := make([]int, p.Tokens.Size())
	eachPlace(x, p, func(i, _, from int) { of[i] = from })
	eachPlace(dy, p, func(i, e, from int) {
		for c := range out {
			for k := range in {
				DW[(e*out+c)*in+k] += DY[from*out+c] * X[of[i]*in+k]
			}
		}
	})
	put(dw, DW)
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
	out, w := make([]float64, p.Tokens.Size()), []float64(nil)
	if !weight.IsZero() {
		w = get(weight)
	}
	for pair, place := range ints(p.Places) {
		if out[place] = 1; w != nil {
			out[place] = w[pair]
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

func (refOps) GroupGLU(y, x View, act kernels.Activation) {
	X, Y, n := get(x), make([]float64, y.Size()), y.Cols()
	for i := range Y {
		at := i/n*2*n + i%n
		Y[i], _, _ = glu(X[at], X[at+n], act)
	}
	put(y, Y)
}

func (refOps) GroupGLUBackward(dx, wy, dweight, da, x, weight View, p kernels.Pairs, act kernels.Activation) {
	W, DA, D, n := weightOf(weight, p), get(da), make([]float64, dweight.Size()), da.Cols()
	X, WY := get(x), make([]float64, len(DA))
	for pair, place := range ints(p.Places) {
		for c := range n {
			i, at := int(place)*n+c, int(place)*2*n+c
			y, dg, du := glu(X[at], X[at+n], act)
			D[pair] += DA[i] * y
			WY[i] = W[place] * y
			X[at], X[at+n] = W[place]*DA[i]*dg, W[place]*DA[i]*du
		}
	}
	put(dx, X)
	put(wy, WY)
	put(dweight, D)
}

func (r refOps) GroupLinearGLU(y, x View, from kernels.Operand, w kernels.Scaled, p kernels.Pairs,
	act kernels.Activation) bool {
	if from.Factors.IsZero() {
		r.GroupLinear(x, from, w.View, p, false)
	} else {
		r.GroupScaledLinear(x, from, w, p)
	}
	r.GroupGLU(y, x, act)
	return true
}

func (r refOps) GroupLinearDXGLUBackward(x, wy, dweight View, dy kernels.Operand, w kernels.Scaled, weight View,
	p kernels.Pairs, act kernels.Activation) bool {
	if dy.Factors.IsZero() {
		r.GroupLinearDX(wy, dy, w.View, p, false)
	} else {
		r.GroupScaledLinear(wy, dy, w, p)
	}
	r.GroupGLUBackward(x, wy, dweight, wy, x, weight, p, act)
	return true
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
