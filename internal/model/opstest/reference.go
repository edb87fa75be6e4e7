package opstest

import (
	"math"
	"slices"
	"sort"

	"github.com/cprun/cprun/kernels"
)

// The references compute row-major matrices in float64, with one loop over each definition. They return new slices and
// change nothing.

// refLinear returns x [rows, in] times w [out, in] transposed.
func refLinear(x, w []float64, rows, in, out int) []float64 {
	y := zeros(rows * out)
	for r := range rows {
		for o := range out {
			sums, xs := [4]float64{}, x[r*in:][:in] // four, as each waits for the addition before it
			for i, v := range w[o*in:][:in] {
				sums[i%4] += v * xs[i]
			}
			y[r*out+o] = sums[0] + sums[1] + sums[2] + sums[3]
		}
	}
	return y
}

// refLinearBackward returns the gradients of x and w given the gradient of y.
func refLinearBackward(dy, x, w []float64, rows, in, out int) (dx, dw []float64) {
	dx, dw = zeros(rows*in), zeros(out*in)
	for r := range rows {
		for o := range out {
			for i := range in {
				dx[r*in+i] += dy[r*out+o] * w[o*in+i]
				dw[o*in+i] += dy[r*out+o] * x[r*in+i]
			}
		}
	}
	return dx, dw
}

// refNorm returns RMSNorm of rows of len(w) elements, and inv.
func refNorm(x, w []float64, eps float64) (y, inv []float64) {
	n := len(w)
	for r := range len(x) / n {
		sum := 0.0
		for _, v := range x[r*n : (r+1)*n] {
			sum += v * v
		}
		scale := 1 / math.Sqrt(sum/float64(n)+eps)
		inv = append(inv, scale)
		for i, v := range x[r*n : (r+1)*n] {
			y = append(y, v*scale*w[i])
		}
	}
	return y, inv
}

// refNormBackward applies the chain rule through inv. The derivative of inv by x_i is -inv^3 * x_i / n.
func refNormBackward(dy, x, w []float64, eps float64) (dx, dw []float64) {
	n := len(w)
	dx, dw = zeros(len(x)), zeros(n)
	_, inv := refNorm(x, w, eps)
	for r := range inv {
		dinv := 0.0
		for i := range n {
			dinv += dy[r*n+i] * x[r*n+i] * w[i]
		}
		for i := range n {
			dw[i] += dy[r*n+i] * x[r*n+i] * inv[r]
			dx[r*n+i] = dy[r*n+i]*w[i]*inv[r] - dinv*math.Pow(inv[r], 3)*x[r*n+i]/float64(n)
		}
	}
	return dx, dw
}

// refRope rotates the first 2*pairs of the elements of x [rows, heads, dim] by cos, sin [rows, pairs], or by the
// transpose.
func refRope(x, cos, sin []float64, rows, heads, dim int, inverse bool) []float64 {
	y := clone(x)
	for r := range rows {
		pairs := len(cos) / rows
		for h := range heads {
			for i := range pairs {
				c, s := cos[r*pairs+i], sin[r*pairs+i]
				if inverse {
					s = -s
				}
				at := (r*heads + h) * dim
				y[at+i] = x[at+i]*c - x[at+pairs+i]*s
				y[at+pairs+i] = x[at+pairs+i]*c + x[at+i]*s
			}
		}
	}
	return y
}

// refActivation returns an activation and its derivative.
func refActivation(x float64, act kernels.Activation) (y, dy float64) {
	switch act {
	case kernels.SiLU:
		s := 1 / (1 + math.Exp(-x))
		return x * s, s + x*s*(1-s)
	case kernels.ClampedSiLU:
		g := math.Min(x, 7)
		s := 1 / (1 + math.Exp(-1.702*g))
		if x > 7 {
			return g * s, 0
		}
		return g * s, s + 1.702*g*s*(1-s)
	}
	slope := math.Sqrt(2 / math.Pi)
	t := math.Tanh(slope * (x + 0.044715*math.Pow(x, 3)))
	return x / 2 * (1 + t), (1+t)/2 + x/2*(1-t*t)*slope*(1+3*0.044715*x*x)
}

// refUp returns the other factor of a gated activation and its derivative.
func refUp(x float64, act kernels.Activation) (y, dy float64) {
	if act != kernels.ClampedSiLU {
		return x, 1
	}
	if math.Abs(x) > 7 {
		return math.Copysign(7, x) + 1, 0
	}
	return x + 1, 1
}

func refGLU(gate, up []float64, act kernels.Activation) []float64 {
	y := zeros(len(gate))
	for i, g := range gate {
		a, _ := refActivation(g, act)
		u, _ := refUp(up[i], act)
		y[i] = a * u
	}
	return y
}

func refGLUBackward(dy, gate, up []float64, act kernels.Activation) (dgate, dup []float64) {
	dgate, dup = zeros(len(dy)), zeros(len(dy))
	for i, g := range gate {
		a, slope := refActivation(g, act)
		u, slopeU := refUp(up[i], act)
		dgate[i], dup[i] = dy[i]*u*slope, dy[i]*a*slopeU
	}
	return dgate, dup
}

// refGate returns x times the sigmoids of gates, one for each element or for each row, and the gradients given dy.
func refGate(dy, x, gate []float64) (y, dx, dgate []float64) {
	y, dx, dgate = zeros(len(x)), zeros(len(x)), zeros(len(gate))
	for i, v := range x {
		at := i * len(gate) / len(x)
		s := 1 / (1 + math.Exp(-gate[at]))
		y[i], dx[i] = v*s, dy[i]*s
		dgate[at] += dy[i] * v * s * (1 - s)
	}
	return y, dx, dgate
}

func refMap(xs []float64, f func(float64) float64) []float64 {
	ys := zeros(len(xs))
	for i, x := range xs {
		ys[i] = f(x)
	}
	return ys
}

// refEmbed returns the rows ids of table [vocab, n].
func refEmbed(table []float64, ids []int32, n int) []float64 {
	var y []float64
	for _, id := range ids {
		y = append(y, table[int(id)*n:(int(id)+1)*n]...)
	}
	return y
}

func refEmbedBackward(dy []float64, ids []int32, vocab, n int) []float64 {
	d := zeros(vocab * n)
	for r, id := range ids {
		for i := range n {
			d[int(id)*n+i] += dy[r*n+i]
		}
	}
	return d
}

// refCrossEntropy returns the sum of losses of rows with a target, and its gradient.
func refCrossEntropy(logits []float64, targets []int32, vocab int) (loss float64, grad []float64) {
	grad = zeros(len(logits))
	for r, target := range targets {
		if target < 0 {
			continue
		}
		row := logits[r*vocab : (r+1)*vocab]
		top, sum := math.Inf(-1), 0.0
		for _, l := range row {
			top = math.Max(top, l)
		}
		for _, l := range row {
			sum += math.Exp(l - top)
		}
		for i, l := range row {
			grad[r*vocab+i] = math.Exp(l-top) / sum
		}
		hit := row[target] - top - math.Log(sum)
		loss -= hit
		grad[r*vocab+int(target)] = math.Expm1(hit)
	}
	return loss, grad
}

func plus(a, b []float64) []float64 {
	c := zeros(len(a))
	for i := range a {
		c[i] = a[i] + b[i]
	}
	return c
}

// refScores returns a router's scores of a row of logits.
func refScores(logits []float64, sigmoid bool) []float64 {
	top, sum := slices.Max(logits), 0.0
	return refMap(refMap(logits, func(x float64) float64 {
		if sigmoid {
			return 1 / (1 + math.Exp(-x))
		}
		sum += math.Exp(x - top)
		return math.Exp(x - top)
	}), func(x float64) float64 {
		if sigmoid {
			return x
		}
		return x / sum
	})
}

// refRoute returns the experts that a row of logits chooses: all sorted, those of kept groups only.
func refRoute(logits, correction []float64, chosen int, r kernels.Router) (choice []int32) {
	keys := plus(refScores(logits, r.Sigmoid), correction)
	falling := func(keys []float64, of []int) []int {
		list := slices.Clone(of)
		sort.SliceStable(list, func(i, j int) bool { return keys[list[i]] > keys[list[j]] })
		return list
	}
	count := max(1, r.Groups)
	size, all := len(keys)/count, make([]int, len(keys))
	for i := range all {
		all[i] = i
	}
	sums := zeros(count)
	for g := range count {
		for _, e := range falling(keys, all[g*size:][:size])[:min(2, size)] {
			sums[g] += keys[e]
		}
	}
	groups, allowed := falling(sums, all[:count]), []int{}
	for _, e := range falling(keys, all) {
		if place := slices.Index(groups, e/size); r.Groups <= 1 || place < r.Kept {
			allowed = append(allowed, e)
		}
	}
	for _, e := range allowed[:chosen] {
		choice = append(choice, int32(e))
	}
	return choice
}

// refDivisor returns the divisor of the chosen scores and the factor of weights.
func refDivisor(scores []float64, choice []int32, r kernels.Router) (divisor, scale float64) {
	for _, e := range choice {
		divisor += scores[e]
	}
	if r.Sigmoid {
		divisor += 1e-20
	}
	if !r.Normalize {
		divisor = 1
	}
	if scale = r.Scale; scale == 0 {
		scale = 1
	}
	return divisor, scale
}

// refWeights returns the weights of the choices of a row of logits.
func refWeights(logits []float64, choice []int32, r kernels.Router) (weights []float64) {
	scores := refScores(logits, r.Sigmoid)
	divisor, scale := refDivisor(scores, choice, r)
	for _, e := range choice {
		weights = append(weights, scale*scores[e]/divisor)
	}
	return weights
}

// refRouteBackward multiplies dweight by the derivatives of weights by scores, and of scores by logits.
func refRouteBackward(dweight, logits []float64, choice []int32, r kernels.Router) []float64 {
	scores, dscores := refScores(logits, r.Sigmoid), zeros(len(logits))
	divisor, scale := refDivisor(scores, choice, r)
	for i, a := range choice {
		dscores[a] += dweight[i] * scale / divisor
		for _, b := range choice {
			if r.Normalize {
				dscores[b] -= dweight[i] * scale * scores[a] / (divisor * divisor)
			}
		}
	}
	if !r.Sigmoid {
		return refSoftmaxBackward(dscores, logits)
	}
	for e, s := range scores {
		dscores[e] *= s * (1 - s)
	}
	return dscores
}

// refSoftmaxBackward multiplies d by the derivatives of the softmax of logits.
func refSoftmaxBackward(d, logits []float64) []float64 {
	p, out, mean := refScores(logits, false), zeros(len(logits)), 0.0
	for i := range p {
		mean += p[i] * d[i]
	}
	for i := range p {
		out[i] = p[i] * (d[i] - mean)
	}
	return out
}

// refSort sorts the choices of pairs by expert.
func refSort(choice []int32, experts, chosen int) (tokens, places, starts []int32, pair []int) {
	places, starts = make([]int32, len(choice)), make([]int32, experts+1)
	for i, c := range choice {
		pair = append(pair, i)
		for e := range starts {
			if int(c) < e {
				starts[e]++
			}
		}
	}
	sort.SliceStable(pair, func(i, j int) bool { return choice[pair[i]] < choice[pair[j]] })
	for place, i := range pair {
		tokens, places[i] = append(tokens, int32(i/chosen)), int32(place)
	}
	return tokens, places, starts, pair
}

// refGroupLinear returns the rows of x times the transposes of their experts' matrices.
func refGroupLinear(d deal, x, w []float64, in, out int, byToken bool) (y []float64) {
	for i := range d.pairs() {
		y = append(y, refLinear(d.row(x, in, i, byToken), w[d.expert(i)*in*out:][:in*out], 1, in, out)...)
	}
	return y
}

func refGroupLinearDX(d deal, dy, w []float64, in, out int, byToken bool) []float64 {
	dx := zeros(d.pairs() * in)
	for i := range d.pairs() {
		ws, to := w[d.expert(i)*in*out:], dx[i*in:][:in]
		for o, g := range d.row(dy, out, i, byToken) {
			for c := range to {
				to[c] += g * ws[o*in+c]
			}
		}
	}
	return dx
}

func refGroupLinearDW(d deal, dy, x []float64, in, out int, dyByToken, xByToken bool) []float64 {
	dw := zeros(d.experts * out * in)
	for i := range d.pairs() {
		to, xs := dw[d.expert(i)*in*out:], d.row(x, in, i, xByToken)
		for o, g := range d.row(dy, out, i, dyByToken) {
			for c, v := range xs {
				to[o*in+c] += g * v
			}
		}
	}
	return dw
}

// refGroupGLU returns y of the halves of rows of x, and the gradients of the sum of weight*da*y by x, da and weight.
func refGroupGLU(d deal, x, da, weight []float64, n int, act kernels.Activation) (y, dx, wy, dweight []float64) {
	dweight = zeros(d.pairs())
	for i, pair := range d.pair {
		gate, up, w := x[2*i*n:][:n], x[(2*i+1)*n:][:n], weight[pair]
		row := refGLU(gate, up, act)
		dgate, dup := refGLUBackward(refMap(da[i*n:][:n], func(v float64) float64 { return w * v }), gate, up, act)
		y, dx = append(y, row...), append(append(dx, dgate...), dup...)
		wy = append(wy, refMap(row, func(v float64) float64 { return w * v })...)
		for c, v := range row {
			dweight[pair] += da[i*n+c] * v
		}
	}
	return y, dx, wy, dweight
}
