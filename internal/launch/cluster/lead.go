package cluster

import (
	"errors"
	"fmt"
	"slices"
	"strings"
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

const (
	// returning bounds a restart's wait for lost agents or spares if fewer agents are enough.
	returning = 2 * time.Second
	// preparing bounds Config.Prepare, which may hang at a disk.
	preparing = 30 * time.Minute
)

// A gather records the leader's wait for the agents of the next start.
type gather struct {
	since     time.Time // when it began
	call      time.Time // when the last newcomer came
	again     *again    // the verdict before it; nil: none
	preparing *World    // Prepare makes its payload; nil: it does not run
	prepared  time.Time // when that began
	said      int       // agents that the user was told of
	saidAt    time.Time
}

// idle reports whether this leader waits for a start to be decided.
func (m *machine) idle() bool { return m.gather != nil && (m.run == nil || m.run.over) }

func (m *machine) there() []candidate {
	all := []candidate{{Member: m.self}}
	for _, p := range m.sorted() {
		if p.joined > 0 {
			all = append(all, candidate{p.Member, p.joined})
		}
	}
	return all
}

// advance puts the next start forward as soon as enough agents are there. The caller of this leader has to
// be ready as well: it pauses between restarts.
func (m *machine) advance() {
	g := m.gather
	if m.role != leading || !m.idle() || m.prop != nil && m.prop.value != nil || g.preparing != nil ||
		!m.local.waiting || m.quit != nil {
		return
	}
	there := m.there()
	m.sayWaiting(len(there))
	if !m.enough(min(len(there), m.cfg.Max)) {
		return
	}
	agents, left := choose(there, m.world(), &m.tally, m.cfg.Min, m.cfg.Max)
	for _, note := range left {
		m.tellAll(note)
	}
	w := World{Generation: m.reg.index + 1, Restart: m.tally.Retries.Done}
	w.Agents, w.Size = place(agents)
	g.preparing, g.prepared = &w, m.now
	m.fx.prepare(w)
}

// sayWaiting prints how many agents are here, at most every 5 seconds.
func (m *machine) sayWaiting(n int) {
	const pause = 5 * time.Second
	g := m.gather
	if n == g.said || m.now.Sub(g.saidAt) < pause || n >= m.cfg.Max && g.said == 0 {
		return
	}
	g.said, g.saidAt = n, m.now
	want := fmt.Sprint(m.cfg.Max)
	if m.cfg.Min < m.cfg.Max {
		want = fmt.Sprintf("%d to %d", m.cfg.Min, m.cfg.Max)
	}
	m.fx.log("%d of %s nodes are here", n, want)
}

// enough reports whether n agents are enough to start now. If they will not be any more, the job ends.
func (m *machine) enough(n int) bool {
	g, c := m.gather, m.cfg
	waited := m.now.Sub(g.since)
	if m.reg.index == 0 {
		switch {
		case n >= c.Max, n >= c.Min && c.Min < c.Max && m.now.Sub(g.call) >= c.LastCall:
			return true
		case waited >= c.JoinTimeout:
			m.giveUpWaiting(n, c.JoinTimeout)
		}
		return false
	}
	want := max(c.Min, min(m.tally.Target, c.Max))
	switch {
	case n >= want, n >= c.Min && waited >= returning:
		return true
	case waited >= c.RegroupTimeout:
		m.giveUpWaiting(n, c.RegroupTimeout)
	}
	return false
}

// giveUpWaiting ends the job: the nodes that are missing have not come.
func (m *machine) giveUpWaiting(n int, after time.Duration) {
	var hosts []string
	have := map[int]bool{}
	for _, c := range m.there() {
		hosts = append(hosts, c.Host)
		have[c.NodeRank] = true
	}
	slices.Sort(hosts)
	why := fmt.Sprintf("only %d of at least %d nodes came in %v: %s", n, m.cfg.Min, after,
		strings.Join(hosts[:min(len(hosts), 16)], ", "))
	var missing []string
	for r := range m.cfg.Min {
		if !have[r] && !have[-1] && len(missing) < 16 {
			missing = append(missing, fmt.Sprint(r))
		}
	}
	if len(missing) > 0 {
		why += "; missing are node ranks " + strings.Join(missing, ", ")
	}
	m.end(launch.Result{ExitCode: launch.ExitFailed}, why)
}

// prepared: the payload of a world is made, or cannot be.
func (m *machine) prepared(generation int, payload, secret []byte, err error) {
	g := m.gather
	if m.over || m.role != leading || g == nil || g.preparing == nil || g.preparing.Generation != generation {
		return
	}
	w := *g.preparing
	g.preparing = nil
	if err != nil {
		m.cause = err
		r := launch.Result{ExitCode: launch.ExitFailed}
		if said := (*launch.Over)(nil); errors.As(err, &said) {
			r, m.cause = said.Result, said.Err
		}
		m.end(r, err.Error())
		return
	}
	for _, a := range w.Agents {
		if a.Name != m.self.Name && !m.joined(a.Name) {
			return // gone meanwhile; advance chooses anew
		}
	}
	t := m.tally
	if m.reg.index == 0 {
		t.Target = len(w.Agents)
	}
	m.propose(&decision{World: w, Payload: payload, Secret: secret, Tally: t})
}

// lead goes one step on.
func (m *machine) lead() {
	m.press()
	m.heard("")
	m.stuck()
	m.overdue()
	if g := m.gather; g != nil && g.preparing != nil && m.now.Sub(g.prepared) > preparing {
		g.preparing = nil
		m.end(launch.Result{ExitCode: launch.ExitFailed}, fmt.Sprintf("node %s has not made the start ready in %v: "+
			"see whether the disks of config, data and run directory answer there", m.self.Host, preparing))
	}
	for _, p := range m.sorted() {
		if p.held != nil {
			m.onJoin(p, p.held)
		}
	}
	m.advance()
	every := probing
	if m.idle() { // a start waits for who may be there
		every = probingIdle
	}
	if m.over || m.reg.index == 0 || m.now.Sub(m.probed) < every {
		return
	}
	m.probed = m.now
	for _, seed := range m.cfg.Seeds {
		m.dial(seed)
	}
	if m.idle() { // who is missing may be there again
		for _, v := range m.reg.voters() {
			if m.peers[v.Name] == nil {
				m.dial(v.Addr)
			}
		}
	}
}

// grace returns the time that a new leader gives an agent to join: less for one that was just lost.
func (m *machine) grace(name string) time.Duration {
	if _, is := m.suspects[name]; is {
		return time.Second
	}
	return 2 * m.cfg.Silence
}

// overdue strikes agents that are late. If this agent's own ranks are late, its caller has to end them.
func (m *machine) overdue() {
	r := m.run
	if r == nil || r.over {
		return
	}
	for _, a := range m.world().Agents {
		p := r.parts[a.Name]
		switch why := m.late(p); {
		case why == "":
		case a.Name != m.self.Name:
			m.strike(p, why)
		case p.failed == 0:
			n := launch.News{Failed: &p.FirstRank, Lost: name(p.Member, m.world()) + " is late: " + why}
			m.failed(p, n)
			m.hear(n)
		}
	}
	m.settle()
}

// late returns why this agent gives up on an agent's part of the start, or "".
func (m *machine) late(p *part) string {
	r := m.run
	past := func(since time.Time, limit time.Duration) bool { return !since.IsZero() && m.now.Sub(since) > limit }
	switch {
	case p.ended != nil || p.lost != "":
	case p.absent && past(r.since, m.grace(p.Name)):
		return "it cannot be reached by the node that leads now"
	case past(r.failed, hurrying):
		return fmt.Sprintf("it has not told in %v how the start has ended there", hurrying)
	case past(r.done, finishing):
		return fmt.Sprintf("its ranks have not ended in %v since those of another node were done", finishing)
	case p.addrs == nil && len(r.parts) > 1 && past(r.since, listening):
		return fmt.Sprintf("its ranks have not told in %v where they listen", listening)
	}
	return ""
}
