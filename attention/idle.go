package attention

// Idle is a Kernel that computes nothing, for loops that are run to count what they take.
type Idle struct{}

// Forward begins a pass that does nothing.
func (Idle) Forward(_ View, _ Partial, _ View, _ Softmax) (ForwardPass, error) {
	return idleForward{}, nil
}

// Backward begins a pass that does nothing.
func (Idle) Backward(_, _, _ View, _ Saved, _ Softmax) (BackwardPass, error) {
	return idleBackward{}, nil
}

type idleForward struct{}

func (idleForward) Block(Block) error { return nil }
func (idleForward) End() error        { return nil }

type idleBackward struct{}

func (idleBackward) Block(GradBlock) error { return nil }
func (idleBackward) End() error            { return nil }
func (idleBackward) Fold(Fold) error       { return nil }

// Planner is a Kernel that can prepare its slow first calls while the host waits for something
// else.
type Planner interface {
	Kernel
	// Planning returns a Kernel that prepares what its calls would need, and computes nothing: its
	// views need no memory. It is used from one goroutine, while the Planner itself is not.
	Planning() Kernel
}
