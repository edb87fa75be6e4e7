//go:build !cuda

package device

import "errors"

// CUDA returns an error: this binary was built without the tag cuda.
func CUDA(CUDAOptions) (Device, error) {
	return Device{}, errors.New("this binary has no CUDA in it; build it with make cuda, or run with --device cpu")
}
