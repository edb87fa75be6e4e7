package planner

import (
	"slices"

	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// common caches the layouts and indexes that all kinds of layers of a case share.
type common struct {
	costs   Costs
	layouts map[partition.LayoutName]partition.Layout
	indexes map[partition.LayoutName]*partition.Index // of each layout, under the mask of the first kind that asked
}

func newCommon(costs Costs) *common {
	return &common{
		costs: costs, layouts: map[partition.LayoutName]partition.Layout{},
		indexes: map[partition.LayoutName]*partition.Index{},
	}
}

// A simulator times strategies for one kind of layers.
type simulator struct {
	Workload
	*common
	a       Attention // of the layers; its Backend is left to the strategies
	shards  map[partition.LayoutName]*shards
	groups  map[ring.Strategy]*group
	follows map[followKey][]int
	prices  map[string]*prices // by backend
	times   map[onePass]float64
	last    [2]struct { // the latest recording of each pass
		*group
		programs []*program
	}
}

// A shards is the partition of a sequence by one layout, under the mask of one kind.
type shards struct {
	partition.Shape
	index *partition.Index
	halo  bool // the rows of a window come in one hop
}

type onePass struct {
	ring.Strategy
	backward bool
}

type followKey struct {
	layout  partition.LayoutName
	traders int
}

func newSimulator(c Workload, layers LayerGroup, common *common) *simulator {
	return &simulator{
		Workload: c, common: common, a: Attention{DType: c.DType, Batch: c.Batch, Mixer: layers.Mixer},
		shards: map[partition.LayoutName]*shards{}, groups: map[ring.Strategy]*group{},
		follows: map[followKey][]int{}, prices: map[string]*prices{}, times: map[onePass]float64{},
	}
}

func (s *simulator) of(name partition.LayoutName) (*shards, error) {
	if x := s.shards[name]; x != nil {
		return x, nil
	}
	mask, err := partition.NewMask(true, s.a.Window, s.Tokens, s.Tokens, s.Docs)
	if err != nil {
		return nil, err
	}
	shape := partition.Shape{SeqQ: s.Tokens, SeqKV: s.Tokens, Size: s.Ranks, Layout: s.layout(name), Mask: mask}
	x := &shards{Shape: shape}
	if x.index = s.indexes[name]; x.index == nil {
		x.index = partition.NewIndex(x.Shape)
		s.indexes[name] = x.index
	} else {
		x.index = x.index.Within(mask.Band)
	}
	if len(s.Docs) > 0 && (s.Ranks <= preparedRanks || 2*x.index.Meetings() <= s.Ranks*s.Ranks) {
		x.index.Prepare()
	}
	x.halo = x.index.Halo()
	s.shards[name] = x
	return x, nil
}

func (s *simulator) layout(name partition.LayoutName) partition.Layout {
	if s.layouts[name] == nil {
		docs := s.Docs
		if len(docs) == 0 {
			docs = []int{s.Tokens}
		}
		windows := make([]int, len(s.Layers))
		for i, k := range s.Layers {
			windows[i] = k.Window
		}
		s.layouts[name] = partition.Ready(name.Layout(docs, partition.Windows(windows)...), s.Tokens, s.Ranks)
	}
	return s.layouts[name]
}

// preparedRanks limits the ranks for which an index finds the needs of all pairs at once. It also does for more ranks
// if few pairs share a document.
const preparedRanks = 256

// time returns the seconds of a layer by a strategy, forward and backward.
func (s *simulator) time(w ring.Strategy) (float64, error) {
	x, err := s.of(w.Layout)
	if err != nil {
		return 0, err
	}
	forward, err := s.pass(x, onePass{x.plain(w, false), false})
	if err != nil {
		return 0, err
	}
	if s.Recompute {
		forward *= 2
	}
	backward, err := s.pass(x, onePass{x.plain(w, true), true})
	return forward + backward, err
}

// plain returns the simplest strategy with the same pass: it resolves auto, and a ring that fetches rows in one hop is
// an all-gather.
func (x *shards) plain(w ring.Strategy, backward bool) ring.Strategy {
	if w.Algorithm != "ring" && w.Algorithm != "allgather" {
		return w
	}
	if w.Algorithm == "ring" {
		if w.GatherHeads = 0; x.halo {
			w.Algorithm = "allgather"
		}
	}
	switch {
	case w.Algorithm == "ring", w.Gather == ring.Beside, w.Gather == ring.Auto && (backward || len(x.Mask.Docs) <= 1):
		w.Gather = ""
	case w.Gather == ring.Auto:
		w.Gather = ring.Before
	}
	return w
}

func (s *simulator) pass(x *shards, p onePass) (float64, error) {
	if t, ok := s.times[p]; ok {
		return t, nil
	}
	g, err := s.group(x, p.Strategy)
	if err != nil {
		return 0, err
	}
	if s.prices[p.Backend] == nil {
		a := s.a
		a.Backend = p.Backend
		s.prices[p.Backend] = newPrices(a, s.Topology, s.costs)
	}
	last := &s.last[map[bool]int{true: 1}[p.backward]]
	if last.group != g {
		if last.programs, err = g.programs(s.a, p.backward); err != nil {
			return 0, err
		}
		last.group = g
	}
	r, err := s.prices[p.Backend].pass(last.programs, g.sampled)
	if err == nil {
		s.times[p] = r.Seconds
	}
	return r.Seconds, err
}

// group returns the schedules of the ranks that are followed, which both passes share, and all backends except cuDNN
// and flash with gates.
func (s *simulator) group(x *shards, w ring.Strategy) (*group, error) {
	gated := s.Topology.gated(w.Backend, s.DType, s.Ranks)
	if w.Backend != backends.Fused.String() && !gated {
		w.Backend = ""
	}
	if g := s.groups[w]; g != nil {
		return g, nil
	}
	var ranks []int // all
	if s.Ranks > ExactRanks {
		ranks = s.follow(x, w)
	}
	g, err := newGroup(w.Algorithm, w.Spec(x.Shape, s.a.Heads, s.a.KVHeads), x.index, ranks)
	if err == nil {
		g.gated = gated
		s.groups[w] = g
	}
	return g, err
}

// follow returns the ranks that represent all: the rank with most work, and both sides of the edge of a host.
func (s *simulator) follow(x *shards, w ring.Strategy) []int {
	traders := w.UlyssesDegree(s.Ranks)
	key := followKey{w.Layout, traders}
	if list, ok := s.follows[key]; ok {
		return list
	}
	work := partition.WorkOfHeads(x.index.Work(), traders, s.a.Heads)
	most := 0
	for r := range work {
		if work[r] >= work[most] {
			most = r
		}
	}
	list := []int{most}
	if edge := s.Topology.edge(s.Ranks); edge > 0 {
		list = append(list, edge-1, edge)
	}
	slices.Sort(list)
	s.follows[key] = slices.Compact(list)
	return s.follows[key]
}
