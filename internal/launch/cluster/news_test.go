package cluster

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/cluster/gossip"
	"github.com/cprun/cprun/internal/launch/cluster/wire"
	"github.com/cprun/cprun/internal/launch/waits"
)

// relayedTo returns the news sent to an agent as text.
func (l *isolatedAgent) relayedTo(name string) (all []string) {
	for _, s := range l.sent {
		if s.to == name && s.msg.News != nil {
			all = append(all, newsText(s.msg.News.News))
		}
	}
	return all
}

func (l *isolatedAgent) relayedHere() (all []string) {
	for _, n := range l.heard {
		all = append(all, newsText(n))
	}
	return all
}

func newsText(n launch.News) string {
	return fmt.Sprintf("%v %q kill %t ask %t rows %d lost %q", n.Addrs, n.Stop, n.Kill, n.Ask, len(n.WaitStates),
		n.Lost)
}

// TestNewsReachTheOthers checks which agents get news of a start, and how often.
func TestNewsReachTheOthers(t *testing.T) {
	rows := []waits.WaitState{{Rank: 1}}
	addrs := func(n int) launch.News { return launch.News{Addrs: slices.Repeat([]string{"x"}, n)} }
	all := newsText(addrs(6))
	stopped, kill := newsText(launch.News{Stop: "SIGTERM at node b"}), newsText(launch.News{Kill: true})
	ask, answer := newsText(launch.News{Ask: true}), newsText(launch.News{WaitStates: rows})
	for name, c := range map[string]struct {
		says       []string // the senders of the news below, in order
		news       []launch.News
		here, b, c []string
	}{
		"addresses": {[]string{"b", "c", "a", "b"}, []launch.News{addrs(2), addrs(2), addrs(2), addrs(2)},
			[]string{all}, []string{all}, []string{all}},
		"a wrong number of addresses": {[]string{"b", "c", "a"},
			[]launch.News{addrs(1), addrs(2), addrs(2)}, nil, nil, nil},
		"a stop": {[]string{"b", "b", "c", "a"}, slices.Repeat([]launch.News{{Stop: "SIGTERM"}}, 4),
			[]string{stopped}, nil, []string{stopped}},
		"a second interrupt": {[]string{"b"}, []launch.News{{Kill: true}}, []string{kill}, nil,
			[]string{kill}},
		"questions": {[]string{"b", "b", "c", "b"}, []launch.News{{Ask: true}, {Ask: true}, {WaitStates: rows},
			{WaitStates: rows}},
			slices.Repeat([]string{ask}, 2), []string{answer},
			slices.Repeat([]string{ask}, 2)},
		"the leader's question": {[]string{"a", "c"}, []launch.News{{Ask: true}, {WaitStates: rows}},
			[]string{answer}, []string{ask},
			[]string{ask}},
	} {
		l := leader(t)
		l.forget()
		for i, from := range c.says {
			if from == "a" {
				l.m.publish(c.news[i])
			} else {
				l.receive(from, &message{News: &relayed{1, c.news[i]}})
			}
		}
		for who, want := range map[string][]string{"a": c.here, "b": c.b, "c": c.c} {
			got := l.relayedTo(who)
			if who == "a" {
				got = l.relayedHere()
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s: %s hears %q, want %q", name, who, got, want)
			}
		}
	}
}

// TestNewsOfNoStart checks that an agent publishes only news of the start that runs there, to its leader.
func TestNewsOfNoStart(t *testing.T) {
	l := follower(t, "b")
	l.m.publish(launch.News{Kill: true})
	if got := l.relayedTo("a"); len(got) != 1 {
		t.Errorf("the leader hears %q", got)
	}
	l.endsHere(2)
	l.m.publish(launch.News{Kill: true})
	l = follower(t, "b")
	l.forget()
	l.receive("a", &message{Decided: start("a", assignmentOf(2, "a:0 b:1"))})
	l.m.publish(launch.News{Kill: true})
	if got := l.relayedTo("a"); len(got) != 0 {
		t.Errorf("after the start the leader hears %q", got)
	}
}

// logging returns a change of the config that collects the lines for the user.
func logging(lines *[]string) func(*Config) {
	return func(c *Config) {
		c.Log = func(format string, args ...any) { *lines = append(*lines, fmt.Sprintf(format, args...)) }
	}
}

// TestJoinedNodesAreCounted checks the lines about the nodes that have joined, and the reason if they are too few.
func TestJoinedNodesAreCounted(t *testing.T) {
	for name, c := range map[string]struct {
		least, most, joined int
		want                []string
		why                 string
	}{
		"all": {3, 3, 3, []string{"1 of 3 nodes have joined", "2 of 3 nodes have joined"}, ""},
		"too few": {3, 3, 2, []string{"1 of 3 nodes have joined", "2 of 3 nodes have joined"},
			"only 2 of at least 3 nodes joined in "},
		"a range":    {2, 4, 1, []string{"1 of 2 to 4 nodes have joined"}, "only 1 of at least 2 nodes joined in "},
		"one is due": {1, 1, 1, nil, ""},
	} {
		var lines []string
		l := newIsolatedAgent(t, "a", logging(&lines), func(cfg *Config) { cfg.Min, cfg.Max = c.least, c.most })
		l.advance(6 * time.Second)
		for _, name := range []string{"b", "c"}[:c.joined-1] {
			l.connect(name, status{})
			l.receive(name, &message{Join: &join{}})
		}
		l.advance(l.m.cfg.JoinTimeout)
		if !slices.Equal(lines, c.want) {
			t.Errorf("%s: the user reads %q, want %q", name, lines, c.want)
		}
		l.advance(endTime + time.Second)
		ends := fmt.Sprint(l.ends)
		if (ends == "[]") != (c.why == "") || !strings.Contains(ends, c.why) {
			t.Errorf("%s: the job ends with %v, want %q", name, l.ends, c.why)
		}
	}
	some := []candidate{{Member: members("b@y:2")[0]}, {Member: members("a@x:0")[0]}}
	want := "only 2 of at least 4 nodes joined in 1m0s: x, y; missing node ranks: 1, 3"
	if got := tooFew(some, 4, time.Minute); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	some = append(some, candidate{Member: members("c")[0]})
	if got := tooFew(some, 4, time.Minute); strings.Contains(got, "missing") {
		t.Errorf("a node without a rank: %q", got)
	}
	if got := tooFew(nil, 100, time.Minute); !strings.HasSuffix(got, "missing node ranks: "+
		"0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15") {
		t.Errorf("no node: %q", got)
	}
}

// TestLeaderLooksForAgents checks how often a leader dials the seeds, and the missing members between two starts.
func TestLeaderLooksForAgents(t *testing.T) {
	l := leader(t, func(c *Config) { c.Seeds = []string{addrOf("a"), addrOf("e")} })
	dials := func(addr string, d time.Duration) int {
		clear(l.dials)
		for end := l.m.now.Add(d); l.m.now.Before(end); {
			l.advance(tickInterval)
			l.m.dialed(addrOf("e"), errors.New("refused"))
			l.m.search.dials = map[string]*dialing{} // no wait after a failure
		}
		return l.dials[addr]
	}
	if n := dials(addrOf("e"), time.Minute); n != int(time.Minute/probeInterval) {
		t.Errorf("%d dials of a seed in a minute of a start", n)
	}
	l.m.down("c", "no word")
	if n := dials(addrOf("c"), probeInterval); n != 0 {
		t.Errorf("%d dials of a lost member during a start", n)
	}
	l.receive("b", &message{Ended: &ended{Index: 1}})
	l.endsHere(-1)
	l.advance(tickInterval)
	if n := dials(addrOf("c"), 10*idleProbeInterval); n < 6 || n > 10 {
		t.Errorf("%d dials of a lost member between two starts", n)
	}
}

// TestNotesReachTheUser checks that a spare and its user learn its part, and that a leader's note is printed.
func TestNotesReachTheUser(t *testing.T) {
	l := leader(t)
	l.connect("s", status{})
	l.receive("s", &message{Join: &join{}})
	note := func(to string) string {
		if n := last(l, to, func(m *message) *string { return m.Note }); n != nil {
			return *n
		}
		return ""
	}
	if !strings.Contains(note("s"), "is a spare") || note("b") != "" {
		t.Errorf("s reads %q, b %q", note("s"), note("b"))
	}
	var lines []string
	l = newIsolatedAgent(t, "b", logging(&lines))
	l.connect("a", status{Leader: peerAddr("a")})
	text := "a note"
	l.receive("a", &message{Note: &text})
	if !slices.Equal(lines, []string{text}) {
		t.Errorf("the user reads %q", lines)
	}
}

// TestStopBetweenTwoStarts checks that the end of a leader that was asked to stop before a start is the job's, and the
// end of one that fails is not.
func TestStopBetweenTwoStarts(t *testing.T) {
	for status, ends := range map[int]bool{launch.ExitStopped: true, launch.ExitFailed: false} {
		l := leader(t)
		l.receive("b", &message{Ended: failedAt(1, 2)})
		l.receive("c", &message{Ended: &ended{Index: 1}})
		l.endsHere(-1)
		l.m.close(status, "")
		if d := l.claimed(); (d != nil && d.End != nil && d.End.Stopped) != ends {
			t.Errorf("status %d: claims %+v", status, d)
		}
		if ends {
			l.grant()
		}
		if !l.left {
			l.advance(endTime + time.Second)
		}
		d := l.decidedTo("b")
		if !l.left || (d != nil && d.End != nil) != ends {
			t.Errorf("status %d: it has left %t, b hears %+v", status, l.left, d)
		}
	}
}

// TestSearchReportsForeignProcesses checks the lines about an address where no agent of the job answers, and the end of
// the search.
func TestSearchReportsForeignProcesses(t *testing.T) {
	foreign := &wire.Refusal{Peer: "10.0.0.1:4000", Text: "it belongs to job 8", Theirs: true}
	refused := &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
	for name, c := range map[string]struct {
		err   error
		after time.Duration // until the search fails; 0: it goes on
		lines int           // in the first minute
	}{
		"no process":      {refused, 0, 1},
		"a foreign one":   {foreign, foreignTime, 3},
		"its own program": {&wire.Refusal{Peer: "p", Text: "other version", Proven: true}, tickInterval, 0},
		"both dialed":     {&wire.Refusal{Text: wire.ErrBoth.Error(), Proven: true}, 0, 1},
	} {
		var lines []string
		cfg := simConfig(1, 3)
		cfg.Seeds = []string{addrOf("a")}
		logging(&lines)(&cfg)
		begun := time.Unix(0, 0)
		s := newSearch(&cfg, begun)
		failed := time.Duration(0)
		for d := tickInterval; d < time.Minute; d += tickInterval {
			if s.failed(addrOf("a"), c.err, begun.Add(d)) && failed == 0 {
				failed = d
			}
		}
		if failed < c.after || failed > c.after+tickInterval || c.after == 0 && len(lines) != c.lines {
			t.Errorf("%s: fails after %v, want %v; the user reads %q", name, failed, c.after, lines)
		}
		if s.failed(addrOf("z"), c.err, begun) != (name == "its own program") {
			t.Errorf("%s: at another address", name)
		}
		got := s.noneFound()
		if c.err == refused && !strings.Contains(got, "refused") || !strings.Contains(got, addrOf("a")) {
			t.Errorf("%s: %q", name, got)
		}
	}
	if got := (&search{cfg: &Config{Job: "j"}}).noneFound(); strings.HasSuffix(got, ": ") {
		t.Errorf("%q", got)
	}
}

// TestRedialsSlowDown checks the pauses between the dials of an address.
func TestRedialsSlowDown(t *testing.T) {
	cfg := simConfig(1, 3)
	now := time.Unix(0, 0)
	s := newSearch(&cfg, now)
	var pauses []time.Duration
	for range 6 {
		if !s.begin("x", now) || s.begin("x", now) {
			t.Fatal("not one dial at a time")
		}
		s.ended("x", errors.New("refused"), now)
		begin := now
		for !s.of("x").next.Before(now.Add(time.Nanosecond)) {
			if s.begin("x", now) {
				t.Fatal("dialed again too early")
			}
			now = now.Add(100 * time.Millisecond)
		}
		pauses = append(pauses, now.Sub(begin)/time.Millisecond)
	}
	if want := []time.Duration{200, 400, 800, 1600, 2000, 2000}; !slices.Equal(pauses, want) {
		t.Errorf("pauses of %v ms, want %v", pauses, want)
	}
	s.begin("self", now)
	s.ended("self", wire.ErrSelf, now)
	if s.begin("self", now.Add(time.Minute)) {
		t.Error("dialed itself again")
	}
}

// TestMembersThatMayLead checks which members count as alive: those that gossip or a connection shows, not suspects.
func TestMembersThatMayLead(t *testing.T) {
	cfg := simConfig(1, 3)
	now := time.Unix(0, 0)
	for _, c := range []struct{ hints, connected, suspects, want string }{
		{"", "", "", "a b c"}, {"a", "", "", "a b"}, {"a", "c", "", "a b c"}, {"a c", "", "c", "a b"},
		{"", "", "b", "a b c"}, {"z", "", "b", "b"},
	} {
		s := newSearch(&cfg, now)
		for _, h := range strings.Fields(c.hints) {
			s.hints = append(s.hints, gossip.Peer{Name: h})
		}
		connected := peers{}
		for _, p := range strings.Fields(c.connected) {
			connected[p] = &peer{}
		}
		for _, p := range strings.Fields(c.suspects) {
			s.avoid(p, now)
		}
		var got []string
		for _, m := range s.alive(threeAgents.Members, "b", connected, now) {
			got = append(got, m.Name)
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}
