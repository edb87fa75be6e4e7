package cpu

import (
	"math"
	"testing"
)

// ulps is the distance of got from want in units of want's last float32 place.
func ulps(got float32, want float64) float64 {
	near := float32(want)
	unit := float64(math.Nextafter32(near, float32(math.Inf(1)))) - float64(near)
	return math.Abs(float64(got)-want) / unit
}

func TestExp32(t *testing.T) {
	worst, at := 0.0, float32(0)
	check := func(x float32) {
		u := ulps(exp32(x), math.Exp(float64(x)))
		if !(u <= worst) {
			worst, at = u, x
		}
	}
	// Every exponent and sign, with mantissas that are spread by a step prime to 2^23.
	for bits := uint32(0); bits < 1<<31-1<<12; bits += 1021 {
		for _, x := range []float32{math.Float32frombits(bits), -math.Float32frombits(bits)} {
			if x > -103 && x < 88.7 {
				check(x)
			}
		}
	}
	// The range that softmax uses, densely, and the neighbours of every halfway point of n.
	for x := float32(-104); x < 88.7; x += 1.0 / 4096 {
		check(x)
	}
	for n := -150; n < 128; n++ {
		x := float32((float64(n) + 0.5) * math.Ln2)
		for range 4 {
			x = math.Nextafter32(x, float32(math.Inf(-1)))
		}
		for range 8 {
			if x < 88.7 {
				check(x)
			}
			x = math.Nextafter32(x, float32(math.Inf(1)))
		}
	}
	if !(worst < 1.5) {
		t.Errorf("exp32(%v) = %v, off by %.2f ulp, want below 1.5", at, exp32(at), worst)
	}
	t.Logf("worst error %.3f ulp at %v", worst, at)
}

func TestExp32Edges(t *testing.T) {
	inf := float32(math.Inf(1))
	for _, c := range []struct{ x, want float32 }{
		{-inf, 0}, {inf, inf}, {0, 1}, {float32(math.Copysign(0, -1)), 1}, {-104, 0}, {-1e30, 0},
		{89, inf}, {1e30, inf}, {-103.5, math.Float32frombits(1)}, {-88, 6.0546017e-39},
	} {
		if got := exp32(c.x); got != c.want {
			t.Errorf("exp32(%v) = %v, want %v", c.x, got, c.want)
		}
	}
	if got := exp32(float32(math.NaN())); got == got {
		t.Errorf("exp32(NaN) = %v", got)
	}
}

func BenchmarkExpRow32(b *testing.B) {
	x, y := make([]float32, 128), make([]float32, 128)
	for i := range x {
		x[i] = -float32(i) / 10
	}
	for b.Loop() {
		copy(y, x)
		expRow32(y, 0)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/128/float64(b.N), "ns/exp")
}
