//go:build cuda

package worker

import (
	"context"
	"fmt"
	"os"

	"github.com/cprun/cprun/comm"
	commdevice "github.com/cprun/cprun/comm/device"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/run/bench"
	"github.com/cprun/cprun/tensor"
)

// gpu opens this rank's GPU and connects it with the others.
func (p *process) gpu(ctx context.Context, o device.CUDAOptions) (device.Device, comm.Communicator, error) {
	o.Ordinal = p.Device
	o.Note = func(text string) { fmt.Fprintln(os.Stderr, text) }
	var d *commdevice.Group
	o.Beside = func(s tensor.Stream) (undo func(cause error), err error) {
		if o.Timed != nil {
			defer o.Timed("joining the GPUs")()
		}
		if d, err = commdevice.New(ctx, p.world, s.(*cuda.Stream), commdevice.Options{Transport: p.moves}); err != nil {
			return nil, fmt.Errorf("joining the GPUs: %w", err)
		}
		p.where.join(d)
		if d.Size() > 1 {
			o.Note("transfers between GPUs use " + map[string]string{
				commdevice.TransportCopy: "copy engines", commdevice.TransportNCCL: "NCCL",
				commdevice.TransportBoth: "copy engines within nodes and NCCL between them",
			}[d.Transport()])
		}
		return func(cause error) { d.Abort(cause); d.Close() }, nil
	}
	dev, err := device.CUDA(o)
	if err != nil {
		return dev, nil, err
	}
	p.gpus = d
	p.closing(dev.Close)
	p.closing(d.Close)
	return dev, d, nil
}

// gpuTransports returns NCCL and the copy engines, or nothing on a CPU. If copy engines are not available, it logs that
// and omits them.
func (p *process) gpuTransports(ctx context.Context, r *bench.Rank) ([]bench.Transport, error) {
	world := p.gpus
	if world == nil {
		return nil, nil
	}
	mine, other := world.Transport(), commdevice.TransportNCCL
	if mine == commdevice.TransportNCCL {
		other = commdevice.TransportCopy
	}
	// Copy engines cannot add: such a group reduces with NCCL, which has its own row.
	t := []bench.Transport{{Name: mine, Comm: world, NoReduce: mine != commdevice.TransportNCCL}}
	host, err := world.Host().Subgroup(ctx, 0, world.Rank(), world.Host().Compute())
	if err != nil {
		return nil, fmt.Errorf("second group of all ranks: %w", err)
	}
	second, err := commdevice.New(ctx, host, r.Device.Stream.(*cuda.Stream), commdevice.Options{Transport: other})
	if err != nil {
		if other != commdevice.TransportCopy {
			return nil, err
		}
		fmt.Fprintf(os.Stderr, "cprun worker: copy engines are not available: %v\n", err)
		return t, nil
	}
	p.closing(second.Close)
	return append(t, bench.Transport{Name: other, Comm: second, NoReduce: other == commdevice.TransportCopy}), nil
}
