// Package kernels defines what the kernels of all devices share. The kernels are in kernels/cpu and
// kernels/gpu.
package kernels

// AdamStep is the numbers of one step of AdamW (arXiv:1711.05101), with the meaning that
// torch.optim.AdamW and clip_grad_norm_ give them.
type AdamStep struct {
	LR, Beta1, Beta2, Eps, Decay float64
	MaxNorm                      float64 // the gradient is scaled by min(1, MaxNorm/(norm+1e-6)); 0: it is not
	Step                         int     // counted from 0
	// Scale is what the gradient was multiplied by, which is undone before all else. A step
	// whose sum is not finite then changes nothing: it is skipped. 0: neither.
	Scale float64
}
