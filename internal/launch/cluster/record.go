package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

const (
	// failureTime bounds the wait for the other agents' endings after the first failure of a start.
	failureTime = 90 * time.Second
	// finishTime bounds the same wait after the ranks of one node are done. Each launcher has a shorter limit.
	finishTime = launch.LastTime + time.Minute
	// listenTime bounds the wait for the ranks of a node to listen. The ranks wait a minute longer for their peers.
	listenTime = 4 * time.Minute
)

// A record is the leader's record of a start.
type record struct {
	world       *Assignment
	members     map[string]*part
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

// A part is the leader's record of one agent.
type part struct {
	Member
	addrs  []string
	ended  *ended
	lost   string // why it is lost; "": it is not
	failed int    // order of its first failure; 0: none
	absent bool   // it has not joined this new leader
}

func newRecord(w *Assignment, now time.Time) *record {
	r := &record{world: w, members: map[string]*part{}, since: now}
	for _, m := range w.Members {
		r.members[m.Name] = &part{Member: m}
	}
	return r
}

func (p *part) open() bool { return p != nil && p.ended == nil && p.lost == "" }

// end records how the start ended on an agent, and returns its part if that is new.
func (r *record) end(from string, e *ended, now time.Time) *part {
	p := r.members[from]
	if r.over || !p.open() {
		return nil
	}
	p.ended, p.absent = e, false
	if r.firstDone.IsZero() && !p.faulty() {
		r.firstDone = now
	}
	return p
}

// faulty reports whether the start failed on the agent.
func (p *part) faulty() bool {
	return p.ended != nil && (len(p.ended.Ending.Failures) > 0 || p.ended.Fault != "")
}

// fail records a failure of an agent, and reports whether it is the first of the start.
func (r *record) fail(p *part, now time.Time) (first bool) {
	if p.failed == 0 {
		r.failures++
		p.failed = r.failures
	}
	if !r.firstFailed.IsZero() {
		return false
	}
	r.firstFailed = now
	return true
}

// complete reports whether the start has ended on all agents.
func (r *record) complete() bool {
	for _, p := range r.members {
		if p.open() {
			return false
		}
	}
	return true
}

// addrs returns the addresses of all workers, once, when they are complete.
func (r *record) addrs() (all []string) {
	for _, m := range r.world.Members {
		p := r.members[m.Name]
		if p.addrs == nil {
			return nil
		}
		all = append(all, p.addrs...)
	}
	if r.addrsSent {
		return nil
	}
	r.addrsSent = true
	return all
}

// lostKeys returns the tally's keys of the lost nodes.
func (r *record) lostKeys() (keys []string) {
	for _, p := range r.members {
		if p.lost != "" {
			keys = append(keys, key(&p.Member))
		}
	}
	return keys
}

// cause returns the tally's key of the node with the first failure, or "".
func (r *record) cause(e launch.Ending) string {
	if len(e.Failures) == 0 {
		return ""
	}
	rank := e.Failures[0].Rank
	for _, m := range r.world.Members {
		if rank >= m.FirstRank && rank < m.FirstRank+m.NProc {
			return key(&m)
		}
	}
	return ""
}

// verdict turns the merged ending into a verdict.
func (r *record) verdict(t *tally, e launch.Ending) launch.Verdict {
	if r.stillborn && !e.Asked && !e.Forced && !e.Hung && e.Err == nil {
		v := launch.Verdict{Again: true}
		v.ExitCode, v.Failures, v.Restarts = launch.ExitFailed, e.Failures, t.Retries.Done
		if len(e.Failures) > 0 {
			v.First = &e.Failures[0]
		}
		return v
	}
	return t.Retries.Verdict(e)
}

// lost returns the failure that reports a lost agent with all its ranks.
func (m *Member) lost(why string, order int) launch.Failure {
	return launch.Failure{
		Rank: m.FirstRank, Ranks: m.NProc, Host: m.Host, Cause: why, Order: order,
		Hint: "check that the host is up, and read its system log; the logs of the other nodes contain the last step",
	}
}

// merge combines the endings of all agents. quiet says that the launcher of the agent self prints its own error.
func (r *record) merge(self string, quiet bool) launch.Ending {
	var all []launch.Ending
	for _, m := range r.world.Members {
		p := r.members[m.Name]
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
		e.Quiet = e.Quiet || p.Name == self && quiet
		all = append(all, e)
	}
	return launch.Merge(all...)
}

// overdue returns why the leader gives up on an agent's part of the start, or "". grace is the time in which it must
// join a new leader.
func (r *record) overdue(p *part, grace time.Duration, now time.Time) string {
	past := func(since time.Time, limit time.Duration) bool { return !since.IsZero() && now.Sub(since) > limit }
	switch {
	case !p.open():
	case p.absent && past(r.since, grace):
		return "the new leader cannot reach it"
	case past(r.firstFailed, failureTime):
		return fmt.Sprintf("it has not reported the end of the start in %v", failureTime)
	case past(r.firstDone, finishTime):
		return fmt.Sprintf("its ranks have not ended within %v after those of another node", finishTime)
	case p.addrs == nil && len(r.members) > 1 && past(r.since, listenTime):
		return fmt.Sprintf("its ranks do not listen after %v", listenTime)
	}
	return ""
}
