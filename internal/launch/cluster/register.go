package cluster

import "cmp"

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
