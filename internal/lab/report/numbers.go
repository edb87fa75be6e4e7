package report

import (
	"math"
	"slices"
)

// median returns the middle of what is known, NaN of nothing.
func median(x []float64) float64 {
	known := slices.DeleteFunc(slices.Clone(x), math.IsNaN)
	if len(known) == 0 {
		return math.NaN()
	}
	slices.Sort(known)
	if n := len(known); n%2 == 0 {
		return (known[n/2-1] + known[n/2]) / 2
	}
	return known[len(known)/2]
}

// known writes x by f where there is one, else a dash.
func known(x float64, f func(float64) string) cell {
	if x == 0 || math.IsNaN(x) || math.IsInf(x, 0) {
		return cell{Text: "–", Number: true}
	}
	return cell{Text: f(x), Number: true}
}
