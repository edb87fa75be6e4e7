package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// Following a leader, and serving this agent's launcher.

func (c *coordinator) onStatus(p *peer, s *status) {
	p.status = *s
	if s.Index < c.register.index {
		c.sendDecision(p)
		return
	}
	switch {
	case c.role == following && c.leader == p.Name && s.Leader.Name != p.Name:
		c.lostLeader(p, "it no longer leads")
		fallthrough
	case c.role == leading && c.outvoted(p):
		c.setRole(seeking, "")
		c.abortStart("the other nodes have elected another leader", -1)
		fallthrough
	case c.role == seeking || c.role == campaigning:
		c.follow(p)
	}
}

// outvoted reports whether p also leads, under a later ballot: the others elected it while they could not reach this
// agent.
func (c *coordinator) outvoted(p *peer) bool {
	s := &p.status
	return c.register.index > 0 && s.Index == c.register.index && s.Leader.Name == p.Name &&
		c.ballot.compare(s.Ballot) < 0
}

// follow takes p as the leader if it leads and knows all decisions of this agent. Otherwise it dials p's leader.
func (c *coordinator) follow(p *peer) {
	s := &p.status
	switch {
	case s.Leader.Name == "" || s.Leader.Name == c.self.Name:
	case s.Leader.Name != p.Name:
		c.dial(s.Leader.Addr)
	case s.Index >= c.register.index:
		c.setRole(following, p.Name)
		c.effects.send(&message{Join: &join{Ended: c.localEnding()}}, p.Name)
		c.deliver() // a start that arrived without a leader
	}
}

// localEnding returns how the last decision's start ended here, or nil.
func (c *coordinator) localEnding() *ended {
	if e := c.caller.ended; e != nil && e.Index == c.register.index {
		return e
	}
	return nil
}

// onRefuse ends this agent if the leader refuses it.
func (c *coordinator) onRefuse(p *peer, why string) {
	if c.role == following && c.leader == p.Name {
		c.fail(fmt.Sprintf("the leader, node %s at %s, refuses this node: %s", p.Host, p.Addr, why))
	}
}

func (c *coordinator) onBye(p *peer, b *bye) {
	why := cmp.Or(b.Why, fmt.Sprintf("its agent exited with status %d", b.Status))
	leads := c.role == following && p.Name == c.leader
	switch {
	case leads && b.All, leads && c.register.index == 0:
		c.farewell(&bye{Status: b.Status, Why: why})
		c.endJob(over(launch.Result{ExitCode: b.Status, Stopped: b.Status == launch.ExitStopped},
			fmt.Sprintf("node %s, the leader, has ended the job: %s", p.Host, why)))
		return
	case c.role == leading && b.Status == launch.ExitStopped && c.idle() && p.joined > 0 &&
		(c.register.index == 0 || c.firstRank(p.Name) >= 0):
		c.proposeEnd(launch.Result{ExitCode: launch.ExitStopped, Stopped: true},
			fmt.Sprintf("node %s was asked to stop before the next start", p.Host))
	}
	c.down(p.Name, why)
	c.effects.hangUp(p.Name)
}

func (c *coordinator) onAgain(p *peer, a *again) {
	if c.role != following || p.Name != c.leader || a.Index != c.register.index {
		return
	}
	c.tally = a.Tally
	if c.caller.ending && c.caller.start == a.Index {
		c.answerEnd(launch.Verdict{
			Result: launch.Result{ExitCode: launch.ExitFailed, Restarts: a.Tally.Retries.Done},
			Again:  true, After: time.Duration(a.After), ReportedElsewhere: true,
		})
		return
	}
	c.abortStart("the other nodes have ended this start", -1)
}

func (c *coordinator) onJobEnded(d *decision) {
	c.finish(d, launch.Verdict{Result: d.End.result(), ReportedElsewhere: true})
}

// finish ends the job for this agent's launcher, with verdict v if it is in End.
func (c *coordinator) finish(d *decision, v launch.Verdict) {
	if c.over {
		return
	}
	c.answerEnd(v)
	why := d.End.Why
	if why == "" && d.End.First != nil {
		why = "the job has ended: " + d.End.First.Error()
	}
	end := over(d.End.result(), why)
	if c.prepareErr != nil { // the launcher knows its own error
		end.Why, end.Err = "", c.prepareErr
	}
	c.endJob(end)
	c.leave()
}

// next handles the launcher's wait for the next start.
func (c *coordinator) next() {
	c.caller.waiting = true
	c.deliver()
}

// deliver gives the launcher the start, verdict or end that it waits for, if there is one.
func (c *coordinator) deliver() {
	l := &c.caller
	switch d := c.register.last; {
	case l.ending && l.fatal != nil:
		v := launch.Verdict{Result: l.fatal.Result}
		switch {
		case v.ExitCode != launch.ExitFailed || v.First != nil:
		case l.start == c.leaderLossAt: // the cause first
			e := launch.Merge(l.ended.Ending, launch.Ending{Failures: []launch.Failure{c.leaderLoss}})
			v.Failures, v.First, v.Notes = e.Failures, &e.Failures[0], []string{l.fatal.Error()}
		default:
			v.Err = errors.New(l.fatal.Error())
		}
		c.answerEnd(v)
	case l.ending && d != nil && d.Index > l.start && d.End == nil:
		c.answerEnd(launch.Verdict{
			Result: launch.Result{ExitCode: launch.ExitFailed, Restarts: d.Tally.Retries.Done},
			Again:  true, ReportedElsewhere: true,
		})
	case l.waiting && l.fatal != nil:
		l.waiting = false
		c.effects.over(l.fatal)
	case l.waiting && d != nil && d.Index > l.start && d.Assignment.index(c.self.Name) >= 0 &&
		(c.role == following || c.role == leading):
		early := l.pending
		*l = caller{start: d.Index, running: true, endedAt: l.endedAt}
		c.effects.begin(d)
		for _, n := range early {
			c.effects.news(n)
		}
	}
}

// answerEnd gives the launcher v if it is in End.
func (c *coordinator) answerEnd(v launch.Verdict) {
	if c.caller.ending {
		c.caller.ending = false
		c.effects.verdict(v)
	}
}

// deliverNews gives the launcher news of the last decision's start, once it has begun that start.
func (c *coordinator) deliverNews(n launch.News) {
	const most = 8
	l := &c.caller
	switch {
	case l.running && l.start == c.register.index:
		c.effects.news(n)
	case l.start < c.register.index && len(l.pending) < most:
		l.pending = append(l.pending, n)
	}
}

func (c *coordinator) onLocalEnd(e launch.Ending) {
	l := &c.caller
	if !l.running {
		return
	}
	l.running, l.ending, l.knowsError, l.endedAt = false, true, e.Quiet, c.now
	l.ended = &ended{Index: l.start, Ending: trim(e)}
	if e.Err != nil {
		l.ended.Fault = clip(fmt.Sprintf("node %s: %v", c.self.Host, e.Err))
	}
	switch {
	case l.start != c.register.index || c.over:
		c.deliver()
	case c.role == leading:
		c.onEnded(c.self.Name, l.ended)
	case c.role == following:
		c.effects.send(&message{Ended: l.ended}, c.leader)
	}
}

// publish passes the launcher's news of its start to the leader.
func (c *coordinator) publish(n launch.News) {
	l := &c.caller
	if !l.running || l.start != c.register.index || c.over {
		return
	}
	switch c.role {
	case leading:
		c.onNews(c.self.Name, &relayed{l.start, n})
	case following:
		c.effects.send(&message{News: &relayed{l.start, n}}, c.leader)
	}
}

// trim cuts an ending to the size of a message. Likely causes come first; the first few keep their last lines.
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
			truncateWaits(&fs[i])
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

// clip cuts a text to the length allowed in messages.
func clip(s string) string {
	if len(s) > maxText/2 {
		return s[:maxText/2]
	}
	return s
}

// Wait states of all ranks: an agent asks, all agents answer, and the answers go to the askers.

// onAsked relays an agent's question for the wait states of all ranks.
func (c *coordinator) onAsked(from string) {
	if r := c.record; !slices.Contains(r.askers, from) {
		r.askers = append(r.askers, from)
	}
	c.relayNews(from, launch.News{Ask: true})
}

// onWaitStates sends an agent's wait states to the askers.
func (c *coordinator) onWaitStates(from string, n launch.News) {
	for _, name := range c.record.askers {
		switch {
		case name == from:
		case name == c.self.Name:
			c.deliverNews(n)
		case c.joined(name):
			c.effects.send(&message{News: &relayed{c.register.index, n}}, name)
		}
	}
}

// truncateWaits cuts a rank's wait state to its first wait, with few peers.
func truncateWaits(f *launch.Failure) {
	const most = 8
	if f.WaitState == nil || len(f.WaitState.Waits) == 0 {
		return
	}
	s := *f.WaitState
	w := s.Waits[0]
	w.More += max(len(w.Open)-most, 0)
	w.Open = w.Open[:min(len(w.Open), most)]
	s.Waits = append(s.Waits[:0:0], w)
	f.WaitState = &s
}
