package train

import (
	"fmt"

	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/data"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/partition"
)

// feed turns samples into micro batches of this rank's tokens.
type feed struct {
	loader *data.Loader
	rope   *model.Rope
	layout string
	packed bool
	seqLen int // global tokens
	size   int // ranks that share a sequence, and this one among them
	rank   int
	pairs  int // of a head: columns of cos and sin

	cos, sin View // of the last batch; without packed documents those of every one as large
}

func newFeed(cfg *config.Config, path string, shuffle bool, m *mesh) (*feed, error) {
	ds, err := data.Open(source(cfg, path))
	if err != nil {
		return nil, err
	}
	l, err := data.New(ds, cut(cfg, shuffle))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return &feed{
		loader: l, rope: model.NewRope(&cfg.Model.Config), layout: cfg.Parallel.Layout, packed: cfg.Data.PackDocuments,
		seqLen: cfg.Data.SeqLen, size: m.context.Size(), rank: m.context.Rank(), pairs: cfg.Model.HeadDim / 2,
	}, nil
}

// microBatch is some samples of one layout, and what the schedules need to know of them.
type microBatch struct {
	model.Batch
	layout partition.Layout
	docs   []int // of the only sample; none where documents are not told apart
}

// groups splits the samples of a micro batch into those that go through the model at once.
// Packed samples go one by one, since each has a mask, and may have a layout, of its own.
func (f *feed) groups(samples []int64) [][]int64 {
	if !f.packed {
		return [][]int64{samples}
	}
	var g [][]int64
	for i := range samples {
		g = append(g, samples[i:i+1])
	}
	return g
}

// batch reads this rank's tokens of the samples of a group.
func (f *feed) batch(samples []int64) (*microBatch, error) {
	b := &microBatch{}
	docs := f.loader.Docs(samples[0])
	var err error
	if b.layout, err = partition.New(f.layout, docs); err != nil {
		return nil, err
	}
	if f.packed {
		b.docs = docs
	}
	spans := b.layout.Spans(f.seqLen, f.size, f.rank)
	n, count := partition.Count(spans), len(samples)
	b.IDs, b.Targets = tensor.New(tensor.I32, count, n, 1, 1), tensor.New(tensor.I32, count, n, 1, 1)
	ids, targets := tensor.Data[int32](b.IDs), tensor.Data[int32](b.Targets)
	positions := make([]int, count*n)
	for i, sample := range samples {
		lo, hi := i*n, (i+1)*n
		if err := f.loader.Load(sample, spans, ids[lo:hi], targets[lo:hi], positions[lo:hi]); err != nil {
			return nil, fmt.Errorf("sample %d: %w", sample, err)
		}
	}
	if f.packed || f.cos.IsZero() || f.cos.Len(tensor.Batch) != count {
		// Work that is queued may still read the old tables, so these are new ones.
		f.cos, f.sin = tensor.New(tensor.F32, count, n, 1, f.pairs), tensor.New(tensor.F32, count, n, 1, f.pairs)
		f.rope.Fill(f.cos, f.sin, positions)
	}
	b.Cos, b.Sin = f.cos, f.sin
	return b, nil
}
