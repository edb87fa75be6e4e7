package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/cluster/wire"
)

// A coordinator is an agent's part in the job without goroutines, connections, disk or clock. Its caller passes events
// and the time; it acts through effects. One goroutine calls it.
type coordinator struct {
	cfg     *Config
	self    Member // NodeRank as requested
	effects effects
	now     time.Time

	role   role
	leader *leadership // this agent's part as leader or candidate; nil otherwise
	follow string      // name of the followed leader or candidate; "": none
	since  time.Time   // of the role
	term   int         // the highest term seen

	decisions
	peers        peers
	search       search
	caller       caller
	atRendezvous bool      // this agent is at the rendezvous
	seekingSince time.Time // when the leader was lost, or the agent started
	asked        time.Time // when this agent asked the run directory for a newer decision; zero: it has not

	goodbye   *bye      // this agent's last message, once it leaves
	goodbyeBy time.Time // latest time for it
	over      bool      // nothing more happens
}

// A role is an agent's part in the job.
type role int

// The roles.
const (
	seeking     role = iota // looks for the leader
	following               // is connected to the leader, or to a candidate
	campaigning             // a candidate: asks the members of the last world to follow it
	leading
)

func (r role) String() string {
	return [...]string{"seeking", "following", "campaigning", "leading"}[r]
}

// An effects value performs the coordinator's actions. No method blocks or calls back.
type effects interface {
	dial(addr string)
	hangUp(name string) // after the queued messages
	send(m *message, names ...string)
	prepare(w Assignment)
	// claim records d in the run directory of a start with that payload, and reports to claimed. A nil d only reads.
	claim(payload []byte, d *decision)
	// begin passes a start to the caller of Next. over ends Next with an error.
	begin(d *decision)
	over(err error)
	verdict(v launch.Verdict)
	news(n launch.News)
	gone() // Close may continue
}

func newCoordinator(cfg *Config, self Member, fx effects, now time.Time) *coordinator {
	return &coordinator{
		cfg: cfg, self: self, effects: fx, now: now, seekingSince: now, peers: peers{}, search: newSearch(cfg, now),
		caller:    caller{effects: fx, host: self.Host},
		decisions: decisions{tally: tally{Retries: launch.Retries{Max: cfg.MaxRestarts}}},
	}
}

// status returns this agent's view of the job, for its peers.
func (c *coordinator) status() status {
	s := status{Index: c.index, Term: c.term, Candidate: c.role == campaigning}
	if c.leader != nil {
		s.Leader, s.Term = PeerAddr{c.self.Name, c.self.Addr}, c.leader.term
	} else if p := c.peers[c.follow]; p != nil {
		s.Leader = PeerAddr{p.Name, p.Addr}
	}
	return s
}

func (c *coordinator) receive(from string, msg *message) {
	p := c.peers[from]
	if p == nil || c.over {
		return
	}
	leads := c.role == following && c.follow == from
	switch {
	case msg.Status != nil:
		c.onStatus(p, msg.Status)
	case msg.Join != nil && c.leader != nil:
		c.leader.onJoin(p, msg.Join)
	case msg.Join != nil:
		c.sendStatus(from)
	case msg.Refuse != nil && leads:
		c.fail(fmt.Sprintf("the leader, node %s at %s, refuses this node: %s", p.Host, p.Addr, *msg.Refuse))
	case msg.Note != nil:
		c.cfg.Log("%s", *msg.Note)
	case msg.Decided != nil:
		p.status.Index = max(p.status.Index, msg.Decided.Index)
		c.onDecided(p, msg.Decided)
	case msg.News != nil && leads && msg.News.Index == c.index:
		c.caller.news(c.index, msg.News.News)
	case msg.News != nil && c.role == leading:
		c.leader.onNews(from, msg.News)
	case msg.Ended != nil && c.leader != nil:
		c.leader.onEnded(from, msg.Ended)
	case msg.Again != nil && leads && msg.Again.Index == c.index:
		c.tally = msg.Again.Tally
		c.caller.onAgain(msg.Again)
	case msg.Bye != nil:
		c.onBye(p, msg.Bye)
	}
}

func (c *coordinator) tick() {
	if c.over {
		return
	}
	switch c.role {
	case seeking:
		c.seek()
	case campaigning:
		c.leader.campaign()
		c.giveUp()
	case leading:
		c.leader.lead()
	case following:
		c.checkFollowed()
	}
	c.leave()
}

func (c *coordinator) sendStatus(to ...string) {
	c.effects.send(&message{Status: new(c.status())}, to...)
}

// setRole changes the role, and informs all connected agents.
func (c *coordinator) setRole(r role, follow string) {
	if c.role == r && c.follow == follow {
		return
	}
	if r == seeking && c.role == leading {
		c.seekingSince = c.now
	}
	if r == following || r == leading {
		c.asked = time.Time{}
	}
	if r == seeking || r == following {
		c.leader = nil
		for _, p := range c.peers {
			p.joined, p.held = 0, nil
		}
	}
	c.role, c.follow, c.since = r, follow, c.now
	var others []string
	for _, p := range c.peers.sorted() {
		if p.Name != follow {
			others = append(others, p.Name)
		}
	}
	c.sendStatus(others...)
}

func (c *coordinator) up(h hello, via string) {
	p := &peer{Member: h.Member, via: via, status: h.Status, since: c.now}
	c.peers[p.Name] = p
	delete(c.search.suspects, p.Name)
	delete(c.search.dials, p.Addr)
	c.decisions.send(c.effects, p)
	if c.over {
		c.effects.hangUp(p.Name)
		delete(c.peers, p.Name)
		return
	}
	c.sendStatus(p.Name) // the one in the handshake may be outdated
	c.onStatus(p, &h.Status)
}

func (c *coordinator) down(name, why string) {
	p := c.peers[name]
	if p == nil {
		return
	}
	delete(c.peers, name)
	if c.over {
		return
	}
	c.search.avoid(name, c.now)
	switch {
	case c.role == leading:
		c.leader.lost(p, why)
	case c.role == following && name == c.follow:
		c.lostLeader(p, why)
	}
}

// lostLeader handles the loss of the leader, or the end of its leadership.
func (c *coordinator) lostLeader(p *peer, why string) {
	candidate := p.status.Candidate
	c.setRole(seeking, "")
	if candidate {
		return
	}
	c.seekingSince = c.now
	if at := c.world().index(p.Name); at >= 0 {
		c.caller.leaderLoss, c.caller.lossAt = c.world().Members[at].lost(why, 1), c.index
	}
	c.caller.abort(c.world().describe(p.Member)+", the leader, is lost: "+why, c.world().firstRank(p.Name))
}

// checkFollowed leaves a candidate that does not come to lead, and closes connections that led to the leader.
func (c *coordinator) checkFollowed() {
	if p := c.peers[c.follow]; p.status.Candidate && c.now.Sub(c.since) > c.cfg.Silence+electTime {
		c.search.avoid(p.Name, c.now)
		c.setRole(seeking, "")
		return
	}
	for name, p := range c.peers {
		if p.via != "" && name != c.follow && c.now.Sub(p.since) > probeInterval {
			delete(c.peers, name)
			c.effects.hangUp(name)
		}
	}
}

// Following a leader.

func (c *coordinator) onStatus(p *peer, s *status) {
	p.status = *s
	c.term = max(c.term, s.Term)
	if s.Index < c.index {
		c.decisions.send(c.effects, p)
		return
	}
	switch {
	case c.role == following && c.follow == p.Name && s.Leader.Name != p.Name:
		c.lostLeader(p, "it no longer leads")
		c.tryFollow(p)
	case c.role == following && c.follow == p.Name:
		c.serve() // a candidate leads now
	case c.role == following && c.peers[c.follow].status.Candidate && !s.Candidate && s.Leader.Name == p.Name:
		c.setRole(seeking, "")
		c.tryFollow(p)
	case c.role == seeking:
		c.tryFollow(p)
	case c.leader.yields(p):
		led := c.role == leading
		c.setRole(seeking, "")
		if led {
			c.caller.abort("the other nodes follow another leader", -1)
		}
		c.tryFollow(p)
	case c.leader != nil && s.Leader.Name != c.self.Name:
		p.joined = 0 // it has left
		if c.role == campaigning && s.Leader.Name != "" && s.Leader.Name != p.Name {
			c.dial(s.Leader.Addr)
		}
	}
}

// tryFollow takes p as the leader if it leads, or wants to, and knows all decisions of this agent. Otherwise it dials
// p's leader.
func (c *coordinator) tryFollow(p *peer) {
	switch s := &p.status; {
	case s.Leader.Name == "" || s.Leader.Name == c.self.Name:
	case s.Leader.Name != p.Name:
		c.dial(s.Leader.Addr)
	case s.Index >= c.index && !(s.Candidate && c.search.avoids(p.Name, c.now)):
		c.setRole(following, p.Name)
		c.effects.send(&message{Join: &join{Ended: c.caller.endingOf(c.index)}}, p.Name)
		c.serve() // a start that arrived without a leader
	}
}

// onDecided handles a decision received from another agent, or found in the run directory if p is nil.
func (c *coordinator) onDecided(p *peer, d *decision) {
	if !c.learn(d) {
		return
	}
	if d.End != nil {
		v := d.End.verdict()
		v.ReportedElsewhere = true
		c.finish(v, nil)
		return
	}
	if c.leader != nil || c.role == following && (p == nil || p.Name != c.follow) && d.Leader.Name != c.follow {
		c.setRole(seeking, "")
	}
	if c.role == seeking {
		c.dial(d.Leader.Addr)
	}
	c.serve()
}

// learn stores a decision, and reports whether it is new. A new start ends an older one that still runs here.
func (c *coordinator) learn(d *decision) bool {
	if !c.decisions.learn(d) {
		return false
	}
	c.caller.pending = nil
	if d.End == nil {
		c.caller.abort("the other nodes continued without this one", -1)
	}
	return true
}

// claimed handles the answer to the claim of d, or to a question if d is nil. newest is the newest decision in the run
// directory, or nil.
func (c *coordinator) claimed(d, newest *decision, err error) {
	if c.over {
		return
	}
	var mine *claim
	if c.leader != nil && d != nil && c.leader.claim != nil && c.leader.claim.value == d {
		mine = c.leader.claim
		mine.busy = false
	}
	switch {
	case err == nil && mine != nil && newest != nil && newest.Index == d.Index && newest.Leader == d.Leader:
		c.leader.decided(newest)
	case err == nil && newest != nil && newest.Index > c.index:
		c.onDecided(nil, newest)
	case d == nil:
		c.fail(c.noQuorum(c.self.Name, c.peers))
	case mine != nil && err != nil:
		mine.fault, mine.next = err, c.now.Add(claimPause)
		if said := (*launch.Over)(nil); errors.As(err, &said) {
			c.fail(err.Error())
		}
	}
}

func (c *coordinator) onBye(p *peer, b *bye) {
	why := cmp.Or(b.Why, fmt.Sprintf("its agent exited with status %d", b.Status))
	if c.role == following && p.Name == c.follow && (b.All || c.index == 0) {
		c.endJob(over(launch.Result{ExitCode: b.Status, Stopped: b.Status == launch.ExitStopped},
			fmt.Sprintf("node %s, the leader, has ended the job: %s", p.Host, why)), &bye{Status: b.Status, Why: why})
		return
	}
	if c.role == leading && b.Status == launch.ExitInput && p.joined > 0 { // another start would not help
		c.leader.proposeEnd(launch.Result{ExitCode: launch.ExitInput}, "node "+p.Host+": "+why)
	}
	if c.role == leading && b.Status == launch.ExitStopped && c.leader.idle() && p.joined > 0 &&
		(c.index == 0 || c.world().firstRank(p.Name) >= 0) {
		c.leader.proposeEnd(askedToStop(p.Host))
	}
	c.down(p.Name, why)
	c.effects.hangUp(p.Name)
}

// Looking for a leader.

const (
	// electTime bounds the time in which a candidate gets its followers, in addition to Silence.
	electTime = 3 * time.Second
	// probeInterval separates a leader's dials of the seeds, for agents that look for the job there, and
	// idleProbeInterval while no start runs.
	probeInterval     = 5 * time.Second
	idleProbeInterval = 500 * time.Millisecond
)

// dial connects to an address, unless it is connected or was tried a moment ago.
func (c *coordinator) dial(addr string) {
	if addr != c.self.Addr && !c.peers.connected(addr) && c.search.begin(addr, c.now) {
		c.effects.dial(addr)
	}
}

func (c *coordinator) dialed(addr string, err error) {
	c.search.ended(addr, err, c.now)
	if c.over || err == nil {
		return
	}
	if errors.Is(err, wire.ErrSelf) {
		if c.search.rendezvous(addr) {
			c.leadAtRendezvous()
		}
		return
	}
	for _, m := range c.world().Members {
		if m.Addr == addr {
			c.search.avoid(m.Name, c.now)
		}
	}
	if c.index == 0 && c.role == seeking && c.search.failed(addr, err, c.now) {
		status := launch.ExitFailed
		r := (*wire.Refusal)(nil)
		if errors.As(err, &r) && r.Proven || errors.Is(err, wire.ErrForeign) { // another start would end the same way
			status = launch.ExitInput
		}
		c.failAs(status, err.Error())
	}
}

// leadAtRendezvous makes this agent the leader until the first start, since it is at the rendezvous.
func (c *coordinator) leadAtRendezvous() {
	c.atRendezvous = true
	if c.index == 0 && c.role == seeking {
		c.leader = &leadership{coordinator: c, regroup: &regroup{since: c.now, lastJoin: c.now}}
		c.setRole(leading, "")
	}
}

// seek performs the periodic search for a leader.
func (c *coordinator) seek() {
	if c.index == 0 && (c.atRendezvous || len(c.cfg.Seeds) == 0 || c.cfg.Seeds[0] == c.self.Addr) {
		c.leadAtRendezvous()
		return
	}
	for _, seed := range c.cfg.Seeds {
		c.dial(seed)
	}
	for _, f := range c.search.hints[:min(len(c.search.hints), maxDials)] {
		c.dial(f.Addr)
	}
	if c.index == 0 {
		if c.now.Sub(c.search.began) >= c.cfg.JoinTimeout {
			c.fail(c.search.noneFound())
		}
		return
	}
	for _, p := range c.peers.sorted() {
		if c.role == seeking {
			c.tryFollow(p)
		}
	}
	if c.role == seeking {
		c.elect()
	}
	if c.role == seeking {
		c.giveUp()
	}
}

// elect looks for the member of the last world that should lead. If that is this agent, it becomes a candidate.
func (c *coordinator) elect() {
	for i, m := range c.search.alive(c.world().Members, c.self.Name, c.peers, c.now) {
		if m.Name == c.self.Name && i == 0 {
			c.term++
			c.leader = &leadership{coordinator: c, term: c.term}
			c.setRole(campaigning, "")
			c.leader.campaign()
		}
		if m.Name == c.self.Name || i == maxDials {
			return
		}
		c.dial(m.Addr)
		p := c.peers[m.Name]
		if i == 0 && p != nil && min(c.now.Sub(p.since), c.now.Sub(c.seekingSince)) > c.cfg.Silence+electTime {
			c.search.avoid(m.Name, c.now) // it does not start to lead
		}
	}
}

// giveUp ends the job here if no leader was found for too long. It first asks the run directory: the job may have
// ended.
func (c *coordinator) giveUp() {
	waited := min(c.now.Sub(c.seekingSince), c.now.Sub(c.caller.endedAt))
	wait := c.cfg.RegroupTimeout
	if r := c.tally.Retries; r.Done >= r.Max { // the job has ended, and another agent may know how
		wait = min(wait, 2*c.cfg.Silence)
	}
	switch {
	case c.caller.running || waited < wait:
	case c.asked.IsZero():
		c.asked = c.now
		c.effects.claim(c.last.Payload, nil)
	case c.now.Sub(c.asked) > 2*c.cfg.Silence: // no answer
		c.fail(c.noQuorum(c.self.Name, c.peers))
	}
}

// This agent's launcher, and the end.

// next handles the launcher's wait for the next start.
func (c *coordinator) next() {
	c.caller.waiting = true
	c.serve()
}

func (c *coordinator) serve() {
	p := c.peers[c.follow]
	c.caller.serve(c.last, c.self.Name, c.role == leading || p != nil && !p.status.Candidate)
}

func (c *coordinator) onLocalEnd(e launch.Ending) {
	switch end := c.caller.end(e, c.now); {
	case end == nil:
	case end.Index != c.index || c.over:
		c.serve()
	case c.role == leading:
		c.leader.onEnded(c.self.Name, end)
	case c.role == following:
		c.effects.send(&message{Ended: end}, c.follow)
	}
}

// publish passes the launcher's news of its start to the leader.
func (c *coordinator) publish(n launch.News) {
	switch l := &c.caller; {
	case !l.running || l.start != c.index || c.over:
	case c.role == leading:
		c.leader.onNews(c.self.Name, &relayed{l.start, n})
	case c.role == following:
		c.effects.send(&message{News: &relayed{l.start, n}}, c.follow)
	}
}

// finish ends the job for this agent's launcher after the last decision, with verdict v if it is in End. own is the
// launcher's own error, which it prints.
func (c *coordinator) finish(v launch.Verdict, own error) {
	if c.over {
		return
	}
	c.caller.answer(v)
	d := c.last
	why := d.End.Why
	if why == "" && d.End.First != nil {
		why = "the job has ended: " + d.End.First.Error()
	}
	end := over(d.End.result(), why)
	if own != nil {
		end.Why, end.Err = "", own
	}
	c.endJob(end, nil)
	c.leave()
}

// fail ends the job for this agent and those that follow it.
func (c *coordinator) fail(why string) { c.failAs(launch.ExitFailed, why) }

func (c *coordinator) failAs(status int, why string) {
	if !c.over {
		c.endJob(over(launch.Result{ExitCode: status}, why), &bye{Status: status, Why: why, All: true})
	}
}

// endJob ends the job for this agent: running workers end, and its launcher gets the reason. last goes to the peers,
// unless they know.
func (c *coordinator) endJob(why *launch.Over, last *bye) {
	if last != nil {
		c.peers.leave(c.effects, last)
	}
	c.over, c.caller.fatal = true, why
	c.caller.abort("the job has ended", -1)
	c.serve()
}

// close begins to leave the job with the launcher's exit status and optional reason.
func (c *coordinator) close(status int, why string) {
	if c.goodbye != nil {
		return
	}
	c.goodbye, c.goodbyeBy = &bye{Status: status, Why: clip(why)}, c.now
	if c.role == leading && c.leader.idle() && status == launch.ExitStopped && !c.over {
		c.goodbyeBy = c.now.Add(2 * endTime)
		c.leader.proposeEnd(askedToStop(c.self.Host))
	}
	c.leave()
}

func (c *coordinator) leave() {
	if c.goodbye == nil || !c.over && c.now.Before(c.goodbyeBy) {
		return
	}
	c.over = true
	c.peers.leave(c.effects, c.goodbye)
	c.effects.gone()
}
