package checkpoint

import (
	"context"
	"fmt"
)

// Group is what a save needs of the ranks. A Saver calls it from its background goroutine
// while the training step uses its own, so a Group must be a communicator of its own (a
// Split of the world), and its calls must end when ctx does or a peer is lost.
type Group interface {
	Rank() int
	Size() int
	// Gather brings every rank's blob to rank 0, in rank order; other ranks get nil.
	Gather(ctx context.Context, blob []byte) ([][]byte, error)
	// Broadcast brings rank 0's blob to every rank. The others' is ignored.
	Broadcast(ctx context.Context, blob []byte) ([]byte, error)
	// All tells every rank whether all say yes. Every rank calls it.
	All(ctx context.Context, yes bool) (bool, error)
}

// NewLocal makes a Group of n ranks that are goroutines of one process, in rank order. One
// of size 1 saves what a single process has.
func NewLocal(n int) []Group {
	up, down := make([]chan []byte, n), make([]chan []byte, n)
	groups := make([]Group, n)
	for r := range n {
		up[r], down[r] = make(chan []byte, 1), make(chan []byte, 1)
		groups[r] = &local{r, up, down}
	}
	return groups
}

type local struct {
	rank     int
	up, down []chan []byte // by rank
}

func (l *local) Rank() int { return l.rank }
func (l *local) Size() int { return len(l.up) }

func (l *local) Gather(ctx context.Context, blob []byte) ([][]byte, error) {
	if l.rank != 0 {
		return nil, l.send(ctx, l.up[l.rank], blob, 0)
	}
	all := make([][]byte, len(l.up))
	all[0] = blob
	for r := 1; r < len(all); r++ {
		var err error
		if all[r], err = l.receive(ctx, l.up[r], r); err != nil {
			return nil, err
		}
	}
	return all, nil
}

func (l *local) Broadcast(ctx context.Context, blob []byte) ([]byte, error) {
	if l.rank != 0 {
		return l.receive(ctx, l.down[l.rank], 0)
	}
	for r := 1; r < len(l.down); r++ {
		if err := l.send(ctx, l.down[r], blob, r); err != nil {
			return nil, err
		}
	}
	return blob, nil
}

func (l *local) All(ctx context.Context, yes bool) (bool, error) {
	votes, err := l.Gather(ctx, []byte{toByte(yes)})
	if err != nil {
		return false, err
	}
	for _, v := range votes { // rank 0 alone has any
		yes = yes && v[0] == 1
	}
	blob, err := l.Broadcast(ctx, []byte{toByte(yes)})
	return err == nil && blob[0] == 1, err
}

func toByte(yes bool) byte {
	if yes {
		return 1
	}
	return 0
}

func (l *local) send(ctx context.Context, c chan<- []byte, blob []byte, peer int) error {
	select {
	case c <- blob:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("send to rank %d: %w", peer, context.Cause(ctx))
	}
}

func (l *local) receive(ctx context.Context, c <-chan []byte, peer int) ([]byte, error) {
	select {
	case blob := <-c:
		return blob, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("receive from rank %d: %w", peer, context.Cause(ctx))
	}
}
