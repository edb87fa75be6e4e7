package cluster

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// asks connects a peer that requests a node rank, and joins it.
func (l *isolatedAgent) asks(name string, rank int) {
	m := Member{Name: name, Host: name, HostID: name, NodeRank: rank, NProc: 2, Addr: addrOf(name)}
	l.m.up(hello{Member: m}, "")
	l.receive(name, &message{Join: &join{}})
}

func (l *isolatedAgent) refusals(to string) (all []string) {
	for _, s := range l.sent {
		if s.to == to && s.msg.Refuse != nil {
			all = append(all, *s.msg.Refuse)
		}
	}
	return all
}

// TestTakenRanks checks that an agent which asks for the rank of another waits, and is refused if that one stays.
func TestTakenRanks(t *testing.T) {
	for _, stays := range []bool{true, false} {
		var lines []string
		l := newIsolatedAgent(t, "a", logging(&lines), func(c *Config) { c.Min = 3 })
		l.advance(time.Second)
		l.asks("b", 1)
		l.asks("d", 1)
		l.asks("e", 3)
		l.advance(2*l.m.cfg.Silence - tickInterval)
		if l.refusals("d") != nil || len(l.prepares) > 0 {
			t.Fatalf("refused %q, prepared %+v", l.refusals("d"), l.prepares)
		}
		if !stays {
			l.m.down("b", "no word")
		}
		l.advance(2 * time.Second)
		got := l.refusals("d")
		if stays != (len(got) == 1) || stays && (!strings.Contains(got[0], "node rank 1 belongs to the live agent at "+
			addrOf("b")) || l.hungUp["d"] != 1 || !strings.Contains(strings.Join(lines, "\n"), "node d at")) {
			t.Errorf("b stays %t: d hears %q, the user %q", stays, got, lines)
		}
		if got := l.refusals("e"); len(got) != 1 || !strings.Contains(got[0], "node rank 3 of at most 3 nodes") {
			t.Errorf("a rank beyond the nodes: %q", got)
		}
		l.asks("c", 2)
		l.advance(time.Second)
		want := map[bool]string{true: "a:0 b:1 c:2", false: "a:0 d:1 c:2"}[stays]
		if len(l.prepares) != 1 || shown(l.prepares[0].Members, false) != want {
			t.Errorf("b stays %t: prepared %+v, want %s", stays, l.prepares, want)
		}
	}
}

// TestJoinsCountOnce checks that an agent keeps its place in the order of joins, and that a newcomer delays the start
// of fewer than all.
func TestJoinsCountOnce(t *testing.T) {
	l := newIsolatedAgent(t, "a", func(c *Config) { c.Min, c.Max = 2, 3 })
	l.advance(time.Second)
	l.connect("b", status{})
	l.receive("b", &message{Join: &join{}})
	l.advance(l.m.cfg.LastCall - 2*time.Second)
	l.connect("c", status{})
	l.receive("b", &message{Join: &join{}})
	l.advance(time.Second)
	if len(l.prepares) > 0 {
		t.Fatalf("prepared %+v too early", l.prepares)
	}
	l.advance(2 * time.Second)
	if len(l.prepares) != 1 {
		t.Fatalf("a second join of an agent delays the start: %+v", l.prepares)
	}
	l = newIsolatedAgent(t, "a", func(c *Config) { c.Min, c.Max = 2, 4 })
	l.advance(time.Second)
	for i, name := range []string{"b", "c"} {
		l.advance(l.m.cfg.LastCall - 2*time.Second)
		l.connect(name, status{})
		l.receive(name, &message{Join: &join{}})
		if len(l.prepares) > 0 {
			t.Fatalf("prepared before the %d. newcomer: %+v", i+1, l.prepares)
		}
	}
	l.receive("b", &message{Join: &join{}})
	l.advance(l.m.cfg.LastCall + time.Second)
	if len(l.prepares) != 1 || shown(l.prepares[0].Members, false) != "a:0 b:1 c:2" {
		t.Errorf("prepared %+v", l.prepares)
	}
}

// TestReturningAgent checks the news for an agent that comes back during a start, in a failing one, and after the
// verdict.
func TestReturningAgent(t *testing.T) {
	back := func(l *isolatedAgent) {
		l.forget()
		l.connect("c", status{Index: 1})
		l.receive("c", &message{Join: &join{}})
	}
	l := elected(t)
	l.connect("a", status{Index: 1})
	l.receive("a", &message{Join: &join{}})
	if l.newsTo("a") != nil || l.againTo("a") != nil {
		t.Errorf("nothing has failed, and a hears %+v", l.newsTo("a"))
	}
	l.advance(3 * l.m.cfg.Silence)
	if l.aborted() {
		t.Errorf("a member that has joined the new leader is lost: %+v", l.heard)
	}
	l = leader(t)
	l.receive("b", &message{News: &relayed{1, launch.News{Failed: new(int)}}})
	if rank, _ := l.failureTo("c"); rank != 0 || !l.aborted() {
		t.Errorf("c hears of rank %d, the launcher %v", rank, l.heard)
	}
	l.receive("c", &message{Ended: failedAt(1, 4)})
	l.m.down("c", "no word")
	back(l)
	if got := l.relayedTo("c"); len(got) != 1 || *l.newsTo("c").News.Failed != 2 {
		t.Errorf("c hears %q", got)
	}
	l.receive("b", &message{Ended: failedAt(1, 2)})
	l.endsHere(-1)
	if len(l.verdicts) != 1 || !l.verdicts[0].Again {
		t.Fatalf("verdicts %+v", l.verdicts)
	}
	l.m.down("c", "no word")
	back(l)
	if a := l.againTo("c"); a == nil || a.Index != 1 || l.newsTo("c") != nil {
		t.Errorf("after the verdict c hears %+v and %+v", a, l.newsTo("c"))
	}
	l.forget()
	l.receive("b", &message{News: &relayed{1, launch.News{Kill: true}}})
	if l.newsTo("c") != nil || len(l.heard) > 0 {
		t.Errorf("news of a start that is over: %q, %q", l.relayedTo("c"), l.relayedHere())
	}
	if !slices.Equal(l.begun, []int{1}) {
		t.Errorf("begun %v", l.begun)
	}
}
