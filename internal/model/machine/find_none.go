//go:build !cuda

package machine

// Built reports whether this binary can use GPUs.
const Built = false

// Find probes the GPUs of this machine. This binary can use none.
func Find() (Machine, []GPU, error) { return Machine{}, nil, nil }

// Libraries lists the libraries of a run on GPUs: none in this binary.
func Libraries() []Library { return nil }
