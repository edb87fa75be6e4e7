// Package generate has a model write text. A Model keeps the keys and values of the tokens before, so that
// each further token costs one pass of one row, and Write draws tokens from its logits. The layers are
// package model's, as in training.
package generate

import (
	"context"
	"errors"
	"fmt"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto memory; see package tensor.
type View = tensor.View

// pieceRows bounds the tokens of one pass: enough for efficient matrix products, and few enough to keep
// activations small and to obey an interrupt soon.
const pieceRows = 256

// Model is a model in float32 on a device, and the sequence that it has read. It is used from one goroutine.
type Model struct {
	cfg    *hf.Config
	dev    *device.Device
	cache  *cache
	model  *model.Model
	rope   *model.Rope
	arena  *tensor.Arena
	logits mirror // V
	ids    mirror // of a pass
	cos    mirror
	sin    mirror
}

// mirror is a vector of the device, and one of the host to copy it from or to.
type mirror struct{ dev, host View }

// Bytes returns the memory of a model that reads and writes at most tokens tokens: its weights, and
// their keys and values. Activations come on top, of at most some hundred tokens.
func Bytes(cfg *hf.Config, tokens int) (weights, cache int64) {
	size := int64(tensor.F32.Size())
	row := int64(cfg.NumKeyValueHeads) * int64(cfg.HeadDim) * size
	return model.FlatSize(model.Layout(cfg)) * size, 2 * int64(cfg.NumHiddenLayers) * int64(tokens) * row
}

// New returns a model that has read nothing, with room for that many tokens. read sets dst to all
// elements of a parameter. cfg is resolved and valid. The device computes in float32 and stays the caller's.
func New(ctx context.Context, cfg *hf.Config, dev *device.Device, tokens int,
	read func(p model.Param, dst []float32) error) (m *Model, err error) {
	defer device.Caught(&err)
	layout := model.NewLayout(cfg, 1)
	flat, err := dev.Vector("weights", tensor.F32, int(layout.Size()))
	if err != nil {
		return nil, err
	}
	for _, p := range layout.Params {
		if err := load(ctx, dev, p.View(flat), func(dst []float32) error { return read(p, dst) }); err != nil {
			return nil, err
		}
	}
	m = &Model{cfg: cfg, dev: dev, rope: model.NewRope(cfg)}
	if m.cache, err = newCache(cfg, dev, tokens); err != nil {
		return nil, err
	}
	for _, v := range []struct {
		to *mirror
		t  tensor.DType
		n  int
	}{
		{&m.logits, tensor.F32, cfg.VocabSize}, {&m.ids, tensor.I32, pieceRows},
		{&m.cos, tensor.F32, pieceRows * cfg.HeadDim / 2}, {&m.sin, tensor.F32, pieceRows * cfg.HeadDim / 2},
	} {
		if v.to.dev, err = dev.Vector("tokens", v.t, v.n); err == nil {
			v.to.host, err = dev.HostVector(v.t, v.n)
		}
		if err != nil {
			return nil, err
		}
	}
	if m.arena, err = dev.Arena("activations", 0); err != nil {
		return nil, err
	}
	m.model = model.New(cfg, dev.Ops, m.cache, model.Params{Layout: layout, Weights: flat, Compute: flat},
		model.Options{})
	return m, nil
}

func load(ctx context.Context, dev *device.Device, dst View, read func([]float32) error) error {
	if _, ok := dst.Memory().(*tensor.Host); ok {
		return read(tensor.Data[float32](dst))
	}
	host, err := dev.HostVector(tensor.F32, dst.Size())
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
	return v.Slice(tensor.Dim, 0, shape[1]*shape[3]).Reshape(shape)
}

// Len returns the tokens that have been read.
func (m *Model) Len() int { return m.cache.read }

// Room returns the tokens that can be read in all.
func (m *Model) Room() int { return m.cache.room }

// Read reads on: one token or more, for which there is room. It returns the logits of the token that
// comes next, which are valid until the next call. After an error the model cannot be used any more.
func (m *Model) Read(ctx context.Context, ids []int32) ([]float32, error) {
	if len(ids) == 0 || len(ids) > m.Room()-m.Len() {
		return nil, fmt.Errorf("%d tokens to read behind %d, with room for %d", len(ids), m.Len(), m.Room())
	}
	for len(ids) > 0 {
		n := min(len(ids), pieceRows)
		if err := m.pass(ctx, ids[:n]); err != nil {
			return nil, err
		}
		ids = ids[n:]
	}
	return tensor.Data[float32](m.logits.host), nil
}

func (m *Model) pass(ctx context.Context, ids []int32) (err error) {
	defer device.Caught(&err)
	n, half := len(ids), m.cfg.HeadDim/2
	positions := make([]int, n)
	for i := range positions {
		positions[i] = m.cache.read + i
	}
	copy(tensor.Data[int32](m.ids.host), ids)
	rows := func(v View) View { return first(v, [4]int{1, n, 1, half}) }
	m.rope.Fill(rows(m.cos.host), rows(m.sin.host), positions)
	b := model.Batch{IDs: first(m.ids.dev, [4]int{1, n, 1, 1}), Cos: rows(m.cos.dev), Sin: rows(m.sin.dev)}
	m.dev.Store.Upload(b.IDs, first(m.ids.host, [4]int{1, n, 1, 1}))
	m.dev.Store.Upload(b.Cos, rows(m.cos.host))
	m.dev.Store.Upload(b.Sin, rows(m.sin.host))
	if err := m.model.Logits(m.arena, b, m.logits.dev); err != nil {
		return err
	}
	m.cache.read += n
	m.dev.Store.Download(m.logits.host, m.logits.dev)
	return m.dev.Stream.Record().Sync(ctx)
}

// cache is attention that remembers: new queries see the keys of all that was read before, and their own.
type cache struct {
	cfg  *hf.Config
	dev  *device.Device
	k, v []View // of each layer, [1, room, KV heads, head dim], rotated
	read int    // rows that are filled in every layer
	room int
}

func newCache(cfg *hf.Config, dev *device.Device, room int) (*cache, error) {
	c := &cache{cfg: cfg, dev: dev, room: room}
	for range cfg.NumHiddenLayers {
		for _, list := range []*[]View{&c.k, &c.v} {
			v, err := dev.Vector("keys and values", tensor.F32, room*cfg.NumKeyValueHeads*cfg.HeadDim)
			if err != nil {
				return nil, err
			}
			*list = append(*list, tensor.Dense(v.Memory(), tensor.F32, 0,
				[4]int{1, room, cfg.NumKeyValueHeads, cfg.HeadDim}))
		}
	}
	return c, nil
}

// Forward keeps k and v behind those that there are, and sets out to the attention of q over all of
// them, as far as the layer's window lets it see.
func (c *cache) Forward(layer int, out attention.Partial, q, k, v View) error {
	rows := q.Len(tensor.Seq)
	seen := c.read + rows
	c.dev.Ops.Copy(c.k[layer].Slice(tensor.Seq, c.read, seen), k)
	c.dev.Ops.Copy(c.v[layer].Slice(tensor.Seq, c.read, seen), v)
	// More keys than queries: the mask is aligned at the end of both.
	mask, err := partition.NewMask(true, c.cfg.Window(layer), rows, seen, nil)
	if err != nil {
		return err
	}
	shape := partition.Shape{SeqQ: rows, SeqKV: seen, Size: 1, Layout: partition.Contiguous{}, Mask: mask}
	pass, err := c.dev.Kernel.Forward(out.O, out, q, attention.Softmax{Scale: c.cfg.SoftmaxScale()})
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

// Backward returns an error: what writes does not learn.
func (c *cache) Backward(int, attention.Grads, View, View, View, View, attention.Partial) error {
	return errors.New("attention over a cache has no backward pass")
}

var _ model.Attention = (*cache)(nil)
