package plan

import (
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// A demand holds the largest demands of the ranks of a context group. They do not depend on recomputation and on the
// chunks of the loss, so that Fit, which tries several, finds them once.
type demand struct {
	tokens            int                     // of a sample
	buffers           int64                   // bytes of the ring's arena, for one layer, forward and backward
	forward, backward int64                   // bytes sent for all layers of one micro batch
	works             map[[2]int]planner.Work // by the heads of queries and of keys
	kept              map[kept]model.Memory   // computed before
	held, encoding    int64                   // host memory for data, as Data has them; 0: unknown
}

// demandOf runs the attention of ranks over a planner.Recorder. It shows the hops of the widest window to see, if it is
// not nil.
//
// A plan does not know the documents of packed samples, but the buffers follow from them. It takes the most of three
// samples: one document; two, for a rank that needs almost all rows; three, for a rank that receives its own gradients
// beside those of others. The last two have no window: with scattered chunks, a rank may need all rows under any.
// Other samples may take more, see TestBuffersOfPackedDocuments.
func demandOf(cfg *config.Config, machine machine.Machine, see func(rank int, hops []Hop)) (*demand, error) {
	d, samples := &demand{works: map[[2]int]planner.Work{}, kept: map[kept]model.Memory{}}, [][]int{nil}
	if n := cfg.Data.SeqLen; cfg.Data.PackDocuments && n > 2 {
		samples = append(samples, []int{n - 1, 1}, []int{(n + 2) / 3, (n + 1) / 3, n / 3})
	}
	for _, docs := range samples {
		if err := d.cover(cfg, machine, docs, see); err != nil {
			return nil, err
		}
		see = nil
	}
	switch a := cfg.Parallel.Algorithm; {
	case len(samples) == 1:
	case widest(cfg) >= 0 && (a == "ring" || a == "hierarchical"): // rows may come in one hop, and go back in one
		d.buffers += d.buffers / 2
	default:
		d.buffers += d.buffers / 16
	}
	return d, nil
}

// data sets the memory for data; nil: unknown.
func (d *demand) data(of *Data) {
	if of != nil {
		d.held, d.encoding = of.HeldBytes, of.EncodingBytes
	}
}

// cover raises d to the demands of a sample of these documents; nil: one. It runs several ranks at a time, for each
// window of the model, and several documents without a window. Only one document counts as traffic.
func (d *demand) cover(cfg *config.Config, machine machine.Machine, docs []int, see func(rank int, hops []Hop)) error {
	shown := 0
	if see != nil {
		shown = maxRankHops
	}
	list := looked(cfg.Parallel.Context, shown)
	ranks := make([]demand, len(list))
	requests := backend.Requests(cfg)
	if docs != nil {
		requests = requests[:1]
		requests[0].WindowLeft = -1
	}
	for _, layers := range requests {
		shape, err := shapeOf(cfg, docs, layers.WindowLeft)
		if err != nil {
			return err
		}
		many := len(list) > sampledRanks
		schedules, err := ring.NewIndexedPlanner(cfg.Parallel.Algorithm, specOf(cfg, shape), nil, many)
		if err != nil {
			return err
		}
		var g errgroup.Group
		g.SetLimit(runtime.GOMAXPROCS(0))
		for i, r := range list {
			g.Go(func() error {
				tokens := localTokens(cfg, machine, shape, r)
				hops, err := ranks[i].add(cfg, schedules.Schedule(r), tokens, int64(layers.Layers))
				if err == nil && see != nil {
					see(r, hops)
				}
				return err
			})
		}
		if err := g.Wait(); err != nil {
			return err
		}
		see = nil
	}
	for i := range ranks {
		r := &ranks[i]
		d.tokens, d.buffers = max(d.tokens, r.tokens), max(d.buffers, r.buffers)
		if docs == nil {
			d.forward, d.backward = max(d.forward, r.forward), max(d.backward, r.backward)
		}
		for h, w := range r.works {
			d.works[h] = most(d.works[h], w)
		}
	}
	return nil
}

// manyRanks limits the ranks of a context group that demandOf runs one by one.
const manyRanks = 64

// sampledRanks is the size of a sample of more ranks. The ranks of a layout differ little.
const sampledRanks = 16

// looked lists the ranks to run: all, or of many the first ones, which a plan shows, and an even sample with the last.
func looked(size, shown int) (list []int) {
	for r := range size {
		if size <= manyRanks || r < shown {
			list = append(list, r)
		}
	}
	if len(list) < size {
		for i := range sampledRanks {
			list = append(list, i*(size-1)/(sampledRanks-1))
		}
	}
	slices.Sort(list)
	return slices.Compact(list)
}

func layerOf(cfg *config.Config) planner.Attention {
	q := questionOf(cfg)
	return workloadOf(&q, planner.Topology{}).Attention
}

func specOf(cfg *config.Config, shape partition.Shape) ring.Spec {
	return cfg.Parallel.Spec(shape, cfg.Model.NumAttentionHeads, cfg.Model.NumKeyValueHeads)
}

// most returns the largest numbers of two works with the same heads.
func most(a, b planner.Work) planner.Work {
	b.Calls, b.Queries, b.Keys = max(a.Calls, b.Calls), max(a.Queries, b.Queries), max(a.Keys, b.Keys)
	return b
}

// add adds the attention of one rank in that many layers, and returns the hops of its forward pass.
func (d *demand) add(cfg *config.Config, s *ring.Schedule, tokens int, layers int64) ([]Hop, error) {
	d.tokens = tokens
	r, forward, backward, err := recorded(cfg, s, tokens)
	if err != nil {
		return nil, err
	}
	d.forward, d.backward = d.forward+layers*forward, d.backward+layers*backward
	d.buffers = max(d.buffers, r.Buffers())
	if d.works == nil {
		d.works = map[[2]int]planner.Work{}
	}
	for _, w := range r.Works {
		h := [2]int{w.Heads, w.KVHeads}
		w.Calls++
		d.works[h] = most(d.works[h], w)
	}
	return r.Hops, nil
}

// recorded runs both passes of a layer by a rank's schedule. It returns their recorder, with the hops of the forward
// pass, and the bytes sent for one micro batch, in which packed samples follow each other.
func recorded(cfg *config.Config, s *ring.Schedule, tokens int) (
	r planner.Recorder, forward, backward int64, err error,
) {
	a := layerOf(cfg)
	times := int64(cfg.Train.MicroBatchSize / a.Batch)
	if err = r.Run(s, a, tokens, false); err != nil {
		return r, 0, 0, err
	}
	forward, hops := times*r.Sent, r.Hops
	for i := range hops {
		hops[i].SendBytes *= times
	}
	r.Hops = nil
	err = r.Run(s, a, tokens, true)
	backward, r.Hops = times*r.Sent-forward, hops
	return r, forward, backward, err
}

func localTokens(cfg *config.Config, machine machine.Machine, shape partition.Shape, rank int) int {
	n := partition.Count(shape.Layout.Spans(shape.SeqQ, shape.Size, rank))
	if cfg.Data.PackDocuments && !machine.IsCPU() {
		n = min(n+int(float64(n)*packedSlack)+64, shape.SeqQ)
	}
	return n
}
