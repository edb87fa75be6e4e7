package simd

import "github.com/cprun/cprun/tensor"

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

// expNegated is e^-x for each of at most piece elements.
func expNegated[T tensor.Float](buf *[piece]T, x []T) []T {
	e := buf[:len(x)]
	for i, v := range x {
		e[i] = -v
	}
	exps(e, e, 0)
	return e
}
