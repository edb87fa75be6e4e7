//go:build !amd64

package simd

// Without assembly, Generic is the only level, which calls none of these.

const unreached = "simd: assembly on a machine that has none"

func (Level) panel(m, k int, byRow, wide bool, a *float32, lda int, b, c *float32, ldc, mode int, scale *float32) {
	panic(unreached)
}

func (Level) packRows(dst, src *float32, ld, rows int) { panic(unreached) }

func (Level) transpose8(dst *float32, ldd int, src *float32, lds, squares int, scale float32) {
	panic(unreached)
}

func (Level) softmax(s *float32, ld, keys, cols int, top *float32, sum *float64, shrink *float32) {
	panic(unreached)
}

func (Level) probabilities(s *float32, ld, keys, cols int, lse *float32) { panic(unreached) }

func (Level) gradScores(dp, p *float32, ld, keys, cols int, delta *float32, scale float32) {
	panic(unreached)
}

func (Level) band(s *float32, ld, keys, cols, lo, hi int, x float32) { panic(unreached) }

func (Level) scaled(dst, src *float32, vectors int, x float32) { panic(unreached) }

func (Level) dot(a, b *float32, vectors int, sums *float64) { panic(unreached) }
