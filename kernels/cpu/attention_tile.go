package cpu

import (
	"math"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// log2e is 1/ln 2: softmax has scores as logarithms to the base of 2.
const log2e = 1.4426950408889634

// changed reports whether something happens to scores between the product and softmax. They are natural logarithms
// then, and become those to the base of 2 when it has happened; otherwise queries are scaled so that they are at once.
func changed[T tensor.Float](p attention.Softmax, s *scores[T]) bool {
	return s != nil || p.Softcap > 0
}

// scoreScale returns what queries are multiplied by.
func scoreScale[T tensor.Float](p attention.Softmax, s *scores[T]) T {
	if changed(p, s) {
		return T(p.Scale)
	}
	return T(p.Scale * log2e)
}

// scoreTile is scores and what they are of: row j is of key tile.K.Lo+j, and column i of query first+i. The columns of
// the queries in tile.Q count; what stands in the others is left over or padding.
type scoreTile[T tensor.Float] struct {
	simd.Scores[T]
	tile    partition.Tile
	b, head int
	first   int
}

// seen is the columns [lo, hi) of row j that see its key.
func (t scoreTile[T]) seen(j int) (lo, hi int) {
	key := t.tile.K.Lo + j
	return max(t.tile.Q.Lo, key-t.tile.Band.Hi) - t.first, min(t.tile.Q.Hi, key-t.tile.Band.Lo+1) - t.first
}

// hide sets what is not seen to x.
func hide[T tensor.Float](l simd.Loops[T], t scoreTile[T], x T) {
	b, k, q := t.tile.Band, t.tile.K, t.tile.Q
	lo, hi := k.Lo-b.Hi-t.first, k.Lo-b.Lo-t.first // the columns that the band shows in row 0
	from, to := q.Lo-t.first, q.Hi-t.first
	if lo+t.Keys-1 > from || hi < to-1 {
		l.Band(t.Scores, lo, hi, x)
	}
	if from == 0 && to == t.Cols {
		return
	}
	for j := range t.Keys {
		row := t.S[j*t.Ld:][:t.Cols]
		for i := range from {
			row[i] = x
		}
		for i := to; i < t.Cols; i++ {
			row[i] = x
		}
	}
}

// softcap replaces scores s by c tanh(s/c), and slope, where it is not nil, by the derivative.
func softcap[T tensor.Float](t simd.Scores[T], slope []T, c float64) {
	for j := range t.Keys {
		for i, x := range t.S[j*t.Ld:][:t.Cols] {
			y := math.Tanh(float64(x) / c)
			t.S[j*t.Ld+i] = T(c * y)
			if slope != nil {
				slope[j*t.Ld+i] = T(1 - y*y)
			}
		}
	}
}
