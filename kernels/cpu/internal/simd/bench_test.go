package simd

import (
	"math/rand/v2"
	"testing"
)

// BenchmarkOps measures operations on rows in the first-level cache, in elements per second. It copies the inputs there
// each time.
func BenchmarkOps(b *testing.B) {
	const n = 2048
	for l := Generic; l <= Best(); l++ {
		for _, o := range operations() {
			_, rows := input(rand.New(rand.NewPCG(1, 1)), o.rows, n)
			first := clones(rows)
			b.Run(l.String()+"/"+o.name, func(b *testing.B) {
				for b.Loop() {
					for r := range rows[:o.results] {
						copy(rows[r], first[r])
					}
					o.in32(LoopsOf[float32](l), rows)
				}
				b.ReportMetric(n*float64(b.N)/b.Elapsed().Seconds()/1e9, "Gelement/s")
			})
		}
	}
}
