package comm_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/worldtest"
	"github.com/cprun/cprun/tensor"
)

// logs collects a mesh's lines about refused connections.
type logs struct {
	mu    sync.Mutex
	lines []string
}

func (l *logs) add(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprintf(format, args...))
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines, "\n")
}

// sees reports whether a line is logged within half a minute, and returns as soon as it is.
func (l *logs) sees(line string) bool {
	for range 3000 {
		if strings.Contains(l.String(), line) {
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}

// wait returns when a line has been logged.
func (l *logs) wait(t *testing.T, line string) {
	t.Helper()
	if !l.sees(line) {
		t.Fatalf("%q was not logged:\n%s", line, l)
	}
}

// until returns a context that expires when a line is logged. A test that waits longer than that waits for a missing
// peer, however slow the machine is.
func (l *logs) until(t *testing.T, line string) context.Context {
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		l.sees(line)
		cancel(context.DeadlineExceeded)
	}()
	return ctx
}

// patiently calls try with growing deadlines until it returns true. A busy machine connects slowly, so that a short
// deadline may come too early. The last try counts, whatever it returns.
func patiently(try func(connect time.Duration, last bool) (seen bool)) {
	const longest = 20 * time.Second
	for connect := 150 * time.Millisecond; ; connect *= 2 {
		if last := connect > longest; try(connect, last) || last {
			return
		}
	}
}

// sum reduces a number over the groups and checks the result.
func sum(t *testing.T, groups []*comm.Group) {
	t.Helper()
	var wg sync.WaitGroup
	for r, g := range groups {
		wg.Go(func() {
			v := tensor.FromSlice([]float32{float32(r + 1)}, 1)
			p, err := g.AllReduce(v, comm.Sum)
			if err == nil {
				err = p.Sync(context.Background())
			}
			if n := len(groups); err != nil || tensor.Data[float32](v)[0] != float32(n*(n+1)/2) {
				t.Errorf("rank %d: sum %v, error %v", r, tensor.Data[float32](v)[0], err)
			}
		})
	}
	wg.Wait()
}

func closeAll(groups []*comm.Group) {
	var wg sync.WaitGroup
	for _, g := range groups {
		if g != nil {
			wg.Go(func() { g.Close() })
		}
	}
	wg.Wait()
}

// TestRankTwice has a second process claim a rank that is there: it gets nowhere, and the job
// goes on.
func TestRankTwice(t *testing.T) {
	t.Parallel()
	dir, key := worldtest.SocketDir(t), worldtest.Secret()
	mesh := func(r int) comm.Mesh { return comm.Mesh{Dir: dir, Rank: r, Size: 3, Secret: key} }
	log := &logs{}
	groups := make([]*comm.Group, 3)
	var first sync.WaitGroup
	start := func(r int) {
		first.Go(func() {
			var err error
			if groups[r], err = comm.Connect(context.Background(), mesh(r), nil, comm.Options{Log: log.add}); err != nil {
				t.Error(err)
			}
		})
	}
	start(0)
	start(2) // reaches rank 0, and waits for rank 1
	log.wait(t, "rank 0: connected to rank 2")
	const refused = "rank 2 is connected already"
	_, err := comm.Connect(log.until(t, refused), mesh(2), nil, comm.Options{})
	if !errors.Is(err, comm.ErrDeadline) || !strings.Contains(err.Error(), "ranks 0, 1") {
		t.Errorf("the second rank 2: %v", err)
	}
	start(1)
	first.Wait()
	defer closeAll(groups)
	if t.Failed() {
		return
	}
	sum(t, groups)
	if !strings.Contains(log.String(), refused) {
		t.Errorf("the log says nothing of the second rank 2:\n%s", log)
	}
}

// TestAbsent checks that a rank that never comes is named by all others, also by one that is
// connected to everybody that it dials. In a large world its neighbours name it, and through them
// all others, whom their first collective waits for.
func TestAbsent(t *testing.T) {
	t.Parallel()
	for _, of := range []struct {
		n, absent int
		few       bool
	}{{4, 2, false}, {9, 4, true}} {
		t.Run(fmt.Sprintf("%d of %d", of.absent, of.n), func(t *testing.T) {
			t.Parallel()
			patiently(func(connect time.Duration, last bool) bool {
				dir, named := worldtest.SocketDir(t), 0
				want := fmt.Sprintf("rank %d: connect: did not come within %v", of.absent, connect)
				for r, err := range meetWithout(t, dir, of.n, of.absent, of.few, connect) {
					var pe *comm.PeerError
					if errors.As(err, &pe) && pe.Rank == of.absent && strings.Contains(err.Error(), want) {
						named++
					} else if last && r != of.absent {
						t.Errorf("rank %d: %v", r, err)
					}
				}
				left, err := os.ReadDir(dir)
				if err != nil || len(left) > 0 {
					t.Errorf("sockets left behind: %v, %v", left, err)
				}
				return named == of.n-1
			})
		})
	}
}

// meetWithout connects all of n ranks except one, to their neighbours or to all, and returns each rank's error, at once
// or from a collective.
func meetWithout(t *testing.T, dir string, n, absent int, few bool, connect time.Duration) []error {
	key, groups, errs := worldtest.Secret(), make([]*comm.Group, n), make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		if r == absent {
			continue
		}
		wg.Go(func() {
			m := comm.Mesh{Dir: dir, Rank: r, Size: n, Secret: key}
			if few {
				m = m.Few(1)
			}
			groups[r], errs[r] = comm.Connect(t.Context(), m, nil, comm.Options{Connect: connect})
			if errs[r] == nil {
				errs[r] = groups[r].Barrier(t.Context())
			}
		})
	}
	wg.Wait()
	closeAll(groups)
	return errs
}

// TestDeathWhileConnecting ends a rank while others have still to connect. The waiting ranks fail at once, without
// waiting for their deadline.
func TestDeathWhileConnecting(t *testing.T) {
	dir, key := worldtest.SocketDir(t), worldtest.Secret()
	ctx, cancel := context.WithCancelCause(context.Background())
	done, log := make(chan error, 2), &logs{}
	for _, r := range []int{0, 1} {
		go func() {
			c := context.Background()
			if r == 1 {
				c = ctx
			}
			_, err := comm.Connect(
				c,
				comm.Mesh{Dir: dir, Rank: r, Size: 3, Secret: key},
				nil,
				comm.Options{Log: log.add},
			)
			done <- err
		}()
	}
	log.wait(t, "rank 0: connected to rank 1")
	log.wait(t, "rank 1: connected to rank 0")
	cause := errors.New("no memory left")
	cancel(cause)
	a, b := <-done, <-done
	if comm.IsRemote(a) {
		a, b = b, a
	}
	if !errors.Is(a, cause) {
		t.Errorf("rank 1: %v, want %v", a, cause)
	}
	if !comm.IsRemote(b) || !strings.Contains(b.Error(), "rank 1") || !strings.Contains(b.Error(), cause.Error()) {
		t.Errorf("rank 0: %v, want rank 1 and %q", b, cause)
	}
}

func TestMeshRefused(t *testing.T) {
	good, key := worldtest.SocketDir(t), worldtest.Secret()
	open := filepath.Join(good, "open")
	file := filepath.Join(good, "file")
	long := filepath.Join(good, strings.Repeat("x", 90))
	for _, dir := range []string{open, long} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(open, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, nil, 0o700); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(good, "link")
	if err := os.Symlink(good, link); err != nil {
		t.Fatal(err)
	}
	for want, m := range map[string]comm.Mesh{
		"mode 0750":            {Dir: open, Size: 2, Secret: key},
		"file is not a dir":    {Dir: file, Size: 2, Secret: key},
		"link is not a dir":    {Dir: link, Size: 2, Secret: key},
		"the system takes 107": {Dir: long, Size: 2, Secret: key},
		"no such file":         {Dir: filepath.Join(good, "none"), Size: 2, Secret: key},
		"secret of 3 bytes":    {Dir: good, Size: 2, Secret: key[:3]},
		"rank 2 of 2":          {Dir: good, Rank: 2, Size: 2, Secret: key},
		"rank 0 of 0":          {Dir: good, Secret: key},
		"name of 256 bytes":    {Dir: good, Size: 1, Secret: key, Name: strings.Repeat("n", 256)},
	} {
		if _, err := comm.Connect(context.Background(), m, nil, comm.Options{}); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if _, err := comm.Connect(context.Background(), comm.Mesh{Rank: 1, Size: 2, Secret: key}, nil, comm.Options{}); err == nil ||
		!strings.Contains(err.Error(), "rank 0 has no address") {
		t.Errorf("no addresses: %v", err)
	}
	if _, err := comm.Connect(context.Background(), comm.Mesh{Size: 2, Secret: key}, nil, comm.Options{}); err == nil ||
		!strings.Contains(err.Error(), "no listener") {
		t.Errorf("no listener: %v", err)
	}
}

// TestSocketInTheWay checks that the error of an existing socket, such as that left by the same run, names the rank.
func TestSocketInTheWay(t *testing.T) {
	m := comm.Mesh{Dir: worldtest.SocketDir(t), Size: 2, Secret: worldtest.Secret()}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := comm.Connect(ctx, m, nil, comm.Options{})
		ended <- err
	}()
	for there := 0; there == 0; time.Sleep(time.Millisecond) {
		found, err := filepath.Glob(filepath.Join(m.Dir, "*.sock"))
		if err != nil {
			t.Fatal(err)
		}
		there = len(found)
	}
	_, err := comm.Connect(t.Context(), m, nil, comm.Options{})
	if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), "socket of rank 0") {
		t.Errorf("a second rank 0: %v", err)
	}
	cancel()
	if err := <-ended; err == nil {
		t.Error("the first rank 0 connected to nobody")
	}
}

// A mixed mesh needs a way to each lower rank and, for the higher, one to this rank.
func TestConnectRefused(t *testing.T) {
	lns, addrs := listeners(t, 1)
	dir, key := worldtest.SocketDir(t), worldtest.Secret()
	for want, m := range map[string]comm.Mesh{
		"mesh: rank 0 has no address, and there is no socket directory": {Rank: 1, Size: 2, Secret: key, Addrs: []string{"", ""}},
		"mesh: rank 0 of 2 has no listener":                             {Size: 2, Secret: key},
		"mesh: 1 addresses for 3 ranks":                                 {Rank: 1, Size: 3, Secret: key, Dir: dir, Addrs: addrs, Listener: lns[0]},
	} {
		if _, err := comm.Connect(context.Background(), m, nil, comm.Options{}); err == nil || err.Error() != want {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if _, err := lns[0].Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the listener of a mesh that was refused: %v, want %v", err, net.ErrClosed)
	}
}
