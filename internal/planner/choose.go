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
	return s + ", " + w.Layout + ", " + w.Backend
}

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
const SharedMargin = 0.1

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
	laid := map[string]partition.Layout{}    // every kind has the same
	for k, kind := range c.Kinds {
		s := newSimulator(c, kind, costs, exact)
		s.laid = laid
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
	rank(out.Ranked, c.At.Margin(), func(m Model) float64 { return m.Seconds })
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
			rank(list, c.At.Margin(), func(t Timed) float64 { return t.Seconds })
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
	for _, w := range c.Kinds[0].Ranked {
		if m := c.Ranked[0]; w.Layout == m.Layout && w.Backend == m.Backend {
			list = append(list, Timed{w.Way, c.of(w.Way)})
		}
	}
	rank(list, c.margin, func(t Timed) float64 { return t.Seconds })
	return list[0].Way, list[0].Seconds
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
// of their times.
func rank[T any](list []T, margin float64, of func(T) float64) {
	if len(list) == 0 {
		return
	}
	least := math.Inf(1)
	for _, x := range list {
		least = min(least, of(x))
	}
	i := slices.IndexFunc(list, func(x T) bool { return of(x)*(1-margin) <= least })
	first := list[i]
	list = append(slices.Delete(list, i, i+1), first)
	copy(list[1:], list)
	list[0] = first
	slices.SortStableFunc(list[1:], func(a, b T) int { return cmp.Compare(of(a), of(b)) })
}

// simulator times the ways of one kind of layers.
type simulator struct {
	Case
	kind    Kind
	costs   Costs
	exact   int // ranks up to which each is followed
	laid    map[string]partition.Layout
	shapes  map[string]partition.Shape
	follows map[followKey][]int
	known   map[Way]Schedules
}

// followKey is what the work of ranks follows from.
type followKey struct {
	layout  string
	traders int
}

func newSimulator(c Case, kind Kind, costs Costs, exact int) *simulator {
	return &simulator{Case: c, kind: kind, costs: costs, exact: exact, laid: map[string]partition.Layout{}, shapes: map[string]partition.Shape{}, follows: map[followKey][]int{}, known: map[Way]Schedules{}}
}

// shape is that of a layout, made once.
func (s *simulator) shape(name string) (partition.Shape, error) {
	if x, ok := s.shapes[name]; ok {
		return x, nil
	}
	docs := s.Docs
	if len(docs) == 0 {
		docs = []int{s.Tokens}
	}
	windows := make([]int, len(s.Kinds))
	for i, k := range s.Kinds {
		windows[i] = k.Window
	}
	layout := s.laid[name]
	switch {
	case layout != nil:
	case s.Laid != nil && s.Laid.Name() == name:
		layout = s.Laid
	default:
		made, err := partition.New(name, docs, partition.Windows(windows)...)
		if err != nil {
			return partition.Shape{}, err
		}
		layout = partition.Ready(made, s.Tokens, s.Ranks)
	}
	s.laid[name] = layout
	mask, err := partition.NewMask(true, s.kind.Window, s.Tokens, s.Tokens, s.Docs)
	x := partition.Shape{SeqQ: s.Tokens, SeqKV: s.Tokens, Size: s.Ranks, Layout: layout, Mask: mask}
	s.shapes[name] = x
	return x, err
}

// time is the seconds of a layer by that way, forward and backward.
func (s *simulator) time(w Way) (float64, error) {
	shape, err := s.shape(w.Layout)
	if err != nil {
		return 0, err
	}
	return s.timeOf(shape, w)
}

// timeOf is time, of a sequence that has been laid out.
func (s *simulator) timeOf(shape partition.Shape, w Way) (float64, error) {
	spec := ring.Spec{Shape: shape, Heads: s.Heads, KVHeads: s.KVHeads, Inner: w.Inner, GatherHeads: w.GatherHeads}
	a := s.Attention
	a.Backend = w.Backend
	var follow []int
	if s.Ranks > s.exact && !(s.At.Shared && s.Ranks <= fewRanks) { // of shared cores the average is of all
		follow = s.follow(shape, w)
	}
	all, err := s.schedules(w, spec, follow)
	if err != nil {
		return 0, err
	}
	total := 0.0
	for _, backward := range []bool{false, true} {
		r, err := pass(all, s.Ranks, follow, a, backward, s.At, s.costs, false)
		if err != nil {
			return 0, err
		}
		total += r.Seconds
		if !backward && s.Recompute {
			total += r.Seconds
		}
	}
	return total, nil
}

// schedules is those of a way, or of some ranks. Ways that gather other numbers of heads have the same.
func (s *simulator) schedules(w Way, spec ring.Spec, follow []int) (all Schedules, err error) {
	gather := w.GatherHeads
	w.GatherHeads, w.Backend, spec.GatherHeads = 0, "", 0
	all = s.known[w]
	if all == nil {
		if follow == nil {
			all, err = ring.NewPlanner(w.Algorithm, spec)
		} else {
			all, err = some(w.Algorithm, spec, follow)
		}
		if err != nil {
			return nil, err
		}
		s.known[w] = all
	}
	if gather > 0 {
		return gathering{all, gather}, nil
	}
	return all, nil
}

// gathering is schedules that gather so many heads at a time.
type gathering struct {
	Schedules
	heads int
}

func (g gathering) Schedule(rank int) *ring.Schedule {
	s := *g.Schedules.Schedule(rank)
	s.GatherHeads = g.heads
	return &s
}

// fewRanks is how many ranks may ask each other in pairs, for the schedules of some of them.
const fewRanks = 16

// some is the schedules of some ranks.
func some(algorithm string, spec ring.Spec, ranks []int) (Schedules, error) {
	all := made{}
	if spec.Size <= fewRanks { // what all ranks share costs less than to make it for each
		p, err := ring.NewPlanner(algorithm, spec)
		for _, r := range ranks {
			if err == nil {
				all[r] = p.Schedule(r)
			}
		}
		return all, err
	}
	for _, r := range ranks {
		s, err := ring.New(algorithm, spec, r)
		if err != nil {
			return nil, err
		}
		all[r] = s
	}
	return all, nil
}

type made map[int]*ring.Schedule

func (m made) Schedule(rank int) *ring.Schedule { return m[rank] }

// follow is the ranks that stand for all: that with most work, that whose keys take longest to come and to go, and those
// at the edge of a host.
func (s *simulator) follow(shape partition.Shape, w Way) []int {
	traders := ring.Traders(w.Algorithm, s.Ranks, w.Inner)
	key := followKey{w.Layout, traders}
	if list, ok := s.follows[key]; ok {
		return list
	}
	work := partition.WorkOfHeads(partition.Work(shape), traders, s.Heads)
	most := 0
	for r := range work {
		if work[r] >= work[most] {
			most = r
		}
	}
	list := append([]int{most}, s.busiest(shape, w.Layout)...)
	if edge := s.At.edge(s.Ranks); edge > 0 {
		list = append(list, edge-1, edge)
	}
	slices.Sort(list)
	list = slices.Compact(list)
	s.follows[key] = list
	return list
}

// busiest is the ranks whose keys take longest to come, and to go, if every rank sends what others need; none where
// there are no documents, and all ranks need alike, or so many ranks that pairs of them are many.
func (s *simulator) busiest(shape partition.Shape, layout string) []int {
	if len(s.Docs) == 0 || s.Ranks > fewRanks {
		return nil
	}
	key := followKey{layout, 0}
	if list, ok := s.follows[key]; ok {
		return list
	}
	index, row := partition.NewIndex(shape), int64(s.KVHeads*s.Batch*(s.Dim+s.DimV)*s.DType.Size())
	came, gone := make([]float64, s.Ranks), make([]float64, s.Ranks)
	for to := range s.Ranks {
		for from := range s.Ranks {
			if n := index.Needs(to, from).Len(); n > 0 && from != to {
				t := s.costs.Exchange(s.At.First+from, s.At.First+to, int64(n)*row, 2)
				came[to] += t
				gone[from] += t
			}
		}
	}
	most, source := 0, 0
	for r := range came {
		if came[r] > came[most] {
			most = r
		}
		if gone[r] > gone[source] {
			source = r
		}
	}
	s.follows[key] = []int{most, source}
	return s.follows[key]
}
