//go:build cluster && linux

package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

var (
	clusterFaults = flag.Int("cluster.faults", len(clusterKinds),
		"faults that TestCluster puts into a run, kind by kind")
	clusterOnly = flag.String("cluster.kind", "", "the one kind, by a part of its name")
	clusterSeed = flag.Uint64("cluster.seed", 1, "of their moments and nodes")
)

const clusterNodes = 4

// nodes runs a job on hosts in a private network.
type nodes struct {
	*testing.T
	net    *lanSwitch
	hosts  []*lanHost
	agents []*started // by node; dead ones are restarted, as by a batch system
	args   []string
	dir    string
	work   string
}

// newNodes creates the hosts.
func newNodes(t *testing.T, args ...string) *nodes {
	work := t.TempDir()
	n := &nodes{
		T: t, net: newLAN(netip.MustParsePrefix("10.77.0.0/24")), agents: make([]*started, clusterNodes), work: work,
		dir: filepath.Join(work, "run"),
	}
	t.Cleanup(func() {
		for _, a := range n.agents {
			if a != nil {
				a.Process.Kill()
			}
		}
		n.net.Close()
	})
	for i := range clusterNodes {
		h, err := n.net.Host(fmt.Sprintf("node%02d", i))
		if err != nil {
			t.Fatal(err)
		}
		n.hosts = append(n.hosts, h)
	}
	n.args = append([]string{
		"--nproc", "1", "--nnodes", strconv.Itoa(clusterNodes), "--rendezvous", n.hosts[0].Addr.String() + ":29400",
		"--run-dir", n.dir, "--max-restarts", "1000",
	}, args...)
	return n
}

// boot starts the agent of a node.
func (n *nodes) boot(node int) {
	n.Helper()
	s := &started{Cmd: process(n.T, append([]string{"--node-rank", strconv.Itoa(node)}, n.args...)...), t: n.T,
		dir: n.dir}
	s.Stderr = &s.stderr
	s.Env = append(s.Env, fmt.Sprintf("%s=0 while 0 0 %s", diskEnv, n.diskFull(node)))
	if old := n.agents[node]; old != nil {
		fmt.Fprintf(&s.stderr, "%s--- started again\n", old.said())
	}
	if err := n.hosts[node].Start(s.Cmd); err != nil {
		n.Fatal(err)
	}
	n.agents[node] = s
}

// diskFull returns the path of a file that fills the disk of a node while it exists.
func (n *nodes) diskFull(node int) string { return filepath.Join(n.work, fmt.Sprintf("full-%d", node)) }

// worker returns the pid of a node's worker, or 0.
func (n *nodes) worker(node int) int {
	if pids := n.agents[node].workers(); len(pids) > 0 {
		return pids[0]
	}
	return 0
}

// step returns the last step in the metrics.
func (n *nodes) step() int {
	text, _ := os.ReadFile(filepath.Join(n.dir, "metrics.jsonl"))
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	var m struct{ Step int }
	if json.Unmarshal([]byte(lines[len(lines)-1]), &m) != nil {
		return 0
	}
	return m.Step
}

// until waits for a condition.
func (n *nodes) until(what string, limit time.Duration, ok func() bool) time.Duration {
	n.Helper()
	began := time.Now()
	for !ok() {
		if time.Since(began) > limit {
			n.Fatalf("no %s after %v\n%s", what, limit, n.said())
		}
		time.Sleep(5 * time.Millisecond)
	}
	return time.Since(began)
}

// said returns the last output of all agents.
func (n *nodes) said() string {
	var b strings.Builder
	for i, a := range n.agents {
		lines := strings.Split(a.said(), "\n")
		fmt.Fprintf(&b, "=== node %d\n%s\n", i, strings.Join(lines[max(0, len(lines)-30):], "\n"))
	}
	return b.String()
}

// A clusterKind is a kind of fault of a node.
type clusterKind struct {
	name   string
	strike func(n *nodes, node int)
	heal   func(n *nodes, node int)
	limit  time.Duration // for all workers of the other nodes to end; 0: they may continue
	lasts  time.Duration // duration of a fault that the others may survive
}

const (
	died   = 5 * time.Second
	silent = 10 * time.Second
)

var whole = lanPath{}

var clusterKinds = []clusterKind{
	{name: "a worker is killed", limit: died, strike: func(n *nodes, i int) {
		syscall.Kill(n.worker(i), syscall.SIGKILL)
	}},
	{name: "a worker stands still", limit: silent, strike: func(n *nodes, i int) {
		syscall.Kill(n.worker(i), syscall.SIGSTOP)
	}},
	{name: "an agent is killed", limit: died, strike: func(n *nodes, i int) { n.agents[i].Process.Kill() },
		heal: (*nodes).again},
	{name: "an agent stands still", limit: silent, strike: func(n *nodes, i int) {
		n.agents[i].Process.Signal(syscall.SIGSTOP)
	}, heal: func(n *nodes, i int) {
		n.agents[i].Process.Signal(syscall.SIGCONT)
	}},
	{name: "a node has no network", limit: silent, strike: around(lanPath{Cut: true}), heal: around(whole)},
	{name: "a node hears nothing", limit: silent, strike: oneWay(true), heal: around(whole)},
	{name: "a node is not heard", limit: silent, strike: oneWay(false), heal: around(whole)},
	{name: "30 % of packets are lost", lasts: 6 * time.Second, strike: around(lanPath{Loss: 0.3}),
		heal: around(whole)},
	{name: "packets are 200 ms late", lasts: 6 * time.Second, strike: around(lanPath{Delay: 200 * time.Millisecond}),
		heal: around(whole)},
	{name: "a node's disk is full", limit: 0, strike: func(n *nodes, i int) {
		if err := os.WriteFile(n.diskFull(i), nil, 0o600); err != nil {
			n.Error(err)
		}
	}, heal: func(n *nodes, i int) { os.Remove(n.diskFull(i)) }, lasts: 4 * time.Second},
}

func around(p lanPath) func(*nodes, int) {
	return func(n *nodes, i int) { n.net.Around(n.hosts[i], p) }
}

func oneWay(deaf bool) func(*nodes, int) {
	return func(n *nodes, i int) {
		for _, h := range n.hosts {
			if deaf {
				n.net.Set(h, n.hosts[i], lanPath{Cut: true})
			} else {
				n.net.Set(n.hosts[i], h, lanPath{Cut: true})
			}
		}
	}
}

// again restarts the agent of a node.
func (n *nodes) again(node int) {
	n.agents[node].Wait()
	n.boot(node)
}

// A run on four hosts with repeated faults: the other nodes notice each fault within its limit, the run resumes from
// its last checkpoint, and its losses equal those of an undisturbed run on one host, bit for bit.
func TestCluster(t *testing.T) {
	config := small(t, endless)
	flags := []string{"--set", "checkpoint.every=3", "--set", "parallel.deadline=6s", config}
	n := newNodes(t, flags...)
	rng := rand.New(rand.NewPCG(*clusterSeed, 0))
	for i := range n.hosts {
		n.boot(i)
	}
	began := n.until("first step", watchdog, func() bool { return n.step() > 0 })
	t.Logf("first step after %v", began.Round(time.Millisecond))
	kinds := slices.DeleteFunc(slices.Clone(clusterKinds), func(k clusterKind) bool {
		return !strings.Contains(k.name, *clusterOnly)
	})
	noticed, back := map[string][]time.Duration{}, map[string][]time.Duration{}
	top := 0
	for f := range *clusterFaults {
		kind, node := &kinds[f%len(kinds)], rng.IntN(clusterNodes)
		// A start without a further step than the start before would end the job.
		most := n.step() + 1 + rng.IntN(3)
		n.until("progress", watchdog, func() bool { return n.step() > max(top, most) })
		top = n.step()
		time.Sleep(time.Duration(rng.IntN(200)) * time.Millisecond)
		seen, recovered := n.strike(kind, node)
		if seen > 0 {
			noticed[kind.name] = append(noticed[kind.name], seen)
			back[kind.name] = append(back[kind.name], recovered)
		}
		t.Logf("%2d %-26s node %d: noticed after %v, next step %v later", f, kind.name, node,
			seen.Round(time.Millisecond), recovered.Round(time.Millisecond))
	}
	var workers []int
	for i := range n.agents {
		workers = append(workers, n.worker(i))
	}
	n.agents[rng.IntN(clusterNodes)].Process.Signal(syscall.SIGTERM)
	for _, a := range n.agents {
		a.ends(75)
	}
	gone(t, workers)
	for _, k := range clusterKinds {
		if len(noticed[k.name]) > 0 {
			t.Logf("%-26s %2d times: noticed after %s; next step after %s more", k.name, len(noticed[k.name]),
				spread(noticed[k.name]), spread(back[k.name]))
		}
	}
	got := metricsOf(t, n.dir)
	one, _ := trains(t, "--nproc", strconv.Itoa(clusterNodes), "--set", fmt.Sprintf("train.steps=%d", len(got)), config)
	alike(t, "the losses are not those of one host that nothing has struck", n.dir, one)
	t.Logf("%d steps", len(got))
}

// strike injects a fault into a node, and waits until the job continues. seen is the time until the others ended; 0 if
// they did not.
func (n *nodes) strike(k *clusterKind, node int) (seen, recovered time.Duration) {
	n.Helper()
	before := map[int]int{}
	for i := range n.agents {
		before[i] = n.worker(i)
	}
	others := func() bool {
		for i, pid := range before {
			if i != node && running(pid) {
				return false
			}
		}
		return true
	}
	began := time.Now()
	k.strike(n, node)
	if k.limit > 0 {
		n.until("end of the other nodes' workers", 2*k.limit, others)
	} else {
		for !others() && time.Since(began) < k.lasts {
			time.Sleep(5 * time.Millisecond)
		}
	}
	if others() {
		seen = time.Since(began)
	}
	if k.limit > 0 && seen > k.limit {
		n.Errorf("%s, node %d: noticed after %v, want at most %v\n%s", k.name, node, seen, k.limit, n.said())
	}
	if k.heal != nil {
		k.heal(n, node)
	}
	step := n.step()
	recovered = n.until("step after "+k.name, watchdog, func() bool { return n.step() > step })
	if pid := before[node]; others() && running(pid) && slices.Contains(children(n.T, n.agents[node].Process.Pid),
		pid) {
		n.Errorf("%s: the worker of node %d outlives the start", k.name, node)
	}
	return seen, recovered
}

// spread formats the median and the maximum of a distribution.
func spread(ds []time.Duration) string {
	slices.Sort(ds)
	return fmt.Sprintf("%v, at most %v", ds[len(ds)/2].Round(time.Millisecond), ds[len(ds)-1].Round(time.Millisecond))
}
