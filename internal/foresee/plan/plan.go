// Package plan describes a run before any device is touched: the ranks' tokens, the work and the transfers of each hop,
// the attention backend and why it was chosen, memory, and bytes on the wire. `cprun plan` prints it; a run stores it.
package plan

import (
	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/text/data"
	"github.com/cprun/cprun/partition"
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

	// Retention has the shares of documents that other lengths of samples keep; none if none is dropped.
	Retention []data.Share `json:"retention,omitempty"`
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

// maxRankHops limits the ranks in Plan.Hops, since 1,024 ranks of as many hops would take 2 GB.
const maxRankHops = 128

// RankHops has the hops of one rank's forward pass.
type RankHops struct {
	Rank int   `json:"rank"`
	Hops []Hop `json:"hops"`
}

// Hop is one turn of the ring's loop, or one exchange of heads, of one layer and one micro batch.
type Hop = planner.Hop

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
	shape, err := shapeOf(cfg, nil, widest(cfg))
	if err != nil {
		return nil, err
	}
	p := &Plan{
		Data: o.Data, Machine: o.Machine.Flag(), machine: o.Machine.String(),
		Partition: partitionOf(cfg, ranks, shape), Attention: attentionOf(o.Choice), Choice: o.Chosen,
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
	if p.Hops = make([]RankHops, min(shape.Size, maxRankHops)); o.Quick {
		see, p.Hops = nil, []RankHops{}
	}
	d, err := demandOf(cfg, o.Machine, see)
	if err != nil {
		return nil, err
	}
	d.data(o.Data)
	if p.Memory, err = fit(cfg, ranks, o.Machine, d); err != nil {
		return nil, err
	}
	if !o.Quick {
		p.Memory = p.Memory.advised(memoryOf, cfg, ranks, o.Machine, d)
	}
	p.Config = cfg.Map()
	p.communication(cfg, ranks, d)
	return p, p.estimate(cfg, ranks, o)
}

// shapeOf returns the partition of one sequence over a context group, with the mask of the layers of a window. docs
// are the lengths of its documents; none: they are not told apart.
func shapeOf(cfg *config.Config, docs []int, window int) (partition.Shape, error) {
	n := cfg.Data.SeqLen
	lengths := docs
	if len(docs) == 0 {
		lengths = []int{n}
	}
	layout := cfg.Parallel.Layout.Layout(lengths, partition.Windows(cfg.Model.Windows())...)
	mask, err := partition.NewMask(true, window, n, n, docs)
	if len(docs) > 0 && err == nil {
		layout = partition.Ready(layout, n, cfg.Parallel.Context)
	}
	return partition.Shape{SeqQ: n, SeqKV: n, Size: cfg.Parallel.Context, Layout: layout, Mask: mask}, err
}

// widest returns the mask's window in the layers that see most; -1: none.
func widest(cfg *config.Config) int { return backend.Requests(cfg)[0].WindowLeft }

func partitionOf(cfg *config.Config, ranks int, shape partition.Shape) Partition {
	work := partition.Work(shape)
	traders := cfg.Parallel.UlyssesDegree(shape.Size)
	p := Partition{
		Ranks: ranks, Context: shape.Size, Data: ranks / shape.Size, Layout: shape.Layout.Name(), SeqLen: shape.SeqQ,
		Balance:  partition.Balance(partition.WorkOfHeads(work, traders, cfg.Model.NumAttentionHeads)),
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
func stateBytes(cfg *config.Config, ranks int, micro int64) int64 {
	flat := model.NewLayout(&cfg.Model.Config, ranks)
	dtype := int64(backend.DType(cfg).Size())
	grads, weights := wireBytes(cfg)*flat.Size(), dtype*flat.Size()
	total := 2 * grads
	switch cfg.Memory.Shard {
	case "optimizer":
		total = grads + weights
	case "gradients":
		total = grads*micro + weights
	case "parameters":
		total = grads*micro + 2*(weights+dtype*flat.FrozenSize())*micro
	}
	return total * int64(ranks-1) / int64(ranks)
}

// wireBytes returns the bytes of a gradient between ranks.
func wireBytes(cfg *config.Config) int64 {
	if cfg.Precision.GradWire == "bf16" {
		return 2
	}
	return 4
}

func (p *Plan) communication(cfg *config.Config, ranks int, d *demand) {
	micro := int64(cfg.Train.GlobalBatchSize / (cfg.Train.MicroBatchSize * p.Partition.Data))
	forward := micro * d.forward
	if cfg.Memory.Recompute == "full" {
		forward *= 2
	}
	forward += micro * d.forward * int64(p.Memory.Layers.Nothing) / int64(cfg.Model.NumHiddenLayers)
	grads := stateBytes(cfg, ranks, micro)
	p.Communication = Communication{AttentionForward: forward, AttentionBackward: micro * d.backward, Gradients: grads}
	p.Communication.Total = forward + p.Communication.AttentionBackward + grads
}
