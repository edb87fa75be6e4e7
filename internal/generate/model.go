// Package generate has a model write: it keeps the keys and values of what has been read, so that each
// further token costs one pass of one row, and draws tokens from the logits. The layers are those of
// package model, as in training.
package generate

import (
	"context"
	"fmt"

	"github.com/cprun/cprun/internal/hf"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto memory; see package tensor.
type View = tensor.View

// pieceRows is how many tokens of a prompt go through the model at once: enough that matrix products
// are efficient, and few enough that activations stay small and an interrupt is soon obeyed.
const pieceRows = 256

// Model is a model in float32 on the CPU, and the sequence that it has read. It is used from one goroutine.
type Model struct {
	cfg    *hf.Config
	ops    *cpu.Kernels
	stream *tensor.HostStream
	cache  *cache
	model  *model.Model
	rope   *model.Rope
	arena  *tensor.Arena
	logits View // [1, 1, 1, V]
}

// Bytes returns the memory of a model that reads and writes at most tokens tokens: its weights, and
// their keys and values. Activations come on top, of at most some hundred tokens.
func Bytes(cfg *hf.Config, tokens int) (weights, cache int64) {
	size := int64(tensor.F32.Size())
	row := int64(cfg.NumKeyValueHeads) * int64(cfg.HeadDim) * size
	return model.FlatSize(model.Layout(cfg)) * size, 2 * int64(cfg.NumHiddenLayers) * int64(tokens) * row
}

// New returns a model that has read nothing, with room for that many tokens. read fills dst with all
// elements of a parameter. cfg is resolved and valid.
func New(cfg *hf.Config, tokens int, read func(p model.Param, dst []float32) error) (*Model, error) {
	layout := model.NewLayout(cfg, 1)
	flat := tensor.New(tensor.F32, int(layout.Size()))
	for _, p := range layout.Params {
		if err := read(p, tensor.Data[float32](p.View(flat))); err != nil {
			return nil, err
		}
	}
	stream := tensor.NewHostStream("compute")
	ops := cpu.New(stream)
	m := &Model{
		cfg: cfg, ops: ops, stream: stream, cache: newCache(cfg, ops, tokens), rope: model.NewRope(cfg),
		arena: tensor.NewHostArena(0), logits: tensor.New(tensor.F32, 1, 1, 1, cfg.VocabSize),
	}
	m.model = model.New(cfg, ops, m.cache, model.Params{Layout: layout, Weights: flat, Compute: flat}, model.Options{})
	return m, nil
}

// Close waits for what is being computed.
func (m *Model) Close() error { return m.stream.Close() }

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
	return tensor.Data[float32](m.logits), nil
}

// pass brings tokens through the layers.
func (m *Model) pass(ctx context.Context, ids []int32) error {
	n := len(ids)
	positions := make([]int, n)
	for i := range positions {
		positions[i] = m.cache.read + i
	}
	b := model.Batch{
		IDs: tensor.FromSlice(ids, 1, n, 1, 1),
		Cos: tensor.New(tensor.F32, 1, n, 1, m.cfg.HeadDim/2),
		Sin: tensor.New(tensor.F32, 1, n, 1, m.cfg.HeadDim/2),
	}
	m.rope.Fill(b.Cos, b.Sin, positions)
	if err := m.model.Logits(m.arena, b, m.logits); err != nil {
		return err
	}
	m.cache.read += n
	return m.stream.Sync(ctx)
}
