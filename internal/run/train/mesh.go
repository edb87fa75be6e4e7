package train

import (
	"context"
	"fmt"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/state"
)

// A mesh is a rank's place in the grid of data-parallel groups by context-parallel ranks. The ranks of a context group
// are neighbours, since they exchange most.
type mesh struct {
	world   comm.Communicator // all ranks, for host memory
	state   comm.Communicator // all ranks, for sums and gradients
	weights comm.Communicator // all ranks, for weights, so that gathers do not wait for reductions; may equal state
	context comm.Communicator // the ranks that share this rank's sequences
	across  comm.Communicator // the ranks with the same weights; nil unless there are copies
	saves   comm.Communicator // all ranks, for checkpoints in the background

	copies int // of sharded weights, each on neighbouring ranks

	dataRank, dataSize int // rank and number of context groups
}

// newMesh creates the groups that need no device. join creates the others.
func newMesh(ctx context.Context, world comm.Communicator, contextSize, copies int) (*mesh, error) {
	if world.Size()%contextSize != 0 {
		return nil, fmt.Errorf("%d ranks do not divide into groups of %d", world.Size(), contextSize)
	}
	if world.Size()%copies != 0 {
		return nil, fmt.Errorf("%d ranks do not divide into %d copies of the weights", world.Size(), copies)
	}
	m := &mesh{world: world, state: world, copies: copies, dataRank: world.Rank() / contextSize,
		dataSize: world.Size() / contextSize}
	var err error
	if d, ok := world.(comm.Hosted); ok {
		m.world = d.Host()
	}
	all, ok := m.world.(*comm.Group)
	if !ok {
		return nil, fmt.Errorf("checkpoint group: a %T cannot split off a group with its own stream", m.world)
	}
	// with its own stream, so that checkpoints overlap with steps
	if m.saves, err = all.Subgroup(ctx, 0, world.Rank(), nil); err != nil {
		return nil, fmt.Errorf("checkpoint group: %w", err)
	}
	return m, nil
}

// setDeadline sets the deadline of transfers on every group. All ranks call it at the same point.
func (m *mesh) setDeadline(d time.Duration) {
	for _, g := range []comm.Communicator{m.world, m.state, m.weights, m.across, m.context, m.saves} {
		if s, ok := g.(comm.DeadlineSetter); ok {
			s.SetDeadline(d)
		}
	}
}

// join creates the groups for device memory, which takes a while on GPUs. If passes both gather and reduce, weights get
// a group of their own.
func (m *mesh) join(ctx context.Context, both bool) (err error) {
	joint, per := m.state, m.world.Size()/m.copies
	copied, local := joint.Rank()/per, joint.Rank()%per
	if m.state == m.world || m.copies > 1 {
		if m.state, err = joint.Split(ctx, 0, local*m.copies+copied); err != nil {
			return fmt.Errorf("group for gradients and weights: %w", err)
		}
	}
	if m.weights = m.state; both {
		if m.weights, err = joint.Split(ctx, copied, local); err != nil {
			return fmt.Errorf("group for weights: %w", err)
		}
	}
	if m.copies > 1 {
		if m.across, err = joint.Split(ctx, local, copied); err != nil {
			return fmt.Errorf("group for copies of weights: %w", err)
		}
	}
	if m.context, err = joint.Split(ctx, m.dataRank, joint.Rank()); err != nil {
		return fmt.Errorf("context groups: %w", err)
	}
	return nil
}

// place returns this rank's place in the group of a bucket, before join. Every rank has every parameter, so all share
// each bucket. Ranks with the same weights are neighbours.
func (m *mesh) place(model.Bucket) state.Group {
	rank, size := m.world.Rank(), m.world.Size()
	per := size / m.copies
	return state.Group{Rank: rank%per*m.copies + rank/per, Size: size, Copies: m.copies}
}

// groups returns the group of place, and the ranks that gather the bucket's weights.
func (m *mesh) groups(b model.Bucket) (all, weights comm.Communicator) {
	if b.Part == model.AllVectors { // never in copies
		return m.state, m.state
	}
	return m.state, m.weights
}
