package comm

import (
	"context"
	"time"

	"github.com/cprun/cprun/tensor"
)

// Message is one view to or from one peer. Of messages between the same two ranks in one
// Exchange, the first sent meets the first received.
type Message struct {
	Peer int         // rank within the group
	View tensor.View // dense
}

// Op is how a reduction combines elements.
type Op int

// The reductions.
const (
	Sum Op = iota
	Max
	Min
)

// Valid reports whether o is one of the reductions above.
func (o Op) Valid() bool { return o >= Sum && o <= Min }

// String returns "sum", "max" or "min".
func (o Op) String() string { return [...]string{"sum", "max", "min"}[o] }

// An Exchanger moves views between ranks that both name the other. It is all that ring needs.
type Exchanger interface {
	// Exchange sends and receives, as one group, so that no order of peers can deadlock.
	// A message to the own rank is a copy. It is called by the ranks that it names, each for
	// its own part.
	Exchange(send, recv []Message) (Pending, error)
}

// A Communicator joins the ranks of one group.
//
// Calls are queued: data is read and written only after the work that the compute stream
// held at the time of the call. Views passed in must not be touched by other work until
// Pending.Wait has ordered it behind the transfer.
//
// A call waits for no work on a device, but it may block the caller for a while: on a group of
// GPUs until NCCL has queued it or, the first time between two ranks, has connected them; where
// 1,024 calls are in flight, until one is over; and where a queue of the driver is full. See
// "Goroutines and streams" in docs/architecture.md. Groups of the host return at once.
//
// Every wait ends: in data, in an error that names the peer, or in an abort. After an error
// the group is dead: all pending and later calls on it fail with the same cause.
type Communicator interface {
	// Rank returns the own number within the group, from 0.
	Rank() int
	// Size returns the number of ranks of the group.
	Size() int
	Exchanger

	// The calls down to Barrier are made by all ranks of the group, in the same order. Results are the same, bit
	// for bit, each time that the same ranks reduce the same data.

	// AllReduce combines v over the ranks, in place.
	AllReduce(v tensor.View, op Op) (Pending, error)
	// AllGather fills dst, Size equal parts in rank order, with the ranks' src, which may
	// be part Rank of dst and no other memory of it.
	AllGather(dst, src tensor.View) (Pending, error)
	// ReduceScatter combines the ranks' src, Size equal parts, and leaves part Rank in dst,
	// which may be that part of src and no other memory of it.
	ReduceScatter(dst, src tensor.View, op Op) (Pending, error)
	// AllToAll sends part p of src to rank p, and fills part p of dst from rank p.
	AllToAll(dst, src tensor.View) (Pending, error)
	// Broadcast copies root's v to every rank.
	Broadcast(v tensor.View, root int) (Pending, error)
	// Barrier blocks the caller until every rank has called it.
	Barrier(ctx context.Context) error
	// Split makes groups of the ranks with the same colour, ordered by key, then by rank.
	// Every rank of this group calls it.
	Split(ctx context.Context, colour, key int) (Communicator, error)
	// Abort fails every pending and later call here and, as far as they can be reached, on
	// the other ranks, with that cause. Any goroutine may call it.
	Abort(cause error)
	// Close ends an orderly use of the group. It does not wait for pending calls.
	Close() error
}

// Pending is a transfer in flight.
type Pending interface {
	// Wait makes the compute stream wait for the transfer. The caller goes on, with two
	// exceptions: over copy engines it stands until the peers' hosts have made the same call,
	// and on views of the host in a group of GPUs until the transfer has ended.
	Wait()
	// Sync blocks the caller until the transfer has ended, and returns its error.
	Sync(ctx context.Context) error
}

// Gated is a transfer in flight whose arrival a kernel can wait for by itself. So the kernel may begin before it, and
// do what it can meanwhile. Transfers by copy engines between GPUs are.
type Gated interface {
	Pending
	// Gates returns the gate of each peer that the call receives from, which opens when all of that peer's messages are
	// there; nil where there are none, and the call is only to be waited for. Like Wait it may stand until the peers'
	// hosts have made the same call. Wait still is to be called, behind the kernel.
	Gates() []PeerGate
}

// PeerGate is the gate of what comes from a peer.
type PeerGate struct {
	Peer int
	tensor.Gate
}

// What some communicators do beyond the interface. A caller that needs it asks for it by these
// names.

// DeadlineSetter can change how long its transfers may stand still. Groups of the host and of
// devices can.
type DeadlineSetter interface {
	// SetDeadline sets how long a transfer may stand still, for calls made after it. Negative
	// means for ever. All ranks set the same.
	SetDeadline(d time.Duration)
}

// Streamer tells which streams its transfers run on, for traces. Groups of the host and of
// devices do.
type Streamer interface {
	// Streams returns the streams. They may be waited for while nothing is in flight.
	Streams() []tensor.Stream
}

// Hosted is a group of devices, with the group of the same ranks that moves views of the host.
type Hosted interface {
	// Host returns that group. Its calls wait for nothing that is queued on the device.
	Host() *Group
}
