//go:build cuda

package worker

import (
	"context"
	"fmt"
	"os"

	commdevice "github.com/cprun/cprun/comm/device"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/run/bench"
)

// gpuTransports are NCCL and the copy engines; none on a CPU. Copy engines that cannot be
// had are told of and left out.
func (p *process) gpuTransports(ctx context.Context, r *bench.Rank) (t []bench.Transport, end func() error, err error) {
	world := p.gpus
	if world == nil {
		return nil, nil, nil
	}
	mine, other := world.Transport(), commdevice.TransportNCCL
	if mine == commdevice.TransportNCCL {
		other = commdevice.TransportCopy
	}
	// Copy engines cannot add: such a group reduces over NCCL, which has a row.
	t = []bench.Transport{{Name: mine, Comm: world, NoReduce: mine != commdevice.TransportNCCL}}
	host, err := world.Host().Subgroup(ctx, 0, world.Rank(), world.Host().Compute())
	if err != nil {
		return nil, nil, fmt.Errorf("second group of all ranks: %w", err)
	}
	second, err := commdevice.New(ctx, host, r.Device.Stream.(*cuda.Stream), commdevice.Options{Transport: other})
	if err != nil {
		if other != commdevice.TransportCopy {
			return nil, nil, err
		}
		fmt.Fprintf(os.Stderr, "cprun worker: without copy engines: %v\n", err)
		return t, func() error { return nil }, nil
	}
	return append(t, bench.Transport{Name: other, Comm: second, NoReduce: other == commdevice.TransportCopy}), second.Close, nil
}
