package comm_test

import (
	"context"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/worldtest"
	"github.com/cprun/cprun/tensor"
)

// pair joins two ranks over TCP at an address of this host.
func pair(t testing.TB, host string) []*comm.Group {
	t.Helper()
	var lns [2]net.Listener
	var addrs []string
	for r := range lns {
		ln, err := comm.Listen(t.Context(), host)
		if err != nil {
			t.Fatal(err)
		}
		lns[r], addrs = ln, append(addrs, ln.Addr().String())
	}
	key := worldtest.Secret()
	return worldtest.Join(t, 2, func(r int) (*comm.Group, error) {
		m := comm.Mesh{Listener: lns[r], Addrs: addrs, Rank: r, Size: 2, Secret: key}
		return comm.Connect(context.Background(), m, nil, comm.Options{})
	})
}

// TestPiecesComeTogether moves many messages with sizes around that of a piece at once, in both directions. Each
// arrives whole, in its place.
func TestPiecesComeTogether(t *testing.T) {
	const piece = 256 << 10
	sizes := []int{0, 1, 16 << 10, 16<<10 + 1, piece - 1, piece, piece + 1, 3*piece - 7, 65*piece + 11}
	groups := pair(t, "127.0.0.1")
	defer closeAll(groups)
	var wg sync.WaitGroup
	for r, g := range groups {
		wg.Go(func() {
			var send, recv []comm.Message
			var want [][]byte
			for i, n := range sizes {
				send = append(send, comm.Message{Peer: 1 - r, View: tensor.FromSlice(noise(n, r, i), n)})
				recv = append(recv, comm.Message{Peer: 1 - r, View: tensor.New(tensor.U8, n)})
				want = append(want, noise(n, 1-r, i))
			}
			p, err := g.Exchange(send, recv)
			if err == nil {
				err = p.Sync(t.Context())
			}
			if err != nil {
				t.Error(err)
				return
			}
			for i, m := range recv {
				if !slices.Equal(tensor.Data[uint8](m.View), want[i]) {
					t.Errorf("rank %d: a message of %d bytes came as another", r, sizes[i])
				}
			}
		})
	}
	wg.Wait()
}

// noise returns n bytes that differ from those of all other messages.
func noise(n, rank, message int) []byte {
	b := make([]byte, n)
	dice := rand.NewChaCha8([32]byte{byte(rank), byte(message)})
	dice.Read(b)
	return b
}

// TestListen listens at addresses of both kinds, and checks the errors of wrong ones.
func TestListen(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "::1", "[::1]", "localhost", ""} {
		if host == "" { // a listener at all addresses is not one that can be dialled
			ln, err := comm.Listen(t.Context(), host)
			if err != nil {
				t.Error(err)
				continue
			}
			ln.Close()
			continue
		}
		groups := pair(t, host)
		sum(t, groups)
		closeAll(groups)
	}
	for _, host := range []string{"192.0.2.1", "::1::"} { // no address of this host, and none at all
		if ln, err := comm.Listen(t.Context(), host); err == nil {
			t.Errorf("listens at %v, which is %q", ln.Addr(), host)
			ln.Close()
		}
	}
}
