package simd

func (l Level) panel(m, k int, byRow, wide bool, a *float32, lda int, b, c *float32, ldc, mode int, scale *float32) {
	if l == AVX512 {
		switch {
		case byRow && wide:
			panelRows2AVX512(m, k, a, lda, b, c, ldc, mode, scale)
		case byRow:
			panelRows1AVX512(m, k, a, lda, b, c, ldc, mode, scale)
		case wide:
			panelCols2AVX512(m, k, a, lda, b, c, ldc, mode, scale)
		default:
			panelCols1AVX512(m, k, a, lda, b, c, ldc, mode, scale)
		}
		return
	}
	switch {
	case byRow && wide:
		panelRows2AVX2(m, k, a, lda, b, c, ldc, mode, scale)
	case byRow:
		panelRows1AVX2(m, k, a, lda, b, c, ldc, mode, scale)
	case wide:
		panelCols2AVX2(m, k, a, lda, b, c, ldc, mode, scale)
	default:
		panelCols1AVX2(m, k, a, lda, b, c, ldc, mode, scale)
	}
}

func (l Level) packRows(dst, src *float32, ld, rows int) {
	if l == AVX512 {
		packRowsAVX512(dst, src, ld, rows)
		return
	}
	packRowsAVX2(dst, src, ld, rows)
}

func (Level) transpose8(dst *float32, ldd int, src *float32, lds, squares int, scale float32) {
	transpose8AVX2(dst, ldd, src, lds, squares, scale)
}

func (l Level) softmax(s *float32, ld, keys, cols int, top *float32, sum *float64, shrink *float32) {
	if l == AVX512 {
		softmaxAVX512(s, ld, keys, cols, top, sum, shrink)
		return
	}
	softmaxAVX2(s, ld, keys, cols, top, sum, shrink)
}

func (l Level) probabilities(s *float32, ld, keys, cols int, lse *float32) {
	if l == AVX512 {
		probabilitiesAVX512(s, ld, keys, cols, lse)
		return
	}
	probabilitiesAVX2(s, ld, keys, cols, lse)
}

func (l Level) gradScores(dp, p *float32, ld, keys, cols int, delta *float32, scale float32) {
	if l == AVX512 {
		gradScoresAVX512(dp, p, ld, keys, cols, delta, scale)
		return
	}
	gradScoresAVX2(dp, p, ld, keys, cols, delta, scale)
}

func (l Level) band(s *float32, ld, keys, cols, lo, hi int, x float32) {
	if l == AVX512 {
		bandAVX512(s, ld, keys, cols, lo, hi, x)
		return
	}
	bandAVX2(s, ld, keys, cols, lo, hi, x)
}

func (l Level) scaled(dst, src *float32, vectors int, x float32) {
	if l == AVX512 {
		scaledAVX512(dst, src, vectors, x)
		return
	}
	scaledAVX2(dst, src, vectors, x)
}

func (l Level) dot(a, b *float32, vectors int, sums *float64) {
	if l == AVX512 {
		dotAVX512(a, b, vectors, sums)
		return
	}
	dotAVX2(a, b, vectors, sums)
}
