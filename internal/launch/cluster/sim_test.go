package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/cluster/wire"
)

// A sim runs the coordinators of many agents with simulated networks, launchers and time: thousands of jobs with faults
// in seconds. A seed reproduces a run.
type sim struct {
	rand           *rand.Rand
	now            time.Time
	queue          []simEvent // by time
	agents         []*simAgent
	byAddr         map[string]*simAgent
	cut            func(from, to *simAgent) bool // nil: no link is cut
	decided        map[int]string                // by index, as JSON: all decisions learned so far
	starts         map[int]*simStart             // by generation
	faults         []error
	duringDecision func() // called while a decision is made; nil: not called
	newest         []byte // decision in the run directory
	newestIndex    int
	diskFaults     int // one claim in diskFaults fails; 0: none
	trace          func(format string, args ...any)
}

// A simStart is the real state of a generation's workers.
type simStart struct {
	begun, alive map[string]bool // agents whose workers were started, and still run without a failure
	size         int
}

// A simEvent happens at a time.
type simEvent struct {
	at time.Time
	do func()
}

func newSim(seed uint64) *sim {
	return &sim{
		rand: rand.New(rand.NewPCG(seed, 7)), now: time.Unix(0, 0), byAddr: map[string]*simAgent{},
		decided: map[int]string{}, starts: map[int]*simStart{}, trace: func(string, ...any) {},
	}
}

// after schedules do in d.
func (s *sim) after(d time.Duration, do func()) {
	at := s.now.Add(d)
	i := len(s.queue)
	for i > 0 && s.queue[i-1].at.After(at) { // after events of the same time
		i--
	}
	s.queue = slices.Insert(s.queue, i, simEvent{at, do})
}

// until runs for d, or until done returns true.
func (s *sim) until(d time.Duration, done func() bool) {
	end := s.now.Add(d)
	for len(s.queue) > 0 && !done() && s.queue[0].at.Before(end) && len(s.faults) == 0 {
		e := s.queue[0]
		s.queue = s.queue[1:]
		s.now = e.at
		e.do()
	}
}

func (s *sim) fault(format string, args ...any) {
	s.faults = append(s.faults, fmt.Errorf(format, args...))
}

func (s *sim) between(least, most time.Duration) time.Duration {
	return least + time.Duration(s.rand.Int64N(int64(most-least)+1))
}

// A simAgent is an agent with its connections and its launcher.
type simAgent struct {
	*sim
	coord    *coordinator
	cfg      Config
	links    map[string]*simLink // by the peer's name
	dead     bool                // killed, or ended
	paused   bool
	missed   []func() // events during the pause
	status   int      // exit status; -1: running
	why      string
	run      int  // number of starts of its workers
	endedRun int  // the last start that ended here
	failed   bool // its workers know of a failure
	ending   bool
}

// A simLink is a connection of two agents.
type simLink struct {
	a, b   *simAgent
	closed bool
	// waiting contains the messages in transit to each agent, in order.
	waiting map[*simAgent][]func()
}

func (l *simLink) other(a *simAgent) *simAgent {
	if l.a == a {
		return l.b
	}
	return l.a
}

// add starts an agent.
func (s *sim) add(cfg Config, change func(*Config)) *simAgent {
	n := len(s.agents)
	a := &simAgent{sim: s, cfg: cfg, links: map[string]*simLink{}, status: -1}
	a.cfg.Host = fmt.Sprintf("h%d", n)
	addr := fmt.Sprintf("10.0.1.%d:%d", n%250+1, 4000+n)
	if change != nil {
		change(&a.cfg)
	}
	a.cfg.Log = func(format string, args ...any) {
		s.trace("%v %s: "+format, append([]any{s.now.Unix(), a.coord.self.Name}, args...)...)
	}
	if a.cfg.Port != 0 {
		addr = a.cfg.Seeds[0]
	}
	if a.cfg.HostID == "" {
		a.cfg.HostID = a.cfg.Host
	}
	a.coord = newCoordinator(&a.cfg, Member{
		Name: fmt.Sprintf("%s-%03d", a.cfg.Host, n), Host: a.cfg.Host, HostID: a.cfg.HostID,
		NodeRank: a.cfg.NodeRank, NProc: a.cfg.NProc, Addr: addr,
	}, a, s.now)
	s.agents = append(s.agents, a)
	s.byAddr[addr] = a
	s.after(0, func() { a.do(a.coord.next) })
	a.tick()
	return a
}

func (a *simAgent) tick() {
	a.after(tickInterval, func() {
		if !a.dead {
			if !a.paused { // one tick has the effect of many
				a.do(a.coord.tick)
			}
			a.tick()
		}
	})
}

// do passes an event to the coordinator, later if it is paused, and checks the result.
func (a *simAgent) do(f func()) {
	if a.dead {
		return
	}
	if a.paused {
		a.missed = append(a.missed, f)
		return
	}
	a.coord.now = a.now
	before := a.coord.index
	f()
	if a.coord.index != before {
		a.learned()
	}
}

// learned checks that all agents agree on each decision.
func (a *simAgent) learned() {
	raw, _ := json.Marshal(a.coord.last)
	d := a.coord.last
	a.trace("%v %s learns %s", a.now.Unix(), a.coord.self.Name, d.text())
	if other, ok := a.decided[d.Index]; ok && other != string(raw) {
		a.fault("decision %d is both\n%s and\n%s", d.Index, other, raw)
	}
	a.decided[d.Index] = string(raw)
}

// kill ends an agent without a last message.
func (a *simAgent) kill() {
	a.trace("%v %s is killed", a.now.Unix(), a.coord.self.Name)
	a.drop()
	a.dead = true
	for _, l := range a.links {
		l.sever(a, "its agent has ended")
	}
	delete(a.byAddr, a.coord.self.Addr)
}

// drop ends the workers.
func (a *simAgent) drop() {
	for _, w := range a.starts {
		delete(w.alive, a.coord.self.Name)
	}
}

// sever closes a link: at once at its caller's side, soon at the other side.
func (l *simLink) sever(by *simAgent, why string) {
	if l.closed {
		return
	}
	l.closed = true
	to := l.other(by)
	if by.links[to.coord.self.Name] == l {
		delete(by.links, to.coord.self.Name)
	}
	gone := func() {
		if to.links[by.coord.self.Name] == l {
			delete(to.links, by.coord.self.Name)
			to.do(func() { to.coord.down(by.coord.self.Name, why) })
		}
	}
	l.arrive(by, gone)
	by.after(to.cfg.Silence, gone) // if the close message is lost
}

// arrive runs do at the other side of the link after a latency. On a cut link, messages wait as in TCP.
func (l *simLink) arrive(from *simAgent, do func()) {
	to := l.other(from)
	l.waiting[to] = append(l.waiting[to], do)
	from.after(from.between(100*time.Microsecond, 5*time.Millisecond), func() { l.flush(from, to) })
}

func (l *simLink) flush(from, to *simAgent) {
	if from.isCut(from, to) {
		from.after(200*time.Millisecond, func() { l.flush(from, to) })
		return
	}
	all := l.waiting[to]
	l.waiting[to] = nil
	for _, do := range all {
		do()
	}
}

func (s *sim) isCut(from, to *simAgent) bool { return s.cut != nil && s.cut(from, to) }

// silence closes silent links. It reschedules itself.
func (s *sim) silence() {
	const step = 250 * time.Millisecond
	s.after(step, s.silence)
	if s.cut == nil && !slices.ContainsFunc(s.agents, func(a *simAgent) bool { return a.paused }) {
		return
	}
	for _, a := range s.agents {
		for _, l := range sortedLinks(a) {
			b := l.other(a)
			if l.closed || !(a.paused || s.isCut(a, b)) {
				continue
			}
			// b receives nothing from a.
			s.after(a.cfg.Silence, func() {
				if !l.closed && (a.paused || s.isCut(a, b)) && b.links[a.coord.self.Name] == l && !b.paused {
					delete(b.links, a.coord.self.Name)
					l.sever(b, "no word")
					b.do(func() { b.coord.down(a.coord.self.Name, "no word") })
				}
			})
		}
	}
}

func sortedLinks(a *simAgent) (links []*simLink) {
	for _, b := range a.agents {
		if l := a.links[b.coord.self.Name]; l != nil {
			links = append(links, l)
		}
	}
	return links
}

// The effects of the coordinator.

func (a *simAgent) dial(addr string) {
	b := a.byAddr[addr]
	fail := func(after time.Duration, err error) {
		a.after(after, func() { a.do(func() { a.coord.dialed(addr, err) }) })
	}
	switch {
	case b == a:
		a.after(time.Millisecond, func() { a.do(func() { a.coord.dialed(addr, wire.ErrSelf) }) })
		return
	case b == nil || b.dead:
		fail(time.Millisecond, errors.New("refused"))
		return
	case b.paused || a.isCut(a, b) || a.isCut(b, a):
		fail(3*time.Second, errors.New("timeout"))
		return
	}
	a.after(a.between(time.Millisecond, 20*time.Millisecond), func() {
		if a.dead || b.dead || a.paused || b.paused || a.isCut(a, b) || a.isCut(b, a) {
			fail(3*time.Second, errors.New("timeout"))
			return
		}
		a.connect(b, addr)
		a.do(func() { a.coord.dialed(addr, nil) })
	})
}

func (a *simAgent) connect(b *simAgent, addr string) {
	mine, theirs := helloOf(a.coord), helloOf(b.coord)
	for _, pair := range [][2]*simAgent{{a, b}, {b, a}} {
		x, y := pair[0], pair[1]
		if old := x.links[y.coord.self.Name]; old != nil {
			delete(x.links, y.coord.self.Name)
			old.closed = true
			x.do(func() { x.coord.down(y.coord.self.Name, "it has reconnected") })
		}
	}
	l := &simLink{a: a, b: b, waiting: map[*simAgent][]func(){}}
	a.links[b.coord.self.Name], b.links[a.coord.self.Name] = l, l
	a.do(func() { a.coord.up(theirs, addr) })
	b.do(func() { b.coord.up(mine, "") })
}

func (a *simAgent) hangUp(name string) {
	if l := a.links[name]; l != nil {
		delete(a.links, name)
		l.sever(a, "its agent has closed the connection")
	}
}

func (a *simAgent) send(m *message, names ...string) {
	raw, err := json.Marshal(m)
	if err != nil {
		a.fault("%v", err)
		return
	}
	got, err := decodeMessage(raw)
	if err != nil {
		a.fault("%s: %v", raw, err)
		return
	}
	if m.Decided != nil {
		a.atDecision()
	}
	for _, name := range names {
		l := a.links[name]
		if l == nil || l.closed {
			continue
		}
		to := l.other(a)
		l.arrive(a, func() {
			if to.links[a.coord.self.Name] == l {
				to.do(func() { to.coord.receive(a.coord.self.Name, got) })
			}
		})
	}
}

// atDecision injects a fault at the worst moment.
func (a *simAgent) atDecision() {
	if a.duringDecision != nil && a.rand.IntN(10) == 0 {
		a.after(a.between(0, 6*time.Millisecond), a.duringDecision)
	}
}

// claim asks the run directory. A request and its reply are lost sometimes; a dead agent's request still arrives.
func (a *simAgent) claim(_ []byte, d *decision) {
	raw, index := []byte(nil), 0
	if d != nil {
		var err error
		if raw, err = json.Marshal(d); err != nil {
			a.fault("%v", err)
		}
		index = d.Index
	}
	a.atDecision()
	lost := a.diskFaults > 0 && a.rand.IntN(a.diskFaults) == 0
	executed := !lost || a.rand.IntN(2) == 0
	a.after(a.between(time.Millisecond, 30*time.Millisecond), func() {
		if executed && index > a.newestIndex {
			if index != a.newestIndex+1 {
				a.fault("decision %d follows %d", index, a.newestIndex)
			}
			a.newest, a.newestIndex = raw, index
		}
		newest := new(decision)
		if a.newest == nil {
			newest = nil
		} else if err := json.Unmarshal(a.newest, newest); err != nil {
			a.fault("%v", err)
		}
		a.after(a.between(time.Millisecond, 30*time.Millisecond), func() {
			a.do(func() {
				if lost {
					a.coord.claimed(d, nil, errors.New("input/output error"))
				} else {
					a.coord.claimed(d, newest, nil)
				}
			})
		})
	})
}

func (a *simAgent) prepare(w Assignment) {
	a.after(time.Millisecond, func() {
		a.do(func() { a.coord.leader.prepared(w.Generation, []byte("payload"), []byte("secret"), nil) })
	})
}

func (a *simAgent) gone() {}

// begin starts the workers. They are done some time after all agents' workers were started, if no fault occurs.
func (a *simAgent) begin(d *decision) {
	a.run++
	a.failed = false
	w := a.starts[d.Index]
	if w == nil {
		w = &simStart{map[string]bool{}, map[string]bool{}, len(d.Assignment.Members)}
		a.starts[d.Index] = w
	}
	w.begun[a.coord.self.Name], w.alive[a.coord.self.Name] = true, true
	for g, other := range a.starts {
		if g != d.Index && len(other.alive) == other.size && len(w.alive) == w.size {
			a.fault("assignments %d and %d run at the same time", g, d.Index)
		}
	}
	me := d.Assignment.Members[d.Assignment.index(a.coord.self.Name)]
	a.coord.publish(launch.News{Addrs: make([]string, me.NProc)})
	a.work(a.run, w, a.now.Add(a.between(5*time.Second, 40*time.Second)))
}

func (a *simAgent) work(run int, w *simStart, end time.Time) {
	a.after(time.Second, func() {
		switch {
		case a.dead || a.run != run || a.failed:
		case a.paused || len(w.alive) < w.size || a.now.Before(end):
			a.work(run, w, end)
		default:
			for _, b := range a.agents { // all end at the same time
				if w.begun[b.coord.self.Name] {
					b.finish(b.run, launch.Ending{Step: 100})
				}
			}
		}
	})
}

func (a *simAgent) finish(run int, e launch.Ending) {
	a.after(a.between(0, 10*time.Millisecond), func() {
		if a.dead || a.run != run || a.endedRun == run {
			return
		}
		a.endedRun, a.ending = run, true
		if len(e.Failures) > 0 {
			a.drop()
		}
		a.do(func() { a.coord.onLocalEnd(e) })
	})
}

func (a *simAgent) news(n launch.News) {
	if n.Failed == nil && n.Lost == "" || a.failed || a.ending {
		return
	}
	a.failed = true
	a.drop()
	run := a.run
	a.after(a.between(time.Millisecond, 3*time.Second), func() {
		a.finish(run, victimOf(a.coord, int64(run)))
	})
}

func (a *simAgent) verdict(v launch.Verdict) {
	a.ending = false
	a.drop()
	if v.Again {
		a.after(0, func() { a.do(a.coord.next) })
		return
	}
	a.end(v.ExitCode, fmt.Sprint(v.Err))
}

func (a *simAgent) over(err error) {
	over := (*launch.Over)(nil)
	if !errors.As(err, &over) {
		a.fault("the end of a wait: %v", err)
		return
	}
	a.end(over.ExitCode, over.Why)
}

// end closes the agent as its launcher does.
func (a *simAgent) end(status int, why string) {
	if a.status >= 0 {
		a.fault("%s ends twice", a.coord.self.Name)
	}
	a.status, a.why = status, why
	a.trace("%v %s ends with %d: %s", a.now.Unix(), a.coord.self.Name, status, why)
	a.after(time.Millisecond, func() {
		a.do(func() { a.coord.close(status, "") })
		a.after(5*time.Second, a.kill)
	})
}

// states describes the live agents.
func (s *sim) states() (out []string) {
	for _, a := range s.agents {
		if !a.dead {
			c := a.coord
			out = append(out, fmt.Sprintf("%s %v of %q, decision %d, local %+v", c.self.Name, c.role, c.follow, c.index,
				c.caller))
		}
	}
	return out
}

// victimOf returns the ending of workers that a failure elsewhere has ended.
func victimOf(c *coordinator, step int64) launch.Ending {
	rank := c.world().firstRank(c.self.Name)
	return launch.Ending{Step: step, Failures: []launch.Failure{{Rank: rank, Remote: true, Class: 3, Order: 1}}}
}
