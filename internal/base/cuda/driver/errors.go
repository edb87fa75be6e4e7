package driver

import "errors"

// Reasons of an error of Load, for errors.Is.
var (
	// ErrAbsent says that the machine has no libcuda.so.1.
	ErrAbsent = errors.New("the NVIDIA driver is not on this machine")
	// ErrNoDevice says that the driver sees no GPU.
	ErrNoDevice = errors.New("the NVIDIA driver sees no GPU")
)
