// Package kernels defines types that the kernels of all devices share. The kernels are in kernels/cpu and kernels/gpu.
package kernels

// AdamStep holds the parameters of one step of AdamW (arXiv:1711.05101), as in torch.optim.AdamW and clip_grad_norm_.
type AdamStep struct {
	LR, Beta1, Beta2, Eps, Decay float64
	MaxNorm                      float64 // scales the gradient by min(1, MaxNorm/(norm+1e-6)); 0: no clipping
	Step                         int     // counted from 0
	// Scale is the loss scale. The step divides the gradient by it first, and is skipped if the gradient is not finite.
	// 0: no scaling, and no step is skipped.
	Scale float64
}

// Activation is the function of the gate in an MLP, as config.json of Hugging Face names it.
type Activation string

// The activations.
const (
	SiLU Activation = "silu"              // x * sigmoid(x), arXiv:1702.03118
	GELU Activation = "gelu_pytorch_tanh" // arXiv:1606.08415, with its approximation by tanh
)
