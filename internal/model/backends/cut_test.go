package backends

import (
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/internal/base/cuda/dnn"
	"github.com/cprun/cprun/partition"
)

// TestCutIsWhatTheKernelDoes compares Call.cut with the cut of the cuDNN kernel, for the same bands.
func TestCutIsWhatTheKernelDoes(t *testing.T) {
	rng := rand.New(rand.NewPCG(21, 22))
	cuts := 0
	for range 20000 {
		var c Call
		c.Rects, c.SeqQ, c.SeqKV = 1, 1+rng.IntN(14), 1+rng.IntN(14)
		lo, hi := -rng.IntN(c.SeqQ), rng.IntN(c.SeqKV)
		if hi+c.SeqQ < c.SeqKV || c.SeqKV-lo < c.SeqQ {
			continue // not trimmed: a row or a column has no pair
		}
		c.setMask(lo, hi)
		var parts []Call
		for work := []Call{c}; len(work) > 0; {
			at := work[0]
			if cut := at.cut(); cut != nil {
				work = append(cut, work[1:]...)
				continue
			}
			parts, work = append(parts, at), work[1:]
		}
		pieces := dnn.Cut(nil, partition.Tile{
			Q: partition.Range{Hi: c.SeqQ}, K: partition.Range{Hi: c.SeqKV}, Band: partition.Band{Lo: lo, Hi: hi},
		})
		if len(parts) != len(pieces) {
			t.Fatalf("%d queries by %d keys, band (%d, %d): %d parts, the kernel makes %d",
				c.SeqQ, c.SeqKV, lo, hi, len(parts), len(pieces))
		}
		for i, p := range parts {
			k := pieces[i]
			same := p.QAt == k.Q.Lo && p.SeqQ == k.Q.Len() && p.KAt == k.K.Lo && p.SeqKV == k.K.Len() &&
				(p.Left < 0) == (k.Mask.Left < 0) && (p.Left < 0 || p.Left+1 == k.Mask.Left) &&
				p.Right == k.Mask.Right && (p.Mask == BottomRightMask) == k.Mask.BottomRight
			if !same {
				t.Fatalf("%d queries by %d keys, band (%d, %d): part %d is %s at %d, %d; the kernel makes %+v",
					c.SeqQ, c.SeqKV, lo, hi, i, &p, p.QAt, p.KAt, k)
			}
		}
		if len(parts) > 1 {
			cuts++
		}
	}
	if cuts < 1000 {
		t.Errorf("only %d bands were cut", cuts)
	}
}
