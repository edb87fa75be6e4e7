package plan

import (
	"cmp"
	"slices"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/cost"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Estimate is the work of one optimizer step, and its time by a cost table.
type Estimate struct {
	Parameters     int64   `json:"parameters"`
	Trained        int64   `json:"trained_parameters"`
	TokensPerStep  int     `json:"tokens_per_step"`
	FLOPsPerStep   float64 `json:"flops_per_step"` // model FLOPs: causal halved, recompute not counted
	AttentionShare float64 `json:"attention_share"`

	// SecondsPerStep is 0, and the fields after it are absent, if no cost table fits this machine.
	SecondsPerStep  float64 `json:"seconds_per_step"`
	TokensPerSecond float64 `json:"tokens_per_second,omitempty"`
	TFLOPsPerDevice float64 `json:"tflops_per_device,omitempty"`
	MFU             float64 `json:"mfu,omitempty"` // 0: the device's peak is not known
	// RunSeconds are those of all Steps, and DeviceHours their product with the GPUs; without validations and saves. They
	// are 0 while the data that the steps follow from is not counted.
	Steps       int     `json:"steps,omitempty"`
	RunSeconds  float64 `json:"run_seconds,omitempty"`
	DeviceHours float64 `json:"device_hours,omitempty"`
	Parts       *Parts  `json:"parts,omitempty"`
	Waits       *Waits  `json:"weight_waits,omitempty"` // nil: at most waitShare of the step
	// Table is the machine of the cost table, and Source the origin of its figures. Scaled says that they were derived
	// from another machine's.
	Table  string `json:"table,omitempty"`
	Date   string `json:"date,omitempty"`
	Source string `json:"source,omitempty"`
	Scaled bool   `json:"scaled,omitempty"`
}

// Parts are the seconds of a step, which they add up to, on the rank that takes longest.
type Parts struct {
	Products  float64 `json:"products"`            // matrix products, with recomputed ones
	Attention float64 `json:"attention"`           // its kernels
	Transfers float64 `json:"attention_transfers"` // of attention, as far as its kernels do not hide them
	Passes    float64 `json:"passes"`              // norms, activations, the loss, copies
	Gradients float64 `json:"gradients"`           // reducing them and gathering weights, as far as nothing hides that
	Optimizer float64 `json:"optimizer"`
	Offload   float64 `json:"offload"` // copies to and from the host, as far as nothing hides them
	Host      float64 `json:"host"`    // queueing work, as far as the device waits for it
}

// Waits is the part of Parts.Gradients in which a step waits for sharded weights.
type Waits struct {
	Seconds float64 `json:"seconds"`
	Share   float64 `json:"share"` // of the step
	// Fix is a change with which the run fits and waits for at most waitShare of a step; "": none was found.
	Fix string `json:"fix"`
}

// A plan reports waits above waitShare of a step.
const waitShare = 0.1

func (p *Parts) total() float64 {
	return p.Products + p.Attention + p.Transfers + p.Passes + p.Gradients + p.Optimizer + p.Offload + p.Host
}

// Costs is a cost table, and how it holds for the machine that is planned for.
type Costs struct {
	Table *cost.Table
	// Exact says that it was measured on this machine, or on one with the same devices.
	Exact bool
	// Rate is how many times as fast as the table's a core of this machine computes; 0: as fast. Cores are those
	// that the ranks of a host share; 0: the ranks are on GPUs.
	Rate  float64
	Cores int
}

func (p *Plan) estimate(cfg *config.Config, ranks int, o Options, d *demand) error {
	docs := o.Docs
	if len(docs) == 0 {
		docs = []int{cfg.Data.SeqLen}
	}
	batch := float64(cfg.Train.GlobalBatchSize)
	work := model.WorkOf(&cfg.Model.Config)
	e := Estimate{
		Parameters:   model.Parameters(&cfg.Model.Config),
		Trained:      model.Count(model.Layout(&cfg.Model.Config)),
		FLOPsPerStep: work.FLOPs(docs) * batch,
	}
	tokens, pairs := 1.0, 1.0 // of the mean sample, over those of docs
	if d := o.Data; d != nil && d.SamplePairs > 0 {
		tokens = float64(d.SampleTokens) / float64(d.Samples) / float64(cfg.Data.SeqLen)
		pairs = d.SamplePairs / model.VisiblePairs(docs, -1)
	}
	e.TokensPerStep = int(tokens * batch * float64(cfg.Data.SeqLen))
	attention := work.Attention(docs) * batch
	e.FLOPsPerStep = tokens*(e.FLOPsPerStep-attention) + pairs*attention
	e.AttentionShare = pairs * attention / e.FLOPsPerStep
	if o.Costs.Table != nil {
		parts, waits, err := stepOf(cfg, ranks, o, p.Attention.Backend, &p.Memory, d)
		if err != nil {
			return err
		}
		parts.Products, parts.Passes = tokens*parts.Products, tokens*parts.Passes
		parts.Attention, parts.Transfers = pairs*parts.Attention, pairs*parts.Transfers
		t := o.Costs.Table
		e.Parts, e.SecondsPerStep = parts, parts.total()
		e.TokensPerSecond = float64(e.TokensPerStep) / e.SecondsPerStep
		e.Steps, e.RunSeconds = cfg.Train.Steps, float64(cfg.Train.Steps)*e.SecondsPerStep
		if !o.Machine.IsCPU() {
			e.DeviceHours = e.RunSeconds * float64(ranks) / 3600
		}
		e.TFLOPsPerDevice = e.FLOPsPerStep / e.SecondsPerStep / float64(ranks) / 1e12
		if peak := o.Machine.Peak(); peak > 0 && backend.DType(cfg) != tensor.F32 {
			e.MFU = 1e12 * e.TFLOPsPerDevice / peak
		}
		if share := waits / e.SecondsPerStep; share > waitShare {
			e.Waits = &Waits{Seconds: waits, Share: share}
		}
		e.Table, e.Date, e.Source, e.Scaled = t.Machine.Device, t.Date, t.Source, !o.Costs.Exact
	}
	p.Estimate = e
	return nil
}

func stepOf(cfg *config.Config, ranks int, o Options, kernel string, m *Memory, d *demand) (p *Parts,
	waits float64, err error) {
	s := &step{
		cfg: cfg, ranks: ranks, kernel: kernel, docs: o.Docs, memory: m, demand: d,
		costs: o.Costs.Table.For(jobOf(ranks, &o)),
		on: planner.Topology{PerHost: o.Machine.PerHost(ranks), Shared: o.Costs.Cores > 0, Cores: o.Costs.Cores,
			Gates: o.Machine.Arch == hopper},
	}
	if err := s.passes(); err != nil {
		return nil, 0, err
	}
	s.state()
	s.Offload = m.offloading(o.Machine.HostRate(ranks), s.rehearsal, s.micro())
	s.host()
	return &s.Parts, s.gathers, nil
}

// jobOf describes the ranks to a cost table. The data sheets of the machine and of the table's device give the ratio of
// their speeds.
func jobOf(ranks int, o *Options) cost.Job {
	m, t := o.Machine, o.Costs.Table
	job := cost.Job{Ranks: ranks, PerHost: m.PerHost(ranks), Cores: o.Costs.Cores, Net: float64(m.Net),
		FLOPs: o.Costs.Rate, Memory: o.Costs.Rate}
	if m.IsCPU() {
		job.Link = float64(m.Link)
		return job
	}
	job.FLOPs, job.Memory = m.Against(t.Machine.Device)
	if own, ok := machine.CardOf(t.Machine.Device); ok && m.Link > 0 {
		job.LinkTimes = float64(m.Link) / own.Link
	} else {
		job.Link = float64(m.Link)
	}
	return job
}

// A step is one optimizer step of the slowest rank.
type step struct {
	Parts
	cfg    *config.Config
	ranks  int
	kernel string
	docs   []int
	on     planner.Topology
	costs  *cost.Model
	memory *Memory
	demand *demand

	rehearsal         *rehearsal
	calls             int     // that the host queues
	mapped            int     // most rows of a rank in segments with a successor
	forward, backward float64 // device seconds of the passes, which reductions may hide behind
	gathers           float64 // of Gradients: waits for sharded weights
}

// maxRehearsed bounds the tokens whose operations are recorded one by one. Times of more tokens are in proportion.
const maxRehearsed = 1 << 20

// passes adds the forward and backward passes of all micro batches of a rank: the model's own code over a device that
// only records.
func (s *step) passes() error {
	attention, err := s.attention()
	if err != nil {
		return err
	}
	cfg := s.cfg
	tokens, err := mostTokens(cfg)
	if err != nil {
		return err
	}
	r := &rehearsal{batch: sequences(cfg), tokens: tokens, share: 1, mapped: float64(s.mapped) / float64(tokens),
		attention: attention}
	r.seconds = func(w cost.Work) float64 {
		t := s.costs.Work(w)
		if s.calls++; w.Rows > 0 {
			s.Products += t
		} else {
			s.Passes += t
		}
		return t
	}
	if all := float64(r.batch) * float64(tokens); all > maxRehearsed {
		r.batch, r.tokens, r.share = 1, maxRehearsed, all/maxRehearsed
	}
	if err := r.run(cfg, s.memory, s.demand); err != nil {
		return err
	}
	runs := s.micro()
	n := float64(runs)
	s.Products, s.Passes = n*r.share*s.Products, n*r.share*s.Passes
	s.Attention, s.Transfers = n*r.mixing.compute, n*r.mixing.exposed
	s.calls = runs * (int(r.share*float64(s.calls)) + r.mixing.calls)
	forward, backward := r.sums()
	s.rehearsal, s.forward, s.backward = r, n*(r.begin+forward), n*(r.end+backward)
	return nil
}

// micro returns the passes of a step.
func (s *step) micro() int {
	return s.cfg.Train.GlobalBatchSize / (sequences(s.cfg) * s.cfg.Parallel.Data)
}

func (s *step) state() {
	cfg, n := s.cfg, int64(s.ranks)
	flat, dtype := s.demand.flat(cfg, s.ranks), backend.DType(cfg)
	shard, micro := state.ShardingOf(cfg.Memory.Shard), s.micro()
	reduce, gather, tail := 0.0, 0.0, 0.0
	own := int64(1)
	if shard != state.ShardNone {
		own = n
	}
	copied := int64(0)
	if dtype != tensor.F32 {
		copied = int64(dtype.Size())
	}
	for i, b := range flat.Buckets {
		if f := flat.Frozen; f != nil && shard == state.ShardParameters && f.Buckets[i].Size() > 0 {
			gather += s.costs.Reduce("all_gather", s.ranks/s.memory.Copies, read(f, i, dtype))
		}
		if b.Size() == 0 {
			continue
		}
		times, call := 1, "all_reduce"
		if shard != state.ShardNone {
			call = "reduce_scatter"
		}
		if shard >= state.ShardGradients {
			times = micro
		}
		r := s.costs.Reduce(call, s.ranks, wireBytes(cfg)*b.Size())
		reduce += float64(times) * r
		if i == flat.Embedding() {
			tail = r
		}
		if shard != state.ShardNone {
			gather += s.costs.Reduce("all_gather", s.ranks/s.memory.Copies, read(flat, i, dtype))
		}
		part := b.Size() / own
		work := []cost.Work{
			{Op: "adamw", DType: tensor.F32, Bytes: part * (28 + copied)},
			{Op: "gradient norm", DType: tensor.F32, Bytes: 4 * part},
		}
		if flat.Scaled(i) {
			work = append(work, cost.Work{Op: "quantize", DType: dtype, Bytes: part * int64(dtype.Size()+1)})
		}
		for _, r := range flat.Rest(i) {
			work = append(work, cost.Work{Op: "zero", DType: tensor.F32, Bytes: 4 * int64(times) * r.Size()})
		}
		for _, w := range work {
			s.Optimizer += s.costs.Work(w)
			s.calls++
		}
	}
	sums := s.costs.Reduce("all_reduce", s.ranks, sumBytes)
	switch {
	case shard != state.ShardParameters:
		s.Gradients = exposed(reduce, s.backward, tail, s.on.Shared) + exposed(gather, s.forward, 0, s.on.Shared) + sums
	case s.on.Shared: // each pass gathers twice
		s.gathers = 2 * float64(micro) * gather
		s.Gradients = reduce + s.gathers + sums
	default:
		none := func(int) float64 { return 0 }
		reduced := s.rehearsal.waits(micro, s.memory.Slots, none, s.reduced)
		all := s.rehearsal.waits(micro, s.memory.Slots, s.gathered, s.reduced)
		s.gathers, s.Gradients = all-reduced, all+sums
	}
}

// gathered returns the seconds to gather a bucket's weights, trained and frozen.
func (s *step) gathered(bucket int) float64 {
	n := weights(s.demand.flat(s.cfg, s.ranks), bucket, backend.DType(s.cfg))
	return s.costs.Reduce("all_gather", s.ranks/s.memory.Copies, n)
}

// reduced returns the seconds to reduce a bucket's gradients.
func (s *step) reduced(bucket int) float64 {
	n := s.demand.flat(s.cfg, s.ranks).Buckets[bucket].Size()
	return s.costs.Reduce("reduce_scatter", s.ranks, wireBytes(s.cfg)*n)
}

// sumBytes counts the bytes of a step's sums.
const sumBytes = 32

// exposed returns the time of transfers that work does not hide. The last of them, the tail, has no work beside it.
func exposed(transfers, work, tail float64, shared bool) float64 {
	if shared {
		return transfers
	}
	return max(transfers-work, tail)
}

func (s *step) host() {
	if !s.on.Shared {
		s.Host = max(0, s.costs.Host(s.calls)-s.Products-s.Passes-s.Attention-s.Optimizer)
	}
}

// attention returns the times of attention in each layer.
func (s *step) attention() (list []layerTimes, err error) {
	cfg := s.cfg
	times := map[hf.Mixer]layerTimes{}
	for _, mixer := range cfg.Model.Mixers() {
		spec, err := specOf(cfg, s.docs, mixer)
		if err == nil && cfg.Model.Recurs() {
			s.mapped, err = mapped(spec.Shape)
		}
		if err != nil {
			return nil, err
		}
		a := attentionIn(cfg, mixer)
		a.Backend = s.kernel
		forward, backward, err := planner.Passes(cfg.Parallel.Algorithm, spec, a, s.on, s.costs)
		if err != nil {
			return nil, err
		}
		times[mixer] = layerTimes{longest(forward), longest(backward)}
	}
	for _, l := range cfg.Model.Layers() {
		list = append(list, times[l.Mixer])
	}
	return list, nil
}

// mapped returns the most rows of a rank in segments with a successor, which needs their maps.
func mapped(s partition.Shape) (int, error) {
	x, err := partition.NewSegments(s)
	if err != nil {
		return 0, err
	}
	rows := make([]int, s.Size)
	for _, doc := range x.Docs {
		for _, part := range x.All[doc.Lo : doc.Hi-1] {
			rows[part.Rank] += part.Rows.Len()
		}
	}
	return slices.Max(rows), nil
}

// longest returns a pass on the rank that ends last. What the host takes is counted for the whole step, in which it is
// ahead of the device.
func longest(r planner.Result) passTime {
	last := slices.MaxFunc(r.Ranks, func(a, b planner.Rank) int { return cmp.Compare(busy(&a), busy(&b)) })
	return passTime{last.Compute + last.Copies, last.Exposed, last.Calls}
}

func busy(r *planner.Rank) float64 { return r.Compute + r.Copies + r.Exposed }

// wireBytes returns the bytes of a gradient between ranks.
func wireBytes(cfg *config.Config) int64 {
	if cfg.Precision.GradWire == "bf16" {
		return 2
	}
	return 4
}
