// Package plan says what a run will do before any device is touched: who holds which tokens,
// what each hop computes and sends, which attention backend is used and why, and what memory
// and how many bytes on the wire that takes. `cprun plan` prints it; a run stores it.
package plan

import (
	"fmt"

	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// Plan is what `cprun plan --json` prints.
type Plan struct {
	Config        map[string]any `json:"config"`
	Partition     Partition      `json:"partition"`
	Hops          []RankHops     `json:"hops"` // of a layer that attends to everything before a token
	Attention     Attention      `json:"attention"`
	Memory        Memory         `json:"memory"`
	Communication Communication  `json:"communication"`
	Estimate      Estimate       `json:"estimate"`
}

// Partition is one sequence over the ranks of a context group.
type Partition struct {
	Ranks    int        `json:"ranks"`
	Context  int        `json:"context"`
	Data     int        `json:"data"`
	Layout   string     `json:"layout"`
	SeqLen   int        `json:"seq_len"` // global tokens
	Balance  float64    `json:"balance"` // mean over maximum of the ranks' visible pairs
	PerRank  []RankPart `json:"per_rank"`
	Document bool       `json:"documents"` // cut by sample: the picture shows one document
}

// RankPart is what one rank of a context group holds.
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

// RankHops is the forward ring of one rank.
type RankHops struct {
	Rank int   `json:"rank"`
	Hops []Hop `json:"hops"`
}

// Hop is one turn of the ring.
type Hop struct {
	Label     string           `json:"label"`
	Tiles     []partition.Tile `json:"-"`
	TileCount int              `json:"tiles"`
	Pairs     int              `json:"pairs"`
	SendTo    []int            `json:"send_to"`
	RecvFrom  []int            `json:"recv_from"`
	SendBytes int64            `json:"send_bytes"` // keys and values of one layer, one micro batch
}

// Attention is the chosen backend.
type Attention struct {
	Backend  string     `json:"backend"`
	Reason   string     `json:"reason"`
	Rejected []Rejected `json:"rejected"`
	Layout   string     `json:"layout"` // of q, k, v in memory
}

// Rejected is a backend that was not chosen, and the rule that spoke against it.
type Rejected struct {
	Backend string `json:"backend"`
	Rule    string `json:"rule"`
	Reason  string `json:"reason"`
	Fix     string `json:"fix"`
}

// Memory is bytes on the rank that needs most.
type Memory struct {
	Weights     int64 `json:"weights"`
	Gradients   int64 `json:"gradients"`
	Optimizer   int64 `json:"optimizer"`
	Activations int64 `json:"activations"`
	RingBuffers int64 `json:"ring_buffers"`
	Total       int64 `json:"total"`
}

// Communication is bytes that the rank that sends most sends in one optimizer step.
type Communication struct {
	AttentionForward  int64 `json:"attention_forward"`
	AttentionBackward int64 `json:"attention_backward"`
	Gradients         int64 `json:"gradients"`
	Total             int64 `json:"total"`
}

// Estimate is the work of one optimizer step.
type Estimate struct {
	Parameters     int64   `json:"parameters"`
	TokensPerStep  int     `json:"tokens_per_step"`
	FLOPsPerStep   float64 `json:"flops_per_step"` // model FLOPs: causal halved, recompute not counted
	AttentionShare float64 `json:"attention_share"`
	// SecondsPerStep is FLOPs over the rate of a matrix product measured on this machine
	// while the plan was made, shared by the ranks on it: a lower bound.
	SecondsPerStep float64 `json:"seconds_per_step"`
	GFLOPsMeasured float64 `json:"gflops_measured"`
}

// Make plans a resolved config for that many ranks. gflops is the measured rate of one
// process's matrix products when all ranks compute at once; 0 leaves the time out.
func Make(cfg *config.Config, ranks int, gflops float64) (*Plan, error) {
	shape, err := Shape(cfg)
	if err != nil {
		return nil, err
	}
	p := &Plan{Config: cfg.Map(), Partition: partitionOf(cfg, ranks, shape), Attention: backend(cfg)}
	elem := int64(4) // float32, what a CPU computes and sends in
	kvRow := elem * int64(cfg.Train.MicroBatchSize*cfg.Model.NumKeyValueHeads*cfg.Model.HeadDim) * 2
	var most [2]int64
	for r := range shape.Size {
		s, err := ring.New(cfg.Parallel.Algorithm, shape, r)
		if err != nil {
			return nil, err
		}
		p.Hops = append(p.Hops, hopsOf(s, kvRow))
		f, b := s.Bytes(kvRow, kvRow)
		most[0], most[1] = max(most[0], f), max(most[1], b)
		p.Memory.RingBuffers = max(p.Memory.RingBuffers, ringBuffers(cfg, s, shape, kvRow))
	}
	p.memory(cfg, ranks)
	p.communication(cfg, ranks, most)
	p.estimate(cfg, ranks, gflops)
	return p, nil
}

// Shape is the partition of one unpacked sequence of the config over a context group.
func Shape(cfg *config.Config) (partition.Shape, error) {
	n := cfg.Data.SeqLen
	layout, err := partition.New(cfg.Parallel.Layout, []int{n})
	if err != nil {
		return partition.Shape{}, err
	}
	mask, err := partition.NewMask(true, widestWindow(cfg), n, n, nil)
	return partition.Shape{SeqQ: n, SeqKV: n, Size: cfg.Parallel.Context, Layout: layout, Mask: mask}, err
}

// widestWindow is the mask of the layer that sees most.
func widestWindow(cfg *config.Config) int {
	widest := 0
	for l := range cfg.Model.NumHiddenLayers {
		w := cfg.Model.Window(l)
		if w < 0 {
			return -1
		}
		widest = max(widest, w)
	}
	return widest
}

func partitionOf(cfg *config.Config, ranks int, shape partition.Shape) Partition {
	work := partition.Work(shape)
	p := Partition{
		Ranks: ranks, Context: shape.Size, Data: ranks / shape.Size, Layout: shape.Layout.Name(), SeqLen: shape.SeqQ,
		Balance: partition.Balance(work), Document: cfg.Data.PackDocuments,
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

func hopsOf(s *ring.Schedule, kvRow int64) RankHops {
	r := RankHops{Rank: s.Rank}
	for _, h := range s.Forward {
		hop := Hop{Label: h.Label, Tiles: h.Tiles, TileCount: len(h.Tiles), SendTo: []int{}, RecvFrom: []int{}}
		for _, t := range h.Tiles {
			hop.Pairs += t.Pairs()
		}
		for _, m := range h.SendKV {
			hop.SendTo = append(hop.SendTo, m.Peer)
			hop.SendBytes += int64(m.Block.Hi-m.Block.Lo) * kvRow
		}
		for _, m := range h.RecvKV {
			hop.RecvFrom = append(hop.RecvFrom, m.Peer)
		}
		r.Hops = append(r.Hops, hop)
	}
	return r
}

// ringBuffers is the workspace of a backward pass: the larger of the two.
func ringBuffers(cfg *config.Config, s *ring.Schedule, shape partition.Shape, kvRow int64) int64 {
	n := int64(0)
	for _, rows := range append(s.KVRows[1:len(s.KVRows):len(s.KVRows)], s.GradRows[1:]...) {
		n += int64(rows) * kvRow
	}
	tokens := partition.Count(shape.Layout.Spans(shape.SeqQ, shape.Size, s.Rank))
	return n + 4*int64(tokens*cfg.Train.MicroBatchSize*cfg.Model.NumAttentionHeads) // delta
}

func (p *Plan) memory(cfg *config.Config, ranks int) {
	tokens := 0
	for _, r := range p.Partition.PerRank {
		tokens = max(tokens, r.Tokens)
	}
	opt := model.Options{Recompute: model.Recompute(cfg.Memory.Recompute), LossChunk: cfg.Memory.LossChunk}
	m := model.Plan(&cfg.Model.Config, opt, cfg.Train.MicroBatchSize, tokens, tensor.F32)
	p.Memory.Weights, p.Memory.Gradients = m.Weights, m.Grads
	p.Memory.Activations = max(m.Activations, m.Validation)
	p.Memory.Optimizer = 2 * m.Weights
	if cfg.Memory.Shard == "optimizer" {
		p.Memory.Optimizer /= int64(ranks)
	}
	p.Memory.Total = p.Memory.Weights + p.Memory.Gradients + p.Memory.Optimizer + p.Memory.Activations + p.Memory.RingBuffers
}

func (p *Plan) communication(cfg *config.Config, ranks int, perLayer [2]int64) {
	micro := int64(cfg.Train.GlobalBatchSize / (cfg.Train.MicroBatchSize * p.Partition.Data))
	passes := micro * int64(cfg.Model.NumHiddenLayers)
	forward := passes * perLayer[0]
	if cfg.Memory.Recompute == "full" {
		forward *= 2
	}
	// A ring reduces n bytes by sending (ranks-1)/ranks of them twice.
	grads := p.Memory.Gradients * 2 * int64(ranks-1) / int64(ranks)
	p.Communication = Communication{AttentionForward: forward, AttentionBackward: passes * perLayer[1], Gradients: grads}
	p.Communication.Total = forward + p.Communication.AttentionBackward + grads
}

func (p *Plan) estimate(cfg *config.Config, ranks int, gflops float64) {
	n := cfg.Data.SeqLen
	e := Estimate{
		Parameters:     model.Count(model.Layout(&cfg.Model.Config)),
		TokensPerStep:  n * cfg.Train.GlobalBatchSize,
		FLOPsPerStep:   model.FLOPs(&cfg.Model.Config, []int{n}) * float64(cfg.Train.GlobalBatchSize),
		GFLOPsMeasured: gflops,
	}
	attention := 0.0
	for l := range cfg.Model.NumHiddenLayers {
		pairs := model.VisiblePairs([]int{n}, cfg.Model.Window(l))
		attention += 12 * float64(cfg.Model.NumAttentionHeads*cfg.Model.HeadDim) * float64(pairs) * float64(cfg.Train.GlobalBatchSize)
	}
	e.AttentionShare = attention / e.FLOPsPerStep
	if gflops > 0 {
		e.SecondsPerStep = e.FLOPsPerStep / (gflops * 1e9) / float64(ranks)
	}
	p.Estimate = e
}

// backend is the attention backend of a CPU run. The rules for GPUs are package attention's.
func backend(cfg *config.Config) Attention {
	name := cfg.Attention.Backend
	a := Attention{Backend: name, Layout: "bshd_bshd_bshd", Rejected: []Rejected{}}
	switch name {
	case "reference":
		a.Reason = "asked for: the slow definition that the others are checked against"
	default:
		a.Reason = "the tiled CPU kernel: the fastest that runs without a GPU"
	}
	for _, b := range []string{"fused", "unfused"} {
		a.Rejected = append(a.Rejected, Rejected{
			Backend: b, Rule: "cpu-device",
			Reason: fmt.Sprintf("%s runs on CUDA devices and this run is on the CPU", b),
			Fix:    "use attention.backend flash, or run on a machine with a GPU",
		})
	}
	return a
}
