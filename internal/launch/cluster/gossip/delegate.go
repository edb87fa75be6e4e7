package gossip

import (
	"github.com/hashicorp/memberlist"
)

// A delegate is what memberlist calls. Where it tells of members it holds its lock, so nothing here may
// call it, nor wait.
type delegate struct {
	*Members
	meta []byte // of this agent
}

// NodeMeta returns what this agent says of itself.
func (d delegate) NodeMeta(int) []byte { return d.meta }

// NotifyAlive refuses members whose metadata cannot be read.
func (d delegate) NotifyAlive(n *memberlist.Node) error {
	_, err := decode(n.Name, n.Meta)
	return err
}

// NotifyJoin adds a member.
func (d delegate) NotifyJoin(n *memberlist.Node) {
	p, err := decode(n.Name, n.Meta)
	if err != nil {
		return // NotifyAlive has refused it
	}
	d.change(func(peers map[string]member) { peers[n.Name] = member{p, addrOf(n)} })
}

// NotifyUpdate takes what a member says of itself anew.
func (d delegate) NotifyUpdate(n *memberlist.Node) { d.NotifyJoin(n) }

// NotifyLeave removes a member that has left or that is not heard of any more.
func (d delegate) NotifyLeave(n *memberlist.Node) {
	name := n.Name
	d.change(func(peers map[string]member) { delete(peers, name) })
}

// NotifyMsg ignores messages: agents talk over their control connections.
func (d delegate) NotifyMsg([]byte) {}

// GetBroadcasts returns none, for the same reason.
func (d delegate) GetBroadcasts(int, int) [][]byte { return nil }

// LocalState returns none.
func (d delegate) LocalState(bool) []byte { return nil }

// MergeRemoteState has nothing to merge.
func (d delegate) MergeRemoteState([]byte, bool) {}
