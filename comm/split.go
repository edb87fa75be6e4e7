package comm

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"slices"

	"github.com/cprun/cprun/tensor"
)

// Barrier blocks the caller until every rank has called it. It comes after the group's
// earlier calls; the compute stream has no part in it.
func (g *Group) Barrier(ctx context.Context) error {
	p, err := g.enqueue("barrier", "", false, func() error {
		if g.few() {
			return g.disseminate()
		}
		n := len(g.ranks)
		sends, recvs := make([]part, n-1), make([]part, n-1)
		g.others(func(i, peer int) { sends[i], recvs[i] = part{peer: peer}, part{peer: peer} })
		return g.exchange(sends, recvs)
	})
	if err != nil {
		return err
	}
	return p.Sync(ctx)
}

// A member is what Split asks of each rank.
type member struct{ colour, key, rank int }

// Split makes groups of the ranks with the same colour, ordered by key, then by rank.
func (g *Group) Split(ctx context.Context, colour, key int) (Communicator, error) {
	c, err := g.split(ctx, colour, key, g.compute)
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (g *Group) split(ctx context.Context, colour, key int, compute tensor.Stream) (*Group, error) {
	n := len(g.ranks)
	all := make([]int64, 2*n)
	all[2*g.rank], all[2*g.rank+1] = int64(colour), int64(key)
	g.mu.Lock()
	g.splits++
	count := g.splits
	g.mu.Unlock()
	p, err := g.enqueue("split", "", false, func() error {
		buf := tensor.FromSlice(all, 1, n, 1, 2)
		b := tensor.Bytes(buf)
		if err := g.gatherBlocks(b, len(b)/n); err != nil {
			return err
		}
		copy(all, tensor.Data[int64](buf))
		return nil
	})
	if err == nil {
		err = p.Sync(ctx)
	}
	if err != nil {
		return nil, err
	}
	var members []member
	for r := range n {
		if int(all[2*r]) == colour {
			members = append(members, member{colour, int(all[2*r+1]), r})
		}
	}
	slices.SortFunc(members, func(a, b member) int {
		return cmp.Or(cmp.Compare(a.key, b.key), cmp.Compare(a.rank, b.rank))
	})
	ranks, own := make([]int, len(members)), 0
	for i, m := range members {
		ranks[i] = g.ranks[m.rank]
		if m.rank == g.rank {
			own = i
		}
	}
	return g.adopt(newGroup(g.link, splitID(g.id, count, colour), ranks, own, compute, g.Options()))
}

// adopt makes c end with g.
func (g *Group) adopt(c *Group) (*Group, error) {
	g.mu.Lock()
	closed := g.closed
	if !closed {
		g.children = append(g.children, c)
	}
	g.mu.Unlock()
	if closed {
		c.Close()
		return nil, g.fault("split", ErrClosed)
	}
	return c, nil
}

// splitID derives the id of a sub-group from what all its members know. Ids are drawn from
// 64 bits of a hash, so that two groups of one world do not meet.
func splitID(parent, count uint64, colour int) uint64 {
	var b [24]byte
	binary.BigEndian.PutUint64(b[0:], parent)
	binary.BigEndian.PutUint64(b[8:], count)
	binary.BigEndian.PutUint64(b[16:], uint64(int64(colour)))
	sum := sha256.Sum256(b[:])
	return max(binary.BigEndian.Uint64(sum[:8]), worldID+1)
}
