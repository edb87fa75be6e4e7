package simd

import (
	"math"
	"unsafe"

	"github.com/cprun/cprun/internal/base/half"
	"github.com/cprun/cprun/tensor"
)

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

// FromF16 sets dst to binary16 src. A signalling NaN becomes quiet, as with the instruction VCVTPH2PS.
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

// whole returns the number of elements in full vectors. Plain Go converts the rest: it rounds to the same bits.
func (l Level) whole(n int) int {
	switch l {
	case AVX512:
		return n &^ 15
	case AVX2:
		return n &^ 7
	}
	return 0
}

// Turn applies RoPE to the heads in x, of 2*len(cos) elements each. With x1 and x2 the halves of a head, it sets the
// head of y to (x1*cos - x2*sin, x2*cos + x1*sin), with sin times sign. y may be x.
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

// SwiGLU sets y to gate * sigmoid(gate) * up. y may be one of them.
func (l Loops[T]) SwiGLU(y, gate, up []T) {
	n := len(y)
	gate, up = gate[:n], up[:n]
	switch l.level {
	case AVX512:
		swiGLUAVX512(n, ptr(y), ptr(gate), ptr(up))
	case AVX2:
		swiGLUAVX2(n, ptr(y), ptr(gate), ptr(up))
	default:
		swiGLU(y, gate, up)
	}
}

func swiGLU[T tensor.Float](y, gate, up []T) {
	var buf [piece]T
	for lo := 0; lo < len(y); lo += piece {
		hi := min(lo+piece, len(y))
		y, g, u := y[lo:hi], gate[lo:hi], up[lo:hi]
		for i, e := range expNegated(&buf, g) {
			y[i] = g[i] * T(1/(1+float64(e))) * u[i]
		}
	}
}

// SwiGLUBackward sets dgate = dy * up * s * (1 + gate * (1 - s)), with s = sigmoid(gate), and dup = dy * gate * s.
// They may be gate and up.
func (l Loops[T]) SwiGLUBackward(dgate, dup, dy, gate, up []T) {
	n := len(dgate)
	dup, dy, gate, up = dup[:n], dy[:n], gate[:n], up[:n]
	switch l.level {
	case AVX512:
		swiGLUBackwardAVX512(n, ptr(dgate), ptr(dup), ptr(dy), ptr(gate), ptr(up))
	case AVX2:
		swiGLUBackwardAVX2(n, ptr(dgate), ptr(dup), ptr(dy), ptr(gate), ptr(up))
	default:
		swiGLUBackward(dgate, dup, dy, gate, up)
	}
}

func swiGLUBackward[T tensor.Float](dgate, dup, dy, gate, up []T) {
	var buf [piece]T
	for lo := 0; lo < len(dgate); lo += piece {
		hi := min(lo+piece, len(dgate))
		dg, du, d, g, u := dgate[lo:hi], dup[lo:hi], dy[lo:hi], gate[lo:hi], up[lo:hi]
		for i, e := range expNegated(&buf, g) {
			s := 1 / (1 + float64(e)) // in float64, so that 1 - s keeps the digits of e
			di, gi, ui := d[i], g[i], u[i]
			dg[i] = di * ui * T(s*(1+float64(gi)*(1-s)))
			du[i] = di * gi * T(s)
		}
	}
}

// expNegated returns e^-x of at most piece elements.
func expNegated[T tensor.Float](buf *[piece]T, x []T) []T {
	e := buf[:len(x)]
	for i, v := range x {
		e[i] = -v
	}
	exps(e, e, 0)
	return e
}

// AdamStep holds the factors of a step of AdamW that all parameters share.
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

// AdamW updates parameters p and their moments m and v from gradients g, with torch.optim.AdamW's order of operations.
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
