package ring

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"github.com/cprun/cprun/partition"
)

func every(t *testing.T, s partition.Shape, pattern func(*Planner, int) *Schedule) []*Schedule {
	t.Helper()
	p := &Planner{spec: Spec{Shape: s}, degree: 1, index: partition.NewIndex(s), size: s.Size}
	var all []*Schedule
	for r := range s.Size {
		all = append(all, pattern(p, r))
	}
	return all
}

// Ulysses and every factoring of ranks into rings of groups, with heads that do not divide, and
// fewer heads of keys than ranks, or of queries.
func TestSchedulesTradeHeads(t *testing.T) {
	rng := rand.New(rand.NewPCG(31, 32))
	heads := [][2]int{{4, 4}, {8, 2}, {6, 3}, {6, 1}, {5, 5}, {3, 1}, {12, 4}, {10, 5}, {2, 2}, {1, 1}}
	for i := range Draws(120) {
		shape := randomShape(rng)
		if i%2 == 0 && shape.Size%2 == 1 {
			shape.Size++
		}
		h := heads[i%len(heads)]
		for inner := 1; inner <= shape.Size; inner++ {
			if shape.Size%inner != 0 {
				continue
			}
			all := ulyssesGroups(shape, inner, h[0], h[1])
			simulate(t, fmt.Sprintf("%d groups of %d", shape.Size/inner, inner), shape, h[0], h[1], all)
			if inner == shape.Size && inner > 1 {
				ulysses := All("ulysses", Spec{Shape: shape, Heads: h[0], KVHeads: h[1]})
				for r, s := range ulysses {
					if s.Algorithm = "hierarchical"; !reflect.DeepEqual(s, all[r]) {
						t.Fatalf("one group of %+v is not Ulysses on rank %d", shape, r)
					}
				}
			}
		}
	}
}

func ulyssesGroups(shape partition.Shape, inner, heads, kvHeads int) []*Schedule {
	return All("hierarchical", Spec{Shape: shape, Heads: heads, KVHeads: kvHeads, Inner: inner})
}

// An all-gather of some heads at a time computes and returns the same as an all-gather of all heads.
func TestSchedulesGatherHeadsInGroups(t *testing.T) {
	rng := rand.New(rand.NewPCG(35, 36))
	for range Draws(150) {
		shape := randomShape(rng)
		kv := 1 + rng.IntN(5)
		n := rng.IntN(kv + 2)
		all := All("allgather", Spec{Shape: shape, Heads: 2 * kv, KVHeads: kv, GatherHeads: n})
		simulate(t, fmt.Sprintf("%d heads at a time", n), shape, 2*kv, kv, all)
	}
}

// The transfers of a group of heads begin beside a call of the group before, and no later than its last. The group's
// first hop moves nothing.
func TestTransfersOfAGroupOverlapTheGroupBefore(t *testing.T) {
	const kvHeads, n = 8, 3
	for _, gather := range Gathers {
		shape := causalShape(96, 4, partition.Zigzag{}, -1)
		all := All("allgather", Spec{Shape: shape, Heads: kvHeads, KVHeads: kvHeads, GatherHeads: n,
			Gather: gather})
		simulate(t, gather, shape, kvHeads, kvHeads, all)
		for _, s := range all {
			for pass, hops := range map[string][]Hop{"forward": s.Forward, "backward": s.Backward} {
				passes, early, last := 0, 0, false
				for i := range hops {
					h := &hops[i]
					if h.Begins {
						if passes++; passes > 1 && len(h.SendKV)+len(h.RecvKV) > 0 {
							t.Errorf("%s, %s of rank %d: %q moves rows of its own group", gather, pass, s.Rank, h.Label)
						}
						last = false
					}
					if h.Late && len(h.RecvKV) > 0 && !last {
						early++
					}
					last = last || h.Last
				}
				if want := (kvHeads + n - 1) / n; passes != want || early != want-1 {
					t.Errorf("%s, %s of rank %d: %d passes, %d of which come before the last call of another; want %d",
						gather, pass, s.Rank, passes, early, want)
				}
			}
		}
	}
}

// Ulysses is one call on all positions; and a gathered zigzag is a zigzag of the groups, one call a
// hop.
func TestGatheredRowsAreOneCall(t *testing.T) {
	for _, inner := range []int{1, 2, 4, 8} {
		for _, s := range ulyssesGroups(causalShape(256, 8, partition.Zigzag{}, -1), inner, 8, 2) {
			if len(s.Forward) != 8/inner {
				t.Errorf("groups of %d: rank %d has %d hops", inner, s.Rank, len(s.Forward))
			}
			if n := len(s.KVBufs); n != min(8/inner, 3) { // two take turns
				t.Errorf("groups of %d: rank %d has %d buffers of K and V", inner, s.Rank, n)
			}
			for _, h := range s.Forward {
				if len(h.Tiles) != 1 {
					t.Errorf("groups of %d: rank %d %s has %d tiles, want one", inner, s.Rank, h.Label, len(h.Tiles))
				}
			}
		}
	}
}

func TestSpecsThatDoNotFitAreRefused(t *testing.T) {
	shape := causalShape(32, 4, partition.Zigzag{}, -1)
	masked := func(m partition.Mask) partition.Shape { s := shape; s.Mask = m; return s }
	for _, c := range []struct {
		algorithm string
		spec      Spec
		want      string // of the error
	}{
		{"hierarchical", Spec{Shape: shape, Heads: 4, KVHeads: 2, Inner: 3}, "groups of 3"},
		{"hierarchical", Spec{Shape: shape, Heads: 4, KVHeads: 2}, "groups of 0"},
		{"hierarchical", Spec{Shape: shape, Heads: 4, KVHeads: 3, Inner: 2}, "4 of q"},
		{"hierarchical", Spec{Shape: shape, Inner: 2}, "0 of k and v"},
		{"hierarchical", Spec{Shape: shape, Heads: 4, KVHeads: 2, Inner: -4}, "groups of -4"},
		{"hierarchical", Spec{Shape: shape, Heads: 4, KVHeads: 2, Inner: 8}, "do not make up"},
		{"allgather", Spec{Shape: shape, GatherHeads: 1}, "KVHeads"},
		{"allgather", Spec{Shape: shape, Gather: "later"}, "Spec.Gather"},
		{"ring", Spec{Shape: masked(partition.Mask{})}, "Mask.Band"},
		{"ring", Spec{Shape: masked(partition.Mask{Docs: []int{12, 20}})}, "Mask.Band"},
		{"spiral", Spec{Shape: shape}, "allgather"}, // it lists the choices
	} {
		if _, err := New(c.algorithm, c.spec, 0); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s, want %s: New = %v", c.algorithm, c.want, err)
		}
	}
}

// A window over neighbouring blocks is a halo: one exchange with the neighbours alone, of the rows
// in the window alone.
func TestSchedulesCarryAHalo(t *testing.T) {
	for _, window := range []int{1, 5, 15, 16, 40} {
		shape := causalShape(128, 8, partition.Contiguous{}, window)
		all := every(t, shape, (*Planner).allgather)
		simulate(t, "halo", shape, 2, 1, all)
		for r, s := range all {
			want := int64(0) // rows of this block in the windows of later ranks
			for d := 1; r+d < 8; d++ {
				want += int64(max(0, min(16, window-16*(d-1))))
			}
			if got, _ := s.Bytes(1, 1); got != want {
				t.Errorf("rank %d sends %d rows in a window of %d, want %d", r, got, window, want)
			}
			for i, h := range s.Forward {
				if i > 0 && len(h.SendKV)+len(h.RecvKV) > 0 {
					t.Errorf("rank %d sends keys in %q", r, h.Label)
				}
			}
		}
	}
}

// Under a window every algorithm fetches its rows in one hop if they need no more memory than a ring's buffers.
func TestWindowsAreFetchedInOneHop(t *testing.T) {
	fetches := func(s *Schedule) (hops int) {
		for _, h := range s.Forward {
			if len(h.SendKV)+len(h.RecvKV) > 0 {
				hops++
			}
		}
		return hops
	}
	for _, c := range []struct {
		layout partition.Layout
		window int
		one    bool
	}{
		{partition.Contiguous{}, 1, true}, {partition.Contiguous{}, 32, true}, {partition.Contiguous{}, 33, false},
		{partition.Zigzag{}, 5, true}, {partition.Zigzag{}, 16, true}, {partition.Zigzag{}, 40, false},
		{partition.Striped{}, 5, false},
	} {
		shape := causalShape(128, 8, c.layout, c.window)
		for _, algorithm := range []string{"ring", "hierarchical"} {
			all := All(As(algorithm, Spec{Shape: shape, Heads: 2, KVHeads: 1, Inner: 1}))
			most, whole := 0, every(t, shape, (*Planner).allgather)
			for r, s := range all {
				most = max(most, fetches(s))
				got, _ := s.Bytes(1, 1)
				if want, _ := whole[r].Bytes(1, 1); c.one && got != want {
					t.Errorf("%s, %s, window %d: rank %d sends %d rows, the halo has %d", algorithm, c.layout.Name(),
						c.window, r, got, want)
				}
				if room := s.KVBufs[0].Rows * 2; c.one && len(s.KVBufs) > 1 && s.KVBufs[1].Rows > room {
					t.Errorf("%s, %s, window %d: rank %d has room for %d rows, a ring for %d", algorithm,
						c.layout.Name(), c.window, r, s.KVBufs[1].Rows, room)
				}
			}
			if one := most == 1; one != c.one {
				t.Errorf("%s, %s, window %d: keys travel in %d hops", algorithm, c.layout.Name(), c.window, most)
			}
			simulate(t, algorithm, shape, 2, 1, all)
		}
	}
	// The same between groups that exchange heads.
	for _, s := range ulyssesGroups(causalShape(128, 8, partition.Contiguous{}, 20), 2, 4, 2) {
		if n := fetches(s); n > 1 {
			t.Errorf("rank %d of groups of 2: keys travel in %d hops", s.Rank, n)
		}
	}
}

// The simulation must detect faults: a call before its rows arrive, misplaced heads, a lost part of a gradient, and
// groups of heads in each other's memory.
func TestSimulationSeesFaults(t *testing.T) {
	shape := causalShape(32, 4, partition.Zigzag{}, -1)
	rings := func() []*Schedule { return every(t, shape, (*Planner).ring) }
	heads := func() []*Schedule { return ulyssesGroups(shape, 2, 4, 1) }
	gathered := func() []*Schedule {
		return All("allgather", Spec{Shape: shape, Heads: 4, KVHeads: 4, GatherHeads: 1})
	}
	for _, c := range []struct {
		name    string
		kvHeads int
		make    func() []*Schedule
		fault   func(all []*Schedule)
	}{
		{"a call before its rows", 1, rings, func(all []*Schedule) {
			h := all[1].Forward
			h[0].Keys, h[1].Keys = h[1].Keys, h[0].Keys
			h[0].Tiles, h[1].Tiles = h[1].Tiles, h[0].Tiles
		}},
		{"exchanges in another order", 1, rings, func(all []*Schedule) {
			h := all[1].Forward
			h[0].SendKV, h[1].SendKV = h[1].SendKV, h[0].SendKV
		}},
		{"no fold", 1, rings, func(all []*Schedule) {
			b := all[2].Backward
			b[len(b)-1].Fold = nil
		}},
		{"a message too few", 1, rings, func(all []*Schedule) { all[3].Forward[0].SendKV = nil }},
		{"heads in another order", 1, heads, func(all []*Schedule) {
			x := all[0].Q
			x.Recv[0].Box, x.Recv[len(x.Recv)-1].Box = x.Recv[len(x.Recv)-1].Box, x.Recv[0].Box
		}},
		{"a copied head that replaces", 1, heads, func(all []*Schedule) {
			for i := range all[2].KV.Send {
				all[2].KV.Send[i].Adds = false
			}
		}},
		{"rows of two groups in one memory", 4, gathered, func(all []*Schedule) {
			for i, x := range all[1].KVBufs {
				if x.In == i && i > 3 { // the second set
					all[1].KVBufs[i].In = i - 3
				}
			}
		}},
		{"a late transfer that nobody waits for", 4, gathered, func(all []*Schedule) {
			h := all[2].Forward
			for i := range h {
				h[i].Begins = h[i].Begins && i < 2
			}
		}},
		{"no copy of the own heads", 4, gathered, func(all []*Schedule) { all[0].Forward[0].CopyKV = nil }},
		{"a copy over rows that are read", 4, gathered, func(all []*Schedule) {
			for i := range all[0].Forward {
				if h := &all[0].Forward[i]; len(h.Tiles) > 0 && len(h.CopyKV) > 0 {
					h.CopyKV[0].Dst.Buf = h.Keys.Buf
				}
			}
		}},
	} {
		all := c.make()
		c.fault(all)
		if s := simulated(shape, 4, c.kvHeads, all); s == "" {
			t.Errorf("%s: the simulation finds nothing", c.name)
		} else {
			t.Logf("%s: %s", c.name, s)
		}
	}
}
