package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/internal/launch"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testConfig returns the config of a job of n agents, each with 2 workers.
func testConfig(t *testing.T, n int) Config {
	return Config{
		Job: "test", Key: []byte("0123456789abcdef"), Program: "v1", Inputs: "digest", NodeRank: -1,
		Min: n, Max: n, NProc: 2,
		Listen: "127.0.0.1", MaxRestarts: 3, RegroupTimeout: 10 * time.Second,
		Log: t.Logf,
	}
}

// freePort returns an unused port.
func freePort(t *testing.T) int {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).Port
}

// A host is an agent under test.
type host struct {
	*Membership
	id string
}

// last returns the agent's last decision; nil after it has left.
func (h *host) last() *decision {
	got := make(chan *decision, 1)
	h.calls.put(func() { got <- h.coord.last })
	select {
	case d := <-got:
		return d
	case <-h.ctx.Done():
		return nil
	}
}

// leads reports whether the agent proposed the last decision.
func (h *host) leads() bool {
	d := h.last()
	return d != nil && d.Leader.Name == h.self.Name
}

// joinAll starts the agents of a job, on hosts a, b and so on.
func joinAll(t *testing.T, n int, change func(i int, c *Config)) []*host {
	t.Helper()
	port := freePort(t)
	var hosts []*host
	for i := range n {
		hosts = append(hosts, joinOne(t, port, i, n, change))
	}
	return hosts
}

func joinOne(t *testing.T, port, i, n int, change func(i int, c *Config)) *host {
	t.Helper()
	cfg := testConfig(t, n)
	cfg.Host = string(rune('a' + i))
	cfg.Port, cfg.Seeds = port, []string{fmt.Sprintf("127.0.0.1:%d", port)}
	cfg.RunDir = runDirOf(port)
	cfg.Log = func(format string, args ...any) { t.Logf(cfg.Host+": "+format, args...) }
	if change != nil {
		change(i, &cfg)
	}
	cfg.HostID = cmp.Or(cfg.HostID, cfg.Host)
	c, err := Join(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(1, "") })
	return &host{c, cfg.Host}
}

// forAll runs f for each host concurrently.
func forAll(t *testing.T, hosts []*host, f func(h *host) error) {
	t.Helper()
	errs := make(chan error, len(hosts))
	for _, h := range hosts {
		go func() {
			err := f(h)
			if err != nil {
				err = fmt.Errorf("host %s: %w", h.id, err)
				h.Close(1, "") // the others do not wait for it
			}
			errs <- err
		}()
	}
	for range hosts {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if t.Failed() {
		t.FailNow()
	}
}

// hears waits for news.
func (h *host) hears(t *testing.T) launch.News {
	select {
	case n := <-h.News():
		return n
	case <-time.After(time.Minute):
		t.Errorf("host %s has heard nothing for a minute", h.id)
		return launch.News{}
	}
}

// starts waits for a start, and publishes its workers' addresses.
func (h *host) starts(ctx context.Context) (launch.Start, error) {
	s, err := h.Next(ctx)
	if err != nil {
		return s, err
	}
	h.Publish(launch.News{Addrs: []string{h.id + ":1", h.id + ":2"}})
	for {
		select {
		case n := <-h.News():
			if n.Addrs == nil {
				return s, fmt.Errorf("news %+v, want addresses", n)
			}
			if len(n.Addrs) != s.Ranks.WorldSize || n.Addrs[s.Ranks.FirstRank] != h.id+":1" {
				return s, fmt.Errorf("addresses %q", n.Addrs)
			}
			return s, nil
		case <-ctx.Done():
			return s, ctx.Err()
		}
	}
}

func TestJobOfFourNodes(t *testing.T) {
	hosts := joinAll(t, 4, nil)
	ranks := make(chan int, 4)
	forAll(t, hosts, func(h *host) error {
		s, err := h.starts(t.Context())
		if err != nil {
			return err
		}
		ranks <- s.Ranks.FirstRank
		if s.Number != 0 || s.Ranks.WorldSize != 8 || string(s.Payload) != "payload 1" || len(s.Secret) != 32 ||
			s.Listen != "127.0.0.1" {
			return fmt.Errorf("start %+v", s)
		}
		v := h.End(t.Context(), launch.Ending{Step: 3})
		if v.ExitCode != launch.ExitDone || v.Again || v.Err != nil || v.ReportedElsewhere == h.leads() {
			return fmt.Errorf("verdict %+v", v)
		}
		return h.Close(v.ExitCode, "")
	})
	seen := map[int]bool{}
	for range 4 {
		seen[<-ranks] = true
	}
	for r := 0; r < 8; r += 2 {
		if !seen[r] {
			t.Errorf("no agent has rank %d", r)
		}
	}
}

// TestTakenRendezvous checks that the agent of the rendezvous takes its port once another process has left it.
func TestTakenRendezvous(t *testing.T) {
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	asked := make(chan bool, 1)
	go func() { // ends with the listener
		for conn, err := other.Accept(); err == nil; conn, err = other.Accept() {
			conn.Close()
			put(asked, true)
		}
	}()
	var hosts []*host
	for i := range 2 {
		hosts = append(hosts, joinOne(t, other.Addr().(*net.TCPAddr).Port, i, 2, func(i int, c *Config) {
			c.NodeRank, c.Meets, c.JoinTimeout = i, i == 0, time.Minute
			if i == 1 {
				c.Port = 0
			}
		}))
	}
	<-asked
	other.Close()
	forAll(t, hosts, func(h *host) error {
		if _, err := h.starts(t.Context()); err != nil {
			return err
		}
		h.End(t.Context(), launch.Ending{})
		return h.Close(0, "")
	})
}

// TestFailureAndRestart checks that a failure on one node ends the start on all, and another follows.
func TestFailureAndRestart(t *testing.T) {
	hosts := joinAll(t, 3, nil)
	forAll(t, hosts, func(h *host) error {
		s, err := h.starts(t.Context())
		if err != nil {
			return err
		}
		e := launch.Ending{Step: 5}
		if s.Ranks.FirstRank == 2 {
			rank := 3
			h.Publish(launch.News{Failed: &rank})
			e.Failures = []launch.Failure{{Rank: 3, Host: h.id, Cause: "exit status 1", Class: 1, Order: 1}}
		} else if n := h.hears(t); n.Failed == nil || *n.Failed != 3 {
			return fmt.Errorf("news %+v", n)
		} else {
			e.Failures = []launch.Failure{{Rank: s.Ranks.FirstRank, Host: h.id, Cause: "lost rank 3", Remote: true,
				Class: 2, Order: 1}}
		}
		v := h.End(t.Context(), e)
		if !v.Again || v.Restarts != 1 {
			return fmt.Errorf("verdict %+v", v)
		}
		if h.leads() && (v.First == nil || v.First.Rank != 3 || len(v.Failures) != 3) {
			return fmt.Errorf("failures %+v", v.Failures)
		}
		if s, err = h.starts(t.Context()); err != nil || s.Number != 1 {
			return fmt.Errorf("start %+v, %v", s, err)
		}
		h.End(t.Context(), launch.Ending{})
		return h.Close(0, "")
	})
}

// TestLostAgentIsReplaced checks that the others learn at once of a killed agent, and that a new one replaces it.
func TestLostAgentIsReplaced(t *testing.T) {
	port := freePort(t)
	var hosts []*host
	for i := range 3 {
		hosts = append(hosts, joinOne(t, port, i, 3, func(i int, c *Config) { c.NodeRank = i }))
	}
	forAll(t, hosts, func(h *host) error {
		if _, err := h.starts(t.Context()); err != nil {
			return err
		}
		if h.id == "c" {
			h.die()
			hosts[2] = joinOne(t, port, 2, 3, func(i int, c *Config) { c.NodeRank = 2 })
			return nil
		}
		n := h.hears(t)
		if n.Failed == nil || *n.Failed != 4 || n.Lost == "" {
			return fmt.Errorf("news %+v", n)
		}
		t.Log(n.Lost)
		if v := h.End(t.Context(), launch.Ending{Failures: []launch.Failure{{Remote: true, Class: 3}}}); !v.Again {
			return fmt.Errorf("verdict %+v", v)
		}
		return nil
	})
	forAll(t, hosts, func(h *host) error {
		s, err := h.starts(t.Context())
		if err != nil || s.Number != 1 || s.Ranks.NodeRank != int(h.id[0]-'a') {
			return fmt.Errorf("start %+v, %v", s, err)
		}
		if v := h.End(t.Context(), launch.Ending{}); v.ExitCode != 0 {
			return fmt.Errorf("verdict %+v", v)
		}
		return nil
	})
}

// die ends an agent like SIGKILL, without a last message.
func (h *host) die() {
	h.closeOnce.Do(func() { h.shut() })
}

// TestLeaderIsLost checks that the others elect another leader and continue.
func TestLeaderIsLost(t *testing.T) {
	hosts := joinAll(t, 4, func(i int, c *Config) { c.NodeRank, c.Min = i, 2 })
	forAll(t, hosts, func(h *host) error {
		if _, err := h.starts(t.Context()); err != nil {
			return err
		}
		if h.leads() {
			h.die()
			return nil
		}
		if n := h.hears(t); n.Lost == "" {
			return fmt.Errorf("news %+v", n)
		}
		v := h.End(t.Context(), launch.Ending{Failures: []launch.Failure{{Remote: true, Class: 3}}})
		if !v.Again {
			return fmt.Errorf("verdict %+v", v)
		}
		s, err := h.starts(t.Context())
		if err != nil || s.Ranks.WorldSize != 6 {
			return fmt.Errorf("start %+v, %v", s, err)
		}
		if v := h.End(t.Context(), launch.Ending{}); v.ExitCode != 0 {
			return fmt.Errorf("verdict %+v", v)
		}
		return nil
	})
}

func TestOtherInputsAreRefused(t *testing.T) {
	port := freePort(t)
	joinOne(t, port, 0, 2, nil)
	h := joinOne(t, port, 1, 2, func(_ int, c *Config) { c.Inputs = "another" })
	_, err := h.Next(t.Context())
	over := (*launch.Over)(nil)
	if !errors.As(err, &over) || over.ExitCode != launch.ExitInput {
		t.Fatalf("error %v", err)
	}
	t.Log(err)
}

// TestRankOfAnother checks that an agent with the key that requests a live agent's rank is refused.
func TestRankOfAnother(t *testing.T) {
	port := freePort(t)
	change := func(_ int, c *Config) { c.NodeRank, c.Silence = 0, 300*time.Millisecond }
	joinOne(t, port, 0, 2, change)
	h := joinOne(t, port, 1, 2, change)
	_, err := h.Next(t.Context())
	if over := (*launch.Over)(nil); !errors.As(err, &over) || over.ExitCode != launch.ExitFailed ||
		!strings.Contains(err.Error(), "node rank 0 belongs to") {
		t.Fatalf("error %v", err)
	}
}

// TestSpares checks that agents beyond MAX wait, replace lost ones, and end with the job.
func TestSpares(t *testing.T) {
	port := freePort(t)
	change := func(i int, c *Config) { c.Min, c.Max, c.MaxRestarts = 1, 2, 3 }
	var hosts []*host
	for i := range 2 {
		hosts = append(hosts, joinOne(t, port, i, 2, change))
	}
	begun := make(chan *host, 2)
	for _, h := range hosts {
		go func() {
			if _, err := h.starts(t.Context()); err != nil {
				t.Error(err)
			}
			begun <- h
		}()
	}
	<-begun
	<-begun
	spares := []*host{joinOne(t, port, 2, 2, change), joinOne(t, port, 3, 2, change)}
	over := make(chan error, 2)
	for _, h := range spares {
		go func() {
			_, err := h.starts(t.Context())
			if err == nil {
				h.End(t.Context(), launch.Ending{})
			}
			over <- err
		}()
	}
	leader, other := hosts[0], hosts[1]
	if other.leads() {
		leader, other = other, leader
	}
	waitFor(t, leader, func(m *coordinator) bool { return m.leader != nil && m.leader.joins == 3 })
	other.die()
	if n := leader.hears(t); n.Lost == "" {
		t.Errorf("news %+v", n)
	}
	if v := leader.End(t.Context(), launch.Ending{Failures: []launch.Failure{{Remote: true, Class: 3}}}); !v.Again {
		t.Fatalf("verdict %+v", v)
	}
	if s, err := leader.starts(t.Context()); err != nil || s.Ranks.WorldSize != 4 {
		t.Fatalf("start %+v, %v", s, err)
	}
	if v := leader.End(t.Context(), launch.Ending{}); v.ExitCode != 0 {
		t.Fatalf("verdict %+v", v)
	}
	ends := 0
	for range spares {
		err := <-over
		if gone := (*launch.Over)(nil); errors.As(err, &gone) && gone.ExitCode == launch.ExitDone {
			ends++
		} else if err != nil {
			t.Error(err)
		}
	}
	if ends != 1 {
		t.Errorf("%d spares were told that the job is done, want 1", ends)
	}
}

// waitFor waits for a state of the agent's coordinator.
func waitFor(t *testing.T, h *host, is func(*coordinator) bool) {
	t.Helper()
	for {
		got := make(chan bool, 1)
		h.calls.put(func() { got <- is(h.coord) })
		if <-got {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// TestNotEnoughNodes checks that the error names the present and the missing nodes.
func TestNotEnoughNodes(t *testing.T) {
	hosts := joinAll(
		t,
		2,
		func(i int, c *Config) { c.NodeRank, c.Min, c.Max, c.JoinTimeout = i, 3, 3, 500*time.Millisecond },
	)
	forAll(t, hosts, func(h *host) error {
		_, err := h.Next(t.Context())
		over := (*launch.Over)(nil)
		if !errors.As(err, &over) || over.ExitCode != launch.ExitFailed ||
			!containsAll(err.Error(), "2 of at least 3", "500ms", "a, b", ": 2") {
			return fmt.Errorf("error %v", err)
		}
		return h.Close(1, "")
	})
}

// TestNobodyThere checks the error without an agent at the rendezvous.
func TestNobodyThere(t *testing.T) {
	h := joinOne(t, freePort(t), 0, 2, func(_ int, c *Config) { c.Port, c.JoinTimeout = 0, 3*time.Second })
	if _, err := h.Next(t.Context()); err == nil || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("error %v", err)
	}
}

// TestNoQuorum checks that a side without a quorum ends with an error.
func TestNoQuorum(t *testing.T) {
	hosts := joinAll(t, 3, func(i int, c *Config) { c.NodeRank, c.Min, c.RegroupTimeout = i, 1, time.Second })
	forAll(t, hosts, func(h *host) error {
		if _, err := h.starts(t.Context()); err != nil {
			return err
		}
		if h.id != "b" {
			h.die()
			return nil
		}
		h.hears(t)
		v := h.End(t.Context(), launch.Ending{Failures: []launch.Failure{{Remote: true, Class: 3}}})
		if v.Again {
			_, err := h.Next(t.Context())
			over := (*launch.Over)(nil)
			if !errors.As(err, &over) {
				return fmt.Errorf("error %w", err)
			}
			v.Result = over.Result
			v.Err = errors.New(over.Why)
		}
		text := fmt.Sprint(v.Err, v.Notes)
		if v.ExitCode != launch.ExitFailed || !strings.Contains(text, "this side has 1 of 3 nodes") {
			return fmt.Errorf("verdict %+v", v)
		}
		if v.First != nil && (v.First.Rank != 0 || v.First.Ranks != 2 || v.First.Host != "a") {
			return fmt.Errorf("the first failure is %+v, want the loss of the one that led", v.First)
		}
		return nil
	})
}

// TestStopBeforeTheStart checks that a stop between starts ends the job for all with status 75.
func TestStopBeforeTheStart(t *testing.T) {
	hosts := joinAll(t, 2, func(i int, c *Config) { c.Min, c.Max = 3, 3 })
	waitFor(t, hosts[0], func(m *coordinator) bool { return m.leader != nil && m.leader.joins == 1 })
	go hosts[1].Close(launch.ExitStopped, "")
	_, err := hosts[0].Next(t.Context())
	if over := (*launch.Over)(nil); !errors.As(err, &over) || over.ExitCode != launch.ExitStopped ||
		!strings.Contains(err.Error(), "node b was asked to stop") {
		t.Errorf("error %v", err)
	}
}

// A preparing is a RunDir that calls prepare.
type preparing struct {
	RunDir
	prepare func() error
}

func (p preparing) Prepare(context.Context, Assignment) ([]byte, error) { return nil, p.prepare() }

// TestPrepareFails checks that an error of Prepare ends the job on all nodes with the reason.
func TestPrepareFails(t *testing.T) {
	tooSmall := errors.New("the world is too small")
	hosts := joinAll(t, 2, func(_ int, c *Config) {
		c.RunDir = preparing{c.RunDir, func() error { return tooSmall }}
	})
	forAll(t, hosts, func(h *host) error {
		_, err := h.Next(t.Context())
		over := (*launch.Over)(nil)
		switch {
		case !errors.As(err, &over) || over.ExitCode != launch.ExitFailed:
			return fmt.Errorf("error %w", err)
		case over.Err == nil && !strings.Contains(over.Why, tooSmall.Error()), over.Err != nil && over.Err != tooSmall:
			return fmt.Errorf("result %+v, %q", over.Result, over.Why)
		}
		return h.Close(1, "")
	})
}

// TestPrepareThatHangsIsLeft checks that an agent can leave while Prepare hangs.
func TestPrepareThatHangsIsLeft(t *testing.T) {
	begun, release := make(chan struct{}), make(chan struct{})
	h := joinAll(t, 1, func(_ int, c *Config) {
		c.RunDir = preparing{c.RunDir, func() error {
			close(begun)
			<-release
			return nil
		}}
	})[0]
	t.Cleanup(func() { close(release); h.group.Wait() })
	ctx, cancel := context.WithCancel(t.Context())
	go h.Next(ctx) // ended by cancel
	<-begun
	cancel()
	if err := h.Close(1, ""); err == nil || !strings.Contains(err.Error(), closeTimeout.String()) {
		t.Errorf("error %v, want one that says what was left behind", err)
	}
}

// TestNamesDiffer checks that two agents of one host have different names.
func TestNamesDiffer(t *testing.T) {
	a, b := joinOne(t, freePort(t), 0, 1, nil), joinOne(t, freePort(t), 0, 1, nil)
	if a.self.Host != b.self.Host || a.self.Name == b.self.Name {
		t.Errorf("agents %+v and %+v", a.self, b.self)
	}
}

// TestMeetingPlaceComesBack checks that a restarted agent at the rendezvous finds the job and does not start another.
func TestMeetingPlaceComesBack(t *testing.T) {
	port := freePort(t)
	change := func(i int, c *Config) { c.NodeRank = i }
	hosts := []*host{joinOne(t, port, 0, 3, change), joinOne(t, port, 1, 3, change), joinOne(t, port, 2, 3, change)}
	forAll(t, hosts, func(h *host) error {
		if _, err := h.starts(t.Context()); err != nil {
			return err
		}
		if h.id == "a" {
			h.die()
			hosts[0] = joinOne(t, port, 0, 3, change)
			return nil
		}
		h.hears(t)
		if v := h.End(t.Context(), launch.Ending{Failures: []launch.Failure{{Remote: true, Class: 3}}}); !v.Again {
			return fmt.Errorf("verdict %+v", v)
		}
		return nil
	})
	forAll(t, hosts, func(h *host) error {
		s, err := h.starts(t.Context())
		if err != nil || s.Number != 1 || h.last().Assignment.Generation != 2 || s.Ranks.NodeRank != int(h.id[0]-'a') {
			return fmt.Errorf("start %+v, %w", s, err)
		}
		if h.leads() != (h.id == "b") {
			return errors.New("it should lead that was next")
		}
		h.End(t.Context(), launch.Ending{})
		return nil
	})
}

// TestLastCall checks that fewer than MAX agents start after LastCall.
func TestLastCall(t *testing.T) {
	hosts := joinAll(t, 2, func(_ int, c *Config) { c.Min, c.Max, c.LastCall = 1, 4, 400*time.Millisecond })
	forAll(t, hosts, func(h *host) error {
		s, err := h.starts(t.Context())
		if err != nil || s.Ranks.WorldSize != 4 {
			return fmt.Errorf("start %+v, %w", s, err)
		}
		h.End(t.Context(), launch.Ending{})
		return nil
	})
}

func containsAll(text string, parts ...string) bool {
	return !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(text, p) })
}
