package cluster

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// claiming returns leader a with a claim of decision 2, for its start with b and c.
func claiming(t *testing.T) (*isolatedAgent, *decision) {
	l := leader(t)
	l.receive("b", &message{Ended: failedAt(1, 2)})
	l.receive("c", &message{Ended: &ended{Index: 1}})
	l.endsHere(-1)
	l.m.next()
	l.advance(tickInterval)
	l.m.leader.prepared(2, []byte("second"), nil, nil)
	d := l.claimed()
	if d == nil || d.Index != 2 || l.payload != "second" {
		t.Fatalf("claims %+v with payload %q", d, l.payload)
	}
	return l, d
}

// TestClaimsAreRepeated checks that a claim waits for its answer, and follows an error after a pause.
func TestClaimsAreRepeated(t *testing.T) {
	l, d := claiming(t)
	l.advance(5 * time.Second)
	if len(l.claims) != 1 {
		t.Fatalf("%d claims without an answer", len(l.claims))
	}
	l.answer(nil, errors.New("no server"))
	l.advance(claimPause - tickInterval)
	if len(l.claims) != 0 {
		t.Fatal("claims again at once")
	}
	l.advance(2 * tickInterval)
	if l.claimed() != d {
		t.Fatalf("claims %+v", l.claimed())
	}
	l.grant()
	if !slices.Equal(l.begun, []int{1, 2}) || l.decidedTo("c") == nil {
		t.Errorf("begun %v", l.begun)
	}
}

// TestAnswersToClaims checks which answers of the run directory decide: a claim that is recorded, or a newer decision.
func TestAnswersToClaims(t *testing.T) {
	other := start("z", assignmentOf(2, "a:0 b:1"))
	older, earlier := start("a", threeAgents), start("a", assignmentOf(2, "a:0"))
	for name, c := range map[string]struct {
		asked, newest *decision // nil: the claim's own
		err           error
		begun         []int
		claims        bool // the claim goes on after a pause
	}{
		"recorded":                  {begun: []int{1, 2}},
		"an error with a decision":  {err: errors.New("no server"), begun: []int{1}, claims: true},
		"another leader was faster": {newest: other, begun: []int{1, 2}},
		"an old decision":           {newest: older, begun: []int{1}, claims: true},
		"of an earlier claim":       {asked: earlier, err: errors.New("late"), begun: []int{1}},
		"of an earlier claim, done": {asked: earlier, newest: older, begun: []int{1}},
	} {
		l, d := claiming(t)
		l.claims = nil
		asked, newest := d, d
		if c.asked != nil {
			asked = c.asked
		}
		if c.newest != nil {
			newest = c.newest
		}
		l.m.claimed(asked, newest, c.err)
		l.advance(claimPause + tickInterval)
		if !slices.Equal(l.begun, c.begun) || (l.claimed() == d) != c.claims {
			t.Errorf("%s: begun %v, claims %+v", name, l.begun, l.claimed())
		}
	}
	l, d := claiming(t)
	l.m.claimed(d, nil, &launch.Over{Why: "a newer job"})
	if len(l.ends) != 1 || l.ends[0].Error() != "a newer job" {
		t.Errorf("the job ends with %v", l.ends)
	}
	l.m.claimed(d, d, nil)
	if len(l.ends) != 1 || len(l.begun) != 1 {
		t.Errorf("after the end: %v, begun %v", l.ends, l.begun)
	}
}

// TestEndIsClaimedWithTheLastPayload checks the run directory of the end of a job, and that a job with a run directory
// fails ends after endTime, and not before.
func TestEndIsClaimedWithTheLastPayload(t *testing.T) {
	for _, fails := range []bool{false, true} {
		l := leader(t)
		l.receive("b", &message{Ended: &ended{Index: 1}})
		l.receive("c", &message{Ended: &ended{Index: 1}})
		l.endsHere(-1)
		if d := l.claimed(); d == nil || d.End == nil || d.End.ExitCode != launch.ExitDone || l.payload != "payload" {
			t.Fatalf("claims %+v with payload %q", d, l.payload)
		}
		if fails {
			l.answer(nil, errors.New("no server"))
		}
		l.advance(endTime - tickInterval)
		if len(l.verdicts) > 0 {
			t.Fatalf("a verdict before the decision: %+v", l.verdicts)
		}
		l.advance(2 * tickInterval)
		if len(l.verdicts) != 1 || l.verdicts[0].ExitCode != launch.ExitDone {
			t.Errorf("fails %t: verdicts %+v", fails, l.verdicts)
		}
	}
}
