package train

import (
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/tensor"
)

// Locally calls f on each of some ranks in this process, with a CPU and the group of all ranks, and returns the first
// error. A rank with an error aborts the others. If the ranks deadlock, transfers fail after the deadline; 0: none.
func Locally(ranks int, backend string, compute tensor.DType, deadline time.Duration,
	f func(rank int, dev *Device, world *comm.Group) error) error {
	streams := make([]tensor.Stream, ranks)
	for r := range streams {
		streams[r] = tensor.NewHostStream("compute")
	}
	var g errgroup.Group
	for r, world := range comm.NewLocal(ranks, streams, comm.Options{Deadline: deadline}) {
		g.Go(func() error {
			stream := streams[r].(*tensor.HostStream)
			defer stream.Close()
			defer world.Close()
			dev := device.CPU(stream, backend, compute)
			defer dev.Close()
			err := f(r, &dev, world)
			if err != nil {
				world.Abort(err)
			}
			return err
		})
	}
	return g.Wait()
}

// example returns the config of the example, changed by set, and the plan of its memory.
func example(t *testing.T, ranks int, on string, set ...string) (*config.Config, *plan.Memory) {
	t.Helper()
	cfg, err := config.Load("../../../examples/opticks.yaml", config.Options{Ranks: ranks, Device: on, Set: set})
	if err != nil {
		t.Fatal(err)
	}
	return cfg, MemoryOf(t, cfg, ranks)
}

// MemoryOf returns the plan of a config's memory.
func MemoryOf(t *testing.T, cfg *config.Config, ranks int) *plan.Memory {
	t.Helper()
	m, err := plan.MemoryOf(cfg, ranks, machine.Machine{})
	if err != nil {
		t.Fatal(err)
	}
	return &m
}
