package call

import (
	"math"
	"math/rand/v2"
	"testing"
)

// The tables are those of math/rand/v2: with them, the ziggurat makes the same numbers.
func TestStrips(t *testing.T) {
	tables, edge := Strips(), 3.442619855899
	r, want := rand.New(rand.NewPCG(1, 2)), rand.New(rand.NewPCG(1, 2))
	number := func() float64 {
		for {
			u := r.Uint64()
			j, i := int32(u), u>>32&127
			x := float64(j) * float64(tables.W[i])
			switch {
			case uint32(max(j, -j)) < tables.K[i]:
				return x
			case i > 0:
				above, below := tables.F[i-1], tables.F[i]
				if below+float32(r.Float64())*(above-below) < float32(math.Exp(-x*x/2)) {
					return x
				}
			default:
				for {
					x, y := -math.Log(r.Float64())/edge, -math.Log(r.Float64())
					if 2*y >= x*x {
						return math.Copysign(edge+x, float64(j))
					}
				}
			}
		}
	}
	for i := range 1 << 20 {
		if got, want := number(), want.NormFloat64(); math.Abs(got-want) > 1e-15*math.Abs(want) {
			t.Fatalf("number %d is %v, want %v", i, got, want)
		}
	}
}
