package ring

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

func every(t *testing.T, s partition.Shape, pattern func(*Planner, int) *Schedule) []*Schedule {
	t.Helper()
	p := &Planner{index: partition.NewIndex(s), size: s.Size, pattern: pattern}
	var all []*Schedule
	for r := range s.Size {
		all = append(all, p.Schedule(r))
	}
	return all
}

// Ulysses and every factoring of ranks into rings of groups, with heads that do not divide, and
// fewer heads of keys than ranks, or of queries.
func TestSchedulesCarryHeads(t *testing.T) {
	rng := rand.New(rand.NewPCG(31, 32))
	heads := [][2]int{{4, 4}, {8, 2}, {6, 3}, {6, 1}, {5, 5}, {3, 1}, {12, 4}, {10, 5}, {2, 2}, {1, 1}}
	for i := range 200 {
		shape := randomShape(rng)
		if i%2 == 0 && shape.Size%2 == 1 {
			shape.Size++
		}
		h := heads[i%len(heads)]
		for inner := 1; inner <= shape.Size; inner++ {
			if shape.Size%inner != 0 {
				continue
			}
			for _, algorithm := range Algorithms {
				sorted := rng.IntN(2) == 0
				all, err := hierarchical(algorithm, shape, inner, sorted, h[0], h[1])
				if err != nil {
					t.Fatal(err)
				}
				what := fmt.Sprintf("%s over %d groups of %d, sorted %t", algorithm, shape.Size/inner, inner, sorted)
				simulate(t, what, shape, h[0], h[1], all)
			}
		}
	}
}

// Ulysses is one call on all positions; and a gathered zigzag in the order of positions is a zigzag
// of the groups, one call a hop.
func TestGatheredRowsAreOneCall(t *testing.T) {
	for _, inner := range []int{1, 2, 4, 8} {
		all, err := hierarchical("ring", causalShape(256, 8, partition.Zigzag{}, -1), inner, true, 8, 2)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range all {
			if len(s.Forward) != 8/inner {
				t.Errorf("groups of %d: rank %d has %d hops", inner, s.Rank, len(s.Forward))
			}
			for _, h := range s.Forward {
				if len(h.Tiles) != 1 {
					t.Errorf("groups of %d: rank %d %s has %d tiles, want one", inner, s.Rank, h.Label, len(h.Tiles))
				}
			}
		}
	}
}

// The order of heads of keys must be one in which each serves as many heads of queries.
func TestHeadsOfKeysServeAlike(t *testing.T) {
	for _, c := range []struct {
		lo, hi, heads, kv int
		want              []int
	}{
		{0, 4, 8, 2, []int{0}}, {2, 4, 8, 8, []int{2, 3}}, {0, 8, 8, 2, []int{0, 1}},
		{1, 3, 6, 3, []int{0, 1}}, {1, 4, 6, 3, []int{0, 1, 1}}, {3, 4, 6, 3, []int{1}}, {2, 2, 6, 3, nil},
	} {
		if got := headsOf(partition.Range{Lo: c.lo, Hi: c.hi}, c.heads, c.kv); !reflect.DeepEqual(got, c.want) {
			t.Errorf("heads %d to %d of %d over %d: %v, want %v", c.lo, c.hi, c.heads, c.kv, got, c.want)
		}
	}
}

// Parts of one hop: rows gated by arrival, and blocks from two sides.
func TestSchedulesCarryParts(t *testing.T) {
	rng := rand.New(rand.NewPCG(33, 34))
	parts := 0
	for range 300 {
		shape := randomShape(rng)
		for name, pattern := range map[string]func(*Planner, int) *Schedule{"gated": (*Planner).gated, "both ways": (*Planner).bothWays} {
			all := every(t, shape, pattern)
			for _, s := range all {
				for _, h := range s.Backward {
					parts += len(h.Then)
				}
			}
			simulate(t, name, shape, 2, 1, all)
		}
	}
	if parts == 0 {
		t.Error("no hop has a second part")
	}
}

// A window over neighbouring blocks is a halo: one exchange with the neighbours alone, of the rows
// in the window alone.
func TestSchedulesCarryAHalo(t *testing.T) {
	for _, window := range []int{1, 5, 15, 16, 40} {
		shape := causalShape(128, 8, partition.Contiguous{}, window)
		for name, all := range map[string][]*Schedule{
			"halo":       every(t, shape, (*Planner).allgather),
			"gated halo": every(t, shape, (*Planner).gated),
		} {
			simulate(t, name, shape, 2, 1, all)
			for r, s := range all {
				want := int64(0) // rows of this block in the windows of the ranks behind it
				for d := 1; r+d < 8; d++ {
					want += int64(max(0, min(16, window-16*(d-1))))
				}
				if got, _ := s.Bytes(1, 1); got != want {
					t.Errorf("%s: rank %d sends %d rows in a window of %d, want %d", name, r, got, window, want)
				}
				for i, h := range s.Forward {
					if i > 0 && len(h.SendKV)+len(h.RecvKV) > 0 {
						t.Errorf("%s: rank %d sends keys in %q", name, r, h.Label)
					}
				}
			}
		}
	}
}

// The simulation must see what is wrong: a gate that is missing, a head that goes to the wrong
// place, a part of a gradient that is lost.
func TestSimulationSeesFaults(t *testing.T) {
	shape := causalShape(32, 4, partition.Zigzag{}, -1)
	heads := func() []*Schedule {
		all, err := hierarchical("ring", shape, 2, false, 4, 1)
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	faults := map[string]func() []*Schedule{
		"a call before its rows": func() []*Schedule {
			all := every(t, shape, (*Planner).gated)
			h := &all[1].Forward[0]
			last := &h.Then[len(h.Then)-1]
			h.RecvKV, last.RecvKV = last.RecvKV, nil
			return all
		},
		"exchanges in another order": func() []*Schedule {
			all := every(t, shape, (*Planner).gated)
			h := &all[1].Forward[0]
			h.RecvKV, h.Then[0].RecvKV = h.Then[0].RecvKV, nil
			return all
		},
		"heads in another order": func() []*Schedule {
			all := heads()
			x := all[0].Q
			x.Recv[0].Box, x.Recv[len(x.Recv)-1].Box = x.Recv[len(x.Recv)-1].Box, x.Recv[0].Box
			return all
		},
		"a copied head that replaces": func() []*Schedule {
			all := heads()
			for i := range all[2].KV.Send {
				all[2].KV.Send[i].Adds = false
			}
			return all
		},
		"no fold": func() []*Schedule {
			all := every(t, shape, (*Planner).bothWays)
			b := all[2].Backward
			b[len(b)-1].Fold = nil
			return all
		},
		"a message too few": func() []*Schedule {
			all := every(t, shape, (*Planner).ring)
			all[3].Forward[0].SendKV = nil
			return all
		},
	}
	for name, make := range faults {
		if s := simulated(shape, 4, 1, make()); s == "" {
			t.Errorf("%s: the simulation finds nothing", name)
		} else {
			t.Logf("%s: %s", name, s)
		}
	}
}

// Ring must not run what it would only half do.
func TestRingRefusesWhatItDoesNotDo(t *testing.T) {
	shape := causalShape(32, 4, partition.Zigzag{}, -1)
	gated := every(t, shape, (*Planner).gated)
	heads, err := hierarchical("ring", shape, 2, true, 4, 2)
	if err != nil {
		t.Fatal(err)
	}
	for want, s := range map[string]*Schedule{"further calls": gated[1], "exchanges heads": heads[1]} {
		r := Ring{Arena: tensor.NewMeter()}
		forward := r.Forward(attention.Partial{}, View{}, View{}, View{}, s, attention.Softmax{})
		backward := r.Backward(attention.Grads{}, View{}, View{}, View{}, View{}, attention.Partial{}, s, attention.Softmax{})
		for _, err := range []error{forward, backward} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("Ring runs it: %v, want an error with %q", err, want)
			}
		}
	}
	for _, algorithm := range Algorithms {
		s, err := New(algorithm, shape, 1)
		if err == nil {
			err = s.unsupported()
		}
		if err != nil {
			t.Errorf("%s: %v", algorithm, err)
		}
	}
}
