//go:build cuda

package gpu

import (
	"errors"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/base/cuda/blas"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto memory; see package tensor.
type View = tensor.View

// Ops computes the operations of the model and the optimizer on a GPU. Its methods queue work
// on its stream and return at once; an error of the device poisons the stream, a fault of
// shape or type panics, as it does on the CPU. One goroutine uses it at a time.
type Ops struct {
	stream *cuda.Stream
	loader *Loader
	ops    cudaOps
	blas   *blas.Handle
}

// NewOps returns operations that compute on stream, which the caller closes. They take OpsWorkspace and
// LinearWorkspace bytes of the device.
func NewOps(stream *cuda.Stream, loader *Loader) (*Ops, error) {
	c := &Ops{stream: stream, loader: loader}
	var opsErr, blasErr error
	c.ops, opsErr = newCUDAOps(loader.Device())
	c.blas, blasErr = openBlas(stream)
	if err := errors.Join(opsErr, blasErr); err != nil {
		return nil, err
	}
	return c, nil
}

// Close lets go of cuBLASLt. The stream must be done.
func (c *Ops) Close() error { return c.blas.Close() }

// Stream returns the stream that the work is queued on.
func (c *Ops) Stream() *cuda.Stream { return c.stream }
