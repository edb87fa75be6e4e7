package train

import (
	"fmt"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/optim"
	"github.com/cprun/cprun/internal/tensor"
)

// state is the model and the optimizer in flat float32 buffers. With sharding, each rank
// steps, and keeps moments for, its part of them alone (ZeRO stage 1, arXiv:1910.02054).
type state struct {
	params  []model.Param
	weights View // all
	grads   View // all
	m, v    View // moments of the range that this rank owns
	lo, hi  int  // that range; without sharding, everything
	sharded bool
	norm    View // float64: the square of the norm of the gradient
	segs    []optim.Segment
	adamw   optim.AdamW
}

// newState allocates the state of one of size ranks.
func newState(d Device, params []model.Param, a optim.AdamW, rank, size int, sharded bool) *state {
	n := flatSize(params, size)
	s := &state{params: params, adamw: a, lo: 0, hi: n, sharded: sharded && size > 1}
	if s.sharded {
		s.lo, s.hi = ownRange(n, rank, size)
	}
	vec := func(n int) View {
		return tensor.Dense(d.Alloc(int64(n)*4), tensor.F32, 0, [4]int{1, 1, 1, n})
	}
	s.weights, s.grads, s.m, s.v = vec(n), vec(n), vec(s.hi-s.lo), vec(s.hi-s.lo)
	s.norm = tensor.Dense(d.Alloc(8), tensor.F64, 0, [4]int{1, 1, 1, 1})
	for _, p := range params {
		lo, hi := max(int(p.Offset), s.lo), min(int(p.Offset)+p.Size(), s.hi)
		if lo < hi {
			s.segs = append(s.segs, optim.Segment{Lo: lo - s.lo, Hi: hi - s.lo, Decay: p.Decay})
		}
	}
	return s
}

// flatSize is the elements of a flat buffer, rounded up so that ranks own equal parts.
func flatSize(params []model.Param, size int) int {
	unit := model.Align * size
	return (int(model.FlatSize(params)) + unit - 1) / unit * unit
}

// ownRange is the part of n elements that a rank owns.
func ownRange(n, rank, size int) (lo, hi int) { return rank * (n / size), (rank + 1) * (n / size) }

func part(v View, lo, hi int) View { return v.Slice(tensor.Dim, lo, hi) }

// step reduces the gradients over all ranks, clips them, and updates the weights. norm then
// holds the square of the gradient's norm before clipping, on every rank.
func (s *state) step(d Device, world comm.Communicator, lr float64, step int) error {
	d.Stream.Label("optimizer")
	defer d.Stream.Label("")
	grads, weights := s.grads, s.weights
	if err := d.Ops.Zero(s.norm); err != nil {
		return err
	}
	if s.sharded {
		own := part(s.grads, s.lo, s.hi)
		if err := ordered(world.ReduceScatter(own, s.grads, comm.Sum)); err != nil {
			return fmt.Errorf("gradient reduction: %w", err)
		}
		grads, weights = own, part(s.weights, s.lo, s.hi)
	} else if err := ordered(world.AllReduce(s.grads, comm.Sum)); err != nil {
		return fmt.Errorf("gradient reduction: %w", err)
	}
	d.Optim.SumSquares(s.norm, grads)
	if s.sharded {
		if err := ordered(world.AllReduce(s.norm, comm.Sum)); err != nil {
			return fmt.Errorf("gradient norm: %w", err)
		}
	}
	s.adamw.Step(d.Optim, weights, grads, s.m, s.v, s.norm, s.segs, lr, step)
	if s.sharded {
		if err := ordered(world.AllGather(s.weights, weights)); err != nil {
			return fmt.Errorf("gathering weights: %w", err)
		}
	}
	return nil
}

// ordered queues what follows on the compute stream behind a transfer.
func ordered(p comm.Pending, err error) error {
	if err == nil {
		p.Wait()
	}
	return err
}
