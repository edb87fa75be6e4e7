package cluster

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/cluster/wire"
)

// An agent without a leader looks for one: at the seeds, among the agents that the discovery finds, and, after the
// first start, among the agents of the last world. The first of these that can be reached asks the others for votes.

const (
	// The wait after a failed dial begins at redial and doubles up to mostRedial.
	redial     = 200 * time.Millisecond
	mostRedial = 2 * time.Second
	// tried bounds the agents that are dialed at once: a dead one may take seconds to find out about.
	tried = 3
	// strangerTime bounds the time of a stranger at the meeting place.
	strangerTime = 30 * time.Second
	// After patience the user hears that no agent was found, and again every mostPatience.
	patience, mostPatience = 10 * time.Second, time.Minute
	// A leader dials the seeds every probing, for agents that look for the job there,
	probing = 5 * time.Second
	// and every probingIdle while no start runs.
	probingIdle = 500 * time.Millisecond
)

// A dialing records the tries to connect to an address.
type dialing struct {
	on    bool
	tries int
	next  time.Time
}

// dial connects to an address unless that is under way, or was tried a moment ago.
func (m *machine) dial(addr string) {
	if addr == m.self.Addr || m.connected(addr) {
		return
	}
	d := m.dials[addr]
	if d == nil {
		d = new(dialing)
		m.dials[addr] = d
	}
	if d.on || m.now.Before(d.next) {
		return
	}
	d.on = true
	m.fx.dial(addr)
}

func (m *machine) connected(addr string) bool {
	for _, p := range m.peers {
		if p.Addr == addr || p.via == addr {
			return true
		}
	}
	return false
}

// dialed: a dial has ended.
func (m *machine) dialed(addr string, err error) {
	d := m.dials[addr]
	if d == nil {
		d = new(dialing)
		m.dials[addr] = d
	}
	d.on = false
	d.next = m.now.Add(min(mostRedial, redial<<min(d.tries, 5)))
	d.tries++
	if m.over || err == nil {
		return
	}
	meeting := len(m.cfg.Seeds) > 0 && addr == m.cfg.Seeds[0]
	if errors.Is(err, wire.ErrSelf) {
		d.next = m.now.Add(time.Hour)
		if meeting {
			m.meet()
		}
		return
	}
	for _, v := range m.reg.voters() {
		if v.Addr == addr {
			m.suspects[v.Name] = m.now.Add(2 * m.cfg.Silence)
		}
	}
	if m.reg.index == 0 && m.role == seeking {
		m.unmet(meeting, err)
	}
}

// unmet: before the first start, a dial came to nothing. An agent of the job that refuses this one ends it. So
// does a stranger at the meeting place, unless it goes away: the job before may have the port still.
func (m *machine) unmet(meeting bool, err error) {
	refusal := (*wire.Refusal)(nil)
	refused := errors.As(err, &refusal) && !refusal.Both
	switch {
	case refused && refusal.Proven:
		m.fail(err.Error())
		return
	case !meeting:
		return
	case !refused:
		m.stranded = time.Time{}
	case m.stranded.IsZero():
		m.stranded = m.now
		m.stranger(refusal)
	case m.now.Sub(m.stranded) >= strangerTime:
		m.fail(err.Error())
		return
	}
	m.refused = err.Error()
	if m.now.Sub(m.begun) >= patience && m.now.Sub(m.moaned) >= mostPatience {
		m.moaned = m.now
		m.fx.log("no other agent was found yet at %s: %v", m.cfg.Seeds[0], err)
	}
}

// meet makes this agent the one at the meeting place: until the first start, it leads.
func (m *machine) meet() {
	m.meets = true
	if m.reg.index == 0 && m.role == seeking {
		m.setRole(leading, m.self.Name)
		m.gather = &gather{since: m.now, call: m.now}
	}
}

// onHints: the discovery has found others.
func (m *machine) onHints(found []Found) { m.hints = found }

// seek goes one step on in the search.
func (m *machine) seek() {
	if m.reg.index == 0 && (m.meets || len(m.cfg.Seeds) == 0 || m.cfg.Seeds[0] == m.self.Addr) {
		m.meet()
		return
	}
	for _, seed := range m.cfg.Seeds {
		m.dial(seed)
	}
	for _, f := range m.hints[:min(len(m.hints), tried)] {
		m.dial(f.Addr)
	}
	if m.reg.index == 0 {
		if m.now.Sub(m.begun) >= m.cfg.JoinTimeout {
			m.fail(m.nobody())
		}
		return
	}
	for _, p := range m.sorted() {
		if m.role == seeking {
			m.follow(p)
		}
	}
	if m.role == seeking {
		m.elect()
	}
	if m.role == seeking {
		m.giveUp()
	}
}

func (m *machine) nobody() string {
	last := ""
	if m.refused != "" {
		last = ": " + m.refused
	}
	return fmt.Sprintf("no agent of job %s was found in %v at %s%s", m.cfg.Job, m.cfg.JoinTimeout,
		strings.Join(m.cfg.Seeds, ", "), last)
}

// elect looks for the agent of the last world that should lead, and asks for votes if that is this one.
func (m *machine) elect() {
	for i, v := range m.candidates() {
		if v.Name == m.self.Name && i == 0 && !m.now.Before(m.yield) {
			m.stand()
		}
		if v.Name == m.self.Name || i == tried {
			return
		}
		m.dial(v.Addr)
		if p := m.peers[v.Name]; i == 0 && p != nil && m.now.Sub(maxTime(p.since, m.since)) > m.cfg.Silence+2*round {
			m.suspects[v.Name] = m.now.Add(2 * m.cfg.Silence) // it does not come to lead
		}
	}
}

// candidates lists the agents of the last world that may be alive, in the order in which they should lead.
func (m *machine) candidates() (there []Member) {
	hinted := map[string]bool{}
	for _, f := range m.hints {
		hinted[f.Name] = true
	}
	for _, v := range m.reg.voters() {
		_, suspect := m.suspects[v.Name]
		gone := len(hinted) > 0 && !hinted[v.Name] && m.peers[v.Name] == nil
		if v.Name == m.self.Name || !suspect && !gone {
			there = append(there, v)
		}
	}
	return there
}

// giveUp ends the job here when no leader was found for too long.
func (m *machine) giveUp() {
	since := maxTime(m.since, m.local.when)
	wait := m.cfg.RegroupTimeout
	if r := m.tally.Retries; r.Done >= r.Max { // the job has ended, and another agent may know how
		wait = min(wait, 2*m.cfg.Silence)
	}
	if m.local.running || m.now.Sub(since) < wait {
		return
	}
	if d := m.reg.accepted; d != nil && d.End != nil {
		// All that is missing is that somebody says so.
		m.finish(d, launch.Verdict{Result: d.End.result()})
		return
	}
	m.fail(m.noQuorum())
}

// noQuorum returns the fault of a side that has no quorum.
func (m *machine) noQuorum() string {
	w := m.world()
	n := 0
	var missing []string
	for _, v := range w.Agents {
		if v.Name == m.self.Name || m.peers[v.Name] != nil {
			n++
		} else if len(missing) < 8 {
			missing = append(missing, v.Host)
		}
	}
	return fmt.Sprintf("this side has %d of %d nodes: not enough to go on, since the others may do so. "+
		"No word of %s", n, len(w.Agents), strings.Join(missing, ", "))
}

func (m *machine) fail(why string) {
	if m.over {
		return
	}
	m.farewell(&bye{Status: launch.ExitFailed, Why: why, All: true})
	m.finished(over(launch.Result{ExitCode: launch.ExitFailed}, why))
}

// finished ends the job for this agent: its workers end if they run, and its caller gets the reason.
func (m *machine) finished(why *launch.Over) {
	m.over, m.local.fatal = true, why
	m.doom("the job has ended", -1)
	m.deliver()
}

// farewell sends the last message to all peers, and hangs up.
func (m *machine) farewell(b *bye) {
	msg := &message{Bye: b}
	for _, p := range m.sorted() {
		m.fx.send(msg, p.Name)
		m.fx.hangUp(p.Name)
	}
	clear(m.peers)
}

// tidy ends connections that have led to the leader and are of no further use.
func (m *machine) tidy() {
	for name, p := range m.peers {
		if p.via != "" && name != m.leader && m.now.Sub(p.since) > probing {
			delete(m.peers, name)
			m.fx.hangUp(name)
		}
	}
}

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
