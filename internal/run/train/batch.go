package train

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/internal/text/data"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/ring/scan"
	"github.com/cprun/cprun/tensor"
)

// feed turns samples into micro batches of this rank's tokens.
type feed struct {
	loader samples
	rope   *model.Rope
	layout partition.LayoutName
	bands  []partition.Band // of the layers
	packed bool
	seqLen int // global tokens
	size   int // ranks that share a sequence, and this one among them
	rank   int
	inputs *inputs
	next   laid // made in advance by prepare

	seen func(b *microBatch, samples []int64, spans []partition.Span, ids []int32) // called with each batch, unless nil
}

// A laid is a sample with its layout over the ranks.
type laid struct {
	sample int64
	docs   []int            // with the end that they leave empty
	tokens int              // in documents
	seqLen int              // global rows
	layout partition.Layout // nil: none
}

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

// batch returns the number of samples of the next step. The step that reaches train.samples has fewer.
func (t *Trainer) batch() int {
	n := t.cfg.Train.GlobalBatchSize
	if end := int64(t.cfg.Train.Samples); end > 0 {
		n = int(min(int64(n), max(0, end-t.consumed)))
	}
	return n
}

// samplesOf lists the samples of a micro batch of this rank's data group. Groups take turns, so that the order of
// samples does not depend on the number of groups. All list as many as the first, since their passes are collective:
// those of the list from trained on only fill it, and train nothing.
func (t *Trainer) samplesOf(micro int) (samples []int64, trained int) {
	n, size := t.batch(), t.cfg.Train.MicroBatchSize
	first := micro * t.mesh.dataSize * size // of the first group
	own := first + t.mesh.dataRank*size
	for i := range min(size, n-first) {
		samples = append(samples, t.train.loader.Index(t.consumed+int64(min(own+i, n-1))))
	}
	return samples, max(0, min(len(samples), n-own))
}

// totals counts the targets, tokens and FLOPs of the whole step over all groups. Every rank gets the same result
// without reading the data of others.
func (t *Trainer) totals() (valid, tokens int, flops float64) {
	n, loader := t.batch(), t.train.loader
	if loader.Alike() {
		docs := loader.Docs(0)
		return n * loader.Valid(0), n * total(docs), float64(n) * t.work.FLOPs(docs)
	}
	for i := range n {
		sample := loader.Index(t.consumed + int64(i))
		docs := loader.Docs(sample)
		valid, tokens = valid+loader.Valid(sample), tokens+total(docs)
		flops += t.work.FLOPs(docs)
	}
	return valid, tokens, flops
}

func (f *feed) total(cfg *config.Config) int64 {
	if n := cfg.Data.Validation.Samples; n > 0 {
		return min(f.loader.Samples(), int64(n))
	}
	return f.loader.Samples()
}

// A microBatch is a group of samples with one layout.
type microBatch struct {
	model.Batch
	laid // the first sample; without docs if they are not separate

	// The positions and targets of the rows, on the host, valid until done.
	positions []int
	targets   []int32

	slot *slot
}

// groups splits the samples of a micro batch into groups for one pass each. Packed samples go one by one, since their
// masks and layouts differ.
func (f *feed) groups(samples []int64) [][]int64 {
	if !f.packed {
		return [][]int64{samples}
	}
	return slices.Collect(slices.Chunk(samples, 1))
}

func (f *feed) lay(sample int64) laid {
	if f.next.layout != nil && f.next.sample == sample {
		return f.next
	}
	docs := f.loader.Docs(sample)
	n, tokens := rowsFor(docs, f.seqLen, f.size), total(docs)
	docs = filled(docs, n)
	return laid{sample, docs, tokens, n, partition.Ready(f.layout.Layout(docs, f.bands...), n, f.size)}
}

// rowsFor returns the rows in which the ranks compute a sample of these documents, at most seqLen. There are at most
// lengths different ones, since some kernels prepare for each.
func rowsFor(docs []int, seqLen, ranks int) int {
	const lengths = 64
	unit := 2 * ranks // zigzag gives each rank two pieces
	unit *= max(1, (seqLen+lengths*unit-1)/(lengths*unit))
	return min(seqLen, (total(docs)+unit-1)/unit*unit)
}

func total(docs []int) (tokens int) {
	for _, n := range docs {
		tokens += n
	}
	return tokens
}

// filled adds the rows after the documents of a sample as one more document.
func filled(docs []int, rows int) []int {
	if n := rows - total(docs); n > 0 {
		return append(docs, n)
	}
	return docs
}

// batch reads this rank's tokens of a group of samples and queues their upload. Samples from trained on have no
// targets. It waits for the memory of the batch before the last. The caller calls done on the result after queueing all
// readers.
func (f *feed) batch(ctx context.Context, samples []int64, trained int) (*microBatch, error) {
	b := &microBatch{laid: f.lay(samples[0])}
	docs := b.docs
	if !f.packed {
		b.docs = nil
	}
	spans := b.layout.Spans(b.seqLen, f.size, f.rank)
	n, count := partition.Count(spans), len(samples)
	var err error
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
		for k := lo; k < hi && i >= trained; k++ {
			targets[k] = -1
		}
	}
	b.positions, b.targets = positions, targets
	if !h.Tokens.IsZero() {
		number(tensor.Data[int32](h.Tokens), samples[:min(count, trained)], spans, f.seqLen, b.tokens)
	}
	if f.seen != nil {
		f.seen(b, samples[:min(count, trained)], spans, ids)
	}
	if f.packed {
		f.rope.Fill(h.Cos, h.Sin, positions, f.lengths(docs, spans, 1))
	}
	f.inputs.upload(b.slot, count*n)
	b.Batch = f.inputs.mem.Views(f.inputs.mem.Blocks[b.slot.block].Memory(), count, n)
	if !f.packed {
		b.Cos, b.Sin, err = f.inputs.tables(f.rope, count, n, positions, f.lengths(docs, spans, count))
	}
	return b, err
}

// lengths returns the length of the document of each token in the spans of count samples; nil if the rotation does not
// depend on it.
func (f *feed) lengths(docs []int, spans []partition.Span, count int) []int {
	if f.rope.Long == nil {
		return nil
	}
	var of, out []int
	for _, n := range docs {
		of = append(of, slices.Repeat([]int{n}, n)...)
	}
	for _, at := range partition.Positions(spans) {
		out = append(out, of[at])
	}
	return slices.Repeat(out, count)
}

// number sets the numbers of tokens, which do not depend on the ranks, and -1 for rows after the tokens of a sample or
// after all samples. Numbers may wrap, since they only choose random numbers.
func number(dst []int32, samples []int64, spans []partition.Span, seqLen, tokens int) {
	i := 0
	for _, sample := range samples {
		for _, s := range spans {
			for k := range s.Len {
				if dst[i] = -1; s.Start+k*s.Stride < tokens {
					dst[i] = int32((sample*int64(seqLen) + int64(s.Start+k*s.Stride)) & math.MaxInt32)
				}
				i++
			}
		}
	}
	for ; i < len(dst); i++ {
		dst[i] = -1
	}
}

// inputs is a double buffer for batches: while the device computes one, the host reads and uploads the next.
type inputs struct {
	dev    *Device
	mem    *state.Batches
	slots  [2]slot
	next   int
	tabled int // tokens of the RoPE tables on the device
}

// A slot is a block of device memory with a host buffer.
type slot struct {
	dev   *Device
	block int
	host  *tensor.Host
	busy  tensor.Event // end of the batch's use; nil: never used
}

func newInputs(dev *Device, cfg *config.Config, tokens int) (*inputs, error) {
	mem, err := state.NewBatches(dev, state.FormatOf(&cfg.Model.Config, cfg.Data.PackDocuments), tokens)
	return &inputs{dev: dev, mem: mem, slots: [2]slot{{dev: dev, block: 0}, {dev: dev, block: 1}}}, err
}

// done records the end of the batch's use on the compute stream.
func (b *microBatch) done() { b.slot.busy = b.slot.dev.Stream.Record() }

// take returns the slot of the next batch, with memory for the tokens.
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
	if s.host != nil { // too small
		in.dev.Store.FreeHost(s.host)
		s.host = nil
	}
	var err error
	s.host, err = in.dev.Store.AllocHost(bytes)
	return s, err
}

// upload queues the copy of a slot's batch, which overlaps with the previous batch. take has waited for the slot.
func (in *inputs) upload(s *slot, tokens int) {
	if n := in.mem.Words(tokens); n > 0 {
		host := tensor.Dense(s.host, tensor.I32, 0, [4]int{1, 1, 1, n})
		in.dev.Store.Prefetch(state.Part(in.mem.Blocks[s.block], 0, n), host)
	}
}

// tables returns cos and sin for count samples of n tokens with equal positions. They may have room for more samples.
func (in *inputs) tables(r *model.Rope, count, n int, positions, lengths []int) (cos, sin View, err error) {
	part := func(v View, at, samples int) View {
		size := samples * n * in.mem.Pairs
		return state.Part(v, at*size, (at+1)*size).Reshape([4]int{samples, n, 1, in.mem.Pairs})
	}
	if count*n > in.tabled || in.mem.Cos.IsZero() {
		if err := in.mem.GrowTables(count * n); err != nil {
			return cos, sin, err
		}
		host, err := in.dev.HostVector("rotary tables", tensor.F32, 2*count*n*in.mem.Pairs)
		if err != nil {
			return cos, sin, err
		}
		c, s := part(host, 0, count), part(host, 1, count)
		r.Fill(c, s, positions, lengths)
		in.dev.Store.Upload(part(in.mem.Cos, 0, count), c)
		in.dev.Store.Upload(part(in.mem.Sin, 0, count), s)
		in.tabled = count * n
	}
	if n > 0 {
		count = in.tabled / n // where a table ends
	}
	return part(in.mem.Cos, 0, count), part(in.mem.Sin, 0, count), nil
}

// A samples is a data.Loader, or a data.Mixture of several.
type samples interface {
	// Samples returns the number of different samples.
	Samples() int64
	// Epoch returns the samples of the run in an epoch.
	Epoch() int64
	// Index returns the n-th sample of the run.
	Index(n int64) int64
	// Docs returns the lengths of a sample's documents, which may leave an end empty.
	Docs(sample int64) []int
	// Valid returns the number of a sample's targets.
	Valid(sample int64) int
	// Tokens returns the number of tokens of all samples.
	Tokens() int64
	// Targets returns the number of targets of all samples.
	Targets() int64
	// Dropped returns the number of documents left out because of their length, and the lengths of all.
	Dropped() (documents int64, of data.Lengths)
	// Held returns the bytes of the data in memory.
	Held() int64
	// Alike reports whether all samples have equal Docs and Valid.
	Alike() bool
	// Load reads one rank's shard of a sample.
	Load(sample int64, spans []partition.Span, ids, targets []int32, positions []int) error
}

func tokenizerOf(cfg *config.Config) *data.Tokenizer {
	return data.NewTokenizer(cfg.Data.Tokenizer, cfg.Model.VocabSize)
}

func chatOf(cfg *config.Config) *data.Chat {
	return data.NewChat(cfg.Data.Tokenizer, cfg.Data.ChatTemplate, cfg.Data.TrainOn == "all")
}

// formatOf returns data.format; "" for auto.
func formatOf(cfg *config.Config) string {
	if cfg.Data.Format == "auto" {
		return ""
	}
	return cfg.Data.Format
}

func sourceOf(cfg *config.Config, group config.Files, tok *data.Tokenizer) data.Source {
	return data.Source{Paths: group.Globs(), Tokenizer: tok, EOS: cfg.Data.EOSTokenID, Vocab: cfg.Model.VocabSize,
		Format: formatOf(cfg), Chat: chatOf(cfg), Cache: cfg.Data.TokenCache()}
}

// Identify identifies the training data of a config, of which Check has found so much.
func Identify(cfg *config.Config, found *plan.Data) (*data.Identity, error) {
	records := int64(-1)
	if found != nil && found.Documents != nil {
		records = *found.Documents
	}
	var sources []data.Source
	for _, group := range cfg.Data.Path.Sources() {
		sources = append(sources, sourceOf(cfg, group, tokenizerOf(cfg)))
	}
	return data.Identify(sources, records)
}

// openData opens files as one dataset, or if they have weights, as one dataset each.
func openData(cfg *config.Config, files config.Files, tok *data.Tokenizer) ([]*data.Dataset, error) {
	var sources []*data.Dataset
	for _, group := range files.Sources() {
		ds, err := data.Open(sourceOf(cfg, group, tok))
		if err != nil {
			return nil, err
		}
		sources = append(sources, ds)
	}
	return sources, nil
}

// cutData cuts the datasets of openData into samples.
func cutData(cfg *config.Config, files config.Files, sources []*data.Dataset, shuffle bool) (samples, error) {
	groups := files.Sources()
	var parts []*data.Loader
	var weights []float64
	for k, ds := range sources {
		l, err := data.New(ds, data.Plan{
			SeqLen: cfg.Data.SeqLen, Shuffle: shuffle, Seed: cfg.Data.Seed + int64(k),
			PackDocuments: cfg.Data.Packs(), Whole: cfg.Data.Whole(groups[k]),
		})
		if err != nil {
			return nil, err
		}
		parts, weights = append(parts, l), append(weights, files[k].Weight)
	}
	if !files.Mixed() {
		return parts[0], nil
	}
	return data.Mix(parts, weights, cfg.Data.Seed)
}

// labels name queued work for traces and status reports, such as "step 7/forward/layer 3".
type labels struct {
	flat    *model.FlatLayout
	streams []tensor.Stream // the device's streams, which label those of transfers
	ring    *ring.Ring      // adds the hops; nil until it exists
	scan    *scan.Scan      // likewise; nil if no layer is recurrent
	whole   string          // the step or the validation
}

// begin sets the label of the work until end.
func (l *labels) begin(format string, args ...any) {
	l.whole = fmt.Sprintf(format, args...)
	l.set("")
}

func (l *labels) end() {
	l.whole = ""
	l.set("")
}

// part sets the pass, "" for none, and its bucket of the weights, -1 for none.
func (l *labels) part(pass string, bucket int) {
	if bucket == l.flat.Vectors() { // used by all layers
		return
	}
	switch {
	case bucket < 0:
	case bucket == l.flat.Embedding() && pass == "backward" && l.flat.Empty(l.flat.Head()):
		pass += "/head" // tied weights
	case bucket == l.flat.Embedding():
		pass += "/embedding"
	case bucket == l.flat.Head():
		pass += "/head"
	default:
		pass += fmt.Sprintf("/layer %d", l.flat.Buckets[bucket].Layer)
	}
	l.set(pass)
}

func (l *labels) set(part string) {
	path := strings.Trim(l.whole+"/"+part, "/")
	for _, s := range l.streams {
		s.Label(path)
	}
	if l.ring != nil {
		l.ring.Label = path
	}
	if l.scan != nil {
		l.scan.Label = path
	}
}
