package cluster

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/cluster/gossip"
	"github.com/cprun/cprun/internal/launch/cluster/wire"
	"github.com/cprun/cprun/internal/launch/waits"
)

var update = flag.Bool("update", false, "TestTraces writes the effects into testdata: read the difference")

// TestTraces passes the events of each file of testdata to one agent, and compares all its effects: messages, dials,
// hang-ups, requests to the run directory, and calls of its launcher. The file plays the agent's peers, launcher, run
// directory and clock:
//
//	# A comment explains the next events.
//	follower b of a:0 b:1 c:2      a new agent; see setup
//	a: news 1 failed=4             a message from a; see message
//	  launcher: news 1 failed=4    indented: the effects of that event
//	pass 5s                        5 seconds pass
//	  +0.2s to c: status 1         an effect, and when
//
// No other state is read, so the traces hold for any coordinator with these messages.
func TestTraces(t *testing.T) {
	files, err := filepath.Glob("testdata/*.trace")
	if err != nil || len(files) == 0 {
		t.Fatalf("traces %q, %v", files, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".trace"), func(t *testing.T) {
			t.Parallel()
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := replay(t, string(want))
			if *update {
				err = os.WriteFile(file, []byte(got), 0o644)
			}
			if err != nil {
				t.Fatal(err)
			}
			wanted, lines := strings.Split(string(want), "\n"), strings.Split(got, "\n")
			for i, line := range lines {
				if i == len(wanted) || line != wanted[i] {
					t.Fatalf("%s:%d: the effects differ:\n%s", file, i+1,
						strings.Join(lines[max(0, i-4):min(len(lines), i+6)], "\n"))
				}
			}
		})
	}
}

// replay returns a trace with the effects that its events have now.
func replay(t *testing.T, trace string) string {
	var out strings.Builder
	a := &tracedAgent{t: t}
	for i, line := range strings.SplitAfter(trace, "\n") {
		event := strings.TrimSuffix(line, "\n")
		if strings.HasPrefix(line, " ") {
			continue
		}
		out.WriteString(line)
		if event == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if a.effects = nil; !a.event(event) {
			t.Fatalf("line %d: unknown event %q", i+1, event)
		}
		for _, e := range a.effects {
			fmt.Fprintln(&out, " ", e)
		}
	}
	return out.String()
}

// A tracedAgent is one coordinator with recorded effects.
type tracedAgent struct {
	t        *testing.T
	m        *coordinator
	effects  []string
	passing  time.Time // of the event that is a pause; zero: another event
	claimed  *decision // last requested of the run directory; nil: only to read
	refused  error     // of all dials, at the next tick; nil: they take for ever
	dials    []string  // begun since the last tick
	lastSent string
}

// An input is an event or a message in words: words, key=value, and a text after a colon.
type input struct {
	words  []string
	values map[string]string
	text   string
}

func parse(line string) input {
	in := input{values: map[string]string{}}
	line, in.text, _ = strings.Cut(line, ": ")
	for _, w := range strings.Fields(line) {
		if key, value, ok := strings.Cut(w, "="); ok {
			in.values[key] = value
		} else {
			in.words = append(in.words, w)
		}
	}
	return in
}

func (in *input) has(word string) bool { return slices.Contains(in.words, word) }

// number returns a value; other: it is absent.
func (in *input) number(key string, other int) int {
	if n, err := strconv.Atoi(in.values[key]); err == nil {
		return n
	}
	return other
}

// argument returns the number after the first word.
func (in *input) argument() int {
	if len(in.words) < 2 {
		return 0
	}
	n, _ := strconv.Atoi(in.words[1])
	return n
}

// assignment returns the agents among the words, as name:node rank.
func (in *input) assignment(generation int) Assignment {
	agents := slices.DeleteFunc(slices.Clone(in.words), func(w string) bool { return !strings.Contains(w, ":") })
	return assignmentOf(generation, strings.Join(agents, " "))
}

func assignmentOf(generation int, agents string) Assignment {
	w := Assignment{Generation: generation}
	all := members(agents)
	for i := range all {
		all[i].Addr = addrOf(all[i].Name)
	}
	w.Members, w.Size = assignRanks(all)
	return w
}

func addrOf(name string) string {
	if len(name) != 1 {
		return name
	}
	return fmt.Sprintf("10.0.0.%d:4000", name[0]-'a'+1)
}

func nameOf(addr string) string {
	for c := 'a'; c <= 'z'; c++ {
		if addrOf(string(c)) == addr {
			return string(c)
		}
	}
	return addr
}

func peerAddr(name string) PeerAddr {
	if name == "" {
		return PeerAddr{}
	}
	return PeerAddr{name, addrOf(name)}
}

func memberOf(name string, nodeRank int) Member {
	return Member{Name: name, Host: name, HostID: name, NodeRank: nodeRank, NProc: 2, Addr: addrOf(name)}
}

// event performs one line of a trace.
func (a *tracedAgent) event(line string) bool {
	if from, rest, ok := strings.Cut(line, ": "); ok && len(from) == 1 {
		a.m.receive(from, a.arrived(messageOf(parse(rest))))
		return true
	}
	in := parse(line)
	name := ""
	if len(in.words) > 1 {
		name = in.words[1]
	}
	switch in.words[0] {
	case "agent", "follower", "orphan", "candidate", "leader", "regrouping", "claiming", "stillborn":
		a.setup(&in, name)
		a.effects = nil
	case "up": // a peer connects: up c [rank=NODERANK] [via=ADDRESS] [INDEX status]
		h := hello{Member: memberOf(name, in.number("rank", -1))}
		in.words = in.words[1:]
		h.Status = *statusOf(in)
		a.m.up(h, in.values["via"])
	case "down":
		a.m.down(name, cmp.Or(in.text, "no word"))
	case "dialed": // the end of a dial: dialed c [foreign, proven] [: error]
		a.m.dialed(addrOf(name), in.err())
	case "dials-fail": // all later dials, at the next tick: dials-fail [foreign, proven]: error
		a.refused = in.err()
	case "hints": // gossip shows these agents
		a.m.search.hints = nil
		for _, name := range in.words[1:] {
			a.m.search.hints = append(a.m.search.hints, gossip.Peer{Name: name, Addr: addrOf(name)})
		}
	case "pass":
		d, err := time.ParseDuration(name)
		if err != nil {
			return false
		}
		a.pass(d)
	case "next":
		a.m.next()
	case "abandon": // the launcher no longer waits for a start
		a.m.caller.waiting = false
	case "prepared": // prepared GENERATION [payload=TEXT] [: error]
		a.m.leader.prepared(in.argument(), []byte(in.values["payload"]), nil, in.err())
	case "grant": // the run directory takes the last claim
		a.m.claimed(a.claimed, a.claimed, in.err())
	case "answer": // to the last claim, or with "other" to an older one: answer [other] DECISION or [: error]
		asked, newest := a.claimed, (*decision)(nil)
		if in.has("other") {
			asked = decisionOf(parse("decided 2 by=a a:0"))
		}
		if in.has("decided") {
			in.words = slices.DeleteFunc(in.words[1:], func(w string) bool { return w == "other" })
			newest = decisionOf(in)
		}
		a.m.claimed(asked, newest, in.err())
	case "ends": // the start ends here: ends [rank=RANK [victim]] [asked, forced, hung] [: the launcher's own error]
		e := endedOf(in).Ending
		e.Err = in.err()
		a.m.onLocalEnd(e)
	case "publish":
		a.m.publish(newsOf(in))
	case "close":
		a.m.close(in.argument(), in.text)
	default:
		return false
	}
	return true
}

// err returns the error of an event; "over" is one that ends the job as wrong input.
func (in *input) err() error {
	switch {
	case in.text == "":
		return nil
	case in.text == "self":
		return wire.ErrSelf
	case in.text == "both":
		return &wire.Refusal{Text: wire.ErrBoth.Error(), Proven: true}
	case in.has("foreign"):
		return &wire.Refusal{Peer: "10.0.0.1:4000", Text: in.text, Theirs: true}
	case in.has("proven"):
		return &wire.Refusal{Peer: "10.0.0.1:4000", Text: in.text, Proven: true}
	case in.has("over"):
		return &launch.Over{Result: launch.Result{ExitCode: launch.ExitInput}, Why: in.text}
	}
	return errors.New(in.text)
}

// setup makes a new agent whose launcher waits for a start, brings it into a state, and discards the effects:
//
//	agent NAME            knows no other agent; a is the rendezvous
//	follower NAME         follows a in the start of decision 1, which a, b and c have
//	orphan NAME AGENTS    of those agents; has lost its leader a, and is connected to the others
//	candidate b AGENTS    an orphan that asks the others to follow it
//	leader                a, the leader of b and c in the start of decision 1
//	regrouping            that leader, after a start that failed on b
//	claiming              that leader, which asks the run directory to take decision 2
//	stillborn             the leader of a start whose other member was lost before the decision
//
// min, max, restarts and seeds change its config.
func (a *tracedAgent) setup(in *input, name string) {
	kind := in.words[0]
	if name == "" || strings.Contains(name, "=") {
		name = "a"
	}
	cfg := simConfig(in.number("min", 1), in.number("max", 3))
	cfg.Host, cfg.HostID, cfg.MaxRestarts = name, name, in.number("restarts", 20)
	cfg.Seeds = nil
	for _, s := range strings.Split(cmp.Or(in.values["seeds"], "a"), ",") {
		cfg.Seeds = append(cfg.Seeds, addrOf(s))
	}
	cfg.Log = func(format string, args ...any) { a.effect("log: "+format, args...) }
	*a = tracedAgent{t: a.t}
	a.m = newCoordinator(&cfg, memberOf(name, -1), a, time.Unix(0, 0))
	a.m.next()
	world := in.assignment(1)
	if len(world.Members) == 0 {
		world = threeAgents
	}
	leads := []string{"pass 1s", "up b", "b: join", "up c", "c: join", "prepared 1 payload=payload", "grant"}
	regroups := append(leads, "b: ended 1 rank=2", "c: ended 1", "ends")
	events := map[string][]string{
		"follower":   {"up a 1 leader=a", "a: decided 1 by=a a:0 b:1 c:2"},
		"leader":     leads,
		"regrouping": regroups,
		"claiming":   append(regroups, "next", "pass 200ms", "prepared 2 payload=second"),
		"stillborn":  {"pass 1s", "up b", "b: join", "pass 11s", "prepared 1", "down b", "grant"},
	}[kind]
	if kind == "orphan" || kind == "candidate" {
		events = []string{"up a", "a: decided 1 by=a " + shown(world.Members, false), "down a"}
		for _, m := range world.Members[1:] {
			if m.Name != name {
				events = append(events, "up "+m.Name+" 1")
			}
		}
	}
	if kind == "candidate" {
		events = append(events, "pass 1s")
	}
	for _, e := range events {
		a.event(e)
	}
}

// pass moves the clock, with all ticks.
func (a *tracedAgent) pass(d time.Duration) {
	a.passing = a.m.now
	defer func() { a.passing = time.Time{} }()
	for end := a.m.now.Add(d); a.m.now.Before(end); {
		a.m.now = a.m.now.Add(tickInterval)
		dials := a.dials
		if a.dials = nil; a.refused != nil {
			for _, addr := range dials {
				a.m.dialed(addr, a.refused)
			}
		}
		a.m.tick()
	}
}

// arrived returns a message as it arrives over the network.
func (a *tracedAgent) arrived(m *message) *message {
	a.t.Helper()
	raw, err := json.Marshal(m)
	if err == nil {
		m, err = decodeMessage(raw)
	}
	if err != nil {
		a.t.Fatal(err)
	}
	return m
}

// messageOf returns a message in words:
//
//	status INDEX [leader=NAME] [term=TERM] [candidate]
//	join [ended …]
//	decided INDEX by=NAME AGENTS [payload=TEXT] or end=STATUS [: why]
//	news INDEX failed=RANK [: why lost], addrs=N, kill, ask, states=N, or stop: signal
//	ended INDEX [rank=RANK [victim]] [: fault]
//	again INDEX [restarts=N]
//	bye STATUS [all] [: why]
//	refuse: why, note: text
func messageOf(in input) *message {
	switch in.words[0] {
	case "status":
		return &message{Status: statusOf(in)}
	case "join":
		if in.words = in.words[1:]; len(in.words) > 0 {
			return &message{Join: &join{endedOf(in)}}
		}
		return &message{Join: &join{}}
	case "decided":
		return &message{Decided: decisionOf(in)}
	case "news":
		return &message{News: &relayed{in.argument(), newsOf(in)}}
	case "ended":
		return &message{Ended: endedOf(in)}
	case "again":
		return &message{Again: &again{in.argument(), tallyOf(in)}}
	case "bye":
		return &message{Bye: &bye{in.argument(), in.text, in.has("all")}}
	case "refuse":
		return &message{Refuse: &in.text}
	case "note":
		return &message{Note: &in.text}
	}
	return &message{}
}

func statusOf(in input) *status {
	return &status{in.argument(), peerAddr(in.values["leader"]), in.number("term", 0), in.has("candidate")}
}

func tallyOf(in input) tally {
	return tally{Retries: launch.Retries{Max: 20, Done: in.number("restarts", 0)}, Target: 3}
}

func decisionOf(in input) *decision {
	d := &decision{Index: in.argument(), Leader: peerAddr(in.values["by"]), Tally: tallyOf(in),
		Assignment: in.assignment(in.argument()), Payload: []byte(in.values["payload"])}
	if _, ok := in.values["end"]; ok {
		d.Assignment = threeAgents
		d.End = &outcome{ExitCode: in.number("end", 0), Why: in.text}
		if rank := in.number("first", -1); rank >= 0 {
			d.End.First = &launch.Failure{Rank: rank, Cause: "x"}
		}
	}
	return d
}

func endedOf(in input) *ended {
	e := launch.Ending{Step: int64(in.number("step", 5)), Asked: in.has("asked"), Forced: in.has("forced"),
		Hung: in.has("hung")}
	if rank := in.number("rank", -1); rank >= 0 {
		f := launch.Failure{Rank: rank, Host: "h", Cause: "x", Order: 1, Tail: []string{"last line"}}
		if in.has("victim") {
			f.Remote, f.Class = true, 3
		}
		e.Failures = []launch.Failure{f}
	}
	return &ended{Index: in.argument(), Ending: e, Fault: in.text}
}

func newsOf(in input) launch.News {
	n := launch.News{Kill: in.has("kill"), Ask: in.has("ask")}
	if rank := in.number("failed", -1); rank >= 0 {
		n.Failed, n.Lost = &rank, in.text
	} else if in.has("stop") {
		n.Stop = in.text
	}
	for i := range in.number("addrs", 0) {
		n.Addrs = append(n.Addrs, fmt.Sprint("w", i))
	}
	for i := range in.number("states", 0) {
		n.WaitStates = append(n.WaitStates, waits.WaitState{Rank: i})
	}
	return n
}

// Most traces have the assignment threeAgents.
var threeAgents = assignmentOf(1, "a:0 b:1 c:2")
