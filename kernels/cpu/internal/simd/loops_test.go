package simd

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/tensor"
)

// levels runs a test at each level that this machine supports, and in float64.
func levels(t *testing.T, f32 func(t *testing.T, l Loops[float32]), f64 func(t *testing.T, l Loops[float64])) {
	for l := Generic; l <= Best(); l++ {
		t.Run(l.String(), func(t *testing.T) { f32(t, LoopsOf[float32](l)) })
	}
	t.Run("float64", func(t *testing.T) { f64(t, LoopsOf[float64](Best())) })
}

func normal[T tensor.Float](r *rand.Rand, n int) []T {
	s := make([]T, n)
	for i := range s {
		s[i] = T(r.NormFloat64())
	}
	return s
}

// epsilon returns twice the largest rounding error of T.
func epsilon[T tensor.Float]() float64 {
	if T(1)+T(1e-10) == 1 {
		return 1.2e-7
	}
	return 2.3e-16
}

func TestProduct(t *testing.T) { levels(t, testProduct[float32], testProduct[float64]) }

// testProduct compares products with sums in float64, for both layouts of the left factor and both ways of packing.
func testProduct[T tensor.Float](t *testing.T, l Loops[T]) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		m, n, k := r.IntN(40), r.IntN(80), r.IntN(40)
		lda, ldc := max(m, k)+r.IntN(5), l.Padded(n)+r.IntN(5)
		a, b, scale := normal[T](r, lda*max(m, k, 1)+1), normal[T](r, k*n+1), normal[T](r, m+1)
		left := Left[T]{a, lda, r.IntN(2) == 0}
		c := normal[T](r, m*ldc+1)
		mode := Mode(r.IntN(3))
		panels := make([]T, l.Padded(n)*k)
		factor := T(1)
		if r.IntN(2) == 0 {
			l.Pack(panels, b, n, k, n, k)
		} else {
			factor = 2
			l.PackTransposed(panels, transposed(b, k, n), k, k, n, factor)
		}
		got := append([]T(nil), c...)
		l.Product(m, n, k, left, Right[T]{panels, k, 0}, got, ldc, mode, scale[:m])
		for i := range m {
			for j := range n {
				want, size := 0.0, 1.0
				for x := range k {
					at := i*lda + x
					if !left.Rows {
						at = x*lda + i
					}
					p := float64(a[at]) * float64(factor*b[x*n+j])
					want += p
					size += math.Abs(p)
				}
				if old := float64(c[i*ldc+j]); mode == Add {
					want += old
				} else if mode == ScaleAdd {
					want += old * float64(scale[i])
					size += math.Abs(old * float64(scale[i]))
				}
				if e := near.Gap(float64(got[i*ldc+j]), want, near.Finite); !(e <= 3*size*epsilon[T]()) {
					t.Fatalf(
						"m %d n %d k %d rows %v mode %d: element %d, %d is %v, want %v",
						m,
						n,
						k,
						left.Rows,
						mode,
						i,
						j,
						got[i*ldc+j],
						want,
					)
				}
			}
		}
		if got[m*ldc] != c[m*ldc] {
			t.Fatalf("m %d n %d k %d: wrote behind the last row", m, n, k)
		}
	}
}

func transposed[T tensor.Float](x []T, rows, cols int) []T {
	y := make([]T, len(x))
	for i := range rows {
		for j := range cols {
			y[j*rows+i] = x[i*cols+j]
		}
	}
	return y
}

// TestProductRows checks that the bits of a product's row do not depend on the other rows.
func TestProductRows(t *testing.T) {
	for level := Generic; level <= Best(); level++ {
		l, r := LoopsOf[float32](level), rand.New(rand.NewPCG(3, 4))
		const m, n, k = 37, 70, 29
		for _, rows := range []bool{true, false} {
			a, panels := normal[float32](r, m*m), normal[float32](r, l.Padded(n)*k)
			all, one := make([]float32, m*l.Padded(n)), make([]float32, l.Padded(n))
			l.Product(m, n, k, Left[float32]{a, m, rows}, Right[float32]{panels, k, 0}, all, l.Padded(n), Set, nil)
			for i := range m {
				from := a[i:]
				if rows {
					from = a[i*m:]
				}
				l.Product(
					1,
					n,
					k,
					Left[float32]{from, m, rows},
					Right[float32]{panels, k, 0},
					one,
					l.Padded(n),
					Set,
					nil,
				)
				for j := range n {
					if one[j] != all[i*l.Padded(n)+j] {
						t.Fatalf(
							"%v: row %d alone is %v in column %d, among others %v",
							level,
							i,
							one[j],
							j,
							all[i*l.Padded(n)+j],
						)
					}
				}
			}
		}
	}
}

func TestScores(t *testing.T) { levels(t, testScores[float32], testScores[float64]) }

// testScores compares the loops over tiles of scores with float64, also with whole columns hidden.
func testScores[T tensor.Float](t *testing.T, l Loops[T]) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 200 {
		keys, cols := 1+r.IntN(20), l.Lanes*(1+r.IntN(3))
		tile := Scores[T]{normal[T](r, keys*(cols+3)), cols + 3, keys, cols}
		for i := range tile.S {
			tile.S[i] *= 30
		}
		lo, hi := r.IntN(2*cols)-cols, r.IntN(2*cols)-cols/2
		l.Band(tile, lo, hi, T(math.Inf(-1)))
		for j := range keys {
			for i := range cols {
				if hidden := i < lo+j || i > hi+j; hidden != math.IsInf(float64(tile.S[j*tile.Ld+i]), -1) {
					t.Fatalf("band %d to %d: key %d of query %d is %v", lo, hi, j, i, tile.S[j*tile.Ld+i])
				}
			}
		}
		top, sum, shrink := normal[T](r, cols), make([]float64, cols), make([]T, cols)
		for i := range top {
			sum[i] = 1
			if r.IntN(3) == 0 {
				top[i] = T(math.Inf(-1))
			}
		}
		s, before := append([]T(nil), tile.S...), append([]T(nil), top...)
		l.Softmax(tile, top, sum, shrink)
		for i := range cols {
			checkColumn(t, tile, s, i, float64(before[i]), float64(top[i]), sum[i], float64(shrink[i]))
		}
	}
}

func checkColumn[T tensor.Float](t *testing.T, tile Scores[T], s []T, i int, before, top, sum, shrink float64) {
	t.Helper()
	want := before
	for j := range tile.Keys {
		want = max(want, float64(s[j*tile.Ld+i]))
	}
	if top != want {
		t.Fatalf("the top of column %d is %v, want %v", i, top, want)
	}
	from := want
	if math.IsInf(want, -1) {
		from = 0
	}
	total := math.Exp2(before - from)
	near := func(what string, got, want float64) {
		t.Helper()
		if e := math.Abs(got - want); !(e <= 4*epsilon[T]()*max(1, math.Abs(want))) {
			t.Fatalf("%s of column %d is %v, want %v", what, i, got, want)
		}
	}
	near("what earlier results shrink by", shrink, total)
	for j := range tile.Keys {
		x := math.Exp2(float64(s[j*tile.Ld+i]) - from)
		near("an exponential", float64(tile.S[j*tile.Ld+i]), x)
		total += x
	}
	near("the sum", sum, total)
}

func TestGradients(t *testing.T) { levels(t, testGradients[float32], testGradients[float64]) }

// testGradients compares the backward loops over a tile with float64.
func testGradients[T tensor.Float](t *testing.T, l Loops[T]) {
	r := rand.New(rand.NewPCG(7, 8))
	const keys = 13
	cols := 2 * l.Lanes
	s, dp, lse, delta := normal[T](r, keys*cols), normal[T](r, keys*cols), normal[T](r, cols), normal[T](r, cols)
	lse[1], s[0], s[2] = T(math.Inf(1)), T(math.Inf(-1)), T(math.NaN())
	p, g := append([]T(nil), s...), append([]T(nil), dp...)
	l.Probabilities(Scores[T]{p, cols, keys, cols}, lse)
	l.GradScores(Scores[T]{g, cols, keys, cols}, p, delta, 0.5)
	for n := range s {
		i := n % cols
		want := math.Exp2(float64(s[n]) - float64(lse[i]))
		grad := want * (float64(dp[n]) - float64(delta[i])) / 2
		tolerance := 4 * epsilon[T]() * max(1, want)
		if n == 2 {
			if p[n] == p[n] || g[n] == g[n] {
				t.Fatalf("NaN became %v, and %v in its gradient", p[n], g[n])
			}
			continue
		}
		if e := near.Gap(float64(p[n]), want, near.Finite); !(e <= tolerance) {
			t.Fatalf("element %d is %v, want %v", n, p[n], want)
		}
		if e := near.Gap(float64(g[n]), grad, near.Finite); !(e <= tolerance*max(1,
			math.Abs(float64(dp[n]))+math.Abs(float64(delta[i])))) {
			t.Fatalf("gradient %d is %v, want %v", n, g[n], grad)
		}
	}
}

func TestRows(t *testing.T) { levels(t, testRows[float32], testRows[float64]) }

func testRows[T tensor.Float](t *testing.T, l Loops[T]) {
	r := rand.New(rand.NewPCG(9, 10))
	for n := range 100 {
		a, b, y := normal[T](r, n+1), normal[T](r, n+1), normal[T](r, n+1)
		after := y[n]
		l.Scaled(y[:n], a, 3)
		want, size := 0.0, 1.0
		for i := range n {
			if y[i] != 3*a[i] {
				t.Fatalf("element %d of %d is %v, want %v", i, n, y[i], 3*a[i])
			}
			want += float64(a[i]) * float64(b[i])
			size += math.Abs(float64(a[i]) * float64(b[i]))
		}
		if y[n] != after {
			t.Fatalf("%d elements: wrote behind the last", n)
		}
		if got := l.Dot(a[:n], b); !(math.Abs(got-want) <= 1e-14*size) {
			t.Fatalf("the product of %d elements is %v, want %v", n, got, want)
		}
	}
}

func TestParse(t *testing.T) {
	for _, test := range []struct {
		name string
		want Level
		ok   bool
	}{{"", Best(), true}, {"generic", Generic, true}, {"sse", Best(), false}, {Best().String(), Best(), true}} {
		if got, err := Parse(test.name); got != test.want || (err == nil) != test.ok {
			t.Errorf("Parse(%q) is %v, %v", test.name, got, err)
		}
	}
}
