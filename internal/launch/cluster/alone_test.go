package cluster

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// An isolatedAgent is one agent. The test plays its peers, its launcher and the clock: it passes messages in, and
// checks the messages and effects out. It reads no other state, so that the tests also hold for another protocol with
// these messages.
type isolatedAgent struct {
	t        *testing.T
	m        *coordinator
	sent     []sent         // messages, in order
	dials    map[string]int // by address: how often
	hungUp   map[string]int // by name
	begun    []int          // decisions that the launcher was asked to start
	heard    []launch.News  // passed to the launcher
	verdicts []launch.Verdict
	ends     []error // results of its waits for a start
	prepares []Assignment
	left     bool
	claims   []*decision // asked of the run directory; nil: only to read
	payload  string      // of the last claim
}

type sent struct {
	to  string
	msg *message
}

// threeAgents is the assignment of these tests: agents a, b and c with two ranks each. a proposed decision 1 and is the
// rendezvous.
var threeAgents = assignmentOf(1, "a:0 b:1 c:2")

func assignmentOf(generation int, agents string) Assignment {
	all := members(agents)
	for i := range all {
		all[i].Addr = addrOf(all[i].Name)
	}
	w := Assignment{Generation: generation}
	w.Members, w.Size = assignRanks(all)
	return w
}

func addrOf(name string) string { return fmt.Sprintf("10.0.0.%d:4000", name[0]-'a'+1) }

// start returns by's decision to start w.
func start(by string, w Assignment) *decision {
	t := tally{Retries: launch.Retries{Max: 20}, Target: 3}
	return &decision{Index: w.Generation, Leader: peerAddr(by), Assignment: w, Tally: t}
}

// endDecision returns a decision to end the job.
func endDecision(index int, by string, status int) *decision {
	d := start(by, threeAgents)
	d.Index, d.End = index, &outcome{ExitCode: status}
	return d
}

// newIsolatedAgent makes the agent of that name. Its launcher waits for a start.
func newIsolatedAgent(t *testing.T, name string, change ...func(*Config)) *isolatedAgent {
	cfg := simConfig(1, 3)
	cfg.Host, cfg.HostID = name, name
	cfg.Seeds = []string{addrOf("a")}
	for _, f := range change {
		f(&cfg)
	}
	l := &isolatedAgent{t: t, dials: map[string]int{}, hungUp: map[string]int{}}
	self := Member{Name: name, Host: name, HostID: name, NodeRank: -1, NProc: 2, Addr: addrOf(name)}
	l.m = newCoordinator(&cfg, self, l, time.Unix(0, 0))
	l.m.next()
	return l
}

// follower returns an agent that follows a in the start of decision 1.
func follower(t *testing.T, name string) *isolatedAgent {
	l := newIsolatedAgent(t, name)
	l.connect("a", status{Index: 1, Leader: peerAddr("a")})
	l.receive("a", &message{Decided: start("a", threeAgents)})
	return l
}

// orphan returns a member of a decided assignment that has lost its leader a, has not begun the start, and is connected
// to the other members.
func orphan(t *testing.T, name string, w Assignment, change ...func(*Config)) *isolatedAgent {
	l := newIsolatedAgent(t, name, change...)
	l.connect("a", status{})
	l.receive("a", &message{Decided: start("a", w)})
	l.m.down("a", "no word")
	for _, a := range w.Members[1:] {
		if a.Name != name {
			l.connect(a.Name, status{Index: w.Generation})
		}
	}
	return l
}

// campaigner returns agent b of w as a candidate.
func campaigner(t *testing.T, w Assignment, change ...func(*Config)) *isolatedAgent {
	l := orphan(t, "b", w, change...)
	l.advance(time.Second)
	return l
}

// elected returns agent b of threeAgents as the leader, whom c follows.
func elected(t *testing.T) *isolatedAgent {
	l := campaigner(t, threeAgents)
	l.receive("c", &message{Join: &join{}})
	return l
}

// leader returns agent a, the leader of b and c in the start of decision 1.
func leader(t *testing.T, change ...func(*Config)) *isolatedAgent {
	l := newIsolatedAgent(t, "a", change...)
	l.advance(time.Second)
	for _, name := range []string{"b", "c"} {
		l.connect(name, status{})
		l.receive(name, &message{Join: &join{}})
	}
	if len(l.prepares) != 1 {
		t.Fatalf("%d starts were prepared", len(l.prepares))
	}
	l.m.leader.prepared(1, []byte("payload"), nil, nil)
	l.grant()
	if !slices.Equal(l.begun, []int{1}) {
		t.Fatalf("begun %v", l.begun)
	}
	return l
}

func peerAddr(name string) PeerAddr { return PeerAddr{name, addrOf(name)} }

// connect connects a peer.
func (l *isolatedAgent) connect(name string, s status) {
	m := Member{Name: name, Host: name, HostID: name, NodeRank: -1, NProc: 2, Addr: addrOf(name)}
	l.m.up(hello{Member: m, Status: s}, "")
}

// receive passes in a peer's message, validated as if received from the network.
func (l *isolatedAgent) receive(name string, m *message) {
	l.t.Helper()
	raw, err := json.Marshal(m)
	if err == nil {
		m, err = decodeMessage(raw)
	}
	if err != nil {
		l.t.Fatal(err)
	}
	l.m.receive(name, m)
}

// advance moves the clock by d, with all ticks.
func (l *isolatedAgent) advance(d time.Duration) {
	for end := l.m.now.Add(d); l.m.now.Before(end); {
		l.m.now = l.m.now.Add(tickInterval)
		l.m.tick()
	}
}

// last returns the last message of a kind to an agent.
func last[T any](l *isolatedAgent, to string, kind func(*message) *T) *T {
	for _, s := range slices.Backward(l.sent) {
		if m := kind(s.msg); m != nil && s.to == to {
			return m
		}
	}
	return nil
}

func (l *isolatedAgent) decidedTo(to string) *decision {
	return last(l, to, func(m *message) *decision { return m.Decided })
}
func (l *isolatedAgent) newsTo(to string) *relayed {
	return last(l, to, func(m *message) *relayed { return m.News })
}
func (l *isolatedAgent) statusTo(to string) *status {
	return last(l, to, func(m *message) *status { return m.Status })
}

// failureTo returns the rank and the reason of the last failure relayed to an agent; rank is -1 if none was.
func (l *isolatedAgent) failureTo(name string) (rank int, lost string) {
	if n := l.newsTo(name); n != nil && n.News.Failed != nil {
		return *n.News.Failed, n.News.Lost
	}
	return -1, ""
}

// againTo returns the last announcement of another start to an agent.
func (l *isolatedAgent) againTo(to string) *again {
	return last(l, to, func(m *message) *again { return m.Again })
}

// forget discards the messages so far.
func (l *isolatedAgent) forget() { l.sent, l.heard = nil, nil }

// grant answers the last claim as a run directory that takes it.
func (l *isolatedAgent) grant() {
	l.t.Helper()
	l.answer(l.claimed(), nil)
}

// answer answers the last claim.
func (l *isolatedAgent) answer(newest *decision, err error) {
	l.t.Helper()
	if len(l.claims) == 0 {
		l.t.Fatal("the run directory was not asked")
	}
	d := l.claims[len(l.claims)-1]
	l.claims = nil
	l.m.claimed(d, newest, err)
}

// claimed returns the last claim that is not answered; nil: none.
func (l *isolatedAgent) claimed() *decision {
	if len(l.claims) == 0 {
		return nil
	}
	return l.claims[len(l.claims)-1]
}

// failedAt returns the ending of a start with that failed rank.
func failedAt(index, rank int) *ended {
	return &ended{Index: index, Ending: launch.Ending{Failures: []launch.Failure{{Rank: rank, Cause: "x", Order: 1}}}}
}

// aborted reports whether the launcher got news that ends its start.
func (l *isolatedAgent) aborted() bool {
	return slices.ContainsFunc(l.heard, func(n launch.News) bool { return n.Failed != nil || n.Lost != "" })
}

// endsHere ends the launcher's start, with a failed rank or, for -1, without.
func (l *isolatedAgent) endsHere(rank int) {
	e := launch.Ending{Step: 5}
	if rank >= 0 {
		e = failedAt(0, rank).Ending
	}
	l.m.onLocalEnd(e)
}

// The effects.

func (l *isolatedAgent) dial(addr string)         { l.dials[addr]++ }
func (l *isolatedAgent) hangUp(name string)       { l.hungUp[name]++ }
func (l *isolatedAgent) prepare(w Assignment)     { l.prepares = append(l.prepares, w) }
func (l *isolatedAgent) begin(d *decision)        { l.begun = append(l.begun, d.Index) }
func (l *isolatedAgent) over(err error)           { l.ends = append(l.ends, err) }
func (l *isolatedAgent) gone()                    { l.left = true }
func (l *isolatedAgent) news(n launch.News)       { l.heard = append(l.heard, n) }
func (l *isolatedAgent) verdict(v launch.Verdict) { l.verdicts = append(l.verdicts, v) }

func (l *isolatedAgent) claim(payload []byte, d *decision) {
	l.claims, l.payload = append(l.claims, d), string(payload)
}

func (l *isolatedAgent) send(m *message, names ...string) {
	raw, err := json.Marshal(m)
	var copied *message
	if err == nil {
		copied, err = decodeMessage(raw) // a snapshot
	}
	if err != nil {
		l.t.Error(err)
	}
	for _, name := range names {
		l.sent = append(l.sent, sent{name, copied})
	}
}
