//go:build cuda

package kernels

import (
	"errors"

	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/internal/cuda/blas"
)

// CUDA computes the operations of the model and the optimizer on a GPU. Its methods queue work
// on its stream and return at once; an error of the device poisons the stream, a fault of
// shape or type panics, as it does on the CPU. One goroutine uses it at a time.
type CUDA struct {
	stream *cuda.Stream
	loader *Loader
	ops    cudaOps
	blas   *blas.Handle
}

// NewCUDA computes on stream, which the caller closes. It takes OpsWorkspace and
// LinearWorkspace bytes of the device.
func NewCUDA(stream *cuda.Stream, loader *Loader) (*CUDA, error) {
	c := &CUDA{stream: stream, loader: loader}
	var opsErr, blasErr error
	c.ops, opsErr = newCUDAOps(loader.Device())
	c.blas, blasErr = openBlas(stream)
	if err := errors.Join(opsErr, blasErr); err != nil {
		return nil, err
	}
	return c, nil
}

// Close lets go of cuBLASLt. The stream must be done.
func (c *CUDA) Close() error { return c.blas.Close() }

// Stream is where the work is queued.
func (c *CUDA) Stream() *cuda.Stream { return c.stream }
