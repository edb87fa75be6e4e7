package cluster

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"time"
)

// voteRound bounds the wait for promises. After it, a candidate asks again.
const voteRound = 1500 * time.Millisecond

// A proposal collects the votes for this agent's next decision. Without a value it only asks to lead. A ballot carries
// one value at most.
type proposal struct {
	ballot  ballot
	value   *decision // nil: it only asks to lead
	asking  bool      // for promises; else for acceptance, if it has a value
	yes     map[string]bool
	best    *decision // the accepted value of the highest ballot in the promises
	bestAt  ballot
	asked   time.Time
	pending time.Time // since when it has a value, or asks
}

func (c *coordinator) startElection() {
	c.setRole(campaigning, "")
	c.proposal = &proposal{pending: c.now}
	c.ask()
}

// propose proposes a value for the next decision. This agent leads.
func (c *coordinator) propose(d *decision) {
	d.Index, d.Leader = c.register.index+1, c.selfAddr()
	p := c.proposal
	switch {
	case p != nil && p.value != nil: // it has to be decided first
		return
	case c.register.index == 0: // this agent decides alone
		c.decided(d)
	case p != nil: // elected, and the promises are valid
		p.value, p.pending = d, c.now
		c.offer()
	case c.register.last.Leader.Name == c.self.Name:
		c.proposal = &proposal{ballot: initialBallot(c.self.Name), value: d, pending: c.now}
		c.offer()
	default:
		c.proposal = &proposal{value: d, pending: c.now}
		c.ask()
	}
}

// ask asks for promises under a ballot above all ballots seen.
func (c *coordinator) ask() {
	p := c.proposal
	p.ballot = ballot{max(c.maxBallot, c.register.promised.N) + 1, c.self.Name}
	p.asking, p.yes, p.asked = true, map[string]bool{}, c.now
	mine, _ := c.register.prepare(&prepare{c.register.index + 1, p.ballot})
	c.countPromise(c.self.Name, mine)
	c.solicitAll()
}

// offer asks to accept the value under the promised ballot.
func (c *coordinator) offer() {
	p := c.proposal
	p.asking, p.yes, p.asked = false, map[string]bool{}, c.now
	mine, no := c.register.accept(&accept{p.ballot, *p.value})
	if no != nil { // this agent has promised a later ballot
		c.ask()
		return
	}
	c.solicitAll()
	c.countAccepted(c.self.Name, mine)
}

func (c *coordinator) solicitAll() {
	for _, v := range c.register.voters() {
		if p := c.peers[v.Name]; p != nil {
			c.solicit(p)
		}
	}
}

func (c *coordinator) solicit(p *peer) {
	switch prop := c.proposal; {
	case prop == nil || prop.yes[p.Name] || c.assignment().index(p.Name) < 0:
	case prop.asking:
		c.effects.send(&message{Prepare: &prepare{c.register.index + 1, prop.ballot}}, p.Name)
	case prop.value != nil:
		c.effects.send(&message{Accept: &accept{prop.ballot, *prop.value}}, p.Name)
	}
}

// retryProposal dials the missing voters, and asks again after a round.
func (c *coordinator) retryProposal() {
	p := c.proposal
	if p == nil || !p.asking && p.value == nil {
		return
	}
	for _, v := range c.register.voters() {
		c.dial(v.Addr)
	}
	if p.asking && c.now.Sub(p.asked) >= voteRound+c.jitter() {
		c.ask()
	}
}

// jitter keeps two candidates from asking at the same time repeatedly.
func (c *coordinator) jitter() time.Duration {
	h := fnv.New32a()
	fmt.Fprintf(h, "%s %d", c.self.Name, c.proposal.ballot.N)
	return time.Duration(h.Sum32()%1000) * time.Millisecond
}

// onPrepare promises, unless this agent has a leader. So an agent that alone lost the leader does not disturb the
// others.
func (c *coordinator) onPrepare(p *peer, req *prepare) {
	if req.Index <= c.register.index {
		p.status.Index = req.Index - 1
		c.sendDecision(p)
		return
	}
	if c.role == leading || c.role == following && c.leader != p.Name {
		no := c.register.nack()
		no.Leader = c.status().Leader
		c.effects.send(&message{Nack: no}, p.Name)
		return
	}
	yes, no := c.register.prepare(req)
	if no != nil {
		c.effects.send(&message{Nack: no}, p.Name)
		return
	}
	if c.role == campaigning {
		c.setRole(seeking, "")
	}
	c.yieldUntil = c.now.Add(2 * voteRound)
	c.effects.send(&message{Promise: yes}, p.Name)
}

func (c *coordinator) onAccept(p *peer, req *accept) {
	if req.Decision.Index <= c.register.index {
		p.status.Index = req.Decision.Index - 1
		c.sendDecision(p)
		return
	}
	yes, no := c.register.accept(req)
	if no != nil {
		c.effects.send(&message{Nack: no}, p.Name)
		return
	}
	c.effects.send(&message{Accepted: yes}, p.Name)
}

// countPromise counts a promise. With a quorum, this agent leads. It must then propose the accepted value of the
// highest ballot, since a quorum may have decided it.
func (c *coordinator) countPromise(from string, yes *promise) {
	p := c.proposal
	if p == nil || !p.asking || yes.Index != c.register.index+1 || yes.Ballot != p.ballot {
		return
	}
	p.yes[from] = true
	if yes.At.compare(p.bestAt) > 0 {
		p.best, p.bestAt = yes.Accepted, yes.At
	}
	if !quorum(c.register.voters(), func(name string) bool { return p.yes[name] }) {
		return
	}
	p.asking, c.ballot = false, p.ballot
	if p.best != nil {
		p.value = p.best
	}
	if c.role == campaigning {
		c.setRole(leading, c.self.Name)
		c.takeOver()
	}
	if p.value != nil {
		c.offer()
	}
}

// countAccepted counts an acceptance of the value. A quorum decides.
func (c *coordinator) countAccepted(from string, yes *accepted) {
	p := c.proposal
	if p == nil || p.asking || p.value == nil || yes.Index != c.register.index+1 || yes.Ballot != p.ballot {
		return
	}
	p.yes[from] = true
	if quorum(c.register.voters(), func(name string) bool { return p.yes[name] }) {
		c.decided(p.value)
	}
}

func (c *coordinator) onNack(p *peer, no *nack) {
	switch prop := c.proposal; {
	case no.Index < c.register.index:
		p.status.Index = no.Index
		c.sendDecision(p)
		c.solicit(p)
	case prop == nil || no.Index > c.register.index:
	case no.Leader.Name != "":
		c.dial(no.Leader.Addr)
	case no.Promised.compare(prop.ballot) > 0:
		c.maxBallot = max(c.maxBallot, no.Promised.N)
		if !prop.asking && prop.value != nil {
			c.ask()
		}
	}
}

// decided handles a decision that this agent's proposal won, and informs the others.
func (c *coordinator) decided(d *decision) {
	c.learn(d)
	c.regroup = nil
	if d.Leader.Name == c.self.Name {
		c.ballot = initialBallot(c.self.Name)
	}
	msg := &message{Decided: d}
	for _, p := range c.sorted() {
		c.effects.send(msg, p.Name)
	}
	if d.End != nil {
		c.onEndDecided(d)
		return
	}
	c.beginStart(d)
}

// onDecided handles a decision received from another agent.
func (c *coordinator) onDecided(p *peer, d *decision) {
	p.status.Index = max(p.status.Index, d.Index)
	if !c.learn(d) {
		return
	}
	if d.End != nil {
		c.effects.send(&message{EndConfirmed: &d.Index}, p.Name)
		c.onJobEnded(d)
		return
	}
	if c.role == leading || c.role == campaigning {
		c.setRole(seeking, "")
	}
	if c.role == seeking {
		c.dial(d.Leader.Addr)
	}
	c.deliver()
}

// learn stores a decision, and reports whether it is new. A new start ends an older one that still runs here. A new
// leader needs this as well: the promises may bind it to the lost leader's value.
func (c *coordinator) learn(d *decision) bool {
	if !c.register.learn(d) {
		return false
	}
	c.proposal, c.tally, c.caller.pending = nil, d.Tally, nil
	if d.End == nil {
		c.abortStart("the other nodes continued without this one", -1)
	}
	return true
}

// The starts of a job and its end are a log of decisions, counted from 1. The members of the last assignment decide
// the next entry by Paxos: a quorum of them must promise a ballot, and a quorum must accept a value under it. Two
// quorums of an assignment share an agent, so two values are never decided. Only a decided assignment decides the
// next one, so at most one side of a network partition continues.
//
// Nothing is stored on disk: a restarted agent has a new identity and no vote.

// A ballot is one attempt to get a decision. Ballots of different agents differ.
type ballot struct {
	N    int    `json:"n"`
	Name string `json:"name"`
}

// initialBallot returns the last proposer's ballot, which needs no promises.
func initialBallot(leader string) ballot { return ballot{0, leader} }

func (b ballot) compare(c ballot) int {
	return cmp.Or(cmp.Compare(b.N, c.N), cmp.Compare(b.Name, c.Name))
}

// A prepare asks for the promise to accept no lower ballot.
type prepare struct {
	Index  int    `json:"index"`
	Ballot ballot `json:"ballot"`
}

type promise struct {
	Index    int       `json:"index"`
	Ballot   ballot    `json:"ballot"`
	Accepted *decision `json:"accepted,omitempty"` // the earlier accepted decision
	At       ballot    `json:"at"`                 // its ballot
}

// An accept asks to accept a value.
type accept struct {
	Ballot   ballot   `json:"ballot"`
	Decision decision `json:"decision"`
}

type accepted struct {
	Index  int    `json:"index"`
	Ballot ballot `json:"ballot"`
}

// A nack refuses prepare or accept.
type nack struct {
	Index    int      `json:"index"`    // the sender's last decision
	Promised ballot   `json:"promised"` // for the next decision
	Leader   PeerAddr `json:"leader"`   // a live leader; Name "": the ballot is the reason
}

// A register is an agent's memory of decisions.
type register struct {
	index int // of the last known decision; 0: none
	last  *decision
	// For the next decision:
	promised ballot
	accepted *decision // nil: none
	at       ballot    // of accepted
}

func (r *register) prepare(p *prepare) (*promise, *nack) {
	if p.Index != r.index+1 || p.Ballot.compare(r.promised) < 0 {
		return nil, r.nack()
	}
	r.promised = p.Ballot
	return &promise{Index: p.Index, Ballot: p.Ballot, Accepted: r.accepted, At: r.at}, nil
}

func (r *register) accept(a *accept) (*accepted, *nack) {
	if a.Decision.Index != r.index+1 || a.Ballot.compare(r.promised) < 0 {
		return nil, r.nack()
	}
	r.promised, r.at, r.accepted = a.Ballot, a.Ballot, &a.Decision
	return &accepted{Index: a.Decision.Index, Ballot: a.Ballot}, nil
}

func (r *register) nack() *nack { return &nack{Index: r.index, Promised: r.promised} }

// learn stores a decision, and reports whether it is new.
func (r *register) learn(d *decision) bool {
	if d.Index <= r.index {
		return false
	}
	*r = register{index: d.Index, last: d}
	return true
}

// voters returns the agents that decide the next entry. It returns nil before the first decision, which the agent at
// the rendezvous makes alone.
func (r *register) voters() []Member {
	if r.last == nil {
		return nil
	}
	return r.last.Assignment.Members
}

// quorum reports whether the voters for which has is true decide for all: more than half, or half including the first.
func quorum(voters []Member, has func(name string) bool) bool {
	n := 0
	for _, v := range voters {
		if has(v.Name) {
			n++
		}
	}
	return 2*n > len(voters) || len(voters) > 0 && 2*n == len(voters) && has(voters[0].Name)
}
