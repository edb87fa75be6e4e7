//go:build !cuda

package machine

// Built says whether this binary can use GPUs.
const Built = false

// Find looks at the GPUs of this machine without taking one into use. This binary can use
// none.
func Find() (Machine, []GPU, error) { return Machine{}, nil, nil }

// Libraries returns what a run on GPUs loads: nothing, in this binary.
func Libraries() []Library { return nil }
