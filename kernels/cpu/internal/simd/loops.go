package simd

import (
	"math"
	"unsafe"

	"github.com/cprun/cprun/tensor"
)

// Loops provides the inner loops for one element type: matrix products, attention and elementwise operations.
//
// The right factor of a product is packed into panels of Cols columns, row after row. The last panel has Lanes columns
// if the remaining ones fit in it. Panels are padded with 0.
type Loops[T tensor.Float] struct {
	Lanes, Cols int // columns of a narrow and of a full panel

	level Level
}

// LoopsOf returns the loops of type T at level l. float64 has no assembly.
func LoopsOf[T tensor.Float](l Level) Loops[T] {
	if unsafe.Sizeof(T(0)) == 8 {
		l = Generic
	}
	lanes := 8
	if l == AVX512 {
		lanes = 16
	}
	return Loops[T]{lanes, 2 * lanes, l}
}

// Padded returns the number of columns in the panels of a matrix of n columns.
func (l Loops[T]) Padded(n int) int { return (n + l.Lanes - 1) / l.Lanes * l.Lanes }

// Mode selects how a product combines with the values in its result.
type Mode int

// A product sets the result, adds to it, or multiplies its rows by their scales and adds.
const (
	Set Mode = iota
	Add
	ScaleAdd
)

// Left is the left factor of a product, m by k. With Rows, element (i, j) is A[i*Ld+j], otherwise A[j*Ld+i].
type Left[T tensor.Float] struct {
	A    []T
	Ld   int
	Rows bool
}

// Right is the right factor of a product: the rows since From of panels of Rows rows, from Pack or PackTransposed.
type Right[T tensor.Float] struct {
	Panels     []T
	Rows, From int
}

// Product computes m rows and n columns of a product over k into c[i*ldc+j]. It writes Padded(n) columns of c. Sums
// run over k in order; the assembly fuses multiplications and additions. scale has m elements with ScaleAdd and is nil
// otherwise.
func (l Loops[T]) Product(m, n, k int, a Left[T], b Right[T], c []T, ldc int, mode Mode, scale []T) {
	if m <= 0 {
		return
	}
	for j := 0; j < n; j += l.Cols {
		width := min(l.Cols, l.Padded(n-j))
		l.panel(m, k, a, b.Panels[j*b.Rows+b.From*width:], width, c[j:], ldc, mode, scale)
	}
}

func (l Loops[T]) panel(m, k int, a Left[T], b []T, width int, c []T, ldc int, mode Mode, scale []T) {
	if l.level != Generic {
		l.level.panel(m, k, a.Rows, width == l.Cols, ptr(a.A), a.Ld, ptr(b), ptr(c), ldc, int(mode), ptr(scale))
		return
	}
	for i := 0; i < m; i += 4 {
		for j := 0; j < width; j += 4 {
			if i+4 <= m {
				square(i, j, k, a, b, width, c, ldc, mode, scale)
				continue
			}
			for i := i; i < m; i++ {
				quarter(i, j, k, a, b, width, c, ldc, mode, scale)
			}
		}
	}
}

// ptr returns the address of s, or nil, in the assembly's type.
func ptr[T tensor.Float](s []T) *float32 { return (*float32)(unsafe.Pointer(unsafe.SliceData(s))) }

// square computes 4 by 4 elements, whose sums fit the registers. quarter computes 1 by 4.
func square[T tensor.Float](i, j, k int, a Left[T], b []T, width int, c []T, ldc int, mode Mode, scale []T) {
	var s [4][4]T
	row, next := i*a.Ld, 1
	down := a.Ld
	if !a.Rows {
		row, next, down = i, a.Ld, 1
	}
	for n := range k {
		y := b[n*width+j:][:4]
		b0, b1, b2, b3 := y[0], y[1], y[2], y[3]
		at := row + n*next
		for r := range s {
			x := a.A[at+r*down]
			s[r][0] += x * b0
			s[r][1] += x * b1
			s[r][2] += x * b2
			s[r][3] += x * b3
		}
	}
	for r := range s {
		store(c[(i+r)*ldc+j:][:4], &s[r], mode, scale, i+r)
	}
}

func quarter[T tensor.Float](i, j, k int, a Left[T], b []T, width int, c []T, ldc int, mode Mode, scale []T) {
	var s [4]T
	at, next := i*a.Ld, 1
	if !a.Rows {
		at, next = i, a.Ld
	}
	for n := range k {
		x, y := a.A[at+n*next], b[n*width+j:][:4]
		s[0] += x * y[0]
		s[1] += x * y[1]
		s[2] += x * y[2]
		s[3] += x * y[3]
	}
	store(c[i*ldc+j:][:4], &s, mode, scale, i)
}

func store[T tensor.Float](c []T, s *[4]T, mode Mode, scale []T, row int) {
	for j, x := range s {
		switch mode {
		case Set:
			c[j] = x
		case Add:
			c[j] += x
		case ScaleAdd:
			c[j] = c[j]*scale[row] + x
		}
	}
}

// Pack packs a matrix of k rows and n columns, with row i at src[i*ld], into panels of rows rows. Rows beyond k are 0.
func (l Loops[T]) Pack(dst, src []T, ld, k, n, rows int) {
	for j := 0; j < n; j += l.Cols {
		width := min(l.Cols, l.Padded(n-j))
		panel := dst[j*rows:][:width*rows]
		clear(panel[k*width:])
		if l.level != Generic && n-j >= l.Cols && k > 0 {
			l.level.packRows(ptr(panel), ptr(src[j:]), ld, k)
			continue
		}
		for i := range k {
			to := panel[i*width:][:width]
			clear(to[copy(to, src[i*ld+j:][:min(width, n-j)]):])
		}
	}
}

// PackTransposed packs the transpose of a matrix, times scale, into panels of k rows. The matrix has n rows and k
// columns, with row i at src[i*ld].
func (l Loops[T]) PackTransposed(dst, src []T, ld, k, n int, scale T) {
	for j := 0; j < n && k > 0; j += l.Cols {
		width := min(l.Cols, l.Padded(n-j))
		for i := j; i < j+width; i += 8 {
			l.transpose(dst[j*k+i-j:], width, src[min(i, n-1)*ld:], ld, k, min(8, n-i), scale)
		}
	}
}

// transpose writes 8 columns: the first ones are rows of src, the others 0.
func (l Loops[T]) transpose(dst []T, ldd int, src []T, lds, k, rows int, scale T) {
	done := 0
	if squares := k / 8; l.level != Generic && rows == 8 && squares > 0 {
		l.level.transpose8(ptr(dst), ldd, ptr(src), lds, squares, float32(scale))
		done = squares * 8
	}
	for r := range 8 {
		for i := done; i < k; i++ {
			if r < rows {
				dst[i*ldd+r] = src[r*lds+i] * scale
			} else {
				dst[i*ldd+r] = 0
			}
		}
	}
}

// Scores is a tile of scores, probabilities or their gradients. Row j, of one key, is S[j*Ld:][:Cols], with a column
// for each query. Cols is a multiple of Lanes. Scores are logarithms to base 2.
type Scores[T tensor.Float] struct {
	S              []T
	Ld, Keys, Cols int
}

// Times multiplies every score by x.
func (t Scores[T]) Times(x T) {
	for j := range t.Keys {
		row := t.S[j*t.Ld:][:t.Cols]
		for i := range row {
			row[i] *= x
		}
	}
}

// Softmax folds a tile into the online softmax of its queries: top, the largest score so far, and sum, the sum of
// 2^(score-top). It replaces the scores by 2^(score-top) with the new top, and sets shrink to the factor of earlier
// results. A query with no score above -Inf keeps top = -Inf and gets exponentials of 0.
func (l Loops[T]) Softmax(t Scores[T], top []T, sum []float64, shrink []T) {
	if l.level != Generic {
		l.level.softmax(ptr(t.S), t.Ld, t.Keys, t.Cols, ptr(top), unsafe.SliceData(sum), ptr(shrink))
		return
	}
	for i := range t.Cols {
		now := top[i]
		for j := range t.Keys {
			now = larger(now, t.S[j*t.Ld+i])
		}
		old, from := top[i], now
		top[i] = now
		if math.IsInf(float64(from), -1) {
			from = 0
		}
		total := 0.0
		for j := range t.Keys {
			x := T(math.Exp2(float64(t.S[j*t.Ld+i] - from)))
			t.S[j*t.Ld+i] = x
			total += float64(x)
		}
		shrink[i] = T(math.Exp2(float64(old - from)))
		sum[i] = sum[i]*float64(shrink[i]) + total
	}
}

// larger skips NaN, which reappears in the exponentials.
func larger[T tensor.Float](a, b T) T {
	if b > a {
		return b
	}
	return a
}

// Probabilities replaces scores by 2^(score - lse), with one lse for each query. lse is +Inf if a query sees no key.
func (l Loops[T]) Probabilities(t Scores[T], lse []T) {
	if l.level != Generic {
		l.level.probabilities(ptr(t.S), t.Ld, t.Keys, t.Cols, ptr(lse))
		return
	}
	for j := range t.Keys {
		row := t.S[j*t.Ld:][:t.Cols]
		for i, x := range row {
			row[i] = T(math.Exp2(float64(x - lse[i])))
		}
	}
}

// GradScores replaces dp, the gradients of probabilities p, by p * (dp - delta) * scale, with one delta for each query.
// p has the strides of dp.
func (l Loops[T]) GradScores(dp Scores[T], p []T, delta []T, scale T) {
	if l.level != Generic {
		l.level.gradScores(ptr(dp.S), ptr(p), dp.Ld, dp.Keys, dp.Cols, ptr(delta), float32(scale))
		return
	}
	for j := range dp.Keys {
		row, probability := dp.S[j*dp.Ld:][:dp.Cols], p[j*dp.Ld:][:dp.Cols]
		for i, x := range row {
			row[i] = (x - delta[i]) * scale * probability[i]
		}
	}
}

// Band sets the elements of row j before column lo+j and after column hi+j to x.
func (l Loops[T]) Band(t Scores[T], lo, hi int, x T) {
	const far = 1 << 30 // effectively unbounded; plus a tile's rows and columns, it still fits 32 bits
	lo, hi = max(-far, min(far, lo)), max(-far, min(far, hi))
	if l.level != Generic {
		l.level.band(ptr(t.S), t.Ld, t.Keys, t.Cols, lo, hi, float32(x))
		return
	}
	for j := range t.Keys {
		row := t.S[j*t.Ld:][:t.Cols]
		for i := range row {
			if i < lo+j || i > hi+j {
				row[i] = x
			}
		}
	}
}

// Scaled sets dst to src times x.
func (l Loops[T]) Scaled(dst, src []T, x T) {
	src = src[:len(dst)]
	done := 0
	if n := len(dst) / l.Lanes; l.level != Generic && n > 0 {
		l.level.scaled(ptr(dst), ptr(src), n, float32(x))
		done = n * l.Lanes
	}
	for i := done; i < len(dst); i++ {
		dst[i] = src[i] * x
	}
}

// Dot returns the dot product of a and b, in float64. The order of its sum depends on the length only.
func (l Loops[T]) Dot(a, b []T) float64 {
	b = b[:len(a)]
	done, sum := 0, 0.0
	if n := len(a) / l.Lanes; l.level != Generic && n > 0 {
		var sums [8]float64
		l.level.dot(ptr(a), ptr(b), n, &sums[0])
		for _, s := range sums[:l.Lanes/2] {
			sum += s
		}
		done = n * l.Lanes
	}
	for i := done; i < len(a); i++ {
		sum += float64(a[i]) * float64(b[i])
	}
	return sum
}
