package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/waits"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A testJob is a job on hosts a, b and so on, with 2 workers each. It is the run directory of its agents.
type testJob struct {
	t      *testing.T
	n      int
	port   int // of the rendezvous
	change func(i int, c *Config)
	hosts  []*host

	mu     sync.Mutex
	number int    // guarded by mu; of the newest decision
	newest []byte // guarded by mu
}

func newTestJob(t *testing.T, n int, change func(i int, c *Config)) *testJob {
	t.Parallel()
	return &testJob{t: t, n: n, port: freePort(t), change: change}
}

// joinAll starts the agents of a job.
func joinAll(t *testing.T, n int, change func(i int, c *Config)) *testJob {
	j := newTestJob(t, n, change)
	for i := range n {
		j.join(i)
	}
	return j
}

// join starts agent i, or replaces it.
func (j *testJob) join(i int) *host {
	j.t.Helper()
	name := string(rune('a' + i))
	cfg := Config{
		Job: "test", Key: []byte("0123456789abcdef"), Program: "v1", Inputs: "digest", NodeRank: -1,
		Min: j.n, Max: j.n, NProc: 2, Host: name, HostID: name,
		Listen: "127.0.0.1", Port: j.port, Seeds: []string{fmt.Sprintf("127.0.0.1:%d", j.port)},
		MaxRestarts: 3, RegroupTimeout: 10 * time.Second, RunDir: j,
		Log: func(format string, args ...any) { j.t.Logf(name+": "+format, args...) },
	}
	if j.change != nil {
		j.change(i, &cfg)
	}
	m, err := Join(j.t.Context(), cfg)
	if err != nil {
		j.t.Fatal(err)
	}
	j.t.Cleanup(func() { m.Close(1, "") })
	h := &host{m, name}
	if i < len(j.hosts) {
		j.hosts[i] = h
	} else {
		j.hosts = append(j.hosts, h)
	}
	return h
}

// Prepare and Claim implement RunDir.
func (j *testJob) Prepare(_ context.Context, w Assignment) ([]byte, error) {
	return fmt.Appendf(nil, "payload %d", w.Generation), nil
}

func (j *testJob) Claim(_ context.Context, _ []byte, number int, decision []byte) ([]byte, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if decision != nil && number > j.number {
		j.number, j.newest = number, decision
	}
	return j.newest, nil
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

// forAll runs f for each host concurrently.
func (j *testJob) forAll(f func(h *host) error) {
	j.t.Helper()
	errs := make(chan error, len(j.hosts))
	for _, h := range slices.Clone(j.hosts) {
		go func() {
			err := f(h)
			if err != nil {
				err = fmt.Errorf("host %s: %w", h.id, err)
				h.Close(1, "") // the others do not wait for it
			}
			errs <- err
		}()
	}
	for range cap(errs) {
		if err := <-errs; err != nil {
			j.t.Error(err)
		}
	}
	if j.t.Failed() {
		j.t.FailNow()
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

// TestJobOfFourNodes checks that the agents of a job agree on its start and its end, over ports that also carry gossip,
// and that only an asking agent gets the wait states of the others.
func TestJobOfFourNodes(t *testing.T) {
	j := joinAll(t, 4, nil)
	var seen sync.Map
	j.forAll(func(h *host) error {
		s, err := h.starts(t.Context())
		if err != nil {
			return err
		}
		if _, twice := seen.LoadOrStore(s.Ranks.FirstRank, true); twice || s.Ranks.FirstRank%2 != 0 || s.Number != 0 ||
			s.Ranks.WorldSize != 8 || string(s.Payload) != "payload 1" || len(s.Secret) != 32 || s.Listen != "127.0.0.1" {
			return fmt.Errorf("start %+v", s)
		}
		waitFor(h, func(c *coordinator) bool { return len(c.search.hints) == 3 })
		if s.Ranks.FirstRank == 2 {
			h.Publish(launch.News{Ask: true})
			ranks := map[int]bool{}
			for range 3 {
				n := h.hears(t)
				if len(n.WaitStates) != 1 || n.WaitStates[0].State != "x" {
					return fmt.Errorf("news %+v, want what a rank waits for", n)
				}
				ranks[n.WaitStates[0].Rank] = true
			}
			if !maps.Equal(ranks, map[int]bool{0: true, 4: true, 6: true}) {
				return fmt.Errorf("ranks %v", ranks)
			}
		} else {
			if n := h.hears(t); !n.Ask {
				return fmt.Errorf("news %+v, want a question", n)
			}
			h.Publish(launch.News{WaitStates: []waits.WaitState{{Rank: s.Ranks.FirstRank, State: "x"}}})
		}
		v := h.End(t.Context(), launch.Ending{Step: 3})
		if v.ExitCode != launch.ExitDone || v.Again || v.Err != nil || v.ReportedElsewhere == h.leads() {
			return fmt.Errorf("verdict %+v", v)
		}
		if len(h.News()) > 0 {
			return fmt.Errorf("news %+v, want no more", <-h.News())
		}
		return h.Close(v.ExitCode, "")
	})
}

// takenRendezvous returns a job whose port another program has, which answers with a text and hangs up. asked tells of a
// caller.
func takenRendezvous(t *testing.T, timeout time.Duration, answer string) (j *testJob, other net.Listener,
	asked chan bool) {
	t.Helper()
	j = newTestJob(t, 2, func(i int, c *Config) {
		c.NodeRank, c.Meets, c.JoinTimeout = i, i == 0, timeout
		if i == 1 {
			c.Port = 0
		}
	})
	other, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", j.port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { other.Close() })
	asked = make(chan bool, 1)
	go func() { // ends with the listener
		for conn, err := other.Accept(); err == nil; conn, err = other.Accept() {
			conn.Write([]byte(answer))
			conn.Close()
			put(asked, true)
		}
	}()
	return j, other, asked
}

// TestTakenRendezvous checks that the agent of the rendezvous takes its port once another process has left it.
func TestTakenRendezvous(t *testing.T) {
	j, other, asked := takenRendezvous(t, time.Minute, "")
	j.join(0)
	j.join(1)
	<-asked
	other.Close()
	j.forAll(func(h *host) error {
		if _, err := h.starts(t.Context()); err != nil {
			return err
		}
		h.End(t.Context(), launch.Ending{})
		return h.Close(0, "")
	})
}

// TestAnotherProgramAtTheRendezvous checks that a program that is no agent ends the job at once, as an input error.
func TestAnotherProgramAtTheRendezvous(t *testing.T) {
	j, _, _ := takenRendezvous(t, time.Hour, "HTTP/1.1 400 Bad Request\r\n\r\n")
	j.join(0)
	_, err := j.hosts[0].Next(t.Context())
	if err := isOver(err, launch.ExitInput, "another program answers there"); err != nil {
		t.Error(err)
	}
}

// TestFailureAndRestart checks that a failure on one node ends the start on all, and another follows.
func TestFailureAndRestart(t *testing.T) {
	joinAll(t, 3, nil).forAll(func(h *host) error {
		s, err := h.starts(t.Context())
		if err != nil {
			return err
		}
		f := launch.Failure{Rank: s.Ranks.FirstRank, Host: h.id, Cause: "lost rank 3", Remote: true, Class: 2, Order: 1}
		if s.Ranks.FirstRank == 2 {
			f = launch.Failure{Rank: 3, Host: h.id, Cause: "exit status 1", Class: 1, Order: 1}
			h.Publish(launch.News{Failed: &f.Rank})
		} else if n := h.hears(t); n.Failed == nil || *n.Failed != 3 {
			return fmt.Errorf("news %+v", n)
		}
		v := h.End(t.Context(), launch.Ending{Step: 5, Failures: []launch.Failure{f}})
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

// TestMeetingPlaceComesBack checks that the others learn at once of a killed leader and elect another, and that a
// restarted agent at the rendezvous finds the job, takes its rank again, and does not start another job.
func TestMeetingPlaceComesBack(t *testing.T) {
	j := joinAll(t, 3, func(i int, c *Config) { c.NodeRank = i })
	j.forAll(func(h *host) error {
		if _, err := h.starts(t.Context()); err != nil {
			return err
		}
		if h.id == "a" {
			h.closeOnce.Do(func() { h.shut() }) // without a last message, like SIGKILL
			j.join(0)
			return nil
		}
		if n := h.hears(t); n.Failed == nil || *n.Failed != 0 || n.Lost == "" {
			return fmt.Errorf("news %+v", n)
		}
		if v := h.End(t.Context(), launch.Ending{Failures: []launch.Failure{{Remote: true, Class: 3}}}); !v.Again {
			return fmt.Errorf("verdict %+v", v)
		}
		return nil
	})
	j.forAll(func(h *host) error {
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

// isOver checks that an error of Next is the end of the job, with that status and text.
func isOver(err error, status int, text string) error {
	if end := (*launch.Over)(nil); !errors.As(err, &end) || end.ExitCode != status ||
		!strings.Contains(fmt.Sprint(end.Why, end.Err), text) {
		return fmt.Errorf("error %v, want status %d and %q", err, status, text)
	}
	return nil
}

func TestOtherInputsAreRefused(t *testing.T) {
	j := joinAll(t, 2, func(i int, c *Config) { c.Inputs = fmt.Sprint("inputs ", i) })
	_, err := j.hosts[1].Next(t.Context())
	if err := isOver(err, launch.ExitInput, ""); err != nil {
		t.Error(err)
	}
}

// waitFor waits for a state of the agent's coordinator.
func waitFor(h *host, is func(*coordinator) bool) {
	for got := make(chan bool); ; time.Sleep(10 * time.Millisecond) {
		h.calls.put(func() { got <- is(h.coord) })
		if <-got {
			return
		}
	}
}

// TestStopBeforeTheStart checks that a stop between starts ends the job for all with status 75.
func TestStopBeforeTheStart(t *testing.T) {
	j := joinAll(t, 2, func(i int, c *Config) { c.Min, c.Max = 3, 3 })
	waitFor(j.hosts[0], func(m *coordinator) bool { return m.leader != nil && m.leader.joins == 1 })
	go j.hosts[1].Close(launch.ExitStopped, "")
	_, err := j.hosts[0].Next(t.Context())
	if err := isOver(err, launch.ExitStopped, "node b was asked to stop"); err != nil {
		t.Error(err)
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
	joinAll(t, 2, func(_ int, c *Config) {
		c.RunDir = preparing{c.RunDir, func() error { return tooSmall }}
	}).forAll(func(h *host) error {
		_, err := h.Next(t.Context())
		return isOver(err, launch.ExitFailed, tooSmall.Error())
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
	}).hosts[0]
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
	j := newTestJob(t, 2, nil)
	if a, b := j.join(0).self, j.join(0).self; a.Host != b.Host || a.Name == b.Name {
		t.Errorf("agents %+v and %+v", a, b)
	}
}
