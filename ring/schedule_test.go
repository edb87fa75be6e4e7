package ring

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/partition"
)

func randomShape(rng *rand.Rand) partition.Shape {
	s := partition.Shape{SeqQ: 1 + rng.IntN(40), Size: 1 + rng.IntN(8)}
	s.SeqKV = s.SeqQ
	var docs []int
	switch rng.IntN(3) {
	case 0:
		for n := s.SeqQ; n > 0; {
			d := 1 + rng.IntN(n)
			docs = append(docs, d)
			n -= d
		}
	case 1:
		s.SeqKV = 1 + rng.IntN(40)
	}
	s.Mask, _ = partition.NewMask(rng.IntN(3) > 0, rng.IntN(12)-4, s.SeqQ, s.SeqKV, docs)
	if d := attentiontest.RandomDefinition(rng.Uint64(), 40); docs == nil && rng.IntN(2) == 0 {
		s.SeqQ, s.SeqKV = d.SeqQ, d.SeqKV
		s.Mask, _ = d.Mask()
	}
	all := Layouts(docs)
	s.Layout = all[rng.IntN(len(all))]
	return s
}

// specOf returns a shape with heads that every algorithm can divide.
func specOf(s partition.Shape) Spec {
	return Spec{Shape: s, Heads: 4, KVHeads: 2, Inner: partition.Inner(s.Size, s.Size, 4, 2), Split: s.SeqQ%2 == 0}
}

// Every schedule, on every rank, must compute each visible pair once, with the right key in
// the right row, and bring every part of a key's gradient home.
func TestSchedulesComputeEveryPairOnce(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range Draws(300) {
		shape := randomShape(rng)
		for _, algorithm := range Variants {
			all := All(As(algorithm, specOf(shape)))
			simulate(t, algorithm, shape, 4, 2, all)
		}
	}
}

// Packed documents of a long tail, over more ranks than some have positions.
func TestSchedulesOfDocumentsComputeEveryPairOnce(t *testing.T) {
	rng := rand.New(rand.NewPCG(15, 16))
	for _, size := range []int{1, 2, 3, 4, 6, 8} {
		for range Draws(4) {
			n := 1 + rng.IntN(120)
			var docs []int
			for left := n; left > 0; left -= docs[len(docs)-1] {
				docs = append(docs, min(left, 1+rng.IntN(1+rng.IntN(n))))
			}
			m := Must(partition.NewMask(rng.IntN(3) > 0, rng.IntN(30)-10, n, n, docs))
			shape := partition.Shape{SeqQ: n, SeqKV: n, Size: size,
				Layout: partition.Document{Docs: docs, Bands: []partition.Band{m.Band}}, Mask: m}
			index := partition.NewIndex(shape)
			index.Prepare()
			for _, algorithm := range Variants {
				name, spec := As(algorithm, Spec{Shape: shape, Heads: 2, KVHeads: 1, Inner: 1, Split: n%2 == 0})
				all := All(name, spec)
				simulate(t, algorithm, shape, 2, 1, all)
				prepared := Must(NewIndexedPlanner(name, spec, index))
				hops := func(s *Schedule) string { return fmt.Sprint(s.Forward, s.Backward, s.KVBufs, s.GradBufs) }
				for r, want := range all {
					if got := hops(prepared.Schedule(r)); got != hops(want) {
						t.Fatalf("%s: by a prepared index rank %d has %s, without %s", algorithm, r, got, hops(want))
					}
				}
			}
		}
	}
}

func causalShape(n, size int, l partition.Layout, window int) partition.Shape {
	m, _ := partition.NewMask(true, window, n, n, nil)
	return partition.Shape{SeqQ: n, SeqKV: n, Size: size, Layout: l, Mask: m}
}

func TestHopsWhereNothingIsVisibleAreSkipped(t *testing.T) {
	// A window of one block's length: a contiguous rank reads its own block and the one
	// before it, so the ring ends after one hop, whatever the number of ranks.
	for rank := range 8 {
		s := Must(New("ring", specOf(causalShape(128, 8, partition.Contiguous{}, 16)), rank))
		if len(s.Forward) > 2 {
			t.Errorf("rank %d runs %d forward hops, want at most 2: %+v", rank, len(s.Forward), s.Forward)
		}
	}
	// Causal and contiguous: rank 0 sees only its own keys, and still passes none on that
	// it does not own.
	s := Must(New("ring", specOf(causalShape(128, 8, partition.Contiguous{}, -1)), 0))
	for _, h := range s.Forward[1:] {
		if len(h.Tiles) > 0 || len(h.RecvKV) > 0 {
			t.Errorf("rank 0 of a causal contiguous ring has work in %q: %+v", h.Label, h)
		}
	}
}

// With gather auto, rows of several documents travel before the forward pass; all else travels beside it.
func TestGatherAuto(t *testing.T) {
	for _, docs := range [][]int{nil, {61}, {20, 41}} {
		for _, size := range []int{1, 5} {
			mask := Must(partition.NewMask(true, -1, 61, 61, docs))
			made := map[string]*Schedule{}
			for _, gather := range Gathers {
				spec := specOf(partition.Shape{SeqQ: 61, SeqKV: 61, Size: size, Layout: partition.Zigzag{}, Mask: mask})
				spec.Gather = gather
				made[gather] = Must(New("allgather", spec, 0))
			}
			forward := Beside
			if len(docs) > 1 {
				forward = Before
			}
			if got := made[Auto]; !reflect.DeepEqual(got.Forward, made[forward].Forward) ||
				!reflect.DeepEqual(got.Backward, made[Beside].Backward) {
				t.Errorf("documents %v over %d ranks: auto is not %s forward and %s backward", docs, size, forward,
					Beside)
			}
			if differ := !reflect.DeepEqual(made[Before].Forward, made[Beside].Forward); differ != (size > 1) {
				t.Errorf("documents %v over %d ranks: the two ways differ: %t", docs, size, differ)
			}
		}
	}
}
