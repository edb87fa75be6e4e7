package gossip_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/cluster"
	"github.com/cprun/cprun/internal/launch/cluster/gossip"
)

var crowdAgents = flag.Int("cluster.agents", 20, "agents that TestJobs has")

// A crowd is the agents of one job, each on a simulated host with real handshakes, connections and gossip. Only the
// workers are missing. It is the run directory.
type crowd struct {
	t      *testing.T
	net    *gossip.Network
	agents []*agent
	dead   []atomic.Bool // crashed hosts
	finish chan struct{} // closed when the workers are done
	wait   sync.WaitGroup

	mu     sync.Mutex // guards the run directory
	index  int        // of the newest decision
	newest []byte
}

// An agent of a crowd, with its observations.
type agent struct {
	*crowd
	host       gossip.Host
	membership *cluster.Membership
	ctx        context.Context // of run
	stop       context.CancelFunc

	started atomic.Int32 // starts with connected workers
	warned  atomic.Int64 // when it last learned that a start cannot continue, in nanoseconds
	ended   atomic.Pointer[launch.Verdict]
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

// start starts agent i.
func (c *crowd) start(i int) {
	a := &agent{crowd: c, host: c.net.Host(i)}
	a.ctx, a.stop = context.WithCancel(context.Background())
	cfg := cluster.Config{
		Job: "simulation", Key: make([]byte, 32), Program: "v1", Inputs: "digest", NodeRank: i,
		Min: (*crowdAgents*3 + 3) / 4, Max: *crowdAgents, NProc: 8, Host: fmt.Sprint("node", i), HostID: fmt.Sprint(i),
		Listen: a.host.Addr().String(), Seeds: []string{"10.0.0.0:4000"}, MaxRestarts: 5, RunDir: c, Network: a.host,
		Log: func(string, ...any) {},
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
	v := launch.Verdict{Again: true}
	for v.Again {
		s, err := a.membership.Next(a.ctx)
		if err != nil {
			v = launch.Verdict{Result: launch.Result{ExitCode: launch.ExitFailed, Err: err}}
			break
		}
		v = a.membership.End(a.ctx, a.work(s))
	}
	v.Err = errors.Join(v.Err, a.membership.Close(v.ExitCode, ""))
	a.ended.Store(&v)
}

// work simulates the workers of a start: they listen, get all addresses, and compute until they are done or one is
// lost.
func (a *agent) work(s launch.Start) launch.Ending {
	a.membership.Publish(launch.News{Addrs: slices.Repeat([]string{a.host.Addr().String() + ":5000"}, 8)})
	for {
		select {
		case n := <-a.membership.News():
			switch {
			case n.Addrs != nil:
				a.started.Store(int32(s.Number + 1))
			case n.Failed != nil || n.Lost != "":
				a.warned.Store(time.Now().UnixNano())
				time.Sleep(100 * time.Millisecond) // for the end of the workers
				f := launch.Failure{Rank: s.Ranks.FirstRank, Remote: true, Cause: "lost a rank"}
				return launch.Ending{Step: 1 + int64(s.Number), Failures: []launch.Failure{f}}
			}
		case <-a.finish:
			return launch.Ending{Step: 100}
		case <-a.ctx.Done():
			return launch.Ending{Err: a.ctx.Err()}
		}
	}
}

// until waits until is holds for each agent with a live host, and prints a row of docs/benchmarks/202611_cluster.md.
func (c *crowd) until(begin time.Time, what string, is func(*agent) bool) {
	c.t.Helper()
	for limit := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		late := slices.IndexFunc(c.agents, func(a *agent) bool { return !c.dead[a.host.Number].Load() && !is(a) })
		if late < 0 {
			c.t.Logf("| %s | %.1f s |", what, time.Since(begin).Seconds())
			return
		}
		if v := c.agents[late].ended.Load(); v != nil || time.Now().After(limit) {
			c.t.Fatalf("%s: not so on node %d, which has ended with %+v", what, late, v)
		}
	}
}

// TestJobs runs a job on a network that loses packets: the agents meet, lose every tenth host including the
// leader's, continue, and end.
func TestJobs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &crowd{t: t, net: gossip.NewNetwork(0.05), dead: make([]atomic.Bool, *crowdAgents), finish: make(chan struct{})}
		c.net.SetLinks(func(from, to int) bool { return !c.dead[from].Load() && !c.dead[to].Load() })
		defer func() {
			c.net.SetLinks(nil)
			for _, a := range c.agents {
				a.stop()
			}
			c.wait.Wait()
			time.Sleep(5 * time.Second) // pending waits time out
		}()
		begin := time.Now()
		for i := range *crowdAgents {
			c.start(i)
			time.Sleep(time.Second / time.Duration(*crowdAgents))
		}
		c.until(begin, "agents start within 1 s; until all workers know all", func(a *agent) bool {
			return a.started.Load() > 0
		})
		c.lose("1 in 10 hosts crashes", 5, 2)
		c.lose("1 in 10 crashes, the leader among them", 0, 3)
		time.Sleep(10 * time.Second)
		begin = time.Now()
		close(c.finish)
		c.until(begin, "the workers are done; until all agents have the verdict", func(a *agent) bool {
			v := a.ended.Load()
			return v != nil && v.ExitCode == launch.ExitDone && v.Err == nil
		})
	})
}

// lose crashes every tenth host, starting with first, and waits until the workers of the others have started again.
func (c *crowd) lose(what string, first int, starts int32) {
	time.Sleep(10 * time.Second)
	begin := time.Now()
	for i := first; i < len(c.agents); i += 10 {
		c.dead[i].Store(true) // silent, as after a power failure
		c.agents[i].stop()
	}
	c.until(begin, what+"; until all others know", func(a *agent) bool { return a.warned.Load() > begin.UnixNano() })
	c.until(time.Now(), "from then, until the workers of the next start know all", func(a *agent) bool {
		return a.started.Load() == starts
	})
}
