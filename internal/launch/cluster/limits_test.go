package cluster

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// TestFailureOfAnEndingIsRelayed checks that a failure in an ending, or in a join to a new leader, ends the start
// everywhere, including workers that have just begun.
func TestFailureOfAnEndingIsRelayed(t *testing.T) {
	for name, tell := range map[string]*message{
		"with a join": {Join: &join{Ended: failedAt(1, 5)}},
		"alone":       {Ended: failedAt(1, 5)},
	} {
		t.Run(name, func(t *testing.T) {
			l := elected(t)
			l.connect("a", status{Index: 1})
			l.receive("a", &message{Join: &join{}})
			if len(l.begun) != 1 || l.aborted() {
				t.Fatalf("begun %v, news %v", l.begun, l.heard)
			}
			l.receive("c", tell)
			if !l.aborted() {
				t.Error("the leader's own workers go on")
			}
			if rank, _ := l.failureTo("a"); rank != 4 || l.newsTo("a").Index != 1 {
				t.Errorf("a hears %+v", l.newsTo("a"))
			}
			if l.newsTo("c") != nil {
				t.Error("it comes back to who has told it")
			}
		})
	}
}

// TestFailureIsToldToWhoComesLater checks that a later agent also learns of the failure.
func TestFailureIsToldToWhoComesLater(t *testing.T) {
	l := elected(t)
	l.receive("c", &message{Join: &join{Ended: failedAt(1, 5)}})
	l.connect("a", status{Index: 1})
	l.receive("a", &message{Join: &join{}})
	if rank, _ := l.failureTo("a"); rank != 4 {
		t.Errorf("a hears of rank %d", rank)
	}
}

// TestFirstFailureIsToldOnce checks that a second failure is not relayed.
func TestFirstFailureIsToldOnce(t *testing.T) {
	l := leader(t)
	l.receive("b", &message{Ended: failedAt(1, 2)})
	if rank, _ := l.failureTo("c"); rank != 2 {
		t.Fatalf("c hears of rank %d", rank)
	}
	l.forget()
	l.receive("c", &message{Ended: failedAt(1, 4)})
	if l.newsTo("b") != nil || l.aborted() {
		t.Errorf("b hears %+v, the caller %v", l.newsTo("b"), l.heard)
	}
}

// listens publishes the worker addresses of all agents except one.
func (l *isolatedAgent) listens(but string) {
	addrs := &relayed{Index: 1, News: launch.News{Addrs: []string{"x", "y"}}}
	for _, a := range threeAgents.Members {
		switch a.Name {
		case but:
		case l.m.self.Name:
			l.m.publish(addrs.News)
		default:
			l.receive(a.Name, &message{News: addrs})
		}
	}
}

// TestLateNodeEndsTheStart checks that each wait of a start has a limit, and that the news and the verdict then name
// the late node.
func TestLateNodeEndsTheStart(t *testing.T) {
	for _, c := range []struct {
		name  string
		limit time.Duration
		until func(l *isolatedAgent)
		knows bool // the launcher already knows of the end
	}{
		{"its ranks do not listen", listenTime, func(l *isolatedAgent) { l.listens("c") }, false},
		{"others have failed", failureTime, func(l *isolatedAgent) {
			l.listens("")
			l.receive("b", &message{Ended: failedAt(1, 2)})
			l.forget()
		}, true},
		{"others are done", finishTime, func(l *isolatedAgent) {
			l.listens("")
			l.receive("b", &message{Ended: &ended{Index: 1}})
			l.endsHere(-1)
		}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := leader(t)
			c.until(l)
			l.forget()
			l.advance(c.limit - time.Second)
			if l.aborted() || l.newsTo("b") != nil || len(l.verdicts) > 0 {
				t.Fatalf("before the limit: news %v, verdicts %v", l.heard, l.verdicts)
			}
			l.advance(2 * time.Second)
			if !c.knows {
				if rank, lost := l.failureTo("b"); rank != 4 || !strings.Contains(lost, "ranks 4 to 5") {
					t.Errorf("b hears of rank %d: %q", rank, lost)
				}
				if !l.aborted() {
					t.Error("the caller is not told")
				}
				l.receive("b", &message{Ended: failedAt(1, 2)})
			}
			l.endsHere(0)
			if len(l.verdicts) != 1 || !l.verdicts[0].Again {
				t.Fatalf("verdicts %+v", l.verdicts)
			}
			if !slices.ContainsFunc(l.verdicts[0].Failures, func(f launch.Failure) bool {
				return f.Rank == 4 && f.Ranks == 2 && strings.Contains(f.Cause, c.limit.String())
			}) {
				t.Errorf("%+v", l.verdicts[0].Failures)
			}
		})
	}
}

// TestLateLeaderEndsItsOwnRanks checks that a leader with late ranks informs its own launcher and the others.
func TestLateLeaderEndsItsOwnRanks(t *testing.T) {
	l := leader(t)
	l.listens("a")
	l.forget()
	l.advance(listenTime + time.Second)
	if len(l.heard) != 1 || l.heard[0].Failed == nil || *l.heard[0].Failed != 0 {
		t.Errorf("the caller hears %+v", l.heard)
	}
	if rank, lost := l.failureTo("b"); rank != 0 || !strings.Contains(lost, listenTime.String()) {
		t.Errorf("b hears of rank %d: %q", rank, lost)
	}
}

// TestOneNodeDoesNotListen checks that a job of one node needs no worker addresses.
func TestOneNodeDoesNotListen(t *testing.T) {
	l := newIsolatedAgent(t, "a", func(c *Config) { c.Max = 1 })
	l.advance(time.Second)
	l.m.leader.prepared(1, nil, nil, nil)
	l.grant()
	l.advance(2 * listenTime)
	if len(l.begun) != 1 || l.aborted() {
		t.Errorf("begun %v, news %v", l.begun, l.heard)
	}
}

// TestPrepareHangs checks that a hanging Prepare, as with a dead disk, ends the job for all.
func TestPrepareHangs(t *testing.T) {
	l := newIsolatedAgent(t, "a", func(c *Config) { c.Max = 2 })
	l.advance(time.Second)
	l.connect("b", status{})
	l.receive("b", &message{Join: &join{}})
	l.advance(prepareTime - 2*time.Second)
	if len(l.prepares) != 1 || l.decidedTo("b") != nil {
		t.Fatalf("%d prepared, b hears %+v", len(l.prepares), l.decidedTo("b"))
	}
	l.advance(4 * time.Second)
	d := l.decidedTo("b")
	if d == nil || d.End == nil || d.End.ExitCode != launch.ExitFailed {
		t.Fatalf("b hears %+v", d)
	}
	if !strings.Contains(d.End.Why, "node a") || !strings.Contains(d.End.Why, prepareTime.String()) {
		t.Errorf("the job ends since %q", d.End.Why)
	}
	l.advance(endTime + time.Second)
	if len(l.ends) != 1 {
		t.Errorf("the caller's wait ends %d times", len(l.ends))
	}
	l.m.leader.prepared(1, []byte("late"), nil, nil)
	if len(l.begun) > 0 || len(l.ends) != 1 || len(l.prepares) != 1 {
		t.Errorf("a payload that comes too late begins %v, %d are prepared", l.begun, len(l.prepares))
	}
}
