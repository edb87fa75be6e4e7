// Package comm moves tensors between the ranks of a group, by exchanges between neighbours, as a ring needs, and by
// collectives. A Group is a Communicator of hosts; package comm/device makes one of GPUs on top of it. NewLocal joins
// ranks of one process, and Connect joins processes of one node or of several:
//
//	group, err := comm.Connect(ctx, comm.Mesh{Rank: rank, Size: size, Secret: secret, Dir: dir}, nil, comm.Options{})
//	transfer, err := group.AllReduce(view, comm.Sum) // starts after the present work of the compute stream
//	err = transfer.Sync(ctx)
//
// docs/runtime.md describes connections, docs/network.md those between nodes.
package comm

import (
	"context"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/tensor"
)

// Lock order. A goroutine that holds a mutex may take one further down, never one further up, and one of a line.
//
//	device.Group.issuing   one call at a time, from its order on the streams to its registration
//	kit.order              queueing on the compute stream; a copy engine calls it "using"
//	device.Group.events    the stream's events: read to use them, written to close the stream
//	device.Group.mu        calls in flight, cause of the end, children
//	Engine.mu              a copy engine's queues, lanes and calls
//	Group.mu               closed, children; keeps the order of calls while they are queued
//	ledger.mu              pending calls, for Waits
//	inbox.mu, peer.mu      messages in flight: of one receiving rank in process, of one connection
//	World.mu, sockets.mu   the cause of the failure, in process and by sockets; the known peers
//	roster.mu              the states of ranks
//	WaitState.mu, Alarm.mu the peer that this rank waits for; the waiters for news of others
//
// Below all of them are the mutexes of streams (tensor.HostStream, cuda.Stream) and of a GPU's exported allocations
// (cudaCopies.mu). A stream calls OnFail without its locks.
//
// A caller may hold issuing while it waits for NCCL to queue a call, or for the end of a call if 1,024 are in flight.
// It may block in the driver with issuing, kit.order, events (for reading) and Engine.mu. A failing call of a copy
// engine informs the other ranks with kit.order held, for half a second at most. Nothing else waits for a device, a
// peer or a channel with a lock held. The goroutines that end such waits do not need these locks: the watch of a device
// group takes neither issuing nor kit.order, the watch of a copy engine only tries Engine.mu, and the readers of
// sockets take none of the first five.

// Message is one view to or from one peer. Messages between two ranks in one Exchange match in order: the first sent
// arrives in the first received.
type Message struct {
	Peer int         // rank within the group
	View tensor.View // dense
}

// Op is a reduction.
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

// An Exchanger moves views between ranks that name each other. Package ring needs no more.
type Exchanger interface {
	// Exchange sends and receives all messages at once, so that no order of peers can deadlock.
	// A message to the own rank is a copy. Only the ranks that it names call it, each for its own part.
	Exchange(send, recv []Message) (Pending, error)
}

// A Communicator joins the ranks of one group.
//
// Calls are queued: they read and write data only after the work that the compute stream has at the time of the call.
// Other work must not touch the views until Pending.Wait has ordered it after the transfer.
//
// A group of the host returns from calls at once. A group of GPUs waits for no work on a device, but it may block the
// caller until NCCL has queued the call or connected two ranks, until a call ends if 1,024 are in flight, and while a
// queue of the driver is full. See "Goroutines and streams" in docs/runtime.md.
//
// Every wait ends: in data, in an error that names the peer, or in an abort. After an error
// the group is dead: all pending and later calls on it fail with the same cause.
type Communicator interface {
	// Rank returns the own number within the group, from 0.
	Rank() int
	// Size returns the number of ranks of the group.
	Size() int
	Exchanger

	// All ranks make the calls down to Barrier, in the same order. The same ranks reduce the same data to the same bits
	// each time.

	// AllReduce combines v over the ranks, in place.
	AllReduce(v tensor.View, op Op) (Pending, error)
	// AllGather fills dst, Size equal parts in rank order, with the ranks' src. src may be part Rank of dst, but must
	// not overlap other parts.
	AllGather(dst, src tensor.View) (Pending, error)
	// ReduceScatter combines the ranks' src, Size equal parts, and leaves part Rank in dst. dst may be that part of src,
	// but must not overlap other parts.
	ReduceScatter(dst, src tensor.View, op Op) (Pending, error)
	// Broadcast copies root's v to every rank.
	Broadcast(v tensor.View, root int) (Pending, error)
	// Barrier blocks the caller until every rank has called it.
	Barrier(ctx context.Context) error
	// Split makes groups of the ranks with the same colour, ordered by key, then by rank.
	// Every rank of this group calls it.
	Split(ctx context.Context, colour, key int) (Communicator, error)
	// Abort fails every pending and later call, here and on all ranks that it can reach, with that cause. Any goroutine
	// may call it.
	Abort(cause error)
	// Close leaves the group in good order. It does not wait for pending calls.
	Close() error
}

// Pending is a transfer in flight.
type Pending interface {
	// Wait makes the compute stream wait for the transfer. It returns at once, with two exceptions: copy engines block
	// the caller until the peers' hosts have made the same call, and views of the host in a group of GPUs until the
	// transfer has ended.
	Wait()
	// Sync blocks the caller until the transfer has ended, and returns its error.
	Sync(ctx context.Context) error
}

// Finish returns a function that blocks until a transfer ends, given the results of the call that begins it:
//
//	err := comm.Finish(ctx)(world.AllReduce(v, comm.Sum))
func Finish(ctx context.Context) func(Pending, error) error {
	return func(p Pending, err error) error {
		if err == nil {
			err = p.Sync(ctx)
		}
		return err
	}
}

// Gated is a transfer in flight. A kernel can await its arrival by itself, and so may start early. Transfers by copy
// engines between GPUs are gated.
type Gated interface {
	Pending
	// Gates returns the gate of each peer that the call receives from, which opens with the peer's last message; nil
	// without gates, when only Wait remains. Like Wait it may block until the peers' hosts have made the same call.
	// Wait must still be called after the kernel.
	Gates() []PeerGate
}

// PeerGate is the gate of a peer's messages.
type PeerGate struct {
	Peer int
	tensor.Gate
}

// Optional interfaces of communicators. Groups of the host and of devices implement the first two.

// DeadlineSetter can change the deadline of its transfers.
type DeadlineSetter interface {
	// SetDeadline bounds the time without progress of the transfers of later calls; negative: no bound. All ranks set
	// the same.
	SetDeadline(d time.Duration)
}

// Streamer returns the streams that its transfers run on, for traces.
type Streamer interface {
	// Streams returns the streams. A caller may wait for them while nothing is in flight.
	Streams() []tensor.Stream
}

// Hosted is a group of devices on top of a group of the same ranks' hosts.
type Hosted interface {
	// Host returns the group of the hosts. Its calls do not wait for work on the device.
	Host() *Group
}

// PeerError names the peer that a transfer failed on. When a rank dies, every other rank returns one. Rank is the peer
// in the world group; Name is "rank 2 (pid 4711 on node-a)"; Op is the waiting operation, "receive of 4096 bytes", or
// ""; Cause is one of the errors below or the error of another rank.
type PeerError = blame.PeerError

var (
	// ErrAborted is the cause of calls that failed because the group was aborted.
	ErrAborted = blame.ErrAborted
	// ErrPeerLost is the cause of a PeerError if the peer closed its connection without a goodbye.
	ErrPeerLost = blame.ErrPeerLost
	// ErrDeadline is the cause of a PeerError if a transfer made no progress within its deadline.
	ErrDeadline = blame.ErrDeadline
	// ErrPeerLeft is the cause of a PeerError if the peer closed its side in good order with a transfer pending.
	ErrPeerLeft = blame.ErrPeerLeft
	// ErrMismatch is the cause of a PeerError if sizes differ, so that the ranks do not make the same calls.
	ErrMismatch = blame.ErrMismatch
	// ErrClosed is returned by calls on a group that this rank has closed.
	ErrClosed = blame.ErrClosed
	// ErrProtocol is the cause of a PeerError if the peer broke the protocol.
	ErrProtocol = blame.ErrProtocol
)

// IsRemote reports whether the cause of err is on another rank: it came from there, or is that rank's loss or silence.
// A launcher that looks for the first failure ignores such errors if some rank reports one of its own.
func IsRemote(err error) bool { return blame.IsRemote(err) }
