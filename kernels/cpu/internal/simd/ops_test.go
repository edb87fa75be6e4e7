package simd

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/tensor"
)

// An op is an operation in place on rows of equal length. The first rows hold its results.
type op struct {
	name    string
	rows    int
	results int
	in32    func(l Loops[float32], x [][]float32)
	in64    func(l Loops[float64], x [][]float64)
	units   float64                     // tolerance against float64, in units in the last place of size
	size    func(x [][]float64) float64 // size of the terms that cancel, from the inputs; nil: that of the result
	alone   bool                        // an element's result does not depend on its neighbours
	same    bool                        // all levels return the same bits
}

func addRows[T tensor.Float](l Loops[T], x [][]T)  { l.AddTo(x[0], x[0], x[1]) }
func expRow[T tensor.Float](l Loops[T], x [][]T)   { l.ExpSum(x[0], x[0], 1.5) }
func gate[T tensor.Float](l Loops[T], x [][]T)     { l.SwiGLU(x[0], x[0], x[1]) }
func gateBack[T tensor.Float](l Loops[T], x [][]T) { l.SwiGLUBackward(x[0], x[1], x[2], x[0], x[1]) }
func adam[T tensor.Float](l Loops[T], x [][]T) {
	for i := range x[2] {
		x[2][i] *= x[2][i] // second moments are not negative
	}
	l.AdamW(x[0], x[3], x[1], x[2], &AdamStep[T]{0.5, 0.125, 0.75, 0.25, 0.875, 0.0625, 0.5, 1e-6})
}

func normRow[T tensor.Float](l Loops[T], x [][]T) {
	l.RMSNorm(x[0], x[1][:min(1, len(x[1]))], x[2], x[3], 1e-5)
}

func backRow[T tensor.Float](add bool) func(l Loops[T], x [][]T) {
	return func(l Loops[T], x [][]T) {
		dw := make([]float64, len(x[1]))
		for i, v := range x[1] {
			dw[i] = float64(v)
		}
		l.RMSNormBackward(x[0], dw, x[2], x[3], x[4][:min(1, len(x[4]))], x[5], add)
		for i, v := range dw {
			x[1][i] = T(v)
		}
	}
}

func turnRow[T tensor.Float](l Loops[T], x [][]T) {
	half := len(x[0]) / 2
	l.Turn(x[0][:2*half], x[1][:2*half], x[2][:half], x[3][:half], -1)
}

// large bounds normal deviates and products of a few of them.
func large([][]float64) float64 { return 16 }

func operations() []op {
	return []op{
		{"AddTo", 2, 1, addRows[float32], addRows[float64], 1, large, true, true},
		{"ExpSum", 1, 1, expRow[float32], expRow[float64], 8, nil, true, false},
		{"SwiGLU", 2, 1, gate[float32], gate[float64], 3, nil, true, false},
		{"SwiGLUBackward", 3, 2, gateBack[float32], gateBack[float64], 3, large, true, false},
		{"AdamW", 4, 3, adam[float32], adam[float64], 4, large, true, true},
		{"RMSNorm", 4, 2, normRow[float32], normRow[float64], 3, nil, false, false},
		{"RMSNormBackward", 6, 2, backRow[float32](false), backRow[float64](false), 4, large, false, false},
		{"RMSNormBackwardAdd", 6, 2, backRow[float32](true), backRow[float64](true), 4, large, false, false},
		{"Turn", 4, 1, turnRow[float32], turnRow[float64], 1, large, false, true},
	}
}

// guard surrounds every row and must stay unchanged.
const guard, guards = 12345, 20

// input returns rows of n normal deviates each, at an offset from aligned memory.
func input(rng *rand.Rand, rows, n int) (whole, inner [][]float32) {
	for range rows {
		at := rng.IntN(guards)
		row := slices.Repeat([]float32{guard}, at+n+guards)
		for i := range n {
			row[at+i] = float32(rng.NormFloat64())
		}
		whole, inner = append(whole, row), append(inner, row[at:at+n:at+n])
	}
	return whole, inner
}

func widen(x [][]float32) [][]float64 {
	wide := make([][]float64, len(x))
	for r, row := range x {
		wide[r] = make([]float64, len(row))
		for i, v := range row {
			wide[r][i] = float64(v)
		}
	}
	return wide
}

func clones(x [][]float32) [][]float32 {
	c := make([][]float32, len(x))
	for i, row := range x {
		c[i] = slices.Clone(row)
	}
	return c
}

// TestOps compares every operation, at every level and on rows of all lengths and alignments, with float64. Operations
// must not write outside of their rows.
func TestOps(t *testing.T) {
	each(t, func(t *testing.T, l Loops[float32]) {
		for _, o := range operations() {
			t.Run(o.name, func(t *testing.T) {
				rng := rand.New(rand.NewPCG(1, 1))
				worst := 0.0
				for n := range 200 {
					whole, rows := input(rng, o.rows, n)
					want, twin := widen(rows), clones(rows)
					size := 0.0
					if o.size != nil {
						size = o.size(want)
					}
					o.in32(l, rows)
					o.in64(LoopsOf[float64](Best()), want)
					o.in32(LoopsOf[float32](Generic), twin)
					for r := range o.results {
						for i, w := range want[r] {
							worst = max(worst, math.Abs(float64(rows[r][i])-w)/ulp(max(size, math.Abs(w))))
						}
						if o.same && !slices.Equal(rows[r], twin[r]) {
							t.Errorf("%d elements: result %d is not the bits of plain Go", n, r)
						}
					}
					checkGuards(t, whole, n)
				}
				t.Logf("%.2f units at most", worst)
				if !(worst <= o.units) {
					t.Errorf("an error of %.2f units in the last place, allowed are %g", worst, o.units)
				}
			})
		}
	})
}

func checkGuards(t *testing.T, whole [][]float32, n int) {
	t.Helper()
	for r, row := range whole {
		left := 0
		for _, v := range row {
			if v == guard {
				left++
			}
		}
		if left != len(row)-n {
			t.Errorf("%d elements: wrote beside row %d", n, r)
		}
	}
}

// TestAlone checks that the result of an elementwise operation does not depend on the element's position.
func TestAlone(t *testing.T) {
	each(t, func(t *testing.T, l Loops[float32]) {
		rng := rand.New(rand.NewPCG(1, 1))
		for _, o := range operations() {
			if !o.alone {
				continue
			}
			_, rows := input(rng, o.rows, 200)
			pieces := clones(rows)
			o.in32(l, rows)
			for lo := 0; lo < 200; {
				hi := min(200, lo+1+rng.IntN(40))
				piece := make([][]float32, o.rows)
				for r := range piece {
					piece[r] = pieces[r][lo:hi]
				}
				o.in32(l, piece)
				lo = hi
			}
			for r := range o.results {
				if !slices.Equal(rows[r], pieces[r]) {
					t.Errorf("%s: result %d by pieces is not the bits of the whole", o.name, r)
				}
			}
		}
	})
}

// TestRowsAtOnce checks that one call for many rows returns the bits of a call for each row.
func TestRowsAtOnce(t *testing.T) {
	each(t, func(t *testing.T, l Loops[float32]) {
		rng := rand.New(rand.NewPCG(1, 1))
		for _, n := range []int{1, 7, 16, 33, 100} {
			const count = 5
			_, x := input(rng, 5, count*n)
			w, y, dw := x[4][:n], clones(x), [2][]float64{make([]float64, n), make([]float64, n)}
			var inv [2][count]float32
			l.RMSNorm(x[0], inv[0][:], x[1], w, 1e-5)
			l.RMSNormBackward(x[2], dw[0], x[3], x[1], inv[0][:], w, true)
			for r := range count {
				lo, hi := r*n, (r+1)*n
				l.RMSNorm(y[0][lo:hi], inv[1][r:r+1], y[1][lo:hi], w, 1e-5)
				l.RMSNormBackward(y[2][lo:hi], dw[1], y[3][lo:hi], y[1][lo:hi], inv[1][r:r+1], w, true)
			}
			if inv[0] != inv[1] || !slices.Equal(dw[0], dw[1]) || !slices.Equal(x[0], y[0]) ||
				!slices.Equal(x[2], y[2]) {
				t.Errorf("%d elements a row: rows at once are not the bits of rows alone", n)
			}
		}
	})
}

// TestSumSquares compares with a sum in float64 in another order.
func TestSumSquares(t *testing.T) {
	each(t, func(t *testing.T, l Loops[float32]) {
		rng := rand.New(rand.NewPCG(1, 1))
		for n := range 200 {
			_, x := input(rng, 1, n)
			got, want := l.SumSquares(x[0]), sumSquares(widen(x)[0])
			if !(math.Abs(got-want) <= 1e-14*want) {
				t.Errorf("%d elements: %v, want %v", n, got, want)
			}
		}
	})
}

// TestSigmoid checks gates over the whole range, and special values.
func TestSigmoid(t *testing.T) {
	each(t, func(t *testing.T, l Loops[float32]) {
		var worst, worstDown float64
		for x := -88.0; x < 120; x += 0.0037 {
			g, one := []float32{float32(x)}, []float32{1}
			var y, dg, du [1]float32
			l.SwiGLU(y[:], g, one)
			l.SwiGLUBackward(dg[:], du[:], one, g, one)
			v := float64(g[0])
			s := 1 / (1 + math.Exp(-v))
			rest := 1 / (1 + math.Exp(v))
			worst = max(worst, math.Abs(float64(y[0])-v*s)/ulp(v*s), math.Abs(float64(du[0])-v*s)/ulp(v*s))
			worstDown = max(worstDown, math.Abs(float64(dg[0])-s*(1+v*rest))/ulp(s*(1+math.Abs(v*rest))))
		}
		t.Logf("silu errs by %.2f units at most, its derivative by %.2f of its terms", worst, worstDown)
		if !(worst < 3 && worstDown < 3) {
			t.Errorf("silu errs by %.2f units, its derivative by %.2f", worst, worstDown)
		}
		inf, nan := float32(math.Inf(1)), float32(math.NaN())
		y := make([]float32, 5)
		l.SwiGLU(y, []float32{nan, inf, 0, -200, 200}, []float32{1, 1, 1, 1, 1})
		if fmt.Sprint(y) != "[NaN +Inf 0 -0 200]" {
			t.Errorf("silu of NaN, Inf, 0, -200, 200: %v", y)
		}
	})
}
