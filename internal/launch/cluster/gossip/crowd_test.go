package gossip_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/cluster"
	"github.com/cprun/cprun/internal/launch/cluster/gossip"
)

var crowdAgents = flag.Int("cluster.agents", 20, "agents that TestJobs has")

var crowdKey = []byte("a key of thirty-two bytes, or so")

// A crowd is the agents of one job, each on a simulated host with real handshakes, connections and gossip. Only the
// workers are missing.
type crowd struct {
	t      *testing.T
	net    *gossip.Network
	mu     sync.Mutex // guards the run directory
	index  int        // of the newest decision there
	newest []byte
	loss   float64
	agents []*agent
	finish chan struct{} // closed when the workers are done
	wait   sync.WaitGroup
}

// An agent of a crowd, with its observations.
type agent struct {
	*crowd
	host       *gossip.Host
	membership *cluster.Membership
	ctx        context.Context // of run
	stop       context.CancelFunc
	dead       bool // its host crashed

	mu      sync.Mutex
	restart int       // guarded by mu; of the last start with connected workers
	met     bool      // guarded by mu; there was one
	warned  time.Time // guarded by mu; when it first learned that a start cannot continue
	verdict *launch.Verdict
	err     error // guarded by mu
}

// end ends all agents.
func (c *crowd) end() {
	for _, a := range c.agents {
		a.stop()
	}
	c.wait.Wait()
	time.Sleep(5 * time.Second) // pending waits time out
}

func newCrowd(t *testing.T, loss float64) *crowd {
	return &crowd{
		t: t, loss: loss, finish: make(chan struct{}),
		net: gossip.NewNetwork(
			1,
			gossip.Conditions{Loss: loss, Delay: 100 * time.Microsecond, Jitter: 400 * time.Microsecond},
		),
	}
}

// Prepare and Claim implement cluster.RunDir.
func (c *crowd) Prepare(context.Context, cluster.Assignment) ([]byte, error) {
	return make([]byte, 8<<10), nil
}

func (c *crowd) Claim(_ context.Context, _ []byte, index int, decision []byte) ([]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if decision != nil && index > c.index {
		c.index, c.newest = index, decision
	}
	return c.newest, nil
}

// start starts agent i of n.
func (c *crowd) start(i, n int) {
	h := c.net.Host(i)
	a := &agent{crowd: c, host: h}
	a.ctx, a.stop = context.WithCancel(context.Background())
	cfg := cluster.Config{
		Job: "simulation", Key: crowdKey, Program: "v1", Inputs: "digest", NodeRank: i,
		Min: (n*3 + 3) / 4, Max: n, NProc: 8,
		Host: fmt.Sprintf("node%04d", i), HostID: fmt.Sprintf("node%04d", i), Listen: h.Addr().String(),
		Seeds: []string{"10.0.0.0:4000"}, MaxRestarts: 5, RunDir: c, Network: h, Log: func(string, ...any) {},
	}
	if i == 0 {
		cfg.Port, cfg.Meets = 4000, true
	}
	var err error
	if a.membership, err = cluster.Join(context.Background(), cfg); err != nil {
		c.t.Fatal(err)
	}
	c.agents = append(c.agents, a)
	c.wait.Go(a.run)
}

// run performs the agent's loop, as in launch.Run.
func (a *agent) run() {
	status := launch.ExitFailed
	for {
		s, err := a.membership.Next(a.ctx)
		if err != nil {
			a.note(func() { a.err = err })
			break
		}
		v := a.membership.End(a.ctx, a.work(s))
		if !v.Again {
			status = v.ExitCode
			a.note(func() { a.verdict = &v })
			break
		}
	}
	if err := a.membership.Close(status, ""); err != nil && !a.dead {
		a.note(func() { a.err = errors.Join(a.err, err) })
	}
}

// work simulates the workers of a start: they listen, get all addresses, and compute until they are done or one is
// lost.
func (a *agent) work(s launch.Start) launch.Ending {
	addrs := make([]string, 8)
	for i := range addrs {
		addrs[i] = fmt.Sprintf("%s:%d", a.host.Addr(), 5000+i)
	}
	a.membership.Publish(launch.News{Addrs: addrs})
	for {
		select {
		case n := <-a.membership.News():
			switch {
			case n.Addrs != nil:
				a.note(func() { a.restart, a.met = s.Number, true })
			case n.Failed != nil || n.Lost != "":
				a.note(func() { a.warned = time.Now() })
				time.Sleep(100 * time.Millisecond) // for the end of the workers
				return launch.Ending{
					Step:     1 + int64(s.Number),
					Failures: []launch.Failure{{Rank: s.Ranks.FirstRank, Remote: true, Cause: "lost a rank"}},
				}
			}
		case <-a.finish:
			return launch.Ending{Step: 100}
		case <-a.ctx.Done():
			return launch.Ending{Err: a.ctx.Err()}
		}
	}
}

func (a *agent) note(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
}

// until waits until is holds for each agent with a live host.
func (c *crowd) until(what string, bound time.Duration, is func(*agent) bool) {
	c.t.Helper()
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		late := slices.IndexFunc(c.agents, func(a *agent) bool {
			a.mu.Lock()
			defer a.mu.Unlock()
			if a.err != nil && !a.dead {
				c.t.Errorf("node %d: %v", a.host.Number, a.err)
			}
			return !a.dead && !is(a)
		})
		switch {
		case late < 0:
			return
		case c.t.Failed() || time.Since(begin) > bound:
			c.t.Fatalf("%s: not so on node %d after %v", what, late, time.Since(begin))
		}
	}
}

// crash silences the agent's host, and ends its programs.
func (a *agent) crash() {
	a.host.Crash()
	a.dead = true
	a.stop()
}

// sent returns each host's traffic so far.
func (c *crowd) sent() (list []gossip.Traffic) {
	for _, a := range c.agents {
		list = append(list, a.host.Sent())
	}
	return list
}

// row measures a part of the simulation, and prints a row of docs/benchmarks/202611_cluster.md: packets and KiB per
// host, and MiB of the host that sent most.
func (c *crowd) row(what string, part func()) {
	begin, before := time.Now(), c.sent()
	part()
	took, n := time.Since(begin), 0
	var packets, bytes, most int64
	for i, s := range c.sent() {
		if c.agents[i].dead {
			continue
		}
		b := s.PacketBytes + s.StreamBytes
		packets += s.Packets
		if i < len(before) {
			b -= before[i].PacketBytes + before[i].StreamBytes
			packets -= before[i].Packets
		}
		bytes, most, n = bytes+b, max(most, b), n+1
	}
	c.t.Logf("| %s | %d | %.0f %% | %.1f s | %d | %d | %.1f |", what, len(c.agents), 100*c.loss, took.Seconds(),
		packets/int64(n), bytes/int64(n)>>10, float64(most)/(1<<20))
}

// TestJobs runs a job on a network that loses packets: the agents meet, lose every tenth host including the
// leader's, continue, and end.
func TestJobs(t *testing.T) {
	losses := []float64{0.05, 0}
	if testing.Short() {
		losses = losses[:1]
	}
	for _, loss := range losses {
		t.Run(fmt.Sprintf("loss=%v", loss), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { simulate(t, *crowdAgents, loss) })
		})
	}
}

func simulate(t *testing.T, n int, loss float64) {
	c := newCrowd(t, loss)
	defer c.end()
	c.row("agents start within 1 s; until all workers know all", func() {
		for i := range n {
			c.start(i, n)
			time.Sleep(time.Second / time.Duration(n))
		}
		c.until("the first start", time.Minute, func(a *agent) bool { return a.met })
	})
	c.row("10 s of work", func() { time.Sleep(10 * time.Second) })
	c.lose("1 in 10 hosts crashes", 5, 1)
	time.Sleep(10 * time.Second)
	c.lose("1 in 10 crashes, the leader among them", 0, 2)
	time.Sleep(10 * time.Second)
	c.row("the workers are done; until all agents have the verdict", func() {
		close(c.finish)
		c.until("the verdict", time.Minute, func(a *agent) bool { return a.verdict != nil })
	})
	for _, a := range c.agents {
		if !a.dead && a.verdict.ExitCode != launch.ExitDone {
			t.Errorf("node %d: verdict %+v", a.host.Number, *a.verdict)
		}
	}
}

// lose crashes every tenth host, starting with first, and waits until the workers of the others have restarted.
func (c *crowd) lose(what string, first, restart int) {
	begin := time.Now()
	for i := first; i < len(c.agents); i += 10 {
		c.agents[i].crash()
	}
	c.row(what+"; until all others know", func() {
		c.until("word of the loss", time.Minute, func(a *agent) bool { return a.warned.After(begin) })
	})
	c.row("from then, until the workers of the next start know all", func() {
		c.until("another start", 3*time.Minute, func(a *agent) bool { return a.restart == restart })
	})
}
