package plan

import (
	"fmt"
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/text/data"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/ring/scan"
)

// A demand holds the largest demands of the ranks of a context group. They do not depend on recomputation and on the
// chunks of the loss, so that Fit, which tries several, finds them once.
type demand struct {
	tokens            int                           // of a sample
	segments, states  int                           // of a rank, with layers that have a recurrent state
	buffers           int64                         // bytes of the ring's arena, for one layer, forward and backward
	forward, backward int64                         // bytes sent for all layers of one micro batch
	works             map[planner.Work]planner.Work // by the same heads, without rows and calls
	kept              map[kept]model.Memory         // computed before
	layouts           map[int]*model.FlatLayout     // by ranks, likewise
	held, encoding    int64                         // host memory for data, as Data has them; 0: unknown
}

// demandOf runs the attention of ranks over a planner.Recorder. It shows the hops of the widest window to see, if it is
// not nil.
//
// The buffers and segments of packed samples follow from their documents. A plan takes the most of four samples: the
// first one of the run, if data has it; one document; two, for a rank that needs almost all rows; three, for a rank
// that receives its own gradients and others at once. Samples of documents have no window: with scattered chunks, a
// rank may need all rows under any. Other samples may take more, see TestBuffersOfPackedDocuments. Only the number of
// states is an upper bound, in a layout that does not follow documents: one document has most.
func demandOf(cfg *config.Config, on machine.Machine, data *Data, see func(rank int, hops []Hop)) (*demand, error) {
	d, samples := &demand{works: map[planner.Work]planner.Work{}, kept: map[kept]model.Memory{},
		layouts: map[int]*model.FlatLayout{}}, [][]int{nil}
	if data == nil {
		data = &Data{}
	}
	d.held, d.encoding = data.HeldBytes, data.EncodingBytes
	if n := cfg.Data.SeqLen; cfg.Data.PackDocuments && n > 2 {
		samples = append(samples, []int{n - 1, 1}, []int{(n + 2) / 3, (n + 1) / 3, n / 3})
		if data.First != nil {
			samples = append(samples, data.First)
		}
	}
	for _, docs := range samples {
		if err := d.cover(cfg, on, docs, see); err != nil {
			return nil, err
		}
		see = nil
	}
	switch a := cfg.Parallel.Algorithm; {
	case len(samples) == 1:
		return d, nil
	case widest(cfg).Window >= 0 && (a == "ring" || a == "hierarchical"): // rows may come in one hop, and go back in one
		d.buffers += d.buffers / 2
	default:
		d.buffers += d.buffers / 16
	}
	if d.segments += d.segments / 2; cfg.Parallel.Layout.ByDocument() {
		d.states += (d.states + 1) / 2
	}
	return d, nil
}

// flat returns the layout of the state over ranks.
func (d *demand) flat(cfg *config.Config, ranks int) *model.FlatLayout {
	if d.layouts[ranks] == nil {
		d.layouts[ranks] = model.NewLayout(&cfg.Model.Config, ranks)
	}
	return d.layouts[ranks]
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
		for i := range requests {
			requests[i].WindowLeft = -1
		}
		requests = slices.CompactFunc(requests, func(a, b backend.Request) bool { return a.Mixer() == b.Mixer() })
	}
	for _, layers := range requests {
		spec, err := specOf(cfg, docs, layers.Mixer())
		if err != nil {
			return err
		}
		schedules, err := ring.NewPlanner(cfg.Parallel.Algorithm, spec)
		if err != nil {
			return err
		}
		if len(list) > sampledRanks {
			schedules.Prepare()
		}
		var g errgroup.Group
		g.SetLimit(runtime.GOMAXPROCS(0))
		for i, r := range list {
			g.Go(func() error {
				tokens := localTokens(cfg, machine, spec.Shape, r)
				hops, err := ranks[i].add(cfg, schedules.Schedule(r), tokens, &layers)
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
	if err := recurring(cfg, docs, list, ranks); err != nil {
		return err
	}
	for i := range ranks {
		r := &ranks[i]
		d.tokens, d.buffers = max(d.tokens, r.tokens), max(d.buffers, r.buffers)
		d.segments, d.states = max(d.segments, r.segments), max(d.states, r.states)
		if docs == nil {
			d.forward, d.backward = max(d.forward, r.forward), max(d.backward, r.backward)
		}
		for h, w := range r.works {
			d.works[h] = most(d.works[h], w)
		}
	}
	return nil
}

// recurring adds the layers with a recurrent state to the demands of some ranks.
func recurring(cfg *config.Config, docs []int, list []int, ranks []demand) error {
	layers := map[hf.Mixer]int{}
	for _, l := range cfg.Model.Layers() {
		if l.Mixer.Recurs() {
			layers[l.Mixer]++
		}
	}
	for mixer, n := range layers {
		spec, err := specOf(cfg, docs, widest(cfg))
		if err != nil {
			return err
		}
		x, err := partition.NewSegments(spec.Shape)
		if err != nil {
			return fmt.Errorf("a model with linear attention: %w", err)
		}
		a := attentionIn(cfg, mixer)
		for i, rank := range list {
			r, d := planner.Recorder{}, &ranks[i]
			forward, backward, err := r.Recur(x, rank, a, d.tokens)
			if err != nil {
				return err
			}
			times := int64(n * (cfg.Train.MicroBatchSize / a.Batch))
			d.forward, d.backward = d.forward+times*forward, d.backward+times*backward
			d.buffers, d.segments = max(d.buffers, r.Buffers()), len(x.Own[rank])
			d.states = len(scan.NewStates(x, rank).Forward.States)
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

// most returns the largest numbers of two works with the same heads.
func most(a, b planner.Work) planner.Work {
	b.Calls, b.Queries, b.Keys = max(a.Calls, b.Calls), max(a.Queries, b.Queries), max(a.Keys, b.Keys)
	return b
}

// add adds the attention of one rank in some layers, and returns the hops of its forward pass.
func (d *demand) add(cfg *config.Config, s *ring.Schedule, tokens int, layers *backend.Request) ([]Hop, error) {
	d.tokens = tokens
	r, forward, backward, err := recorded(cfg, s, layers.Mixer(), tokens)
	if err != nil {
		return nil, err
	}
	n := int64(layers.Layers)
	d.forward, d.backward = d.forward+n*forward, d.backward+n*backward
	d.buffers = max(d.buffers, r.Buffers())
	if d.works == nil {
		d.works = map[planner.Work]planner.Work{}
	}
	for _, w := range r.Works {
		h := planner.Work{Heads: w.Heads, KVHeads: w.KVHeads, Dim: w.Dim, DimV: w.DimV}
		w.Calls++
		d.works[h] = most(d.works[h], w)
	}
	return r.Hops, nil
}

// recorded runs both passes of a layer by a rank's schedule. It returns their recorder, with the hops of the forward
// pass, and the bytes sent for one micro batch, in which packed samples follow each other.
func recorded(cfg *config.Config, s *ring.Schedule, layers hf.Mixer, tokens int) (
	r planner.Recorder, forward, backward int64, err error,
) {
	a := attentionIn(cfg, layers)
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

// Data is how much training data there is.
type Data struct {
	Files            int64    `json:"files"`
	Documents        *int64   `json:"documents"`     // null: not counted yet, since that takes a pass over many tokens
	Tokens           int64    `json:"tokens"`        // of all files
	Targets          int64    `json:"targets"`       // of an epoch
	Samples          int64    `json:"samples"`       // of an epoch
	SampleTokens     int64    `json:"sample_tokens"` // of an epoch
	SamplePairs      float64  `json:"sample_pairs,omitempty"`
	DroppedDocuments int64    `json:"dropped_documents"`
	StepsPerEpoch    int64    `json:"steps_per_epoch"`
	EpochSamples     int64    `json:"-"`                      // with those of smaller sources of a mixture that repeat
	HeldBytes        int64    `json:"held_bytes"`             // tokens and tables of documents in the memory of each rank
	EncodingBytes    int64    `json:"encoding_bytes"`         // memory of each rank while it encodes text at the start
	Ignored          []string `json:"ignored_keys,omitempty"` // of records; they change nothing
	Warnings         []string `json:"warnings,omitempty"`     // about records
	First            []int    `json:"-"`                      // documents of the first sample; nil: not told apart

	// Retention has the shares of documents that other lengths of samples keep; none if none is dropped.
	Retention []data.Share `json:"retention,omitempty"`
}

// maxRankHops limits the ranks in Plan.Hops, since 1,024 ranks of as many hops would take 2 GB.
const maxRankHops = 128

// RankHops has the hops of one rank's forward pass.
type RankHops struct {
	Rank int   `json:"rank"`
	Hops []Hop `json:"hops"`
}

// Hop is one turn of the ring's loop, or one exchange of heads, of one layer and one micro batch.
type Hop = planner.Hop

// specOf returns the attention of one sequence over a context group in the layers of a mixer. docs are the lengths of
// its documents; none: they are not told apart.
func specOf(cfg *config.Config, docs []int, layers hf.Mixer) (ring.Spec, error) {
	n := cfg.Data.SeqLen
	lengths := docs
	if len(docs) == 0 {
		lengths = []int{n}
	}
	layout := cfg.Parallel.Layout.Layout(lengths, partition.Windows(cfg.Model.Windows())...)
	mask, err := partition.NewMask(true, layers.Window, n, n, docs)
	if len(docs) > 0 && err == nil {
		layout = partition.Ready(layout, n, cfg.Parallel.Context)
	}
	shape := partition.Shape{SeqQ: n, SeqKV: n, Size: cfg.Parallel.Context, Layout: layout, Mask: mask}
	return cfg.Parallel.Spec(shape, layers.Heads, layers.KVHeads), err
}

// widest returns the mixer of the layers that see most.
func widest(cfg *config.Config) hf.Mixer { return backend.Requests(cfg)[0].Mixer() }

// attentionIn returns the attention of a micro batch in the layers of a mixer.
func attentionIn(cfg *config.Config, layers hf.Mixer) planner.Attention {
	return planner.Attention{DType: backend.DType(cfg), Batch: sequences(cfg), Mixer: layers}
}

func sequences(cfg *config.Config) int {
	if cfg.Data.PackDocuments { // packed samples go one by one
		return 1
	}
	return cfg.Train.MicroBatchSize
}

// mostTokens returns the tokens of a sequence on the rank with most.
func mostTokens(cfg *config.Config) (int, error) {
	spec, err := specOf(cfg, nil, widest(cfg))
	if err != nil {
		return 0, err
	}
	most := 0
	for r := range spec.Size {
		most = max(most, partition.Count(spec.Layout.Spans(spec.SeqQ, spec.Size, r)))
	}
	return most, nil
}
