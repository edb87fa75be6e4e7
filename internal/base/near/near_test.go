package near

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

var nan, inf = math.NaN(), math.Inf(1)

// A disagreeing value is found at any position, in either tensor, with any neighbours.
func TestBadElements(t *testing.T) {
	for _, c := range []struct {
		x, y                          float64
		finite, infinities, nonFinite float64
	}{
		{1, 1, 0, 0, 0}, {1, 3, 2, 2, 2}, {-1, 1, 2, 2, 2}, {0, math.Copysign(0, -1), 0, 0, 0},
		{math.MaxFloat64, -math.MaxFloat64, inf, inf, inf},
		{nan, 1, inf, inf, inf}, {nan, nan, inf, inf, 0}, {nan, inf, inf, inf, inf}, {nan, -inf, inf, inf, inf},
		{inf, 1, inf, inf, inf}, {inf, inf, inf, 0, 0}, {-inf, -inf, inf, 0, 0}, {inf, -inf, inf, inf, inf},
		{-inf, 1, inf, inf, inf},
	} {
		for at := range 5 {
			for contract, want := range []float64{c.finite, c.infinities, c.nonFinite} {
				a, b := []float64{1, 2, 3, 4, 5}, []float64{1, 2, 3, 4, 5}
				a[at], b[at] = c.x, c.y
				for range 2 {
					d, err := Of(a, b, Contract(contract))
					if err != nil || d.Abs != want || want > 0 && d.At != at {
						t.Errorf("%v and %v at %d, contract %d: %+v, %v, want %v", c.x, c.y, at, contract, d, err, want)
					}
					if r := d.Relative(); (r == 0) != (want == 0) || (r > 1e9) != math.IsInf(want, 1) {
						t.Errorf("%v and %v at %d, contract %d: relative %v", c.x, c.y, at, contract, r)
					}
					if (d.Norm == 0) != (want == 0) || math.IsInf(d.Norm, 1) != math.IsInf(want, 1) {
						t.Errorf("%v and %v at %d, contract %d: norm %v", c.x, c.y, at, contract, d.Norm)
					}
					within := Within(a, b, Contract(contract), 1e-3) == nil
					each := Each(a, b, Contract(contract), func(int) float64 { return 1e-3 }) == nil
					if within != (want == 0) || each != within {
						t.Errorf("%v and %v at %d, contract %d: within %t, each %t", c.x, c.y, at, contract, within, each)
					}
					a, b = b, a
				}
			}
		}
	}
}

// A later difference does not hide a bad element.
func TestNothingReplacesNaN(t *testing.T) {
	for _, bad := range []float64{nan, inf, -inf} {
		for at := range 3 {
			a := []float64{1.5, 2.5, 3.5}
			a[at] = bad
			if d, err := Of(a, []float64{1, 2, 3}, Finite); err != nil || !math.IsInf(d.Abs, 1) || d.At != at {
				t.Errorf("%v at %d: %+v, %v", bad, at, d, err)
			}
		}
	}
}

func TestNumbers(t *testing.T) {
	d, err := Of([]float32{3, -4, 0, 2}, []float64{3, -8, 3, 2}, Finite)
	if err != nil || d.Abs != 4 || d.At != 1 || d.Largest != 8 || d.Relative() != 0.5 {
		t.Errorf("%+v, %v", d, err)
	}
	if want := 5 / math.Sqrt(9+64+9+4); math.Abs(d.Norm-want) > 1e-15 {
		t.Errorf("norm %v, want %v", d.Norm, want)
	}
	// At is the first of equal differences, and Largest is finite.
	d, err = Of([]float64{2, 3, inf}, []float64{1, 2, inf}, Infinities)
	if err != nil || d.Abs != 1 || d.At != 0 || d.Largest != 2 {
		t.Errorf("%+v, %v", d, err)
	}
	// Squares neither overflow nor underflow.
	for _, size := range []float64{1e-300, 1e300} {
		if d, err := Of([]float64{size, 0}, []float64{size, size}, Finite); err != nil ||
			math.Abs(d.Norm-math.Sqrt(0.5)) > 1e-15 {
			t.Errorf("%g: %+v, %v", size, d, err)
		}
	}
	// Only zeros are within a share of zeros.
	zero := []float64{0, 0}
	must.Do(t, Within(zero, zero, Finite, 0))
	if err := Within([]float64{0, 1e-300}, zero, Finite, 1e9); err == nil {
		t.Error("1e-300 is within a share of zeros")
	}
	must.Do(t, Within([]float64{1, 1.5}, []float64{1, 2}, Finite, 0.25))
}

// Each element has its own bound, and NaN is within none.
func TestEach(t *testing.T) {
	bounds := func(i int) float64 { return []float64{0, 1, inf}[i] }
	for _, c := range []struct {
		got []float64
		ok  bool
	}{{[]float64{0, 1, 1e9}, true}, {[]float64{0, 1.5, 0}, false}, {[]float64{1e-9, 0, 0}, false},
		{[]float64{0, nan, 0}, false}} {
		if err := Each(c.got, []float64{0, 0, 0}, Finite, bounds); (err == nil) != c.ok {
			t.Errorf("%v: %v", c.got, err)
		}
	}
	if err := Each([]float64{1}, []float64{1}, Finite, func(int) float64 { return nan }); err == nil {
		t.Error("a bound of NaN allows something")
	}
}

func TestNothingToCompare(t *testing.T) {
	some := []float64{1, 2}
	for _, c := range [][2][]float64{{nil, nil}, {{}, {}}, {some, nil}, {nil, some}, {some, some[:1]}, {some[:1], some}} {
		_, err := Of(c[0], c[1], NonFinite)
		within := Within(c[0], c[1], NonFinite, inf)
		each := Each(c[0], c[1], NonFinite, func(int) float64 { return inf })
		if err == nil || within == nil || each == nil {
			t.Errorf("%v and %v: %v, %v, %v", c[0], c[1], err, within, each)
		}
	}
}

// The distance stays the same if the tensors swap.
func TestSwapped(t *testing.T) {
	values := []float64{0, 1, -3, 1e300, nan, inf, -inf}
	for i := range values {
		for j := range values {
			a, b := slices.Clone(values), slices.Clone(values)
			a[i], b[j] = values[j], values[i]
			for c := Finite; c <= NonFinite; c++ {
				x, _ := Of(a, b, c)
				y, _ := Of(b, a, c)
				if x.Abs != y.Abs || x.At != y.At {
					t.Errorf("%s: %+v and %+v", fmt.Sprint(a, b, c), x, y)
				}
			}
		}
	}
}
