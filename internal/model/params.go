package model

import (
	"cmp"
	"math"

	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// Param is one tensor of the model and its place in the flat buffers: one for all weights, one for all gradients, one
// for each optimizer state. Reducing, sharding, clipping and stepping then handle one vector for any model.
type Param struct {
	hf.Tensor
	Offset int64 // in the flat buffer, in elements; a multiple of Align
	// Product: a matrix product is the first operation of a pass on the gradient. Adapters are left out: they are small,
	// and several products may share one.
	Product bool

	// Std is the standard deviation of the first values, and Mean their mean: 1 for a norm, or 0 if it adds 1, and 0 for a
	// bias.
	Std, Mean float64
	// Bound limits the uniform first values of A of an adapter. B starts as 0. Both have no Std.
	Bound float64
	// Row is the place of the first factor of a matrix in E4M3 among those of its layout.
	Row int
}

// NewParam returns the parameter of a tensor, without a place.
func NewParam(t hf.Tensor, cfg *hf.Config) Param {
	p, matrix := Param{Tensor: t}, t.Kind == hf.Product
	_, isB, adapts := hf.Adapted(t.Name)
	p.Product = matrix && !adapts && (t.Role != hf.Embedding || cfg.TieWordEmbeddings)
	switch {
	case adapts && !isB:
		p.Bound = 1 / math.Sqrt(float64(t.Shape[1])) // Kaiming's, as PEFT's
	case adapts:
	case matrix, t.Kind == hf.Filter:
		p.Std = cmp.Or(cfg.InitializerRange, 0.02)
	case t.Kind == hf.Scale && !cfg.Centred(t), t.Role == hf.LayerScale:
		p.Mean = 1
	}
	return p
}

// Align divides offsets and the total size, in elements, so that every tensor is aligned on any device and type. The
// gaps stay zero.
const Align = 64

// Layout lists the trained parameters of a model in the order of the flat buffer: the embedding, the matrices of each
// layer, the head, then all vectors.
func Layout(cfg *hf.Config) []Param { return NewLayout(cfg, 1).Params }

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }

// Parameters returns the number of parameters of a model, trained and frozen.
func Parameters(cfg *hf.Config) int64 {
	flat := NewLayout(cfg, 1)
	n := Count(flat.Params)
	if flat.Frozen != nil {
		n += Count(flat.Frozen.Params)
	}
	return n
}

// Count returns the number of parameters, without the gaps of the flat buffer.
func Count(params []Param) int64 {
	n := int64(0)
	for _, p := range params {
		n += int64(p.Size())
	}
	return n
}

// View returns the parameter's window onto a flat buffer: [1, out, 1, in], or [1, 1, 1, n].
func (p Param) View(flat View) View {
	v := flat.Reshape([4]int{1, 1, 1, flat.Size()}).Slice(tensor.Dim, int(p.Offset), int(p.Offset)+p.Size())
	if p.Kind == hf.Product {
		return v.Reshape([4]int{1, p.Shape[0], 1, p.Shape[1]})
	}
	return v
}

// InitBlock is the number of elements initialised by one generator.
const InitBlock = kernels.NormalBlock

// Normals returns the first values of a matrix. Of adapters, only the generators are used.
func (p Param) Normals(seed int64) kernels.Normals {
	return kernels.Normals{Seed: uint64(seed), Stream: nameHash(p.Name), Std: p.Std}
}

// Init writes a parameter's first values from element lo to dst: normal(0, Std) for a matrix, Mean for a vector, and of
// adapters uniform for A, 0 for B. lo must be a multiple of InitBlock. Values depend on seed, name and place alone, so
// the model is the same for any number of ranks, sharding or goroutines.
func (p Param) Init(dst []float32, lo, seed int64) {
	if p.Std == 0 && p.Bound == 0 {
		for i := range dst {
			dst[i] = float32(p.Mean)
		}
		return
	}
	if lo%InitBlock != 0 {
		panic("model: first values from the middle of a block")
	}
	numbers := p.Normals(seed)
	for block := uint64(lo) / InitBlock; len(dst) > 0; block++ {
		r, n := numbers.Block(block), min(len(dst), InitBlock)
		for i := range dst[:n] {
			if p.Bound > 0 {
				dst[i] = float32((2*r.Float64() - 1) * p.Bound)
			} else {
				dst[i] = float32(r.NormFloat64() * p.Std)
			}
		}
		dst = dst[n:]
	}
}

// Params are the flat buffers of a model, all with one layout.
type Params struct {
	// Frozen are the parameters that training does not change, of Layout.Frozen, without gradients; nil: none.
	Frozen *Params
	// Unread takes the gradients of frozen vectors, which the operations of norms compute with the others; only in
	// Frozen.
	Unread View
	Layout *FlatLayout
	// Weights are float32, and the optimizer updates them. The model reads only the vectors, unless Weights is also
	// Compute. Vectors replaces it for these.
	Weights View
	// Vectors is the last bucket of Weights, if this device does not have all of Weights.
	Vectors View
	// Compute is the copy for matrix products and the embedding, in the type of activations. For float32 it is Weights
	// itself. It begins after the matrices in E4M3.
	Compute View
	// Codes, uint8, are the matrices in E4M3 of Layout, and Factors, float32, those of their rows, by Param.Row.
	Codes, Factors View
	// BucketCompute replaces Compute and Codes by a view for each bucket. Views may share memory if Hooks separate them in
	// time.
	BucketCompute []View
	// Grads are float32, and a backward pass adds to them or sets them; see Hooks.Begin. Zero for a model that only runs
	// forward.
	Grads View
	// BucketGrads replaces Grads by a view for each bucket. Views may share memory if Hooks separate them in time.
	BucketGrads []View
}

// vectors returns the bucket of all vectors, of Weights.
func (p *Params) vectors() View {
	if !p.Vectors.IsZero() {
		return p.Vectors
	}
	return p.Layout.Buckets[p.Layout.Vectors()].of(p.Weights)
}

// weight returns the i-th parameter of the layout: matrices from Codes or Compute, vectors from Weights or Vectors.
func (p *Params) weight(i int, param Param) weight {
	bucket := p.Layout.Of(i)
	inBucket := param
	inBucket.Offset -= p.Layout.Buckets[bucket].Lo
	w := weight{}
	switch {
	case param.Kind == hf.Product && p.BucketCompute != nil:
		w.w = inBucket.View(p.BucketCompute[bucket])
	case p.Layout.Scaled(bucket):
		w.w = param.View(p.Codes)
	case param.Kind == hf.Product:
		param.Offset -= p.Layout.CodesSize()
		w.w = param.View(p.Compute)
	case !p.Vectors.IsZero():
		w.w = inBucket.View(p.Vectors)
	default:
		w.w = param.View(p.Weights)
	}
	if rows := param.Shape[0]; p.Layout.Scaled(bucket) {
		w.codes = kernels.Scaled{View: w.w, Factors: p.Factors.Slice(tensor.Dim, param.Row, param.Row+rows)}
		w.w = View{}
	}
	switch {
	case !p.Unread.IsZero() && param.Kind != hf.Product:
		inBucket.Offset = 0
		w.g = inBucket.View(p.Unread)
	case p.BucketGrads != nil:
		w.g = inBucket.View(p.BucketGrads[bucket])
	}
	return w
}
