package cluster

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// TestStillbornStart checks that a start with members lost before it is repeated without a count, unless a user or a
// launcher ends the job.
func TestStillbornStart(t *testing.T) {
	failures := []launch.Failure{{Rank: 4, Cause: "lost"}}
	for name, c := range map[string]struct {
		e     launch.Ending
		again bool
	}{
		"lost":        {launch.Ending{Failures: failures}, true},
		"ended":       {launch.Ending{}, true},
		"asked":       {launch.Ending{Failures: failures, Asked: true}, false},
		"interrupted": {launch.Ending{Failures: failures, Forced: true}, false},
		"hung":        {launch.Ending{Failures: failures, Hung: true}, false},
		"broken":      {launch.Ending{Failures: failures, Err: errors.New("no disk")}, false},
	} {
		tl := tally{Retries: launch.Retries{Max: 3, Done: 2, Reached: 9}}
		v := (&record{stillborn: true}).verdict(&tl, c.e)
		if v.Again != c.again || v.Restarts != 2 || tl.Retries.Done != 2 || c.again && v.ExitCode != launch.ExitFailed {
			t.Errorf("%s: %+v after %+v", name, v, tl)
		}
		f := v.First
		if (f != nil) != (len(c.e.Failures) > 0 && v.Err == nil) || f != nil && f.Rank != 4 {
			t.Errorf("%s: first %+v", name, f)
		}
	}
}

// TestMergeKeepsTheEndings checks that merging leaves the agents' endings as they are, and which error counts.
func TestMergeKeepsTheEndings(t *testing.T) {
	own := errors.New("its own")
	w := assignmentOf(1, "a:0 b:1")
	r := newRecord(&w, time.Unix(0, 0))
	a := launch.Ending{Err: own, Failures: []launch.Failure{{Rank: 0, Order: 1}}}
	r.end("a", &ended{Ending: a, Fault: "node a"}, time.Unix(1, 0))
	r.end("b", &ended{Ending: launch.Ending{Failures: []launch.Failure{{Rank: 2, Order: 1}}}}, time.Unix(2, 0))
	for range 2 {
		e := r.merge("a", true)
		if e.Err != own || !e.Quiet ||
			len(e.Failures) != 2 || e.Failures[0].Order != 1<<32+1 {
			t.Errorf("%+v", e)
		}
	}
	if o := r.members["a"].ended.Ending.Failures[0].Order; o != 1 {
		t.Errorf("the order of an ending has become %d", o)
	}
	if e := r.merge("b", true); e.Quiet {
		t.Error("the error of another agent is quiet")
	}
	if e := r.merge("a", false); e.Quiet {
		t.Error("an error that the launcher does not know is quiet")
	}
	if !r.firstDone.IsZero() {
		t.Error("a start that failed everywhere is done somewhere")
	}
	if p := r.end("b", &ended{}, time.Unix(3, 0)); p != nil {
		t.Error("an agent ends twice")
	}
}

// TestFirstAgentThatIsDone checks that the wait for the other agents begins with the first one without a failure.
func TestFirstAgentThatIsDone(t *testing.T) {
	r := newRecord(&threeAgents, time.Unix(0, 0))
	r.end("a", failedAt(1, 0), time.Unix(1, 0))
	r.end("b", &ended{}, time.Unix(2, 0))
	r.end("c", &ended{}, time.Unix(3, 0))
	if !r.firstDone.Equal(time.Unix(2, 0)) {
		t.Errorf("done since %v", r.firstDone)
	}
	if got := r.cause(launch.Ending{Failures: []launch.Failure{{Rank: 5}}}); got != "c#2" {
		t.Errorf("the cause is at %q", got)
	}
	if got := r.cause(launch.Ending{}); got != "" {
		t.Errorf("without a failure the cause is at %q", got)
	}
}

// TestEndOfAJobIsTold checks the end of a job at its launchers: the first failure without its last lines, and one node
// that prints it.
func TestEndOfAJobIsTold(t *testing.T) {
	l := leader(t, func(c *Config) { c.MaxRestarts = 0 })
	f := launch.Failure{Rank: 2, Host: "node-b", Cause: "killed", Order: 1, Tail: []string{"last"}}
	l.receive("b", &message{Ended: &ended{Index: 1, Ending: launch.Ending{Failures: []launch.Failure{f}}}})
	l.receive("c", &message{Ended: &ended{Index: 1}})
	l.endsHere(-1)
	l.grant()
	d := l.decidedTo("b")
	if d == nil || d.End == nil || d.End.First == nil || d.End.First.Rank != 2 || d.End.First.Tail != nil {
		t.Fatalf("b hears %+v", d)
	}
	if v := l.verdicts[0]; v.ReportedElsewhere || v.First == nil || len(v.First.Tail) != 1 {
		t.Errorf("the leader's verdict %+v", v)
	}
	l.m.next()
	if len(l.ends) != 1 || !strings.Contains(l.ends[0].Error(), "the job has ended: rank 2 failed on host node-b") {
		t.Errorf("a later wait ends with %v", l.ends)
	}
	other := follower(t, "b")
	other.endsHere(2)
	other.receive("a", &message{Decided: d})
	if v := other.verdicts[0]; !v.ReportedElsewhere || v.ExitCode != launch.ExitFailed || v.First.Rank != 2 {
		t.Errorf("the follower's verdict %+v", v)
	}
}

// TestMessagesOfStrangers checks that an agent ignores messages of peers that it does not know, and all after its end.
func TestMessagesOfStrangers(t *testing.T) {
	l := follower(t, "b")
	l.receive("z", &message{Decided: endDecision(2, "z", 0)})
	l.m.down("z", "no word")
	if l.aborted() {
		t.Errorf("it hears %+v", l.heard)
	}
	l.receive("a", &message{Decided: endDecision(2, "a", 0)})
	l.forget()
	l.receive("a", &message{Decided: start("a", assignmentOf(3, "a:0 b:1"))})
	l.m.down("a", "no word")
	l.advance(time.Minute)
	if l.aborted() || len(l.sent) > 0 || len(l.begun) > 1 {
		t.Errorf("after the end it hears %+v, sends %+v, begins %v", l.heard, l.sent, l.begun)
	}
	l.connect("c", status{Index: 1}) // it learns of the end
	if d := l.decidedTo("c"); d == nil || d.End == nil || l.hungUp["c"] != 1 {
		t.Errorf("c hears %+v", d)
	}
	l.m.close(launch.ExitDone, "")
	if !l.left {
		t.Error("it does not leave")
	}
}
