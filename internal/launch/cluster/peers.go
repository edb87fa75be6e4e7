package cluster

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// decisions keeps an agent's knowledge of the job's decisions.
type decisions struct {
	index int       // of the newest known one; 0: none
	last  *decision // that one
	tally tally
}

func (ds *decisions) learn(d *decision) (is bool) {
	if d.Index <= ds.index {
		return false
	}
	ds.index, ds.last, ds.tally = d.Index, d, d.Tally
	return true
}

// send sends the last decision to a peer that does not know it.
func (ds *decisions) send(fx effects, p *peer) {
	if p.status.Index < ds.index {
		fx.send(&message{Decided: ds.last}, p.Name)
		p.status.Index = ds.index
	}
}

// world returns the last assignment; before the first start it is empty.
func (ds *decisions) world() *Assignment {
	if ds.last == nil {
		return new(Assignment)
	}
	return &ds.last.Assignment
}

// noQuorum returns the error of a side without a quorum.
func (ds *decisions) noQuorum(self string, peers peers) string {
	members := ds.world().Members
	n := 0
	var missing []string
	for _, m := range members {
		if m.Name == self || peers[m.Name] != nil {
			n++
		} else if len(missing) < 8 {
			missing = append(missing, m.Host)
		}
	}
	return fmt.Sprintf("this side has %d of %d nodes: not enough to go on, since the others may do so. "+
		"Not connected: %s", n, len(members), strings.Join(missing, ", "))
}

// A peer is a connected agent.
type peer struct {
	Member
	via    string // the address that this agent dialed; "": the peer dialed
	status status
	joined int       // order of joining this agent, from 1; 0: it has not
	since  time.Time // connected
	held   *join     // its pending request, if it cannot be admitted yet
}

// peers lists the connected agents by name.
type peers map[string]*peer

// sorted lists them by name, so that simulations are reproducible.
func (all peers) sorted() []*peer {
	return slices.SortedFunc(maps.Values(all), func(a, b *peer) int { return strings.Compare(a.Name, b.Name) })
}

func (all peers) connected(addr string) bool {
	for _, p := range all {
		if p.Addr == addr || p.via == addr {
			return true
		}
	}
	return false
}

// leave sends the last message to all and closes their connections.
func (all peers) leave(fx effects, b *bye) {
	msg := &message{Bye: b}
	for _, p := range all.sorted() {
		fx.send(msg, p.Name)
		fx.hangUp(p.Name)
	}
	clear(all)
}

// joined reports whether a peer is connected and admitted.
func (all peers) joined(name string) bool { return all[name] != nil && all[name].joined > 0 }
