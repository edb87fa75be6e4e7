package cluster

import (
	"fmt"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// The agent that leads: it takes others in, keeps the book of a start, and puts the next decision forward.

const (
	// tellingTime bounds the leader's wait for all agents to confirm the end of the job.
	tellingTime = 2 * time.Second
	// hurrying bounds the wait for the other agents' endings after the first failure of a start.
	hurrying = 90 * time.Second
	// finishing bounds the same wait after the ranks of one node are done. Each launcher has a shorter limit.
	finishing = launch.LastTime + time.Minute
	// listening bounds the wait for the ranks of a node to listen. The ranks wait a minute longer for their peers.
	listening = 4 * time.Minute
)

// joined reports whether a peer is connected and has asked to be taken in.
func (m *machine) joined(name string) bool {
	p := m.peers[name]
	return p != nil && p.joined > 0
}

// onJoin takes an agent in, or back.
func (m *machine) onJoin(p *peer, j *join) {
	if m.role != leading {
		s := m.status()
		m.fx.send(&message{Status: &s}, p.Name)
		return
	}
	if why := m.unwanted(p); why != "" {
		m.hold(p, j, why)
		return
	}
	p.held = nil
	if p.joined == 0 {
		m.joins++
		p.joined = m.joins
		if m.gather != nil {
			m.gather.call = m.now
		}
	}
	if r := m.run; r != nil && r.parts[p.Name] != nil {
		r.parts[p.Name].absent = false
		m.catchUp(p)
	} else if m.reg.index > 0 {
		m.note(p.Name, "this node is a spare: it waits for the next start of the workers")
	}
	if j.Ended != nil {
		m.onEnded(p.Name, j.Ended)
	}
	m.advance()
}

// hold keeps an agent waiting if another has its rank: the holder may be gone, without having been found
// to be. If it is not, the newcomer is refused: to have the key is not to be a rank.
func (m *machine) hold(p *peer, j *join, why string) {
	p.held = j
	if m.now.Sub(p.since) < 2*m.cfg.Silence {
		return
	}
	m.fx.log("node %s at %s is refused: %s", p.Host, p.Addr, why)
	m.fx.send(&message{Refuse: &why}, p.Name)
	m.fx.hangUp(p.Name)
	delete(m.peers, p.Name)
}

// catchUp sends a returning agent the news that it missed of the present start.
func (m *machine) catchUp(p *peer) {
	r := m.run
	switch {
	case r.over && m.gather != nil && m.gather.again != nil:
		m.fx.send(&message{Again: m.gather.again}, p.Name)
	case r.over || r.failed.IsZero():
	default:
		for _, a := range m.world().Agents {
			if part := r.parts[a.Name]; part.failed == 1 {
				m.fx.send(&message{News: &relayed{m.reg.index, launch.News{Failed: &part.FirstRank, Lost: part.lost}}},
					p.Name)
			}
		}
	}
}

// unwanted returns the reason to refuse an agent, or "".
func (m *machine) unwanted(p *peer) string {
	if p.NodeRank < 0 {
		return ""
	}
	if p.NodeRank >= m.cfg.Max {
		return fmt.Sprintf("it wants node rank %d, and there are %d nodes at most", p.NodeRank, m.cfg.Max)
	}
	holder := Member{}
	if m.self.NodeRank == p.NodeRank {
		holder = m.self
	}
	for _, q := range m.peers {
		if q.joined > 0 && q.Name != p.Name && q.NodeRank == p.NodeRank {
			holder = q.Member
		}
	}
	if holder.Name == "" {
		return ""
	}
	return fmt.Sprintf("node rank %d belongs to the agent at %s on %s, which is alive", p.NodeRank, holder.Addr,
		holder.Host)
}

func (m *machine) note(to, text string) { m.fx.send(&message{Note: &text}, to) }

func (m *machine) tellAll(text string) {
	m.fx.log("%s", text)
	for _, p := range m.sorted() {
		if p.joined > 0 {
			m.note(p.Name, text)
		}
	}
}

// relay hands news to all agents of the start but one.
func (m *machine) relay(but string, n launch.News) {
	msg := &message{News: &relayed{m.reg.index, n}}
	for _, a := range m.world().Agents {
		switch {
		case a.Name == but:
		case a.Name == m.self.Name:
			m.hear(n)
		case m.joined(a.Name):
			m.fx.send(msg, a.Name)
		}
	}
}

// onNews: an agent has news of the start. To one that follows, they come from the leader.
func (m *machine) onNews(from string, n *relayed) {
	if n.Index != m.reg.index {
		return
	}
	if m.role == following {
		if from == m.leader {
			m.hear(n.News)
		}
		return
	}
	r := m.run
	if m.role != leading || r == nil || r.over || r.parts[from] == nil {
		return
	}
	p := r.parts[from]
	switch {
	case n.News.Addrs != nil:
		if len(n.News.Addrs) == p.NProc {
			p.addrs = n.News.Addrs
			m.introduce()
		}
	case n.News.Failed != nil:
		m.failed(p, n.News)
	case n.News.Stop != "" && r.stop == "":
		r.stop = n.News.Stop + " at node " + p.Host
		m.relay(from, launch.News{Stop: r.stop})
	case n.News.Kill:
		m.relay(from, n.News)
	case n.News.Ask:
		m.onAsked(from)
	case n.News.Standings != nil:
		m.onStandings(from, n.News)
	}
}

// introduce sends all agents the addresses of all workers, once they are complete.
func (m *machine) introduce() {
	var all []string
	for _, a := range m.world().Agents {
		p := m.run.parts[a.Name]
		if p.addrs == nil {
			return
		}
		all = append(all, p.addrs...)
	}
	if !m.run.met {
		m.run.met = true
		m.relay("", launch.News{Addrs: all})
	}
}
