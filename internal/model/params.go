package model

import (
	"hash/fnv"
	"math/rand/v2"

	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// Param is one tensor of the model and its place in the flat buffers: one for all weights, one for all gradients, one
// for each optimizer state. Reducing, sharding, clipping and stepping then handle one vector for any model.
type Param struct {
	hf.Tensor
	Offset int64 // in the flat buffer, in elements; a multiple of Align
	Decay  bool  // weight decay applies: to matrices and embeddings

	// Std is the standard deviation of the first values; 0 for a vector: a norm starts as 1, a bias as 0.
	Std float64
}

// Align divides offsets and the total size, in elements, so that every tensor is aligned on any device and type. The
// gaps stay zero.
const Align = 64

// Layout lists the parameters of a model in the order of the flat buffer: the embedding, the matrices of each layer,
// the head, then all vectors.
func Layout(cfg *hf.Config) []Param { return NewLayout(cfg, 1).Params }

// FlatSize returns the elements of a flat buffer for a layout, a multiple of Align.
func FlatSize(params []Param) int64 {
	if len(params) == 0 {
		return 0
	}
	last := params[len(params)-1]
	return roundUp(last.Offset+int64(last.Size()), Align)
}

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }

// Count returns the number of parameters, without the gaps of the flat buffer.
func Count(params []Param) int64 {
	n := int64(0)
	for _, p := range params {
		n += int64(p.Size())
	}
	return n
}

// Size returns the number of elements.
func (p Param) Size() int {
	n := 1
	for _, s := range p.Shape {
		n *= s
	}
	return n
}

// View returns the parameter's window onto a flat buffer: [1, out, 1, in], or [1, 1, 1, n].
func (p Param) View(flat View) View {
	v := flat.Reshape([4]int{1, 1, 1, flat.Size()}).Slice(tensor.Dim, int(p.Offset), int(p.Offset)+p.Size())
	if len(p.Shape) == 2 {
		return v.Reshape([4]int{1, p.Shape[0], 1, p.Shape[1]})
	}
	return v
}

// InitBlock is the number of elements initialised by one generator.
const InitBlock = 1 << 16

// Init writes a parameter's first values from element lo to dst: normal(0, Std) for a matrix, 1 for a norm, 0 for a
// bias. lo must be a multiple of InitBlock. Values depend on seed, name and place alone, so the model is the same for any number of
// ranks, sharding or goroutines.
func (p Param) Init(dst []float32, lo, seed int64) {
	if p.Std == 0 {
		for i := range dst {
			dst[i] = 1
			if p.Role.IsBias() {
				dst[i] = 0
			}
		}
		return
	}
	if lo%InitBlock != 0 {
		panic("model: first values from the middle of a block")
	}
	h := fnv.New64a()
	h.Write([]byte(p.Name)) // never fails
	for block := uint64(lo) / InitBlock; len(dst) > 0; block++ {
		// The golden ratio's odd number separates the seeds of neighbouring blocks.
		r := rand.New(rand.NewPCG(uint64(seed), h.Sum64()+block*0x9e3779b97f4a7c15))
		n := min(len(dst), InitBlock)
		for i := range dst[:n] {
			dst[i] = float32(r.NormFloat64() * p.Std)
		}
		dst = dst[n:]
	}
}

// Params are the flat buffers of a model, all with one layout.
type Params struct {
	// Layout is their layout; nil: Layout(cfg) with the buckets of one rank.
	Layout *FlatLayout
	// Weights are float32, and the optimizer updates them. The model reads only the vectors, unless Weights is also
	// Compute. Vectors replaces it for these.
	Weights View
	// Vectors is the last bucket of Weights, if this device does not have all of Weights.
	Vectors View
	// Compute is the copy for matrix products and the embedding, in the type of activations. For float32 it is Weights
	// itself.
	Compute View
	// BucketCompute replaces Compute by a view for each bucket. Views may share memory if Hooks separate them in time.
	BucketCompute []View
	// Grads are float32, and a backward pass adds to them. Zero for a model that only runs forward.
	Grads View
	// BucketGrads replaces Grads by a view for each bucket. Views may share memory if Hooks separate them in time.
	BucketGrads []View
}

// weight returns the i-th parameter of the layout: matrices from Compute, vectors from Weights or Vectors.
func (p *Params) weight(i int, param Param) weight {
	bucket := p.Layout.Of(i)
	inBucket := param
	inBucket.Offset -= p.Layout.Buckets[bucket].Lo
	w := weight{}
	switch {
	case len(param.Shape) == 2 && p.BucketCompute != nil:
		w.w = inBucket.View(p.BucketCompute[bucket])
	case len(param.Shape) == 2:
		w.w = param.View(p.Compute)
	case !p.Vectors.IsZero():
		w.w = inBucket.View(p.Vectors)
	default:
		w.w = param.View(p.Weights)
	}
	switch {
	case p.BucketGrads != nil:
		w.g = inBucket.View(p.BucketGrads[bucket])
	case !p.Grads.IsZero():
		w.g = param.View(p.Grads)
	}
	return w
}
