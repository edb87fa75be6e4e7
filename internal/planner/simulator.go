package planner

import (
	"slices"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// common is what all kinds of layers of a case have in common.
type common struct {
	laid    map[string]partition.Layout
	indexes map[string]*partition.Index // of each layout, under the mask of the first kind that asked
	*compiler
}

func newCommon(costs Costs) *common {
	return &common{map[string]partition.Layout{}, map[string]*partition.Index{}, newCompiler(Attention{}, false, Place{}, costs)}
}

// simulator times the ways of one kind of layers.
type simulator struct {
	Case
	*common
	kind    Kind
	exact   int // ranks up to which each is followed
	shapes  map[string]partition.Shape
	index   map[string]*partition.Index // of each layout, under the mask of this kind
	follows map[followKey][]int
	known   map[Way]made
	times   map[Way]float64 // of ways whose schedules are those of others
}

// followKey is what the work of ranks follows from.
type followKey struct {
	layout  string
	traders int
}

func newSimulator(c Case, kind Kind, common *common, exact int) *simulator {
	return &simulator{
		Case: c, common: common, kind: kind, exact: exact, shapes: map[string]partition.Shape{}, index: map[string]*partition.Index{},
		follows: map[followKey][]int{}, known: map[Way]made{}, times: map[Way]float64{},
	}
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

// preparedRanks is up to how many ranks what each needs of each other is found at once.
const preparedRanks = 256

// indexOf is the index of a layout under the mask of the kind.
func (s *simulator) indexOf(name string) *partition.Index {
	if x := s.index[name]; x != nil {
		return x
	}
	shape, x := s.shapes[name], s.indexes[name]
	if x == nil {
		x = partition.NewIndex(shape)
		s.indexes[name] = x
	} else {
		x = x.Within(shape.Mask.Band)
	}
	if len(s.Docs) > 0 && s.Ranks <= preparedRanks {
		x.Prepare()
	}
	s.index[name] = x
	return x
}

// time is the seconds of a layer by that way, forward and backward.
func (s *simulator) time(w Way) (float64, error) {
	shape, err := s.shape(w.Layout)
	if err != nil {
		return 0, err
	}
	a := s.Attention
	a.Backend = w.Backend
	spec := ring.Spec{Shape: shape, Heads: s.Heads, KVHeads: s.KVHeads, Inner: w.Inner, GatherHeads: w.GatherHeads, Gather: w.Gather}
	if s.Ranks <= s.exact || s.At.Shared && s.Ranks <= fewRanks { // of shared cores the average is of all
		return s.allRanks(w, spec, a)
	}
	return s.someRanks(w, spec, a)
}

// allRanks follows each rank.
func (s *simulator) allRanks(w Way, spec ring.Spec, a Attention) (total float64, err error) {
	all, err := s.schedules(w, spec, nil)
	if err != nil {
		return 0, err
	}
	s.a, s.at, s.reuse = a, s.At, false
	return s.passes(func(backward bool) (float64, error) {
		s.backward, s.room = backward, s.room[:0] // programs of other passes are not used any more
		r, err := s.pass(gathering{all, w.GatherHeads}, s.Ranks, false)
		return r.Seconds, err
	})
}

// someRanks follows a few.
func (s *simulator) someRanks(w Way, spec ring.Spec, a Attention) (float64, error) {
	follow := s.follow(w)
	same := w
	if ring.Traders(w.Algorithm, s.Ranks, w.Inner) == 1 && s.indexOf(w.Layout).Halo() {
		if same.Algorithm, same.GatherHeads = "halo", 0; w.Algorithm == "allgather" {
			same.GatherHeads = w.GatherHeads
		}
		if t, ok := s.times[same]; ok {
			return t, nil
		}
	}
	all, err := s.schedules(w, spec, follow)
	if err != nil {
		return 0, err
	}
	s.a, s.at, s.reuse = a, s.At, true
	s.times[same], err = s.passes(func(backward bool) (float64, error) {
		s.backward = backward
		return s.sampled(gathering{all, w.GatherHeads}, follow, false).Seconds, nil
	})
	return s.times[same], err
}

// passes adds up those of a layer.
func (s *simulator) passes(run func(backward bool) (float64, error)) (float64, error) {
	forward, err := run(false)
	if err != nil {
		return 0, err
	}
	backward, err := run(true)
	if s.Recompute {
		forward *= 2
	}
	return forward + backward, err
}

// schedules is those of a way, or of some ranks; nil: of all. Ways that gather other numbers of heads have the same.
func (s *simulator) schedules(w Way, spec ring.Spec, ranks []int) (made, error) {
	w.GatherHeads, w.Backend = 0, ""
	if all := s.known[w]; all != nil {
		return all, nil
	}
	p, err := ring.NewIndexedPlanner(w.Algorithm, spec, s.indexOf(w.Layout), ranks == nil)
	if err != nil {
		return nil, err
	}
	all := make(made, s.Ranks)
	if ranks == nil {
		for r := range all {
			all[r] = p.Schedule(r)
		}
	}
	for _, r := range ranks {
		all[r] = p.Schedule(r)
	}
	s.known[w] = all
	return all, nil
}

// made is schedules of ranks; nil: of one that is not followed.
type made []*ring.Schedule

// gathering is schedules that gather so many heads at a time; 0: all.
type gathering struct {
	made
	heads int
}

func (g gathering) Schedule(rank int) *ring.Schedule {
	s := *g.made[rank]
	s.GatherHeads = g.heads
	return &s
}

// fewRanks is how many ranks may ask each other in pairs, for the schedules of some of them.
const fewRanks = 16

// follow is the ranks that stand for all: that with most work, that whose keys take longest to come and to go, and those
// at the edge of a host.
func (s *simulator) follow(w Way) []int {
	traders := ring.Traders(w.Algorithm, s.Ranks, w.Inner)
	key := followKey{w.Layout, traders}
	if list, ok := s.follows[key]; ok {
		return list
	}
	work := partition.WorkOfHeads(s.indexOf(w.Layout).Work(), traders, s.Heads)
	most := 0
	for r := range work {
		if work[r] >= work[most] {
			most = r
		}
	}
	list := append([]int{most}, s.busiest(w.Layout)...)
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
func (s *simulator) busiest(layout string) []int {
	if len(s.Docs) == 0 || s.Ranks > fewRanks {
		return nil
	}
	key := followKey{layout, 0}
	if list, ok := s.follows[key]; ok {
		return list
	}
	index, row := s.indexOf(layout), int64(s.KVHeads*s.Batch*(s.Dim+s.DimV)*s.DType.Size())
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
