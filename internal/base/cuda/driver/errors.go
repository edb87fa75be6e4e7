// Package driver stands in for the NVIDIA driver's libcuda when a binary is linked, so that the
// binary starts on a machine that has no driver. It defines every function of libcuda that
// gorgonia.org/cu and package cuda refer to. Load finds the driver and has these functions lead
// there; without it they fail with CUDA_ERROR_NOT_INITIALIZED. The folder link holds an
// empty libcuda.a, which is what the linker finds for the flag -lcuda of gorgonia.org/cu;
// scripts/cuda-env puts it first. It is empty without the build tag cuda.
package driver

import "errors"

// Reasons of an error of Load, for errors.Is.
var (
	// ErrAbsent says that the machine has no libcuda.so.1.
	ErrAbsent = errors.New("the NVIDIA driver is not on this machine")
	// ErrNoDevice says that the driver sees no GPU.
	ErrNoDevice = errors.New("the NVIDIA driver sees no GPU")
)
