// Package optim is the optimizer: AdamW over flat vectors, and learning rate schedules. AdamW.Step queues an update on
// a Device without waiting; NewSchedule returns a learning rate by step.
package optim

import (
	"fmt"
	"math"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// Device has the operations of the optimizer, queued on the device's stream.
type Device interface {
	// SumSquares adds the sum of the squares of g to sum, a float64 scalar. The order of additions depends only on the
	// size of g.
	SumSquares(sum, g tensor.View)
	// AdamW updates p, m and v, dense float32 views of one size, with gradient g. It sets c, of that size, to the new p
	// in its own type, unless c is the zero View. sum is the square of the global norm of the scaled gradient, a
	// float64 scalar read when the step runs; the zero View if MaxNorm and Scale are 0.
	AdamW(p, c, g, m, v, sum tensor.View, h AdamStep)
}

// AdamStep holds the numbers of one step.
type AdamStep = kernels.AdamStep

// AdamW is the optimizer of arXiv:1711.05101. Its order of operations, numbers and clipping (clip_grad_norm_) are those
// in PyTorch.
type AdamW struct {
	Beta1, Beta2, Eps float64
	WeightDecay       float64 // decoupled: p *= 1 - lr*WeightDecay, before the update
	MaxNorm           float64 // largest global norm of the gradient; 0: no clipping
}

// Update holds the numbers that change in each step.
type Update struct {
	LR    float64
	Scale float64 // of the gradient, as in AdamStep
	Step  int     // from 0, for the bias correction of the moments
}

// Step queues the update of p [n], given its gradient g and the moments m and v, which are 0 before step 0. All are
// flat, float32 and of length n. It sets c [n], of any type, to the new p, unless c is the zero View. sum holds the
// square of the norm of the whole gradient (SumSquares, summed over all ranks); the zero View if MaxNorm and the scale
// are 0. Matrices and embeddings decay; vectors, such as the weights of norms, do not.
func (a AdamW) Step(d Device, p, c, g, m, v, sum tensor.View, decay bool, u Update) {
	h := AdamStep{LR: u.LR, Beta1: a.Beta1, Beta2: a.Beta2, Eps: a.Eps, MaxNorm: a.MaxNorm, Step: u.Step,
		Scale: u.Scale}
	if decay {
		h.Decay = a.WeightDecay
	}
	d.AdamW(p, c, g, m, v, sum, h)
}

// Schedule returns the learning rate of an optimizer step, counted from 0.
type Schedule func(step int) float64

// NewSchedule returns the schedule called name over total steps:
//
//   - "constant" stays at lr; minLR is not used,
//   - "cosine" falls from lr to minLR along half a cosine (arXiv:1608.03983),
//   - "linear" falls from lr to minLR in a straight line,
//   - "wsd" stays at lr and falls to minLR over the last 20% of the steps as 1 - sqrt(x)
//     (arXiv:2405.18392).
//
// In the first warmup steps the rate rises linearly, from lr/warmup at step 0. Decay reaches minLR at step total, the
// first one after the run, as in llm.c, transformers and torchtitan, and stays there.
func NewSchedule(name string, lr, minLR float64, warmup, total int) (Schedule, error) {
	decay := func(from, step int, shape func(x float64) float64) float64 {
		x := 1.0
		if step < total {
			x = float64(step-from) / float64(total-from)
		}
		high := shape(x)
		return lr*high + minLR*(1-high) // exactly lr at the start and minLR at the end
	}
	var after Schedule
	switch name {
	case "constant":
		after = func(int) float64 { return lr }
	case "cosine":
		after = func(step int) float64 {
			return decay(warmup, step, func(x float64) float64 { return (1 + math.Cos(math.Pi*x)) / 2 })
		}
	case "linear":
		after = func(step int) float64 {
			return decay(warmup, step, func(x float64) float64 { return 1 - x })
		}
	case "wsd":
		from := max(warmup, total*4/5)
		after = func(step int) float64 {
			if step < from {
				return lr
			}
			return decay(from, step, func(x float64) float64 { return 1 - math.Sqrt(x) })
		}
	default:
		return nil, fmt.Errorf("lr_schedule.name %q: known are cosine, linear, constant and wsd", name)
	}
	return func(step int) float64 {
		if step < warmup {
			return lr * float64(step+1) / float64(warmup)
		}
		return after(step)
	}, nil
}
