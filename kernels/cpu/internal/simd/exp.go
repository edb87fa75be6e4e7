package simd

import (
	"math"
	"unsafe"

	"github.com/cprun/cprun/tensor"
)

// MaxOf returns the largest of x, or -Inf if there is none. It skips NaN, which reappears in the exponentials.
func (l Loops[T]) MaxOf(x []T) T {
	switch l.level {
	case AVX512:
		return T(maxOfAVX512(len(x), ptr(x)))
	case AVX2:
		return T(maxOfAVX2(len(x), ptr(x)))
	}
	return maxOf(x)
}

func maxOf[T tensor.Float](xs []T) T {
	top := T(math.Inf(-1))
	for _, x := range xs {
		if x > top {
			top = x
		}
	}
	return top
}

// ExpSum sets dst to e^(x-top) and returns the sum in float64. The error of an exponential is below 2 units in the last
// place, subnormal results included. dst may be x.
func (l Loops[T]) ExpSum(dst, x []T, top T) float64 {
	n := len(dst)
	x = x[:n]
	switch l.level {
	case AVX512:
		return expSumAVX512(n, ptr(dst), ptr(x), float32(top))
	case AVX2:
		return expSumAVX2(n, ptr(dst), ptr(x), float32(top))
	}
	return expSum(dst, x, top)
}

func expSum[T tensor.Float](dst, x []T, top T) float64 {
	x = x[:len(dst)]
	sum := 0.0
	for lo := 0; lo < len(x); lo += piece {
		hi := min(lo+piece, len(x))
		exps(dst[lo:hi], x[lo:hi], top)
		sum += total(dst[lo:hi])
	}
	return sum
}

// piece is the size of the buffer for exponentials in plain Go.
const piece = 256

// total adds in two chains, which the processor overlaps.
func total[T tensor.Float](x []T) float64 {
	var even, odd float64
	for ; len(x) >= 2; x = x[2:] {
		even, odd = even+float64(x[0]), odd+float64(x[1])
	}
	if len(x) > 0 {
		even += float64(x[0])
	}
	return even + odd
}

// SumExp returns the same bits as ExpSum and stores no exponentials.
func (l Loops[T]) SumExp(x []T, top T) float64 {
	n := len(x)
	switch l.level {
	case AVX512:
		return sumExpAVX512(n, ptr(x), float32(top))
	case AVX2:
		return sumExpAVX2(n, ptr(x), float32(top))
	}
	return sumExp(x, top)
}

func sumExp[T tensor.Float](x []T, top T) float64 {
	var buf [piece]T
	sum := 0.0
	for lo := 0; lo < len(x); lo += piece {
		e := buf[:min(piece, len(x)-lo)]
		exps(e, x[lo:lo+len(e)], top)
		sum += total(e)
	}
	return sum
}

// exps sets dst to e^(x-top).
func exps[T tensor.Float](dst, x []T, top T) {
	d, ok := any(dst).([]float32)
	if !ok {
		for i, v := range x {
			dst[i] = T(math.Exp(float64(v - top)))
		}
		return
	}
	for i, v := range any(x).([]float32) {
		if v -= float32(top); v >= expMin && v <= expMax {
			d[i] = expFast(v)
		} else {
			d[i] = expEdge(v)
		}
	}
}

// The float32 exponential is exp(x) = 2^n exp(r), with n = round(x / ln 2), r = x - n ln 2 in [-ln2/2, ln2/2] and a
// minimax polynomial for exp(r) (Cephes, expf.c, S. Moshier). ln 2 is split in two; the first part is short enough that
// n times it is exact. The error is below 1.5 units in the last place over the whole range.
const (
	ln2Hi = 0.693359375 // 355/512
	ln2Lo = -2.12194440054690583e-4

	expP0 = 1.9875691500e-4
	expP1 = 1.3981999507e-3
	expP2 = 8.3334519073e-3
	expP3 = 4.1665795894e-2
	expP4 = 1.6666665459e-1
	expP5 = 5.0000001201e-1

	expMin  = -87.33654 // below, the result is subnormal
	expMax  = 88.37626  // above, n would be 128
	expZero = -103.98   // below, the result rounds to 0

	roundBias = 3 << 22 // x + roundBias - roundBias rounds a small float32 to an integer
)

// expFast returns e^x for x in [expMin, expMax]. It is small enough to be inlined.
func expFast(x float32) float32 {
	biased := x*math.Log2E + roundBias
	n := biased - roundBias
	r := x - n*ln2Hi - n*ln2Lo
	y := (((((expP0*r+expP1)*r+expP2)*r+expP3)*r+expP4)*r+expP5)*(r*r) + r + 1
	// The low bits of biased are n in two's complement. They become the exponent.
	return y * math.Float32frombits((math.Float32bits(biased)+127)<<23)
}

// expEdge returns e^x outside of expFast's range, and for NaN and infinities.
func expEdge(x float32) float32 {
	if x < expZero {
		return 0
	}
	return float32(math.Exp(float64(x)))
}

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

// sumSquares adds in four chains, which the processor overlaps.
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

// RMSNorm normalises len(inv) rows of len(w) elements: y = x * inv * w, with inv = 1 / sqrt(mean(x^2) + eps), computed
// in float64 and rounded. y may be x.
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

// RMSNormBackward computes the gradients of len(inv) rows of len(w) elements. With g = dy * w, it sets dx to
// inv * (g - x * inv^2 * mean(g * x)), or adds that, and adds dy * x * inv to dw. Sums are in float64. dx may be dy.
func (l Loops[T]) RMSNormBackward(dx []T, dw []float64, dy, x, inv, w []T, add bool) {
	rows, n := len(inv), len(w)
	dx, dw, dy, x = dx[:rows*n], dw[:n], dy[:rows*n], x[:rows*n]
	switch {
	case l.level == AVX512 && add:
		rmsGradAddAVX512(rows, n, ptr(dx), unsafe.SliceData(dw), ptr(dy), ptr(x), ptr(inv), ptr(w))
	case l.level == AVX512:
		rmsGradAVX512(rows, n, ptr(dx), unsafe.SliceData(dw), ptr(dy), ptr(x), ptr(inv), ptr(w))
	case l.level == AVX2 && add:
		rmsGradAddAVX2(rows, n, ptr(dx), unsafe.SliceData(dw), ptr(dy), ptr(x), ptr(inv), ptr(w))
	case l.level == AVX2:
		rmsGradAVX2(rows, n, ptr(dx), unsafe.SliceData(dw), ptr(dy), ptr(x), ptr(inv), ptr(w))
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
