package ring_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// gatedTransfers gives the transfers of a communicator gates, which open when all has arrived.
type gatedTransfers struct {
	comm.Exchanger
	seen *gatesSeen
}

// gatesSeen records the use of gates: words that are counted up, by the address for kernels.
type gatesSeen struct {
	words         []*atomic.Uint64
	blocks, waits int  // calls with gates, and waits for a transfer after Gates
	out           bool // a wait came before the call
}

type gatedTransfer struct {
	comm.Pending
	peers []int
	seen  *gatesSeen
	gated bool
}

func (g gatedTransfers) Exchange(send, recv []comm.Message) (comm.Pending, error) {
	p, err := g.Exchanger.Exchange(send, recv)
	if err != nil {
		return nil, err
	}
	t := &gatedTransfer{Pending: p, seen: g.seen}
	for _, m := range recv {
		t.peers = append(t.peers, m.Peer)
	}
	return t, nil
}

func (t *gatedTransfer) Gates() (gates []comm.PeerGate) {
	t.gated = true
	for _, peer := range t.peers {
		word := new(atomic.Uint64)
		t.seen.words = append(t.seen.words, word)
		go func() {
			if t.Sync(context.Background()) == nil {
				word.Store(7)
			}
		}()
		gates = append(gates, comm.PeerGate{Peer: peer,
			Gate: tensor.Gate{Word: uint64(len(t.seen.words) - 1), Count: 7}})
	}
	return gates
}

func (t *gatedTransfer) Wait() {
	if t.gated {
		t.seen.waits++
		t.seen.out = t.seen.out || t.seen.waits > t.seen.blocks
	}
	t.Pending.Wait()
}

// A waiter is a kernel that waits for keys in the calls that it queues.
type waiter struct {
	attention.Kernel
	stream *tensor.HostStream
	seen   *gatesSeen
}

func (w waiter) WaitsForKeys() bool { return true }

func (w waiter) Forward(o tensor.View, acc attention.Partial, q tensor.View,
	p attention.Softmax) (attention.ForwardPass, error) {
	pass, err := w.Kernel.Forward(o, acc, q, p)
	return waitingForward{pass, w}, err
}

func (w waiter) Backward(dq, do, q tensor.View, s attention.Saved, p attention.Softmax) (attention.BackwardPass,
	error) {
	pass, err := w.Kernel.Backward(dq, do, q, s, p)
	return waitingBackward{pass, w}, err
}

// await queues a wait for the gates of a block before the call that reads its rows.
func (w waiter) await(b attention.Block) error {
	if len(b.Gates) == 0 {
		return nil
	}
	w.seen.blocks++
	for _, g := range b.Gates {
		word := w.seen.words[g.Word]
		w.stream.Do("wait", func() error {
			for word.Load() < g.Count {
				runtime.Gosched()
			}
			return nil
		})
	}
	if len(b.Tiles) == 0 {
		return errors.New("a call without tiles has gates")
	}
	return nil
}

type waitingForward struct {
	attention.ForwardPass
	w waiter
}

func (f waitingForward) Block(b attention.Block) error {
	return errors.Join(f.w.await(b), f.ForwardPass.Block(b))
}

type waitingBackward struct {
	attention.BackwardPass
	w waiter
}

func (f waitingBackward) Block(b attention.GradBlock) error {
	return errors.Join(f.w.await(b.Block), f.BackwardPass.Block(b))
}

// TestCallsBeginBeforeRows checks that a call is queued before the stream waits for its rows if its kernel waits for
// them, with equal results.
func TestCallsBeginBeforeRows(t *testing.T) {
	for _, heads := range []int{0, 1} {
		const kvHeads = 2
		p := masks[0].problem(t, rand.New(rand.NewPCG(1, 2)), [2]int{4, kvHeads})
		p.shape.Size, p.shape.Layout, p.gather = 4, partition.Zigzag{}, heads
		const variant = "allgather before"
		want := run(t, p, variant, reference)
		seen := make([]*gatesSeen, p.shape.Size)
		got := runWith(t, p, variant, reference, func(rank int, r *ring.Ring) {
			seen[rank] = &gatesSeen{}
			r.Comm = gatedTransfers{r.Comm, seen[rank]}
			r.Kernel = waiter{r.Kernel, r.Stream.(*tensor.HostStream), seen[rank]}
		})
		compare(t, "gates", got, want, 0)
		for rank, s := range seen {
			if calls := 2 * 2 * max(1, kvHeads*heads); s.blocks != calls || s.waits != calls || s.out {
				t.Errorf("rank %d, %d heads at a time: %d calls have gates, and %d waits come behind them; one before: %t", rank, heads, s.blocks, s.waits, s.out)
			}
		}
	}
}
