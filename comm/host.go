package comm

import (
	"context"
	"time"

	"github.com/cprun/cprun/comm/internal/link"
	"github.com/cprun/cprun/tensor"
)

// What groups of devices need of the group that their hosts are in.

// ID returns the number of the group, which is the same on all its ranks and is that of no other
// group of the world. That of the world is 0.
func (g *Group) ID() uint64 { return g.id }

// WorldRank returns the number in the world of a rank of the group. PeerError.Rank is one.
func (g *Group) WorldRank(rank int) int { return g.ranks[rank] }

// Node returns the number of the node that a rank of the group is on. Ranks of one node share its
// memory and devices.
func (g *Group) Node(rank int) int {
	if g.link.Nodes == nil {
		return 0
	}
	return g.link.Nodes[g.ranks[rank]]
}

// OneNode reports whether all ranks of the group share a node.
func (g *Group) OneNode() bool {
	for r := range g.ranks {
		if g.Node(r) != g.Node(0) {
			return false
		}
	}
	return true
}

// Options returns what the group was made with, defaults filled in, and its present deadline.
func (g *Group) Options() Options {
	o := g.opts
	o.Deadline = time.Duration(g.limit.Load())
	return o
}

// Link returns what the group stands on. It is for the packages inside comm that build on a
// group: the first failure of any of them ends the world.
func (g *Group) Link() link.Link { return g.link }

// After has the group's later calls come after f, which may wait for what no stream of the host
// does. An error of f fails the world.
func (g *Group) After(f func() error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closed {
		g.stream.Do("", f)
	}
}

// Subgroup splits like Split, for callers that go on with a *Group, whose calls are ordered against
// compute; nil means a private stream.
func (g *Group) Subgroup(ctx context.Context, colour, key int, compute tensor.Stream) (*Group, error) {
	return g.split(ctx, colour, key, compute)
}
