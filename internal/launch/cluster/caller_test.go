package cluster

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/waits"
)

// TestTrim checks that an ending is cut to the size of a message: the likely causes keep their last lines and waits.
func TestTrim(t *testing.T) {
	long := strings.Repeat("x", maxText)
	state := &waits.WaitState{Waits: []waits.Wait{{Op: "a", More: 1, Open: make([]waits.Open, 20)}, {Op: "b"}}}
	one := launch.Failure{Cause: long, Hint: long, Tail: []string{"last", "lines"}, WaitState: state}
	fs := slices.Repeat([]launch.Failure{one}, 300)
	fs[1].Tail = slices.Repeat([]string{long}, 5)
	fs[17].WaitState = nil
	fs[18].WaitState = &waits.WaitState{State: "ended"}
	e := launch.Ending{Failures: fs, Step: 7}
	got := trim(e)
	if len(got.Failures) != 256 || got.Step != 7 || e.Failures[0].Cause != long || len(state.Waits) != 2 {
		t.Fatalf("%d failures; the caller's own has %d waits", len(got.Failures), len(state.Waits))
	}
	for i, f := range got.Failures {
		short := strings.Repeat("x", maxText/2)
		if f.Cause != short || f.Hint != short || (f.Tail != nil) != (i < 16 && i != 1) {
			t.Errorf("failure %d: %d bytes, tail %q", i, len(f.Cause), f.Tail)
		}
		switch {
		case i < 16 && f.WaitState != state, i == 17 && f.WaitState != nil, i == 18 && f.WaitState != fs[18].WaitState:
			t.Errorf("failure %d has another state: %+v", i, f.WaitState)
		case i == 20:
			want := []waits.Wait{{Op: "a", More: 13, Open: make([]waits.Open, 8)}}
			if !reflect.DeepEqual(f.WaitState.Waits, want) {
				t.Errorf("waits %+v", f.WaitState.Waits)
			}
		}
	}
}

// TestEarlyNews checks that news of a start that the launcher has not begun wait for it, up to a limit, and that news
// of an earlier one do not.
func TestEarlyNews(t *testing.T) {
	l := newIsolatedAgent(t, "b")
	l.connect("a", status{Index: 1, Leader: peerAddr("a")})
	l.m.caller.waiting = false
	l.receive("a", &message{Decided: start("a", threeAgents)})
	for range 20 {
		l.receive("a", &message{News: &relayed{1, launch.News{Stop: "SIGTERM"}}})
	}
	if len(l.heard) > 0 {
		t.Fatalf("before its start it hears %q", l.relayedHere())
	}
	l.m.next()
	if n := len(l.heard); n != 8 || !slices.Equal(l.begun, []int{1}) {
		t.Errorf("%d news, begun %v", n, l.begun)
	}
	l.endsHere(2)
	l.forget()
	l.receive("a", &message{News: &relayed{1, launch.News{Stop: "SIGTERM"}}})
	l.receive("a", &message{Decided: start("a", assignmentOf(2, "a:0 b:1"))})
	l.m.next()
	if len(l.heard) > 0 {
		t.Errorf("in the next start it hears %q", l.relayedHere())
	}
}

// TestEndOfALostLeader checks the verdict of an agent without its leader: the loss is the cause, and the reason why the
// job cannot go on is a note.
func TestEndOfALostLeader(t *testing.T) {
	l := follower(t, "b")
	l.m.down("a", "no word for 5s")
	if !l.aborted() || *l.heard[0].Failed != 0 ||
		!strings.Contains(l.heard[0].Lost, "the leader, is lost: no word for 5s") {
		t.Fatalf("the launcher hears %+v", l.heard)
	}
	victim := launch.Failure{Rank: 2, Remote: true, Class: 3, Order: 1}
	l.m.onLocalEnd(launch.Ending{Failures: []launch.Failure{victim}})
	l.advance(l.m.cfg.RegroupTimeout + 3*l.m.cfg.Silence)
	if len(l.verdicts) != 1 {
		t.Fatalf("verdicts %+v", l.verdicts)
	}
	v := l.verdicts[0]
	if v.ExitCode != launch.ExitFailed || v.First == nil || v.First.Rank != 0 || v.First.Ranks != 2 ||
		len(v.Failures) != 2 || len(v.Notes) != 1 || !strings.Contains(v.Notes[0], "not enough to go on") {
		t.Errorf("verdict %+v", v)
	}
	l.m.next()
	if len(l.ends) != 1 {
		t.Errorf("a later wait ends %d times", len(l.ends))
	}
	// Without a lost leader the reason is the error.
	l = follower(t, "b")
	l.endsHere(2)
	l.receive("a", &message{Bye: &bye{Status: 1, Why: "no disk", All: true}})
	if v := l.verdicts[0]; v.Err == nil || !strings.Contains(v.Err.Error(), "no disk") || v.First != nil {
		t.Errorf("verdict %+v", v)
	}
}

// TestOwnErrorOfALauncher checks that a launcher's own error reaches the leader with the node's name.
func TestOwnErrorOfALauncher(t *testing.T) {
	l := follower(t, "b")
	l.m.onLocalEnd(launch.Ending{Err: errors.New("no space left"), Step: 3})
	e := last(l, "a", func(m *message) *ended { return m.Ended })
	if e == nil || e.Fault != "node b: no space left" || e.Ending.Step != 3 {
		t.Errorf("a hears %+v", e)
	}
	l.forget()
	l.m.onLocalEnd(launch.Ending{})
	if len(l.sent) > 0 {
		t.Errorf("a second ending is sent: %+v", l.sent)
	}
}

// TestErrorsOfPrepare checks the end of a job if its leader cannot prepare a start.
func TestErrorsOfPrepare(t *testing.T) {
	broken := errors.New("broken")
	over := &launch.Over{Result: launch.Result{ExitCode: launch.ExitInput}, Why: "bad input"}
	for _, c := range []struct {
		err  error
		code int
		why  string
	}{{broken, launch.ExitFailed, "broken"}, {over, launch.ExitInput, "bad input"}} {
		l := newIsolatedAgent(t, "a")
		l.advance(time.Second)
		for _, name := range []string{"b", "c"} {
			l.connect(name, status{})
			l.receive(name, &message{Join: &join{}})
		}
		l.m.leader.prepared(1, nil, nil, c.err)
		d := l.decidedTo("b")
		if d == nil || d.End == nil || d.End.ExitCode != c.code || d.End.Why != c.why {
			t.Fatalf("%v: decided %+v", c.err, d)
		}
		got := new(launch.Over)
		if len(l.ends) != 1 || !errors.As(l.ends[0], &got) || got.ExitCode != c.code ||
			(c.err == broken) != (got.Err == broken) {
			t.Errorf("%v: the leader's wait ends with %+v", c.err, l.ends)
		}
	}
	(*leadership)(nil).prepared(1, nil, nil, nil) // this agent leads no more
}
