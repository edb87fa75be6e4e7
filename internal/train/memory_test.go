package train

import (
	"context"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/device"
	"github.com/cprun/cprun/internal/plan"
	"github.com/cprun/cprun/internal/tensor"
)

// What the plan says of memory must be what a run takes: activations to the byte, the ring's
// buffers up to the alignment of each.
func TestThePlanIsWhatARunTakes(t *testing.T) {
	const ranks = 3
	for _, set := range [][]string{
		{"memory.recompute=none"}, {"memory.recompute=selective"}, {"memory.recompute=full", "parallel.algorithm=allgather"},
		{"parallel.layout=striped", "memory.shard=optimizer", "memory.loss_chunk=50"},
	} {
		set = append(set, "data.seq_len=301", "train.micro_batch_size=2", "train.global_batch_size=2", "train.steps=20")
		cfg, err := config.Load("../../examples/opticks.yaml", config.Options{Ranks: ranks, Device: "cpu", Set: set})
		if err != nil {
			t.Fatal(err)
		}
		p, err := plan.Make(cfg, ranks, plan.Options{})
		if err != nil {
			t.Fatal(err)
		}
		var activations, buffers, state [ranks]int64
		streams, compute := [ranks]*tensor.HostStream{}, make([]tensor.Stream, ranks)
		for r := range ranks {
			streams[r] = tensor.NewHostStream("compute")
			compute[r] = streams[r]
		}
		world := comm.NewLocal(ranks, compute, comm.Options{})
		var g errgroup.Group
		for r := range ranks {
			g.Go(func() error {
				defer streams[r].Close()
				defer world[r].Close()
				tr, err := newTrainer(context.Background(), cfg, device.CPU(streams[r], "flash"), world[r], &Options{})
				if err != nil {
					return err
				}
				if _, err := tr.Step(context.Background(), false); err != nil {
					return err
				}
				if _, err := tr.Validate(context.Background()); err != nil {
					return err
				}
				activations[r], buffers[r] = tr.arena.Peak(), tr.att.ring.Arena.Peak()
				state[r] = tr.share.m.Memory().Bytes() + tr.share.v.Memory().Bytes()
				return nil
			})
		}
		if err := g.Wait(); err != nil {
			t.Fatal(err)
		}
		most := func(xs [ranks]int64) int64 { return max(xs[0], xs[1], xs[2]) }
		if got := most(activations); got != p.Memory.Activations {
			t.Errorf("%v: activations took %d bytes, planned %d", set, got, p.Memory.Activations)
		}
		const allocations, alignment = 16, 256
		if got, want := most(buffers), p.Memory.RingBuffers; got < want || got > want+allocations*alignment {
			t.Errorf("%v: the ring's buffers took %d bytes, planned %d", set, got, want)
		}
		if got, want := most(state), p.Memory.Optimizer; got < want || got > want+ranks*2*4*64 {
			t.Errorf("%v: the optimizer's state took %d bytes, planned %d", set, got, want)
		}
	}
}
