package simd

import (
	"math"
	"unsafe"

	"github.com/cprun/cprun/tensor"
)

// AdamStep is what a step of AdamW is the same in for all parameters.
type AdamStep[T tensor.Float] struct {
	Factor T // of the gradient
	New1   T // 1 - beta1
	Old2   T // beta2
	New2   T // 1 - beta2
	Keep   T // of the parameter: 1 - rate * decay
	Rate   T // over 1 - beta1^t
	Root   T // of 1 - beta2^t
	Eps    T
}

// AdamW updates parameters p and their moments m and v by gradients g, in the order of operations of
// torch.optim.AdamW.
func (l Loops[T]) AdamW(p, g, m, v []T, step *AdamStep[T]) {
	n := len(p)
	g, m, v = g[:n], m[:n], v[:n]
	switch l.level {
	case AVX512:
		adamWAVX512(n, ptr(p), ptr(g), ptr(m), ptr(v), (*float32)(unsafe.Pointer(step)))
	case AVX2:
		adamWAVX2(n, ptr(p), ptr(g), ptr(m), ptr(v), (*float32)(unsafe.Pointer(step)))
	default:
		adamW(p, g, m, v, step)
	}
}

func adamW[T tensor.Float](p, g, m, v []T, s *AdamStep[T]) {
	g, m, v = g[:len(p)], m[:len(p)], v[:len(p)]
	for i := range p {
		gi := g[i] * s.Factor
		mi := m[i] + (gi-m[i])*s.New1
		vi := v[i]*s.Old2 + gi*gi*s.New2
		m[i], v[i] = mi, vi
		p[i] = p[i]*s.Keep - s.Rate*mi/(T(math.Sqrt(float64(vi)))/s.Root+s.Eps)
	}
}
