package cluster

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// Elections, and decisions in the run directory.

// quintet is a world of five agents; a leads.
var quintet = assignmentOf(1, "a:0 b:1 c:2 d:3 e:4")

// second returns decision 2 of a, to start b and c again.
func second(payload string) *decision {
	d := start("a", assignmentOf(2, "b:1 c:2"))
	d.Payload = []byte(payload)
	return d
}

func joins(l *isolatedAgent, to string) bool {
	return last(l, to, func(m *message) *join { return m.Join }) != nil
}

// TestQuorumElects checks that a candidate leads exactly when a quorum of the last world follows it.
func TestQuorumElects(t *testing.T) {
	join := &message{Join: &join{}}
	for _, c := range []struct {
		world  Assignment
		follow string
		leads  bool
	}{
		{quintet, "", false}, {quintet, "c", false}, {quintet, "c c", false}, {quintet, "c d", true},
		{quintet, "c s", false},
		{assignmentOf(1, "b:0 c:1 d:2 e:3"), "c", true}, // half with the first
		{assignmentOf(1, "a:0 b:1 c:2 d:3"), "c", false},
		{assignmentOf(1, "a:0 b:1 c:2 d:3"), "c d", true},
	} {
		l := newIsolatedAgent(t, "b")
		l.connect("a", status{})
		l.receive("a", &message{Decided: start("a", c.world)})
		l.m.down("a", "no word")
		for _, name := range []string{"c", "d", "e", "s"} {
			l.connect(name, status{Index: 1})
		}
		l.advance(time.Second)
		if s := l.statusTo("c"); s == nil || !s.Candidate || s.Leader.Name != "b" || s.Term != 1 {
			t.Fatalf("a candidate says %+v", s)
		}
		for _, name := range strings.Fields(c.follow) {
			l.receive(name, join)
		}
		if s := l.statusTo("e"); s.Candidate == c.leads || len(l.begun) > 0 != c.leads {
			t.Errorf("followed by %q of %d: says %+v, begun %v", c.follow, len(c.world.Members), s, l.begun)
		}
	}
}

// TestCandidateDialsTheMembers checks that a candidate dials the missing members, and a leader does not.
func TestCandidateDialsTheMembers(t *testing.T) {
	l := campaigner(t, quintet)
	dials := func() bool {
		l.m.dialed(addrOf("e"), errors.New("refused"))
		clear(l.dials)
		l.advance(maxRedial + time.Second)
		return l.dials[addrOf("e")] > 0
	}
	l.m.down("e", "no word")
	if !dials() {
		t.Error("a candidate does not dial")
	}
	for _, name := range []string{"c", "d"} {
		l.receive(name, &message{Join: &join{}})
	}
	if dials() {
		t.Error("a leader dials during a start")
	}
}

// TestMeetingPlaceIsDialedAgain checks that an agent without decisions does not become a candidate, and dials the
// rendezvous repeatedly.
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

// TestWhoYields checks that a leader steps down for one of a later term, which a quorum has followed, and a candidate
// for a leader or for a candidate that comes before it in the world.
func TestWhoYields(t *testing.T) {
	of := func(index int, name string, term int, candidate bool) status {
		return status{index, peerAddr(name), term, candidate}
	}
	for _, c := range []struct {
		who  string
		from string
		status
		yields bool
	}{
		{"leader", "b", of(1, "b", 1, false), true},
		{"leader", "b", of(1, "b", 0, false), false},
		{"leader", "b", of(1, "b", 9, true), false},
		{"leader", "b", of(1, "c", 1, false), false}, // reported by another agent
		{"leader", "b", of(0, "b", 1, false), false},
		{"candidate", "a", of(1, "a", 0, false), true},
		{"candidate", "a", of(1, "a", 0, true), true},
		{"candidate", "c", of(1, "c", 0, false), true},
		{"candidate", "c", of(1, "c", 9, true), false},
	} {
		l := leader(t)
		if c.who == "candidate" {
			l = campaigner(t, quintet)
			l.connect("a", status{Index: 1})
		}
		l.receive(c.from, &message{Status: &c.status})
		if yields := joins(l, c.from); yields != c.yields || l.aborted() != (c.yields && c.who == "leader") {
			t.Errorf("%s hears %+v: it follows: %v, its caller is told: %v", c.who, c.status, yields, l.aborted())
		}
	}
	l := campaigner(t, quintet)
	l.receive("c", &message{Status: &status{Index: 1, Leader: peerAddr("a")}})
	if l.dials[addrOf("a")] == 0 {
		t.Errorf("a candidate does not dial the leader of another agent: %v", l.dials)
	}
}

// TestFollowerOfACandidate checks that it begins no start before the candidate leads, and leaves one that does not come
// to lead, or when it meets a leader.
func TestFollowerOfACandidate(t *testing.T) {
	candidate := status{1, peerAddr("b"), 1, true}
	waiting := func() *isolatedAgent {
		l := orphan(t, "c", quintet)
		l.receive("b", &message{Status: &candidate})
		if !joins(l, "b") || len(l.begun) > 0 {
			t.Fatalf("joins: %v, begun %v", joins(l, "b"), l.begun)
		}
		return l
	}
	l := waiting()
	l.receive("b", &message{Status: &status{1, peerAddr("b"), 1, false}})
	if len(l.begun) != 1 {
		t.Error("it does not begin under its leader")
	}
	l = waiting()
	l.forget()
	l.advance(l.m.cfg.Silence + electTime + time.Second)
	if s := l.statusTo("d"); s == nil || s.Leader.Name == "b" {
		t.Errorf("after the limit it says %+v", s)
	}
	l = waiting()
	l.receive("d", &message{Status: &status{1, peerAddr("d"), 2, false}})
	if !joins(l, "d") || len(l.begun) != 1 {
		t.Error("it does not follow a leader")
	}
	l = waiting()
	l.m.down("b", "no word")
	if l.aborted() {
		t.Error("the loss of a candidate ends a start")
	}
}

// elects returns a new leader b whose start has ended, with the next start prepared.
func elects(t *testing.T) *isolatedAgent {
	l := elected(t)
	l.receive("c", &message{Ended: failedAt(1, 5)})
	l.endsHere(2)
	l.advance(15 * time.Second) // a does not return
	l.m.next()
	l.advance(time.Second)
	if len(l.prepares) != 1 {
		t.Fatalf("prepared %+v", l.prepares)
	}
	l.m.leader.prepared(2, []byte("own"), nil, nil)
	if d := l.claimed(); d == nil || string(d.Payload) != "own" || l.decidedTo("c") != nil {
		t.Fatalf("claimed %+v, decided %+v", d, l.decidedTo("c"))
	}
	return l
}

// TestRunDirectoryDecides checks that a leader decides what it has claimed, and follows the decision of another that
// was faster.
func TestRunDirectoryDecides(t *testing.T) {
	l := elects(t)
	l.grant()
	if d := l.decidedTo("c"); d == nil || string(d.Payload) != "own" || l.begun[len(l.begun)-1] != 2 {
		t.Errorf("decided %+v, begun %v", d, l.begun)
	}
	l = elects(t)
	l.answer(second("theirs"), nil) // a has decided before it was lost
	if d := l.decidedTo("c"); d != nil || l.begun[len(l.begun)-1] == 2 || l.dials[addrOf("a")] == 0 {
		t.Errorf("decided %+v, begun %v, dialed %v", d, l.begun, l.dials)
	}
	l.advance(time.Second)
	l.receive("c", &message{Join: &join{}})
	if l.begun[len(l.begun)-1] != 2 {
		t.Errorf("begun %v under the new leader, want 2", l.begun)
	}
	l = elects(t)
	d := l.claimed()
	l.receive("c", &message{Status: &status{1, peerAddr("c"), 9, false}}) // no longer leads
	l.m.claimed(d, d, nil)
	if got := l.decidedTo("c"); len(l.verdicts) != 1 || l.m.index != 2 {
		t.Errorf("a claim that succeeds late: knows decision %d, tells %+v", l.m.index, got)
	}
}

// TestRunDirectoryFails checks that a claim is repeated after an error, until a limit, and with the same decision.
func TestRunDirectoryFails(t *testing.T) {
	l := elects(t)
	for range 3 {
		l.answer(nil, errors.New("input/output error"))
		if l.claimed() != nil {
			t.Fatal("it asks again at once")
		}
		l.advance(claimPause + time.Second)
		if d := l.claimed(); d == nil || string(d.Payload) != "own" {
			t.Fatalf("it asks again for %+v", d)
		}
	}
	l.answer(nil, errors.New("input/output error"))
	l.advance(l.m.cfg.RegroupTimeout + time.Second)
	if len(l.ends) != 1 || !strings.Contains(l.ends[0].Error(), "input/output error") {
		t.Errorf("ends %v", l.ends)
	}
	l = elects(t) // without an answer
	l.advance(l.m.cfg.RegroupTimeout + time.Second)
	if len(l.ends) != 1 || !strings.Contains(l.ends[0].Error(), "run directory") {
		t.Errorf("ends %v", l.ends)
	}
	l = elects(t)
	l.answer(nil, &launch.Over{Why: "a newer start"})
	if len(l.ends) != 1 || !strings.Contains(l.ends[0].Error(), "a newer start") {
		t.Errorf("ends %v", l.ends)
	}
}

// TestEndNeedsNoRunDirectory checks that a job keeps its result if the run directory does not take the end, and that a
// claim without a result is repeated.
func TestEndNeedsNoRunDirectory(t *testing.T) {
	for name, answer := range map[string]func(l *isolatedAgent){
		"an error":  func(l *isolatedAgent) { l.answer(nil, errors.New("no space")) },
		"no answer": func(*isolatedAgent) {},
	} {
		l := leader(t)
		l.receive("b", &message{Ended: &ended{Index: 1}})
		l.receive("c", &message{Ended: &ended{Index: 1}})
		l.endsHere(-1)
		answer(l)
		l.advance(endTime + time.Second)
		bye := last(l, "b", func(m *message) *bye { return m.Bye })
		if len(l.verdicts) != 1 || l.verdicts[0].ExitCode != launch.ExitDone || bye == nil || !bye.All ||
			bye.Status != launch.ExitDone {
			t.Errorf("%s: verdicts %+v, b hears %+v", name, l.verdicts, bye)
		}
	}
	l := elects(t)
	l.answer(nil, nil) // somebody has removed the records
	l.advance(time.Second)
	l.grant()
	if l.decidedTo("c") == nil {
		t.Error("the claim is not repeated")
	}
}

// TestClaimNeedsAQuorum checks that a leader without a quorum claims nothing, and then ends here.
func TestClaimNeedsAQuorum(t *testing.T) {
	l := leader(t, func(c *Config) { c.MaxRestarts = 5 })
	for _, name := range []string{"b", "c"} {
		l.m.down(name, "no word")
	}
	l.endsHere(0)
	l.m.next()
	l.advance(4 * time.Second)
	if len(l.prepares) != 2 {
		t.Fatalf("%d prepared", len(l.prepares))
	}
	l.m.leader.prepared(2, nil, nil, nil)
	if l.claimed() != nil {
		t.Fatal("one of three claims a decision")
	}
	l.advance(l.m.cfg.RegroupTimeout + time.Second)
	if len(l.ends) != 1 || !strings.Contains(l.ends[0].Error(), "1 of 3 nodes") {
		t.Errorf("ends %v", l.ends)
	}
	l = leader(t, func(c *Config) { c.MaxRestarts = 0 })
	for _, name := range []string{"b", "c"} {
		l.m.down(name, "no word")
	}
	l.endsHere(0)
	l.advance(endTime + time.Second) // without a restart left, the job ends in any case
	if l.claimed() != nil || len(l.verdicts) != 1 || l.verdicts[0].Again {
		t.Errorf("claims %v, verdicts %+v", l.claimed(), l.verdicts)
	}
}

// TestRunDirectoryIsAskedAtTheEnd checks that an agent without a leader asks the run directory before it gives up.
func TestRunDirectoryIsAskedAtTheEnd(t *testing.T) {
	for _, c := range []struct {
		newest *decision
		err    error
		status int
		why    string
	}{
		{endDecision(2, "a", 0), nil, 0, ""},
		{endDecision(2, "a", 3), nil, 3, ""},
		{start("a", quintet), nil, 1, "1 of 5 nodes"},
		{nil, nil, 1, "1 of 5 nodes"},
		{nil, errors.New("input/output error"), 1, "1 of 5 nodes"},
	} {
		l := orphan(t, "c", quintet)
		for _, name := range []string{"b", "d", "e"} {
			l.m.down(name, "no word")
		}
		l.advance(l.m.cfg.RegroupTimeout - time.Second)
		if len(l.claims) > 0 || len(l.ends) > 0 {
			t.Fatalf("claims %v, ends %v before the limit", l.claims, l.ends)
		}
		l.advance(2 * time.Second)
		if len(l.claims) != 1 || l.claims[0] != nil {
			t.Fatalf("claims %v, want a question", l.claims)
		}
		l.answer(c.newest, c.err)
		over := (*launch.Over)(nil)
		if len(l.ends) != 1 || !errors.As(l.ends[0], &over) || over.ExitCode != c.status ||
			!strings.Contains(over.Why, c.why) {
			t.Errorf("%+v: ends %v", c.newest, l.ends)
		}
	}
	l := orphan(t, "c", quintet)
	for _, name := range []string{"b", "d", "e"} {
		l.m.down(name, "no word")
	}
	l.advance(l.m.cfg.RegroupTimeout + 3*l.m.cfg.Silence)
	if len(l.ends) != 1 {
		t.Errorf("without an answer: ends %v", l.ends)
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
	if len(l.ends) > 0 || l.aborted() {
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
	for name, l := range map[string]*isolatedAgent{
		"leader": leader(t), "candidate": campaigner(t, quintet), "follower": follower(t, "b"),
	} {
		l.forget()
		l.m.down("c", "no word")
		from := "d"
		l.connect(from, status{Index: 1})
		l.receive(from, &message{Decided: later})
		if s := l.statusTo(from); s == nil || s.Leader.Name != "" {
			t.Errorf("%s: says %+v", name, s)
		}
		if name != "candidate" && !l.aborted() {
			t.Errorf("%s: its workers go on", name)
		}
		if l.dials[addrOf("c")] == 0 {
			t.Errorf("%s: dialed %v", name, l.dials)
		}
		l.forget()
		l.connect("c", status{2, peerAddr("c"), 0, false})
		if !joins(l, "c") {
			t.Errorf("%s: does not join the leader of the later decision", name)
		}
	}
}

// TestEndIsPassedOn checks that an agent ends with the decided end, and that its launcher gets it once.
func TestEndIsPassedOn(t *testing.T) {
	l := follower(t, "b")
	l.receive("a", &message{Decided: endDecision(2, "a", 3)})
	if len(l.heard) != 1 || l.heard[0].Lost == "" {
		t.Errorf("news %+v", l.heard)
	}
	l.endsHere(-1)
	if len(l.verdicts) != 1 || l.verdicts[0].ExitCode != 3 || l.verdicts[0].Again {
		t.Errorf("verdicts %+v", l.verdicts)
	}
}

// TestCandidateGivesUp checks that a candidate without followers ends, and reports the size of its side.
func TestCandidateGivesUp(t *testing.T) {
	l := campaigner(t, quintet)
	l.m.down("c", "no word")
	l.advance(l.m.cfg.RegroupTimeout - 5*time.Second)
	if len(l.ends) > 0 {
		t.Fatalf("it ends too early: %v", l.ends)
	}
	l.advance(10 * time.Second)
	l.answer(nil, nil)
	over := (*launch.Over)(nil)
	if len(l.ends) != 1 || !errors.As(l.ends[0], &over) || !strings.Contains(over.Why, "3 of 5 nodes") {
		t.Errorf("ends %v", l.ends)
	}
}
