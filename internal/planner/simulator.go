package planner

import (
	"slices"
	"sync"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// common is what all kinds of layers of a case have in common.
type common struct {
	laid    map[string]partition.Layout
	indexes map[string]*partition.Index // of each layout, under the mask of the first kind that asked
	weighed []*ring.Planner             // of schedules of some ranks
	*compiler
}

func newCommon(costs Costs) *common {
	k := rooms.Get().(*compiler)
	k.costs, k.host = costs, costs.Host(1)
	return &common{laid: map[string]partition.Layout{}, indexes: map[string]*partition.Index{}, compiler: k}
}

// rooms is compilers that are done, for their memory.
var rooms = sync.Pool{New: func() any { return &compiler{known: map[shapeKey]float64{}} }}

// done hands back what c worked in.
func (c *common) done() {
	for _, p := range c.weighed {
		p.Release()
	}
	c.forget()
	rooms.Put(c.compiler)
	c.compiler = nil
}

// simulator times the ways of one kind of layers.
type simulator struct {
	Case
	*common
	kind    Kind
	exact   int // ranks up to which each is followed
	shapes  map[string]partition.Shape
	index   map[string]*partition.Index // of each layout, under the mask of this kind
	halo    map[string]bool             // likewise
	follows map[followKey][]int
	known   map[Way]made
	times   map[onePass]float64
}

// onePass is a pass of all ways that have it in common.
type onePass struct {
	Way
	backward bool
}

// followKey is what the work of ranks follows from.
type followKey struct {
	layout  string
	traders int
}

func newSimulator(c Case, kind Kind, common *common, exact int) *simulator {
	return &simulator{
		Case: c, common: common, kind: kind, exact: exact, shapes: map[string]partition.Shape{}, index: map[string]*partition.Index{}, halo: map[string]bool{},
		follows: map[followKey][]int{}, known: map[Way]made{}, times: map[onePass]float64{},
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

// preparedRanks is up to how many ranks what each needs of each other is found at once. Of more it is where those that
// have a document in common are few.
const preparedRanks = 256

// prepared reports whether it is.
func (s *simulator) prepared(x *partition.Index) bool {
	return len(s.Docs) > 0 && (s.Ranks <= preparedRanks || 2*x.Meetings() <= s.Ranks*s.Ranks)
}

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
	if s.prepared(x) {
		x.Prepare()
	}
	s.index[name] = x
	return x
}

// time is the seconds of a layer by that way, forward and backward.
func (s *simulator) time(w Way) (float64, error) {
	if _, err := s.shape(w.Layout); err != nil {
		return 0, err
	}
	return s.passes(func(backward bool) (float64, error) {
		key := onePass{s.plain(w, backward), backward}
		if t, ok := s.times[key]; ok {
			return t, nil
		}
		t, err := s.onePass(key)
		if err == nil {
			s.times[key] = t
		}
		return t, err
	})
}

// plain is the way whose pass is that of w: what auto means in that pass, and a ring that fetches rows in one hop is an
// all-gather.
func (s *simulator) plain(w Way, backward bool) Way {
	if w.Algorithm != "ring" && w.Algorithm != "allgather" {
		return w
	}
	if w.Algorithm == "ring" {
		if w.GatherHeads = 0; s.haloOf(w.Layout) {
			w.Algorithm = "allgather"
		}
	}
	switch {
	case w.Algorithm == "ring", w.Gather == ring.Beside, w.Gather == ring.Auto && (backward || len(s.shapes[w.Layout].Mask.Docs) <= 1):
		w.Gather = ""
	case w.Gather == ring.Auto:
		w.Gather = ring.Before
	}
	return w
}

// haloOf reports whether the rows of a window come in one hop.
func (s *simulator) haloOf(layout string) bool {
	is, ok := s.halo[layout]
	if !ok {
		is = s.indexOf(layout).Halo()
		s.halo[layout] = is
	}
	return is
}

func (s *simulator) onePass(p onePass) (float64, error) {
	s.a, s.at, s.backward = s.Attention, s.At, p.backward
	s.a.Backend = p.Backend
	spec := ring.Spec{Shape: s.shapes[p.Layout], Heads: s.Heads, KVHeads: s.KVHeads, Inner: p.Inner, GatherHeads: p.GatherHeads, Gather: p.Gather}
	var follow []int                                                              // all
	if some := s.Ranks > s.exact && !(s.At.Shared && s.Ranks <= fewRanks); some { // of shared cores the average is of all
		follow = s.follow(p.Way)
	}
	list, err := s.schedules(p.Way, spec, follow)
	if err != nil {
		return 0, err
	}
	all := gathering{list, p.GatherHeads}
	if follow != nil {
		s.reuse, s.unlike = true, len(s.Docs) > 1 && p.GatherHeads == 0
		return s.sampled(all, follow, false).Seconds, nil
	}
	s.reuse, s.unlike, s.room = false, false, s.room[:0] // programs of other passes are not used any more
	r, err := s.pass(all, s.Ranks, false)
	return r.Seconds, err
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
	if ranks != nil {
		s.weighed = append(s.weighed, p.Weighing())
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
