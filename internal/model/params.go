package model

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"

	"github.com/cprun/cprun/internal/hf"
	"github.com/cprun/cprun/internal/tensor"
)

// Param is one tensor of the model and its place in the flat buffers that hold all weights,
// all gradients and all optimizer states, each in one piece: what is reduced, sharded,
// clipped and stepped is then one long vector, whatever the model.
type Param struct {
	Name   string // that of the tensor in a Hugging Face checkpoint
	Shape  []int  // [out, in] of a matrix, [n] of a norm
	Offset int64  // the element of the flat buffer that it begins at, a multiple of Align
	Decay  bool   // weight decay applies: a matrix, embeddings too

	// Std is the standard deviation of the first values; 0 of a norm, which begins as 1.
	Std float64
}

// Align is what offsets and the total size are multiples of, in elements, so that every
// tensor begins at a whole vector of any device and type. The gaps stay zero.
const Align = 64

// Layout lists the parameters of a model in the order in which a forward pass meets them.
func Layout(cfg *hf.Config) []Param {
	l := layout{std: cfg.InitializerRange}
	if l.std == 0 {
		l.std = 0.02
	}
	e, d := cfg.HiddenSize, cfg.HeadDim
	q, kv := cfg.NumAttentionHeads*d, cfg.NumKeyValueHeads*d
	l.add("model.embed_tokens.weight", cfg.VocabSize, e)
	for i := range cfg.NumHiddenLayers {
		p := fmt.Sprintf("model.layers.%d.", i)
		l.add(p+"input_layernorm.weight", e)
		l.add(p+"self_attn.q_proj.weight", q, e)
		l.add(p+"self_attn.k_proj.weight", kv, e)
		l.add(p+"self_attn.v_proj.weight", kv, e)
		if cfg.Architecture == hf.Qwen3 {
			l.add(p+"self_attn.q_norm.weight", d)
			l.add(p+"self_attn.k_norm.weight", d)
		}
		l.add(p+"self_attn.o_proj.weight", e, q)
		l.add(p+"post_attention_layernorm.weight", e)
		l.add(p+"mlp.gate_proj.weight", cfg.IntermediateSize, e)
		l.add(p+"mlp.up_proj.weight", cfg.IntermediateSize, e)
		l.add(p+"mlp.down_proj.weight", e, cfg.IntermediateSize)
	}
	l.add("model.norm.weight", e)
	if !cfg.TieWordEmbeddings {
		l.add("lm_head.weight", cfg.VocabSize, e)
	}
	return l.params
}

type layout struct {
	params []Param
	std    float64
}

func (l *layout) add(name string, shape ...int) {
	p := Param{Name: name, Shape: shape, Offset: FlatSize(l.params), Decay: len(shape) > 1}
	if p.Decay {
		p.Std = l.std
	}
	l.params = append(l.params, p)
}

// FlatSize is the elements of a flat buffer for a layout, a multiple of Align.
func FlatSize(params []Param) int64 {
	if len(params) == 0 {
		return 0
	}
	last := params[len(params)-1]
	return (last.Offset + int64(last.Size()) + Align - 1) / Align * Align
}

// Count is the number of parameters, without the gaps of the flat buffer.
func Count(params []Param) int64 {
	n := int64(0)
	for _, p := range params {
		n += int64(p.Size())
	}
	return n
}

// Size is the number of elements.
func (p Param) Size() int {
	n := 1
	for _, s := range p.Shape {
		n *= s
	}
	return n
}

// View is the parameter's window onto a flat buffer: [1, out, 1, in], or [1, 1, 1, n].
func (p Param) View(flat View) View {
	v := flat.Reshape([4]int{1, 1, 1, flat.Size()}).Slice(tensor.Dim, int(p.Offset), int(p.Offset)+p.Size())
	if len(p.Shape) == 2 {
		return v.Reshape([4]int{1, p.Shape[0], 1, p.Shape[1]})
	}
	return v
}

// Init writes a parameter's first values to dst: of a matrix normal(0, Std), of a norm 1.
// They depend on the seed and the name alone, so that any number of ranks, and any way of
// sharding, starts from the same model.
func (p Param) Init(dst []float32, seed int64) {
	if p.Std == 0 {
		for i := range dst {
			dst[i] = 1
		}
		return
	}
	h := fnv.New64a()
	h.Write([]byte(p.Name)) // never fails
	r := rand.New(rand.NewPCG(uint64(seed), h.Sum64()))
	for i := range dst {
		dst[i] = float32(r.NormFloat64() * p.Std)
	}
}

// InitAll fills a flat float32 buffer on the host with the first values of every parameter.
func InitAll(params []Param, flat View, seed int64) {
	for _, p := range params {
		p.Init(tensor.Data[float32](p.View(flat)), seed)
	}
}

// Params are the flat buffers of a model, all of the same layout.
type Params struct {
	// Weights is what the optimizer steps: float32. Norms are read from it.
	Weights View
	// Compute is the copy, in the type of activations, that matrix products and the
	// embedding read. It is Weights itself where that type is float32.
	Compute View
	// Grads is what a backward pass adds to: float32. Zero for a model that only runs
	// forward.
	Grads View
}
