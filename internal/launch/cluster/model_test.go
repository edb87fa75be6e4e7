package cluster

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

var modelDepth = flag.Int("model.depth", 5, "events in a row that TestAllInterleavings tries")

// TestAllInterleavings tries all orders of events in a job of three agents after the first start has failed on one of
// them, up to a number of events: messages arrive, links break and heal, agents die, time passes, the run directory takes
// claims and answers. In every state, all agents that know a decision know the one in the run directory, and no agent
// begins another start.
func TestAllInterleavings(t *testing.T) {
	t.Parallel()
	type path []string
	// Agent a claims the next start; then the run directory has it, unknown to b and c.
	claimed := path{"arrive c a", "arrive a b", "arrive b a", "arrive a b", "arrive a c", "tick a"}
	lost := append(slices.Clone(claimed), "disk a", "die a", "tick b", "arrive c b")
	layer, seen := []path{nil, claimed, lost}, map[string]bool{}
	most := *modelDepth
	if testing.Short() {
		most--
	}
	for depth := range most + 1 {
		var next []path
		for _, p := range layer {
			w := newModel()
			for _, e := range p {
				w.do(e)
			}
			if w.fault != "" {
				t.Fatalf("%s after:\n%s", w.fault, strings.Join(p, "\n"))
			}
			if key := w.key(); seen[key] {
				continue
			} else {
				seen[key] = true
			}
			for _, e := range w.events() {
				next = append(next, append(slices.Clone(p), e))
			}
		}
		t.Logf("depth %d: %d states", depth, len(seen))
		layer = next
	}
	if len(seen) < 1000 {
		t.Errorf("only %d states", len(seen))
	}
}

// A model is a job of three agents. An event changes it; its consequences inside an agent, its launcher and its workers
// happen at once.
type model struct {
	agents map[string]*modelAgent
	linked map[string]bool // pairs of agents, as "a b"
	cut    map[string]bool // pairs that cannot connect
	disk   []string        // the decisions in the run directory
	later  []func()        // consequences of the present event
	losses int             // links lost so far, as deaths and ticks
	deaths int
	fault  string
}

type modelAgent struct {
	*model
	coord  *coordinator
	dead   bool
	queues map[string][]*message // messages to it, by sender
	claims []*modelClaim
	ticks  int
}

// A modelClaim is a request to the run directory, or its answer.
type modelClaim struct {
	d        *decision
	executed bool
	newest   string
}

var modelNames = []string{"a", "b", "c"}

func pair(x, y string) string { return min(x, y) + " " + max(x, y) }

// newModel returns a job whose first start has just failed on c.
func newModel() *model {
	w := &model{agents: map[string]*modelAgent{}, linked: map[string]bool{}, cut: map[string]bool{}}
	for _, name := range modelNames {
		cfg := simConfig(1, 3)
		cfg.Host, cfg.HostID, cfg.Seeds = name, name, []string{addrOf("a")}
		a := &modelAgent{model: w, queues: map[string][]*message{}}
		a.coord = newCoordinator(&cfg, memberOf(name, -1), a, time.Unix(0, 0))
		w.agents[name] = a
		a.coord.next()
	}
	for !w.begun() { // in a fixed order
		for _, e := range w.events() {
			if strings.HasPrefix(e, "arrive") || strings.HasPrefix(e, "disk") || strings.HasPrefix(e, "answer") {
				w.do(e)
			}
		}
		for _, name := range modelNames {
			w.tick(name, tickInterval)
		}
	}
	c := w.agents["c"].coord
	rank := c.world().firstRank("c")
	c.publish(launch.News{Failed: &rank})
	w.agents["c"].news(launch.News{Failed: &rank})
	w.settle()
	return w
}

func (w *model) begun() bool {
	for _, a := range w.agents {
		if !a.coord.caller.running {
			return false
		}
	}
	return true
}

// events lists the possible next events.
func (w *model) events() (all []string) {
	for _, x := range modelNames {
		a := w.agents[x]
		if a.dead {
			continue
		}
		for _, y := range modelNames {
			if len(a.queues[y]) > 0 {
				all = append(all, "arrive "+y+" "+x)
			}
			if x < y && w.linked[pair(x, y)] && w.losses < 2 {
				all = append(all, "lose "+x+" "+y)
			}
			if x < y && w.cut[pair(x, y)] && !w.agents[y].dead {
				all = append(all, "heal "+x+" "+y)
			}
		}
		if len(a.claims) > 0 {
			all = append(all, map[bool]string{false: "disk ", true: "answer "}[a.claims[0].executed]+x)
		}
		if a.ticks < 3 {
			all = append(all, "tick "+x)
		}
		if w.deaths < 1 {
			all = append(all, "die "+x)
		}
	}
	return all
}

func (w *model) do(event string) {
	f := strings.Fields(event)
	switch x := f[1]; f[0] {
	case "arrive": // all messages of one agent to another
		a := w.agents[f[2]]
		q := a.queues[x]
		a.queues[x] = nil
		for _, m := range q {
			a.coord.receive(x, m)
		}
	case "lose":
		w.losses++
		w.cut[pair(x, f[2])] = true
		w.unlink(x, f[2])
	case "heal":
		delete(w.cut, pair(x, f[2]))
	case "disk":
		w.agents[x].claims[0].execute(w)
	case "answer":
		a := w.agents[x]
		c := a.claims[0]
		a.claims = a.claims[1:]
		a.coord.claimed(c.d, decoded(c.newest), nil)
	case "tick":
		w.agents[x].ticks++
		w.tick(x, 3*time.Second) // an election takes less; a lost agent is avoided for longer
	case "die":
		w.deaths++
		w.agents[x].dead = true
		for _, y := range modelNames {
			w.unlink(x, y)
		}
	}
	w.settle()
}

func (w *model) tick(x string, d time.Duration) {
	c := w.agents[x].coord
	c.now = c.now.Add(d)
	c.tick()
	w.settle()
}

// settle performs the consequences of an event, and checks the decisions.
func (w *model) settle() {
	for len(w.later) > 0 {
		f := w.later[0]
		w.later = w.later[1:]
		f()
	}
	for _, name := range modelNames {
		if c := w.agents[name].coord; c.last != nil {
			w.check(name, c.last)
		}
	}
}

func (w *model) check(name string, d *decision) {
	raw, _ := json.Marshal(d)
	if d.Index > len(w.disk) || w.disk[d.Index-1] != string(raw) {
		w.fault = fmt.Sprintf("%s knows decision %s; the run directory has %q", name, raw, w.disk)
	}
}

func (w *model) unlink(x, y string) {
	if !w.linked[pair(x, y)] {
		return
	}
	delete(w.linked, pair(x, y))
	for _, side := range [][2]string{{x, y}, {y, x}} {
		a := w.agents[side[0]]
		a.queues[side[1]] = nil
		if !a.dead {
			w.later = append(w.later, func() { a.coord.down(side[1], "lost") })
		}
	}
}

func (c *modelClaim) execute(w *model) {
	c.executed = true
	if c.d != nil && c.d.Index > len(w.disk) {
		raw, _ := json.Marshal(c.d)
		if c.d.Index != len(w.disk)+1 {
			w.fault = fmt.Sprintf("decision %d follows %d", c.d.Index, len(w.disk))
		}
		w.disk = append(w.disk, string(raw))
	}
	if len(w.disk) > 0 {
		c.newest = w.disk[len(w.disk)-1]
	}
}

func decoded(raw string) *decision {
	if raw == "" {
		return nil
	}
	d := new(decision)
	if err := json.Unmarshal([]byte(raw), d); err != nil {
		panic(err)
	}
	return d
}

// The effects of an agent.

func (a *modelAgent) dial(addr string) {
	self := a.coord.self
	a.later = append(a.later, func() {
		for name, b := range a.agents {
			if addrOf(name) == addr && !b.dead && !a.dead && !a.cut[pair(self.Name, name)] && !b.coord.over {
				if mine, theirs := helloOf(a.coord), helloOf(b.coord); !a.linked[pair(self.Name, name)] {
					a.linked[pair(self.Name, name)] = true
					a.coord.up(theirs, addr)
					b.coord.up(mine, "")
				}
				a.coord.dialed(addr, nil)
				return
			}
		}
		a.coord.dialed(addr, fmt.Errorf("refused"))
	})
}

func (a *modelAgent) hangUp(name string) {
	a.later = append(a.later, func() { // after the messages
		if q := a.agents[name].queues[a.coord.self.Name]; len(q) == 0 {
			a.unlink(a.coord.self.Name, name)
		}
	})
}

func (a *modelAgent) send(m *message, names ...string) {
	raw, err := json.Marshal(m)
	if err != nil {
		a.fault = err.Error()
	}
	for _, name := range names {
		copied, err := decodeMessage(raw)
		if err != nil {
			a.fault = err.Error()
		}
		if a.linked[pair(name, a.coord.self.Name)] {
			b := a.agents[name]
			b.queues[a.coord.self.Name] = append(b.queues[a.coord.self.Name], copied)
		}
	}
}

func (a *modelAgent) prepare(w Assignment) {
	a.later = append(a.later, func() { a.coord.leader.prepared(w.Generation, []byte(a.coord.self.Name), nil, nil) })
}

func (a *modelAgent) claim(_ []byte, d *decision) { a.claims = append(a.claims, &modelClaim{d: d}) }

func (a *modelAgent) begin(d *decision) { a.check(a.coord.self.Name+" begins and", d) }

// news that the start cannot continue end the workers.
func (a *modelAgent) news(n launch.News) {
	if n.Failed == nil && n.Lost == "" {
		return
	}
	a.later = append(a.later, func() { a.coord.onLocalEnd(victimOf(a.coord, int64(a.coord.index))) })
}

func (a *modelAgent) verdict(v launch.Verdict) {
	if v.Again {
		a.later = append(a.later, a.coord.next)
	}
}

func (a *modelAgent) over(error) {}
func (a *modelAgent) gone()      {}

// key identifies a state. In place of times it has the agents' numbers of ticks.
func (w *model) key() string {
	var b strings.Builder
	fmt.Fprint(&b, w.linked, w.cut, len(w.disk), w.losses, w.deaths, w.disk)
	for _, name := range modelNames {
		a := w.agents[name]
		c := a.coord
		fmt.Fprintln(&b, "\n", name, a.dead, a.ticks, c.role, c.follow, c.term, c.index, c.over, c.tally, c.seekingSince,
			c.caller.start, c.caller.running, c.caller.waiting, c.caller.ending, c.asked.IsZero())
		for _, p := range c.peers.sorted() {
			fmt.Fprintln(&b, p.Name, p.status, p.joined, p.held != nil, p.via)
		}
		fmt.Fprintln(&b, slices.Sorted(maps.Keys(c.search.suspects)))
		for _, from := range modelNames {
			raw, _ := json.Marshal(a.queues[from])
			fmt.Fprintln(&b, from, string(raw))
		}
		for _, q := range a.claims {
			raw, _ := json.Marshal(q.d)
			fmt.Fprintln(&b, string(raw), q.executed, q.newest)
		}
		if l := c.leader; l != nil {
			fmt.Fprintln(&b, l.term, l.claim != nil, l.regroup != nil)
			if r := l.record; r != nil {
				for _, m := range r.world.Members {
					p := r.members[m.Name]
					fmt.Fprintln(&b, m.Name, p.ended != nil, p.lost, p.failed, p.absent)
				}
			}
		}
	}
	return b.String()
}
