package simd

import (
	"math"

	"github.com/cprun/cprun/internal/base/half"
)

// ToBF16 sets dst to the bfloat16 nearest to src, as half.ToBF16.
func (l Level) ToBF16(dst []uint16, src []float32) {
	n := l.whole(len(dst))
	src = src[:len(dst)]
	switch {
	case n == 0:
	case l == AVX512:
		toBF16AVX512(n, &dst[0], &src[0])
	default:
		toBF16AVX2(n, &dst[0], &src[0])
	}
	for i, x := range src[n:] {
		dst[n+i] = half.ToBF16(x)
	}
}

// FromBF16 sets dst to bfloat16 src.
func (l Level) FromBF16(dst []float32, src []uint16) {
	n := l.whole(len(dst))
	src = src[:len(dst)]
	switch {
	case n == 0:
	case l == AVX512:
		fromBF16AVX512(n, &dst[0], &src[0])
	default:
		fromBF16AVX2(n, &dst[0], &src[0])
	}
	for i, b := range src[n:] {
		dst[n+i] = half.FromBF16(b)
	}
}

// ToF16 sets dst to the binary16 nearest to src, as half.ToF16.
func (l Level) ToF16(dst []uint16, src []float32) {
	n := l.whole(len(dst))
	src = src[:len(dst)]
	switch {
	case n == 0:
	case l == AVX512:
		toF16AVX512(n, &dst[0], &src[0])
	default:
		toF16AVX2(n, &dst[0], &src[0])
	}
	for i, x := range src[n:] {
		dst[n+i] = half.ToF16(x)
	}
}

// FromF16 sets dst to binary16 src. A signalling NaN becomes the quiet one, as the instruction has it.
func (l Level) FromF16(dst []float32, src []uint16) {
	n := l.whole(len(dst))
	src = src[:len(dst)]
	switch {
	case n == 0:
	case l == AVX512:
		fromF16AVX512(n, &dst[0], &src[0])
	default:
		fromF16AVX2(n, &dst[0], &src[0])
	}
	for i, h := range src[n:] {
		x := half.FromF16(h)
		if x != x {
			x = math.Float32frombits(math.Float32bits(x) | 1<<22)
		}
		dst[n+i] = x
	}
}

// whole returns how many of n elements fill whole vectors. Conversions are exact in what they round to, so that the
// rest may go in plain Go.
func (l Level) whole(n int) int {
	switch l {
	case AVX512:
		return n &^ 15
	case AVX2:
		return n &^ 7
	}
	return 0
}
