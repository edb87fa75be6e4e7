package cluster

import (
	"testing"
	"time"
)

// Each test checks one rule against two values of one decision, by the messages in and out.

var quintet = assignmentOf(1, "a:0 b:1 c:2 d:3 e:4")

// second returns a decision that a might have proposed after the first. mark distinguishes two of them.
func second(mark string) *decision {
	d := start("a", assignmentOf(2, "b:1 c:2"))
	d.Payload = []byte(mark)
	return d
}

// TestVoterKeepsItsPromises checks that an agent promises and accepts under a ballot unless it promised a later one.
// Its promise contains the last accepted value and ballot.
func TestVoterKeepsItsPromises(t *testing.T) {
	type step struct {
		from    string
		ask     *prepare // or
		offer   *accept
		yes     bool
		had     string // mark of the decision in the promise
		at      ballot
		promise ballot // named in a refusal
	}
	ask := func(from string, n int) step { return step{from: from, ask: &prepare{2, ballot{n, from}}} }
	offer := func(from string, n int, mark string) step {
		return step{from: from, offer: &accept{ballot{n, from}, *second(mark)}}
	}
	yes := func(s step) step { s.yes = true; return s }
	had := func(s step, mark string, at ballot) step { s.yes, s.had, s.at = true, mark, at; return s }
	no := func(s step, promised ballot) step { s.promise = promised; return s }
	b3, a4, b6 := ballot{3, "b"}, ballot{4, "a"}, ballot{6, "b"}

	l := voter(t, "c", threeAgents)
	l.connect("a", status{Index: 1})
	for i, s := range []step{
		yes(ask("b", 3)), // the same again
		no(ask("a", 2), b3),
		no(ask("a", 3), b3),        // for equal numbers, the later name is the later ballot
		no(offer("a", 2, "x"), b3), // nor is a value accepted
		no(offer("a", 0, "x"), b3), // also of the previous leader, who needs no promise
		yes(ask("b", 3)),           // the same again
		yes(offer("b", 3, "x")),
		yes(offer("b", 3, "x")),
		had(ask("a", 4), "x", b3),
		no(offer("b", 3, "x"), a4),
		no(ask("b", 3), a4),
		yes(offer("a", 4, "x")),
		had(ask("b", 5), "x", a4),
		yes(offer("b", 6, "y")), // to accept is to promise
		no(ask("a", 5), b6),
		no(offer("a", 5, "x"), b6),
		had(ask("b", 7), "y", b6),
	} {
		l.forget()
		if s.ask != nil {
			l.receive(s.from, &message{Prepare: s.ask})
		} else {
			l.receive(s.from, &message{Accept: s.offer})
		}
		p, a, n := l.promiseTo(s.from), l.acceptedTo(s.from), l.nackTo(s.from)
		switch {
		case s.yes && s.ask != nil:
			if p == nil || n != nil || p.Index != 2 || p.Ballot != s.ask.Ballot {
				t.Fatalf("step %d: promise %+v, refusal %+v", i, p, n)
			}
			had := ""
			if p.Accepted != nil {
				had = string(p.Accepted.Payload)
			}
			if had != s.had || p.At != s.at {
				t.Fatalf("step %d: promise with %+v at %v", i, p.Accepted, p.At)
			}
		case s.yes:
			if a == nil || n != nil || a.Index != 2 || a.Ballot != s.offer.Ballot {
				t.Fatalf("step %d: accepted %+v, refusal %+v", i, a, n)
			}
		case p != nil || a != nil || n == nil || n.Promised != s.promise || n.Index != 1:
			t.Fatalf("step %d: promise %+v, accepted %+v, refusal %+v", i, p, a, n)
		}
	}
}

// TestVotesAreForTheNextDecision checks that an agent votes only on its next decision, and sends a decision to an agent
// that asks for an older one.
func TestVotesAreForTheNextDecision(t *testing.T) {
	for _, m := range []*message{
		{Prepare: &prepare{3, ballot{9, "b"}}},
		{Accept: &accept{ballot{9, "b"}, *start("a", assignmentOf(3, "b:1 c:2"))}},
	} {
		l := voter(t, "c", threeAgents)
		l.forget()
		l.receive("b", m)
		if l.promiseTo("b") != nil || l.acceptedTo("b") != nil || l.nackTo("b") == nil || l.nackTo("b").Index != 1 {
			t.Errorf("of a later decision: %+v", l.sent)
		}
		l.receive("b", &message{Prepare: &prepare{2, ballot{1, "b"}}})
		if l.promiseTo("b") == nil {
			t.Errorf("it holds back its vote for the next: %+v", l.sent)
		}
	}
	for _, m := range []*message{
		{Prepare: &prepare{1, ballot{9, "b"}}},
		{Accept: &accept{ballot{9, "b"}, *start("b", threeAgents)}},
	} {
		l := voter(t, "c", threeAgents)
		l.forget()
		l.receive("b", m)
		if l.promiseTo("b") != nil || l.acceptedTo("b") != nil {
			t.Errorf("a vote on an older decision: %+v", l.sent)
		}
		if d := l.decidedTo("b"); d == nil || d.Index != 1 || d.Leader.Name != "a" {
			t.Errorf("of an older decision: %+v", l.sent)
		}
	}
}

// TestVotesEndWithTheDecision checks that promises and accepted values do not carry over to the next decision.
func TestVotesEndWithTheDecision(t *testing.T) {
	l := voter(t, "c", threeAgents)
	l.receive("b", &message{Accept: &accept{ballot{7, "b"}, *second("x")}})
	l.receive("b", &message{Decided: second("x")})
	l.forget()
	l.receive("b", &message{Prepare: &prepare{3, ballot{1, "b"}}})
	if p := l.promiseTo("b"); p == nil || p.Accepted != nil {
		t.Errorf("promise %+v, refusal %+v", p, l.nackTo("b"))
	}
}

// TestVoterThatHearsALeader checks that an agent with a live leader promises only to that leader, and names it to
// others.
func TestVoterThatHearsALeader(t *testing.T) {
	l := follower(t, "c")
	l.connect("b", status{Index: 1})
	l.receive("b", &message{Prepare: &prepare{2, ballot{1, "b"}}})
	if n := l.nackTo("b"); l.promiseTo("b") != nil || n == nil || n.Leader != peerAddr("a") {
		t.Errorf("promise %+v, refusal %+v", l.promiseTo("b"), n)
	}
	l.receive("a", &message{Prepare: &prepare{2, ballot{1, "a"}}})
	if l.promiseTo("a") == nil {
		t.Error("no promise for its leader")
	}
	l.forget()
	l.receive("b", &message{Prepare: &prepare{2, ballot{9, "b"}}})
	if n := l.nackTo("b"); n == nil || n.Leader != peerAddr("a") {
		t.Errorf("it has left its leader: refusal %+v", n)
	}
	l = leader(t)
	l.receive("b", &message{Prepare: &prepare{2, ballot{1, "b"}}})
	if n := l.nackTo("b"); l.promiseTo("b") != nil || n == nil || n.Leader != peerAddr("a") {
		t.Errorf("a leader: promise %+v, refusal %+v", l.promiseTo("b"), n)
	}
}

// TestDecisionsAreFinal checks that later messages about a made decision have no effect.
func TestDecisionsAreFinal(t *testing.T) {
	l := follower(t, "b")
	l.receive("a", &message{Decided: second("x")})
	l.forget()
	for _, d := range []*decision{second("y"), start("a", threeAgents), endDecision(2, "a", 0),
		endDecision(1, "a", 0)} {
		l.receive("a", &message{Decided: d})
	}
	l.connect("c", status{Index: 1})
	if d := l.decidedTo("c"); d == nil || string(d.Payload) != "x" {
		t.Errorf("c is told %+v", d)
	}
	if len(l.ends) > 0 || l.aborted() || last(l, "a", func(m *message) *int { return m.EndConfirmed }) != nil {
		t.Errorf("the job ends: %v, %v", l.ends, l.heard)
	}
	l = leader(t)
	l.forget()
	l.receive("b", &message{Decided: start("b", threeAgents)})
	if l.statusTo("b") != nil || l.aborted() {
		t.Errorf("a leader hears an old decision: %+v, news %v", l.statusTo("b"), l.heard)
	}
}

// TestLaterDecisionIsFollowed checks that a later decision ends the running start and the lead of another leader, and
// that its leader is dialed.
func TestLaterDecisionIsFollowed(t *testing.T) {
	later := start("c", assignmentOf(2, "b:1 c:2"))
	for name, l := range map[string]*isolatedAgent{"leader": leader(t), "candidate": campaigner(t, quintet)} {
		l.forget()
		l.m.down("c", "no word")
		from := map[string]string{"leader": "b", "candidate": "d"}[name]
		l.receive(from, &message{Decided: later})
		if s := l.statusTo(from); s == nil || s.Leader.Name != "" {
			t.Errorf("%s: says %+v", name, s)
		}
		if name == "leader" && len(l.heard) == 0 {
			t.Error("its workers go on")
		}
		if l.dials[addrOf("c")] == 0 {
			t.Errorf("%s: dialed %v", name, l.dials)
		}
		l.forget()
		l.connect("c", status{2, peerAddr("c"), initialBallot("c")})
		if last(l, "c", func(m *message) *join { return m.Join }) == nil {
			t.Errorf("%s: does not join the leader of the later decision", name)
		}
	}
	// A follower keeps its leader until that gives up, and then follows the sender of the decision.
	l := follower(t, "b")
	l.connect("c", status{1, peerAddr("c"), ballot{1, "c"}})
	l.receive("c", &message{Decided: later})
	l.receive("a", &message{Status: &status{Index: 2}})
	l.advance(time.Second)
	if last(l, "c", func(m *message) *join { return m.Join }) == nil {
		t.Errorf("does not join the leader of the later decision")
	}
}

// TestEndIsConfirmed checks that an agent confirms the end, and that its launcher gets the end once.
func TestEndIsConfirmed(t *testing.T) {
	l := follower(t, "b")
	l.receive("a", &message{Decided: endDecision(2, "a", 3)})
	if told := last(l, "a", func(m *message) *int { return m.EndConfirmed }); told == nil || *told != 2 {
		t.Errorf("told %v", told)
	}
	if len(l.heard) != 1 || l.heard[0].Lost == "" {
		t.Errorf("news %+v", l.heard)
	}
	l.endsHere(-1)
	if len(l.verdicts) != 1 || l.verdicts[0].ExitCode != 3 || l.verdicts[0].Again {
		t.Errorf("verdicts %+v", l.verdicts)
	}
}

// TestLaterLeaderIsFollowed checks that a leader steps down for a leader of the same decision with a later ballot: a
// quorum elected it.
func TestLaterLeaderIsFollowed(t *testing.T) {
	for _, c := range []struct {
		status
		down bool
	}{
		{status{1, peerAddr("b"), ballot{1, "b"}}, true},
		{status{1, peerAddr("b"), ballot{}}, false},           // an earlier ballot
		{status{1, peerAddr("c"), ballot{1, "c"}}, false},     // reported by another agent
		{status{0, peerAddr("b"), ballot{1, "b"}}, false},     // it has fewer decisions
		{status{1, PeerAddr{}, ballot{1, "b"}}, false},        // it no longer leads
		{status{1, peerAddr("b"), initialBallot("a")}, false}, // the same
		{status{1, peerAddr("b"), ballot{0, "b"}}, true},      // for equal numbers, the later name
	} {
		l := leader(t)
		l.receive("b", &message{Status: &c.status})
		down := last(l, "b", func(m *message) *join { return m.Join }) != nil
		if down != c.down || l.aborted() != c.down {
			t.Errorf("%+v: it follows: %v, its caller is told: %v", c.status, down, l.aborted())
		}
	}
}
