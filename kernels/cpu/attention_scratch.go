package cpu

import (
	"math"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/gonum"

	"github.com/cprun/cprun/tensor"
)

// The block of scores that is computed at once. The rows of packed keys and of scores are
// blockK long, which is the length of every inner loop, whatever the head dim is.
const (
	blockQ = 64
	blockK = 128
	// groupHeads is how many query heads of one KV head share a packed block of keys.
	groupHeads = 4
)

// scratch is one worker's memory, kept between calls. It grows to the largest block that
// was computed: some (2 blockQ + 4 blockK) rows of the head dim and two blocks of scores.
type scratch struct {
	f32 []float32
	f64 []float64
	sum [groupHeads * blockQ]float64 // of exp(score - max), by head and query
}

// stack hands out pieces of a scratch.
type stack[T tensor.Float] struct{ free []T }

// open is a stack of n elements of uninitialised memory.
func open[T tensor.Float](s *scratch, n int) stack[T] {
	p, ok := any(&s.f32).(*[]T)
	if !ok {
		p = any(&s.f64).(*[]T)
	}
	if len(*p) < n {
		*p = make([]T, n)
	}
	return stack[T]{(*p)[:n]}
}

func (s *stack[T]) take(n int) []T {
	x := s.free[:n:n]
	s.free = s.free[n:]
	return x
}

// arith is what differs between the element types.
type arith[T tensor.Float] struct {
	// gemm is the BLAS routine: c = alpha op(a) op(b) + beta c, row-major. gonum's has SSE
	// inner loops on amd64 and reached 11 to 15 GFLOP/s on these shapes where a 2 x 4 register
	// tile in plain Go reached 7.
	gemm func(ta, tb blas.Transpose, m, n, k int, alpha T, a []T, lda int, b []T, ldb int, beta T, c []T, ldc int)
	// expRow replaces s by exp(s - m) and returns the sum.
	expRow func(s []T, m T) float64
}

var (
	arith32 = arith[float32]{gonum.Implementation{}.Sgemm, expRow32}
	arith64 = arith[float64]{gonum.Implementation{}.Dgemm, expRow64}
)

func arithOf[T tensor.Float]() arith[T] {
	if a, ok := any(arith32).(arith[T]); ok {
		return a
	}
	return any(arith64).(arith[T])
}

// mul is gemm cut into pieces of at most 64 x 128, since gonum starts goroutines of its own
// for products of four blocks of 64 x 64 and more, which here are busy already.
func (f arith[T]) mul(ta, tb blas.Transpose, m, n, k int, alpha T, a []T, lda int, b []T, ldb int, beta T, c []T, ldc int) {
	for i := 0; i < m; i += 64 {
		ai := i * lda
		if ta == blas.Trans {
			ai = i
		}
		for j := 0; j < n; j += 128 {
			bj := j
			if tb == blas.Trans {
				bj = j * ldb
			}
			f.gemm(ta, tb, min(64, m-i), min(128, n-j), k, alpha, a[ai:], lda, b[bj:], ldb, beta, c[i*ldc+j:], ldc)
		}
	}
}

// rows reads a strided view row by row.
type rows[T tensor.Float] struct {
	data []T
	view View
	dim  int
}

func rowsOf[T tensor.Float](v View) rows[T] {
	return rows[T]{tensor.Data[T](v), v, v.Len(tensor.Dim)}
}

// row is the elements of [b, s, h, :], in place.
func (r rows[T]) row(b, s, h int) []T {
	o := at(r.view, b, s, h)
	return r.data[o : o+int64(r.dim) : o+int64(r.dim)]
}

// pack copies rows lo to hi of one head, one after the other.
func (r rows[T]) pack(dst []T, b, lo, hi, h int) {
	for s := lo; s < hi; s++ {
		copy(dst[(s-lo)*r.dim:], r.row(b, s, h))
	}
}

// packT copies rows lo to hi of one head as columns of a matrix with rows of blockK.
func (r rows[T]) packT(dst []T, b, lo, hi, h int) {
	s := lo
	for ; s+4 <= hi; s += 4 { // four at a time, so that a line of dst is visited less often
		x0, x1, x2, x3 := r.row(b, s, h), r.row(b, s+1, h), r.row(b, s+2, h), r.row(b, s+3, h)
		x1, x2, x3 = x1[:len(x0)], x2[:len(x0)], x3[:len(x0)]
		for d := range x0 {
			y := dst[d*blockK+s-lo:][:4]
			y[0], y[1], y[2], y[3] = x0[d], x1[d], x2[d], x3[d]
		}
	}
	for ; s < hi; s++ {
		for d, x := range r.row(b, s, h) {
			dst[d*blockK+s-lo] = x
		}
	}
}

// addT adds the columns that packT made to rows lo to hi of one head.
func (r rows[T]) addT(src []T, b, lo, hi, h int) {
	for s := lo; s < hi; s++ {
		y := r.row(b, s, h)
		for d := range y {
			y[d] += src[d*blockK+s-lo]
		}
	}
}

// softcap replaces scores s by c tanh(s/c), and slope, where it is not nil, by the derivative.
func softcap[T tensor.Float](s, slope []T, c float64) {
	for i, x := range s {
		t := math.Tanh(float64(x) / c)
		s[i] = T(c * t)
		if slope != nil {
			slope[i] = T(1 - t*t)
		}
	}
}
