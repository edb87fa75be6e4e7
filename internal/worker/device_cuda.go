//go:build cuda

package worker

import (
	"context"
	"errors"
	"fmt"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/internal/device"
)

// gpu takes this rank's GPU into use and joins it to those of the others. done gives both
// back.
func (p *process) gpu(ctx context.Context, o device.CUDAOptions) (dev device.Device, world comm.Communicator, done func() error, err error) {
	o.Ordinal = p.LocalRank
	if dev, err = device.CUDA(o); err != nil {
		return dev, nil, nil, err
	}
	d, err := comm.NewDevice(ctx, p.world, dev.Stream.(*cuda.Stream), comm.DeviceOptions{})
	if err != nil {
		return dev, nil, nil, fmt.Errorf("joining the GPUs: %w", err)
	}
	return dev, d, func() error { return errors.Join(d.Close(), dev.Close()) }, nil
}
