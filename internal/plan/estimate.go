package plan

import (
	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/machine"
	"github.com/cprun/cprun/internal/model"
)

// Estimate is the work of one optimizer step.
type Estimate struct {
	Parameters     int64   `json:"parameters"`
	TokensPerStep  int     `json:"tokens_per_step"`
	FLOPsPerStep   float64 `json:"flops_per_step"` // model FLOPs: causal halved, recompute not counted
	AttentionShare float64 `json:"attention_share"`
	// SecondsPerStep: on a CPU, FLOPs over the rate of a matrix product measured on this
	// machine while the plan was made, shared by the ranks on it, a lower bound. On a GPU,
	// the larger of computing and of the attention's transfers, which hide behind it, plus
	// the reduction of gradients, which does not.
	SecondsPerStep float64 `json:"seconds_per_step"`
	GFLOPsMeasured float64 `json:"gflops_measured"` // 0 for a GPU
	// The rest is of a GPU: a second of one, from the table of docs/backends.md.
	ComputeSeconds  float64 `json:"compute_seconds,omitempty"`
	TransferSeconds float64 `json:"transfer_seconds,omitempty"` // of attention
	GradientSeconds float64 `json:"gradient_seconds,omitempty"`
	FLOPsPerSecond  float64 `json:"flops_per_second,omitempty"`
	LinkPerSecond   float64 `json:"link_bytes_per_second,omitempty"`
	Source          string  `json:"source,omitempty"`
}

func (p *Plan) estimate(cfg *config.Config, ranks int, o Options) {
	n := cfg.Data.SeqLen
	e := Estimate{
		Parameters:    model.Count(model.Layout(&cfg.Model.Config)),
		TokensPerStep: n * cfg.Train.GlobalBatchSize,
		FLOPsPerStep:  model.FLOPs(&cfg.Model.Config, []int{n}) * float64(cfg.Train.GlobalBatchSize),
	}
	attention := 0.0
	for l := range cfg.Model.NumHiddenLayers {
		pairs := model.VisiblePairs([]int{n}, cfg.Model.Window(l))
		attention += 12 * float64(cfg.Model.NumAttentionHeads*cfg.Model.HeadDim) * pairs * float64(cfg.Train.GlobalBatchSize)
	}
	e.AttentionShare = attention / e.FLOPsPerStep
	if roof, ok := machine.RooflineOf(o.Machine, backend.DType(cfg)); ok {
		c := &p.Communication
		e.FLOPsPerSecond, e.LinkPerSecond = roof.FLOPs, roof.Link
		e.Source = roof.Source
		// The rank with the most visible pairs is the one that the others wait for.
		slowest := (1 - e.AttentionShare) + e.AttentionShare/p.Partition.Balance
		e.ComputeSeconds = e.FLOPsPerStep * slowest / roof.FLOPs / float64(ranks)
		e.TransferSeconds = float64(c.AttentionForward+c.AttentionBackward) / roof.Link
		e.GradientSeconds = float64(c.Gradients) / roof.Link
		e.SecondsPerStep = max(e.ComputeSeconds, e.TransferSeconds) + e.GradientSeconds
	} else if o.GFLOPs > 0 {
		e.GFLOPsMeasured = o.GFLOPs
		e.SecondsPerStep = e.FLOPsPerStep / (o.GFLOPs * 1e9) / float64(ranks)
	}
	p.Estimate = e
}
