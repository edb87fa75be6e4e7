package train

import (
	"context"
	"math"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/text/data"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// A Sequence is a record with the log-probability of each token after the tokens before it.
type Sequence struct {
	IDs      []int32 `json:"ids"`
	LogProbs []Float `json:"logprobs"` // natural; absent where the token is no target, as the first
	Sum      Float   `json:"sum"`
	Targets  int     `json:"targets"`
}

// records packs whole records into samples, in order. Of samples it has the methods that a forward pass calls.
type records struct {
	samples
	docs   []data.Document
	bins   [][]int // records of each sample
	seqLen int
}

// eachRecord reads the records of data.path.
func eachRecord(ctx context.Context, cfg *config.Config, visit func(data.Document) error) error {
	var paths []string
	for _, glob := range cfg.Data.Path.Globs() {
		found, err := files.Glob(glob)
		if err != nil {
			return err
		}
		paths = append(paths, found...)
	}
	e := data.Encoding{Tokenizer: tokenizerOf(cfg), EOS: cfg.Data.EOSTokenID, Vocab: cfg.Model.VocabSize,
		Format: formatOf(cfg), Chat: chatOf(cfg), Empty: true}
	return e.Each(ctx, paths, func(_ int, d data.Document) error { return visit(d) })
}

// RecordTokens returns the tokens of the longest record of data.path, and of all.
func RecordTokens(ctx context.Context, cfg *config.Config) (longest, total int, err error) {
	err = eachRecord(ctx, cfg, func(d data.Document) error {
		longest, total = max(longest, len(d.IDs)), total+len(d.IDs)
		return nil
	})
	return longest, total, err
}

func readRecords(ctx context.Context, cfg *config.Config) (*records, error) {
	r, used := &records{seqLen: cfg.Data.SeqLen}, 0
	err := eachRecord(ctx, cfg, func(d data.Document) error {
		n := len(d.IDs)
		if len(r.bins) == 0 || used+n > r.seqLen {
			r.bins, used = append(r.bins, nil), 0
		}
		last := len(r.bins) - 1
		r.bins[last], used = append(r.bins[last], len(r.docs)), used+n
		r.docs = append(r.docs, d)
		return nil
	})
	return r, err
}

func (r *records) Samples() int64 { return int64(len(r.bins)) }

// target returns the target of row i of record k; -1: none.
func (r *records) target(k, i int) int32 {
	d := r.docs[k]
	switch {
	case i+1 >= len(d.IDs):
		return -1
	case d.Labels == nil:
		return d.IDs[i+1]
	case d.Labels[i+1] == data.Ignore:
		return -1
	}
	return d.Labels[i+1]
}

func (r *records) Docs(sample int64) (docs []int) {
	for _, k := range r.bins[sample] {
		if n := len(r.docs[k].IDs); n > 0 {
			docs = append(docs, n)
		}
	}
	return docs
}

// Load does what data.Loader.Load does.
func (r *records) Load(sample int64, spans []partition.Span, ids, targets []int32, positions []int) error {
	type row struct {
		id, target int32
		position   int
	}
	all := make([]row, 0, r.seqLen)
	for _, k := range r.bins[sample] {
		for i := range r.docs[k].IDs {
			all = append(all, row{r.docs[k].IDs[i], r.target(k, i), i})
		}
	}
	for i := 0; len(all) < r.seqLen; i++ {
		all = append(all, row{0, -1, i})
	}
	for n, at := range partition.Positions(spans) {
		ids[n], targets[n], positions[n] = all[at].id, all[at].target, all[at].position
	}
	return nil
}

// LogProbs computes the log-probabilities of the records of data.path, as Eval computes losses. The config packs
// documents, has one group of ranks, and samples of at least RecordTokens. emit gets the records in order, on rank 0.
func LogProbs(ctx context.Context, cfg *config.Config, dev Device, world comm.Communicator, o Options,
	emit func(Sequence) error) (err error) {
	defer device.Caught(&err)
	o.Frozen = true
	o.report(Report{Kind: Phase, Text: "setup"})
	t, err := newTrainer(ctx, cfg, dev, world, &o)
	if err != nil {
		return err
	}
	o.report(Report{Kind: Phase, Text: "evaluation"})
	r, err := readRecords(ctx, cfg)
	if err != nil {
		return err
	}
	t.val.loader = r
	sums, err := t.dev.Vector("losses of tokens", tensor.F64, cfg.Data.SeqLen)
	if err != nil {
		return err
	}
	host, err := t.dev.HostVector("losses of tokens", tensor.F64, cfg.Data.SeqLen)
	if err != nil {
		return err
	}
	for s := range r.Samples() {
		losses, err := t.tokenLosses(ctx, s, sums, host)
		if err != nil {
			return err
		}
		for _, k := range r.bins[s] {
			n := len(r.docs[k].IDs)
			if t.mesh.world.Rank() == 0 {
				if err := emit(r.sequence(k, losses[:n])); err != nil {
					return err
				}
			}
			losses = losses[n:]
		}
	}
	return t.clock.Close()
}

// tokenLosses returns the loss of each position of a sample, on every rank.
func (t *Trainer) tokenLosses(ctx context.Context, sample int64, sums, host View) ([]float64, error) {
	t.dev.Ops.Zero(sums)
	b, err := t.forward(ctx, t.val, all([]int64{sample}), sums, func(b *microBatch) { b.Each = true })
	if err != nil {
		return nil, err
	}
	t.dev.Store.Download(host, sums)
	if err := t.dev.Stream.Sync(ctx); err != nil {
		return nil, err
	}
	v := tensor.New(tensor.F64, t.val.seqLen)
	own, all := tensor.Data[float64](host), tensor.Data[float64](v)
	for n, at := range partition.Positions(b.layout.Spans(b.seqLen, t.val.size, t.val.rank)) {
		all[at] = own[n]
	}
	return all, comm.Finish(ctx)(t.mesh.world.AllReduce(v, comm.Sum))
}

func (r *records) sequence(k int, losses []float64) Sequence {
	ids := r.docs[k].IDs
	s := Sequence{IDs: append([]int32{}, ids...), LogProbs: make([]Float, len(ids))} // no null in JSON
	for i := range s.LogProbs {
		s.LogProbs[i] = Float(math.NaN())
		if i > 0 && r.target(k, i-1) >= 0 {
			s.LogProbs[i] = Float(-losses[i-1])
			s.Sum, s.Targets = s.Sum+s.LogProbs[i], s.Targets+1
		}
	}
	return s
}
