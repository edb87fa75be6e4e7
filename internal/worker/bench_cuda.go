//go:build cuda

package worker

import (
	"context"
	"fmt"
	"os"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/bench"
	"github.com/cprun/cprun/internal/cuda"
)

// gpuTransports are NCCL and the copy engines; none on a CPU. Copy engines that cannot be
// had are told of and left out.
func (p *process) gpuTransports(ctx context.Context, r *bench.Rank) (t []bench.Transport, end func() error, err error) {
	world, ok := r.World.(*comm.DeviceGroup)
	if !ok {
		return nil, nil, nil
	}
	mine, other := world.Transport(), comm.TransportNCCL
	if mine == comm.TransportNCCL {
		other = comm.TransportCopy
	}
	t = []bench.Transport{{Name: mine, Comm: world}}
	host, err := world.Host().Split(ctx, 0, world.Rank())
	if err != nil {
		return nil, nil, fmt.Errorf("second group of all ranks: %w", err)
	}
	second, err := comm.NewDevice(ctx, host.(*comm.Group), r.Device.Stream.(*cuda.Stream), comm.DeviceOptions{Transport: other})
	if err != nil {
		if other != comm.TransportCopy {
			return nil, nil, err
		}
		fmt.Fprintf(os.Stderr, "cprun worker: without copy engines: %v\n", err)
		return t, func() error { return nil }, nil
	}
	return append(t, bench.Transport{Name: other, Comm: second}), second.Close, nil
}
