package cluster

import (
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// simConfig returns the config of a job with least to most nodes.
func simConfig(least, most int) Config {
	c := Config{
		Job: "sim", Key: []byte("0123456789abcdef"), NodeRank: -1, Min: least, Max: most, NProc: 2,
		Host: "h", Listen: "10.0.0.1",
		MaxRestarts: 20, Seeds: []string{"10.0.0.1:4000"}, Log: func(string, ...any) {},
	}
	if err := c.resolve(); err != nil {
		panic(err)
	}
	return c
}

// everyone reports whether all agents have ended.
func (s *sim) everyone() bool {
	for _, a := range s.agents {
		if a.status < 0 && !a.dead {
			return false
		}
	}
	return true
}

// newSimJob starts n agents of a job of least to n nodes. Agent 0 is at the rendezvous.
func newSimJob(seed uint64, least, n int, ranked bool) *sim {
	s := newSim(seed)
	for i := range n {
		s.add(simConfig(least, n), func(c *Config) {
			c.Port = max(0, 1-i)
			if ranked {
				c.NodeRank = i
			}
		})
	}
	s.silence()
	return s
}

// endsWell runs a job and checks that all agents end with status 0, except one.
func (s *sim) endsWell(t *testing.T, except *simAgent) {
	t.Helper()
	s.until(10*time.Minute, s.everyone)
	for _, a := range s.agents {
		if a != except && a.status != 0 || len(s.faults) > 0 {
			t.Fatalf("of %d agents %s ended with %d: %s\n%v", len(s.agents), a.coord.self.Name, a.status, a.why, s.faults)
		}
	}
}

func TestSimulatedJobWithoutFaults(t *testing.T) {
	t.Parallel()
	for n := 1; n <= 40; n += 3 {
		newSimJob(uint64(n), n, n, false).endsWell(t, nil)
	}
}

// chaos runs one job with faults at random times, and checks the invariants.
func chaos(seed uint64, trace func(string, ...any)) error {
	s := newSim(seed)
	if trace != nil {
		s.trace = trace
	}
	r := s.rand
	most := 1 + r.IntN(8)
	least := 1 + r.IntN(most)
	cfg := simConfig(least, most)
	cfg.MaxRestarts = []int{0, 1, 20, 20}[r.IntN(4)]
	ranked := r.IntN(2) == 0
	n := most
	if !ranked {
		n += r.IntN(3) // spares
	}
	for i := range n {
		s.after(s.between(0, 3*time.Second), func() {
			s.add(cfg, func(c *Config) {
				if i == 0 {
					c.Port = 1
				}
				if ranked {
					c.NodeRank = i
				}
			})
		})
	}
	s.silence()
	if r.IntN(3) == 0 {
		s.diskFaults = 2 + r.IntN(10)
	}
	faults := r.IntN(6)
	for range faults {
		s.after(s.between(0, 3*time.Minute), s.injectFault)
	}
	if r.IntN(3) == 0 && faults > 0 {
		n := r.IntN(6)
		s.duringDecision = func() {
			if n--; n >= 0 {
				s.injectFault()
			}
		}
	}
	s.after(4*time.Minute, func() { // no faults from now on
		s.cut, s.duringDecision, s.diskFaults = nil, nil, 0
		for _, a := range s.agents {
			a.resume()
		}
	})
	s.until(4*time.Minute+time.Second, func() bool { return false })
	s.until(45*time.Minute, s.everyone)
	if len(s.faults) > 0 {
		return s.faults[0]
	}
	for _, a := range s.agents {
		switch {
		case a.status < 0 && !a.dead:
			return fmt.Errorf("%s has not ended: %q", a.coord.self.Name, s.states())
		case faults == 0 && a.status != 0:
			return fmt.Errorf("%s has ended with %d, without a fault: %s", a.coord.self.Name, a.status, a.why)
		}
	}
	return nil
}

// injectFault injects one random fault.
func (s *sim) injectFault() {
	var live []*simAgent
	for _, a := range s.agents {
		if !a.dead && a.status < 0 {
			live = append(live, a)
		}
	}
	if len(live) == 0 {
		return
	}
	a := live[s.rand.IntN(len(live))]
	switch s.rand.IntN(6) {
	case 0:
		a.kill()
	case 1: // and is restarted
		a.kill()
		s.after(s.between(100*time.Millisecond, 20*time.Second), func() {
			// Not at the rendezvous: an agent there that cannot reach the job would start another one.
			s.add(a.cfg, func(c *Config) { c.Port = 0 })
		})
	case 2:
		a.paused = true
		s.trace("%v %s is paused", s.now.Unix(), a.coord.self.Name)
		s.after(s.between(time.Second, 30*time.Second), a.resume)
	case 3: // a worker fails
		a.workerFails()
	case 4: // two partitions
		side := map[*simAgent]bool{}
		for _, b := range s.agents {
			side[b] = s.rand.IntN(2) == 0
		}
		s.divide(func(x, y *simAgent) bool { return side[x] != side[y] })
	case 5: // some links, some in one direction
		cut := map[[2]*simAgent]bool{}
		for _, b := range s.agents {
			for _, c := range s.agents {
				cut[[2]*simAgent{b, c}] = s.rand.IntN(4) == 0
			}
		}
		s.divide(func(x, y *simAgent) bool { return cut[[2]*simAgent{x, y}] })
	}
}

func (s *sim) divide(cut func(x, y *simAgent) bool) {
	s.trace("%v the network is cut", s.now.Unix())
	s.cut = cut
	s.after(s.between(time.Second, 90*time.Second), func() {
		s.trace("%v it is whole again", s.now.Unix())
		s.cut = nil
	})
}

func (a *simAgent) workerFails() {
	a.do(func() {
		if rank := a.coord.world().firstRank(a.coord.self.Name); a.coord.caller.running {
			n := launch.News{Failed: &rank}
			a.coord.publish(n)
			a.news(n)
		}
	})
}

func (a *simAgent) resume() {
	if !a.paused || a.dead {
		return
	}
	a.trace("%v %s goes on", a.now.Unix(), a.coord.self.Name)
	a.paused = false
	missed := a.missed
	a.missed = nil
	for _, f := range missed {
		a.do(f)
	}
}

// few returns a quarter of n under -short.
func few(n uint64) uint64 {
	if testing.Short() {
		return n / 4
	}
	return n
}

// TestRandomFaults runs one job for each seed. make simulate-cluster runs more of them.
func TestRandomFaults(t *testing.T) {
	t.Parallel()
	for seed := *firstSeed; seed < *firstSeed+*seeds; seed++ {
		if err := chaos(seed, nil); err != nil {
			t.Errorf("seed %d: %v", seed, err)
			if testing.Verbose() {
				_ = chaos(seed, t.Logf)
			}
			return
		}
	}
}

var (
	seeds     = flag.Uint64("seeds", 2000, "jobs of TestRandomFaults")
	firstSeed = flag.Uint64("first-seed", 0, "that of the first of them")
)

// cutOff closes all links of an agent until d has passed.
func (s *sim) cutOff(a *simAgent, d time.Duration) {
	s.cut = func(x, y *simAgent) bool { return (x == a) != (y == a) }
	s.after(d, func() { s.cut = nil })
}

// TestOneFaultIsSurvived checks that no single fault of a node prevents the end of a job with at least three nodes that
// may lose one.
func TestOneFaultIsSurvived(t *testing.T) {
	t.Parallel()
	for seed := range few(150) {
		n := 3 + int(seed/4%5)
		s := newSimJob(seed, n-1, n, false)
		s.until(4*time.Second, func() bool { return false })
		a := s.agents[s.rand.IntN(n)]
		switch seed % 4 {
		case 0:
			a.kill()
		case 1:
			a.paused = true
			s.after(30*time.Second, a.resume)
		case 2:
			a.workerFails()
		case 3:
			s.cutOff(a, 30*time.Second)
		}
		s.endsWell(t, a) // a may miss the end
	}
}

// TestNodeThatFailsIsLeftOut checks that a node whose workers repeatedly fail first is left out, and the job ends with
// 0.
func TestNodeThatFailsIsLeftOut(t *testing.T) {
	s := newSimJob(1, 2, 3, true)
	bad := s.agents[1]
	var fails func()
	fails = func() {
		if bad.status < 0 {
			bad.workerFails()
			s.after(4*time.Second, fails)
		}
	}
	s.after(2*time.Second, fails)
	s.endsWell(t, nil)
	for _, a := range s.agents {
		if last := a.coord.world(); len(last.Members) != 2 || last.index(bad.coord.self.Name) >= 0 {
			t.Errorf("%s ended in a world of %d", a.coord.self.Name, len(last.Members))
		}
	}
}

// TestCutIsHealed checks that a job that needs all agents waits for one that is unreachable for some seconds, the
// leader or another, and continues.
func TestCutIsHealed(t *testing.T) {
	t.Parallel()
	for seed := range few(200) {
		n := 3 + int(seed%5)
		s := newSimJob(seed, n, n, true)
		s.until(4*time.Second, func() bool { return false })
		a := s.agents[s.rand.IntN(2)*s.rand.IntN(n)]
		s.cutOff(a, s.between(2*time.Second, 40*time.Second))
		s.endsWell(t, nil)
	}
}
