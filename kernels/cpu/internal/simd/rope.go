package simd

import "github.com/cprun/cprun/tensor"

// Turn rotates heads of 2*len(cos) elements, one after the other in x: with x1 and x2 its halves, each head of y is
// (x1*cos - x2*sin, x2*cos + x1*sin), with sin times sign. y may be x.
func (l Loops[T]) Turn(y, x, cos, sin []T, sign T) {
	half := len(cos)
	if half == 0 {
		return
	}
	heads := len(x) / (2 * half)
	y, sin = y[:len(x)], sin[:half]
	switch l.level {
	case AVX512:
		turnAVX512(heads, half, ptr(y), ptr(x), ptr(cos), ptr(sin), float32(sign))
	case AVX2:
		turnAVX2(heads, half, ptr(y), ptr(x), ptr(cos), ptr(sin), float32(sign))
	default:
		turn(y, x, cos, sin, sign)
	}
}

func turn[T tensor.Float](y, x, cos, sin []T, sign T) {
	half := len(cos)
	for lo := 0; lo < len(x); lo += 2 * half {
		x1, x2, y1, y2 := x[lo:lo+half], x[lo+half:lo+2*half], y[lo:lo+half], y[lo+half:lo+2*half]
		for i, co := range cos {
			si, a, b := sign*sin[i], x1[i], x2[i]
			y1[i], y2[i] = a*co-b*si, b*co+a*si
		}
	}
}
