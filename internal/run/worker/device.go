package worker

import (
	"context"
	"fmt"
	"os"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model/device"
)

// device is what this rank computes on, and the group of all ranks whose calls are ordered
// with it. done ends both in good order.
func (p *process) device(ctx context.Context, o device.CUDAOptions) (dev device.Device, world comm.Communicator, done func() error, err error) {
	if !o.Machine.IsCPU() {
		p.where.enter("taking the GPU into use")
		return p.gpu(ctx, o)
	}
	core, err := p.KeepToCore()
	switch {
	case err != nil: // which costs speed only
		fmt.Fprintf(os.Stderr, "cprun worker: rank %d runs on any core: %v\n", p.Rank, err)
	case core >= 0 && p.LocalRank > 0: // what rank 0 prints is on the terminal
		fmt.Fprintf(os.Stderr, "rank %d keeps to core %d, since ranks come out even on the cores\n", p.Rank, core)
	}
	dev = device.CPU(p.stream, o.Backend, o.Compute)
	return dev, p.world, dev.Close, nil
}
