package plan

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// Packed is the work of the ranks that share one sample of packed documents.
type Packed struct {
	Documents []int `json:"documents"` // lengths
	// Imbalance is the visible pairs of the slowest rank over the mean.
	Imbalance float64      `json:"imbalance"`
	PerRank   []PackedPart `json:"per_rank"`
}

// PackedPart is the share of one rank, in a layer that attends to everything before a token.
type PackedPart struct {
	Rank      int   `json:"rank"`
	Tokens    int   `json:"tokens"`
	Spans     int   `json:"spans"`      // of neighbouring tokens
	Pairs     int   `json:"pairs"`      // visible (query, key) pairs of one head
	SendBytes int64 `json:"send_bytes"` // keys and values of one layer, forward
}

func packedOf(cfg *config.Config, docs []int) (*Packed, error) {
	if len(docs) == 0 {
		return nil, nil
	}
	n, size := cfg.Data.SeqLen, cfg.Parallel.Context
	layers := widest(cfg)
	spec, err := specOf(cfg, docs, layers)
	if err != nil {
		return nil, fmt.Errorf("documents of the first sample: %w", err)
	}
	schedules, err := ring.NewPlanner(cfg.Parallel.Algorithm, spec)
	if err != nil {
		return nil, err
	}
	schedules.Prepare()
	work := partition.Work(spec.Shape)
	share := partition.WorkOfHeads(work, cfg.Parallel.UlyssesDegree(size), spec.Heads)
	p := &Packed{Documents: docs, Imbalance: 1 / partition.Balance(share)}
	attention := attentionIn(cfg, layers)
	for r, spans := range partition.AllSpans(spec.Layout, n, size) {
		part := PackedPart{Rank: r, Tokens: partition.Count(spans), Spans: len(spans), Pairs: work[r]}
		var pass planner.Recorder
		if err := pass.Run(schedules.Schedule(r), attention, part.Tokens, false); err != nil {
			return nil, err
		}
		part.SendBytes = pass.Sent
		p.PerRank = append(p.PerRank, part)
	}
	return p, nil
}

// barColumns limits the bars: the rank with most work has that many columns.
const barColumns = 32

func (p *Packed) write(b *strings.Builder) {
	fmt.Fprintf(b, "\npacked      the first sample: %s of %d to %d tokens; "+
		"the slowest rank has %.3f of the mean work\n",
		readable.Counted(len(p.Documents), "document"), slices.Min(p.Documents), slices.Max(p.Documents), p.Imbalance)
	most := 1
	for _, r := range p.PerRank {
		most = max(most, r.Pairs)
	}
	for _, r := range p.PerRank {
		bar := strings.Repeat("#", int(float64(barColumns)*float64(r.Pairs)/float64(most)+0.5))
		fmt.Fprintf(b, "  rank %-4d %-*s %d pairs, %d tokens in %s",
			r.Rank, barColumns, bar, r.Pairs, r.Tokens, readable.Counted(r.Spans, "part"))
		if r.SendBytes > 0 {
			fmt.Fprintf(b, ", sends %s", readable.Bytes(r.SendBytes))
		}
		b.WriteByte('\n')
	}
}
