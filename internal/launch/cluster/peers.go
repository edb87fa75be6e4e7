package cluster

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/cluster/wire"
)

// Connections, and this agent's reactions to their changes.

// A peer is a connected agent.
type peer struct {
	Member
	via    string // the address that this agent has dialed; "": the peer did
	status status
	joined int       // order in which it was taken in, from 1; 0: it has not asked to be
	since  time.Time // connected
	held   *join     // its pending request, if its rank may belong to another
}

// setRole changes the role, and tells all who are connected.
func (m *machine) setRole(r role, leader string) {
	if m.role == r && m.leader == leader {
		return
	}
	if r == seeking && (m.role == following || m.role == leading) {
		m.since = m.now
	}
	m.role, m.leader = r, leader
	if r != leading {
		m.run, m.gather = nil, nil
	}
	if r == following || r == seeking {
		m.prop = nil
	}
	s := m.status()
	msg := &message{Status: &s}
	for _, p := range m.sorted() {
		if p.Name != leader {
			m.fx.send(msg, p.Name)
		}
	}
}

// up: a peer is connected.
func (m *machine) up(h hello, via string) {
	p := &peer{Member: h.Agent, via: via, status: h.Status, since: m.now}
	m.peers[p.Name] = p
	delete(m.suspects, p.Name)
	delete(m.dials, p.Addr)
	m.teach(p)
	if m.over {
		m.fx.hangUp(p.Name)
		delete(m.peers, p.Name)
		return
	}
	// What the handshake said may be old by now.
	s := m.status()
	m.fx.send(&message{Status: &s}, p.Name)
	m.onStatus(p, &h.Status)
	m.solicit(p)
}

// sorted lists the connected agents by name, so that a run can be repeated.
func (m *machine) sorted() []*peer {
	return slices.SortedFunc(maps.Values(m.peers), func(a, b *peer) int { return strings.Compare(a.Name, b.Name) })
}

func (m *machine) teach(p *peer) {
	if p.status.Index < m.reg.index {
		m.fx.send(&message{Decided: m.reg.last}, p.Name)
		p.status.Index = m.reg.index
	}
}

// down: a peer is no longer connected.
func (m *machine) down(name, why string) {
	p := m.peers[name]
	if p == nil {
		return
	}
	delete(m.peers, name)
	if m.over {
		return
	}
	m.suspects[name] = m.now.Add(2 * m.cfg.Silence)
	switch {
	case m.role == leading:
		m.heard(name)
		m.lost(p, why)
	case m.role == following && name == m.leader:
		m.lostLeader(p, why)
	}
}

// lostLeader: the agent that leads is gone, or leads no more.
func (m *machine) lostLeader(p *peer, why string) {
	m.setRole(seeking, "")
	if at := m.world().index(p.Name); at >= 0 {
		a := m.world().Agents[at]
		m.orphaned, m.orphanedAt = a.lost(why, 1), m.reg.index
	}
	m.doom(name(p.Member, m.world())+", which led: "+why, m.firstRank(p.Name))
}

// doom ends the start that goes on here: the others cannot be told, or do not wait.
func (m *machine) doom(why string, rank int) {
	if m.local.running {
		n := launch.News{Lost: why}
		if rank >= 0 {
			n.Failed = &rank
		}
		m.fx.news(n)
	}
}

func (m *machine) world() *World {
	if m.reg.last == nil {
		return new(World)
	}
	return &m.reg.last.World
}

// firstRank returns an agent's first rank in the last world; -1: it has none.
func (m *machine) firstRank(name string) int {
	if at := m.world().index(name); at >= 0 {
		return m.world().Agents[at].FirstRank
	}
	return -1
}

// name returns an agent with its ranks, for people.
func name(a Member, w *World) string {
	if at := w.index(a.Name); at >= 0 {
		a = w.Agents[at]
		return fmt.Sprintf("node %s (%s)", a.Host, launch.RanksOf(a.FirstRank, a.NProc))
	}
	return "node " + a.Host
}

// stranger: an agent was refused at the door.
func (m *machine) stranger(r *wire.Refusal) {
	const quiet = 10 * time.Second
	if text := r.Error(); text != m.strange || m.now.Sub(m.strangeAt) > quiet {
		m.strange, m.strangeAt = text, m.now
		m.fx.log("%s", text)
	}
}

// errClosed answers a Cohort's calls after Close.
var errClosed = errors.New("this agent has left the job")

// mailbox holds the calls of those who do not wait: few, since each start has few.
type mailbox struct {
	ready chan struct{} // room for one

	mu    sync.Mutex
	calls []func() // guarded by mu
}

func (b *mailbox) init() { b.ready = make(chan struct{}, 1) }

// put never blocks.
func (b *mailbox) put(f func()) {
	b.mu.Lock()
	b.calls = append(b.calls, f)
	b.mu.Unlock()
	select {
	case b.ready <- struct{}{}:
	default:
	}
}

// take returns what is there, in order.
func (b *mailbox) take() []func() {
	b.mu.Lock()
	defer b.mu.Unlock()
	calls := b.calls
	b.calls = nil
	return calls
}
