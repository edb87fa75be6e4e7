package cluster

import (
	"errors"
	"testing"
	"time"
)

// How an agent comes to lead, and gets a decision.

// An agent leads when a quorum has promised what it was asked for, and not before.
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
		l.up("s", status{Index: 1})
		if l.asks("s") != nil {
			t.Error("a spare is asked for its vote")
		}
		asked := *l.asks("c")
		for _, v := range c.votes {
			p := &promise{Index: asked.Index, Ballot: asked.Ballot}
			v.change(p)
			l.from(v.from, &message{Promise: p})
		}
		if l.leads("e") != c.leads || c.leads && l.says("e").Ballot != asked.Ballot {
			t.Errorf("%s: leads: %v, under %+v", c.name, l.leads("e"), l.says("e"))
		}
	}
}

// A voter that comes back is asked again, unless it has promised.
func TestVoterThatComesBackIsAsked(t *testing.T) {
	l := campaigner(t, quintet)
	l.promise("c", l.asks("c"), nil, ballot{})
	for _, c := range []struct {
		name  string
		asked bool
	}{{"c", false}, {"d", true}} {
		l.m.down(c.name, "its agent has closed the connection")
		l.forget()
		l.up(c.name, status{Index: 1})
		if asked := l.asks(c.name) != nil; asked != c.asked {
			t.Errorf("%s is asked again: %v", c.name, asked)
		}
	}
}

// A voter that is missing is dialed as long as its vote is sought, and offered the value when it comes.
func TestVoterThatIsMissingIsDialed(t *testing.T) {
	l := campaigner(t, quintet)
	misses := func(when string, want bool) {
		t.Helper()
		l.m.dialed(addrOf("e"), errors.New("refused"))
		clear(l.dials)
		l.runs(maxRedial + time.Second)
		if dialed := l.dials[addrOf("e")] > 0; dialed != want {
			t.Errorf("%s: dialed: %v", when, dialed)
		}
	}
	l.m.down("e", "no word")
	misses("for its promise", true)
	asked := l.asks("c")
	l.promise("c", asked, second("x"), initialBallot("a"))
	l.promise("d", asked, nil, ballot{})
	misses("for its acceptance", true)
	l.up("e", status{Index: 1})
	if l.offers("e") == nil {
		t.Error("a voter that comes back is not offered the value")
	}
	l = campaigner(t, quintet)
	asked = l.asks("c")
	l.promise("c", asked, nil, ballot{})
	l.promise("d", asked, nil, ballot{})
	l.m.down("e", "no word")
	misses("for nothing", false)
}

// Before the first decision there is nobody to vote, and the meeting place is dialed again and again.
func TestMeetingPlaceIsDialedAgain(t *testing.T) {
	l := newLone(t, "b")
	for n := 1; n < 4; n++ {
		l.runs(maxRedial + time.Second)
		if l.dials[addrOf("a")] != n {
			t.Fatalf("dialed %d times, want %d", l.dials[addrOf("a")], n)
		}
		l.m.dialed(addrOf("a"), errors.New("refused"))
	}
}

// An elected leader that is bound to no value puts its own forward under the ballot that has the promises.
func TestElectedOffersItsOwnValue(t *testing.T) {
	l := elected(t, nil, ballot{})
	asked := l.asks("c")
	for _, to := range []string{"c", "b"} { // too early: nothing is offered yet
		l.from("c", &message{Accepted: &accepted{Index: 2, Ballot: ballot{asked.Ballot.N, to}}})
	}
	l.from("c", &message{Nack: &nack{Index: 1, Promised: ballot{8, "c"}}}) // of a vote that was not needed
	l.from("c", &message{Join: &join{Ended: failedAt(1, 5)}})
	l.endsHere(2)
	l.runs(15 * time.Second) // a does not come
	l.m.next()
	l.runs(time.Second)
	if len(l.prepares) != 1 || l.tells("c") != nil {
		t.Fatalf("prepared %+v, decided %+v", l.prepares, l.tells("c"))
	}
	l.forget()
	l.m.prepared(2, []byte("own"), nil, nil)
	if a := l.offers("c"); a == nil || string(a.Decision.Payload) != "own" || a.Ballot != asked.Ballot {
		t.Errorf("offered %+v", a)
	}
	if p := l.asks("c"); p != nil {
		t.Errorf("asked anew %+v", p)
	}
	l.accept("c", l.offers("c"))
	if d := l.tells("c"); d == nil || string(d.Payload) != "own" || d.Leader.Name != "b" {
		t.Errorf("decided %+v", d)
	}
	if l.m.hello().Status.Ballot != initialBallot("b") {
		t.Errorf("it leads under %+v", l.m.hello().Status.Ballot)
	}
}

// A promise that comes when the value is offered changes neither the value nor who has accepted it.
func TestLatePromiseChangesNothing(t *testing.T) {
	l := campaigner(t, quintet)
	asked := l.asks("c")
	l.promise("c", asked, second("x"), ballot{1, "a"})
	l.promise("d", asked, nil, ballot{})
	l.promise("e", asked, second("y"), ballot{1, "e"})
	l.accept("c", l.offers("c"))
	for _, to := range []string{"c", "d", "e"} {
		if a := l.offers(to); a == nil || string(a.Decision.Payload) != "x" {
			t.Errorf("%s is offered %+v", to, a)
		}
	}
	if d := l.tells("c"); d != nil {
		t.Errorf("decided by a promise: %+v", d)
	}
	l.accept("d", l.offers("d"))
	if d := l.tells("c"); d == nil || string(d.Payload) != "x" {
		t.Errorf("decided %+v", d)
	}
}

// Half of the world elects if the agent with the first ranks is among it: of two halves one goes on.
func TestHalfWithTheFirstElects(t *testing.T) {
	for _, c := range []struct {
		world string
		leads bool
	}{{"a:0 b:1 c:2 d:3", false}, {"b:0 a:1 c:2 d:3", true}} {
		w := worldOf(1, c.world)
		l := newLone(t, "b")
		l.up("a", status{})
		l.from("a", &message{Decided: start("a", w)})
		l.m.down("a", "no word")
		l.up("c", status{Index: 1})
		l.runs(time.Second)
		l.promise("c", l.asks("c"), nil, ballot{})
		if l.leads("c") != c.leads {
			t.Errorf("%s: b and c lead: %v", c.world, l.leads("c"))
		}
	}
}

// An agent that is elected puts forward what may have been decided: of all that the promises bring, the value of the
// latest ballot, whoever promises first, and its own among them.
func TestElectedPutsForwardTheLatestValue(t *testing.T) {
	low, high := ballot{1, "d"}, ballot{2, "a"}
	type vote struct {
		from, mark string
		at         ballot
	}
	for _, c := range []struct {
		name  string
		own   *accept // what it has accepted before it asks
		votes []vote
		want  string
	}{
		{"one value", nil, []vote{{"c", "low", low}, {"d", "", ballot{}}}, "low"},
		{"one value, last", nil, []vote{{"d", "", ballot{}}, {"c", "low", low}}, "low"},
		{"the later one first", nil, []vote{{"c", "high", high}, {"d", "low", low}}, "high"},
		{"the later one last", nil, []vote{{"c", "low", low}, {"d", "high", high}}, "high"},
		{"of equal numbers", nil, []vote{{"c", "b", ballot{1, "b"}}, {"d", "c", ballot{1, "c"}}}, "c"},
		{"its own", &accept{high, *second("own")}, []vote{{"c", "low", low}, {"d", "low", low}}, "own"},
		{"a later one than its own", &accept{low, *second("own")}, []vote{{"c", "high", high}, {"d", "", ballot{}}}, "high"},
		{"of a leader without promises", nil, []vote{{"c", "low", initialBallot("a")}, {"d", "", ballot{}}}, "low"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := voter(t, "b", quintet)
			if c.own != nil {
				l.from("c", &message{Accept: c.own})
			}
			l.runs(5 * time.Second)
			asked := l.asks("c")
			for _, v := range c.votes {
				var d *decision
				if v.mark != "" {
					d = second(v.mark)
				}
				l.promise(v.from, asked, d, v.at)
			}
			for _, to := range []string{"c", "d", "e"} {
				a := l.offers(to)
				if a == nil || string(a.Decision.Payload) != c.want || a.Decision.Leader.Name != "a" ||
					a.Ballot != asked.Ballot {
					t.Errorf("%s is offered %+v, want %s unchanged", to, a, c.want)
				}
			}
			if l.tells("c") != nil {
				t.Error("it is decided before anybody has accepted it")
			}
			l.accept("c", l.offers("c"))
			l.accept("d", l.offers("d"))
			if d := l.tells("e"); d == nil || string(d.Payload) != c.want {
				t.Errorf("decided %+v", d)
			}
			if b := l.m.hello().Status.Ballot; b != asked.Ballot { // a, which has put the value forward, may lead as well
				t.Errorf("it leads under %v, and was elected under %v", b, asked.Ballot)
			}
		})
	}
}

// A leader that did not put the last decision forward needs promises for its value. It gives the value up for one that
// they bring, since that may have been decided.
func TestLeaderAsksForPromises(t *testing.T) {
	for _, c := range []struct {
		name string
		had  *decision // that c has accepted
		at   ballot
		want string // who has put forward what is offered
	}{
		{"another value", start("c", worldOf(3, "c:2")), ballot{1, "c"}, "c"},
		{"none", nil, ballot{}, "b"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := elected(t, start("a", worldOf(2, "c:0 b:1")), initialBallot("a"))
			l.accept("c", l.offers("c"))
			l.from("c", &message{Join: &join{}})
			if l.begun[len(l.begun)-1] != 2 {
				l.endsHere(2)
				l.m.next()
			}
			l.endsHere(2)
			l.from("c", &message{Ended: failedAt(2, 0)})
			l.m.next()
			l.runs(3 * time.Second)
			if n := len(l.prepares); n == 0 || l.prepares[n-1].Generation != 3 {
				t.Fatalf("prepared %+v", l.prepares)
			}
			l.forget()
			l.m.prepared(3, []byte("own"), nil, nil)
			asked := l.asks("c")
			if l.offers("c") != nil || asked == nil || asked.Index != 3 {
				t.Fatalf("offered without a promise: %+v", l.sent)
			}
			l.from("c", &message{Accepted: &accepted{Index: 3, Ballot: asked.Ballot}}) // too early
			if l.tells("c") != nil {
				t.Fatal("decided without a promise")
			}
			l.from("c", &message{Nack: &nack{Index: 2, Promised: ballot{1, "c"}}}) // not answered at once
			if l.asks("c").Ballot != asked.Ballot {
				t.Fatalf("asked anew at once: %+v", l.asks("c"))
			}
			l.promise("c", asked, c.had, c.at)
			a := l.offers("c")
			if a == nil || a.Decision.Leader.Name != c.want || a.Ballot != asked.Ballot {
				t.Fatalf("offered %+v, want what %s has put forward", a, c.want)
			}
			l.runs(time.Second)
			if l.relays("c") != nil {
				t.Errorf("the start that is over is given up again: %+v", l.relays("c"))
			}
			l.accept("c", a)
			if d := l.tells("c"); d == nil || d.Leader.Name != c.want {
				t.Errorf("decided %+v", d)
			}
		})
	}
}

// The leader of the last decision puts the next one forward under its first ballot. It does not when it has accepted a
// value under a later one.
func TestFirstBallotIsNotUsedAfterALaterOne(t *testing.T) {
	next := func(l *lone) {
		l.listens("")
		for _, name := range []string{"b", "c"} {
			l.from(name, &message{Ended: failedAt(1, 3)})
		}
		l.endsHere(0)
		l.m.next()
		l.runs(time.Second)
		l.forget()
		l.m.prepared(2, []byte("own"), nil, nil)
	}
	l := leader(t)
	next(l)
	if a := l.offers("b"); a == nil || a.Ballot != initialBallot("a") || string(a.Decision.Payload) != "own" {
		t.Errorf("offered %+v", a)
	}
	l = leader(t)
	l.from("b", &message{Accept: &accept{ballot{4, "b"}, *second("other")}})
	next(l)
	if l.offers("b") != nil || l.asks("b") == nil || l.asks("b").Ballot.compare(ballot{4, "b"}) <= 0 {
		t.Fatalf("offered %+v, asked %+v", l.offers("b"), l.asks("b"))
	}
	l.promise("b", l.asks("b"), nil, ballot{})
	if a := l.offers("b"); a == nil || string(a.Decision.Payload) != "other" {
		t.Errorf("offered %+v, want what it has accepted itself", a)
	}
}

// A value is decided when a quorum has accepted it under its ballot, and not before.
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
		{"one under that of another agent", []vote{{"c", none}, {"d", func(a *accepted) { a.Ballot.Name = "e" }}}, false},
		{"one of another decision", []vote{{"c", none}, {"d", func(a *accepted) { a.Index++ }}}, false},
		{"one of a spare", []vote{{"c", none}, {"s", none}}, false},
	} {
		l := campaigner(t, quintet)
		l.up("a", status{Index: 1})
		l.up("s", status{Index: 1})
		asked := l.asks("c")
		l.promise("c", asked, second("x"), initialBallot("a"))
		l.from("c", &message{Accepted: &accepted{Index: 2, Ballot: asked.Ballot}}) // too early: nothing is offered yet
		l.promise("d", asked, nil, ballot{})
		for _, v := range c.votes {
			a := &accepted{Index: 2, Ballot: asked.Ballot}
			v.change(a)
			l.from(v.from, &message{Accepted: a})
		}
		if d := l.tells("e"); d != nil != c.decided || d != nil && string(d.Payload) != "x" {
			t.Errorf("%s: decided %+v", c.name, d)
		}
	}
}

// Under one ballot one value is put forward, whatever the leader would like by then: lone.send looks at all of them.
func TestOneValueOfABallot(t *testing.T) {
	l := campaigner(t, quintet)
	asked := l.asks("c")
	l.promise("c", asked, second("x"), initialBallot("a"))
	l.promise("d", asked, nil, ballot{})
	// Start 1 ends meanwhile, with a fault that nothing follows: b would like to end the job.
	for _, name := range []string{"c", "d", "e"} {
		l.from(name, &message{Join: &join{Ended: &ended{Index: 1, Fault: "the disk is gone"}}})
	}
	l.endsHere(-1)
	l.runs(15 * time.Second) // a does not come
	l.accept("c", l.offers("c"))
	l.accept("d", l.offers("d"))
	if d := l.tells("c"); d == nil || string(d.Payload) != "x" {
		t.Errorf("decided %+v", d)
	}
}

// A leader that is refused since another ballot was promised asks anew, above that one, and offers under the new one
// what the promises say.
func TestRefusedLeaderAsksAnew(t *testing.T) {
	l := campaigner(t, trio)
	l.promise("c", l.asks("c"), second("x"), initialBallot("a"))
	was := l.offers("c").Ballot
	l.forget()
	l.from("c", &message{Nack: &nack{Index: 1, Promised: ballot{8, "c"}}})
	asked := l.asks("c")
	if asked == nil || asked.Ballot.compare(ballot{8, "c"}) <= 0 {
		t.Fatalf("asked %+v", asked)
	}
	l.from("c", &message{Accepted: &accepted{Index: 2, Ballot: was}}) // of before
	if l.tells("c") != nil {
		t.Fatal("decided without the promises of the new ballot")
	}
	l.promise("c", asked, second("y"), ballot{8, "c"})
	if a := l.offers("c"); a == nil || string(a.Decision.Payload) != "y" || a.Ballot != asked.Ballot {
		t.Errorf("offered %+v", a)
	}
	// A refusal of its votes is answered in the next round.
	c := campaigner(t, quintet)
	now := c.asks("c").Ballot
	c.from("c", &message{Nack: &nack{Index: 1, Promised: ballot{8, "c"}}})
	if b := c.asks("c").Ballot; b != now {
		t.Errorf("asked at once under %+v", b)
	}
	c.runs(2*voteRound + time.Second)
	if b := c.asks("c").Ballot; b.N <= 8 {
		t.Errorf("asked under %+v", b)
	}
	// A refusal of less than its ballot, or of another decision, changes nothing.
	l.forget()
	l.from("c", &message{Nack: &nack{Index: 1, Promised: ballot{2, "c"}}})
	l.from("c", &message{Nack: &nack{Index: 2, Promised: ballot{99, "c"}}})
	if l.asks("c") != nil {
		t.Errorf("asked anew %+v", l.asks("c"))
	}
}

// What a refusal says besides: a voter that is behind is told the last decision and asked again; one that follows
// another leader names it, and it is dialed. An agent that has asked nothing takes none.
func TestRefusalsTell(t *testing.T) {
	l := campaigner(t, quintet)
	l.forget()
	l.from("c", &message{Nack: &nack{}})
	if d := l.tells("c"); d == nil || d.Index != 1 || l.asks("c") == nil {
		t.Errorf("a voter that is behind: %+v", l.sent)
	}
	l.from("c", &message{Nack: &nack{Index: 1, Promised: ballot{50, "x"}, Leader: PeerAddr{"x", addrOf("x")}}})
	if l.dials[addrOf("x")] != 1 {
		t.Errorf("dialed %v", l.dials)
	}
	l = voter(t, "c", quintet)
	l.from("b", &message{Nack: &nack{Index: 1, Promised: ballot{5, "b"}}})
	if l.asks("b") != nil {
		t.Error("a refusal of nothing makes a candidate")
	}
}

// A candidate asks anew when a round is over, under another ballot, for which old promises do not count.
func TestRoundIsAskedAnew(t *testing.T) {
	l := campaigner(t, quintet)
	was := l.asks("c")
	l.promise("c", was, nil, ballot{})
	l.runs(voteRound - time.Second) // one is over since it has asked
	if b := l.asks("c").Ballot; b != was.Ballot {
		t.Fatalf("asked under %+v before the round was over", b)
	}
	l.runs(voteRound + 2*time.Second)
	now := l.asks("c")
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

// A candidate gives way to a later ballot: it counts no more promises, and leaves the other its time.
func TestCandidateGivesWay(t *testing.T) {
	l := campaigner(t, quintet)
	asked := l.asks("c")
	l.promise("c", asked, nil, ballot{})
	l.from("d", &message{Prepare: &prepare{2, ballot{asked.Ballot.N, "d"}}})
	if p := l.promises("d"); p == nil {
		t.Fatalf("refused: %+v", l.refuses("d"))
	}
	l.promise("e", asked, nil, ballot{})
	if l.leads("e") {
		t.Error("it leads by a ballot below what it has promised")
	}
	l.forget()
	l.runs(2*voteRound - time.Second)
	if l.asks("c") != nil {
		t.Error("it asks again at once")
	}
	l.runs(2 * time.Second)
	if p := l.asks("c"); p == nil || p.Ballot.compare(ballot{asked.Ballot.N, "d"}) <= 0 {
		t.Errorf("asked %+v", p)
	}
}
