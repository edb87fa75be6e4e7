package cpu

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/tensor"
)

// BenchmarkDelta measures a forward and a backward pass of one document, with the floating point operations of all
// matrix products, as if key heads shared none.
func BenchmarkDelta(b *testing.B) {
	const keyHeads, heads, chunk = 4, 8, delta.Chunk
	for _, dim := range []int{64, 128} {
		for _, seq := range []int{256, 2048} {
			b.Run(fmt.Sprintf("seq=%d/dim=%d", seq, dim), func(b *testing.B) {
				c, rng := newCPU(b), rand.New(rand.NewPCG(1, 2))
				a := delta.Args{Scale: 0.1, Segments: []delta.Segment{{Lo: 0, Hi: seq}},
					Entered: []int{0}, Followed: []int{0}}
				wide, one := [4]int{1, seq, heads, dim}, [4]int{1, seq, heads, 1}
				keys, state := [4]int{1, seq, keyHeads, dim}, [4]int{1, heads, dim, dim}
				maps := [4]int{1, heads, dim, 2 * dim}
				for i, shape := range [][4]int{keys, keys, wide, one, one, wide, state, state, maps, maps, wide, keys,
					keys, wide, one, one} {
					v := tensor.New(tensor.F32, shape[:]...)
					xs := make([]float64, v.Size())
					for j := range xs {
						if xs[j] = rng.NormFloat64() / 8; delta.Names[i] == "g" {
							xs[j] = -0.03
						}
					}
					near.Encode(v, xs)
					*a.Views()[i] = v
				}
				k := c.Delta()
				for b.Loop() {
					check(b, k.Forward(a))
					check(b, k.Backward(a))
					check(b, c.Stream().Sync(context.Background()))
				}
				flop := float64(seq*heads) * float64(24*dim*dim+44*chunk*dim)
				b.ReportMetric(flop*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
			})
		}
	}
	b.Run("product", func(b *testing.B) {
		rate := 0.0
		for b.Loop() {
			rate = max(rate, ProductRate(256, 100*time.Millisecond))
		}
		b.ReportMetric(rate, "GFLOP/s")
	})
}
