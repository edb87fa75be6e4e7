package device

import (
	"context"
	"fmt"

	"github.com/cprun/cprun/comm"
)

// Copy engines reach the devices of one node. Where the ranks of a group are on several, messages within a
// node go over them, and those between nodes over the library. Which they are follows from the nodes of
// the ranks, so both ends of a message choose the same, whatever came of the engines of other nodes.

// engines are what the copy engines of a group reach.
type engines struct {
	mover
	near []int // by rank of the group, the rank among those that are reached, or -1; nil where all are
}

// reach returns the ranks of host on this rank's node, as a group of their own, and their ranks in it by
// rank of host. Where all are, it is host itself, and nil.
func reach(ctx context.Context, host *comm.Group) (*comm.Group, []int, error) {
	if host.OneNode() {
		return host, nil, nil
	}
	here, err := host.Subgroup(ctx, host.Node(host.Rank()), host.Rank(), host.Compute())
	if err != nil {
		return nil, nil, err
	}
	near := make([]int, host.Size())
	n := 0
	for r := range near {
		near[r] = -1
		if host.Node(r) == host.Node(host.Rank()) {
			near[r] = n
			n++
		}
	}
	return here, near, nil
}

// apart returns an error that names two ranks of different nodes.
func apart(host *comm.Group) error {
	for r := range host.Size() {
		if host.Node(r) != host.Node(0) {
			return fmt.Errorf("transport copy: %s is on node %d and %s on node %d, and copy engines reach the "+
				"devices of one: use nccl or auto",
				host.PeerName(0), host.Node(0), host.PeerName(r), host.Node(r))
		}
	}
	return nil
}

// everywhere reports whether the engines reach all ranks of the group.
func (e *engines) everywhere() bool { return e != nil && e.near == nil }

// split takes an exchange apart into what the engines carry, by their ranks, and what they do not.
func (e *engines) split(c *exchanged) (near, far *exchanged) {
	near, far = &exchanged{own: c.own, into: c.into}, &exchanged{}
	near.send, far.out = e.part(c.send)
	near.recv, far.in = e.part(c.recv)
	return near, far
}

// part takes messages apart. Those that are far and empty do not move.
func (e *engines) part(ms []comm.Message) (near, far []comm.Message) {
	for _, m := range ms {
		switch {
		case e.near[m.Peer] >= 0:
			near = append(near, comm.Message{Peer: e.near[m.Peer], View: m.View})
		case m.View.Size() > 0:
			far = append(far, m)
		}
	}
	return near, far
}

// moveBoth has the library carry what goes to other nodes, and the engines the rest. All ranks call the
// library first, which may wait for its peers to do so.
func (d *Group) moveBoth(f *flight, c *exchanged) (comm.Pending, error) {
	near, far := d.copies.split(c)
	if len(far.out)+len(far.in) == 0 {
		return d.moveByEngine(f, near)
	}
	g := d.newFlight(f.name, far)
	p, err := d.issue(g, func() error { return d.lib.exchange(far.out, far.in) })
	if err != nil || len(near.send)+len(near.recv) == 0 {
		return p, err
	}
	q, err := d.moveByEngine(f, near)
	if err != nil {
		return nil, err
	}
	return bothPending{p, q}, nil
}

// bothPending is two parts of one call.
type bothPending struct{ far, near comm.Pending }

// Wait makes the compute stream wait for both.
func (b bothPending) Wait() {
	b.far.Wait()
	b.near.Wait()
}

// Sync blocks the caller until both have ended.
func (b bothPending) Sync(ctx context.Context) error {
	if err := b.far.Sync(ctx); err != nil {
		return err
	}
	return b.near.Sync(ctx)
}
