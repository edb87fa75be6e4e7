package wire

import (
	"io"
	"math/bits"
	"net"
	"testing"

	"github.com/cprun/cprun/comm/internal/link"
)

// step returns the rank to which a rank of n, connected only to its neighbours, passes a call; -1: none. Its output is
// dropped.
func step(t *testing.T, rank, n int, h header) int {
	t.Helper()
	s := newSockets(rank, n, "", 1)
	for _, r := range s.near {
		s.peer(r).met.Store(true)
	}
	s.pass(h)
	next := -1
	for _, r := range s.near {
		if p := s.peer(r); len(p.ctrl) > 0 {
			if next >= 0 || p.ctrl[0] != h {
				t.Fatalf("rank %d passes %+v on to %d and %d", rank, h, next, r)
			}
			next = r
		}
	}
	return next
}

// TestCallsArrive follows calls both ways, in worlds of many sizes: they arrive within log2 N steps, and
// no rank is on both ways.
func TestCallsArrive(t *testing.T) {
	for _, n := range []int{3, 6, 9, 17, 32, 61} {
		for to := 1; to < n; to++ {
			seen := map[int]bool{}
			for way := uint64(callUp); way <= callDown; way++ {
				h := header{kind: frameCall, id: link.MsgID{Group: 0, Seq: uint64(to)}, size: way}
				at, steps := 0, 0
				for at != to {
					if at = step(t, at, n, h); at < 0 {
						t.Fatalf("a call from 0 to %d of %d is lost", to, n)
					}
					if at != to && seen[at] {
						t.Errorf("both calls from 0 to %d of %d go by rank %d", to, n, at)
					}
					seen[at] = true
					steps++
				}
				if most := bits.Len(uint(n - 1)); steps > most {
					t.Errorf("a call from 0 to %d of %d takes %d steps, above %d", to, n, steps, most)
				}
			}
		}
	}
}

// TestCallsAreBounded passes on more calls than the receiver's stalled connection takes.
func TestCallsAreBounded(t *testing.T) {
	s := newSockets(0, 9, "", 1)
	here, there := net.Pipe()
	s.peer(4).reserve()
	s.attach(plainChannel(here, 4, ""))
	for range 2 * maxCalls {
		if err := s.onCall(header{kind: frameCall, id: link.MsgID{Group: 1, Seq: 5}, size: callUp}); err != nil {
			t.Fatal(err)
		}
	}
	p := s.peer(4)
	p.mu.Lock()
	if n := len(p.ctrl); n > maxCalls {
		t.Errorf("%d calls wait", n)
	}
	p.mu.Unlock()
	go io.Copy(io.Discard, there)
	s.Close()
	there.Close()
}
