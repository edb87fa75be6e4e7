package cluster

import (
	"fmt"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

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
