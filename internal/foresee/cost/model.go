package cost

import (
	"cmp"
	"math"

	"github.com/cprun/cprun/internal/foresee/planner"
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
	// FLOPs and Memory are the speeds of the device and of its memory over those of the table; 0: equal.
	FLOPs, Memory float64
}

// Model returns the time of work from a table, for the ranks of a job. It implements planner.Costs. It is read-only.
type Model struct {
	job  Job
	slow float64 // on cores that are shared: times the set's
	// slowLinks replaces slow for transfers, whose figures may come from another set.
	slowLinks float64
	flops     float64 // times the table's rate
	memory    float64

	kernels  map[attentionKey]*kernel // by the key of full tiles
	products map[productKey]*grid
	passes   map[productKey]*grid
	links    map[linkKey]*grid
	// Exchanges with ranks of the same host, and of others; nil: not measured.
	toSame, toOther *route
	set             *Set
}

type productKey struct{ op, dtype string }

type linkKey struct {
	pair, call string
	ranks      int
}

var _ planner.Costs = (*Model)(nil)

// netStart replaces the start-up of a message to another host in a table without one: two of NCCL's for small messages
// over InfiniBand.
const netStart = 20e-6

var names = map[tensor.DType]string{tensor.F32: "fp32", tensor.F64: "fp64", tensor.BF16: "bf16", tensor.F16: "fp16",
	tensor.U8: "e4m3"}

// Name returns the name of an element type in a table; "" for types without computation.
func Name(t tensor.DType) string { return names[t] }

// For returns the model of the table for the ranks of a job.
func (t *Table) For(job Job) *Model {
	ranks := min(job.Ranks, max(job.PerHost, 1))
	s := t.set(ranks, func(s *Set) int { return len(s.Attention) })
	far := t.set(ranks, func(s *Set) int { return len(s.Links) })
	m := &Model{
		job: job, slow: 1, slowLinks: 1, flops: cmp.Or(job.FLOPs, 1), memory: cmp.Or(job.Memory, 1), set: s,
		kernels: map[attentionKey]*kernel{}, products: map[productKey]*grid{}, passes: map[productKey]*grid{},
		links: map[linkKey]*grid{},
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
		k, rate := productKey{p.Kind, p.DType}, math.Log(Work{Rows: p.Rows, In: p.In, Out: p.Out}.FLOPs()/p.Seconds)
		put(m.products, k, at(float64(p.Rows), float64(p.In), float64(p.Out)), rate)
	}
	build(m.products)
	for _, p := range s.Passes {
		put(m.passes, productKey{p.Op, p.DType}, at(float64(p.Bytes)), math.Log(float64(p.Bytes)/p.Seconds))
	}
	for _, l := range far.Links {
		put(m.links, linkKey{l.Pair, l.Call, l.Ranks}, at(float64(l.Bytes)), math.Log(float64(l.Bytes)/l.Seconds))
	}
	build(m.passes)
	build(m.links)
	m.toSame, m.toOther = m.link(SameHost, "exchange"), m.link(OtherHost, "exchange")
	return m
}

// set returns the set with the nearest number of ranks, among the sets with a count if there are any.
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

// Work returns the time of an operation of a step.
func (m *Model) Work(w Work) float64 {
	if w.Rows > 0 {
		return m.product(w)
	}
	return m.memoryPass(m.pass(w.Op, Name(w.DType)), w.Bytes)
}

// pass finds the grid of a pass over memory. If the table lacks it, the most similar one replaces it; nil: there is
// none.
func (m *Model) pass(op, dtype string) *grid {
	for _, k := range []productKey{{op, dtype}, {alike[op], dtype}, {op, "fp32"}, {alike[op], "fp32"},
		{"copy", "fp32"}} {
		if g := m.passes[k]; g != nil {
			return g
		}
	}
	return nil
}

func (m *Model) memoryPass(g *grid, n int64) float64 {
	rate, ok := g.look(at(float64(n)))
	if !ok {
		return 0
	}
	return m.least0(float64(n)/math.Exp(rate)) * m.slow / m.memory
}

// alike lists operations with equal times, for tables that lack one of them.
var alike = map[string]string{
	"norm rope backward": "norm rope", "rope backward": "rope",
	"cross entropy forward": "cross entropy", "zero": "copy",
}

// least0 returns a time, or the time to queue a call if that is longer.
func (m *Model) least0(s float64) float64 { return max(s, m.set.CallSeconds) }

// product returns the time of a matrix product. One narrower than any measured, such as an adapter's, takes at least
// the time to copy its bytes.
func (m *Model) product(w Work) float64 {
	s := at(float64(w.Rows), float64(w.In), float64(w.Out))
	dtype := Name(w.DType)
	for _, k := range []productKey{
		{w.Op, dtype}, {"linear", dtype}, {w.Op, "bf16"}, {"linear", "bf16"}, {"linear", "fp32"},
	} {
		if p := m.products[k]; p != nil {
			rate, _ := p.look(s)
			least := 0.0
			if s[1] < p.axis[1][0] || s[2] < p.axis[2][0] {
				least = m.Copy(w.Bytes)
			}
			return max(least, m.least0(w.FLOPs()/math.Exp(rate))*m.slow/m.flops)
		}
	}
	return 0
}

// Copy implements planner.Costs.
func (m *Model) Copy(n int64) float64 { return m.memoryPass(m.pass("copy", "fp32"), n) }

// Host implements planner.Costs.
func (m *Model) Host(calls int) float64 { return float64(calls) * m.set.CallSeconds * m.slow }
