package train

import (
	"context"
	"fmt"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/checkpoint"
	"github.com/cprun/cprun/tensor"
)

// blobs moves byte strings over a communicator of tensors; checkpoints agree through it.
type blobs struct{ group comm.Communicator }

var _ checkpoint.Group = blobs{}

// maxBlob bounds what a peer's announced length makes this rank allocate. A manifest's part
// names every tensor of a shard, far below it.
const maxBlob = 1 << 30

// Rank returns this rank.
func (b blobs) Rank() int { return b.group.Rank() }

// Size returns the number of ranks.
func (b blobs) Size() int { return b.group.Size() }

func (b blobs) sizes(ctx context.Context, n int) ([]int64, error) {
	own, all := tensor.FromSlice([]int64{int64(n)}, 1), tensor.New(tensor.I64, b.Size())
	p, err := b.group.AllGather(all, own)
	if err != nil {
		return nil, err
	}
	if err := p.Sync(ctx); err != nil {
		return nil, err
	}
	sizes := tensor.Data[int64](all)
	for r, n := range sizes {
		if n < 0 || n > maxBlob {
			return nil, fmt.Errorf("rank %d announces %d bytes", r, n)
		}
	}
	return sizes, nil
}

// Gather brings every rank's blob to rank 0.
func (b blobs) Gather(ctx context.Context, blob []byte) ([][]byte, error) {
	sizes, err := b.sizes(ctx, len(blob))
	if err != nil {
		return nil, err
	}
	var send, recv []comm.Message
	parts := make([]tensor.View, b.Size())
	if b.Rank() != 0 && len(blob) > 0 {
		send = append(send, comm.Message{Peer: 0, View: tensor.FromSlice(blob, len(blob))})
	}
	if b.Rank() == 0 {
		for r := 1; r < b.Size(); r++ {
			parts[r] = tensor.New(tensor.U8, int(sizes[r]))
			if sizes[r] > 0 {
				recv = append(recv, comm.Message{Peer: r, View: parts[r]})
			}
		}
	}
	p, err := b.group.Exchange(send, recv)
	if err != nil {
		return nil, err
	}
	if err := p.Sync(ctx); err != nil || b.Rank() != 0 {
		return nil, err
	}
	out := [][]byte{blob}
	for _, v := range parts[1:] {
		out = append(out, tensor.Bytes(v))
	}
	return out, nil
}

// Broadcast brings rank 0's blob to every rank.
func (b blobs) Broadcast(ctx context.Context, blob []byte) ([]byte, error) {
	sizes, err := b.sizes(ctx, len(blob))
	if err != nil {
		return nil, err
	}
	v := tensor.New(tensor.U8, int(sizes[0]))
	if b.Rank() == 0 {
		copy(tensor.Bytes(v), blob)
	}
	if v.Size() == 0 {
		return nil, nil
	}
	p, err := b.group.Broadcast(v, 0)
	if err != nil {
		return nil, err
	}
	if err := p.Sync(ctx); err != nil {
		return nil, err
	}
	return tensor.Bytes(v), nil
}

// All tells every rank whether all say yes.
func (b blobs) All(ctx context.Context, yes bool) (bool, error) {
	v := tensor.New(tensor.I64, 1)
	if yes {
		tensor.Data[int64](v)[0] = 1
	}
	p, err := b.group.AllReduce(v, comm.Min)
	if err == nil {
		err = p.Sync(ctx)
	}
	return err == nil && tensor.Data[int64](v)[0] == 1, err
}
