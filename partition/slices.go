package partition

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// SliceMask is the mask of a Slice, by the names of MagiAttention.
type SliceMask uint8

// The masks of slices. Of m queries and n keys, counted from the slice's own corner, query i sees key j
// if
const (
	SliceFull      SliceMask = iota // always
	SliceCausal                     // j <= i + n - m: aligned at the bottom right
	SliceInvCausal                  // j >= i: aligned at the top left
	SliceBiCausal                   // both: a band of n - m + 1 diagonals, none if there are fewer keys than queries
)

var sliceMasks = [...]string{"full", "causal", "inv_causal", "bi_causal"}

func (m SliceMask) String() string { return sliceMasks[m] }

// ParseSliceMask returns the mask of that name; the error lists the names.
func ParseSliceMask(s string) (SliceMask, error) {
	if i := slices.Index(sliceMasks[:], s); i >= 0 {
		return SliceMask(i), nil
	}
	return 0, fmt.Errorf("mask %.64q is none of %s", s, strings.Join(sliceMasks[:], ", "))
}

// Slice is a rectangle of queries and keys of the whole sequence, and the pairs that it shows. Slices are
// the masks of MagiAttention (SandAI, 2025): prefixes that all see, documents in blocks, and other
// masks that no band describes.
type Slice struct {
	// Q and K are its queries and keys, either may be empty.
	Q, K Range
	Mask SliceMask // counted from its own corners
}

// tile returns the slice as a band over global positions; ok is false if it shows nothing.
func (s Slice) tile() (t Tile, ok bool) {
	t = Tile{Q: Range{0, s.Q.Len()}, K: Range{0, s.K.Len()}, Band: Full()}
	if s.Mask == SliceCausal || s.Mask == SliceBiCausal {
		t.Band.Hi = t.K.Hi - t.Q.Hi
	}
	if s.Mask == SliceInvCausal || s.Mask == SliceBiCausal {
		t.Band.Lo = 0
	}
	if t, ok = t.Trim(); !ok {
		return t, false
	}
	return t.move(s.Q.Lo, s.K.Lo), true
}

// SliceMaskOf returns the mask of slices: a pair is visible if a slice shows it, once however many do.
// (MagiAttention asks for slices that share no pair.) Slices may be empty, and in any order.
func SliceMaskOf(seqQ, seqKV int, list []Slice) (Mask, error) {
	var tiles []Tile
	for i, s := range list {
		if s.Q.Lo < 0 || s.Q.Lo > s.Q.Hi || s.Q.Hi > seqQ {
			return Mask{}, fmt.Errorf("slice %d: queries %d to %d lie outside the sequence of %d", i,
				s.Q.Lo, s.Q.Hi, seqQ)
		}
		if s.K.Lo < 0 || s.K.Lo > s.K.Hi || s.K.Hi > seqKV {
			return Mask{}, fmt.Errorf("slice %d: keys %d to %d lie outside the sequence of %d", i,
				s.K.Lo, s.K.Hi, seqKV)
		}
		if t, ok := s.tile(); ok {
			tiles = append(tiles, t)
		}
	}
	tiles, err := apartAll(tiles)
	if err != nil {
		return Mask{}, err
	}
	joined := make([]weighed, len(tiles))
	for i, t := range tiles {
		joined[i].Tile = t
	}
	return sliced(joinAll(joined)), nil
}

// The cost of slices that overlap: how many pieces they may be cut into, and how often two pieces are
// held against each other. Slices that share no queries are never held against each other.
const (
	maxPieces = 1 << 18
	maxTrials = 1 << 22
)

// ErrOverlap says that slices overlap in more ways than are worth cutting up.
var ErrOverlap = errors.New("slices overlap in too many ways; give ones that share fewer queries and keys")

func apartAll(tiles []Tile) ([]Tile, error) {
	order := func(a, b Tile) int { return cmp.Or(cmp.Compare(a.Q.Lo, b.Q.Lo), cmp.Compare(a.K.Lo, b.K.Lo)) }
	slices.SortStableFunc(tiles, order)
	var out, near, parts, rest []Tile // near: tiles that may share queries with later ones
	trials := 0
	for _, t := range tiles {
		near = slices.DeleteFunc(near, func(n Tile) bool { return n.Q.Hi <= t.Q.Lo })
		parts, trials = append(parts[:0], t), trials+len(near)
		for _, n := range near {
			if trials += len(parts); trials > maxTrials {
				return nil, ErrOverlap
			}
			rest = rest[:0]
			for _, p := range parts {
				rest = p.without(n, rest)
			}
			parts, rest = rest, parts
		}
		if len(out)+len(parts) > maxPieces {
			return nil, ErrOverlap
		}
		out, near = append(out, parts...), append(near, parts...)
	}
	slices.SortStableFunc(out, order)
	return out, nil
}

// without appends the pairs of t outside n, as disjoint tiles: the rows above and below the box of both, the columns
// beside it in its rows, and the diagonals at either side in the box.
func (t Tile) without(n Tile, out []Tile) []Tile {
	both, ok := Tile{
		Q:    Range{max(t.Q.Lo, n.Q.Lo), min(t.Q.Hi, n.Q.Hi)},
		K:    Range{max(t.K.Lo, n.K.Lo), min(t.K.Hi, n.K.Hi)},
		Band: Band{max(t.Band.Lo, n.Band.Lo), min(t.Band.Hi, n.Band.Hi)},
	}.Trim()
	if !ok {
		return append(out, t)
	}
	for _, part := range [...]Tile{
		{Range{t.Q.Lo, both.Q.Lo}, t.K, t.Band},
		{Range{both.Q.Hi, t.Q.Hi}, t.K, t.Band},
		{both.Q, Range{t.K.Lo, both.K.Lo}, t.Band},
		{both.Q, Range{both.K.Hi, t.K.Hi}, t.Band},
		{both.Q, both.K, Band{t.Band.Lo, both.Band.Lo - 1}},
		{both.Q, both.K, Band{both.Band.Hi + 1, t.Band.Hi}},
	} {
		if part, ok := part.Trim(); ok {
			out = append(out, part)
		}
	}
	return out
}
