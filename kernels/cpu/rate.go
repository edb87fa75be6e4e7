package cpu

import (
	"time"

	"github.com/cprun/cprun/kernels/cpu/internal/simd"
)

// ProductRate returns the floating point operations per nanosecond, GFLOP/s, of one goroutine that multiplies n by n
// matrices of float32, at its fastest within d: long enough that a busy machine has a quiet moment in it.
func ProductRate(n int, d time.Duration) float64 {
	a, b, c := make([]float32, n*n), make([]float32, n*n), make([]float32, n*n)
	square := func(x []float32) factor[float32] { return factor[float32]{memory: memory[float32]{data: x}, ld: n} }
	for i := range a {
		a[i], b[i] = float32(i%7)-3, float32(i%5)-2
	}
	p := product[float32]{
		m: n, n: n, k: n, loops: simd.LoopsOf[float32](current()), left: square(a), right: square(b),
		out: memory[float32]{data: c},
	}
	best, s := time.Duration(1<<62), new(scratch)
	for began := time.Now(); time.Since(began) < d; {
		start := time.Now()
		p.compute(s, 0, 0, n, n)
		best = min(best, max(time.Since(start), 1))
	}
	return 2 * float64(n) * float64(n) * float64(n) / float64(best)
}
