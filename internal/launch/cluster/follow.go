package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// Following a leader, and serving this agent's caller.

// onStatus takes a peer's index and leader.
func (m *machine) onStatus(p *peer, s *status) {
	p.status = *s
	if s.Index < m.reg.index {
		m.teach(p)
		return
	}
	switch {
	case m.role == following && m.leader == p.Name && s.Leader.Name != p.Name:
		m.lostLeader(p, "it gave up the lead")
		fallthrough
	case m.role == leading && m.outvoted(p):
		m.setRole(seeking, "")
		m.doom("the other nodes have elected another one to lead", -1)
		fallthrough
	case m.role == seeking || m.role == campaigning:
		m.follow(p)
	}
}

// outvoted reports whether p also leads, under a later ballot: the others have elected it while this agent
// could not be heard.
func (m *machine) outvoted(p *peer) bool {
	s := &p.status
	return m.reg.index > 0 && s.Index == m.reg.index && s.Leader.Name == p.Name && m.under.compare(s.Ballot) < 0
}

// follow takes p for the leader if it leads, and knows all that this agent knows; else it goes where p says.
func (m *machine) follow(p *peer) {
	s := &p.status
	switch {
	case s.Leader.Name == "" || s.Leader.Name == m.self.Name:
	case s.Leader.Name != p.Name:
		m.dial(s.Leader.Addr)
	case s.Index >= m.reg.index:
		m.setRole(following, p.Name)
		m.fx.send(&message{Join: &join{Ended: m.outcome()}}, p.Name)
		m.deliver() // a start that came while there was no leader
	}
}

// outcome returns the ending of the last decision's start here, or nil.
func (m *machine) outcome() *ended {
	if e := m.local.ended; e != nil && e.Index == m.reg.index {
		return e
	}
	return nil
}

// onRefuse: the leader does not take this agent.
func (m *machine) onRefuse(p *peer, why string) {
	if m.role == following && m.leader == p.Name {
		m.fail(fmt.Sprintf("node %s at %s, which leads, refuses this one: %s", p.Host, p.Addr, why))
	}
}

// onBye: a peer leaves.
func (m *machine) onBye(p *peer, b *bye) {
	why := cmp.Or(b.Why, fmt.Sprintf("its agent has ended with status %d", b.Status))
	leads := m.role == following && p.Name == m.leader
	switch {
	case leads && b.All, leads && m.reg.index == 0:
		m.farewell(&bye{Status: b.Status, Why: why})
		m.finished(over(launch.Result{ExitCode: b.Status, Stopped: b.Status == launch.ExitStopped},
			fmt.Sprintf("node %s, which led, has ended the job: %s", p.Host, why)))
		return
	case m.role == leading && b.Status == launch.ExitStopped && m.idle() && p.joined > 0 &&
		(m.reg.index == 0 || m.firstRank(p.Name) >= 0):
		m.end(launch.Result{ExitCode: launch.ExitStopped, Stopped: true},
			fmt.Sprintf("node %s was asked to stop before the next start", p.Host))
	}
	m.down(p.Name, why)
	m.fx.hangUp(p.Name)
}

// onAgain: the start has ended, and another one follows.
func (m *machine) onAgain(p *peer, a *again) {
	if m.role != following || p.Name != m.leader || a.Index != m.reg.index {
		return
	}
	m.tally = a.Tally
	if m.local.ending && m.local.begun == a.Index {
		m.local.ending = false
		m.fx.verdict(launch.Verdict{
			Result: launch.Result{ExitCode: launch.ExitFailed, Restarts: a.Tally.Retries.Done},
			Again:  true, After: time.Duration(a.After), Told: true,
		})
		return
	}
	m.doom("the other nodes have given this start up", -1)
}

// ended: the job has.
func (m *machine) ended(d *decision) {
	m.finish(d, launch.Verdict{Result: d.End.result(), Told: true})
}

// finish ends the job for the caller of this agent, with verdict v if it waits for one.
func (m *machine) finish(d *decision, v launch.Verdict) {
	if m.over {
		return
	}
	if m.local.ending {
		m.local.ending = false
		m.fx.verdict(v)
	}
	why := d.End.Why
	if why == "" && d.End.First != nil {
		why = "the job has ended: " + d.End.First.Error()
	}
	end := over(d.End.result(), why)
	if m.cause != nil { // its own caller's, who knows it
		end.Why, end.Err = "", m.cause
	}
	m.finished(end)
	m.leave()
}

// next: the caller waits for the next start.
func (m *machine) next() {
	m.local.waiting = true
	m.deliver()
}

// deliver hands the caller a start, a verdict or the end, if it waits for one that has come.
func (m *machine) deliver() {
	l := &m.local
	switch d := m.reg.last; {
	case l.ending && l.fatal != nil:
		l.ending = false
		v := launch.Verdict{Result: l.fatal.Result}
		switch {
		case v.ExitCode != launch.ExitFailed || v.First != nil:
		case l.begun == m.orphanedAt: // the cause first
			e := launch.Merge(l.ended.Ending, launch.Ending{Failures: []launch.Failure{m.orphaned}})
			v.Failures, v.First, v.Notes = e.Failures, &e.Failures[0], []string{l.fatal.Error()}
		default:
			v.Err = errors.New(l.fatal.Error())
		}
		m.fx.verdict(v)
	case l.ending && d != nil && d.Index > l.begun && d.End == nil:
		l.ending = false
		m.fx.verdict(launch.Verdict{
			Result: launch.Result{ExitCode: launch.ExitFailed, Restarts: d.Tally.Retries.Done}, Again: true, Told: true,
		})
	case l.waiting && l.fatal != nil:
		l.waiting = false
		m.fx.over(l.fatal)
	case l.waiting && d != nil && d.Index > l.begun && d.World.index(m.self.Name) >= 0 &&
		(m.role == following || m.role == leading):
		early := l.early
		*l = local{begun: d.Index, running: true, when: l.when}
		m.fx.begin(d)
		for _, n := range early {
			m.fx.news(n)
		}
	}
}

// hear hands the caller news of the start of the last decision, when it has begun.
func (m *machine) hear(n launch.News) {
	const most = 8
	l := &m.local
	switch {
	case l.running && l.begun == m.reg.index:
		m.fx.news(n)
	case l.begun < m.reg.index && len(l.early) < most:
		l.early = append(l.early, n)
	}
}

// endHere takes the ending of the caller's start.
func (m *machine) endHere(e launch.Ending) {
	l := &m.local
	if !l.running {
		return
	}
	l.running, l.ending, l.quiet, l.when = false, true, e.Quiet, m.now
	l.ended = &ended{Index: l.begun, Ending: trim(e)}
	if e.Err != nil {
		l.ended.Fault = clip(fmt.Sprintf("node %s: %v", m.self.Host, e.Err))
	}
	switch {
	case l.begun != m.reg.index || m.over:
		m.deliver()
	case m.role == leading:
		m.onEnded(m.self.Name, l.ended)
	case m.role == following:
		m.fx.send(&message{Ended: l.ended}, m.leader)
	}
}

// say passes the caller's news of its start to the leader.
func (m *machine) say(n launch.News) {
	l := &m.local
	if !l.running || l.begun != m.reg.index || m.over {
		return
	}
	switch m.role {
	case leading:
		m.onNews(m.self.Name, &relayed{l.begun, n})
	case following:
		m.fx.send(&message{News: &relayed{l.begun, n}}, m.leader)
	}
}

// trim cuts an ending to the size of a message: the failures that caused the others first, with
// their last lines if there are not many.
func trim(e launch.Ending) launch.Ending {
	const most, tailed = 256, 16
	fs := make([]launch.Failure, min(len(e.Failures), most))
	copy(fs, e.Failures)
	for i := range fs {
		fs[i].Cause, fs[i].Hint = clip(fs[i].Cause), clip(fs[i].Hint)
		if i >= tailed || size(fs[i].Tail) > 4*maxText {
			fs[i].Tail = nil
		}
		if i >= tailed {
			brief(&fs[i])
		}
	}
	e.Failures = fs
	return e
}

func size(lines []string) (n int) {
	for _, l := range lines {
		n += len(l)
	}
	return n
}

// clip cuts a text at the length that messages may have.
func clip(s string) string {
	if len(s) > maxText/2 {
		return s[:maxText/2]
	}
	return s
}

// The waits of a start's ranks: an agent asks, all answer, and the answers go to the askers.

// onAsked: an agent's user wants to know what all ranks wait for.
func (m *machine) onAsked(from string) {
	if r := m.run; !slices.Contains(r.askers, from) {
		r.askers = append(r.askers, from)
	}
	m.relay(from, launch.News{Ask: true})
}

// onStandings: an agent says what its ranks wait for.
func (m *machine) onStandings(from string, n launch.News) {
	for _, name := range m.run.askers {
		switch {
		case name == from:
		case name == m.self.Name:
			m.hear(n)
		case m.joined(name):
			m.fx.send(&message{News: &relayed{m.reg.index, n}}, name)
		}
	}
}

// brief cuts what a rank has said of its waits down to the first, of few ranks.
func brief(f *launch.Failure) {
	const most = 8
	if f.Standing == nil || len(f.Standing.Waits) == 0 {
		return
	}
	s := *f.Standing
	w := s.Waits[0]
	w.More += max(len(w.Open)-most, 0)
	w.Open = w.Open[:min(len(w.Open), most)]
	s.Waits = append(s.Waits[:0:0], w)
	f.Standing = &s
}
