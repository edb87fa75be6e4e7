package train

import (
	"context"
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
	inputs *inputs
}

func newFeed(cfg *config.Config, path string, shuffle bool, m *mesh, in *inputs) (*feed, error) {
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
		seqLen: cfg.Data.SeqLen, size: m.context.Size(), rank: m.context.Rank(), inputs: in,
	}, nil
}

// microBatch is some samples of one layout, and what the schedules need to know of them.
type microBatch struct {
	model.Batch
	layout partition.Layout
	docs   []int // of the only sample; none where documents are not told apart

	slot *slot
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

// batch reads this rank's tokens of the samples of a group and queues their way to the device.
// It waits until the memory of the batch before the last is free again. The caller calls done
// on the result once all that reads it is queued.
func (f *feed) batch(ctx context.Context, samples []int64) (*microBatch, error) {
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
	if b.slot, err = f.inputs.take(ctx, count*n, f.packed); err != nil {
		return nil, err
	}
	h := b.slot.host.views(count, n, f.inputs.pairs, f.packed)
	ids, targets := tensor.Data[int32](h.IDs), tensor.Data[int32](h.Targets)
	positions := make([]int, count*n)
	for i, sample := range samples {
		lo, hi := i*n, (i+1)*n
		if err := f.loader.Load(sample, spans, ids[lo:hi], targets[lo:hi], positions[lo:hi]); err != nil {
			return nil, fmt.Errorf("sample %d: %w", sample, err)
		}
	}
	if f.packed {
		f.rope.Fill(h.Cos, h.Sin, positions)
	}
	f.inputs.upload(b.slot, count*n, f.packed)
	b.Batch = b.slot.device.views(count, n, f.inputs.pairs, f.packed)
	if !f.packed {
		b.Cos, b.Sin, err = f.inputs.tables(f.rope, count, n, positions)
	}
	return b, err
}

// inputs is the memory through which batches go to the device. While one is computed the next
// is read from the disk and copied.
type inputs struct {
	dev   *Device
	pairs int // of a head: columns of cos and sin
	slots [2]slot
	next  int

	// Without packed documents the positions of all samples are the same, and so are the tables
	// of every batch as large.
	cos, sin View
}

// slot is the memory of one batch, here and there.
type slot struct {
	dev          *Device
	host, device block
	tokens       int          // that there is room for
	busy         tensor.Event // until then the batch is in use; nil: it never was
}

// done marks the present end of the compute stream as the end of the batch's use.
func (b *microBatch) done() { b.slot.busy = b.slot.dev.Stream.Record() }

// block is ids, targets and, with packed documents, cos and sin, one behind the other.
type block struct{ mem tensor.Memory }

const blockAlign = 64 // words of four bytes: where each of the four begins

// blockWords is the words of a block's parts: of ids or targets, and of cos or sin.
func blockWords(tokens, pairs int, packed bool) (list, table int) {
	list = (tokens + blockAlign - 1) / blockAlign * blockAlign
	if packed {
		table = list * pairs
	}
	return list, table
}

// views are the parts of a block for count samples of n tokens; cos and sin with packed
// documents only.
func (b block) views(count, n, pairs int, packed bool) model.Batch {
	list, table := blockWords(count*n, pairs, packed)
	view := func(t tensor.DType, off, dim int) View {
		return tensor.Dense(b.mem, t, int64(off), [4]int{count, n, 1, dim})
	}
	out := model.Batch{IDs: view(tensor.I32, 0, 1), Targets: view(tensor.I32, list, 1)}
	if packed {
		out.Cos, out.Sin = view(tensor.F32, 2*list, pairs), view(tensor.F32, 2*list+table, pairs)
	}
	return out
}

func (b block) words(n int) View { return tensor.Dense(b.mem, tensor.I32, 0, [4]int{1, 1, 1, n}) }

// take is the slot of the next batch, with room for that many tokens.
func (in *inputs) take(ctx context.Context, tokens int, packed bool) (*slot, error) {
	s := &in.slots[in.next]
	in.next = (in.next + 1) % len(in.slots)
	if s.busy != nil {
		if err := s.busy.Sync(ctx); err != nil {
			return nil, err
		}
	}
	if s.host.mem != nil && tokens <= s.tokens {
		return s, nil
	}
	list, table := blockWords(tokens, in.pairs, packed)
	bytes := int64(max(1, 2*list+2*table)) * 4
	host, err := in.dev.Store.AllocHost(bytes)
	if err != nil {
		return nil, err
	}
	device, err := in.dev.Store.Alloc(bytes)
	if err != nil {
		return nil, fmt.Errorf("batch of %d tokens: %w", tokens, err)
	}
	*s = slot{dev: in.dev, host: block{host}, device: block{device}, tokens: tokens}
	return s, nil
}

// upload queues the copy of a slot's batch.
func (in *inputs) upload(s *slot, tokens int, packed bool) {
	list, table := blockWords(tokens, in.pairs, packed)
	if n := 2*list + 2*table; n > 0 {
		in.dev.Store.Upload(s.device.words(n), s.host.words(n))
	}
}

// tables are cos and sin of the positions of count samples of n tokens, all alike.
func (in *inputs) tables(r *model.Rope, count, n int, positions []int) (cos, sin View, err error) {
	if in.cos.IsZero() || in.cos.Len(tensor.Batch) < count {
		if in.cos, err = in.table(count, n); err != nil {
			return cos, sin, err
		}
		if in.sin, err = in.table(count, n); err != nil {
			return cos, sin, err
		}
		size := in.cos.Size()
		host, err := in.dev.HostVector(tensor.F32, 2*size)
		if err != nil {
			return cos, sin, err
		}
		shape := in.cos.Shape()
		c, s := part(host, 0, size).Reshape(shape), part(host, size, 2*size).Reshape(shape)
		r.Fill(c, s, positions)
		in.dev.Store.Upload(in.cos, c)
		in.dev.Store.Upload(in.sin, s)
	}
	return in.cos.Slice(tensor.Batch, 0, count), in.sin.Slice(tensor.Batch, 0, count), nil
}

func (in *inputs) table(count, n int) (View, error) {
	v, err := in.dev.Vector("rope tables", tensor.F32, count*n*in.pairs)
	if err != nil {
		return View{}, err
	}
	return v.Reshape([4]int{count, n, 1, in.pairs}), nil
}
