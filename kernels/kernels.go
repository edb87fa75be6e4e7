// Package kernels defines types that the kernels of all devices share. The kernels are in kernels/cpu and kernels/gpu.
package kernels

import "math/rand/v2"

// AdamStep holds the parameters of one step of AdamW (arXiv:1711.05101), as in torch.optim.AdamW and clip_grad_norm_.
type AdamStep struct {
	LR, Beta1, Beta2, Eps, Decay float64
	MaxNorm                      float64 // scales the gradient by min(1, MaxNorm/(norm+1e-6)); 0: no clipping
	Step                         int     // counted from 0
	// Scale is the loss scale. The step divides the gradient by it first, and is skipped if the gradient is not finite.
	// 0: no scaling, and no step is skipped.
	Scale float64
}

// Dropout sets each element to 0 with probability P, and multiplies the others by Kept.
type Dropout struct {
	P   float64
	Key uint64 // of the random numbers
}

// Kept returns the factor of the elements that stay.
func (d Dropout) Kept() float64 { return 1 / (1 - d.P) }

// Threshold returns the bound of the random numbers of dropped elements, which are less.
func (d Dropout) Threshold() uint64 { return uint64(d.P * (1 << 32)) }

// Random returns the random number of an element below 2^32. It depends only on the key, the token and the column, so
// that ranks and repeated passes get the same ones. The mixture is that of SplitMix64.
func (d Dropout) Random(token int32, column int) uint64 {
	x := d.Key + 0x9e3779b97f4a7c15*(uint64(uint32(token))<<32|uint64(column))
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return (x ^ x>>31) >> 32
}

// Normals are random numbers of a normal distribution around 0, in blocks of NormalBlock. Each block has a generator of
// its own, so that any part can be drawn alone.
type Normals struct {
	Seed, Stream uint64
	Std          float64 // standard deviation
}

const (
	// NormalBlock is the number of elements of a generator.
	NormalBlock = 1 << 16
	// NormalStep separates the generators of neighbouring blocks: the golden ratio's odd number.
	NormalStep = 0x9e3779b97f4a7c15
)

// Block returns the generator of a block. Its NormFloat64, times Std, are the block's elements.
func (n Normals) Block(number uint64) *rand.Rand {
	return rand.New(rand.NewPCG(n.Seed, n.Stream+number*NormalStep))
}

// Activation is the function of the gate in an MLP, as config.json of Hugging Face names it.
type Activation string

// The activations.
const (
	SiLU Activation = "silu"              // x * sigmoid(x), arXiv:1702.03118
	GELU Activation = "gelu_pytorch_tanh" // arXiv:1606.08415, with its approximation by tanh
	// ClampedSiLU is (clip(up, -7, 7) + 1) * g * sigmoid(1.702 g), g = min(gate, 7), of gpt-oss
	ClampedSiLU Activation = "gpt_oss"
)
