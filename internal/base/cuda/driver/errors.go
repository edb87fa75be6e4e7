// Package driver replaces the NVIDIA driver's libcuda at link time, so that a binary starts on a machine without the
// driver. It defines every function of libcuda that gorgonia.org/cu and package cuda call. Load finds the driver and
// forwards these functions to it. Without Load, they fail with CUDA_ERROR_NOT_INITIALIZED:
//
//	if err := driver.Load(); errors.Is(err, driver.ErrAbsent) { … }
//
// The folder link contains an empty libcuda.a, to which scripts/cuda-env directs the linker flag -lcuda of
// gorgonia.org/cu. The package is empty without the build tag cuda.
package driver

import "errors"

// Errors of Load, for errors.Is.
var (
	// ErrAbsent means that the machine has no libcuda.so.1.
	ErrAbsent = errors.New("the NVIDIA driver is not on this machine")
	// ErrNoDevice means that the driver sees no GPU.
	ErrNoDevice = errors.New("the NVIDIA driver sees no GPU")
)
