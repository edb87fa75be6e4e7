package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// The leader's record of a start, and the verdict for the job.

// A startRecord is the leader's record of a start.
type startRecord struct {
	members     map[string]*memberRecord
	since       time.Time // when this agent began the record
	over        bool      // the verdict is out
	firstFailed time.Time // time of the first failure; zero: none
	firstDone   time.Time // when the first node ended without a failure; zero: none
	failures    int       // number of agents with a failure
	stop        string    // signal and node of the first request to stop; "": none
	addrsSent   bool
	askers      []string // agents that want the wait states
	// stillborn: members were lost before the decision. Such a start does not count.
	stillborn bool
}

// A memberRecord is the leader's record of one agent.
type memberRecord struct {
	Member
	addrs  []string
	ended  *ended
	lost   string // why it is lost; "": it is not
	failed int    // order of its first failure; 0: none
	absent bool   // it has not joined this new leader
}

// beginStart begins the record of a start that was just decided.
func (c *coordinator) beginStart(d *decision) {
	c.newRecord(d)
	for _, a := range d.Assignment.Members {
		if a.Name != c.self.Name && !c.joined(a.Name) {
			c.record.stillborn = true
			c.markLost(c.record.members[a.Name], "it was lost before the start")
		}
	}
	c.deliver()
	c.decideVerdict()
}

func (c *coordinator) newRecord(d *decision) {
	c.record = &startRecord{members: map[string]*memberRecord{}, since: c.now}
	for _, a := range d.Assignment.Members {
		c.record.members[a.Name] = &memberRecord{Member: a}
	}
}

// takeOver continues the lost leader's work: the others join and report how the start ended for them.
func (c *coordinator) takeOver() {
	c.effects.log("this node now leads the job")
	c.tally = c.register.last.Tally
	c.newRecord(c.register.last)
	for _, p := range c.record.members {
		p.absent = p.Name != c.self.Name
	}
	if e := c.localEnding(); e != nil {
		c.onEnded(c.self.Name, e)
	}
	c.deliver()
	c.decideVerdict()
}

// onPeerLost records the loss of a member of the running start.
func (c *coordinator) onPeerLost(p *peer, why string) {
	if r := c.record; r != nil && !r.over {
		if part := r.members[p.Name]; part != nil && part.ended == nil && part.lost == "" {
			c.markLost(part, why)
			c.decideVerdict()
		}
	}
}

// markLost records an agent as lost to the start, and informs the others.
func (c *coordinator) markLost(p *memberRecord, why string) {
	p.lost = why
	c.failed(p, launch.News{Failed: &p.FirstRank, Lost: describeMember(p.Member, c.assignment()) + " is lost: " + why})
}

// failed records an agent's first failure. The job's first failure goes to the other agents, since their workers may
// wait for dead ranks.
func (c *coordinator) failed(p *memberRecord, n launch.News) {
	r := c.record
	if p.failed == 0 {
		r.failures++
		p.failed = r.failures
	}
	if r.firstFailed.IsZero() {
		r.firstFailed = c.now
		c.relayNews(p.Name, n)
	}
}

// onEnded records how the start ended on an agent.
func (c *coordinator) onEnded(from string, e *ended) {
	r := c.record
	if c.role != leading || r == nil || r.over || e.Index != c.register.index {
		return
	}
	p := r.members[from]
	if p == nil || p.ended != nil || p.lost != "" {
		return
	}
	p.ended, p.absent = e, false
	if len(e.Ending.Failures) > 0 || e.Fault != "" {
		c.failed(p, launch.News{Failed: &p.FirstRank})
	} else if r.firstDone.IsZero() {
		r.firstDone = c.now
	}
	c.decideVerdict()
}

// decideVerdict gives the verdict once the start has ended on all agents.
func (c *coordinator) decideVerdict() {
	r := c.record
	if r == nil || r.over {
		return
	}
	for _, p := range r.members {
		if p.ended == nil && p.lost == "" {
			return
		}
	}
	r.over = true
	e := c.merge()
	var lost []string
	for _, p := range r.members {
		if p.lost != "" {
			lost = append(lost, key(&p.Member))
		}
	}
	cause := ""
	if len(e.Failures) > 0 {
		cause = c.nodeKeyOf(e.Failures[0].Rank)
	}
	t := c.tally
	t.record(cause, lost)
	v := c.judge(&t, e)
	c.tally = t
	c.regroup = &regroup{since: c.now, lastJoin: c.now}
	if !v.Again {
		c.proposeVerdict(v)
		return
	}
	c.regroup.again = &again{c.register.index, t, int64(v.After)}
	msg := &message{Again: c.regroup.again}
	for _, a := range c.assignment().Members {
		if c.joined(a.Name) {
			c.effects.send(msg, a.Name)
		}
	}
	c.answerEnd(v)
	c.tryStart()
}

// judge turns an ending into a verdict.
func (c *coordinator) judge(t *tally, e launch.Ending) launch.Verdict {
	if c.record.stillborn && !e.Asked && !e.Forced && !e.Hung && e.Err == nil {
		v := launch.Verdict{Again: true}
		v.ExitCode, v.Failures, v.Restarts = launch.ExitFailed, e.Failures, t.Retries.Done
		if len(e.Failures) > 0 {
			v.First = &e.Failures[0]
		}
		return v
	}
	return t.Retries.Verdict(e)
}

func (c *coordinator) nodeKeyOf(rank int) string {
	for _, a := range c.assignment().Members {
		if rank >= a.FirstRank && rank < a.FirstRank+a.NProc {
			return key(&a)
		}
	}
	return ""
}

// lost returns the failure that reports a lost agent with all its ranks.
func (a *Member) lost(why string, order int) launch.Failure {
	return launch.Failure{
		Rank: a.FirstRank, Ranks: a.NProc, Host: a.Host, ExitCode: -1, Cause: why, Order: order,
		Hint: "check that the host is up, and read its system log; the logs of the other nodes contain the last step",
	}
}

func (c *coordinator) merge() launch.Ending {
	var all []launch.Ending
	for _, a := range c.assignment().Members {
		p := c.record.members[a.Name]
		if p.lost != "" {
			all = append(all, launch.Ending{Failures: []launch.Failure{p.Member.lost(p.lost, p.failed<<16)}})
			continue
		}
		e := p.ended.Ending
		e.Failures = slices.Clone(e.Failures)
		for i := range e.Failures { // in the order of the agents' first reports
			e.Failures[i].Order += cmp.Or(p.failed, 1<<16) << 16
		}
		if p.ended.Fault != "" && e.Err == nil {
			e.Err = errors.New(p.ended.Fault)
		}
		if p.Name == c.self.Name && c.caller.knowsError {
			e.Quiet = true
		}
		all = append(all, e)
	}
	return launch.Merge(all...)
}

// The end of a job and of an agent.

// proposeVerdict proposes to end the job with verdict v.
func (c *coordinator) proposeVerdict(v launch.Verdict) {
	c.verdict = &v
	o := &outcome{ExitCode: v.ExitCode, Stopped: v.Stopped, Restarts: v.Restarts}
	if v.First != nil {
		f := *v.First
		f.Tail = nil
		o.First = &f
	}
	if v.Err != nil {
		o.Why = clip(v.Err.Error())
	}
	c.propose(&decision{Assignment: *c.assignment(), Tally: c.tally, End: o})
}

func (c *coordinator) proposeEnd(r launch.Result, why string) {
	if c.proposal != nil && c.proposal.value != nil {
		return
	}
	c.verdict = nil
	c.propose(&decision{Assignment: *c.assignment(), Tally: c.tally, End: &outcome{
		ExitCode: r.ExitCode, Stopped: r.Stopped, Restarts: c.tally.Retries.Done, Why: clip(why),
	}})
}

// onEndDecided waits a moment for the other agents to confirm the decided end.
func (c *coordinator) onEndDecided(d *decision) {
	c.confirming = &confirmations{until: c.now.Add(confirmTime), missing: map[string]bool{}}
	for _, p := range c.peers {
		c.confirming.missing[p.Name] = true
	}
	c.confirmEnd("")
}

// A confirmations value records which agents have not confirmed the end of the job.
type confirmations struct {
	until   time.Time
	missing map[string]bool
}

// confirmEnd records that an agent knows the end, or is lost. After the last one, or the deadline, it finishes the job.
func (c *coordinator) confirmEnd(name string) {
	t := c.confirming
	if t == nil {
		return
	}
	delete(t.missing, name)
	if len(t.missing) > 0 && c.now.Before(t.until) {
		return
	}
	c.confirming = nil
	c.finish(c.register.last, c.finalVerdict(c.register.last.End))
}

// finalVerdict returns the job's verdict: with all failures if this agent proposed the end, else as the outcome
// records it.
func (c *coordinator) finalVerdict(o *outcome) launch.Verdict {
	if c.verdict != nil {
		return *c.verdict
	}
	return launch.Verdict{Result: o.result()}
}

// checkQuorum ends the job here if the next decision finds no quorum.
func (c *coordinator) checkQuorum() {
	p := c.proposal
	if p == nil || !p.asking && p.value == nil {
		return
	}
	waited := c.now.Sub(p.pending)
	switch {
	case p.value != nil && p.value.End != nil && waited >= confirmTime:
		// The others may continue without this side. The job ends here in any case.
		o := p.value.End
		c.answerEnd(c.finalVerdict(o))
		c.farewell(&bye{Status: o.ExitCode, Why: o.Why, All: true})
		c.endJob(over(o.result(), o.Why))
	case waited >= c.cfg.RegroupTimeout:
		c.fail(c.noQuorum())
	}
}

// close begins to leave the job with the launcher's exit status and optional reason.
func (c *coordinator) close(status int, why string) {
	if c.goodbye != nil {
		return
	}
	c.goodbye, c.goodbyeBy = &bye{Status: status, Why: clip(why)}, c.now.Add(2*confirmTime)
	if c.role == leading && c.idle() && status == launch.ExitStopped && !c.over {
		c.proposeEnd(launch.Result{ExitCode: status, Stopped: true},
			fmt.Sprintf("node %s was asked to stop before the next start", c.self.Host))
	} else {
		c.goodbyeBy = c.now
	}
	c.leave()
}

func (c *coordinator) leave() {
	if c.goodbye == nil || !c.over && c.now.Before(c.goodbyeBy) {
		return
	}
	c.over = true
	c.farewell(c.goodbye)
	c.effects.gone()
}
