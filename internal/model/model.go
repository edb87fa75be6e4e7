// Package model is the transformer for all families of package hf. New builds a Model over the operations of a device
// (Ops) and an attention across ranks (Attention); Forward and ForwardBackward run a pass. A pass queues work and reads
// no result, so the same code runs on a CPU, on a GPU, and in Plan, which only counts memory.
package model

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/cprun/cprun/internal/base/half"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// Options trade memory for time.
type Options struct {
	Recompute Recompute // "": RecomputeNone
	Layers    []Retain  // of each layer; nil: Recompute for all, on the device. Layer 0 keeps its input.
	// LossChunk bounds the tokens with logits in memory at once; 0: DefaultLossChunk.
	LossChunk int
	Hooks     Hooks
	// Segments is the number of segments of a rank in a plan of a model with a Recurrence, and States that of the entered.
	Segments, States int

	tile int // 0: tileRows
}

// DefaultLossChunk is large enough for an efficient matrix product on any device; its logits, with 128K entries of
// bfloat16 each, take 256 MiB.
const DefaultLossChunk = 1024

// Batch is one rank's part of a micro batch. Seq is this rank's tokens. A rank without tokens still takes part in
// attention, which is collective.
type Batch struct {
	IDs     View // int32 [batch, seq, 1, 1]
	Targets View // int32 [batch, seq, 1, 1]; negative: no target
	Cos     View // float32, one rotary table of [batch or more, seq, 1, pairs] after the other; see Rope.Fill
	Sin     View // likewise

	// Parts, if given, divide the rows of the batch. Forward then sums the losses of each part separately.
	Parts []Part
	// Each makes Forward add the loss of row i to element i of the vector of sums, in place of Parts.
	Each bool
	// Rows, if set, makes Forward queue a call with the logits of each chunk, [1, T, 1, V], and its first row, in place of
	// losses. The logits are valid until Rows returns.
	Rows func(lo int, logits View)

	// Tokens numbers the tokens of all ranks in a step, int32 [batch, seq, 1, 1], and Key seeds the random numbers of the
	// step, for the dropout of adapters. The zero View drops nothing. Negative ones only fill the batch; Routes leaves
	// them out.
	Tokens View
	Key    uint64

	// Routes count the choices of experts; zero: not.
	Routes Routes
}

// Routes count and balance the choices of experts.
type Routes struct {
	// The passes add the choices of each layer to its row of Load, float64 [1, layers, 1, E], and the softmax of the
	// router's logits of all layers to Share, float64 [1, 1, 1, E]. Zero Views count nothing.
	Load, Share View
	// Total, with the form of Load, makes ForwardBackward add the gradient of Factor times the sum over the experts of
	// their share and their sum of Total over the layers. Total must be complete when Counted returns, which is called
	// between the two passes; nil: at once.
	Total   View
	Factor  float64
	Counted func() error
}

// Part is the rows of a batch from the previous part's Hi to Hi. Their losses are added to element Sum of the vector of
// sums.
type Part struct{ Hi, Sum int }

// Model is a transformer of the llama family. Its methods queue work without waiting.
//
// In the comments B is batch, S this rank's tokens, E the hidden size, H and K the heads of queries and of keys and
// values, D the head dim, F the intermediate size, V the vocabulary.
type Model struct {
	cfg   *hf.Config
	ops   Ops
	att   Attention
	rec   Recurrence // nil: no layer is recurrent
	opt   Options
	dtype tensor.DType // of activations
	accum tensor.DType // of accumulated values: float32, or float64 for float64 activations

	act     kernels.Activation
	softcap float64   // of logits; 0: none
	embedBy float64   // factor of the embedding; 0: none
	shifts  []shifted // of trained and frozen vectors, if norms multiply by 1 + weight
	widest  int       // the largest norm without weight; 0: none

	flat   *FlatLayout
	lowest int    // the backward pass ends in this layer; -1: with the embedding
	embed  weight // [V, E]
	layers []*layer
	norm   weight  // [E]
	head   *weight // [V, E]; embed if tied

	products [][]*weight // by bucket: the matrices with Param.Product
	rest     [][]View    // by bucket: the gradients in FlatLayout.Rest
}

// A weight is a parameter in a pass: its values, and the gradient to add to, which is zero for a frozen matrix.
type weight struct {
	w, g   View
	frozen bool
	fresh  bool     // the first product of the pass overwrites g
	lora   *adapter // of a matrix; nil: none

	// Of a matrix in E4M3: its codes in place of w and, during the backward pass of its layer, these transposed, with
	// factors of 1. The factors of codes belong to the columns of the other operand there.
	codes, turned kernels.Scaled
}

func (w *weight) scaled() bool { return !w.codes.IsZero() }

// New returns a model over the given parameters, which have the layout of cfg. cfg must be resolved and valid.
func New(cfg *hf.Config, ops Ops, att Attention, params Params, opt Options) *Model {
	opt.LossChunk, opt.tile = cmp.Or(opt.LossChunk, DefaultLossChunk), cmp.Or(opt.tile, tileRows)
	opt.Recompute = cmp.Or(opt.Recompute, RecomputeNone)
	if _, ok := saves[opt.Recompute]; !ok {
		panic(fmt.Sprintf("model: recompute %q in a resolved config", opt.Recompute))
	}
	if opt.Layers == nil {
		opt.Layers = slices.Repeat([]Retain{{Save: saves[opt.Recompute]}}, cfg.NumHiddenLayers)
	}
	if len(opt.Layers) != cfg.NumHiddenLayers || opt.Layers[0].Save == SaveNothing {
		panic(fmt.Sprintf("model: layers keep %+v, want a choice for each of %d, and the input of the first", opt.Layers,
			cfg.NumHiddenLayers))
	}
	m := &Model{cfg: cfg, ops: ops, att: att, opt: opt, dtype: params.Compute.DType(), accum: tensor.F32}
	if m.dtype == tensor.F64 {
		m.accum = tensor.F64
	}
	if !params.Grads.IsZero() {
		for _, b := range params.Layout.Buckets {
			params.BucketGrads = append(params.BucketGrads, b.of(params.Grads))
		}
	}
	m.rec, _ = att.(Recurrence)
	m.flat, m.lowest = params.Layout, lowest(cfg, params.Layout)
	if i := m.lowest; i > 0 && i < cfg.NumHiddenLayers && m.opt.Layers[i].Save == SaveNothing {
		m.opt.Layers = slices.Clone(opt.Layers)
		m.opt.Layers[i].Save = SaveInput // none below computes it again
	}
	for i := range cfg.NumHiddenLayers {
		l := newLayer(cfg, i)
		m.layers = append(m.layers, l)
		if l.Mixer.ValueNorms {
			l.parts[valueNorm] = &weight{frozen: true}
			m.widest = max(m.widest, l.Mixer.DimV)
		}
	}
	m.head = &m.embed
	if !cfg.TieWordEmbeddings {
		m.head = &weight{}
	}
	adapters := map[string]*adapter{}
	for ps := &params; ps != nil; ps = ps.Frozen {
		for i, p := range ps.Layout.Params {
			w := ps.weight(i, p)
			w.frozen = ps != &params
			m.take(p, w, adapters)
		}
	}
	m.adapt(adapters)
	m.choose(cfg, params)
	m.divide(params.BucketGrads)
	return m
}

// CacheBytes returns the bytes of the keys, values and states of a number of tokens. An element of keys and values has
// size bytes.
func CacheBytes(cfg *hf.Config, tokens int, size int64) (n int64) {
	for _, l := range cfg.Layers() {
		n += int64(l.Mixer.KVHeads)*int64(l.Mixer.Dim+l.Mixer.DimV)*int64(tokens)*size + l.Mixer.Delta.StateBytes()
	}
	return n
}

// lowest returns the lowest layer with a trained parameter; -1 if the embedding is trained, the number of layers if
// none is.
func lowest(cfg *hf.Config, flat *FlatLayout) int {
	low := cfg.NumHiddenLayers
	for _, p := range flat.Params {
		if p.Role != hf.Head && p.Role != hf.Norm {
			low = min(low, p.Layer)
		}
	}
	return low
}

// at returns the place of a parameter.
func (m *Model) at(p Param) *weight {
	switch p.Role {
	case hf.Embedding:
		return &m.embed
	case hf.Norm:
		return &m.norm
	case hf.Head:
		return m.head
	}
	return m.layers[p.Layer].at(p.Role)
}

// take puts a parameter in its place, or among the adapters by the name of their matrix.
func (m *Model) take(p Param, w weight, adapters map[string]*adapter) {
	matrix, isB, adapts := hf.Adapted(p.Name)
	if !adapts {
		if p.Layer >= 0 {
			m.layers[p.Layer].parts[p.Role] = &weight{}
		}
		*m.at(p) = w
		return
	}
	l := adapters[matrix]
	if l == nil {
		l = &adapter{name: nameHash(matrix), rate: m.cfg.Tuning.LoRA.Dropout, size: m.cfg.Tuning.LoRA.Scale(matrix)}
		adapters[matrix] = l
	}
	if isB {
		l.b = w
	} else {
		l.a = w
	}
}

func (m *Model) choose(cfg *hf.Config, params Params) {
	f := cfg.Family()
	m.act, m.softcap = cmp.Or(f.Activation, kernels.SiLU), cfg.FinalLogitSoftcapping
	m.embedBy = cfg.EmbeddingMultiplier
	if f.ScaledEmbedding {
		m.embedBy = rounded(math.Sqrt(float64(cfg.HiddenSize)), m.dtype)
	}
	for ps := &params; ps != nil && f.ZeroCentred; ps = ps.Frozen {
		if v := ps.vectors(); v.Size() > 0 {
			used := int(ps.Layout.Buckets[ps.Layout.Vectors()].Used) // as in a plan, on any number of ranks
			m.shifts = append(m.shifts, shifted{flat: ps.Layout, from: v.Slice(tensor.Dim, 0, used)})
		}
	}
}

// rounded returns x rounded to a type of activations.
func rounded(x float64, t tensor.DType) float64 {
	switch t {
	case tensor.BF16:
		return float64(half.FromBF16(half.ToBF16(float32(x))))
	case tensor.F16:
		return float64(half.FromF16(half.ToF16(float32(x))))
	case tensor.F32:
		return float64(float32(x))
	}
	return x
}

// shifted has the vectors of a layout, and 1 + these in a pass.
type shifted struct {
	flat     *FlatLayout
	from, to View
}

// A pass runs a model over a batch, with memory from an arena. Plan and Rehearse run one without memory.
type pass struct {
	*Model
	a      *tensor.Arena
	b      Batch
	tokens View // b.Tokens as one sequence; zero: adapters drop nothing
	dshare View // [1, 1, 1, E], the gradient of each token's share; zero: none
	ones   View // [1, 2, 1, n], the weight of norms without one, and its gradient, which nobody reads; zero: none
	row    int  // the first token of the tile
	dry    bool // it only measures memory
}

func (m *Model) pass(a *tensor.Arena, b Batch) *pass { return &pass{Model: m, a: a, b: b} }

// valueNorm is the norm of value heads, whose weight is 1 and no parameter.
const valueNorm hf.Role = "value norm"

func (p *pass) fillOnes(v View) View {
	p.ops.Zero(v)
	p.ops.Affine(v, v, 1, 1)
	return v
}

// shift allocates 1 + vectors and makes the norms read them; those without weight read ones.
func (p *pass) shift() {
	if p.widest > 0 {
		p.ones = p.a.Alloc(p.accum, 1, 2, 1, p.widest)
		for _, l := range p.layers {
			if w := l.parts[valueNorm]; w != nil {
				both := p.ones.Slice(tensor.Dim, 0, l.Mixer.DimV)
				w.w, w.g = both.Slice(tensor.Seq, 0, 1), both.Slice(tensor.Seq, 1, 2)
			}
		}
	}
	for k := range p.shifts {
		s := &p.shifts[k]
		s.to = p.a.Alloc(s.from.DType(), 1, 1, 1, s.from.Size())
		vectors := s.flat.Vectors()
		for i, param := range s.flat.Params {
			if s.flat.Of(i) == vectors && p.cfg.Centred(param.Tensor) {
				param.Offset -= s.flat.Buckets[vectors].Lo
				p.at(param).w = param.View(s.to)
			}
		}
	}
}

// Forward adds the sum of -log p(target) over the batch's targets to loss, a float64 scalar; with Parts, to the
// elements of a float64 vector. With the zero View it computes no loss. It keeps no activations and restores the arena.
func (m *Model) Forward(a *tensor.Arena, b Batch, loss View) error { return m.pass(a, b).forward(loss) }

func (p *pass) forward(loss View) error {
	defer p.a.Release(p.a.Mark())
	x, err := p.output()
	if err != nil {
		return err
	}
	if !loss.IsZero() {
		p.lossForward(loss, x)
	}
	return nil
}

// Logits computes the logits of the last T tokens of a batch of one sequence into logits, [1, T, 1, V] of the type of
// activations. The batch needs no targets. It keeps no activations and restores the arena.
func (m *Model) Logits(a *tensor.Arena, b Batch, logits View) error {
	defer a.Release(a.Mark())
	p := m.pass(a, b)
	x, err := p.output()
	if err != nil {
		return err
	}
	last, n := logits.Len(tensor.Seq), x.Len(tensor.Seq)
	p.logits(chunk{
		x:      x.Slice(tensor.Seq, n-last, n),
		inv:    a.Alloc(m.accum, 1, last, 1, 1),
		n:      a.Alloc(m.dtype, 1, last, 1, m.cfg.HiddenSize),
		logits: logits,
	})
	return nil
}

// output returns the last layer's output, [B, S, 1, E], of a pass without gradients.
func (p *pass) output() (View, error) {
	p.shift()
	x := [2]View{p.hidden(), p.hidden()}
	layers := make([]activations, len(p.layers)+1)
	for i := range layers {
		layers[i].x = x[i%2]
	}
	return layers[len(p.layers)].x, p.layersForward(layers, NoBucket)
}

// layersForward computes the layers, each from its x to the x of the following element. next is the first bucket after
// that of the head.
func (p *pass) layersForward(layers []activations, next int) error {
	if err := p.use(p.flat.Embedding(), p.flat.Vectors()); err != nil {
		return err
	}
	p.ops.Embed(layers[0].x, p.embed.w, p.b.IDs)
	if p.embedBy > 0 {
		p.ops.Affine(layers[0].x, layers[0].x, p.embedBy, 0)
	}
	if err := p.use(p.flat.Vectors(), p.flat.Layer(0)); err != nil { // for all layers
		return err
	}
	for _, s := range p.shifts {
		p.ops.Affine(s.to, s.from, 1, 1)
	}
	if !p.ones.IsZero() {
		p.fillOnes(p.ones)
	}
	for i := range p.layers {
		above := p.flat.Layer(i + 1)
		if i+1 == len(p.layers) {
			above = p.headBucket()
		}
		if err := p.use(p.flat.Layer(i), above); err != nil {
			return err
		}
		if err := p.layerForward(i, layers[i+1].x, layers[i], false); err != nil {
			return fmt.Errorf("layer %d forward: %w", i, err)
		}
		if layers[i].host {
			p.opt.Hooks.Keep(i, layers[i].moved)
		}
	}
	return p.use(p.headBucket(), next)
}

func (p *pass) use(bucket, next int) error {
	if p.opt.Hooks.Use == nil {
		return nil
	}
	return p.opt.Hooks.Use(bucket, next)
}

func (p *pass) headBucket() int {
	if p.cfg.TieWordEmbeddings {
		return p.flat.Embedding()
	}
	return p.flat.Head()
}

// ForwardBackward adds the sum of -log p(target) over the batch's targets to loss, a float64 scalar, and the gradient
// of scale times that sum to the gradients of the parameters. It restores the arena.
func (m *Model) ForwardBackward(a *tensor.Arena, b Batch, loss View, scale float64) error {
	return m.pass(a, b).forwardBackward(loss, scale)
}

func (p *pass) forwardBackward(loss View, scale float64) error {
	defer p.a.Release(p.a.Mark())
	p.shift()
	if !p.b.Tokens.IsZero() { // only a pass with gradients drops elements
		p.tokens = rows(p.b.Tokens)
	}
	// The gradient d between layers is updated in place. It is below the layers in the arena, which are released one by
	// one.
	if r := p.b.Routes; !r.Total.IsZero() {
		p.dshare = p.a.Alloc(p.accum, 1, 1, 1, r.Total.Cols())
	}
	d, layers, visits := p.hidden(), p.place(), p.visits()
	last, first := layers[len(p.layers)], NoBucket
	if len(visits) > 0 {
		first = p.flat.Layer(visits[0].layer)
	}
	if err := p.layersForward(layers, first); err != nil {
		return err
	}
	if err := p.balance(); err != nil {
		return err
	}
	if err := p.headBackward(loss, d, last.x, scale); err != nil {
		return err
	}
	p.a.Release(last.mark)
	for n, v := range visits {
		next := NoBucket
		if n+1 < len(visits) {
			next = p.flat.Layer(visits[n+1].layer)
		}
		if err := p.use(p.flat.Layer(v.layer), next); err != nil {
			return err
		}
		if err := p.visit(d, layers, v); err != nil {
			return err
		}
	}
	if err := p.doneGrads(p.flat.Vectors()); err != nil {
		return err
	}
	if !p.cfg.TieWordEmbeddings {
		p.beginGrads(p.flat.Embedding())
	}
	if p.embed.g.IsZero() {
		return p.doneGrads(p.flat.Embedding())
	}
	if p.embedBy > 0 {
		p.ops.Affine(d, d, p.embedBy, 0)
	}
	p.embedBackward(d)
	return p.doneGrads(p.flat.Embedding())
}

// embedBackward adds the gradient of the lookup, except to the row of padding, which it saves and restores.
func (p *pass) embedBackward(d View) {
	pad := p.cfg.PaddingRow()
	if pad < 0 {
		p.ops.EmbedBackward(p.embed.g, d, p.b.IDs)
		return
	}
	defer p.a.Release(p.a.Mark())
	row := p.embed.g.Slice(tensor.Seq, pad, pad+1)
	before := p.a.Alloc(row.DType(), shape(row)...)
	p.ops.Copy(before, row)
	p.ops.EmbedBackward(p.embed.g, d, p.b.IDs)
	p.ops.Copy(row, before)
}

// A visit of the backward pass computes the output of a layer again, or goes back through it.
type visit struct {
	layer int
	again bool
}

// visits returns the backward pass. A layer with a kept input and those above it without one are a segment: from below,
// their inputs are computed first.
func (p *pass) visits() (list []visit) {
	for top, i := len(p.layers)-1, len(p.layers)-1; i >= max(p.lowest, 0); i-- {
		if p.opt.Layers[i].Save == SaveNothing {
			continue
		}
		for k := i; k < top; k++ {
			list = append(list, visit{k, true})
		}
		for ; top >= i; top-- {
			list = append(list, visit{top, false})
		}
	}
	return list
}

func (p *pass) visit(d View, layers []activations, v visit) error {
	i, s := v.layer, &layers[v.layer]
	if s.host {
		s.host = false
		p.opt.Hooks.Bring(i, s.moved)
	}
	if v.again {
		if err := p.layerForward(i, layers[i+1].x, *s, true); err != nil {
			return fmt.Errorf("layer %d forward: %w", i, err)
		}
		return nil
	}
	buckets := p.flat.With(p.flat.Layer(i))
	for _, b := range buckets {
		p.beginGrads(b)
	}
	if err := p.layerBackward(i, d, *s); err != nil {
		return fmt.Errorf("layer %d backward: %w", i, err)
	}
	p.a.Release(s.mark)
	for _, b := range buckets {
		if err := p.doneGrads(b); err != nil {
			return err
		}
	}
	return nil
}

// headBackward computes the loss, and its gradients down to d, the gradient of the last layer's output.
func (p *pass) headBackward(loss, d, x View, scale float64) error {
	p.beginGrads(p.flat.Head())
	p.beginGrads(p.flat.Vectors())
	if p.cfg.TieWordEmbeddings {
		p.beginGrads(p.flat.Embedding())
	}
	p.lossBackward(loss, d, x, scale)
	return p.doneGrads(p.flat.Head())
}

// hidden returns a view for the input of a layer, [B, S, 1, E].
func (p *pass) hidden() View {
	return p.a.Alloc(p.dtype, p.b.IDs.Len(tensor.Batch), p.b.IDs.Len(tensor.Seq), 1, p.cfg.HiddenSize)
}

// Hooks report the progress of passes through the buckets, so that weights can arrive and gradients leave during a
// pass. They queue work without waiting; nil ones are not called.
type Hooks struct {
	// Use is called before operations that read the weights of a bucket: in the forward pass, for the head, and in the
	// backward pass, when a layer is computed again or its gradients are. The weights of the vectors stay for the whole
	// pass. The call also covers the buckets of FlatLayout.With. next is the bucket of the next call, or NoBucket: its
	// weights may replace those of buckets used before this one.
	Use func(bucket, next int) error
	// Begin is called before the first operation of a backward pass on the gradients of a bucket, and Done after the last.
	// If Begin returns true, the pass is fresh: it overwrites them, whatever they are. Else it adds.
	Begin func(bucket int) (fresh bool)
	Done  func(bucket int) error
	// Keep and Bring move the activations of the layers with Host, which need both. These layers take HostSlots slots in
	// turn, and saved has their views in the slot. The last HostSlots of them stay there: saved is empty.
	//
	// Keep is called when the forward pass of a layer is queued. It begins to copy that layer to the host. It makes the
	// stream wait for the copy of the moved layer before, whose slot later work overwrites.
	//
	// Bring is called before the backward pass first uses a layer. It makes the stream wait for the views. It may begin to
	// copy the moved layer two below into the slot of the moved layer above, which is free when the queued work is done.
	Keep, Bring func(layer int, saved []View)
}
