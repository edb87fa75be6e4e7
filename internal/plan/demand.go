package plan

import (
	"runtime"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/machine"
	"github.com/cprun/cprun/internal/planner"
	"github.com/cprun/cprun/internal/rehearse"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// demand is what the schedules of a context group ask for: of each, that of the rank that asks for
// most. What is recomputed and how the loss is cut does not matter to it, so that Fit, which tries
// several, finds it once.
type demand struct {
	tokens            int   // of a sample
	buffers           int64 // bytes of the ring's arena, for one layer, forward and backward
	forward, backward int64 // bytes sent for all layers of one micro batch
	works             map[heads]work
}

// heads is how many a rank computes with, of queries and of keys. It is the same on all ranks unless
// they trade heads, and these do not divide.
type heads struct{ q, kv int }

// work is what the ranks with so many heads ask of the kernel.
type work struct {
	calls   int // in one forward pass
	queries int // rows of them
	keys    int // rows of keys of one call, at least queries
}

// demandOf looks at the schedules of all ranks, several at a time, for each window of the model. It shows
// those of the widest to see, if it is not nil. kinds is as in Chosen.
func demandOf(cfg *config.Config, machine machine.Machine, kinds map[int]planner.Way, see func(*ring.Schedule)) (*demand, error) {
	list := looked(cfg.Parallel.Context, see == nil)
	ranks, by := make([]demand, len(list)), ByWindow(cfg, kinds)
	for _, w := range windowsOf(cfg) {
		shape, err := shapeOf(cfg, w.window)
		if err != nil {
			return nil, err
		}
		schedule, err := schedulesOf(by(w.window), shape, len(list) == cfg.Parallel.Context)
		if err != nil {
			return nil, err
		}
		var g errgroup.Group
		g.SetLimit(runtime.GOMAXPROCS(0))
		for i, r := range list {
			g.Go(func() error {
				s, err := schedule(r)
				if err != nil {
					return err
				}
				if see != nil {
					see(s)
				}
				return ranks[i].add(cfg, s, localTokens(cfg, machine, shape, r), w.layers)
			})
		}
		if err := g.Wait(); err != nil {
			return nil, err
		}
		see = nil
	}
	d := &demand{works: map[heads]work{}}
	for i := range ranks {
		r := &ranks[i]
		d.tokens, d.buffers = max(d.tokens, r.tokens), max(d.buffers, r.buffers)
		d.forward, d.backward = max(d.forward, r.forward), max(d.backward, r.backward)
		for h, w := range r.works {
			d.works[h] = d.works[h].and(w)
		}
	}
	return d, nil
}

// manyRanks of a context group are not all looked at where nobody is to see their schedules.
const manyRanks = 64

// sampledRanks is how many ranks' schedules are looked at: of more, as many that lie evenly among them. The ranks of a
// layout differ little, and the first and the last are among them.
const sampledRanks = 16

// looked lists the ranks of a group of that size whose schedules are looked at: all, or of many some that lie evenly among
// them, the first and the last too. The ranks of a layout differ little.
func looked(size int, some bool) []int {
	n := size
	if some && size > manyRanks {
		n = sampledRanks
	}
	return evenly(size, n)
}

// evenly is n of size ranks.
func evenly(size, n int) []int {
	list := make([]int, n)
	for i := range list {
		if n > 1 {
			list[i] = i * (size - 1) / (n - 1)
		}
	}
	return list
}

// schedulesOf returns what makes the schedule of a rank; all says that every rank's is asked for.
func schedulesOf(cfg *config.Config, shape partition.Shape, all bool) (func(rank int) (*ring.Schedule, error), error) {
	spec := specOf(cfg, shape)
	if !all {
		return func(rank int) (*ring.Schedule, error) { return ring.New(cfg.Parallel.Algorithm, spec, rank) }, nil
	}
	p, err := ring.NewPlanner(cfg.Parallel.Algorithm, spec)
	if err != nil {
		return nil, err
	}
	return func(rank int) (*ring.Schedule, error) { return p.Schedule(rank), nil }, nil
}

// ByWindow returns the configs that say of all layers what those of a window do. kinds is as in Chosen.
func ByWindow(cfg *config.Config, kinds map[int]planner.Way) func(window int) *config.Config {
	return func(window int) *config.Config {
		w, ok := kinds[window]
		if !ok {
			return cfg
		}
		c := *cfg
		c.Parallel.Algorithm, c.Parallel.Inner, c.Parallel.GatherHeads, c.Parallel.Gather = w.Algorithm, w.Inner, w.GatherHeads, w.Gather
		return &c
	}
}

// specOf is an attention of the config over ranks.
func specOf(cfg *config.Config, shape partition.Shape) ring.Spec {
	p := &cfg.Parallel
	return ring.Spec{
		Shape: shape, Heads: cfg.Model.NumAttentionHeads, KVHeads: cfg.Model.NumKeyValueHeads,
		Inner: p.Inner, GatherHeads: p.GatherHeads, Gather: p.Gather,
	}
}

// and is a work that is enough for both.
func (w work) and(b work) work {
	return work{max(w.calls, b.calls), max(w.queries, b.queries), max(w.keys, b.keys)}
}

// add adds what one rank's schedule asks for, in so many layers.
func (d *demand) add(cfg *config.Config, s *ring.Schedule, tokens int, layers int64) error {
	d.tokens = tokens
	of := s.Work(tokens, cfg.Model.NumAttentionHeads, cfg.Model.NumKeyValueHeads)
	h, w := heads{of.Heads, of.KVHeads}, work{calls: 1, queries: of.Queries}
	for i := range s.Forward {
		for call := range s.Forward[i].Calls {
			w.calls++ // of one group of heads: the next is another pass
			w.keys = max(w.keys, call.Keys.Hi-call.Keys.Lo)
		}
	}
	w.keys = max(w.keys, w.queries)
	if d.works == nil {
		d.works = map[heads]work{}
	}
	if h.q > 0 {
		d.works[h] = d.works[h].and(w)
	}
	forward, backward := s.Traffic(wire(cfg), cfg.Model.NumKeyValueHeads)
	d.forward, d.backward = d.forward+layers*forward, d.backward+layers*backward
	buffers, err := workspace(cfg, s, sequences(cfg), tokens, backend.DType(cfg))
	d.buffers = max(d.buffers, buffers)
	return err
}

// wire is the bytes of a row of each head that travels, of a micro batch. Gradients are summed on
// their way, so they travel in the type that sums are kept in.
func wire(cfg *config.Config) ring.HeadBytes {
	rows := int64(cfg.Train.MicroBatchSize)
	row, sum := rows*int64(cfg.Model.HeadDim), int64(tensor.F32.Size())
	in := int64(backend.WireType(cfg).Size())
	return ring.HeadBytes{Q: row * in, O: row * in, LSE: rows * sum, KV: 2 * row * in, DQ: row * sum, DKV: 2 * row * sum}
}

// workspace is what a ring takes of its arena for one layer, forward and backward. The loops take
// it before the first hop, so that they need not run through the hops of every rank.
func workspace(cfg *config.Config, s *ring.Schedule, batch, tokens int, dtype tensor.DType) (int64, error) {
	still := *s
	still.Forward, still.Backward = nil, nil
	return rehearse.Layer(attention.Idle{}, &cfg.Model.Config, &still, batch, tokens, dtype)
}

// localTokens is the tokens of a sample on a rank.
func localTokens(cfg *config.Config, machine machine.Machine, shape partition.Shape, rank int) int {
	n := partition.Count(shape.Layout.Spans(shape.SeqQ, shape.Size, rank))
	if cfg.Data.PackDocuments && machine.Arch != 0 {
		n = min(n+int(float64(n)*packedSlack)+64, shape.SeqQ)
	}
	return n
}
