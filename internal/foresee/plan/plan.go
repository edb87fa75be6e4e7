// Package plan describes a run before any device is touched: the ranks' tokens, the work and the transfers of each hop,
// the attention backend and why it was chosen, memory, and bytes on the wire. `cprun plan` prints it; a run stores it.
package plan

import (
	"fmt"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// Plan is the output of `cprun plan --json`.
type Plan struct {
	Config        map[string]any `json:"config"`
	Machine       string         `json:"machine"` // as --assume describes it
	Data          *Data          `json:"data"`    // null if the files are not there
	Partition     Partition      `json:"partition"`
	Packed        *Packed        `json:"packed,omitempty"` // of the data's first sample, with packed documents
	Hops          []RankHops     `json:"hops"`             // of the first ranks, for the layer that sees most
	Attention     Attention      `json:"attention"`
	Choice        *Chosen        `json:"choice,omitempty"` // by costs; absent if they are not known
	Memory        Memory         `json:"memory"`
	Communication Communication  `json:"communication"`
	Estimate      Estimate       `json:"estimate"`
	Warnings      []string       `json:"warnings"` // that a run of the config would show
	Refused       []string       `json:"refused"`  // why a run on this machine would not begin

	machine, hopsBy string // for a reader
}

// Partition is one sequence over the ranks of a context group.
type Partition struct {
	Ranks    int        `json:"ranks"`
	Context  int        `json:"context"`
	Data     int        `json:"data"`
	Layout   string     `json:"layout"`
	SeqLen   int        `json:"seq_len"` // global tokens
	Balance  float64    `json:"balance"` // mean over maximum of the ranks' visible pairs in all heads
	PerRank  []RankPart `json:"per_rank"`
	Document bool       `json:"documents"` // cut by sample: the picture shows one document
}

// RankPart is the shard of one rank of a context group.
type RankPart struct {
	Rank   int    `json:"rank"`
	Tokens int    `json:"tokens"`
	Spans  []Span `json:"spans"`
	Pairs  int    `json:"pairs"` // visible (query, key) pairs of one head
}

// Span is the global positions start, start+stride, ..., len of them.
type Span struct {
	Start  int `json:"start"`
	Len    int `json:"len"`
	Stride int `json:"stride"`
}

// Communication is bytes that the rank that sends most sends in one optimizer step.
type Communication struct {
	AttentionForward  int64 `json:"attention_forward"`
	AttentionBackward int64 `json:"attention_backward"`
	Gradients         int64 `json:"gradients"` // and sharded weights
	Total             int64 `json:"total"`
}

// Options are the inputs of a plan besides the config.
type Options struct {
	Machine machine.Machine
	Choice  *backend.Choice // nil: the plan is silent about attention's backend
	// Costs estimate the time of a step; a plan without a table leaves it out.
	Costs Costs
	// Chosen is the choice by costs; nil: none.
	Chosen *Chosen
	// Docs is the lengths of the documents of the first sample that is trained on; nil where documents
	// are not told apart, or the data is not there.
	Docs []int
	// Data is how much data there is; nil: not known.
	Data *Data
	// Quick leaves out the hops and advice, and of many ranks looks at some.
	Quick bool
	// Refused lists why a run on this machine would not begin, though a plan can be made.
	Refused []string
}

// Make plans a resolved config for that many ranks, and decides what Fit decides. It goes over the
// schedules of all ranks once.
func Make(cfg *config.Config, ranks int, o Options) (*Plan, error) {
	asked := *cfg
	spec, err := specOf(cfg, nil, widest(cfg))
	if err != nil {
		return nil, err
	}
	p := &Plan{
		Data: o.Data, Machine: o.Machine.Flag(), machine: o.Machine.String(),
		Partition: partitionOf(cfg, ranks, spec), Attention: attentionOf(o.Choice), Choice: o.Chosen,
		Warnings: []string{}, Refused: append([]string{}, o.Refused...), hopsBy: cfg.Parallel.Algorithm,
	}
	for _, w := range cfg.Warnings {
		p.Warnings = append(p.Warnings, w.String())
	}
	if p.Packed, err = packedOf(cfg, o.Docs); err != nil {
		return nil, err
	}
	see := func(rank int, hops []Hop) {
		if rank < len(p.Hops) {
			p.Hops[rank] = RankHops{rank, hops}
		}
	}
	if c := o.Chosen; c != nil && c.Backend != "" && c.Backend == p.Attention.Backend {
		p.Attention.Reason = "the fastest by the costs of this machine, where the rules have " + c.Ruled
	}
	if p.Hops = make([]RankHops, min(spec.Size, maxRankHops)); o.Quick {
		see, p.Hops = nil, []RankHops{}
	}
	d, err := demandOf(cfg, o.Machine, o.Data, see)
	if err != nil {
		return nil, err
	}
	if p.Memory, err = fit(cfg, ranks, o.Machine, d); err != nil {
		return nil, err
	}
	if !o.Quick {
		p.Memory = p.Memory.advised(memoryOf, cfg, ranks, o.Machine, d)
	}
	p.Config = cfg.Map()
	p.communication(cfg, ranks, d)
	if err := p.estimate(cfg, ranks, o, d); err != nil {
		return nil, err
	}
	if w := p.Estimate.Waits; w != nil && !o.Quick {
		w.Fix = p.hiding(&asked, ranks, o)
	}
	return p, nil
}

// hiding returns a change of the asked config or of the ranks that hides the gathers of weights, the least of its kind;
// "": none does.
func (p *Plan) hiding(asked *config.Config, ranks int, o Options) string {
	now := smaller{cfg: *asked, ranks: ranks}
	list := []smaller{now}
	list[0].cfg.Memory.Shard, list[0].advice = "gradients", "memory.shard gradients"
	for f := 2; f <= 32; f *= 2 {
		s := now
		if s.cfg.Data.SeqLen *= f; s.cfg.Data.SeqLen <= s.cfg.Model.MaxPositionEmbedding {
			s.advice = fmt.Sprintf("data.seq_len of at least %d", s.cfg.Data.SeqLen)
			list = append(list, s)
		}
	}
	for f := 2; f <= 32; f *= 2 {
		s, n := now, asked.Parallel.Context/f
		if s.cfg.Parallel.Context = n; n*f == asked.Parallel.Context && n%s.cfg.Parallel.UlyssesDegree(n) == 0 {
			s.ranks, s.advice = ranks/f, fmt.Sprintf("at most %d ranks", ranks/f)
			list = append(list, s)
		}
	}
	o.Quick, o.Docs, o.Data, o.Chosen = true, nil, nil, nil
	on := o.Machine
	for i, x := range list {
		o.Machine.Hosts = min(on.Hosts, (x.ranks+max(1, on.GPUs)-1)/max(1, on.GPUs))
		q, err := Make(&x.cfg, x.ranks, o)
		if err == nil && q.Memory.Fits && q.Estimate.Waits == nil && (i > 0 ||
			q.Estimate.SecondsPerStep < p.Estimate.SecondsPerStep) {
			return x.advice
		}
	}
	return ""
}

func partitionOf(cfg *config.Config, ranks int, spec ring.Spec) Partition {
	shape, work := spec.Shape, partition.Work(spec.Shape)
	traders := cfg.Parallel.UlyssesDegree(shape.Size)
	p := Partition{
		Ranks: ranks, Context: shape.Size, Data: ranks / shape.Size, Layout: shape.Layout.Name(), SeqLen: shape.SeqQ,
		Balance:  partition.Balance(partition.WorkOfHeads(work, traders, spec.Heads)),
		Document: cfg.Data.PackDocuments,
	}
	for r, w := range work {
		part := RankPart{Rank: r, Pairs: w}
		for _, s := range shape.Layout.Spans(shape.SeqQ, shape.Size, r) {
			part.Spans = append(part.Spans, Span(s))
			part.Tokens += s.Len
		}
		p.PerRank = append(p.PerRank, part)
	}
	return p
}

// stateBytes counts the bytes of gradients and weights that a rank sends in a step. A
// ring reduces or gathers n bytes by sending (ranks-1)/ranks of them.
func stateBytes(cfg *config.Config, flat *model.FlatLayout, ranks int, micro int64) int64 {
	grads, trained, all := wireBytes(cfg)*flat.Size(), int64(0), int64(0)
	for bucket := range flat.Buckets {
		trained += read(flat, bucket, backend.DType(cfg))
		all += weights(flat, bucket, backend.DType(cfg))
	}
	total := 2 * grads
	switch cfg.Memory.Shard {
	case "optimizer":
		total = grads + trained
	case "gradients":
		total = grads*micro + trained
	case "parameters":
		total = grads*micro + 2*all*micro
	}
	return total * int64(ranks-1) / int64(ranks)
}

func (p *Plan) communication(cfg *config.Config, ranks int, d *demand) {
	micro := int64(cfg.Train.GlobalBatchSize / (cfg.Train.MicroBatchSize * p.Partition.Data))
	forward := micro * d.forward
	if cfg.Memory.Recompute == "full" {
		forward *= 2
	}
	forward += micro * d.forward * int64(p.Memory.Layers.Nothing) / int64(cfg.Model.NumHiddenLayers)
	grads := stateBytes(cfg, d.flat(cfg, ranks), ranks, micro)
	p.Communication = Communication{AttentionForward: forward, AttentionBackward: micro * d.backward, Gradients: grads}
	p.Communication.Total = forward + p.Communication.AttentionBackward + grads
}
