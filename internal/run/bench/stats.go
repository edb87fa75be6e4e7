package bench

import "slices"

// Median returns the middle of xs, or the mean of the two in the middle; 0 of none.
func Median(xs []float64) float64 {
	if len(xs) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(xs))
	n := len(s)
	return (s[(n-1)/2] + s[n/2]) / 2
}

// Spread returns how far the middle half of xs lies apart, or all of few, as a share of their median; 0 of none.
func Spread(xs []float64) float64 {
	s := slices.Sorted(slices.Values(xs))
	if quarter := len(s) / 4; quarter > 0 {
		s = s[quarter : len(s)-quarter]
	}
	if m := Median(xs); m > 0 {
		return (s[len(s)-1] - s[0]) / m
	}
	return 0
}

// FLOPs returns the floating-point operations of a forward pass of attention over that many visible
// (query, key) pairs of a head: two products, over dim and over dimV. A causal sequence of S tokens has S(S+1)/2 pairs.
func FLOPs(pairs, heads, dim, dimV int) float64 {
	return 2 * float64(pairs) * float64(heads) * float64(dim+dimV)
}

// bothOfForward is what forward and backward take together: the backward pass has five
// products where the forward pass has two.
const bothOfForward = 3.5

func rate(flops, seconds float64, ranks int) Rate {
	if seconds <= 0 {
		return Rate{}
	}
	return Rate{Seconds: seconds, TFLOPs: flops / seconds / float64(ranks) / 1e12}
}
