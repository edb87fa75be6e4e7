package cluster

import (
	"errors"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/cluster/wire"
)

// TestFollowersNameTheirLeader checks the status that an agent without the lead sends to agents in search of it.
func TestFollowersNameTheirLeader(t *testing.T) {
	l := follower(t, "b")
	l.connect("s", status{})
	if s := l.statusTo("s"); s == nil || s.Leader != peerAddr("a") || s.Index != 1 || s.Candidate {
		t.Errorf("a newcomer hears %+v", s)
	}
	if d := l.decidedTo("s"); d == nil || d.Index != 1 {
		t.Errorf("a newcomer hears of decision %+v", d)
	}
	l.forget()
	l.receive("s", &message{Join: &join{}})
	if s := l.statusTo("s"); s == nil || s.Leader != peerAddr("a") {
		t.Errorf("who joins here hears %+v", s)
	}
	l.forget()
	l.receive("s", &message{Status: &status{Index: 1}})
	if l.decidedTo("s") != nil {
		t.Error("a decision is sent to who knows it")
	}
	l.m.peers["s"].status.Index = 0
	l.receive("s", &message{Status: &status{}})
	if d := l.decidedTo("s"); d == nil {
		t.Error("who knows less is not told")
	}
}

// TestFollowerClosesSpareLinks checks that a follower closes the connections that it made to find the leader.
func TestFollowerClosesSpareLinks(t *testing.T) {
	l := follower(t, "b")
	m := Member{Name: "c", Host: "c", HostID: "c", NodeRank: -1, NProc: 2, Addr: addrOf("c")}
	l.m.up(hello{Member: m, Status: status{Index: 1}}, addrOf("c"))
	l.connect("s", status{Index: 1}) // it has dialed here
	l.advance(probeInterval - tickInterval)
	if len(l.hungUp) > 0 {
		t.Errorf("hung up %v too early", l.hungUp)
	}
	l.advance(3 * tickInterval)
	if l.hungUp["c"] != 1 || l.hungUp["s"]+l.hungUp["a"] > 0 || l.m.peers["c"] != nil {
		t.Errorf("hung up %v", l.hungUp)
	}
}

// TestCandidateThatDoesNotLead checks that a follower leaves a candidate which gets no quorum, without an end of its
// workers.
func TestCandidateThatDoesNotLead(t *testing.T) {
	for _, lost := range []bool{true, false} {
		l := orphan(t, "c", threeAgents)
		l.receive("b", &message{Status: &status{1, peerAddr("b"), 1, true}})
		if !joins(l, "b") {
			t.Fatal("it does not follow the candidate")
		}
		l.forget()
		l.advance(l.m.cfg.Silence + electTime - time.Second)
		if s := l.statusTo("b"); s != nil {
			t.Fatalf("it leaves the candidate: %+v", s)
		}
		if lost {
			l.m.down("b", "no word")
		} else {
			l.advance(2 * time.Second)
		}
		l.advance(tickInterval)
		if l.aborted() || lost && !l.m.status().Candidate {
			t.Errorf("lost %t: news %v, it says %+v", lost, l.heard, l.m.status())
		}
		if s := l.m.status(); s.Leader == peerAddr("b") {
			t.Errorf("lost %t: it still follows %+v", lost, s)
		}
	}
}

// TestTermsGrow checks that a candidate takes a term above all that it has heard of, and the restarts of the last
// leader.
func TestTermsGrow(t *testing.T) {
	l := follower(t, "b")
	l.receive("a", &message{Status: &status{1, peerAddr("a"), 7, false}})
	l.endsHere(2)
	l.receive("a", &message{Again: &again{1, tally{Retries: launch.Retries{Max: 9, Done: 4}, Target: 3}}})
	l.m.down("a", "no word")
	l.connect("c", status{Index: 1})
	l.advance(time.Second)
	if s := l.statusTo("c"); s == nil || s.Term != 8 || !s.Candidate {
		t.Fatalf("c hears %+v", s)
	}
	l.receive("c", &message{Join: &join{Ended: &ended{Index: 1}}})
	l.m.next()
	l.advance(3 * l.m.cfg.Silence)
	l.m.leader.prepared(2, nil, nil, nil)
	if d := l.claimed(); d == nil || d.Tally.Retries.Done < 4 {
		t.Errorf("claims %+v", d)
	}
}

// TestFollowerOfAnotherDoesNotCount checks that a member that follows another leader is not part of the quorum, and
// that a candidate looks for that leader.
func TestFollowerOfAnotherDoesNotCount(t *testing.T) {
	l := leader(t)
	for _, name := range []string{"b", "c"} {
		l.receive(name, &message{Status: &status{1, peerAddr("d"), 0, false}})
	}
	l.receive("b", &message{Ended: failedAt(1, 2)})
	l.receive("c", &message{Ended: &ended{Index: 1}})
	l.endsHere(-1)
	l.m.next()
	l.advance(3 * time.Second)
	if n := len(l.prepares); n != 2 || len(l.prepares[1].Members) != 1 {
		t.Fatalf("without followers it prepares %+v", l.prepares)
	}
	if l.m.leader.prepared(2, nil, nil, nil); l.claimed() != nil {
		t.Errorf("without a quorum it claims %+v", l.claimed())
	}
	l = campaigner(t, threeAgents)
	clear(l.dials)
	l.receive("c", &message{Status: &status{1, peerAddr("d"), 1, false}})
	if l.dials[addrOf("d")] != 1 {
		t.Errorf("it dials %v", l.dials)
	}
	l.receive("c", &message{Status: &status{1, PeerAddr{}, 1, false}})
	if l.dials[""] > 0 {
		t.Errorf("it dials %v", l.dials)
	}
}

// TestErrorsOfDials checks that a dial of itself at the rendezvous makes an agent the leader, and that members that
// cannot be dialed are not awaited as leaders.
func TestErrorsOfDials(t *testing.T) {
	self := func(seeds ...string) *isolatedAgent {
		l := newIsolatedAgent(t, "b", func(c *Config) { c.Seeds = seeds })
		l.m.dialed("10.9.9.9:1", wire.ErrSelf) // another name of its address
		return l
	}
	if s := self("10.9.9.9:1").m.status(); s.Leader.Name != "b" {
		t.Errorf("at the rendezvous it says %+v", s)
	}
	if s := self(addrOf("a"), "10.9.9.9:1").m.status(); s.Leader.Name != "" {
		t.Errorf("at another seed it says %+v", s)
	}
	l := orphan(t, "c", assignmentOf(1, "a:0 b:1 c:2"))
	l.m.down("b", "no word")
	for _, name := range []string{"a", "b"} {
		l.m.dialed(addrOf(name), errors.New("refused"))
	}
	l.advance(time.Second)
	if s := l.m.status(); !s.Candidate {
		t.Errorf("it says %+v", s)
	}
	l.m.dialed(addrOf("a"), nil)
	l.receive("b", &message{Bye: &bye{}})
}
