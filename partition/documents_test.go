package partition

import (
	"math"
	"math/big"
	"strings"
	"testing"
)

// Lengths come from files. If their sum overflows an int, NewMask must return an error, no impossible mask and no
// panic.
func TestDocumentsThatDoNotFit(t *testing.T) {
	const half = math.MaxInt/2 + 1
	for _, c := range []struct {
		docs []int
		want string
	}{
		{[]int{half, half, 8}, "document 0 has"},
		{[]int{4, math.MaxInt, math.MaxInt, 6}, "document 1 has"},
		{[]int{8, math.MaxInt, 1, math.MaxInt, 1}, "document 1 has"},
		{[]int{-1, 9}, "document 0 has -1 tokens"},
		{[]int{math.MinInt, math.MinInt, 8}, "document 0 has"},
		{[]int{0, 7, 0}, "hold 7 tokens, the sequence 8"},
		{[]int{3, 4}, "hold 7 tokens, the sequence 8"},
		{[]int{4, 5}, "document 1 has 5"},
	} {
		if m, err := NewMask(true, -1, 8, 8, c.docs); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("documents %v: mask %+v, %v; want %q", c.docs, m, err, c.want)
		}
	}
	if _, err := NewMask(true, -1, math.MaxInt, math.MaxInt, []int{half, half - 1}); err != nil {
		t.Errorf("documents that fit: %v", err)
	}
}

// The parts of the longest sequence are in order and cover it.
func TestPartsOfTheLongestSequence(t *testing.T) {
	for _, l := range []Layout{Contiguous{}, Zigzag{}} {
		const size = 7
		n, at := 0, map[int]int{}
		for r := range size {
			for _, s := range l.Spans(math.MaxInt, size, r) {
				n += s.Len
				at[s.Start] = s.Start + s.Len
			}
		}
		end := 0
		for range at {
			end = at[end]
		}
		if n != math.MaxInt || end != math.MaxInt {
			t.Errorf("%s: %d positions, to %d", l.Name(), n, end)
		}
	}
}

// FuzzDocuments: lengths that are accepted fill the sequence, and every position of it
// is in the spans of one rank.
func FuzzDocuments(f *testing.F) {
	f.Add(9, []byte{4, 5})
	f.Add(8, []byte{255, 255, 255})
	f.Add(0, []byte{})
	f.Add(math.MaxInt, []byte{128, 128, 1})
	f.Add(math.MaxInt, []byte{255})
	f.Add(math.MaxInt>>17, []byte{238}) // it had as many tiles as the square of 100,000 chunks
	f.Add(math.MaxInt>>17+1, []byte{237, 237, 1, 1})
	f.Fuzz(func(t *testing.T, seq int, lengths []byte) {
		var docs []int
		left := new(big.Int).SetInt64(int64(seq))
		good := true
		for _, b := range lengths {
			n := int(b)
			if b >= 128 { // lengths near the ends of an int
				n = math.MaxInt >> (255 - b)
			}
			docs = append(docs, n)
			good = good && n >= 0
			left.Sub(left, big.NewInt(int64(n)))
		}
		m, err := NewMask(true, -1, seq, seq, docs)
		if fill := good && left.Sign() == 0; len(docs) > 0 && fill != (err == nil) {
			t.Fatalf("documents %v of %d: %v", docs, seq, err)
		}
		if err != nil || seq < 1 || len(docs) == 0 {
			return
		}
		n, layout := 0, Ready(Document{Docs: docs}, seq, 3)
		for r := range 3 {
			for _, s := range layout.Spans(seq, 3, r) {
				if s.Start < 0 || s.Len < 1 || s.end() > seq || s.end() < 0 {
					t.Fatalf("documents %v of %d: span %+v", docs, seq, s)
				}
				n += s.Len
			}
			Plan(Shape{SeqQ: seq, SeqKV: seq, Size: 3, Layout: layout, Mask: m}, r, 0)
		}
		if n != seq {
			t.Errorf("documents %v of %d: %d positions", docs, seq, n)
		}
	})
}
