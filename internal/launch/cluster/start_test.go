package cluster

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// TestOtherWordsAreIgnored checks that messages about another start, or from agents outside the start, have no effect.
func TestOtherWordsAreIgnored(t *testing.T) {
	rank := 2
	failed := launch.News{Failed: &rank}
	for name, c := range map[string]struct {
		from string
		msg  *message
	}{
		"an ending of an earlier start":  {"b", &message{Ended: failedAt(0, 2)}},
		"an ending of a later start":     {"b", &message{Ended: failedAt(2, 2)}},
		"with a join":                    {"b", &message{Join: &join{Ended: failedAt(0, 2)}}},
		"news of an earlier start":       {"b", &message{News: &relayed{0, failed}}},
		"news of a later start":          {"b", &message{News: &relayed{2, failed}}},
		"an ending of a spare":           {"s", &message{Ended: failedAt(1, 2)}},
		"news of a spare":                {"s", &message{News: &relayed{1, failed}}},
		"another start, from a follower": {"b", &message{Again: &again{Index: 1}}},
	} {
		l := leader(t)
		l.connect("s", status{})
		l.receive("s", &message{Join: &join{}})
		l.forget()
		l.receive(c.from, c.msg)
		if l.aborted() || l.newsTo("b") != nil || l.newsTo("c") != nil || len(l.verdicts) > 0 {
			t.Errorf("to a leader: %s: news %v, to c %+v", name, l.heard, l.newsTo("c"))
		}
	}
	for name, c := range map[string]struct {
		from string
		msg  *message
	}{
		"news of an earlier start":                  {"a", &message{News: &relayed{0, failed}}},
		"news of a later start":                     {"a", &message{News: &relayed{2, failed}}},
		"news from one that does not lead":          {"c", &message{News: &relayed{1, failed}}},
		"another after an earlier start":            {"a", &message{Again: &again{Index: 0}}},
		"another after a later start":               {"a", &message{Again: &again{Index: 2}}},
		"another start, from one who does not lead": {"c", &message{Again: &again{Index: 1}}},
		"an ending":    {"c", &message{Ended: failedAt(1, 4)}},
		"its own role": {"c", &message{Join: &join{}}},
	} {
		l := follower(t, "b")
		l.connect("c", status{Index: 1})
		l.receive(c.from, c.msg)
		if l.aborted() || l.newsTo("a") != nil || !slices.Equal(l.begun, []int{1}) {
			t.Errorf("to a follower: %s: news %v", name, l.heard)
		}
		l.receive("a", &message{News: &relayed{1, failed}})
		if !l.aborted() {
			t.Errorf("after %s the leader's news are ignored", name)
		}
	}
}

// TestFirstWordOfTheEndCounts checks that an agent's first report of the end counts, and none after the verdict.
func TestFirstWordOfTheEndCounts(t *testing.T) {
	l := leader(t)
	l.listens("")
	l.receive("b", &message{Ended: failedAt(1, 2)})
	l.receive("b", &message{Ended: &ended{Index: 1}})
	l.receive("c", &message{Ended: &ended{Index: 1}})
	if len(l.verdicts) > 0 {
		t.Fatal("a verdict before the leader's own ranks have ended")
	}
	l.endsHere(-1)
	if len(l.verdicts) != 1 || l.verdicts[0].First == nil || l.verdicts[0].First.Rank != 2 {
		t.Fatalf("verdicts %+v", l.verdicts)
	}
	a := l.againTo("b")
	if a == nil || a.Index != 1 || a.Tally.Retries.Done != 1 {
		t.Fatalf("b hears %+v", a)
	}
	l.forget()
	l.receive("c", &message{Ended: failedAt(1, 4)})
	l.m.down("c", "no word")
	if len(l.verdicts) != 1 || l.aborted() || l.newsTo("b") != nil || l.againTo("b") != nil {
		t.Errorf("after the verdict: %v, %v, %+v", l.verdicts, l.heard, l.sent)
	}
}

// TestLostAgentStaysLost checks that an agent lost to a start stays lost after it returns. The others learn of the
// loss, and the verdict names it.
func TestLostAgentStaysLost(t *testing.T) {
	l := leader(t)
	l.listens("")
	l.m.down("c", "no word for 5s")
	if rank, lost := l.failureTo("b"); rank != 4 || !strings.Contains(lost, "no word for 5s") || !l.aborted() {
		t.Fatalf("b hears of rank %d %q, the caller %v", rank, lost, l.heard)
	}
	l.connect("c", status{Index: 1})
	l.receive("c", &message{Join: &join{Ended: &ended{Index: 1}}})
	l.receive("b", &message{Ended: &ended{Index: 1}})
	l.endsHere(-1)
	if len(l.verdicts) != 1 || l.verdicts[0].First == nil {
		t.Fatalf("verdicts %+v", l.verdicts)
	}
	if f := l.verdicts[0].First; f.Rank != 4 || f.Ranks != 2 {
		t.Errorf("failure %+v", f)
	}
	a := l.againTo("b")
	if a == nil || a.Tally.Lost["c#2"] != 1 || a.Tally.Cause != "c#2" {
		t.Errorf("b hears %+v", a)
	}
	// An agent that ended before is not lost to the start.
	l = leader(t)
	l.receive("c", &message{Ended: &ended{Index: 1}})
	l.m.down("c", "no word for 5s")
	if l.aborted() || l.newsTo("b") != nil {
		t.Errorf("b hears %+v", l.newsTo("b"))
	}
}

// TestFaultOfAnAgentEndsTheJob checks that an agent's own error, without a failed rank, ends the job.
func TestFaultOfAnAgentEndsTheJob(t *testing.T) {
	l := leader(t)
	l.receive("b", &message{Ended: &ended{Index: 1, Fault: "node b: the disk is gone"}})
	if rank, _ := l.failureTo("c"); rank != 2 {
		t.Errorf("c hears of rank %d", rank)
	}
	l.receive("c", &message{Ended: &ended{Index: 1}})
	l.endsHere(-1)
	l.grant()
	d := l.decidedTo("c")
	if d == nil || d.End == nil || d.End.ExitCode != launch.ExitFailed {
		t.Fatalf("decided %+v", d)
	}
	if !strings.Contains(d.End.Why, "the disk is gone") {
		t.Errorf("the job ends since %q", d.End.Why)
	}
	if len(l.verdicts) != 1 || l.verdicts[0].ExitCode != launch.ExitFailed || l.verdicts[0].Again {
		t.Errorf("verdicts %+v", l.verdicts)
	}
}

// TestPayloadIsOfItsWorld checks that a payload is used only for its assignment, and that a loss of a member discards
// it.
func TestPayloadIsOfItsWorld(t *testing.T) {
	l := newIsolatedAgent(t, "a")
	l.advance(time.Second)
	for _, name := range []string{"b", "c"} {
		l.connect(name, status{})
		l.receive(name, &message{Join: &join{}})
	}
	l.m.leader.prepared(2, []byte("of another"), nil, nil)
	if l.decidedTo("b") != nil {
		t.Fatal("decided with the payload of another world")
	}
	l.m.down("c", "no word")
	l.m.leader.prepared(1, []byte("of three"), nil, nil)
	if l.decidedTo("b") != nil {
		t.Fatal("decided about an agent that is gone")
	}
	l.m.leader.prepared(1, []byte("again"), nil, nil)
	if l.decidedTo("b") != nil {
		t.Fatal("decided with a payload of before")
	}
	l.advance(l.m.cfg.LastCall + time.Second)
	if n := len(l.prepares); n != 2 || len(l.prepares[1].Members) != 2 {
		t.Fatalf("prepared %+v", l.prepares)
	}
	l.m.leader.prepared(1, []byte("of two"), nil, nil)
	l.grant()
	if d := l.decidedTo("b"); d == nil || string(d.Payload) != "of two" || len(d.Assignment.Members) != 2 ||
		d.Tally.Target != 2 {
		t.Errorf("decided %+v", d)
	}
}

// TestStartIsOfItsWorld checks that a start goes once to each member of its assignment that has a leader.
func TestStartIsOfItsWorld(t *testing.T) {
	l := follower(t, "s")
	if len(l.begun) > 0 {
		t.Fatalf("a spare begins %v", l.begun)
	}
	l.receive("a", &message{Decided: start("a", assignmentOf(2, "a:0 s:1"))})
	l.receive("a", &message{Decided: start("a", assignmentOf(2, "a:0 s:1"))})
	l.m.next()
	if !slices.Equal(l.begun, []int{2}) {
		t.Errorf("begun %v", l.begun)
	}
	l = orphan(t, "b", threeAgents)
	if len(l.begun) > 0 {
		t.Errorf("begun %v without a leader", l.begun)
	}
	l.connect("a", status{1, peerAddr("a"), 0, false})
	if !slices.Equal(l.begun, []int{1}) {
		t.Errorf("begun %v", l.begun)
	}
}

// TestStartWithoutAnAgentDoesNotCount checks that a start with a member lost before the decision is repeated, and does
// not count as a restart.
func TestStartWithoutAnAgentDoesNotCount(t *testing.T) {
	l := newIsolatedAgent(t, "a", func(c *Config) { c.MaxRestarts = 0 })
	l.advance(time.Second)
	for _, name := range []string{"b", "c"} {
		l.connect(name, status{})
		l.receive(name, &message{Join: &join{}})
	}
	l.m.leader.prepared(1, nil, nil, nil)
	l.m.down("c", "no word") // while the run directory is asked
	l.grant()
	if !slices.Equal(l.begun, []int{1}) || !l.aborted() {
		t.Errorf("begun %v, news %v: its ranks wait for those of c", l.begun, l.heard)
	}
	l.receive("b", &message{Ended: failedAt(1, 2)})
	l.endsHere(0)
	if len(l.verdicts) != 1 || !l.verdicts[0].Again || l.verdicts[0].Restarts != 0 {
		t.Errorf("verdicts %+v", l.verdicts)
	}
}

// TestNewLeaderCountsItsOwnEnding checks that a new leader counts its own ending of the previous start, and waits for
// the others'.
func TestNewLeaderCountsItsOwnEnding(t *testing.T) {
	l := follower(t, "b")
	l.endsHere(2)
	l.m.down("a", "no word")
	l.connect("c", status{Index: 1})
	l.advance(time.Second)
	l.receive("c", &message{Join: &join{}})
	l.advance(2 * l.m.cfg.Silence) // a does not return
	if len(l.verdicts) > 0 {
		t.Fatalf("a verdict without the ending of c: %+v", l.verdicts)
	}
	l.receive("c", &message{Ended: &ended{Index: 1}})
	l.advance(time.Second)
	if len(l.verdicts) != 1 || !l.verdicts[0].Again || len(l.verdicts[0].Failures) != 2 {
		t.Errorf("verdicts %+v", l.verdicts)
	}
}

// TestEndOfTheJobEndsTheRanks checks that an agent ends its ranks with the reason when the leader ends the job, or when
// it gives up itself.
func TestEndOfTheJobEndsTheRanks(t *testing.T) {
	l := follower(t, "b")
	l.receive("a", &message{Bye: &bye{Status: 1, Why: "no quorum", All: true}})
	if !l.aborted() {
		t.Error("ranks go on after the leader has ended the job")
	}
	l.endsHere(2)
	if len(l.verdicts) != 1 || l.verdicts[0].Again || l.verdicts[0].ExitCode != launch.ExitFailed {
		t.Errorf("verdicts %+v", l.verdicts)
	}
	l = elected(t)
	l.m.down("c", "no word")
	l.endsHere(1)
	l.advance(2 * l.m.cfg.RegroupTimeout)
	if len(l.verdicts) != 1 || !l.verdicts[0].Again || len(l.ends) != 0 {
		t.Errorf("verdicts %+v, ends %v", l.verdicts, l.ends)
	}
	l.m.next()
	l.advance(time.Second)
	l.m.leader.prepared(2, nil, nil, nil)
	l.advance(2 * l.m.cfg.RegroupTimeout)
	if len(l.ends) != 1 || !strings.Contains(l.ends[0].Error(), "1 of 3 nodes") {
		t.Errorf("without a quorum: ends %v", l.ends)
	}
}

// TestFollowerHearsOfAnotherStart checks that a follower's launcher gets the leader's verdict once, and that its
// running start is ended.
func TestFollowerHearsOfAnotherStart(t *testing.T) {
	next := &message{
		Again: &again{Index: 1, Tally: tally{Retries: launch.Retries{Max: 9, Done: 3}}},
	}
	l := follower(t, "b")
	l.endsHere(2)
	if e := last(l, "a", func(m *message) *ended { return m.Ended }); e == nil || e.Index != 1 ||
		len(e.Ending.Failures) != 1 {
		t.Fatalf("a hears %+v", e)
	}
	l.receive("a", next)
	l.receive("a", next)
	if len(l.verdicts) != 1 || !l.verdicts[0].Again || l.verdicts[0].Restarts != 3 {
		t.Errorf("verdicts %+v", l.verdicts)
	}
	if l.aborted() {
		t.Errorf("news of a start that has ended: %+v", l.heard)
	}
	l = follower(t, "b")
	l.receive("a", next)
	if !l.aborted() || len(l.verdicts) > 0 {
		t.Errorf("its start runs: news %v, verdicts %v", l.heard, l.verdicts)
	}
	// A decision on the next start that arrives first is the verdict.
	l = follower(t, "b")
	l.endsHere(2)
	l.receive("a", &message{Decided: start("a", assignmentOf(2, "a:0 b:1"))})
	if len(l.verdicts) != 1 || !l.verdicts[0].Again || len(l.begun) != 1 {
		t.Errorf("verdicts %+v, begun %v", l.verdicts, l.begun)
	}
}

// TestJoinTellsTheLastEnding checks that a joining agent reports how the last start ended, not an earlier one.
func TestJoinTellsTheLastEnding(t *testing.T) {
	joins := func(l *isolatedAgent) *join { return last(l, "c", func(m *message) *join { return m.Join }) }
	l := follower(t, "b")
	l.endsHere(2)
	l.m.down("a", "no word")
	l.connect("c", status{1, peerAddr("c"), 1, false})
	if j := joins(l); j == nil || j.Ended == nil || j.Ended.Index != 1 {
		t.Errorf("join %+v", j)
	}
	l = follower(t, "b")
	l.endsHere(2)
	l.receive("a", &message{Decided: start("a", assignmentOf(2, "a:0 c:1"))}) // a spare now
	l.m.down("a", "no word")
	l.connect("c", status{2, peerAddr("c"), 1, false})
	if j := joins(l); j == nil || j.Ended != nil {
		t.Errorf("join %+v", j)
	}
}

// TestWhoIsFollowed checks that an agent follows a leader with all its decisions, dials a leader that others name, and
// updates agents with fewer decisions.
func TestWhoIsFollowed(t *testing.T) {
	joins := func(l *isolatedAgent, to string) bool {
		return last(l, to, func(m *message) *join { return m.Join }) != nil
	}
	l := orphan(t, "b", threeAgents)
	l.connect("d", status{0, peerAddr("d"), 0, false}) // starts another job, or has fewer decisions
	if joins(l, "d") || l.decidedTo("d") == nil {
		t.Errorf("it follows one that is behind: %v, and tells it %+v", joins(l, "d"), l.decidedTo("d"))
	}
	l.receive("c", &message{Status: &status{Index: 1, Leader: peerAddr("e")}})
	if joins(l, "c") || l.dials[addrOf("e")] == 0 {
		t.Errorf("it follows who does not lead: %v, dials %v", joins(l, "c"), l.dials)
	}
	l.receive("c", &message{Status: &status{Index: 1, Leader: peerAddr("b")}}) // c wrongly names b itself
	if joins(l, "c") || l.dials[addrOf("b")] > 0 {
		t.Errorf("it follows itself: %v", l.dials)
	}
	l.connect("e", status{1, peerAddr("e"), 1, false})
	if !joins(l, "e") {
		t.Error("it does not follow who leads")
	}
	// When the leader gives up the lead, its start ends here.
	l.receive("e", &message{Status: &status{Index: 1}})
	if !l.aborted() {
		t.Error("its ranks go on without a leader")
	}
}

// TestWhoEndsTheJob checks that the leader's last message ends the job, as does that of an agent whose user stops it
// between two starts.
func TestWhoEndsTheJob(t *testing.T) {
	stop, all := &message{Bye: &bye{Status: launch.ExitStopped}}, &message{Bye: &bye{Status: 1, Why: "x", All: true}}
	l := follower(t, "b")
	l.connect("c", status{Index: 1})
	l.receive("c", all)
	if l.aborted() || len(l.ends) > 0 {
		t.Fatal("the word of another follower ends the job")
	}
	l.receive("a", stop) // the leader leaves: another agent may lead
	if !l.aborted() || len(l.ends) > 0 {
		t.Errorf("news %v, ends %v", l.heard, l.ends)
	}
	l.endsHere(2)
	if len(l.verdicts) > 0 {
		t.Errorf("verdicts %+v", l.verdicts)
	}

	l = newIsolatedAgent(t, "b") // before the first start
	l.connect("a", status{Leader: peerAddr("a")})
	l.receive("a", stop)
	if over := (*launch.Over)(nil); len(l.ends) != 1 || !errors.As(l.ends[0], &over) || !over.Stopped {
		t.Errorf("ends %v", l.ends)
	}

	for _, c := range []struct {
		name string
		idle bool
		from string
		msg  *message
		ends bool
	}{
		{"asked to stop between starts", true, "b", stop, true},
		{"while a start runs", false, "b", stop, false},
		{"a spare", true, "s", stop, false},
		{"failed", true, "b", all, false},
	} {
		l := leader(t, func(c *Config) { c.Min = 3 }) // so that a restart waits
		l.connect("s", status{})
		l.receive("s", &message{Join: &join{}})
		if c.idle {
			l.receive("b", &message{Ended: failedAt(1, 2)})
			l.receive("c", &message{Ended: failedAt(1, 2)})
			l.endsHere(-1)
		}
		l.forget()
		l.receive(c.from, c.msg)
		if l.claimed() != nil {
			l.grant()
		}
		if d := l.decidedTo("c"); d != nil != c.ends || c.ends &&
			(d.End == nil || d.End.ExitCode != launch.ExitStopped) {
			t.Errorf("%s: decided %+v", c.name, d)
		}
	}
}

// TestWrongInputEndsTheJob checks that an agent with wrong input ends the job for all, even if restarts are left and
// the ranks end before the run directory answers.
func TestWrongInputEndsTheJob(t *testing.T) {
	for _, first := range []bool{false, true} {
		l := leader(t, func(c *Config) { c.MaxRestarts = 3 })
		l.receive("b", &message{Bye: &bye{Status: launch.ExitInput, Why: "no such directory"}})
		d := l.claimed()
		if d == nil || d.End == nil || d.End.ExitCode != launch.ExitInput || !l.aborted() {
			t.Fatalf("claimed %+v, news %v", d, l.heard)
		}
		if first {
			l.receive("c", &message{Ended: failedAt(1, 4)})
			l.endsHere(0)
		}
		l.grant()
		l.advance(endTime + time.Second)
		if !first {
			l.endsHere(0)
		}
		wrongInput(t, l)

		f := follower(t, "c")
		if first {
			f.endsHere(4)
		}
		d.Index, d.Leader = 2, peerAddr("a")
		f.receive("a", &message{Decided: d})
		if !first {
			f.endsHere(4)
		}
		wrongInput(t, f)
	}
}

// wrongInput checks that the launcher ends with status 2 and prints the reason once.
func wrongInput(t *testing.T, l *isolatedAgent) {
	t.Helper()
	if len(l.verdicts) != 1 {
		t.Fatalf("verdicts %+v", l.verdicts)
	}
	v := l.verdicts[0]
	if v.ExitCode != launch.ExitInput || v.Err != nil || v.Again ||
		!slices.Equal(v.Notes, []string{"node b: no such directory"}) {
		t.Errorf("verdict %+v", v)
	}
}

// TestRankIsHeld checks that the leader refuses an agent that requests the rank of a live agent.
func TestRankIsHeld(t *testing.T) {
	l := leader(t)
	l.m.down("b", "no word")
	h := hello{Member: Member{Name: "b", Host: "b", HostID: "b", NodeRank: 1, NProc: 2, Addr: addrOf("b")}}
	l.m.up(h, "")
	l.receive("b", &message{Join: &join{}})
	h = hello{Member: Member{Name: "x", Host: "x", HostID: "x", NodeRank: 1, NProc: 2, Addr: addrOf("x")}}
	l.m.up(h, "")
	l.receive("x", &message{Join: &join{}})
	l.advance(2 * l.m.cfg.Silence) // a does not return
	if why := last(l, "x", func(m *message) *string { return m.Refuse }); why == nil || l.hungUp["x"] == 0 {
		t.Errorf("refused %v, hung up %v", why, l.hungUp)
	}
	// The refused agent ends only if the leader refuses it.
	f := follower(t, "c")
	f.connect("b", status{Index: 1})
	why := "rank 2 is taken"
	f.receive("b", &message{Refuse: &why})
	if f.aborted() {
		t.Error("the word of a follower refuses it")
	}
	f.receive("a", &message{Refuse: &why})
	if !f.aborted() {
		t.Error("it goes on")
	}
}
