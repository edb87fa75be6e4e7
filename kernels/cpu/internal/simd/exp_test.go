package simd

import (
	"math"
	"testing"
)

// each runs f at every level that this machine supports.
func each(t *testing.T, f func(t *testing.T, l Loops[float32])) {
	for l := Generic; l <= Best(); l++ {
		t.Run(l.String(), func(t *testing.T) { f(t, LoopsOf[float32](l)) })
	}
}

// ulp returns the unit in the last place of float32 at x.
func ulp(x float64) float64 {
	a := math.Abs(x)
	if a < 0x1p-126 {
		return 0x1p-149
	}
	_, e := math.Frexp(a)
	return math.Ldexp(1, e-24)
}

// expStride is TestExp's step through the float32, odd so that all low bits occur.
const expStride = 2003

// TestExp checks that the error of an exponential is below 2 units in the last place, for special values also.
func TestExp(t *testing.T) {
	each(t, func(t *testing.T, l Loops[float32]) {
		const batch = 1021
		var x, y [batch]float32
		worst := 0.0
		for bits := uint64(0); bits < 1<<32; {
			n := 0
			for ; n < batch && bits < 1<<32; bits += expStride {
				x[n] = math.Float32frombits(uint32(bits))
				n++
			}
			l.ExpSum(y[:n], x[:n], 0)
			for i, got := range y[:n] {
				worst = max(worst, expError(t, x[i], got))
			}
		}
		t.Logf("%.3f units at most", worst)
		if !(worst < 2) {
			t.Errorf("an error of %.3f units in the last place", worst)
		}
	})
}

// expError returns the error of got as e^x, in units in the last place. It fails the test if an exact value is wrong.
func expError(t *testing.T, x, got float32) float64 {
	want := math.Exp(float64(x))
	switch {
	case x != x:
		if got == got {
			t.Errorf("exp(NaN) = %g", got)
		}
		return 0
	case want > math.MaxFloat32:
		if !math.IsInf(float64(got), 1) && float64(x) > 88.7229 {
			t.Errorf("exp(%g) = %g", x, got)
		}
		return 0
	case math.IsInf(float64(x), -1) && got != 0:
		t.Errorf("exp(-Inf) = %g", got)
	}
	return math.Abs(float64(got)-want) / ulp(want)
}

// TestExpSum checks sums with special values, and that SumExp returns the bits of ExpSum.
func TestExpSum(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	each(t, func(t *testing.T, l Loops[float32]) {
		for n := range 130 {
			x, y := make([]float32, n), make([]float32, n)
			for i := range x {
				x[i] = float32(i%37) / 3
			}
			top := l.MaxOf(x)
			if want := maxOf(x); top != want {
				t.Errorf("%d elements: largest %g, want %g", n, top, want)
			}
			sum, want := l.ExpSum(y, x, top), 0.0
			if alone := l.SumExp(x, top); alone != sum {
				t.Errorf("%d elements: the sum is %v, alone %v", n, sum, alone)
			}
			for _, e := range y {
				want += float64(e)
			}
			if !(math.Abs(sum-want) <= 1e-13*want) {
				t.Errorf("%d elements: sum %v, want %v", n, sum, want)
			}
			if n == 0 {
				continue
			}
			for _, at := range []int{0, n / 2, n - 1} {
				x[at] = nan
				if top := l.MaxOf(x); top != top || !math.IsNaN(l.SumExp(x, top)) {
					t.Errorf("%d elements, NaN at %d: largest %g, sum %g", n, at, top, l.SumExp(x, top))
				}
				x[at] = -inf
				if y := l.ExpSum(y, x, 0); !(y < math.Inf(1)) {
					t.Errorf("%d elements, -Inf at %d: sum %g", n, at, y)
				}
				x[at] = inf
				if got := l.MaxOf(x); got != inf || !math.IsInf(l.SumExp(x, 0), 1) {
					t.Errorf("%d elements, Inf at %d: largest %g", n, at, got)
				}
				x[at] = 0
			}
		}
	})
}
