package train

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/tensor"
)

// Evaluation is the loss of a model over data.
type Evaluation struct {
	Samples int64    `json:"samples"`
	SeqLen  int      `json:"seq_len"` // tokens of a sample
	Targets int64    `json:"targets"` // predicted tokens
	Loss    Float    `json:"loss"`    // mean of -log p over the targets, in nats
	Buckets []Bucket `json:"buckets"`
	Seconds float64  `json:"seconds"`
}

// Bucket is the evaluation of a range of positions in a sample, or in a document if documents are separate.
type Bucket struct {
	From    int   `json:"from"` // the first position
	To      int   `json:"to"`   // after the last
	Targets int64 `json:"targets"`
	Loss    Float `json:"loss"`
}

// bounds returns the upper bounds of the buckets: 1/16, 1/8, 1/4, 1/2 and all of a sample. They show whether a model
// uses a long context.
func bounds(seqLen int) []int {
	var hi []int
	for part := 16; part > 1; part /= 2 {
		if n := seqLen / part; n > 0 && (len(hi) == 0 || n > hi[len(hi)-1]) {
			hi = append(hi, n)
		}
	}
	return append(hi, seqLen)
}

// Eval computes the loss over the validation data of a config without training. The weights come from o.From, from
// model.from, or at random. Every rank of the world calls it with the same config, whose micro batches have one sample.
// Every rank gets the result.
func Eval(ctx context.Context, cfg *config.Config, dev Device, world comm.Communicator, o Options) (e Evaluation,
	err error) {
	defer device.Caught(&err)
	o.Frozen = true
	o.report(Report{Kind: Phase, Text: "setup"})
	t, err := newTrainer(ctx, cfg, dev, world, &o)
	if err != nil {
		return e, err
	}
	o.report(Report{Kind: Phase, Text: "evaluation"})
	hi := bounds(cfg.Data.SeqLen)
	losses, err := t.dev.Vector("sums of losses", tensor.F64, len(hi))
	if err != nil {
		return e, err
	}
	t.dev.Ops.Zero(losses)
	counts := make([]int64, len(hi))
	began, total := time.Now(), int64(0)
	noticed := began
	fewer := 0 // passes than group 0, which has the most
	for _, source := range t.sources {
		t.val.loader = source.loader
		of := t.val.total(cfg)
		for s := range of {
			rank := int(s) % t.mesh.dataSize
			if rank == 0 {
				fewer++
			}
			if rank == t.mesh.dataRank {
				fewer--
				if err := t.evaluate(ctx, s, losses, hi, counts); err != nil {
					return e, err
				}
			}
			if time.Since(noticed) > noticeEvery {
				noticed = time.Now()
				o.notice(fmt.Sprintf("%d of %d samples of %s", s+1, of, source.name))
			}
		}
		total += of
	}
	if err := t.share.idle(fewer); err != nil {
		return e, err
	}
	sums, err := t.total(ctx, losses, counts)
	if err != nil {
		return e, err
	}
	e = Evaluation{Samples: total, SeqLen: cfg.Data.SeqLen, Seconds: time.Since(began).Seconds()}
	sum, from := 0.0, 0
	for i, n := range counts {
		e.Buckets = append(e.Buckets, Bucket{From: from, To: hi[i], Targets: n, Loss: Float(sums[i] / float64(n))})
		from, sum, e.Targets = hi[i], sum+sums[i], e.Targets+n
	}
	e.Loss = Float(sum / float64(e.Targets))
	return e, t.clock.Close()
}

// noticeEvery is the interval of notices in a long evaluation.
const noticeEvery = 10 * time.Second

// evaluate adds the losses of a sample to the buckets, and counts the targets of this rank.
func (t *Trainer) evaluate(ctx context.Context, sample int64, losses View, hi []int, counts []int64) error {
	_, err := t.forward(ctx, t.val, all([]int64{sample}), losses, func(b *microBatch) {
		for row, position := range b.positions {
			i, _ := slices.BinarySearch(hi, position+1) // the first bound above the position
			if b.targets[row] >= 0 {
				counts[i]++
			}
			if n := len(b.Parts); n > 0 && b.Parts[n-1].Sum == i {
				b.Parts[n-1].Hi = row + 1
			} else {
				b.Parts = append(b.Parts, model.Part{Hi: row + 1, Sum: i})
			}
		}
	})
	return err
}

// total sums losses and counts over the ranks, and returns the losses.
func (t *Trainer) total(ctx context.Context, losses View, counts []int64) ([]float64, error) {
	out, err := t.dev.HostVector("sums of the evaluation", tensor.F64, len(counts))
	if err != nil {
		return nil, err
	}
	if err := t.share.sum(losses); err != nil {
		return nil, fmt.Errorf("losses: %w", err)
	}
	t.dev.Store.Download(out, losses)
	if err := t.dev.Stream.Sync(ctx); err != nil {
		return nil, err
	}
	v := tensor.FromSlice(counts, len(counts))
	if err := comm.Finish(ctx)(t.mesh.world.AllReduce(v, comm.Sum)); err != nil {
		return nil, fmt.Errorf("targets: %w", err)
	}
	copy(counts, tensor.Data[int64](v))
	return tensor.Data[float64](out), nil
}
