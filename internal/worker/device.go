package worker

import (
	"context"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/device"
)

// device is what this rank computes on, and the group of all ranks whose calls are ordered
// with it. done ends both in good order.
func (p *process) device(ctx context.Context, o device.CUDAOptions) (dev device.Device, world comm.Communicator, done func() error, err error) {
	if o.Machine.Arch != 0 {
		p.where.enter("taking the GPU into use")
		return p.gpu(ctx, o)
	}
	dev = device.CPU(p.stream, o.Backend)
	return dev, p.world, dev.Close, nil
}
