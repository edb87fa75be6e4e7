package cluster

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// The leader admits agents, records how a start ends on each, and proposes the next decision.

const (
	// confirmTime bounds the leader's wait for all agents to confirm the end of the job.
	confirmTime = 2 * time.Second
	// failureTime bounds the wait for the other agents' endings after the first failure of a start.
	failureTime = 90 * time.Second
	// finishTime bounds the same wait after the ranks of one node are done. Each launcher has a shorter limit.
	finishTime = launch.LastTime + time.Minute
	// listenTime bounds the wait for the ranks of a node to listen. The ranks wait a minute longer for their peers.
	listenTime = 4 * time.Minute
)

// joined reports whether a peer is connected and admitted.
func (c *coordinator) joined(name string) bool {
	p := c.peers[name]
	return p != nil && p.joined > 0
}

// onJoin admits an agent, for the first time or again.
func (c *coordinator) onJoin(p *peer, j *join) {
	if c.role != leading {
		s := c.status()
		c.effects.send(&message{Status: &s}, p.Name)
		return
	}
	if why := c.refusal(p); why != "" {
		c.hold(p, j, why)
		return
	}
	p.held = nil
	if p.joined == 0 {
		c.joins++
		p.joined = c.joins
		if c.regroup != nil {
			c.regroup.lastJoin = c.now
		}
	}
	if r := c.record; r != nil && r.members[p.Name] != nil {
		r.members[p.Name].absent = false
		c.resendNews(p)
	} else if c.register.index > 0 {
		c.note(p.Name, "this node is a spare: it waits for the next start of the workers")
	}
	if j.Ended != nil {
		c.onEnded(p.Name, j.Ended)
	}
	c.tryStart()
}

// hold keeps an agent waiting whose rank belongs to another agent, since that one may be lost but not yet detected.
// After two timeouts it refuses the agent: the key alone gives no right to a rank.
func (c *coordinator) hold(p *peer, j *join, why string) {
	p.held = j
	if c.now.Sub(p.since) < 2*c.cfg.Silence {
		return
	}
	c.effects.log("node %s at %s is refused: %s", p.Host, p.Addr, why)
	c.effects.send(&message{Refuse: &why}, p.Name)
	c.effects.hangUp(p.Name)
	delete(c.peers, p.Name)
}

// resendNews sends a returning agent the news of the current start that it missed.
func (c *coordinator) resendNews(p *peer) {
	r := c.record
	switch {
	case r.over && c.regroup != nil && c.regroup.again != nil:
		c.effects.send(&message{Again: c.regroup.again}, p.Name)
	case r.over || r.firstFailed.IsZero():
	default:
		for _, a := range c.assignment().Members {
			if part := r.members[a.Name]; part.failed == 1 {
				n := launch.News{Failed: &part.FirstRank, Lost: part.lost}
				c.effects.send(&message{News: &relayed{c.register.index, n}}, p.Name)
			}
		}
	}
}

// refusal returns the reason to refuse an agent, or "".
func (c *coordinator) refusal(p *peer) string {
	if p.NodeRank < 0 {
		return ""
	}
	if p.NodeRank >= c.cfg.Max {
		return fmt.Sprintf("it requests node rank %d of at most %d nodes", p.NodeRank, c.cfg.Max)
	}
	holder := Member{}
	if c.self.NodeRank == p.NodeRank {
		holder = c.self
	}
	for _, q := range c.peers {
		if q.joined > 0 && q.Name != p.Name && q.NodeRank == p.NodeRank {
			holder = q.Member
		}
	}
	if holder.Name == "" {
		return ""
	}
	return fmt.Sprintf("node rank %d belongs to the live agent at %s on %s", p.NodeRank, holder.Addr,
		holder.Host)
}

func (c *coordinator) note(to, text string) { c.effects.send(&message{Note: &text}, to) }

func (c *coordinator) broadcastNote(text string) {
	c.effects.log("%s", text)
	for _, p := range c.sorted() {
		if p.joined > 0 {
			c.note(p.Name, text)
		}
	}
}

// relayNews passes news to all agents of the start except one.
func (c *coordinator) relayNews(except string, n launch.News) {
	msg := &message{News: &relayed{c.register.index, n}}
	for _, a := range c.assignment().Members {
		switch {
		case a.Name == except:
		case a.Name == c.self.Name:
			c.deliverNews(n)
		case c.joined(a.Name):
			c.effects.send(msg, a.Name)
		}
	}
}

// onNews handles news of the start. A follower takes them from the leader only.
func (c *coordinator) onNews(from string, n *relayed) {
	if n.Index != c.register.index {
		return
	}
	if c.role == following {
		if from == c.leader {
			c.deliverNews(n.News)
		}
		return
	}
	r := c.record
	if c.role != leading || r == nil || r.over || r.members[from] == nil {
		return
	}
	p := r.members[from]
	switch {
	case n.News.Addrs != nil:
		if len(n.News.Addrs) == p.NProc {
			p.addrs = n.News.Addrs
			c.sendAddrs()
		}
	case n.News.Failed != nil:
		c.failed(p, n.News)
	case n.News.Stop != "" && r.stop == "":
		r.stop = n.News.Stop + " at node " + p.Host
		c.relayNews(from, launch.News{Stop: r.stop})
	case n.News.Kill:
		c.relayNews(from, n.News)
	case n.News.Ask:
		c.onAsked(from)
	case n.News.WaitStates != nil:
		c.onWaitStates(from, n.News)
	}
}

// sendAddrs sends all agents the addresses of all workers, once they are complete.
func (c *coordinator) sendAddrs() {
	var all []string
	for _, a := range c.assignment().Members {
		p := c.record.members[a.Name]
		if p.addrs == nil {
			return
		}
		all = append(all, p.addrs...)
	}
	if !c.record.addrsSent {
		c.record.addrsSent = true
		c.relayNews("", launch.News{Addrs: all})
	}
}

const (
	// rejoinTime bounds a restart's wait for lost agents or spares when fewer agents are enough.
	rejoinTime = 2 * time.Second
	// prepareTime bounds Config.Prepare, which may hang on a disk.
	prepareTime = 30 * time.Minute
)

// A regroup is the leader's wait for the agents of the next start.
type regroup struct {
	since        time.Time   // when it began
	lastJoin     time.Time   // when the last new agent joined
	again        *again      // the preceding verdict; nil: none
	preparing    *Assignment // the assignment in Prepare; nil: none
	prepareBegan time.Time
	reported     int // number of agents last logged
	reportedAt   time.Time
}

// idle reports whether this leader is waiting for the next start.
func (c *coordinator) idle() bool { return c.regroup != nil && (c.record == nil || c.record.over) }

func (c *coordinator) joinedMembers() []candidate {
	all := []candidate{{Member: c.self}}
	for _, p := range c.sorted() {
		if p.joined > 0 {
			all = append(all, candidate{p.Member, p.joined})
		}
	}
	return all
}

// tryStart proposes the next start once enough agents have joined and the leader's own launcher waits for it: launchers
// pause between restarts.
func (c *coordinator) tryStart() {
	g := c.regroup
	if c.role != leading || !c.idle() || c.proposal != nil && c.proposal.value != nil || g.preparing != nil ||
		!c.caller.waiting || c.goodbye != nil {
		return
	}
	joined := c.joinedMembers()
	c.logWaiting(len(joined))
	if !c.enough(min(len(joined), c.cfg.Max)) {
		return
	}
	agents, left := chooseMembers(joined, c.assignment(), &c.tally, c.cfg.Min, c.cfg.Max)
	for _, note := range left {
		c.broadcastNote(note)
	}
	w := Assignment{Generation: c.register.index + 1, Restart: c.tally.Retries.Done}
	w.Members, w.Size = assignRanks(agents)
	g.preparing, g.prepareBegan = &w, c.now
	c.effects.prepare(w)
}

// logWaiting prints the number of joined agents, at most every 5 seconds.
func (c *coordinator) logWaiting(n int) {
	const pause = 5 * time.Second
	g := c.regroup
	if n == g.reported || c.now.Sub(g.reportedAt) < pause || n >= c.cfg.Max && g.reported == 0 {
		return
	}
	g.reported, g.reportedAt = n, c.now
	want := fmt.Sprint(c.cfg.Max)
	if c.cfg.Min < c.cfg.Max {
		want = fmt.Sprintf("%d to %d", c.cfg.Min, c.cfg.Max)
	}
	c.effects.log("%d of %s nodes have joined", n, want)
}

// enough reports whether n agents may start now. After the timeout it ends the job.
func (c *coordinator) enough(n int) bool {
	g, cfg := c.regroup, c.cfg
	waited := c.now.Sub(g.since)
	if c.register.index == 0 {
		switch {
		case n >= cfg.Max, n >= cfg.Min && cfg.Min < cfg.Max && c.now.Sub(g.lastJoin) >= cfg.LastCall:
			return true
		case waited >= cfg.JoinTimeout:
			c.giveUpWaiting(n, cfg.JoinTimeout)
		}
		return false
	}
	want := max(cfg.Min, min(c.tally.Target, cfg.Max))
	switch {
	case n >= want, n >= cfg.Min && waited >= rejoinTime:
		return true
	case waited >= cfg.RegroupTimeout:
		c.giveUpWaiting(n, cfg.RegroupTimeout)
	}
	return false
}

// giveUpWaiting ends the job because nodes are missing.
func (c *coordinator) giveUpWaiting(n int, after time.Duration) {
	var hosts []string
	have := map[int]bool{}
	for _, member := range c.joinedMembers() {
		hosts = append(hosts, member.Host)
		have[member.NodeRank] = true
	}
	slices.Sort(hosts)
	why := fmt.Sprintf("only %d of at least %d nodes joined in %v: %s", n, c.cfg.Min, after,
		strings.Join(hosts[:min(len(hosts), 16)], ", "))
	var missing []string
	for r := range c.cfg.Min {
		if !have[r] && !have[-1] && len(missing) < 16 {
			missing = append(missing, fmt.Sprint(r))
		}
	}
	if len(missing) > 0 {
		why += "; missing node ranks: " + strings.Join(missing, ", ")
	}
	c.proposeEnd(launch.Result{ExitCode: launch.ExitFailed}, why)
}

// prepared handles the result of Prepare for an assignment.
func (c *coordinator) prepared(generation int, payload, secret []byte, err error) {
	g := c.regroup
	if c.over || c.role != leading || g == nil || g.preparing == nil || g.preparing.Generation != generation {
		return
	}
	w := *g.preparing
	g.preparing = nil
	if err != nil {
		c.prepareErr = err
		r := launch.Result{ExitCode: launch.ExitFailed}
		if said := (*launch.Over)(nil); errors.As(err, &said) {
			r, c.prepareErr = said.Result, said.Err
		}
		c.proposeEnd(r, err.Error())
		return
	}
	for _, a := range w.Members {
		if a.Name != c.self.Name && !c.joined(a.Name) {
			return // lost meanwhile; tryStart chooses again
		}
	}
	t := c.tally
	if c.register.index == 0 {
		t.Target = len(w.Members)
	}
	c.propose(&decision{Assignment: w, Payload: payload, Secret: secret, Tally: t})
}

// lead performs the leader's periodic work.
func (c *coordinator) lead() {
	c.retryProposal()
	c.confirmEnd("")
	c.checkQuorum()
	c.checkOverdue()
	if g := c.regroup; g != nil && g.preparing != nil && c.now.Sub(g.prepareBegan) > prepareTime {
		g.preparing = nil
		c.proposeEnd(launch.Result{ExitCode: launch.ExitFailed}, fmt.Sprintf("node %s has not prepared the start in "+
			"%v: check the disks of the config, the data and the run directory there", c.self.Host, prepareTime))
	}
	for _, p := range c.sorted() {
		if p.held != nil {
			c.onJoin(p, p.held)
		}
	}
	c.tryStart()
	every := probeInterval
	if c.idle() { // agents may be looking for this job
		every = idleProbeInterval
	}
	if c.over || c.register.index == 0 || c.now.Sub(c.probedAt) < every {
		return
	}
	c.probedAt = c.now
	for _, seed := range c.cfg.Seeds {
		c.dial(seed)
	}
	if c.idle() { // missing members may be back
		for _, v := range c.register.voters() {
			if c.peers[v.Name] == nil {
				c.dial(v.Addr)
			}
		}
	}
}

// joinGrace returns how long a new leader waits for an agent to join: less for one that was just lost.
func (c *coordinator) joinGrace(name string) time.Duration {
	if _, is := c.suspects[name]; is {
		return time.Second
	}
	return 2 * c.cfg.Silence
}

// checkOverdue marks late agents as lost. If this agent's own ranks are late, its launcher has to end them.
func (c *coordinator) checkOverdue() {
	r := c.record
	if r == nil || r.over {
		return
	}
	for _, a := range c.assignment().Members {
		p := r.members[a.Name]
		switch why := c.overdueReason(p); {
		case why == "":
		case a.Name != c.self.Name:
			c.markLost(p, why)
		case p.failed == 0:
			n := launch.News{Failed: &p.FirstRank, Lost: describeMember(p.Member, c.assignment()) + " is late: " + why}
			c.failed(p, n)
			c.deliverNews(n)
		}
	}
	c.decideVerdict()
}

// overdueReason returns why the leader gives up on an agent's part of the start, or "".
func (c *coordinator) overdueReason(p *memberRecord) string {
	r := c.record
	past := func(since time.Time, limit time.Duration) bool { return !since.IsZero() && c.now.Sub(since) > limit }
	switch {
	case p.ended != nil || p.lost != "":
	case p.absent && past(r.since, c.joinGrace(p.Name)):
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
