package cpu

import (
	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/gonum"

	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// Matrix products go through gonum, tile by tile. A tile is so small (under four blocks of
// 64x64) that gonum computes it in the calling goroutine, so the split over goroutines is
// ours. Only the forms NN and TN are used: they add up one row after the other with vector
// instructions across columns, so every element of the result is the sum over the inner
// index in order, whatever the tile, the number of goroutines or the alignment of memory,
// and the result for a row does not depend on the rows around it. The form NT, a dot
// product in vector lanes, would depend on alignment.
//
// gonum leaves out products whose left factor is 0, so 0*NaN counts as 0.
const (
	tileRows  = 64  // rows of a tile, form NN
	tileRowsT = 32  // rows of a tile, form TN: the tile stays in the first-level cache
	tileCols  = 192 // three blocks of gonum
	tileInner = 256 // of the inner index at a time, so that the right factor stays in cache
)

// Linear sets y [rows, out] to x [rows, in] times w [out, in] transposed, plus add, which
// may be the zero View.
func (c *Kernels) Linear(y, x, w, add View) {
	dense("linear", y.DType(), y, x, w)
	shape.Must(y.Rows() == x.Rows() && x.Cols() == w.Cols() && y.Cols() == w.Rows(), "linear", y, x, w)
	if !add.IsZero() {
		dense("linear", y.DType(), add)
		shape.Must(add.Rows() == y.Rows() && add.Cols() == y.Cols(), "linear", y, add)
	}
	if y.DType() == tensor.F64 {
		linear[float64](c, y, x, w)
	} else {
		linear[float32](c, y, x, w)
	}
	if !add.IsZero() {
		c.Add(y, add.Reshape(y.Shape()))
	}
}

func linear[T tensor.Float](c *Kernels, y, x, w View) {
	ys, xs, ws := tensor.Data[T](y), tensor.Data[T](x), tensor.Data[T](w)
	m, n, k := y.Rows(), y.Cols(), x.Cols()
	c.queue("linear", func() {
		// The weight is packed transposed, one panel of tileCols outputs behind the other:
		// a pass over w that costs as much as a few rows of the product.
		packed := scratchOf[T](&c.ops, n*k)
		c.blocks(n, tileCols, func(_, lo, hi int) {
			transpose(packed[lo*k:hi*k], ws[lo*k:hi*k], hi-lo, k)
		})
		c.tiles(m, n, tileRows, func(i, j, mi, nj int) {
			a := left[T]{xs[i*k:], k, false}
			gemm(mi, nj, k, a, packed[j*k:], nj, false, ys[i*n+j:], n)
		})
	})
}

// LinearDX sets dx [rows, in] to dy [rows, out] times w [out, in], or adds it.
func (c *Kernels) LinearDX(dx, dy, w View, accumulate bool) {
	dense("linear dx", dx.DType(), dx, dy, w)
	shape.Must(dx.Rows() == dy.Rows() && dx.Cols() == w.Cols() && dy.Cols() == w.Rows(), "linear dx", dx, dy, w)
	if dx.DType() == tensor.F64 {
		linearDX[float64](c, dx, dy, w, accumulate)
		return
	}
	linearDX[float32](c, dx, dy, w, accumulate)
}

func linearDX[T tensor.Float](c *Kernels, dx, dy, w View, accumulate bool) {
	xs, ys, ws := tensor.Data[T](dx), tensor.Data[T](dy), tensor.Data[T](w)
	m, n, k := dx.Rows(), dx.Cols(), dy.Cols()
	c.queue("linear dx", func() {
		c.tiles(m, n, tileRows, func(i, j, mi, nj int) {
			gemm(mi, nj, k, left[T]{ys[i*k:], k, false}, ws[min(j, len(ws)):], n, accumulate, xs[i*n+j:], n)
		})
	})
}

// LinearDW adds dy [rows, out] transposed times x [rows, in] to dw [out, in].
func (c *Kernels) LinearDW(dw, dy, x View) {
	dense("linear dw", dw.DType(), dw, dy, x)
	shape.Must(dy.Rows() == x.Rows() && dw.Cols() == x.Cols() && dw.Rows() == dy.Cols(), "linear dw", dw, dy, x)
	if dw.DType() == tensor.F64 {
		linearDW[float64](c, dw, dy, x)
		return
	}
	linearDW[float32](c, dw, dy, x)
}

func linearDW[T tensor.Float](c *Kernels, dw, dy, x View) {
	ws, ys, xs := tensor.Data[T](dw), tensor.Data[T](dy), tensor.Data[T](x)
	m, n, k := dw.Rows(), dw.Cols(), x.Rows()
	if k == 0 {
		return
	}
	c.queue("linear dw", func() {
		c.tiles(m, n, tileRowsT, func(i, j, mi, nj int) {
			gemm(mi, nj, k, left[T]{ys[i:], m, true}, xs[j:], n, true, ws[i*n+j:], n)
		})
	})
}

// tiles runs f over the tiles of an m by n matrix: mi by nj elements from row i, column j.
func (c *Kernels) tiles(m, n, rows int, f func(i, j, mi, nj int)) {
	down, across := (m+rows-1)/rows, (n+tileCols-1)/tileCols
	c.each(down*across, func(t int) {
		i, j := t/across*rows, t%across*tileCols
		f(i, j, min(rows, m-i), min(tileCols, n-j))
	})
}

// left is the left factor of a product: m by k, or k by m to be transposed.
type left[T tensor.Float] struct {
	data   []T
	stride int
	trans  bool
}

// gemm sets the tile out [m, n] to a [m, k] times b [k, n], or adds it.
func gemm[T tensor.Float](m, n, k int, a left[T], b []T, ldb int, accumulate bool, out []T, ldo int) {
	beta := T(0)
	if accumulate {
		beta = 1
	}
	if k == 0 && !accumulate {
		for i := range m {
			clear(out[i*ldo : i*ldo+n])
		}
	}
	for l := 0; l < k; l += tileInner {
		kl := min(tileInner, k-l)
		trans, from := blas.NoTrans, l
		if a.trans {
			trans, from = blas.Trans, l*a.stride
		}
		switch ad := any(a.data[from:]).(type) {
		case []float32:
			gonum.Implementation{}.Sgemm(trans, blas.NoTrans, m, n, kl, 1, ad, a.stride,
				any(b[l*ldb:]).([]float32), ldb, float32(beta), any(out).([]float32), ldo)
		case []float64:
			gonum.Implementation{}.Dgemm(trans, blas.NoTrans, m, n, kl, 1, ad, a.stride,
				any(b[l*ldb:]).([]float64), ldb, float64(beta), any(out).([]float64), ldo)
		}
		beta = 1
	}
}

// transpose sets dst [cols, rows] to src [rows, cols] transposed, in squares that fit the
// cache lines of both.
func transpose[T tensor.Float](dst, src []T, rows, cols int) {
	const square = 16
	for i0 := 0; i0 < rows; i0 += square {
		i1 := min(i0+square, rows)
		for j0 := 0; j0 < cols; j0 += square {
			for j := j0; j < min(j0+square, cols); j++ {
				to := dst[j*rows+i0 : j*rows+i1]
				from := src[i0*cols+j:]
				for i := range to {
					to[i] = from[i*cols]
				}
			}
		}
	}
}
