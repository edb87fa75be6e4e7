//go:build !cuda

package worker

import (
	"context"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/run/bench"
)

// gpu returns an error: this binary was built without the tag cuda.
func (p *process) gpu(_ context.Context, o device.CUDAOptions) (device.Device, comm.Communicator, error) {
	dev, err := device.CUDA(o)
	return dev, nil, err
}

// gpuTransports returns none: this binary was built without the tag cuda.
func (p *process) gpuTransports(context.Context, *bench.Rank) ([]bench.Transport, error) {
	return nil, nil
}
