// Package dnn_test is separate, since tests in package dnn would compile its C++ again.
package dnn_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/internal/base/cuda/dnn"
	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/partition"
)

// sees implements the definition of a mask in cuDNN's documentation; i and j count from the corner of the piece.
func sees(p dnn.Piece, i, j int) bool {
	d := j - i
	if p.Mask.BottomRight {
		d -= p.K.Len() - p.Q.Len()
	}
	return (p.Mask.Left < 0 || d > -p.Mask.Left) && (p.Mask.Right < 0 || d <= p.Mask.Right)
}

// allowed returns the condition of cudnn-frontend for masks without padding.
func allowed(p dnn.Piece) error {
	m, n := p.Q.Len(), p.K.Len()
	switch {
	case p.Mask.Left >= 0 && m > n:
		return fmt.Errorf("a window over fewer keys than queries")
	case p.Mask.BottomRight && m > n:
		return fmt.Errorf("more queries than keys at the bottom right")
	case p.Mask.Left == 0:
		return fmt.Errorf("a left bound of 0")
	case p.Mask.Right > 0:
		return fmt.Errorf("keys behind the diagonal")
	case m == 1 && n == 1:
		return fmt.Errorf("a single pair")
	}
	return nil
}

func TestCutIsTheTile(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		m, n := 1+rng.IntN(12), 2+rng.IntN(12)
		bound := func() int { return rng.IntN(2*(m+n)) - m - n }
		tile := partition.Tile{Q: within(rng, m), K: within(rng, n), Band: partition.Band{Lo: bound(), Hi: bound()}}
		switch rng.IntN(4) {
		case 0:
			tile.Band.Lo = -partition.Unbounded
		case 1:
			tile.Band.Hi = partition.Unbounded
		case 2:
			tile.Band = partition.Full()
		}
		checkCut(t, tile, m, n)
	}
}

func within(rng *rand.Rand, n int) partition.Range {
	lo := rng.IntN(n)
	return partition.Range{Lo: lo, Hi: lo + 1 + rng.IntN(n-lo)}
}

func checkCut(t *testing.T, tile partition.Tile, m, n int) {
	t.Helper()
	pieces := dnn.Cut(nil, tile)
	for i := range pieces {
		pieces[i] = pieces[i].Widened(n)
	}
	times := make([]int, m*n)
	for _, p := range pieces {
		if err := allowed(p); err != nil {
			t.Errorf("%v: %v has %v", tile, p, err)
		}
		for i := p.Q.Lo; i < p.Q.Hi; i++ {
			seen := false
			for j := p.K.Lo; j < p.K.Hi; j++ {
				if sees(p, i-p.Q.Lo, j-p.K.Lo) {
					times[i*n+j]++
					seen = true
				}
			}
			if !seen {
				t.Errorf("%v: query %d of %v sees nothing", tile, i, p)
			}
		}
	}
	for i := range m {
		for j := range n {
			want := 0
			if i >= tile.Q.Lo && i < tile.Q.Hi && j >= tile.K.Lo && j < tile.K.Hi && tile.Band.Sees(i, j) {
				want = 1
			}
			if times[i*n+j] != want {
				t.Fatalf("%v: pair (%d, %d) is seen %d times, not %d, in %v", tile, i, j, times[i*n+j], want, pieces)
			}
		}
	}
	if windowed := tile.Band.Lo > -partition.Unbounded; !windowed && len(pieces) > 2 {
		t.Errorf("%v is cut into %d pieces without a window", tile, len(pieces))
	}
}

func TestRingTilesAreOnePiece(t *testing.T) {
	mask := must.Have(partition.NewMask(true, -1, 4096, 4096, nil))
	for _, layout := range []partition.Layout{partition.Zigzag{}, partition.Contiguous{}} {
		s := partition.Shape{SeqQ: 4096, SeqKV: 4096, Size: 4, Layout: layout, Mask: mask}
		for rank := range 4 {
			for owner := range 4 {
				tiles := partition.Plan(s, rank, owner)
				for _, tile := range tiles {
					if p := dnn.Cut(nil, tile); len(p) != 1 ||
						p[0].Mask != dnn.NoMask && p[0].Mask != (dnn.Mask{Left: -1}) {
						t.Errorf("%s, rank %d, keys of %d: %v is %v", layout.Name(), rank, owner, tile, p)
					}
				}
			}
		}
	}
}

func TestFitsIsWhatIsSeen(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	draw := func() dnn.Mask {
		return dnn.Mask{Left: rng.IntN(6) - 1, Right: rng.IntN(3) - 1, BottomRight: rng.IntN(2) == 0}
	}
	for range 20000 {
		p := dnn.Piece{Q: within(rng, 6), K: within(rng, 6), Mask: draw()}
		other := p
		other.Mask = draw()
		same := true
		for i := range p.Q.Len() {
			for j := range p.K.Len() {
				same = same && sees(p, i, j) == sees(other, i, j)
			}
		}
		if p.Fits(other.Mask) && !same {
			t.Fatalf("%v fits %v and shows something else", p, other.Mask)
		}
		if !p.Fits(other.Mask) && same && everyRowSees(p) {
			t.Fatalf("%v does not fit %v, which shows the same", p, other.Mask)
		}
	}
}

// everyRowSees checks the pieces from Cut.
func everyRowSees(p dnn.Piece) bool {
	for i := range p.Q.Len() {
		seen := false
		for j := range p.K.Len() {
			seen = seen || sees(p, i, j)
		}
		if !seen {
			return false
		}
	}
	return true
}

// TestGradPieces checks that the two parts have all keys, and that no part has a number of keys that cuDNN pads.
func TestGradPieces(t *testing.T) {
	for _, m := range []int{1, 2, 64, 70} {
		for n := 1; n <= 400; n++ {
			for _, mask := range []dnn.Mask{dnn.NoMask, {Left: -1}} {
				p := dnn.Piece{Q: partition.Range{Hi: m}, K: partition.Range{Lo: 3, Hi: 3 + n}, Mask: mask}
				at, want := 3, 1
				padded := func(n int) bool { return mask == dnn.NoMask && (n%128 == 64 || m == 1 && n%64 == 0) }
				if padded(n) {
					want = 2
				}
				parts := p.AppendGrad(nil)
				for _, part := range parts {
					if part.Q != p.Q || part.Mask != mask || part.K.Lo != at || part.K.Len() < 1 || padded(part.K.Len()) {
						t.Errorf("%v has the part %v", p, part)
					}
					at = part.K.Hi
				}
				if at != p.K.Hi || len(parts) != want {
					t.Errorf("%v has %d parts, to key %d", p, len(parts), at)
				}
			}
		}
	}
}
