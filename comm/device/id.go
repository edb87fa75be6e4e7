package device

import (
	"context"
	"fmt"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// shareID gives the bytes that rank 0 makes to all ranks of host. A rank 0 that cannot make
// them aborts the group, so that the others do not wait.
func shareID(ctx context.Context, host *comm.Group, size int, make func() ([]byte, error)) ([]byte, error) {
	v := tensor.New(tensor.U8, size)
	if host.Rank() == 0 {
		id, err := make()
		if err != nil {
			host.Abort(fmt.Errorf("an id for the devices: %w", err))
			return nil, err
		}
		copy(tensor.Bytes(v), id)
	}
	p, err := host.Broadcast(v, 0)
	if err == nil {
		err = p.Sync(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("the id of the devices: %w", err)
	}
	return tensor.Bytes(v), nil
}
