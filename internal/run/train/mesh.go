package train

import (
	"context"
	"fmt"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/tensor"
)

// A mesh is a rank's place in the grid of data-parallel groups times context-parallel ranks.
// The ranks of a context group are neighbours, since they talk most.
type mesh struct {
	world   comm.Communicator // all ranks, for views of the host
	state   comm.Communicator // all ranks, for what is summed, and for gradients and weights
	context comm.Communicator // the ranks that share this rank's sequences
	saves   comm.Communicator // all ranks again, for checkpoints written beside the training

	dataRank, dataSize int // of this rank's context group among them
}

// A parent is a group of the host that groups with a stream of their own are split from.
type parent interface {
	comm.Communicator
	Subgroup(ctx context.Context, colour, key int, compute tensor.Stream) (*comm.Group, error)
}

// newMesh makes the groups that need no device. join makes the others.
func newMesh(ctx context.Context, world comm.Communicator, contextSize int) (*mesh, error) {
	if world.Size()%contextSize != 0 {
		return nil, fmt.Errorf("%d ranks do not divide into groups of %d", world.Size(), contextSize)
	}
	m := &mesh{world: world, state: world, dataRank: world.Rank() / contextSize, dataSize: world.Size() / contextSize}
	var err error
	if d, ok := world.(comm.Hosted); ok {
		m.world = d.Host()
	}
	all, ok := m.world.(parent)
	if !ok {
		return nil, fmt.Errorf("checkpoint group: a %T gives no group that is not ordered with the steps", m.world)
	}
	// On a stream of its own: a checkpoint goes on beside the steps, however long these take.
	if m.saves, err = all.Subgroup(ctx, 0, world.Rank(), nil); err != nil {
		return nil, fmt.Errorf("checkpoint group: %w", err)
	}
	return m, nil
}

// setDeadline sets on every group how long a rank may stand still. All ranks call it at the same
// point.
func (m *mesh) setDeadline(d time.Duration) {
	for _, g := range []comm.Communicator{m.world, m.state, m.context, m.saves} {
		if s, ok := g.(comm.DeadlineSetter); ok {
			s.SetDeadline(d)
		}
	}
}

// join makes the groups that move views of the device, which takes GPUs a while.
func (m *mesh) join(ctx context.Context) (err error) {
	joint := m.state // all ranks
	if m.state == m.world {
		if m.state, err = joint.Split(ctx, 0, joint.Rank()); err != nil {
			return fmt.Errorf("group for gradients and weights: %w", err)
		}
	}
	if m.context, err = joint.Split(ctx, m.dataRank, joint.Rank()); err != nil {
		return fmt.Errorf("context groups: %w", err)
	}
	return nil
}

// places lists this rank's place in each of those groups, before they are joined.
func (m *mesh) places(flat *model.FlatLayout) []state.Group {
	return state.Groups(flat, state.Group{Rank: m.world.Rank(), Size: m.world.Size()})
}
