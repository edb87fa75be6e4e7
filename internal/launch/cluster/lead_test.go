package cluster

import (
	"errors"
	"testing"
	"time"
)

// Elections, and proposals of a leader.

// TestQuorumElects checks that an agent leads exactly when a quorum has promised its ballot.
func TestQuorumElects(t *testing.T) {
	type vote struct {
		from   string
		change func(*promise)
	}
	none := func(*promise) {}
	for _, c := range []struct {
		name  string
		votes []vote
		leads bool
	}{
		{"its own", nil, false},
		{"one of four", []vote{{"c", none}}, false},
		{"the same again", []vote{{"c", none}, {"c", none}}, false},
		{"two", []vote{{"c", none}, {"d", none}}, true},
		{"one for an earlier ballot", []vote{{"c", none}, {"d", func(p *promise) { p.Ballot.N-- }}}, false},
		{"one for that of another agent", []vote{{"c", none}, {"d", func(p *promise) { p.Ballot.Name = "e" }}}, false},
		{"one for another decision", []vote{{"c", none}, {"d", func(p *promise) { p.Index++ }}}, false},
		{"one of a spare", []vote{{"c", none}, {"s", none}}, false},
	} {
		l := campaigner(t, quintet)
		l.connect("s", status{Index: 1})
		if l.prepareTo("s") != nil {
			t.Error("a spare is asked for its vote")
		}
		asked := *l.prepareTo("c")
		for _, v := range c.votes {
			p := &promise{Index: asked.Index, Ballot: asked.Ballot}
			v.change(p)
			l.receive(v.from, &message{Promise: p})
		}
		if l.leads("e") != c.leads || c.leads && l.statusTo("e").Ballot != asked.Ballot {
			t.Errorf("%s: leads: %v, under %+v", c.name, l.leads("e"), l.statusTo("e"))
		}
	}
}

// TestVoterThatComesBackIsAsked checks that a returning voter is asked again, unless it has promised.
func TestVoterThatComesBackIsAsked(t *testing.T) {
	l := campaigner(t, quintet)
	l.promise("c", l.prepareTo("c"), nil, ballot{})
	for _, c := range []struct {
		name  string
		asked bool
	}{{"c", false}, {"d", true}} {
		l.m.down(c.name, "its agent has closed the connection")
		l.forget()
		l.connect(c.name, status{Index: 1})
		if asked := l.prepareTo(c.name) != nil; asked != c.asked {
			t.Errorf("%s is asked again: %v", c.name, asked)
		}
	}
}

// TestVoterThatIsMissingIsDialed checks that a missing voter is dialed while its vote is needed, and gets the value
// when it connects.
func TestVoterThatIsMissingIsDialed(t *testing.T) {
	l := campaigner(t, quintet)
	misses := func(when string, want bool) {
		t.Helper()
		l.m.dialed(addrOf("e"), errors.New("refused"))
		clear(l.dials)
		l.advance(maxRedial + time.Second)
		if dialed := l.dials[addrOf("e")] > 0; dialed != want {
			t.Errorf("%s: dialed: %v", when, dialed)
		}
	}
	l.m.down("e", "no word")
	misses("for its promise", true)
	asked := l.prepareTo("c")
	l.promise("c", asked, second("x"), initialBallot("a"))
	l.promise("d", asked, nil, ballot{})
	misses("for its acceptance", true)
	l.connect("e", status{Index: 1})
	if l.acceptTo("e") == nil {
		t.Error("a voter that comes back is not offered the value")
	}
	l = campaigner(t, quintet)
	asked = l.prepareTo("c")
	l.promise("c", asked, nil, ballot{})
	l.promise("d", asked, nil, ballot{})
	l.m.down("e", "no word")
	misses("for nothing", false)
}

// TestMeetingPlaceIsDialedAgain checks that an agent without decisions asks for no votes, and dials the rendezvous
// repeatedly.
func TestMeetingPlaceIsDialedAgain(t *testing.T) {
	l := newIsolatedAgent(t, "b")
	for n := 1; n < 4; n++ {
		l.advance(maxRedial + time.Second)
		if l.dials[addrOf("a")] != n {
			t.Fatalf("dialed %d times, want %d", l.dials[addrOf("a")], n)
		}
		l.m.dialed(addrOf("a"), errors.New("refused"))
	}
}

// TestElectedOffersItsOwnValue checks that an elected leader without a bound value proposes its own under the promised
// ballot.
func TestElectedOffersItsOwnValue(t *testing.T) {
	l := elected(t, nil, ballot{})
	asked := l.prepareTo("c")
	for _, to := range []string{"c", "b"} { // too early: no value is proposed yet
		l.receive("c", &message{Accepted: &accepted{Index: 2, Ballot: ballot{asked.Ballot.N, to}}})
	}
	l.receive("c", &message{Nack: &nack{Index: 1, Promised: ballot{8, "c"}}}) // an unneeded vote
	l.receive("c", &message{Join: &join{Ended: failedAt(1, 5)}})
	l.endsHere(2)
	l.advance(15 * time.Second) // a does not return
	l.m.next()
	l.advance(time.Second)
	if len(l.prepares) != 1 || l.decidedTo("c") != nil {
		t.Fatalf("prepared %+v, decided %+v", l.prepares, l.decidedTo("c"))
	}
	l.forget()
	l.m.prepared(2, []byte("own"), nil, nil)
	if a := l.acceptTo("c"); a == nil || string(a.Decision.Payload) != "own" || a.Ballot != asked.Ballot {
		t.Errorf("offered %+v", a)
	}
	if p := l.prepareTo("c"); p != nil {
		t.Errorf("asked anew %+v", p)
	}
	l.accept("c", l.acceptTo("c"))
	if d := l.decidedTo("c"); d == nil || string(d.Payload) != "own" || d.Leader.Name != "b" {
		t.Errorf("decided %+v", d)
	}
	if l.m.hello().Status.Ballot != initialBallot("b") {
		t.Errorf("it leads under %+v", l.m.hello().Status.Ballot)
	}
}

// TestLatePromiseChangesNothing checks that a promise after the proposal changes neither the value nor its acceptances.
func TestLatePromiseChangesNothing(t *testing.T) {
	l := campaigner(t, quintet)
	asked := l.prepareTo("c")
	l.promise("c", asked, second("x"), ballot{1, "a"})
	l.promise("d", asked, nil, ballot{})
	l.promise("e", asked, second("y"), ballot{1, "e"})
	l.accept("c", l.acceptTo("c"))
	for _, to := range []string{"c", "d", "e"} {
		if a := l.acceptTo(to); a == nil || string(a.Decision.Payload) != "x" {
			t.Errorf("%s is offered %+v", to, a)
		}
	}
	if d := l.decidedTo("c"); d != nil {
		t.Errorf("decided by a promise: %+v", d)
	}
	l.accept("d", l.acceptTo("d"))
	if d := l.decidedTo("c"); d == nil || string(d.Payload) != "x" {
		t.Errorf("decided %+v", d)
	}
}

// TestHalfWithTheFirstElects checks that exactly half of the members elect if the one with the first ranks is among
// them.
func TestHalfWithTheFirstElects(t *testing.T) {
	for _, c := range []struct {
		world string
		leads bool
	}{{"a:0 b:1 c:2 d:3", false}, {"b:0 a:1 c:2 d:3", true}} {
		w := assignmentOf(1, c.world)
		l := newIsolatedAgent(t, "b")
		l.connect("a", status{})
		l.receive("a", &message{Decided: start("a", w)})
		l.m.down("a", "no word")
		l.connect("c", status{Index: 1})
		l.advance(time.Second)
		l.promise("c", l.prepareTo("c"), nil, ballot{})
		if l.leads("c") != c.leads {
			t.Errorf("%s: b and c lead: %v", c.world, l.leads("c"))
		}
	}
}

// TestElectedPutsForwardTheLatestValue checks that an elected leader proposes the value of the latest ballot among all
// promises and its own, in any order: it may have been decided.
func TestElectedPutsForwardTheLatestValue(t *testing.T) {
	low, high := ballot{1, "d"}, ballot{2, "a"}
	type vote struct {
		from, mark string
		at         ballot
	}
	for _, c := range []struct {
		name  string
		own   *accept // accepted before it asks
		votes []vote
		want  string // proposer of the offered value
	}{
		{"one value", nil, []vote{{"c", "low", low}, {"d", "", ballot{}}}, "low"},
		{"one value, last", nil, []vote{{"d", "", ballot{}}, {"c", "low", low}}, "low"},
		{"the later one first", nil, []vote{{"c", "high", high}, {"d", "low", low}}, "high"},
		{"the later one last", nil, []vote{{"c", "low", low}, {"d", "high", high}}, "high"},
		{"of equal numbers", nil, []vote{{"c", "b", ballot{1, "b"}}, {"d", "c", ballot{1, "c"}}}, "c"},
		{"its own", &accept{high, *second("own")}, []vote{{"c", "low", low}, {"d", "low", low}}, "own"},
		{"a later one than its own", &accept{low, *second("own")},
			[]vote{{"c", "high", high}, {"d", "", ballot{}}}, "high"},
		{"of a leader without promises", nil, []vote{{"c", "low", initialBallot("a")}, {"d", "", ballot{}}}, "low"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := voter(t, "b", quintet)
			if c.own != nil {
				l.receive("c", &message{Accept: c.own})
			}
			l.advance(5 * time.Second)
			asked := l.prepareTo("c")
			for _, v := range c.votes {
				var d *decision
				if v.mark != "" {
					d = second(v.mark)
				}
				l.promise(v.from, asked, d, v.at)
			}
			for _, to := range []string{"c", "d", "e"} {
				a := l.acceptTo(to)
				if a == nil || string(a.Decision.Payload) != c.want || a.Decision.Leader.Name != "a" ||
					a.Ballot != asked.Ballot {
					t.Errorf("%s is offered %+v, want %s unchanged", to, a, c.want)
				}
			}
			if l.decidedTo("c") != nil {
				t.Error("it is decided before anybody has accepted it")
			}
			l.accept("c", l.acceptTo("c"))
			l.accept("d", l.acceptTo("d"))
			if d := l.decidedTo("e"); d == nil || string(d.Payload) != c.want {
				t.Errorf("decided %+v", d)
			}
			if b := l.m.hello().Status.Ballot; b != asked.Ballot { // a, which proposed the value, may also lead
				t.Errorf("it leads under %v, and was elected under %v", b, asked.Ballot)
			}
		})
	}
}

// TestLeaderAsksForPromises checks that a leader that did not propose the last decision needs promises. It replaces its
// value by one in the promises, which may have been decided.
func TestLeaderAsksForPromises(t *testing.T) {
	for _, c := range []struct {
		name string
		had  *decision // accepted by c
		at   ballot
		want string // who has put forward what is offered
	}{
		{"another value", start("c", assignmentOf(3, "c:2")), ballot{1, "c"}, "c"},
		{"none", nil, ballot{}, "b"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := elected(t, start("a", assignmentOf(2, "c:0 b:1")), initialBallot("a"))
			l.accept("c", l.acceptTo("c"))
			l.receive("c", &message{Join: &join{}})
			if l.begun[len(l.begun)-1] != 2 {
				l.endsHere(2)
				l.m.next()
			}
			l.endsHere(2)
			l.receive("c", &message{Ended: failedAt(2, 0)})
			l.m.next()
			l.advance(3 * time.Second)
			if n := len(l.prepares); n == 0 || l.prepares[n-1].Generation != 3 {
				t.Fatalf("prepared %+v", l.prepares)
			}
			l.forget()
			l.m.prepared(3, []byte("own"), nil, nil)
			asked := l.prepareTo("c")
			if l.acceptTo("c") != nil || asked == nil || asked.Index != 3 {
				t.Fatalf("offered without a promise: %+v", l.sent)
			}
			l.receive("c", &message{Accepted: &accepted{Index: 3, Ballot: asked.Ballot}}) // too early
			if l.decidedTo("c") != nil {
				t.Fatal("decided without a promise")
			}
			l.receive("c", &message{Nack: &nack{Index: 2, Promised: ballot{1, "c"}}}) // not answered at once
			if l.prepareTo("c").Ballot != asked.Ballot {
				t.Fatalf("asked anew at once: %+v", l.prepareTo("c"))
			}
			l.promise("c", asked, c.had, c.at)
			a := l.acceptTo("c")
			if a == nil || a.Decision.Leader.Name != c.want || a.Ballot != asked.Ballot {
				t.Fatalf("offered %+v, want what %s has put forward", a, c.want)
			}
			l.advance(time.Second)
			if l.newsTo("c") != nil {
				t.Errorf("the start that is over is given up again: %+v", l.newsTo("c"))
			}
			l.accept("c", a)
			if d := l.decidedTo("c"); d == nil || d.Leader.Name != c.want {
				t.Errorf("decided %+v", d)
			}
		})
	}
}

// TestFirstBallotIsNotUsedAfterALaterOne checks that the last decision's leader proposes under its initial ballot,
// unless it has accepted a value under a later one.
func TestFirstBallotIsNotUsedAfterALaterOne(t *testing.T) {
	next := func(l *isolatedAgent) {
		l.listens("")
		for _, name := range []string{"b", "c"} {
			l.receive(name, &message{Ended: failedAt(1, 3)})
		}
		l.endsHere(0)
		l.m.next()
		l.advance(time.Second)
		l.forget()
		l.m.prepared(2, []byte("own"), nil, nil)
	}
	l := leader(t)
	next(l)
	if a := l.acceptTo("b"); a == nil || a.Ballot != initialBallot("a") || string(a.Decision.Payload) != "own" {
		t.Errorf("offered %+v", a)
	}
	l = leader(t)
	l.receive("b", &message{Accept: &accept{ballot{4, "b"}, *second("other")}})
	next(l)
	if l.acceptTo("b") != nil || l.prepareTo("b") == nil || l.prepareTo("b").Ballot.compare(ballot{4, "b"}) <= 0 {
		t.Fatalf("offered %+v, asked %+v", l.acceptTo("b"), l.prepareTo("b"))
	}
	l.promise("b", l.prepareTo("b"), nil, ballot{})
	if a := l.acceptTo("b"); a == nil || string(a.Decision.Payload) != "other" {
		t.Errorf("offered %+v, want what it has accepted itself", a)
	}
}

// TestQuorumDecides checks that a value is decided exactly when a quorum has accepted it under its ballot.
func TestQuorumDecides(t *testing.T) {
	type vote struct {
		from   string
		change func(*accepted)
	}
	none := func(*accepted) {}
	for _, c := range []struct {
		name    string
		votes   []vote
		decided bool
	}{
		{"its own", nil, false},
		{"one of four", []vote{{"c", none}}, false},
		{"the same again", []vote{{"c", none}, {"c", none}}, false},
		{"two", []vote{{"c", none}, {"d", none}}, true},
		{"two that have not promised", []vote{{"a", none}, {"e", none}}, true},
		{"one under an earlier ballot", []vote{{"c", none}, {"d", func(a *accepted) { a.Ballot.N-- }}}, false},
		{"one under that of another agent", []vote{{"c", none}, {"d", func(a *accepted) { a.Ballot.Name = "e" }}},
			false},
		{"one of another decision", []vote{{"c", none}, {"d", func(a *accepted) { a.Index++ }}}, false},
		{"one of a spare", []vote{{"c", none}, {"s", none}}, false},
	} {
		l := campaigner(t, quintet)
		l.connect("a", status{Index: 1})
		l.connect("s", status{Index: 1})
		asked := l.prepareTo("c")
		l.promise("c", asked, second("x"), initialBallot("a"))
		// too early: no value is proposed yet
		l.receive("c", &message{Accepted: &accepted{Index: 2, Ballot: asked.Ballot}})
		l.promise("d", asked, nil, ballot{})
		for _, v := range c.votes {
			a := &accepted{Index: 2, Ballot: asked.Ballot}
			v.change(a)
			l.receive(v.from, &message{Accepted: a})
		}
		if d := l.decidedTo("e"); d != nil != c.decided || d != nil && string(d.Payload) != "x" {
			t.Errorf("%s: decided %+v", c.name, d)
		}
	}
}

// TestOneValueOfABallot checks that a ballot keeps its value even if the leader's wishes change; isolatedAgent.send
// verifies each proposal.
func TestOneValueOfABallot(t *testing.T) {
	l := campaigner(t, quintet)
	asked := l.prepareTo("c")
	l.promise("c", asked, second("x"), initialBallot("a"))
	l.promise("d", asked, nil, ballot{})
	// Start 1 meanwhile ends with an error without restart: b would now propose the end of the job.
	for _, name := range []string{"c", "d", "e"} {
		l.receive(name, &message{Join: &join{Ended: &ended{Index: 1, Fault: "the disk is gone"}}})
	}
	l.endsHere(-1)
	l.advance(15 * time.Second) // a does not return
	l.accept("c", l.acceptTo("c"))
	l.accept("d", l.acceptTo("d"))
	if d := l.decidedTo("c"); d == nil || string(d.Payload) != "x" {
		t.Errorf("decided %+v", d)
	}
}

// TestRefusedLeaderAsksAnew checks that a leader refused for a later ballot asks again above it, and offers the value
// in the promises.
func TestRefusedLeaderAsksAnew(t *testing.T) {
	l := campaigner(t, threeAgents)
	l.promise("c", l.prepareTo("c"), second("x"), initialBallot("a"))
	was := l.acceptTo("c").Ballot
	l.forget()
	l.receive("c", &message{Nack: &nack{Index: 1, Promised: ballot{8, "c"}}}) // an unneeded vote
	asked := l.prepareTo("c")
	if asked == nil || asked.Ballot.compare(ballot{8, "c"}) <= 0 {
		t.Fatalf("asked %+v", asked)
	}
	l.receive("c", &message{Accepted: &accepted{Index: 2, Ballot: was}}) // for the old ballot
	if l.decidedTo("c") != nil {
		t.Fatal("decided without the promises of the new ballot")
	}
	l.promise("c", asked, second("y"), ballot{8, "c"})
	if a := l.acceptTo("c"); a == nil || string(a.Decision.Payload) != "y" || a.Ballot != asked.Ballot {
		t.Errorf("offered %+v", a)
	}
	// It answers a refused promise in the next round.
	c := campaigner(t, quintet)
	now := c.prepareTo("c").Ballot
	c.receive("c", &message{Nack: &nack{Index: 1, Promised: ballot{8, "c"}}})
	if b := c.prepareTo("c").Ballot; b != now {
		t.Errorf("asked at once under %+v", b)
	}
	c.advance(2*voteRound + time.Second)
	if b := c.prepareTo("c").Ballot; b.N <= 8 {
		t.Errorf("asked under %+v", b)
	}
	// A refusal for a lower ballot, or another decision, has no effect.
	l.forget()
	l.receive("c", &message{Nack: &nack{Index: 1, Promised: ballot{2, "c"}}})
	l.receive("c", &message{Nack: &nack{Index: 2, Promised: ballot{99, "c"}}})
	if l.prepareTo("c") != nil {
		t.Errorf("asked anew %+v", l.prepareTo("c"))
	}
}

// TestRefusalsTell checks the contents of refusals: a voter with fewer decisions gets the last one and is asked again,
// and a named leader is dialed. An agent without a proposal ignores refusals.
func TestRefusalsTell(t *testing.T) {
	l := campaigner(t, quintet)
	l.forget()
	l.receive("c", &message{Nack: &nack{}})
	if d := l.decidedTo("c"); d == nil || d.Index != 1 || l.prepareTo("c") == nil {
		t.Errorf("a voter that is behind: %+v", l.sent)
	}
	l.receive("c", &message{Nack: &nack{Index: 1, Promised: ballot{50, "x"}, Leader: PeerAddr{"x", addrOf("x")}}})
	if l.dials[addrOf("x")] != 1 {
		t.Errorf("dialed %v", l.dials)
	}
	l = voter(t, "c", quintet)
	l.receive("b", &message{Nack: &nack{Index: 1, Promised: ballot{5, "b"}}})
	if l.prepareTo("b") != nil {
		t.Error("a refusal of nothing makes a candidate")
	}
}

// TestRoundIsAskedAnew checks that a candidate asks again after a round, under another ballot, for which old promises
// do not count.
func TestRoundIsAskedAnew(t *testing.T) {
	l := campaigner(t, quintet)
	was := l.prepareTo("c")
	l.promise("c", was, nil, ballot{})
	l.advance(voteRound - time.Second) // one second of the round has passed
	if b := l.prepareTo("c").Ballot; b != was.Ballot {
		t.Fatalf("asked under %+v before the round was over", b)
	}
	l.advance(voteRound + 2*time.Second)
	now := l.prepareTo("c")
	if now.Ballot.compare(was.Ballot) <= 0 {
		t.Fatalf("asked under %v, then %v", was.Ballot, now.Ballot)
	}
	l.promise("d", now, nil, ballot{})
	l.promise("e", was, nil, ballot{})
	if l.leads("e") {
		t.Error("it leads by promises of two ballots")
	}
	l.promise("e", now, nil, ballot{})
	if !l.leads("e") {
		t.Error("it does not lead by a quorum")
	}
}

// TestCandidateGivesWay checks that a candidate yields to a later ballot: it ignores further promises, and gives the
// other one time.
func TestCandidateGivesWay(t *testing.T) {
	l := campaigner(t, quintet)
	asked := l.prepareTo("c")
	l.promise("c", asked, nil, ballot{})
	l.receive("d", &message{Prepare: &prepare{2, ballot{asked.Ballot.N, "d"}}})
	if p := l.promiseTo("d"); p == nil {
		t.Fatalf("refused: %+v", l.nackTo("d"))
	}
	l.promise("e", asked, nil, ballot{})
	if l.leads("e") {
		t.Error("it leads by a ballot below what it has promised")
	}
	l.forget()
	l.advance(2*voteRound - time.Second)
	if l.prepareTo("c") != nil {
		t.Error("it asks again at once")
	}
	l.advance(2 * time.Second)
	if p := l.prepareTo("c"); p == nil || p.Ballot.compare(ballot{asked.Ballot.N, "d"}) <= 0 {
		t.Errorf("asked %+v", p)
	}
}
