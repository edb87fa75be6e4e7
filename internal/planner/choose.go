package planner

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// Kind is layers of a model with one mask.
type Kind struct {
	Window int // keys before a query's own that it sees; -1: all
	Layers int
}

// Case is what a choice is made for: the attention of all layers of a model, over the ranks of a context
// group, for sequences of one packing.
type Case struct {
	Attention        // its Backend is left to the ways
	Tokens    int    // of a sequence, over all ranks
	Docs      []int  // the lengths of its documents; none: one sequence, or documents that are not told apart
	Kinds     []Kind // each window once
	Ranks     int    // of the context group
	At        Place  // where they stand
	// Laid is the layout of that name, if it is there by now: Docs dealt out to ranks. nil: not yet.
	Laid partition.Layout
	// Recompute says that the backward pass runs the forward pass again.
	Recompute bool
}

// Way is one way in which attention can run.
type Way struct {
	Layout      string `json:"layout"`                 // of partition.Names
	Algorithm   string `json:"algorithm"`              // of ring.Algorithms
	Inner       int    `json:"inner,omitempty"`        // of hierarchical: ranks that trade heads
	GatherHeads int    `json:"gather_heads,omitempty"` // of allgather: heads at a time; 0: all
	Gather      string `json:"gather,omitempty"`       // of ring.Gathers, of rows that are fetched in one hop; "": beside
	Backend     string `json:"backend"`
}

func (w Way) String() string {
	s := w.Algorithm
	switch {
	case w.Inner > 0:
		s += fmt.Sprintf(" (inner %d)", w.Inner)
	case w.GatherHeads > 0:
		s += fmt.Sprintf(" (gather_heads %d)", w.GatherHeads)
	}
	if w.Algorithm == "allgather" {
		s += map[string]string{ring.Before: " (before)", ring.Auto: " (before, forward)"}[w.Gather]
	}
	return s + ", " + w.Layout + ", " + w.Backend
}

// When returns when rows travel that are fetched in one hop, as parallel.gather says it.
func (w Way) When() string { return cmp.Or(w.Gather, ring.Beside) }

// Timed is a way and the seconds of the forward and backward pass of one layer.
type Timed struct {
	Way
	Seconds float64 `json:"seconds"`
}

// KindChoice is what layers of one mask are to do.
type KindChoice struct {
	Kind
	// Ranked is the ways in order, the chosen one first. All have a known time.
	Ranked []Timed
}

// Choice is one layout and backend for all layers, and for each kind of layers the rest of the way.
type Choice struct {
	Kinds   []KindChoice
	Seconds float64 // of attention in all layers, forward and backward
	// Ranked is the best of each layout and backend for the whole model, the chosen one first.
	Ranked []Model
	Known  bool // there was a way with a known cost

	margin float64 // by which they were compared
}

// Model is a layout and a backend, and what all layers take by the best way of each that has them.
type Model struct {
	Layout  string `json:"layout"`
	Backend string `json:"backend"`
	// Seconds is of attention in all layers, forward and backward.
	Seconds float64 `json:"seconds"`
}

// Margin is the share by which a way has to be faster than one before it in the list. Predictions do not tell smaller
// differences apart, and a choice should not follow from what a table was measured beside.
const Margin = 0.02

// SharedMargin is the Margin where ranks share cores: what they take follows from what else runs there.
const SharedMargin = 0.04

// Margin returns that of ranks which stand there.
func (p Place) Margin() float64 {
	if p.Shared {
		return SharedMargin
	}
	return Margin
}

// Choose finds the way that takes the least time, for each kind of layers, among ways that have one layout
// and one backend: activations lie in the layout, and one set of kernels is loaded. Among equals the first
// wins. It is a pure function of its arguments, so that ranks which have the same costs agree.
func Choose(c Case, ways []Way, costs Costs) (Choice, error) {
	return choose(c, ways, costs, ExactRanks)
}

// Quick chooses as Choose does, by a few ranks of each way: that with most work, and those at the edge of a host,
// each as if its peers were as far as it is. It is for a packing that comes with a step.
func Quick(c Case, ways []Way, costs Costs) (Choice, error) { return choose(c, ways, costs, 1) }

func choose(c Case, ways []Way, costs Costs, exact int) (Choice, error) {
	out := Choice{margin: c.At.Margin()}
	times := make([][]float64, len(c.Kinds)) // of each kind and way
	common := newCommon(costs)
	defer common.done()
	for k, kind := range c.Kinds {
		s := newSimulator(c, kind, common, exact)
		for _, w := range ways {
			t, err := s.time(w)
			if err != nil {
				return out, fmt.Errorf("%s: %w", w, err)
			}
			times[k] = append(times[k], t)
		}
	}
	for _, w := range ways {
		m := Model{Layout: w.Layout, Backend: w.Backend}
		if slices.ContainsFunc(out.Ranked, func(x Model) bool { return x.Layout == m.Layout && x.Backend == m.Backend }) {
			continue
		}
		for k, kind := range c.Kinds {
			best := math.Inf(1)
			for i, x := range ways {
				if x.Layout == m.Layout && x.Backend == m.Backend {
					best = min(best, times[k][i])
				}
			}
			m.Seconds += float64(kind.Layers) * best
		}
		if !math.IsInf(m.Seconds, 1) {
			out.Ranked = append(out.Ranked, m)
		}
	}
	if len(out.Ranked) == 0 {
		return out, nil
	}
	rank(out.Ranked, c.At.Margin(), math.Inf(1), func(m Model) float64 { return m.Seconds })
	best := out.Ranked[0]
	out.Known, out.Seconds = true, 0
	for k, kind := range c.Kinds {
		choice := KindChoice{Kind: kind}
		for _, same := range []bool{true, false} { // those that the others go along with come first
			var list []Timed
			for i, w := range ways {
				if same == (w.Layout == best.Layout && w.Backend == best.Backend) && !math.IsInf(times[k][i], 1) {
					list = append(list, Timed{w, times[k][i]})
				}
			}
			rank(list, c.At.Margin(), slices.Min(times[k]), func(t Timed) float64 { return t.Seconds })
			choice.Ranked = append(choice.Ranked, list...)
		}
		tail := choice.Ranked[1:]
		slices.SortStableFunc(tail, func(a, b Timed) int { return cmp.Compare(a.Seconds, b.Seconds) })
		out.Kinds = append(out.Kinds, choice)
		out.Seconds += float64(kind.Layers) * choice.Ranked[0].Seconds
	}
	return out, nil
}

// Best returns the one way that takes least in all layers, for a config that has one for all of them, and its
// seconds. Layers of other kinds may be faster by the first of their own ranking.
func (c *Choice) Best() (Way, float64) {
	var list []Timed
	least := math.Inf(1) // of all layouts and backends
	for _, w := range c.Kinds[0].Ranked {
		seconds := c.of(w.Way)
		least = min(least, seconds)
		if m := c.Ranked[0]; w.Layout == m.Layout && w.Backend == m.Backend {
			list = append(list, Timed{w.Way, seconds})
		}
	}
	rank(list, c.margin, least, func(t Timed) float64 { return t.Seconds })
	return list[0].Way, list[0].Seconds
}

// Apart returns the kinds of layers, by window, that another way of the same layout and backend serves better than that of
// all layers, by more than predictions tell apart, and the seconds of all layers if these run by it. takes says whether
// layers of a window can run by such a way; it is asked in order, of one kind after the other.
func (c *Choice) Apart(all Way, takes func(window int, own Way) bool) (map[int]Way, float64) {
	own, seconds := map[int]Way{}, 0.0
	for _, k := range c.Kinds {
		best, i := k.Ranked[0], slices.IndexFunc(k.Ranked, func(t Timed) bool { return t.Way == all })
		if i < 0 {
			return nil, math.Inf(1)
		}
		same := k.Ranked[i]
		if best.Layout == all.Layout && best.Backend == all.Backend && best.Seconds <= same.Seconds*(1-c.margin) && takes(k.Window, best.Way) {
			own[k.Window], same = best.Way, best
		}
		seconds += float64(k.Layers) * same.Seconds
	}
	return own, seconds
}

// of is the seconds of all layers by that way.
func (c *Choice) of(w Way) (seconds float64) {
	for _, k := range c.Kinds {
		i := slices.IndexFunc(k.Ranked, func(t Timed) bool { return t.Way == w })
		if i < 0 {
			return math.Inf(1)
		}
		seconds += float64(k.Layers) * k.Ranked[i].Seconds
	}
	return seconds
}

// rank puts the first of those that are within a margin of the fastest in front, and the others in the order
// of their times. The fastest takes least, or is one of the list; where none is within the margin, it is that of the list.
func rank[T any](list []T, margin, least float64, of func(T) float64) {
	if len(list) == 0 {
		return
	}
	fastest := slices.MinFunc(list, func(a, b T) int { return cmp.Compare(of(a), of(b)) })
	least = min(least, of(fastest))
	i := slices.IndexFunc(list, func(x T) bool { return of(x)*(1-margin) <= least })
	if i < 0 {
		i = slices.IndexFunc(list, func(x T) bool { return of(x) == of(fastest) })
	}
	first := list[i]
	list = append(slices.Delete(list, i, i+1), first)
	copy(list[1:], list)
	list[0] = first
	slices.SortStableFunc(list[1:], func(a, b T) int { return cmp.Compare(of(a), of(b)) })
}
