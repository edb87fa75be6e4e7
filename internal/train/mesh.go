package train

import (
	"context"
	"fmt"
	"time"

	"github.com/cprun/cprun/comm"
)

// mesh is a rank's place in the grid of data-parallel groups times context-parallel ranks.
// The ranks of a context group are neighbours, since they talk most.
type mesh struct {
	world   comm.Communicator // all ranks, for views of the host
	state   comm.Communicator // all ranks, for gradients, weights and what is summed
	context comm.Communicator // the ranks that share this rank's sequences
	saves   comm.Communicator // all ranks again, for checkpoints written beside the training

	dataRank, dataSize int // of this rank's context group among them
}

// diskDeadline is how long ranks wait for each other's checkpoint files to be written, or for
// rank 0 to verify them: hundreds of gigabytes on a slow file system.
const diskDeadline = 2 * time.Hour

// newMesh makes the groups that need no device. join makes the others.
func newMesh(ctx context.Context, world comm.Communicator, contextSize int) (*mesh, error) {
	if world.Size()%contextSize != 0 {
		return nil, fmt.Errorf("%d ranks do not divide into groups of %d", world.Size(), contextSize)
	}
	m := &mesh{world: world, state: world, dataRank: world.Rank() / contextSize, dataSize: world.Size() / contextSize}
	var err error
	if d, ok := world.(*comm.DeviceGroup); ok {
		m.world = d.Host()
	}
	if m.saves, err = m.world.Split(ctx, 0, world.Rank()); err != nil {
		return nil, fmt.Errorf("checkpoint group: %w", err)
	}
	if g, ok := m.saves.(interface{ SetDeadline(time.Duration) }); ok {
		g.SetDeadline(diskDeadline)
	}
	return m, nil
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
