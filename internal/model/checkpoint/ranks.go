package checkpoint

import (
	"context"
	"fmt"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// ranks moves byte strings over a communicator of tensors. A Saver uses it in the background while the training
// step uses its own, so it must be a communicator of its own (a Split of the world).
type ranks struct{ comm.Communicator }

// maxBlob bounds what a peer's announced length makes this rank allocate. A manifest's part
// names every tensor of a shard, far below it.
const maxBlob = 1 << 30

func (r ranks) sizes(ctx context.Context, n int) ([]int64, error) {
	own, all := tensor.FromSlice([]int64{int64(n)}, 1), tensor.New(tensor.I64, r.Size())
	if err := done(ctx)(r.AllGather(all, own)); err != nil {
		return nil, err
	}
	sizes := tensor.Data[int64](all)
	for rank, n := range sizes {
		if n < 0 || n > maxBlob {
			return nil, fmt.Errorf("rank %d announces %d bytes", rank, n)
		}
	}
	return sizes, nil
}

// done returns a function that waits for a transfer.
func done(ctx context.Context) func(comm.Pending, error) error {
	return func(p comm.Pending, err error) error {
		if err != nil {
			return err
		}
		return p.Sync(ctx)
	}
}

// gather brings every rank's blob to rank 0, in rank order; other ranks get nil.
func (r ranks) gather(ctx context.Context, blob []byte) ([][]byte, error) {
	sizes, err := r.sizes(ctx, len(blob))
	if err != nil {
		return nil, err
	}
	var send, recv []comm.Message
	out := [][]byte{blob}
	if r.Rank() != 0 && len(blob) > 0 {
		send = append(send, comm.Message{Peer: 0, View: tensor.FromSlice(blob, len(blob))})
	}
	for peer := 1; peer < r.Size() && r.Rank() == 0; peer++ {
		v := tensor.New(tensor.U8, int(sizes[peer]))
		if out = append(out, tensor.Bytes(v)); sizes[peer] > 0 {
			recv = append(recv, comm.Message{Peer: peer, View: v})
		}
	}
	if err := done(ctx)(r.Exchange(send, recv)); err != nil || r.Rank() != 0 {
		return nil, err
	}
	return out, nil
}

// Broadcast brings rank 0's blob to every rank. The others' is ignored.
func Broadcast(ctx context.Context, c comm.Communicator, blob []byte) ([]byte, error) {
	sizes, err := ranks{c}.sizes(ctx, len(blob))
	if err != nil || sizes[0] == 0 {
		return nil, err
	}
	v := tensor.New(tensor.U8, int(sizes[0]))
	if c.Rank() == 0 {
		copy(tensor.Bytes(v), blob)
	}
	return tensor.Bytes(v), done(ctx)(c.Broadcast(v, 0))
}

// all tells every rank whether all say yes. Every rank calls it.
func (r ranks) all(ctx context.Context, yes bool) (bool, error) {
	v := tensor.New(tensor.I64, 1)
	if yes {
		tensor.Data[int64](v)[0] = 1
	}
	err := done(ctx)(r.AllReduce(v, comm.Min))
	return err == nil && tensor.Data[int64](v)[0] == 1, err
}
