package main

import (
	"fmt"
	"log"
	"math"
	"math/rand/v2"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/tensor"
)

const tolerance = 1e-5 // absolute, for float32 values around 1

// results holds the outputs of a forward and a backward pass: out, lse, dq, dk, dv.
type results struct {
	acc   attention.Partial
	grads attention.Grads
}

// newResults allocates results for a number of rows, in float32.
func newResults(rows int) results {
	row := func(heads, dim int) tensor.View { return tensor.New(tensor.F32, rows, heads, dim) }
	return results{
		attention.Partial{O: row(heads, dim), LSE: row(heads, 1)},
		attention.Grads{DQ: row(heads, dim), DK: row(kvHeads, dim), DV: row(kvHeads, dim)},
	}
}

func (r results) views() [5]tensor.View {
	return [5]tensor.View{r.acc.O, r.acc.LSE, r.grads.DQ, r.grads.DK, r.grads.DV}
}

// put copies the results of a part of the sequence into the given rows of the whole.
func (r results) put(part results, rows []int) {
	from := part.views()
	for i, whole := range r.views() {
		tensor.Scatter(whole, from[i], rows)
	}
}

// compare prints the largest error of each float32 result against a float64 reference. It ends the program with status
// 1 if one exceeds the tolerance.
func (r results) compare(want results) {
	w := want.views()
	for i, name := range []string{"out", "lse", "dq", "dk", "dv"} {
		worst, got := 0.0, tensor.Data[float32](r.views()[i])
		for j, x := range tensor.Data[float64](w[i]) {
			worst = max(worst, math.Abs(float64(got[j])-x))
		}
		fmt.Printf("%-3s  largest error %.1e\n", name, worst)
		if !(worst <= tolerance) { // NaN fails as well
			log.Fatalf("%s is off by more than %.0e", name, tolerance)
		}
	}
}

// random returns a random float32 tensor [1, seq, heads, dim].
func random(heads int) tensor.View {
	xs := make([]float32, seq*heads*dim)
	for i := range xs {
		xs[i] = float32(rand.NormFloat64())
	}
	return tensor.FromSlice(xs, seq, heads, dim)
}
