// Package generate generates text. A Model caches the keys and values of all tokens so far, so that each new token
// costs a pass of one row. Its layers are those of training. Write samples tokens:
//
//	m, err := generate.New(ctx, cfg, dev, 1024, read)
//	report, err := m.Write(ctx, generate.Request{Prompt: ids, MaxTokens: 100, Sampling: s}, each)
package generate

import (
	"context"
	"fmt"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto memory; see package tensor.
type View = tensor.View

// pieceRows is the maximum number of tokens of one pass. More would make activations large and interrupts slow.
const pieceRows = 256

// Model is a model on a device, with the sequence read so far. It is not safe for concurrent use.
type Model struct {
	cfg    *hf.Config
	dev    *device.Device
	rows   int // of a pass, at most
	cache  *cache
	model  *model.Model
	rope   *model.Rope
	arena  *tensor.Arena
	scores View   // as the model computes the logits
	logits mirror // one per vocabulary entry
	ids    mirror // of a pass
	cos    mirror
	sin    mirror
}

// mirror is a device vector with a host vector to copy from or to.
type mirror struct{ dev, host View }

// Bytes returns the memory of a model for a number of tokens: of its weights, and of the cached keys, values and
// states. The activations of up to pieceRows tokens are extra.
func Bytes(cfg *hf.Config, tokens int) (weights, cache int64) {
	size := int64(tensor.F32.Size())
	return model.NewLayout(cfg, 1).Size() * size, model.CacheBytes(cfg, tokens, size)
}

// New returns a model with an empty cache for the given tokens. read sets dst to all elements of a parameter. cfg must
// be resolved and valid. The device computes in float32; the caller closes it.
func New(ctx context.Context, cfg *hf.Config, dev *device.Device, tokens int,
	read func(p model.Param, dst []float32) error) (m *Model, err error) {
	defer device.Caught(&err)
	params, err := readParams(ctx, cfg, dev, read)
	if err != nil {
		return nil, err
	}
	arena, err := dev.Arena("activations", 0)
	if err != nil {
		return nil, err
	}
	return Over(cfg, dev, *params, model.Options{}, arena, tokens, pieceRows)
}

// Over does what New does over weights that the caller holds, of any type. A pass reads at most rows tokens, with its
// activations in arena.
func Over(cfg *hf.Config, dev *device.Device, params model.Params, opt model.Options, arena *tensor.Arena,
	tokens, rows int) (m *Model, err error) {
	angles := cfg.AllPairs() // of a token
	m = &Model{cfg: cfg, dev: dev, rows: min(rows, pieceRows), rope: model.NewRope(cfg), arena: arena}
	dtype := params.Compute.DType()
	if m.cache, err = newCache(cfg, dev, dtype, tokens); err != nil {
		return nil, err
	}
	m.cache.arena = arena
	for _, v := range []struct {
		to *mirror
		t  tensor.DType
		n  int
	}{
		{&m.logits, tensor.F32, cfg.VocabSize}, {&m.ids, tensor.I32, m.rows},
		{&m.cos, tensor.F32, m.rows * angles}, {&m.sin, tensor.F32, m.rows * angles},
	} {
		if v.to.dev, err = dev.Vector("tokens", v.t, v.n); err == nil {
			v.to.host, err = dev.HostVector("inputs", v.t, v.n)
		}
		if err != nil {
			return nil, err
		}
	}
	if m.scores = m.logits.dev; dtype != tensor.F32 {
		if m.scores, err = dev.Vector("tokens", dtype, cfg.VocabSize); err != nil {
			return nil, err
		}
	}
	m.model = model.New(cfg, dev.Ops, m.cache, params, opt)
	return m, nil
}

// Reset empties the cache.
func (m *Model) Reset() {
	m.cache.read = 0
	m.dev.Ops.Zero(slices.Concat(m.cache.state, m.cache.before)...)
}

// readParams fills all parameters, also those that training never changes.
func readParams(ctx context.Context, cfg *hf.Config, dev *device.Device,
	read func(p model.Param, dst []float32) error) (all *model.Params, err error) {
	for to, layout := &all, model.NewLayout(cfg, 1); layout != nil; to, layout = &(*to).Frozen, layout.Frozen {
		flat, err := dev.Vector("weights", tensor.F32, int(layout.Size()))
		if err != nil {
			return nil, err
		}
		*to = &model.Params{Layout: layout, Weights: flat, Compute: flat}
		for _, p := range layout.Params {
			if err := load(ctx, dev, p.View(flat), func(dst []float32) error { return read(p, dst) }); err != nil {
				return nil, err
			}
		}
	}
	return all, nil
}

func load(ctx context.Context, dev *device.Device, dst View, read func([]float32) error) error {
	if _, ok := dst.Memory().(*tensor.Host); ok {
		return read(tensor.Data[float32](dst))
	}
	host, err := dev.HostVector("weights", tensor.F32, dst.Size())
	if err != nil {
		return err
	}
	defer dev.FreeHostVector(host)
	if err := read(tensor.Data[float32](host)); err != nil {
		return err
	}
	dev.Store.Upload(dst, host.Reshape(dst.Shape()))
	return dev.Stream.Record().Sync(ctx)
}

func first(v View, shape [4]int) View {
	return v.Slice(tensor.Dim, 0, shape[0]*shape[1]*shape[3]).Reshape(shape)
}

// Len returns the number of tokens read.
func (m *Model) Len() int { return m.cache.read }

// Room returns the capacity in tokens.
func (m *Model) Room() int { return m.cache.room }

// Read reads at least one token, at most as many as fit. It returns the logits of the next token, which are valid until
// the next call. After an error the model is unusable.
func (m *Model) Read(ctx context.Context, ids []int32) ([]float32, error) {
	if len(ids) == 0 || len(ids) > m.Room()-m.Len() {
		return nil, fmt.Errorf("%d more tokens after %d do not fit in %d", len(ids), m.Len(), m.Room())
	}
	for total := m.Len() + len(ids); len(ids) > 0; {
		n := min(len(ids), m.rows)
		if err := m.pass(ctx, ids[:n], total); err != nil {
			return nil, err
		}
		ids = ids[n:]
	}
	return tensor.Data[float32](m.logits.host), nil
}

// pass reads some tokens, of a text that has total after the call of Read.
func (m *Model) pass(ctx context.Context, ids []int32, total int) (err error) {
	defer device.Caught(&err)
	n := len(ids)
	positions := make([]int, n)
	for i := range positions {
		positions[i] = m.cache.read + i
	}
	copy(tensor.Data[int32](m.ids.host), ids)
	rows := func(v View) View { return first(v, [4]int{1, n, 1, m.cfg.AllPairs()}) }
	m.rope.Fill(rows(m.cos.host), rows(m.sin.host), positions, slices.Repeat([]int{total}, n))
	b := model.Batch{IDs: first(m.ids.dev, [4]int{1, n, 1, 1}), Cos: rows(m.cos.dev), Sin: rows(m.sin.dev)}
	m.dev.Store.Upload(b.IDs, first(m.ids.host, [4]int{1, n, 1, 1}))
	m.dev.Store.Upload(b.Cos, rows(m.cos.host))
	m.dev.Store.Upload(b.Sin, rows(m.sin.host))
	m.cache.rows = n
	if err := m.model.Logits(m.arena, b, m.scores); err != nil {
		return err
	}
	if m.scores != m.logits.dev {
		m.dev.Ops.Copy(m.logits.dev, m.scores)
	}
	m.cache.read += n
	m.dev.Store.Download(m.logits.host, m.logits.dev)
	return m.dev.Stream.Record().Sync(ctx)
}

// cache implements model.Attention with cached keys and values: queries see all tokens before them.
type cache struct {
	cfg  *hf.Config
	dev  *device.Device
	k, v []View // by layer, [1, room, KV heads, head dim], after RoPE
	read int    // filled rows
	room int
	*states
}

func newCache(cfg *hf.Config, dev *device.Device, dtype tensor.DType, room int) (*cache, error) {
	recurrent, err := newStates(cfg, dev)
	if err != nil {
		return nil, err
	}
	c := &cache{cfg: cfg, dev: dev, room: room, states: recurrent}
	for _, l := range cfg.Layers() {
		m := l.Mixer
		for list, dim := range map[*[]View]int{&c.k: m.Dim, &c.v: m.DimV} {
			v, err := dev.Vector("keys and values", dtype, room*m.KVHeads*dim)
			if err != nil {
				return nil, err
			}
			*list = append(*list, tensor.Dense(v.Memory(), dtype, 0, [4]int{1, room, m.KVHeads, dim}))
		}
	}
	return c, nil
}

// Forward appends k and v to the cache, and computes the attention of q over it, within the layer's window.
func (c *cache) Forward(layer int, out attention.Partial, q, k, v View) error {
	rows := q.Len(tensor.Seq)
	seen := c.read + rows
	c.dev.Ops.Copy(c.k[layer].Slice(tensor.Seq, c.read, seen), k)
	c.dev.Ops.Copy(c.v[layer].Slice(tensor.Seq, c.read, seen), v)
	// with more keys than queries, the mask is aligned at the end
	mask, err := partition.NewMask(true, c.cfg.Layer(layer).Mixer.Window, rows, seen, nil)
	if err != nil {
		return err
	}
	shape := partition.Shape{SeqQ: rows, SeqKV: seen, Size: 1, Layout: partition.Contiguous{}, Mask: mask}
	defer c.arena.Release(c.arena.Mark())
	acc := out
	if acc.O.DType() != acc.LSE.DType() { // sums have the type of LSE
		s := out.O.Shape()
		acc.O = c.arena.Alloc(acc.LSE.DType(), s[0], s[1], s[2], s[3])
	}
	pass, err := c.dev.Kernel.Forward(out.O, acc, q, model.Softmax(c.cfg))
	if err != nil {
		return err
	}
	err = pass.Block(attention.Block{
		K: c.k[layer].Slice(tensor.Seq, 0, seen), V: c.v[layer].Slice(tensor.Seq, 0, seen),
		Tiles: partition.Plan(shape, 0, 0), First: true, Last: true,
	})
	if err != nil {
		return err
	}
	return pass.End()
}

// Backward returns an error, since generation does not train.
func (c *cache) Backward(int, attention.Grads, View, View, View, View, attention.Partial) error {
	return errBackward
}

var _ model.Attention = (*cache)(nil)
