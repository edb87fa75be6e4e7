package train

import (
	"context"
	"fmt"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/data"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// feed turns samples into micro batches of this rank's tokens.
type feed struct {
	loader samples
	rope   *model.Rope
	layout string
	bands  []partition.Band // of the layers
	packed bool
	seqLen int // global tokens
	size   int // ranks that share a sequence, and this one among them
	rank   int
	inputs *inputs
	next   laid // out before its time, by prepare
}

// laid is a sample with the positions of each rank.
type laid struct {
	sample int64
	docs   []int
	layout partition.Layout // nil: none
}

// newFeed opens files.
func newFeed(cfg *config.Config, files config.Files, tok *data.Tokenizer, shuffle bool, m *mesh, in *inputs) (*feed,
	error) {
	sources, err := openData(cfg, files, tok)
	if err != nil {
		return nil, err
	}
	l, err := cutData(cfg, files, sources, shuffle)
	if err != nil {
		return nil, err
	}
	return &feed{
		loader: l, rope: model.NewRope(&cfg.Model.Config), layout: cfg.Parallel.Layout,
		bands: partition.Windows(cfg.Model.Windows()), packed: cfg.Data.PackDocuments,
		seqLen: cfg.Data.SeqLen, size: m.context.Size(), rank: m.context.Rank(), inputs: in,
	}, nil
}

// total returns the samples of a validation.
func (f *feed) total(cfg *config.Config) int64 {
	if n := cfg.Data.Validation.Samples; n > 0 {
		return min(f.loader.Samples(), int64(n))
	}
	return f.loader.Samples()
}

// A microBatch is some samples of one layout, and what the schedules need to know of them.
type microBatch struct {
	model.Batch
	layout partition.Layout
	docs   []int // of the only sample; none where documents are not told apart

	// What the host knows of the rows until done: their positions, and which have a target.
	positions []int
	targets   []int32

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

// lay gives the positions of a sample to ranks.
func (f *feed) lay(sample int64) (laid, error) {
	if f.next.layout != nil && f.next.sample == sample {
		return f.next, nil
	}
	docs := f.loader.Docs(sample)
	layout, err := partition.New(f.layout, docs, f.bands...)
	if err != nil {
		return laid{}, err
	}
	return laid{sample, docs, partition.Ready(layout, f.seqLen, f.size)}, nil
}

// prepare lays out a sample that a batch to come begins with.
func (f *feed) prepare(sample int64) (err error) {
	f.next, err = f.lay(sample)
	return err
}

// batch reads this rank's tokens of the samples of a group and queues their way to the device.
// It waits until the memory of the batch before the last is free again. The caller calls done
// on the result once all that reads it is queued.
func (f *feed) batch(ctx context.Context, samples []int64) (*microBatch, error) {
	b := &microBatch{}
	laid, err := f.lay(samples[0])
	if err != nil {
		return nil, err
	}
	b.layout = laid.layout
	if f.packed {
		b.docs = laid.docs
	}
	spans := b.layout.Spans(f.seqLen, f.size, f.rank)
	n, count := partition.Count(spans), len(samples)
	if b.slot, err = f.inputs.take(ctx, count*n); err != nil {
		return nil, err
	}
	h := f.inputs.mem.Views(b.slot.host, count, n)
	ids, targets := tensor.Data[int32](h.IDs), tensor.Data[int32](h.Targets)
	positions := make([]int, count*n)
	for i, sample := range samples {
		lo, hi := i*n, (i+1)*n
		if err := f.loader.Load(sample, spans, ids[lo:hi], targets[lo:hi], positions[lo:hi]); err != nil {
			return nil, fmt.Errorf("sample %d: %w", sample, err)
		}
	}
	b.positions, b.targets = positions, targets
	if f.packed {
		f.rope.Fill(h.Cos, h.Sin, positions)
	}
	f.inputs.upload(b.slot, count*n)
	b.Batch = f.inputs.mem.Views(f.inputs.mem.Blocks[b.slot.block].Memory(), count, n)
	if !f.packed {
		b.Cos, b.Sin, err = f.inputs.tables(f.rope, count, n, positions)
	}
	return b, err
}

// inputs holds the memory through which batches go to the device. While one is computed the next
// is read from the disk and copied.
type inputs struct {
	dev    *Device
	mem    *state.Batches
	slots  [2]slot
	next   int
	tabled int // tokens whose tables are on the device
}

// A slot is a block of the device's memory, and its twin on the host.
type slot struct {
	dev   *Device
	block int
	host  *tensor.Host
	busy  tensor.Event // until then the batch is in use; nil: it never was
}

func newInputs(dev *Device, cfg *config.Config, tokens int) (*inputs, error) {
	mem, err := state.NewBatches(dev, state.Format{Pairs: cfg.Model.HeadDim / 2, Packed: cfg.Data.PackDocuments}, tokens)
	return &inputs{dev: dev, mem: mem, slots: [2]slot{{dev: dev, block: 0}, {dev: dev, block: 1}}}, err
}

// done marks the present end of the compute stream as the end of the batch's use.
func (b *microBatch) done() { b.slot.busy = b.slot.dev.Stream.Record() }

// take returns the slot of the next batch, with room for that many tokens.
func (in *inputs) take(ctx context.Context, tokens int) (*slot, error) {
	s := &in.slots[in.next]
	in.next = (in.next + 1) % len(in.slots)
	if s.busy != nil {
		if err := s.busy.Sync(ctx); err != nil {
			return nil, err
		}
	}
	if err := in.mem.Grow(s.block, tokens); err != nil {
		return nil, fmt.Errorf("a batch of %d tokens: %w", tokens, err)
	}
	bytes := int64(in.mem.Blocks[s.block].Size()) * 4
	if s.host != nil && s.host.Bytes() >= bytes {
		return s, nil
	}
	if s.host != nil { // too small, and no longer in use
		in.dev.Store.FreeHost(s.host)
		s.host = nil
	}
	var err error
	s.host, err = in.dev.Store.AllocHost(bytes)
	return s, err
}

// upload queues the copy of a slot's batch. It runs beside the batch before: take has waited for the
// slot's last one.
func (in *inputs) upload(s *slot, tokens int) {
	if n := in.mem.Words(tokens); n > 0 {
		host := tensor.Dense(s.host, tensor.I32, 0, [4]int{1, 1, 1, n})
		in.dev.Store.Prefetch(state.Part(in.mem.Blocks[s.block], 0, n), host)
	}
}

// tables returns cos and sin of the positions of count samples of n tokens, all alike.
func (in *inputs) tables(r *model.Rope, count, n int, positions []int) (cos, sin View, err error) {
	tokens, pairs := count*n, in.mem.Pairs
	shape := [4]int{count, n, 1, pairs}
	if tokens > in.tabled || in.mem.Cos.IsZero() {
		if err := in.mem.GrowTables(tokens); err != nil {
			return cos, sin, err
		}
	}
	cos, sin = state.Part(in.mem.Cos, 0, tokens*pairs).Reshape(shape), state.Part(in.mem.Sin, 0,
		tokens*pairs).Reshape(shape)
	if tokens > in.tabled {
		host, err := in.dev.HostVector(tensor.F32, 2*tokens*pairs)
		if err != nil {
			return cos, sin, err
		}
		c, s := state.Part(host, 0, cos.Size()).Reshape(shape), state.Part(host, cos.Size(), 2*cos.Size()).Reshape(shape)
		r.Fill(c, s, positions)
		in.dev.Store.Upload(cos, c)
		in.dev.Store.Upload(sin, s)
		in.tabled = tokens
	}
	return cos, sin, nil
}
