package cpu

import (
	"math"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/tensor"
)

// TestProducts compares the three products of linear layers of random shapes with sums in float64, on several workers
// and at every level. Some shapes have several blocks of the inner index and copied factors.
func TestProducts(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(3))
	atLevels(t, func(t *testing.T) {
		c := newTestCPU(t)
		rng := rand.New(rand.NewPCG(1, 1))
		for range 30 {
			checkProducts(t, c, rng, 1+rng.IntN(70), 1+rng.IntN(70), 1+rng.IntN(70))
		}
		checkProducts(t, c, rng, 5, 3, 1024)
		checkProducts(t, c, rng, 7, 1024, 5)
		checkProducts(t, c, rng, 300, 20, 31)
		checkProducts(t, c, rng, 30, 100, 600)
	})
}

// checkProducts checks the products for rows inputs of in elements and out outputs.
func checkProducts(t *testing.T, c *Kernels, rng *rand.Rand, rows, out, in int) {
	t.Helper()
	x, w, y, dy := normal(
		rng,
		1,
		rows,
		1,
		in,
	), normal(
		rng,
		1,
		out,
		1,
		in,
	), normal(
		rng,
		1,
		rows,
		1,
		out,
	), normal(
		rng,
		1,
		rows,
		1,
		out,
	)
	dx, dw, add := normal(rng, 1, rows, 1, in), normal(rng, 1, out, 1, in), normal(rng, 1, rows, 1, out)
	xs, ws, ys, dys := tensor.Data[float32](
		x,
	), tensor.Data[float32](
		w,
	), tensor.Data[float32](
		y,
	), tensor.Data[float32](
		dy,
	)
	dxs, dws, adds := tensor.Data[float32](dx), tensor.Data[float32](dw), tensor.Data[float32](add)
	oldX, oldW := append([]float32(nil), dxs...), append([]float32(nil), dws...)
	c.Linear(y, x, w, add)
	c.LinearDX(dx, dy, w, true)
	c.LinearDW(dw, dy, x, true)
	settle(t, c)
	near := func(what string, m, n, k int, got, old []float32, term func(i, j, l int) float64) {
		t.Helper()
		for i := range m {
			for j := range n {
				want, size := float64(old[i*n+j]), 1.0
				for l := range k {
					want += term(i, j, l)
					size += math.Abs(term(i, j, l))
				}
				if e := near.Gap(float64(got[i*n+j]), want, near.Finite); !(e <= 1e-6*size) {
					t.Fatalf(
						"%s of %d x %d x %d: element %d, %d is %v, want %v",
						what,
						rows,
						out,
						in,
						i,
						j,
						got[i*n+j],
						want,
					)
				}
			}
		}
	}
	near("y", rows, out, in, ys, adds, func(i, j, l int) float64 { return float64(xs[i*in+l]) * float64(ws[j*in+l]) })
	near(
		"dx",
		rows,
		in,
		out,
		dxs,
		oldX,
		func(i, j, l int) float64 { return float64(dys[i*out+l]) * float64(ws[l*in+j]) },
	)
	near(
		"dw",
		out,
		in,
		rows,
		dws,
		oldW,
		func(i, j, l int) float64 { return float64(dys[l*out+i]) * float64(xs[l*in+j]) },
	)
}
