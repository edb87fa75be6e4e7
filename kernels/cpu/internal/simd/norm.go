package simd

import (
	"math"
	"unsafe"

	"github.com/cprun/cprun/tensor"
)

// SumSquares returns the sum of the squares of x, added up in float64.
func (l Loops[T]) SumSquares(x []T) float64 {
	switch l.level {
	case AVX512:
		return sumSquaresAVX512(len(x), ptr(x))
	case AVX2:
		return sumSquaresAVX2(len(x), ptr(x))
	}
	return sumSquares(x)
}

// sumSquares adds in four chains, which the processor runs side by side.
func sumSquares[T tensor.Float](x []T) float64 {
	var s0, s1, s2, s3 float64
	for ; len(x) >= 4; x = x[4:] {
		a, b, c, d := float64(x[0]), float64(x[1]), float64(x[2]), float64(x[3])
		s0, s1, s2, s3 = s0+a*a, s1+b*b, s2+c*c, s3+d*d
	}
	for _, v := range x {
		s0 += float64(v) * float64(v)
	}
	return (s0 + s1) + (s2 + s3)
}

// RMSNorm normalises len(inv) rows of len(w) elements: inv = 1 / sqrt(mean(x^2) + eps) in float64, rounded, and
// y = x * inv * w. y may be x.
func (l Loops[T]) RMSNorm(y, inv, x, w []T, eps float64) {
	rows, n := len(inv), len(w)
	y, x = y[:rows*n], x[:rows*n]
	switch l.level {
	case AVX512:
		rmsNormAVX512(rows, n, ptr(y), ptr(inv), ptr(x), ptr(w), eps)
	case AVX2:
		rmsNormAVX2(rows, n, ptr(y), ptr(inv), ptr(x), ptr(w), eps)
	default:
		rmsNorm(y, inv, x, w, eps)
	}
}

func rmsNorm[T tensor.Float](y, inv, x, w []T, eps float64) {
	n := len(w)
	for r := range inv {
		row, out := x[r*n:(r+1)*n], y[r*n:(r+1)*n]
		scale := T(1 / math.Sqrt(sumSquares(row)/float64(n)+eps))
		inv[r] = scale
		for i, v := range row {
			out[i] = v * scale * w[i]
		}
	}
}

// RMSNormBackward takes gradients back through len(inv) rows of len(w) elements. With g = dy * w, it sets dx, or adds
// inv * (g - x * inv^2 * mean(g * x)), and adds dy * x * inv to dw. Sums are in float64. dx may be dy.
func (l Loops[T]) RMSNormBackward(dx []T, dw []float64, dy, x, inv, w []T, add bool) {
	rows, n := len(inv), len(w)
	dx, dw, dy, x = dx[:rows*n], dw[:n], dy[:rows*n], x[:rows*n]
	switch {
	case l.level == AVX512 && add:
		rmsNormBackwardAddAVX512(rows, n, ptr(dx), unsafe.SliceData(dw), ptr(dy), ptr(x), ptr(inv), ptr(w))
	case l.level == AVX512:
		rmsNormBackwardAVX512(rows, n, ptr(dx), unsafe.SliceData(dw), ptr(dy), ptr(x), ptr(inv), ptr(w))
	case l.level == AVX2 && add:
		rmsNormBackwardAddAVX2(rows, n, ptr(dx), unsafe.SliceData(dw), ptr(dy), ptr(x), ptr(inv), ptr(w))
	case l.level == AVX2:
		rmsNormBackwardAVX2(rows, n, ptr(dx), unsafe.SliceData(dw), ptr(dy), ptr(x), ptr(inv), ptr(w))
	default:
		rmsNormBackward(dx, dw, dy, x, inv, w, add)
	}
}

func rmsNormBackward[T tensor.Float](dx []T, dw []float64, dy, x, inv, w []T, add bool) {
	n := len(w)
	for r, scale := range inv {
		lo, hi := r*n, (r+1)*n
		normRowBackward(dx[lo:hi], dw, dy[lo:hi], x[lo:hi], w, scale, add)
	}
}

func normRowBackward[T tensor.Float](dx []T, dw []float64, dy, x, w []T, scale T, add bool) {
	dx, dw, x, w = dx[:len(dy)], dw[:len(dy)], x[:len(dy)], w[:len(dy)]
	dot, inv := 0.0, float64(scale)
	for i, d := range dy {
		dxi := float64(d) * float64(x[i])
		dw[i] += dxi * inv
		dot += dxi * float64(w[i])
	}
	back := T(dot * inv * inv * inv / float64(len(dy)))
	if add {
		for i, d := range dy {
			dx[i] += d*w[i]*scale - x[i]*back
		}
		return
	}
	for i, d := range dy {
		dx[i] = d*w[i]*scale - x[i]*back
	}
}
