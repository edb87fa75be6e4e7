package cost

import (
	"cmp"
	"math"
	"slices"

	"github.com/cprun/cprun/internal/planner"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Job is the ranks that a table is asked about.
type Job struct {
	Ranks, PerHost int
	// Cores that the ranks of a host share; 0: each has a device of its own.
	Cores int
	// Link and Net are bytes a second that one rank sends to others of its host, and to other hosts; 0: as measured.
	Link, Net float64
	// LinkTimes is how many times as fast as the table's the links of a host are; 0: as fast.
	LinkTimes float64
	// FLOPs is how many times the device computes as fast as that of the table, Memory how many times its memory is as
	// fast; 0: as fast.
	FLOPs, Memory float64
}

// Model answers what work takes, from a table, for the ranks of a job. It implements planner.Costs. It is read-only.
type Model struct {
	job  Job
	slow float64 // on cores that are shared: times the set's
	// slowLinks is slow of transfers, which may be of another set.
	slowLinks float64
	flops     float64 // times the table's rate
	memory    float64

	attention map[attentionKey]*grid // rate of full tiles, over rows of all heads, keys, dim
	floor     map[attentionKey]float64
	further   map[attentionKey]*grid            // of a block that is not the first, to the first
	masks     map[attentionKey]map[string]*grid // rate of masked tiles to that of full ones, by the key of these
	products  map[productKey]*grid
	passes    map[productKey]*grid
	links     map[linkKey]*grid
	least     map[linkKey]float64
	// Exchanges with ranks of the same host, and of others; nil: not measured.
	toSame, toOther *route
	// Rates of work that is kept up, of a GPU: no full tile and no product of a step is faster.
	keptCalls    map[attentionKey]float64
	keptProducts map[productKey]float64
	set          *Set
}

type attentionKey struct {
	backend, dtype, mask    string
	backward, deterministic bool
}

type productKey struct{ op, dtype string }

type linkKey struct {
	pair, call string
	ranks      int
}

var _ planner.Costs = (*Model)(nil)

// netStart is the start-up of a message to another host where none was measured: two of NCCL's for small messages
// over InfiniBand.
const netStart = 20e-6

// names of element types in a table.
var names = map[tensor.DType]string{tensor.F32: "fp32", tensor.F64: "fp64", tensor.BF16: "bf16", tensor.F16: "fp16"}

// Name returns what a table calls an element type; "" for those that are not computed in.
func Name(t tensor.DType) string { return names[t] }

// For returns what the table says for the ranks of a job.
func (t *Table) For(job Job) *Model {
	ranks := min(job.Ranks, max(job.PerHost, 1))
	s, far := t.set(ranks, func(s *Set) int { return len(s.Attention) }), t.set(ranks, func(s *Set) int { return len(s.Links) })
	m := &Model{
		job: job, slow: 1, slowLinks: 1, flops: cmp.Or(job.FLOPs, 1), memory: cmp.Or(job.Memory, 1), set: s,
		attention: map[attentionKey]*grid{}, further: map[attentionKey]*grid{}, masks: map[attentionKey]map[string]*grid{}, floor: map[attentionKey]float64{},
		products: map[productKey]*grid{}, passes: map[productKey]*grid{}, links: map[linkKey]*grid{}, least: map[linkKey]float64{},
		keptCalls: map[attentionKey]float64{}, keptProducts: map[productKey]float64{},
	}
	if job.Cores > 0 {
		// Ranks share all cores, however few they are, so that they are as much slower as they are more.
		m.slow, m.slowLinks = float64(ranks)/float64(s.Ranks), float64(ranks)/float64(far.Ranks)
	}
	if t.Machine.Arch != 0 {
		m.keep()
	}
	m.indexAttention()
	for _, p := range s.Products {
		w := Work{Rows: p.Rows, In: p.In, Out: p.Out}
		put(m.products, productKey{p.Kind, p.DType}, at(float64(p.Rows), float64(p.In), float64(p.Out)), math.Log(w.FLOPs()/p.Seconds))
	}
	for _, p := range s.Passes {
		put(m.passes, productKey{p.Op, p.DType}, at(float64(p.Bytes)), math.Log(float64(p.Bytes)/p.Seconds))
	}
	for _, l := range far.Links {
		k := linkKey{l.Pair, l.Call, l.Ranks}
		put(m.links, k, at(float64(l.Bytes)), math.Log(float64(l.Bytes)/l.Seconds))
		if old, ok := m.least[k]; !ok || l.Seconds < old {
			m.least[k] = l.Seconds
		}
	}
	build(m.attention)
	build(m.further)
	for _, g := range m.masks {
		build(g)
	}
	build(m.products)
	build(m.passes)
	build(m.links)
	m.toSame, m.toOther = m.link(SameHost, "exchange"), m.link(OtherHost, "exchange")
	return m
}

// set is the one of as many ranks, or of nearly as many, of those that have what is counted, if any has.
func (t *Table) set(ranks int, count func(*Set) int) *Set {
	far := func(s *Set) float64 { return math.Abs(math.Log(float64(s.Ranks) / float64(max(ranks, 1)))) }
	best := &t.Sets[0]
	for i := range t.Sets {
		switch s := &t.Sets[i]; {
		case count(s) == 0 && count(best) > 0:
		case count(s) > 0 && count(best) == 0, far(s) < far(best):
			best = s
		}
	}
	return best
}

func put[K comparable](m map[K]*grid, k K, s spot, value float64) {
	if m[k] == nil {
		m[k] = &grid{}
	}
	m[k].add(s, value)
}

func build[K comparable](m map[K]*grid) {
	for _, g := range m {
		g.build()
	}
}

// indexAttention makes the grids of attention: of full tiles first, which the others are compared with.
func (m *Model) indexAttention() {
	for _, a := range m.set.Attention {
		k, s := a.key(), at(float64(a.Queries*a.Heads), float64(a.Keys), float64(a.Dim))
		if a.Further > 0 {
			put(m.further, k, s, math.Log(m.ratio(&a)))
		}
		if a.Mask == Full {
			put(m.attention, k, s, math.Log(attentionFLOPs(float64(a.Queries*a.Keys), a.Heads, a.Dim, a.Dim)/a.Seconds))
			if old, ok := m.floor[k]; !ok || a.Seconds < old {
				m.floor[k] = a.Seconds
			}
		}
	}
	build(m.attention)
	for _, a := range m.set.Attention {
		if a.Mask == Full {
			continue
		}
		full := a.key()
		full.mask = Full
		s := at(float64(a.Queries*a.Heads), float64(a.Keys), float64(a.Dim))
		rate, ok := m.attention[full].look(s)
		if !ok {
			continue
		}
		pairs := float64(Tile(a.Mask, a.Queries, a.Keys).Pairs())
		if m.masks[full] == nil {
			m.masks[full] = map[string]*grid{}
		}
		put(m.masks[full], a.Mask, s, math.Log(attentionFLOPs(pairs, a.Heads, a.Dim, a.Dim)/a.Seconds)-rate)
	}
}

// Tile returns the tile that a table's mask means.
func Tile(mask string, queries, keys int) partition.Tile {
	t := partition.Tile{Q: partition.Range{Hi: queries}, K: partition.Range{Hi: keys}, Band: partition.Full()}
	switch mask {
	case Causal:
		t.Band = partition.Causal()
	case Band:
		t.Band = partition.Band{Lo: -max(keys/4, 1), Hi: 0}
	}
	return t
}

// attentionFLOPs are those of a forward pass. The backward pass has 2.5 times as many, which its rate, measured
// likewise, has in it.
func attentionFLOPs(pairs float64, heads, dim, dimV int) float64 {
	return 2 * pairs * float64(heads) * float64(dim+dimV)
}

// kernel finds the grids of a call. What a table lacks is taken from what is most like it: the other determinism,
// another type of the same size, another backend.
func (m *Model) kernel(c *planner.Call) (k attentionKey, ok bool) {
	k = attentionKey{c.Backend, Name(c.DType), Full, c.Backward, c.Deterministic}
	have := func() bool { ok = m.attention[k] != nil; return ok }
	if have() {
		return k, true
	}
	best := -1
	for _, a := range m.set.Attention {
		if a.Mask != Full || a.Backward != c.Backward {
			continue
		}
		score := 0
		for i, same := range []bool{a.Deterministic == c.Deterministic, a.DType == Name(c.DType), a.Backend == c.Backend, wide(a.DType) == wide(Name(c.DType))} {
			if same {
				score += 1 << i
			}
		}
		if score > best {
			best, k = score, attentionKey{a.Backend, a.DType, Full, a.Backward, a.Deterministic}
		}
	}
	return k, best >= 0
}

// wide reports whether a type has 4 bytes or more.
func wide(dtype string) bool { return dtype == "fp32" || dtype == "fp64" }

// Has reports whether the table measured that backend in that type.
func (m *Model) Has(backend string, t tensor.DType) bool {
	return slices.ContainsFunc(m.set.Attention, func(a Attention) bool { return a.Backend == backend && a.DType == Name(t) })
}

// Call implements planner.Costs. The tiles of a call run side by side, so each has the rate of as many rows as all
// have together, and no call is faster than the least that was measured.
func (m *Model) Call(c planner.Call) float64 {
	k, ok := m.kernel(&c)
	if !ok || len(c.Tiles) == 0 || c.Heads == 0 {
		return 0
	}
	batch, dim := max(c.Batch, 1), float64(c.Dim+c.DimV)/2
	rows := 0
	for i := range c.Tiles {
		rows += c.Tiles[i].Q.Len()
	}
	full, masks, most := m.attention[k], m.masks[k], atMost(m.keptCalls, k, math.Inf(1))
	total, biggest := 0.0, 0
	s, widest := at(float64(rows*c.Heads*batch), 1, dim), spot{}
	for i := range c.Tiles {
		t := &c.Tiles[i]
		pairs, area := float64(t.Pairs()), float64(t.Q.Len())*float64(t.K.Len())
		s[1] = math.Log2(float64(max(t.K.Len(), 1)))
		rate, _ := full.look(s)
		if mask := maskOf(t, pairs, area); mask != Full {
			if less, ok := masks[mask].look(s); ok {
				rate += less
			}
		}
		total += attentionFLOPs(pairs, c.Heads*batch, c.Dim, c.DimV) / math.Exp(min(rate, most))
		if i == 0 || int(pairs) > biggest {
			biggest, widest = int(pairs), s
		}
	}
	total = max(total, m.floor[k])
	if !c.First {
		if ratio, ok := m.further[k].look(widest); ok {
			total *= math.Exp(ratio)
		}
	}
	return total * m.slow / m.flops
}

// maskOf is the mask of a table that a tile is most like: one that is cut on one side, or on both.
func maskOf(t *partition.Tile, pairs, area float64) string {
	switch {
	case pairs == area:
		return Full
	case t.Band.Lo <= t.K.Lo-(t.Q.Hi-1) || t.Band.Hi >= t.K.Hi-1-t.Q.Lo:
		return Causal
	}
	return Band
}

// Work returns the time of an operation of a step.
func (m *Model) Work(w Work) float64 {
	if w.Rows > 0 {
		return m.product(w)
	}
	dtype := Name(w.DType)
	for _, k := range []productKey{{w.Op, dtype}, {alike[w.Op], dtype}, {w.Op, "fp32"}, {alike[w.Op], "fp32"}, {"copy", "fp32"}} {
		if rate, ok := m.passes[k].look(at(float64(w.Bytes))); ok {
			return m.least0(float64(w.Bytes)/math.Exp(rate)) * m.slow / m.memory
		}
	}
	return 0
}

// alike are operations that take as long, for those that a table lacks.
var alike = map[string]string{
	"norm rope backward": "norm rope", "rope backward": "rope", "cross entropy forward": "cross entropy", "zero": "copy",
}

// least0 is a time that is not less than that of queueing a call.
func (m *Model) least0(s float64) float64 { return max(s, m.set.CallSeconds) }

func (m *Model) product(w Work) float64 {
	s := at(float64(w.Rows), float64(w.In), float64(w.Out))
	for _, k := range []productKey{{w.Op, Name(w.DType)}, {"linear", Name(w.DType)}, {w.Op, "bf16"}, {"linear", "bf16"}, {"linear", "fp32"}} {
		if rate, ok := m.products[k].look(s); ok {
			return m.least0(w.FLOPs()/math.Exp(atMost(m.keptProducts, k, rate))) * m.slow / m.flops
		}
	}
	return 0
}

// Copy implements planner.Costs.
func (m *Model) Copy(n int64) float64 { return m.Work(Work{Op: "copy", DType: tensor.F32, Bytes: n}) }

// Host implements planner.Costs.
func (m *Model) Host(calls int) float64 { return float64(calls) * m.set.CallSeconds * m.slow }
