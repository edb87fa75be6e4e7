package cluster

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/cluster/wire"
)

// An agent without a leader looks for one at the seeds, among discovered agents and, after the first start, among the
// members of the last assignment. The first reachable member asks the others for votes.

const (
	// The wait after a failed dial starts at minRedial and doubles up to maxRedial.
	minRedial = 200 * time.Millisecond
	maxRedial = 2 * time.Second
	// maxDials bounds the concurrent dials: a lost host may take seconds to time out.
	maxDials = 3
	// foreignTime bounds the wait while a foreign process answers at the rendezvous.
	foreignTime = 30 * time.Second
	// After firstWarning the user is warned that no agent was found, and again every warningInterval.
	firstWarning, warningInterval = 10 * time.Second, time.Minute
	// A leader dials the seeds every probeInterval, for agents that look for the job there,
	probeInterval = 5 * time.Second
	// and every idleProbeInterval while no start runs.
	idleProbeInterval = 500 * time.Millisecond
)

// A dialing records the attempts to connect to an address.
type dialing struct {
	on    bool
	tries int
	next  time.Time
}

// dial connects to an address, unless a dial is in progress or failed a moment ago.
func (c *coordinator) dial(addr string) {
	if addr == c.self.Addr || c.connected(addr) {
		return
	}
	d := c.dials[addr]
	if d == nil {
		d = new(dialing)
		c.dials[addr] = d
	}
	if d.on || c.now.Before(d.next) {
		return
	}
	d.on = true
	c.effects.dial(addr)
}

func (c *coordinator) connected(addr string) bool {
	for _, p := range c.peers {
		if p.Addr == addr || p.via == addr {
			return true
		}
	}
	return false
}

func (c *coordinator) dialed(addr string, err error) {
	d := c.dials[addr]
	if d == nil {
		d = new(dialing)
		c.dials[addr] = d
	}
	d.on = false
	d.next = c.now.Add(min(maxRedial, minRedial<<min(d.tries, 5)))
	d.tries++
	if c.over || err == nil {
		return
	}
	rendezvous := len(c.cfg.Seeds) > 0 && addr == c.cfg.Seeds[0]
	if errors.Is(err, wire.ErrSelf) {
		d.next = c.now.Add(time.Hour)
		if rendezvous {
			c.leadAtRendezvous()
		}
		return
	}
	for _, v := range c.register.voters() {
		if v.Addr == addr {
			c.suspects[v.Name] = c.now.Add(2 * c.cfg.Silence)
		}
	}
	if c.register.index == 0 && c.role == seeking {
		c.seekFailed(rendezvous, err)
	}
}

// seekFailed handles a failed dial before the first start. A refusal by an agent of the job ends this agent. So does a
// foreign process at the rendezvous, unless it leaves: the previous job may still use the port.
func (c *coordinator) seekFailed(rendezvous bool, err error) {
	refusal := (*wire.Refusal)(nil)
	refused := errors.As(err, &refusal) && !errors.Is(err, wire.ErrBoth)
	switch {
	case refused && refusal.Proven:
		c.fail(err.Error())
		return
	case !rendezvous:
		return
	case !refused:
		c.foreignSince = time.Time{}
	case c.foreignSince.IsZero():
		c.foreignSince = c.now
		c.logForeign(refusal)
	case c.now.Sub(c.foreignSince) >= foreignTime:
		c.fail(err.Error())
		return
	}
	c.lastRefusal = err.Error()
	if c.now.Sub(c.startedAt) >= firstWarning && c.now.Sub(c.warnedAt) >= warningInterval {
		c.warnedAt = c.now
		c.effects.log("no agent of the job answers at %s yet: %v", c.cfg.Seeds[0], err)
	}
}

// leadAtRendezvous makes this agent the leader until the first start, since it is at the rendezvous.
func (c *coordinator) leadAtRendezvous() {
	c.atRendezvous = true
	if c.register.index == 0 && c.role == seeking {
		c.setRole(leading, c.self.Name)
		c.regroup = &regroup{since: c.now, lastJoin: c.now}
	}
}

// seek performs the periodic search for a leader.
func (c *coordinator) seek() {
	if c.register.index == 0 && (c.atRendezvous || len(c.cfg.Seeds) == 0 || c.cfg.Seeds[0] == c.self.Addr) {
		c.leadAtRendezvous()
		return
	}
	for _, seed := range c.cfg.Seeds {
		c.dial(seed)
	}
	for _, f := range c.hints[:min(len(c.hints), maxDials)] {
		c.dial(f.Addr)
	}
	if c.register.index == 0 {
		if c.now.Sub(c.startedAt) >= c.cfg.JoinTimeout {
			c.fail(c.noneFound())
		}
		return
	}
	for _, p := range c.sorted() {
		if c.role == seeking {
			c.follow(p)
		}
	}
	if c.role == seeking {
		c.elect()
	}
	if c.role == seeking {
		c.giveUp()
	}
}

// noneFound returns the error of a search without a result.
func (c *coordinator) noneFound() string {
	last := ""
	if c.lastRefusal != "" {
		last = ": " + c.lastRefusal
	}
	return fmt.Sprintf("no agent of job %s answered in %v at %s%s", c.cfg.Job, c.cfg.JoinTimeout,
		strings.Join(c.cfg.Seeds, ", "), last)
}

// elect looks for the member of the last assignment that should lead, and asks for votes if that is this agent.
func (c *coordinator) elect() {
	for i, v := range c.candidates() {
		if v.Name == c.self.Name && i == 0 && !c.now.Before(c.yieldUntil) {
			c.startElection()
		}
		if v.Name == c.self.Name || i == maxDials {
			return
		}
		c.dial(v.Addr)
		p := c.peers[v.Name]
		if i == 0 && p != nil && min(c.now.Sub(p.since), c.now.Sub(c.seekingSince)) > c.cfg.Silence+2*voteRound {
			c.suspects[v.Name] = c.now.Add(2 * c.cfg.Silence) // it does not start to lead
		}
	}
}

// candidates lists the members of the last assignment that may be alive, in the order in which they should lead.
func (c *coordinator) candidates() (alive []Member) {
	hinted := map[string]bool{}
	for _, f := range c.hints {
		hinted[f.Name] = true
	}
	for _, v := range c.register.voters() {
		_, suspect := c.suspects[v.Name]
		gone := len(hinted) > 0 && !hinted[v.Name] && c.peers[v.Name] == nil
		if v.Name == c.self.Name || !suspect && !gone {
			alive = append(alive, v)
		}
	}
	return alive
}

// giveUp ends the job here if no leader was found for too long.
func (c *coordinator) giveUp() {
	waited := min(c.now.Sub(c.seekingSince), c.now.Sub(c.caller.endedAt))
	wait := c.cfg.RegroupTimeout
	if r := c.tally.Retries; r.Done >= r.Max { // the job has ended, and another agent may know how
		wait = min(wait, 2*c.cfg.Silence)
	}
	if c.caller.running || waited < wait {
		return
	}
	if d := c.register.accepted; d != nil && d.End != nil {
		// Only the confirmation is missing.
		c.finish(d, launch.Verdict{Result: d.End.result()})
		return
	}
	c.fail(c.noQuorum())
}

// noQuorum returns the error of a side without a quorum.
func (c *coordinator) noQuorum() string {
	w := c.assignment()
	n := 0
	var missing []string
	for _, v := range w.Members {
		if v.Name == c.self.Name || c.peers[v.Name] != nil {
			n++
		} else if len(missing) < 8 {
			missing = append(missing, v.Host)
		}
	}
	return fmt.Sprintf("this side has %d of %d nodes: not enough to go on, since the others may do so. "+
		"Not connected: %s", n, len(w.Members), strings.Join(missing, ", "))
}

func (c *coordinator) fail(why string) {
	if c.over {
		return
	}
	c.farewell(&bye{Status: launch.ExitFailed, Why: why, All: true})
	c.endJob(over(launch.Result{ExitCode: launch.ExitFailed}, why))
}

// endJob ends the job for this agent: running workers end, and its launcher gets the reason.
func (c *coordinator) endJob(why *launch.Over) {
	c.over, c.caller.fatal = true, why
	c.abortStart("the job has ended", -1)
	c.deliver()
}

// farewell sends the last message to all peers and closes their connections.
func (c *coordinator) farewell(b *bye) {
	msg := &message{Bye: b}
	for _, p := range c.sorted() {
		c.effects.send(msg, p.Name)
		c.effects.hangUp(p.Name)
	}
	clear(c.peers)
}

// closeExtraLinks closes dialed connections that led to the leader and are no longer needed.
func (c *coordinator) closeExtraLinks() {
	for name, p := range c.peers {
		if p.via != "" && name != c.leader && c.now.Sub(p.since) > probeInterval {
			delete(c.peers, name)
			c.effects.hangUp(name)
		}
	}
}
