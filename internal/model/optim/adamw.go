// Package optim is the optimizer: AdamW over flat vectors, and learning rate schedules. It
// queues work on a device and never waits for one.
package optim

import (
	"fmt"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// Device is what the optimizer asks of a device. Calls are queued on the device's stream.
type Device interface {
	// SumSquares adds the sum of the squares of g to sum, a float64 scalar, in an order
	// that depends on the size of g only.
	SumSquares(sum, g tensor.View)
	// AdamW updates p, m and v, dense float32 views of one size, with gradient g. c, of that
	// size too, is set to the new p in its own type; the zero View: there is no copy. sum is
	// the square of the global norm of the gradient as it stands, a float64 scalar that is
	// read when the step runs; the zero View where MaxNorm and Scale are 0.
	AdamW(p, c, g, m, v, sum tensor.View, h AdamStep)
}

// AdamStep is the numbers of one step.
type AdamStep = kernels.AdamStep

// Segment is the elements [Lo, Hi) of the flat vector of parameters, with or without decay.
// Matrices and embeddings decay; vectors, such as the weights of norms, do not.
type Segment struct {
	Lo, Hi int
	Decay  bool
}

// AdamW is the optimizer of arXiv:1711.05101, with the order of operations, the meaning of
// each number and the clipping (clip_grad_norm_) of PyTorch.
type AdamW struct {
	Beta1, Beta2, Eps float64
	WeightDecay       float64 // decoupled: p *= 1 - lr*WeightDecay, before the update
	MaxNorm           float64 // largest global norm of the gradient; 0: no clipping
}

// Update is the numbers that change from one step to the next.
type Update struct {
	LR    float64
	Scale float64 // of the gradient, as in AdamStep
	Step  int     // counted from 0, for the correction of the moments' bias
}

// Step queues the update of the segments of p [n], given its gradient g and the moments m and
// v, which are 0 before step 0. All are flat, float32 and n long; elements in no segment
// are left alone. c [n], in any type, is set to the new p, unless it is the zero View. sum
// holds the square of the norm of the whole gradient (SumSquares, added up over all ranks that
// hold a part of it); the zero View where MaxNorm and the scale are 0.
// Neighbouring segments that agree on decay are updated in one call.
func (a AdamW) Step(d Device, p, c, g, m, v, sum tensor.View, segments []Segment, u Update) {
	n := p.Size()
	if g.Size() != n || m.Size() != n || v.Size() != n || !c.IsZero() && c.Size() != n {
		panic(fmt.Sprintf("optim: adamw step of %v with gradient %v and moments %v, %v", p, g, m, v))
	}
	for i := 0; i < len(segments); {
		s := segments[i]
		for i++; i < len(segments) && segments[i].Lo == s.Hi && segments[i].Decay == s.Decay; i++ {
			s.Hi = segments[i].Hi
		}
		h := AdamStep{LR: u.LR, Beta1: a.Beta1, Beta2: a.Beta2, Eps: a.Eps, MaxNorm: a.MaxNorm, Step: u.Step,
			Scale: u.Scale}
		if s.Decay {
			h.Decay = a.WeightDecay
		}
		d.AdamW(part(p, s), part(c, s), part(g, s), part(m, s), part(v, s), sum, h)
	}
}

func part(v tensor.View, s Segment) tensor.View {
	if v.IsZero() {
		return v
	}
	return v.Reshape([4]int{1, 1, 1, v.Size()}).Slice(tensor.Dim, s.Lo, s.Hi)
}
