package cluster

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// Words about another start than the present one, or of who has no say in it, change nothing.
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
		l.up("s", status{})
		l.from("s", &message{Join: &join{}})
		l.forget()
		l.from(c.from, c.msg)
		if l.told() || l.relays("b") != nil || l.relays("c") != nil || len(l.verdicts) > 0 {
			t.Errorf("to a leader: %s: news %v, to c %+v", name, l.heard, l.relays("c"))
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
		l.up("c", status{Index: 1})
		l.from(c.from, c.msg)
		if l.told() || l.relays("a") != nil || !slices.Equal(l.begun, []int{1}) {
			t.Errorf("to a follower: %s: news %v", name, l.heard)
		}
		l.from("a", &message{News: &relayed{1, failed}})
		if !l.told() {
			t.Errorf("after %s the leader's news are ignored", name)
		}
	}
}

// The first word of an agent about the end of its start counts, and none after the verdict.
func TestFirstWordOfTheEndCounts(t *testing.T) {
	l := leader(t)
	l.listens("")
	l.from("b", &message{Ended: failedAt(1, 2)})
	l.from("b", &message{Ended: &ended{Index: 1}})
	l.from("c", &message{Ended: &ended{Index: 1}})
	if len(l.verdicts) > 0 {
		t.Fatal("a verdict before the leader's own ranks have ended")
	}
	l.endsHere(-1)
	if len(l.verdicts) != 1 || l.verdicts[0].First == nil || l.verdicts[0].First.Rank != 2 {
		t.Fatalf("verdicts %+v", l.verdicts)
	}
	a := l.again("b")
	if a == nil || a.Index != 1 || a.Tally.Retries.Done != 1 {
		t.Fatalf("b hears %+v", a)
	}
	l.forget()
	l.from("c", &message{Ended: failedAt(1, 4)})
	l.m.down("c", "no word")
	if len(l.verdicts) != 1 || l.told() || l.relays("b") != nil || l.again("b") != nil {
		t.Errorf("after the verdict: %v, %v, %+v", l.verdicts, l.heard, l.sent)
	}
}

// An agent that is lost to a start stays lost, whatever it says when it comes back. The others hear of the loss, and
// the verdict names it.
func TestLostAgentStaysLost(t *testing.T) {
	l := leader(t)
	l.listens("")
	l.m.down("c", "no word for 5s")
	if rank, lost := l.hears("b"); rank != 4 || !strings.Contains(lost, "no word for 5s") || !l.told() {
		t.Fatalf("b hears of rank %d %q, the caller %v", rank, lost, l.heard)
	}
	l.up("c", status{Index: 1})
	l.from("c", &message{Join: &join{Ended: &ended{Index: 1}}})
	l.from("b", &message{Ended: &ended{Index: 1}})
	l.endsHere(-1)
	if len(l.verdicts) != 1 || l.verdicts[0].First == nil {
		t.Fatalf("verdicts %+v", l.verdicts)
	}
	if f := l.verdicts[0].First; f.Rank != 4 || f.Ranks != 2 {
		t.Errorf("failure %+v", f)
	}
	a := l.again("b")
	if a == nil || a.Tally.Lost["c#2"] != 1 || a.Tally.Cause != "c#2" {
		t.Errorf("b hears %+v", a)
	}
	// One that has ended before is not lost to the start.
	l = leader(t)
	l.from("c", &message{Ended: &ended{Index: 1}})
	l.m.down("c", "no word for 5s")
	if l.told() || l.relays("b") != nil {
		t.Errorf("b hears %+v", l.relays("b"))
	}
}

// A fault of an agent, for which no rank is to blame, is that of the job.
func TestFaultOfAnAgentEndsTheJob(t *testing.T) {
	l := leader(t)
	l.from("b", &message{Ended: &ended{Index: 1, Fault: "node b: the disk is gone"}})
	if rank, _ := l.hears("c"); rank != 2 {
		t.Errorf("c hears of rank %d", rank)
	}
	l.from("c", &message{Ended: &ended{Index: 1}})
	l.endsHere(-1)
	l.accept("b", l.offers("b"))
	d := l.tells("c")
	if d == nil || d.End == nil || d.End.ExitCode != launch.ExitFailed {
		t.Fatalf("decided %+v", d)
	}
	if !strings.Contains(d.End.Why, "the disk is gone") {
		t.Errorf("the job ends since %q", d.End.Why)
	}
	// The leader waits until both have heard it.
	told := 2
	l.from("b", &message{Told: &told})
	other := 1
	l.from("c", &message{Told: &other})
	if len(l.verdicts) > 0 {
		t.Fatal("the leader ends before c has heard of the end")
	}
	l.from("c", &message{Told: &told})
	if len(l.verdicts) != 1 || l.verdicts[0].ExitCode != launch.ExitFailed || l.verdicts[0].Again {
		t.Errorf("verdicts %+v", l.verdicts)
	}
}

// A payload is for the world that it was made for, and that world is not put forward when one of its agents is gone.
func TestPayloadIsOfItsWorld(t *testing.T) {
	l := newLone(t, "a")
	l.runs(time.Second)
	for _, name := range []string{"b", "c"} {
		l.up(name, status{})
		l.from(name, &message{Join: &join{}})
	}
	l.m.prepared(2, []byte("of another"), nil, nil)
	if l.tells("b") != nil {
		t.Fatal("decided with the payload of another world")
	}
	l.m.down("c", "no word")
	l.m.prepared(1, []byte("of three"), nil, nil)
	if l.tells("b") != nil {
		t.Fatal("decided about an agent that is gone")
	}
	l.m.prepared(1, []byte("again"), nil, nil)
	if l.tells("b") != nil {
		t.Fatal("decided with a payload of before")
	}
	l.runs(l.m.cfg.LastCall + time.Second)
	if n := len(l.prepares); n != 2 || len(l.prepares[1].Agents) != 2 {
		t.Fatalf("prepared %+v", l.prepares)
	}
	l.m.prepared(1, []byte("of two"), nil, nil)
	if d := l.tells("b"); d == nil || string(d.Payload) != "of two" || len(d.World.Agents) != 2 || d.Tally.Target != 2 {
		t.Errorf("decided %+v", d)
	}
}

// A start is for the agents of its world, once, as long as they have a leader.
func TestStartIsOfItsWorld(t *testing.T) {
	l := follower(t, "s")
	if len(l.begun) > 0 {
		t.Fatalf("a spare begins %v", l.begun)
	}
	l.from("a", &message{Decided: start("a", worldOf(2, "a:0 s:1"))})
	l.from("a", &message{Decided: start("a", worldOf(2, "a:0 s:1"))})
	l.m.next()
	if !slices.Equal(l.begun, []int{2}) {
		t.Errorf("begun %v", l.begun)
	}
	l = voter(t, "b", trio)
	if len(l.begun) > 0 {
		t.Errorf("begun %v without a leader", l.begun)
	}
	l.up("a", status{1, found("a"), first("a")})
	if !slices.Equal(l.begun, []int{1}) {
		t.Errorf("begun %v", l.begun)
	}
}

// A start that was decided when one of its agents was gone is made anew, and does not count as a restart.
func TestStartWithoutAnAgentDoesNotCount(t *testing.T) {
	w := worldOf(2, "b:0 a:1")
	d := start("a", w)
	d.Tally.Retries.Max = 0
	l := elected(t, d, first("a"))
	l.accept("c", l.offers("c")) // decided about a, which is gone
	if n := l.begun[len(l.begun)-1]; n != 2 {
		l.endsHere(-1)
		l.m.next()
	}
	l.endsHere(0)
	if n := len(l.verdicts); n == 0 || !l.verdicts[n-1].Again || l.verdicts[n-1].Restarts != 0 {
		t.Errorf("verdicts %+v", l.verdicts)
	}
}

// An agent whose leader ends the job, or that gives up itself while its ranks run, ends them and says why.
func TestEndOfTheJobEndsTheRanks(t *testing.T) {
	l := follower(t, "b")
	l.from("a", &message{Bye: &bye{Status: 1, Why: "no quorum", All: true}})
	if !l.told() {
		t.Error("ranks go on after the leader has ended the job")
	}
	l.endsHere(2)
	if len(l.verdicts) != 1 || l.verdicts[0].Again || l.verdicts[0].ExitCode != launch.ExitFailed {
		t.Errorf("verdicts %+v", l.verdicts)
	}
	l = elected(t, second("x"), first("a")) // which may have begun start 1
	l.m.down("c", "no word")
	l.forget()
	l.runs(l.m.cfg.RegroupTimeout + time.Second)
	if len(l.begun) > 0 && !l.told() {
		t.Error("ranks go on after the agent has given up")
	}
}
