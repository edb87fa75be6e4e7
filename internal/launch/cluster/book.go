package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// What the leader knows of a start: how it has ended on each agent, and so for the job.

// A run records a start on the leader.
type run struct {
	parts  map[string]*part
	since  time.Time // when this agent began to keep it
	over   bool      // the verdict is out
	failed time.Time // when the first failure was heard of; zero: none
	done   time.Time // when the first node was heard to have ended without one; zero: none
	order  int       // of first signs of failure, by agent
	stop   string    // signal and node of the first request to stop; "": none
	met    bool      // the addresses are out
	askers []string  // agents to send the standings to
	// stillborn: agents were gone when it was decided. Such a start does not count as one.
	stillborn bool
}

// A part records the start on one agent.
type part struct {
	Member
	addrs  []string
	ended  *ended
	lost   string // why it is lost; "": it is not
	failed int    // order of the first sign of failure; 0: none
	absent bool   // it has not come to this leader, who is new
}

// keep begins the book of a start that was just decided.
func (m *machine) keep(d *decision) {
	m.book(d)
	for _, a := range d.World.Agents {
		if a.Name != m.self.Name && !m.joined(a.Name) {
			m.run.stillborn = true
			m.strike(m.run.parts[a.Name], "it was gone before the start")
		}
	}
	m.deliver()
	m.settle()
}

func (m *machine) book(d *decision) {
	m.run = &run{parts: map[string]*part{}, since: m.now}
	for _, a := range d.World.Agents {
		m.run.parts[a.Name] = &part{Member: a}
	}
}

// takeOver continues the lost leader's work: the others join and report how the start ended for them.
func (m *machine) takeOver() {
	m.fx.log("this node leads the job now")
	m.tally = m.reg.last.Tally
	m.book(m.reg.last)
	for _, p := range m.run.parts {
		p.absent = p.Name != m.self.Name
	}
	if e := m.outcome(); e != nil {
		m.onEnded(m.self.Name, e)
	}
	m.deliver()
	m.settle()
}

// lost: a peer of this leader is gone.
func (m *machine) lost(p *peer, why string) {
	if r := m.run; r != nil && !r.over {
		if part := r.parts[p.Name]; part != nil && part.ended == nil && part.lost == "" {
			m.strike(part, why)
			m.settle()
		}
	}
}

// strike counts an agent as lost to the start, and tells the others.
func (m *machine) strike(p *part, why string) {
	p.lost = why
	m.failed(p, launch.News{Failed: &p.FirstRank, Lost: name(p.Member, m.world()) + " is lost: " + why})
}

// failed notes an agent's first sign of failure. The job's first failure goes to the other agents, since their workers
// may wait for ranks that are gone.
func (m *machine) failed(p *part, n launch.News) {
	r := m.run
	if p.failed == 0 {
		r.order++
		p.failed = r.order
	}
	if r.failed.IsZero() {
		r.failed = m.now
		m.relay(p.Name, n)
	}
}

// onEnded: the start has ended on an agent.
func (m *machine) onEnded(from string, e *ended) {
	r := m.run
	if m.role != leading || r == nil || r.over || e.Index != m.reg.index {
		return
	}
	p := r.parts[from]
	if p == nil || p.ended != nil || p.lost != "" {
		return
	}
	p.ended, p.absent = e, false
	if len(e.Ending.Failures) > 0 || e.Fault != "" {
		m.failed(p, launch.News{Failed: &p.FirstRank})
	} else if r.done.IsZero() {
		r.done = m.now
	}
	m.settle()
}

// settle gives the verdict when the start has ended on all agents.
func (m *machine) settle() {
	r := m.run
	if r == nil || r.over {
		return
	}
	for _, p := range r.parts {
		if p.ended == nil && p.lost == "" {
			return
		}
	}
	r.over = true
	e := m.merge()
	var lost []string
	for _, p := range r.parts {
		if p.lost != "" {
			lost = append(lost, key(&p.Member))
		}
	}
	cause := ""
	if len(e.Failures) > 0 {
		cause = m.placeOf(e.Failures[0].Rank)
	}
	t := m.tally
	t.note(cause, lost)
	v := m.judge(&t, e)
	m.tally = t
	m.gather = &gather{since: m.now, call: m.now}
	if !v.Again {
		m.conclusion(v)
		return
	}
	m.gather.again = &again{m.reg.index, t, int64(v.After)}
	msg := &message{Again: m.gather.again}
	for _, a := range m.world().Agents {
		if m.joined(a.Name) {
			m.fx.send(msg, a.Name)
		}
	}
	if m.local.ending {
		m.local.ending = false
		m.fx.verdict(v)
	}
	m.advance()
}

// judge turns an ending into a verdict.
func (m *machine) judge(t *tally, e launch.Ending) launch.Verdict {
	if m.run.stillborn && !e.Asked && !e.Forced && !e.Hung && e.Err == nil {
		v := launch.Verdict{Again: true}
		v.ExitCode, v.Failures, v.Restarts = launch.ExitFailed, e.Failures, t.Retries.Done
		if len(e.Failures) > 0 {
			v.First = &e.Failures[0]
		}
		return v
	}
	return t.Retries.Verdict(e)
}

func (m *machine) placeOf(rank int) string {
	for _, a := range m.world().Agents {
		if rank >= a.FirstRank && rank < a.FirstRank+a.NProc {
			return key(&a)
		}
	}
	return ""
}

// lost returns the failure that reports a lost agent, for all its ranks.
func (a *Member) lost(why string, order int) launch.Failure {
	return launch.Failure{
		Rank: a.FirstRank, Ranks: a.NProc, Host: a.Host, ExitCode: -1, Cause: why, Order: order,
		Hint: "see whether the host is up, and its log of the time; the last lines of the other nodes say how far " +
			"they came",
	}
}

// merge combines the endings of all agents.
func (m *machine) merge() launch.Ending {
	var all []launch.Ending
	parts := slices.Collect(func(yield func(*part) bool) {
		for _, a := range m.world().Agents {
			if !yield(m.run.parts[a.Name]) {
				return
			}
		}
	})
	for _, p := range parts {
		if p.lost != "" {
			all = append(all, launch.Ending{Failures: []launch.Failure{p.Member.lost(p.lost, p.failed<<16)}})
			continue
		}
		e := p.ended.Ending
		e.Failures = slices.Clone(e.Failures)
		for i := range e.Failures { // in the order in which the leader heard of them
			e.Failures[i].Order += cmp.Or(p.failed, 1<<16) << 16
		}
		if p.ended.Fault != "" && e.Err == nil {
			e.Err = errors.New(p.ended.Fault)
		}
		if p.Name == m.self.Name && m.local.quiet {
			e.Quiet = true
		}
		all = append(all, e)
	}
	return launch.Merge(all...)
}

// The end of a job, and of an agent.

// conclusion puts the end of the job forward, as v says it.
func (m *machine) conclusion(v launch.Verdict) {
	m.last = &v
	o := &outcome{ExitCode: v.ExitCode, Stopped: v.Stopped, Restarts: v.Restarts}
	if v.First != nil {
		f := *v.First
		f.Tail = nil
		o.First = &f
	}
	if v.Err != nil {
		o.Why = clip(v.Err.Error())
	}
	m.propose(&decision{World: *m.world(), Tally: m.tally, End: o})
}

func (m *machine) end(r launch.Result, why string) {
	if m.prop != nil && m.prop.value != nil {
		return
	}
	m.last = nil
	m.propose(&decision{World: *m.world(), Tally: m.tally, End: &outcome{
		ExitCode: r.ExitCode, Stopped: r.Stopped, Restarts: m.tally.Retries.Done, Why: clip(why),
	}})
}

// conclude: the end is decided. It waits a moment until the others have heard of it.
func (m *machine) conclude(d *decision) {
	m.telling = &telling{until: m.now.Add(tellingTime), left: map[string]bool{}}
	for _, p := range m.peers {
		m.telling.left[p.Name] = true
	}
	m.heard("")
}

// A telling records which agents have not confirmed the end of the job.
type telling struct {
	until time.Time
	left  map[string]bool // agents that have not confirmed
}

// heard: an agent knows of the end, or is gone.
func (m *machine) heard(name string) {
	t := m.telling
	if t == nil {
		return
	}
	delete(t.left, name)
	if len(t.left) > 0 && m.now.Before(t.until) {
		return
	}
	m.telling = nil
	d := m.reg.last
	v := launch.Verdict{Result: d.End.result()}
	if m.last != nil {
		v = *m.last
	}
	m.finish(d, v)
}

func (m *machine) onTold(from string, index int) {
	if m.reg.index == index {
		m.heard(from)
	}
}

// stuck ends the job here if the next decision finds no quorum.
func (m *machine) stuck() {
	p := m.prop
	if p == nil || !p.asking && p.value == nil {
		return
	}
	waited := m.now.Sub(p.pending)
	switch {
	case p.value != nil && p.value.End != nil && waited >= tellingTime:
		// The others may go on without this side. Its end is the same in any case.
		o := p.value.End
		v := launch.Verdict{Result: o.result()}
		if m.last != nil {
			v = *m.last
		}
		if m.local.ending {
			m.local.ending = false
			m.fx.verdict(v)
		}
		m.farewell(&bye{Status: o.ExitCode, Why: o.Why, All: true})
		m.finished(over(o.result(), o.Why))
	case waited >= m.cfg.RegroupTimeout:
		m.fail(m.noQuorum())
	}
}

// close: the caller of this agent has ended, with that status, and maybe a reason.
func (m *machine) close(status int, why string) {
	if m.quit != nil {
		return
	}
	m.quit, m.quitBy = &bye{Status: status, Why: clip(why)}, m.now.Add(2*tellingTime)
	if m.role == leading && m.idle() && status == launch.ExitStopped && !m.over {
		m.end(launch.Result{ExitCode: status, Stopped: true},
			fmt.Sprintf("node %s was asked to stop before the next start", m.self.Host))
	} else {
		m.quitBy = m.now
	}
	m.leave()
}

func (m *machine) leave() {
	if m.quit == nil || !m.over && m.now.Before(m.quitBy) {
		return
	}
	m.over = true
	m.farewell(m.quit)
	m.fx.gone()
}
