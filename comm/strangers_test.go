package comm_test

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/worldtest"
)

// TestStrangers connects strangers before the real peers: none disturbs the mesh, and each is logged.
func TestStrangers(t *testing.T) {
	t.Parallel()
	lns, addrs := listeners(t, 2)
	key, log := worldtest.Secret(), &logs{}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	groups := make([]*comm.Group, 2)
	var wg sync.WaitGroup
	wg.Go(func() {
		var err error
		groups[0], err = comm.Connect(
			ctx,
			comm.Mesh{Listener: lns[0], Addrs: addrs, Rank: 0, Size: 2, Secret: key},
			nil,
			comm.Options{Log: log.add},
		)
		if err != nil {
			t.Error(err)
		}
	})
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
	wg.Go(func() {
		var err error
		groups[1], err = comm.Connect(
			ctx,
			comm.Mesh{Listener: lns[1], Addrs: addrs, Rank: 1, Size: 2, Secret: key},
			nil,
			comm.Options{},
		)
		if err != nil {
			t.Error(err)
		}
	})
	wg.Wait()
	defer closeAll(groups)
	if t.Failed() {
		return
	}
	sum(t, groups)
	for _, want := range []string{"does not speak this protocol", "says rank 4294967295", "EOF", "secret", "another run", "world of 3 ranks"} {
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

// TestStrangersHoldNothingUp has more strangers connect than are let in at once, and say nothing. A
// world comes together all the same, and in a large one ranks find each other later. The
// log stays short.
func TestStrangersHoldNothingUp(t *testing.T) {
	const n, crowd = 9, 1000
	lns, addrs := listeners(t, n)
	halfOpen(t, addrs[:1], crowd)
	key, log := worldtest.Secret(), &logs{}
	groups := worldtest.Join(t, n, func(r int) (*comm.Group, error) {
		m := comm.Mesh{Listener: lns[r], Addrs: addrs, Rank: r, Size: n, Secret: key}
		return comm.Connect(t.Context(), m.Few(1), nil, comm.Options{Connect: 5 * time.Second, Log: log.add})
	})
	defer closeAll(groups)
	halfOpen(t, addrs, crowd/10)
	everyone(t, groups, func(g *comm.Group) error { return swap(t.Context(), g, (g.Rank()+3)%n, (g.Rank()+n-3)%n) })
	if refused := strings.Count(log.String(), "refused a connection"); refused == 0 || refused > 20*n {
		t.Errorf("%d lines about strangers, want some, and 20 of a rank at most", refused)
	}
}
