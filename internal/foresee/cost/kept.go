package cost

import "math"

// keptUp is the shortest call, in seconds, that shows the rate of a GPU at its power limit. A figure comes from at most
// 30 calls, which then last 0.2 s. Shorter calls end before the card lowers its clock: on H200 products of 1.4 ms ran
// at 800 TFLOP/s, and all products of 6 ms and more at 690. A step is long.
const keptUp = 6e-3

// keep finds the highest rate of attention on a warm card: passes with two blocks are measured after passes with one.
func (m *Model) keep() {
	for _, a := range m.set.Attention {
		if both := a.Seconds + a.Further; a.Mask == Full && a.Further > 0 && both >= keptUp {
			flops := 2 * attentionFLOPs(float64(a.Queries*a.Keys), a.Heads, a.Dim, a.Dim)
			raise(&m.kernelOf(a.key()).most, math.Log(flops/both))
		}
	}
}

// raise keeps the largest rate. Before the first there is no limit, +Inf.
func raise(most *float64, rate float64) {
	if math.IsInf(*most, 1) || rate > *most {
		*most = rate
	}
}

// ratio returns the time of a further block of a pass, over the time of its first. Both were measured together after
// one alone. The card was warmer then, and that difference is no cost of the second block.
func (m *Model) ratio(a *Attention) float64 {
	most := m.kernelOf(a.key()).most
	if math.IsInf(most, 1) {
		return a.Further / a.Seconds
	}
	kept := attentionFLOPs(float64(a.Queries*a.Keys), a.Heads, a.Dim, a.Dim) / math.Exp(most)
	one := max(a.Seconds, kept)
	return max(a.Seconds+a.Further-one, kept) / one
}

// key returns the key of a call's grid.
func (a *Attention) key() attentionKey {
	return attentionKey{a.Backend, a.DType, a.Mask, a.Backward, a.Deterministic}
}
