package simd

import "github.com/cprun/cprun/tensor"

// AddTo sets dst to a + b. dst may be one of them.
func (l Loops[T]) AddTo(dst, a, b []T) {
	n := len(dst)
	a, b = a[:n], b[:n]
	switch l.level {
	case AVX512:
		addToAVX512(n, ptr(dst), ptr(a), ptr(b))
	case AVX2:
		addToAVX2(n, ptr(dst), ptr(a), ptr(b))
	default:
		addTo(dst, a, b)
	}
}

func addTo[T tensor.Float](dst, a, b []T) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = a[i] + b[i]
	}
}
