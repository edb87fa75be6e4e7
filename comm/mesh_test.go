package comm_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/worldtest"
	"github.com/cprun/cprun/tensor"
)

// TestRankTwice starts a second process with a connected rank: it fails, and the job continues.
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
	log.wait(t, refused)
}

// TestAbsent checks that a rank that never comes is named by all others, also by one that is
// connected to everybody that it dials. In a large world its neighbours name it, and through them
// all others, whom their first collective waits for. A busy machine connects slowly, so that a short deadline may come
// too early: the test repeats with longer ones.
func TestAbsent(t *testing.T) {
	t.Parallel()
	for _, of := range []struct{ n, absent, pairs int }{{4, 2, 0}, {9, 4, 1}} {
		t.Run(fmt.Sprintf("%d of %d", of.absent, of.n), func(t *testing.T) {
			t.Parallel()
			var wrong error
			for connect := 150 * time.Millisecond; connect < 40*time.Second; connect *= 2 {
				if wrong = meetWithout(t, of.n, of.absent, of.pairs, connect); wrong == nil {
					return
				}
			}
			t.Error(wrong)
		})
	}
}

// meetWithout connects all of n ranks except one, and returns the errors that do not name it, at once or from a
// collective.
func meetWithout(t *testing.T, n, absent, pairs int, connect time.Duration) error {
	dir, key, errs := worldtest.SocketDir(t), worldtest.Secret(), make([]error, n)
	groups := make([]*comm.Group, n)
	want := fmt.Sprintf("rank %d: connect: did not come within %v", absent, connect)
	var wg sync.WaitGroup
	for r := range n {
		if r == absent {
			continue
		}
		wg.Go(func() {
			m := comm.Mesh{Dir: dir, Rank: r, Size: n, Secret: key}.Few(pairs)
			var err error
			if groups[r], err = comm.Connect(t.Context(), m, nil, comm.Options{Connect: connect}); err == nil {
				err = groups[r].Barrier(t.Context())
			}
			if blames(err, absent, comm.ErrDeadline) != nil || !strings.Contains(err.Error(), want) {
				errs[r] = fmt.Errorf("rank %d: %w", r, err)
			}
		})
	}
	wg.Wait()
	closeAll(groups)
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("sockets left behind: %v, %v", left, err)
	}
	return errors.Join(errs...)
}

// TestDeathWhileConnecting ends a rank while others have still to connect. The waiting ranks fail at once, without
// waiting for their deadline.
func TestDeathWhileConnecting(t *testing.T) {
	dir, key, log := worldtest.SocketDir(t), worldtest.Secret(), &logs{}
	ctx, cancel := context.WithCancelCause(t.Context())
	connect := func(ctx context.Context, r int) <-chan error {
		done := make(chan error, 1)
		go func() {
			mesh := comm.Mesh{Dir: dir, Rank: r, Size: 3, Secret: key}
			_, err := comm.Connect(ctx, mesh, nil, comm.Options{Log: log.add})
			done <- err
		}()
		return done
	}
	other, own := connect(t.Context(), 0), connect(ctx, 1)
	log.wait(t, "rank 0: connected to rank 1")
	log.wait(t, "rank 1: connected to rank 0")
	cause := errors.New("no memory left")
	cancel(cause)
	if err := <-own; !errors.Is(err, cause) {
		t.Errorf("rank 1: %v, want %v", err, cause)
	}
	if err := <-other; !comm.IsRemote(err) || !strings.Contains(err.Error(), "rank 1") ||
		!strings.Contains(err.Error(), cause.Error()) {
		t.Errorf("rank 0: %v, want rank 1 and %q", err, cause)
	}
}

// A mesh needs a private directory, a good rank and secret, a way to each lower rank and, for the higher, one to this
// rank.
func TestMeshRefused(t *testing.T) {
	good, key := worldtest.SocketDir(t), worldtest.Secret()
	in := func(name string) string { return filepath.Join(good, name) }
	open, file, link, long := in("open"), in("file"), in("link"), in(strings.Repeat("x", 90))
	if err := errors.Join(os.Mkdir(open, 0o700), os.Chmod(open, 0o750), os.Mkdir(long, 0o700),
		os.WriteFile(file, nil, 0o700), os.Symlink(good, link)); err != nil {
		t.Fatal(err)
	}
	lns, addrs := listeners(t, "127.0.0.1", 1)
	const noAddress = "mesh: rank 0 has no address, and there is no socket directory"
	for _, c := range []struct {
		want string
		mesh comm.Mesh
	}{
		{"mode 0750", comm.Mesh{Dir: open, Size: 2, Secret: key}},
		{"file is not a dir", comm.Mesh{Dir: file, Size: 2, Secret: key}},
		{"link is not a dir", comm.Mesh{Dir: link, Size: 2, Secret: key}},
		{"the system takes 107", comm.Mesh{Dir: long, Size: 2, Secret: key}},
		{"no such file", comm.Mesh{Dir: in("none"), Size: 2, Secret: key}},
		{"secret of 3 bytes", comm.Mesh{Dir: good, Size: 2, Secret: key[:3]}},
		{"rank 2 of 2", comm.Mesh{Dir: good, Rank: 2, Size: 2, Secret: key}},
		{"rank 0 of 0", comm.Mesh{Dir: good, Secret: key}},
		{"name of 256 bytes", comm.Mesh{Dir: good, Size: 1, Secret: key, Name: strings.Repeat("n", 256)}},
		{noAddress, comm.Mesh{Rank: 1, Size: 2, Secret: key}},
		{noAddress, comm.Mesh{Rank: 1, Size: 2, Secret: key, Addrs: []string{"", ""}}},
		{"mesh: rank 0 of 2 has no listener", comm.Mesh{Size: 2, Secret: key}},
		{"mesh: 1 addresses for 3 ranks",
			comm.Mesh{Rank: 1, Size: 3, Secret: key, Dir: good, Addrs: addrs, Listener: lns[0]}},
	} {
		_, err := comm.Connect(t.Context(), c.mesh, nil, comm.Options{})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
	if _, err := lns[0].Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the listener of a mesh that was refused: %v, want %v", err, net.ErrClosed)
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

// TestStrangers connects strangers before the real peers: none disturbs the mesh, and each is logged.
func TestStrangers(t *testing.T) {
	t.Parallel()
	lns, addrs := listeners(t, "127.0.0.1", 2)
	key, log := worldtest.Secret(), &logs{}
	groups := make([]*comm.Group, 2)
	var wg sync.WaitGroup
	start := func(r int) {
		wg.Go(func() {
			var err error
			mesh := comm.Mesh{Listener: lns[r], Addrs: addrs, Rank: r, Size: 2, Secret: key}
			if groups[r], err = comm.Connect(t.Context(), mesh, nil, comm.Options{Log: log.add}); err != nil {
				t.Error(err)
			}
		})
	}
	start(0)
	// These say something, or nothing, and are sent away, or hang up.
	for _, say := range []string{"GET / HTTP/1.1\r\n\r\n", "CPRUNH5\n" + strings.Repeat("\xff", 200), "CPRUNH5\n\x00"} {
		conn, err := net.Dial("tcp", addrs[0])
		if err != nil {
			t.Fatal(err)
		}
		conn.Write([]byte(say))
		conn.(*net.TCPConn).CloseWrite()
		io.Copy(io.Discard, conn) // until it is refused
		conn.Close()
	}
	quiet, err := net.Dial("tcp", addrs[0]) // says nothing for all the time
	if err != nil {
		t.Fatal(err)
	}
	defer quiet.Close()
	// Ranks that do not belong: another secret, another run, another size.
	for why, m := range map[string]comm.Mesh{
		"secret":           {Secret: worldtest.Secret(), Rank: 1, Size: 2},
		"another run":      {Secret: key, RunID: "other", Rank: 1, Size: 2},
		"world of 3 ranks": {Secret: key, Rank: 2, Size: 3},
	} {
		m.Addrs = []string{addrs[0], addrs[0], addrs[0]}[:m.Size]
		_, err := comm.Connect(log.until(t, why), m, nil, comm.Options{})
		if !comm.IsRemote(err) || !errors.Is(err, comm.ErrDeadline) {
			t.Errorf("mesh %+v connected with %v", m, err)
		}
	}
	start(1)
	wg.Wait()
	defer closeAll(groups)
	if t.Failed() {
		return
	}
	sum(t, groups)
	for _, want := range []string{
		"does not speak this protocol", "says rank 4294967295", "EOF", "secret", "another run", "world of 3 ranks",
	} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("%q is not in the log:\n%s", want, log)
		}
	}
}

// halfOpen connects to all addresses n times and says nothing, until the test ends.
func halfOpen(t *testing.T, addrs []string, n int) {
	for _, a := range addrs {
		for range n {
			conn, err := net.Dial("tcp", a)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { conn.Close() })
		}
	}
}

// TestStrangersHoldNothingUp connects more silent strangers than the door admits at once. A world still connects, in a
// large one also later, and the log stays short.
func TestStrangersHoldNothingUp(t *testing.T) {
	const n, crowd = 9, 1000
	lns, addrs := listeners(t, "127.0.0.1", n)
	halfOpen(t, addrs[:1], crowd)
	w, log := worldOf(func(testing.TB, int) func(rank int) comm.Mesh {
		return func(r int) comm.Mesh { return comm.Mesh{Listener: lns[r], Addrs: addrs} }
	}), &logs{}
	groups := w(t, 1, make([]tensor.Stream, n), comm.Options{Connect: 5 * time.Second, Log: log.add})
	defer closeAll(groups)
	halfOpen(t, addrs, crowd/10)
	everyone(t, groups, func(g *comm.Group) error { return swapAt(t.Context(), g, 3) })
	if refused := strings.Count(log.String(), "refused a connection"); refused == 0 || refused > 20*n {
		t.Errorf("%d lines about strangers, want some, and 20 of a rank at most", refused)
	}
}

// TestPiecesComeTogether moves many messages with sizes around that of a piece at once, in both directions. Each
// arrives whole, in its place.
func TestPiecesComeTogether(t *testing.T) {
	const piece = 256 << 10
	sizes := []int{0, 1, 16 << 10, 16<<10 + 1, piece - 1, piece, piece + 1, 3*piece - 7, 65*piece + 11}
	groups := tcpWorld(t, 0, make([]tensor.Stream, 2), comm.Options{})
	defer closeAll(groups)
	everyone(t, groups, func(g *comm.Group) error {
		var send, recv []comm.Message
		var want [][]byte
		r, peer := g.Rank(), 1-g.Rank()
		for i, n := range sizes {
			send = append(send, with(peer, tensor.FromSlice(noise(n, r, i), n))...)
			recv = append(recv, with(peer, tensor.New(tensor.U8, n))...)
			want = append(want, noise(n, peer, i))
		}
		if err := comm.Finish(t.Context())(g.Exchange(send, recv)); err != nil {
			return err
		}
		for i, m := range recv {
			if !slices.Equal(tensor.Data[uint8](m.View), want[i]) {
				t.Errorf("rank %d: a message of %d bytes came as another", r, sizes[i])
			}
		}
		return nil
	})
}

// noise returns n bytes, other ones for each message.
func noise(n, rank, message int) []byte {
	b := make([]byte, n)
	dice := rand.NewChaCha8([32]byte{byte(rank), byte(message)})
	dice.Read(b)
	return b
}

// TestListen listens at addresses of both kinds, and checks the errors of wrong ones.
func TestListen(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "::1", "[::1]", "localhost"} {
		groups := tcpWorldAt(host)(t, 0, make([]tensor.Stream, 2), comm.Options{})
		sum(t, groups)
		closeAll(groups)
	}
	for host, good := range map[string]bool{
		"":          true,  // all addresses
		"192.0.2.1": false, // no address of this host
		"::1::":     false,
	} {
		ln, err := comm.Listen(t.Context(), host)
		if (err == nil) != good {
			t.Errorf("listening at %q: %v", host, err)
		}
		if err == nil {
			ln.Close()
		}
	}
}
