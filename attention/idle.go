package attention

import "github.com/cprun/cprun/partition"

// Idle is a Kernel that computes nothing, for loops that are run to count what they take.
type Idle struct{}

// Reset does nothing, as all other methods.
func (Idle) Reset(Partial) error { return nil }

// Finish does nothing.
func (Idle) Finish(View, Partial) error { return nil }

// Delta does nothing.
func (Idle) Delta(_, _, _ View) error { return nil }

// ResetGrads does nothing.
func (Idle) ResetGrads(Grads) error { return nil }

// FinishGrads does nothing.
func (Idle) FinishGrads(Grads) error { return nil }

// Add does nothing.
func (Idle) Add(_, _ View) error { return nil }

// Forward does nothing.
func (Idle) Forward(Partial, View, View, View, []partition.Tile, Softmax) error { return nil }

// Backward does nothing.
func (Idle) Backward(Grads, View, View, View, View, Saved, []partition.Tile, Softmax) error {
	return nil
}

var _ Kernel = Idle{}

// Planner is a Kernel whose first call of a kind takes the host long, which is to be had
// while there is something else to wait for.
type Planner interface {
	Kernel
	// Planning is a Kernel that makes ready what its calls would need, and computes nothing: its
	// views need no memory. It is used from one goroutine, while the Planner itself is not.
	Planning() Kernel
}
