package cluster

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"time"
)

// round bounds the wait for promises. After it an agent asks anew.
const round = 1500 * time.Millisecond

// A proposal collects the votes for this agent's next decision. Without a value it only asks to lead. A ballot carries
// one value at most.
type proposal struct {
	ballot  ballot
	value   *decision // nil: to lead is all that is wanted yet
	asking  bool      // for promises; else for acceptance, or, without a value, for nothing
	yes     map[string]bool
	best    *decision // of the highest ballot that was accepted before, as far as the promises tell
	bestAt  ballot
	asked   time.Time
	pending time.Time // since when it has a value, or asks
}

func (m *machine) stand() {
	m.setRole(campaigning, "")
	m.prop = &proposal{pending: m.now}
	m.ask()
}

// campaign dials the missing voters, asks anew after a round, and gives up in the end.
func (m *machine) campaign() {
	m.press()
	m.giveUp()
}

// propose puts a value forward for the next decision. This agent leads.
func (m *machine) propose(d *decision) {
	d.Index, d.Leader = m.reg.index+1, m.found()
	p := m.prop
	switch {
	case p != nil && p.value != nil: // it has to be decided first
		return
	case m.reg.index == 0: // this agent decides alone
		m.decided(d)
	case p != nil: // elected, and the promises hold
		p.value, p.pending = d, m.now
		m.offer()
	case m.reg.last.Leader.Name == m.self.Name:
		m.prop = &proposal{ballot: first(m.self.Name), value: d, pending: m.now}
		m.offer()
	default:
		m.prop = &proposal{value: d, pending: m.now}
		m.ask()
	}
}

// ask asks for promises under a ballot above all that this agent has heard of.
func (m *machine) ask() {
	p := m.prop
	p.ballot = ballot{max(m.rival, m.reg.promised.N) + 1, m.self.Name}
	p.asking, p.yes, p.asked = true, map[string]bool{}, m.now
	mine, _ := m.reg.prepare(&prepare{m.reg.index + 1, p.ballot})
	m.count(m.self.Name, mine)
	m.reach()
}

// offer asks to accept the value under the ballot that has the promises.
func (m *machine) offer() {
	p := m.prop
	p.asking, p.yes, p.asked = false, map[string]bool{}, m.now
	mine, no := m.reg.accept(&accept{p.ballot, *p.value})
	if no != nil { // it has promised more since
		m.ask()
		return
	}
	m.reach()
	m.accepted(m.self.Name, mine)
}

func (m *machine) reach() {
	for _, v := range m.reg.voters() {
		if p := m.peers[v.Name]; p != nil {
			m.solicit(p)
		}
	}
}

func (m *machine) solicit(p *peer) {
	switch prop := m.prop; {
	case prop == nil || prop.yes[p.Name] || m.world().index(p.Name) < 0:
	case prop.asking:
		m.fx.send(&message{Prepare: &prepare{m.reg.index + 1, prop.ballot}}, p.Name)
	case prop.value != nil:
		m.fx.send(&message{Accept: &accept{prop.ballot, *prop.value}}, p.Name)
	}
}

// press goes on with a proposal that has no quorum yet.
func (m *machine) press() {
	p := m.prop
	if p == nil || !p.asking && p.value == nil {
		return
	}
	for _, v := range m.reg.voters() {
		m.dial(v.Addr)
	}
	if p.asking && m.now.Sub(p.asked) >= round+m.jitter() {
		m.ask()
	}
}

// jitter keeps two candidates from asking at the same time again and again.
func (m *machine) jitter() time.Duration {
	h := fnv.New32a()
	fmt.Fprintf(h, "%s %d", m.self.Name, m.prop.ballot.N)
	return time.Duration(h.Sum32()%1000) * time.Millisecond
}

// onPrepare promises, unless this agent hears a leader. So an agent that loses the leader alone does not disturb the
// others.
func (m *machine) onPrepare(p *peer, req *prepare) {
	if req.Index <= m.reg.index {
		p.status.Index = req.Index - 1
		m.teach(p)
		return
	}
	if m.role == leading || m.role == following && m.leader != p.Name {
		no := m.reg.nack()
		no.Leader = m.status().Leader
		m.fx.send(&message{Nack: no}, p.Name)
		return
	}
	yes, no := m.reg.prepare(req)
	if no != nil {
		m.fx.send(&message{Nack: no}, p.Name)
		return
	}
	if m.role == campaigning {
		m.setRole(seeking, "")
	}
	m.yield = m.now.Add(2 * round)
	m.fx.send(&message{Promise: yes}, p.Name)
}

func (m *machine) onAccept(p *peer, req *accept) {
	if req.Decision.Index <= m.reg.index {
		p.status.Index = req.Decision.Index - 1
		m.teach(p)
		return
	}
	yes, no := m.reg.accept(req)
	if no != nil {
		m.fx.send(&message{Nack: no}, p.Name)
		return
	}
	m.fx.send(&message{Accepted: yes}, p.Name)
}

func (m *machine) onPromise(p *peer, yes *promise) {
	if m.prop != nil && m.prop.asking && yes.Index == m.reg.index+1 && yes.Ballot == m.prop.ballot {
		m.count(p.Name, yes)
	}
}

// count notes a promise. With a quorum this agent leads. It must then propose the accepted value of the highest ballot,
// since a quorum may have decided on it.
func (m *machine) count(from string, yes *promise) {
	p := m.prop
	p.yes[from] = true
	if yes.At.compare(p.bestAt) > 0 {
		p.best, p.bestAt = yes.Accepted, yes.At
	}
	if !quorum(m.reg.voters(), func(name string) bool { return p.yes[name] }) {
		return
	}
	p.asking, m.under = false, p.ballot
	if p.best != nil {
		p.value = p.best
	}
	if m.role == campaigning {
		m.setRole(leading, m.self.Name)
		m.takeOver()
	}
	if p.value != nil {
		m.offer()
	}
}

func (m *machine) onAccepted(p *peer, yes *accepted) { m.accepted(p.Name, yes) }

// accepted notes that an agent has accepted the value. A quorum of them decides.
func (m *machine) accepted(from string, yes *accepted) {
	p := m.prop
	if p == nil || p.asking || p.value == nil || yes.Index != m.reg.index+1 || yes.Ballot != p.ballot {
		return
	}
	p.yes[from] = true
	if quorum(m.reg.voters(), func(name string) bool { return p.yes[name] }) {
		m.decided(p.value)
	}
}

func (m *machine) onNack(p *peer, no *nack) {
	switch prop := m.prop; {
	case no.Index < m.reg.index:
		p.status.Index = no.Index
		m.teach(p)
		m.solicit(p)
	case prop == nil || no.Index > m.reg.index:
	case no.Leader.Name != "":
		m.dial(no.Leader.Addr)
	case no.Promised.compare(prop.ballot) > 0:
		m.rival = max(m.rival, no.Promised.N)
		if !prop.asking && prop.value != nil {
			m.ask()
		}
	}
}

// decided: a decision is made, and this agent is the first to know.
func (m *machine) decided(d *decision) {
	m.learn(d)
	m.gather = nil
	if d.Leader.Name == m.self.Name {
		m.under = first(m.self.Name)
	}
	msg := &message{Decided: d}
	for _, p := range m.sorted() {
		m.fx.send(msg, p.Name)
	}
	if d.End != nil {
		m.conclude(d)
		return
	}
	m.keep(d)
}

// onDecided: another agent tells of a decision.
func (m *machine) onDecided(p *peer, d *decision) {
	p.status.Index = max(p.status.Index, d.Index)
	if !m.learn(d) {
		return
	}
	if d.End != nil {
		m.fx.send(&message{Told: &d.Index}, p.Name)
		m.ended(d)
		return
	}
	if m.role == leading || m.role == campaigning {
		m.setRole(seeking, "")
	}
	if m.role == seeking {
		m.dial(d.Leader.Addr)
	}
	m.deliver()
}

// learn notes a decision, and reports whether it is new. A new start ends an older one that still runs here. A new
// leader needs that as well: the promises may bind it to the lost leader's value.
func (m *machine) learn(d *decision) bool {
	if !m.reg.learn(d) {
		return false
	}
	m.prop, m.tally, m.local.early = nil, d.Tally, nil
	if d.End == nil {
		m.doom("the other nodes went on without this one", -1)
	}
	return true
}

// The starts of a job, and its end, are a chain of decisions, counted from 1. The agents of the last
// decision's world decide on the next one, by Paxos: a quorum of them has to promise a ballot, and a quorum to
// accept a value under it. Two quorums of a world share an agent, so no two values are decided; and as only
// a decided world decides on the next, no part of a torn network goes on beside another.
//
// Nothing of it is stored: an agent that is started again is another one, and has no vote.

// A ballot is one try to get a decision. Ballots of different agents differ.
type ballot struct {
	N    int    `json:"n"`
	Name string `json:"name"`
}

// first returns the ballot without promises, the last proposer's.
func first(leader string) ballot { return ballot{0, leader} }

func (b ballot) compare(c ballot) int {
	return cmp.Or(cmp.Compare(b.N, c.N), cmp.Compare(b.Name, c.Name))
}

// prepare asks for the promise to accept nothing below a ballot.
type prepare struct {
	Index  int    `json:"index"`
	Ballot ballot `json:"ballot"`
}

// promise gives it.
type promise struct {
	Index    int       `json:"index"`
	Ballot   ballot    `json:"ballot"`
	Accepted *decision `json:"accepted,omitempty"` // the earlier accepted decision
	At       ballot    `json:"at"`                 // and under which ballot
}

// accept asks to accept a value.
type accept struct {
	Ballot   ballot   `json:"ballot"`
	Decision decision `json:"decision"`
}

// accepted says that it was.
type accepted struct {
	Index  int    `json:"index"`
	Ballot ballot `json:"ballot"`
}

// nack refuses a promise, or to accept.
type nack struct {
	Index    int    `json:"index"`    // the last decision that this agent knows
	Promised ballot `json:"promised"` // for the one after it
	Leader   Found  `json:"leader"`   // is alive; Name "": that is not why
}

// A register is an agent's memory of decisions.
type register struct {
	index int       // of the last decision that it knows was made; 0: none
	last  *decision // that one
	// For the one after it:
	promised ballot
	accepted *decision // nil: none
	at       ballot    // of accepted
}

// prepare promises, or refuses.
func (r *register) prepare(p *prepare) (*promise, *nack) {
	if p.Index != r.index+1 || p.Ballot.compare(r.promised) < 0 {
		return nil, r.nack()
	}
	r.promised = p.Ballot
	return &promise{Index: p.Index, Ballot: p.Ballot, Accepted: r.accepted, At: r.at}, nil
}

// accept accepts a value, or refuses.
func (r *register) accept(a *accept) (*accepted, *nack) {
	if a.Decision.Index != r.index+1 || a.Ballot.compare(r.promised) < 0 {
		return nil, r.nack()
	}
	r.promised, r.at, r.accepted = a.Ballot, a.Ballot, &a.Decision
	return &accepted{Index: a.Decision.Index, Ballot: a.Ballot}, nil
}

func (r *register) nack() *nack { return &nack{Index: r.index, Promised: r.promised} }

// learn notes a decision, and reports whether it is news.
func (r *register) learn(d *decision) bool {
	if d.Index <= r.index {
		return false
	}
	*r = register{index: d.Index, last: d}
	return true
}

// voters returns the agents that decide on what follows the last decision; nil: no one but the agent at the
// meeting place, since nothing was decided yet.
func (r *register) voters() []Member {
	if r.last == nil {
		return nil
	}
	return r.last.World.Agents
}

// quorum reports whether those of the voters for which has is true decide for all: more than half, or half
// with the first.
func quorum(voters []Member, has func(name string) bool) bool {
	n := 0
	for _, v := range voters {
		if has(v.Name) {
			n++
		}
	}
	return 2*n > len(voters) || len(voters) > 0 && 2*n == len(voters) && has(voters[0].Name)
}
