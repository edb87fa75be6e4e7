//go:build cuda

package worker

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/internal/device"
	"github.com/cprun/cprun/internal/tensor"
)

// gpu takes this rank's GPU into use and joins it to those of the others. done gives both
// back.
func (p *process) gpu(ctx context.Context, o device.CUDAOptions) (dev device.Device, world comm.Communicator, done func() error, err error) {
	o.Ordinal = p.LocalRank
	o.Note = func(text string) { fmt.Fprintln(os.Stderr, text) }
	var d *comm.DeviceGroup
	o.Beside = func(s tensor.Stream) (undo func(cause error), err error) {
		if o.Timed != nil {
			defer o.Timed("joining the GPUs")()
		}
		if d, err = comm.NewDevice(ctx, p.world, s.(*cuda.Stream), comm.DeviceOptions{}); err != nil {
			return nil, fmt.Errorf("joining the GPUs: %w", err)
		}
		if d.Size() > 1 {
			o.Note("exchanges between the GPUs go over " + map[string]string{comm.TransportCopy: "copy engines", comm.TransportNCCL: "NCCL"}[d.Transport()])
		}
		return func(cause error) { d.Abort(cause); d.Close() }, nil
	}
	if dev, err = device.CUDA(o); err != nil {
		return dev, nil, nil, err
	}
	return dev, d, func() error { return errors.Join(d.Close(), dev.Close()) }, nil
}
