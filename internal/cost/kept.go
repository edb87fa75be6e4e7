package cost

import "math"

// keptUp is the seconds of the shortest call whose figure shows what a GPU does that is kept at work. A figure is of 30
// calls at most, which then last 0.2 s. Shorter ones end before the card comes to its power limit and to a lower clock: on
// H200 products of 1.4 ms ran at 800 TFLOP/s, and all those of 6 ms and more at 690. A step is long.
const keptUp = 6e-3

// keep finds the rates of work that is kept up. Of attention those are of passes with two blocks, which are measured when the
// card is warm from those with one.
func (m *Model) keep() {
	for _, a := range m.set.Attention {
		if both := a.Seconds + a.Further; a.Mask == Full && a.Further > 0 && both >= keptUp {
			x, rate := m.kernelOf(a.key()), math.Log(2*attentionFLOPs(float64(a.Queries*a.Keys), a.Heads, a.Dim, a.Dim)/both)
			if math.IsInf(x.most, 1) || rate > x.most {
				x.most = rate
			}
		}
	}
	for _, p := range m.set.Products {
		if p.Seconds >= keptUp {
			raise(m.keptProducts, productKey{p.Kind, p.DType}, math.Log(Work{Rows: p.Rows, In: p.In, Out: p.Out}.FLOPs()/p.Seconds))
		}
	}
}

// raise keeps the largest rate of a kind of products.
func raise(m map[productKey]float64, k productKey, rate float64) {
	if old, ok := m[k]; !ok || rate > old {
		m[k] = rate
	}
}

// atMost is a rate, or that of products which are kept up where this is less.
func atMost(kept map[productKey]float64, k productKey, rate float64) float64 {
	if most, ok := kept[k]; ok {
		return min(rate, most)
	}
	return rate
}

// ratio is how many times as long as the first block of a pass another one takes. Both were measured together after one
// alone, on a warmer card: what that has added is not of the second block.
func (m *Model) ratio(a *Attention) float64 {
	most := m.kernelOf(a.key()).most
	if math.IsInf(most, 1) {
		return a.Further / a.Seconds
	}
	kept := attentionFLOPs(float64(a.Queries*a.Keys), a.Heads, a.Dim, a.Dim) / math.Exp(most)
	one := max(a.Seconds, kept)
	return max(a.Seconds+a.Further-one, kept) / one
}

// key is what a call's grid is found by.
func (a *Attention) key() attentionKey {
	return attentionKey{a.Backend, a.DType, a.Mask, a.Backward, a.Deterministic}
}
