package cluster

import (
	"fmt"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// A claim is a decision on its way to the run directory.
type claim struct {
	value *decision
	since time.Time
	busy  bool      // the run directory is asked
	next  time.Time // earliest time of the next attempt
	fault error     // of the last one
}

// propose makes d the next decision. The run directory decides between leaders that cannot reach each other.
func (l *leadership) propose(d *decision) {
	if l.claim != nil {
		return
	}
	d.Index, d.Leader = l.index+1, PeerAddr{l.self.Name, l.self.Addr}
	l.claim = &claim{value: d, since: l.now}
	l.tryClaim()
}

// tryClaim records the decision in the run directory while a quorum follows this leader, and gives up after
// RegroupTimeout.
func (l *leadership) tryClaim() {
	p := l.claim
	if p == nil {
		return
	}
	waited := l.now.Sub(p.since)
	switch end := p.value.End; {
	case l.index == 0 && end != nil: // without a first start, there is no run directory
		l.decided(p.value)
	case end != nil && waited >= endTime && (p.busy || p.fault != nil || !l.quorum()):
		// The job ends here in any case, whether others continue or the run directory fails.
		l.caller.answer(l.verdict)
		l.endJob(over(end.result(), end.Why), &bye{Status: end.ExitCode, Why: end.Why, All: true})
	case waited >= l.cfg.RegroupTimeout:
		switch why := "the run directory does not take the decision about the next start: "; {
		case p.fault != nil:
			l.fail(why + p.fault.Error())
		case p.busy:
			l.fail(fmt.Sprintf("%sno answer in %v", why, waited.Round(time.Second)))
		default:
			l.fail(l.noQuorum(l.self.Name, l.peers))
		}
	case !p.busy && !l.now.Before(p.next) && l.quorum():
		p.busy = true
		payload := p.value.Payload
		if end != nil {
			payload = l.last.Payload
		}
		l.effects.claim(payload, p.value)
	}
}

// decided handles a decision that this agent has claimed, and informs the others.
func (l *leadership) decided(d *decision) {
	if !l.learn(d) {
		return
	}
	l.regroup, l.claim = nil, nil
	msg := &message{Decided: d}
	for _, p := range l.peers.sorted() {
		l.effects.send(msg, p.Name)
		p.status.Index = d.Index
	}
	if d.End != nil {
		l.finish(l.verdict, l.prepareErr)
		return
	}
	l.record = newRecord(&d.Assignment, l.now)
	for _, m := range d.Assignment.Members {
		if m.Name != l.self.Name && !l.peers.joined(m.Name) {
			l.record.stillborn = true
			l.markLost(l.record.members[m.Name], "it was lost before the start")
		}
	}
	l.serve()
	l.judge()
}

// proposeVerdict proposes to end the job with verdict v.
func (l *leadership) proposeVerdict(v launch.Verdict) {
	o := &outcome{ExitCode: v.ExitCode, Stopped: v.Stopped, Restarts: v.Restarts}
	if v.First != nil {
		f := *v.First
		f.Tail = nil
		o.First = &f
	}
	if v.Err != nil {
		o.Why = clip(v.Err.Error())
	}
	l.end(o, v)
}

func (l *leadership) end(o *outcome, v launch.Verdict) {
	if l.claim == nil {
		l.verdict = v
		l.propose(&decision{Assignment: *l.world(), Tally: l.tally, End: o})
	}
}

func (l *leadership) proposeEnd(r launch.Result, why string) {
	o := &outcome{ExitCode: r.ExitCode, Stopped: r.Stopped, Restarts: l.tally.Retries.Done, Why: clip(why)}
	l.end(o, o.verdict())
}

// askedToStop returns the end of a job that the user of a node has stopped between two starts.
func askedToStop(host string) (launch.Result, string) {
	return launch.Result{ExitCode: launch.ExitStopped, Stopped: true},
		fmt.Sprintf("node %s was asked to stop before the next start", host)
}
