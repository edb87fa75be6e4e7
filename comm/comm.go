// Package comm moves tensors between the ranks of a group: exchanges between neighbours for the
// ring, and collectives for everything else, behind one interface, Communicator. NewLocal joins
// ranks of one process, Connect the processes of one node or of several.
// Package comm/device joins GPUs on top of such a group.
//
// # Rooms
//
//	comm                  Communicator, Group, the collectives of the host, the constructors
//	comm/device           Group of GPUs: NCCL, and copy engines where they can
//	comm/copyengine       exchanges by the copy engines of one node's GPUs
//	comm/commtest         the suite that every Communicator passes
//	comm/internal/link    what a group stands on: Transport moves data, Roster knows who is there
//	comm/internal/local   that, in one process
//	comm/internal/wire    that, by sockets: frames, sealing, flow control, handshake, mesh, silence
//	comm/internal/shm     memory that two processes share, for the large messages of these
//	comm/internal/blame   errors, and who stopped among many that wait for each other
//	comm/internal/check   wrong arguments
//	comm/internal/pace    looking again and again
//	comm/internal/worldtest worlds of ranks for tests
//
// # Who needs whom
//
// An Exchange needs the peers that it names, in a ring two neighbours. In groups of up to 16 every
// collective needs all pairs: each part goes straight from the rank that has it to the rank that needs
// it. In larger ones a rank needs those at distances of powers of two, except for AllToAll. A world by
// sockets has the connections that this takes. See "Connections" in docs/runtime.md, and
// docs/network.md for those between nodes.
//
// # Lock order
//
// A mutex further down may be taken while one further up is held, and never the other way round.
// Of one line at most one is held at a time.
//
//	device.Group.issuing   one call at a time, from its order on the streams to its registration
//	kit.order              queueing on the compute stream; a copy engine has it as "using"
//	device.Group.events    the stream's events: read to use them, written to close the stream
//	device.Group.mu        calls in flight, cause of the end, children
//	Engine.mu              a copy engine's queues, lanes and calls
//	Group.mu               closed, children; keeps the order of calls while they are queued
//	ledger.mu              calls that are not over, for those who ask what is waited for
//	inbox.mu, peer.mu      messages on their way: of one receiving rank in process, of one connection
//	World.mu, sockets.mu   the cause of the failure, in process and by sockets; which peers there are
//	roster.mu              what ranks say of themselves
//	Standing.mu, Alarm.mu  whom this rank waits for; who is woken when another says so
//
// Below all of them are the mutexes of streams (tensor.HostStream, cuda.Stream) and of the exported
// allocations of a GPU (cudaCopies.mu), under which nothing of comm is called: a stream calls back
// (OnFail) with none of its locks held.
//
// A caller may wait with issuing held: until a call is over where 1,024 are in flight, and until NCCL
// has queued its call. It may stand in the driver with issuing, kit.order, events (for reading) and
// Engine.mu. A copy engine's call that fails tells the other ranks with kit.order held, for half a
// second at most. Nothing else waits for a device, a peer or a channel with a lock held. Those who end such waits do
// not need these locks: the watch of a device group takes neither issuing nor kit.order, that of a copy engine only
// tries Engine.mu, and the readers of sockets take none of the first five.
package comm

import (
	"context"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
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
// Pending.Wait has ordered it after the transfer.
//
// A call waits for no work on a device, but it may block the caller for a while: on a group of
// GPUs until NCCL has queued it or, the first time between two ranks, has connected them; where
// 1,024 calls are in flight, until one is over; and where a queue of the driver is full. See
// "Goroutines and streams" in docs/runtime.md. Groups of the host return at once.
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

// Gated is a transfer in flight whose arrival a kernel can await by itself, so the kernel may start early. Copy-engine
// transfers between GPUs are gated.
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

// PeerError names the peer that a transfer failed on. When a rank dies, every other rank returns one. Rank is the peer
// in the world group; Name is "rank 2 (pid 4711 on node-a)"; Op is the waiting operation, "receive of 4096 bytes", or
// ""; Cause is one of the errors below or the error of another rank.
type PeerError = blame.PeerError

var (
	// ErrAborted is the cause of calls that failed because the group was aborted.
	ErrAborted = blame.ErrAborted
	// ErrPeerLost is the cause of a PeerError whose peer closed its connection without a
	// goodbye.
	ErrPeerLost = blame.ErrPeerLost
	// ErrDeadline is the cause of a PeerError whose transfer stood still for too long.
	ErrDeadline = blame.ErrDeadline
	// ErrPeerLeft is the cause of a PeerError whose peer has closed its side in good order
	// while something was still expected of it.
	ErrPeerLeft = blame.ErrPeerLeft
	// ErrMismatch is the cause of a PeerError whose peer sends another size than is
	// received, which means that the ranks do not make the same calls.
	ErrMismatch = blame.ErrMismatch
	// ErrClosed is returned by calls on a group that this rank has closed.
	ErrClosed = blame.ErrClosed
	// ErrProtocol is the cause of a PeerError whose peer broke the protocol.
	ErrProtocol = blame.ErrProtocol
)

// IsRemote reports whether err is a victim's: its cause came from another rank, or is the
// loss or the silence of one. A launcher that looks for the rank which failed first passes
// over such errors as long as some rank reports one of its own.
func IsRemote(err error) bool { return blame.IsRemote(err) }

// What groups of devices need of the group that their hosts are in.

// ID returns the number of the group, which is the same on all its ranks and is that of no other
// group of the world. That of the world is 0.
func (g *Group) ID() uint64 { return g.id }

// WorldRank returns the number in the world of a rank of the group. PeerError.Rank is one.
func (g *Group) WorldRank(rank int) int { return g.ranks[rank] }

// Node returns the number of the node that a rank of the group is on. Ranks of one node share its
// memory and devices.
func (g *Group) Node(rank int) int {
	if g.link.Nodes == nil {
		return 0
	}
	return g.link.Nodes[g.ranks[rank]]
}

// OneNode reports whether all ranks of the group share a node.
func (g *Group) OneNode() bool {
	for r := range g.ranks {
		if g.Node(r) != g.Node(0) {
			return false
		}
	}
	return true
}

// Options returns what the group was made with, defaults filled in, and its present deadline.
func (g *Group) Options() Options {
	o := g.opts
	o.Deadline = time.Duration(g.limit.Load())
	return o
}

// Link returns the group's link, for packages inside comm that build on a group: the first failure of any of them ends
// the world.
func (g *Group) Link() link.Link { return g.link }

// After has the group's later calls come after f, which may wait for what no stream of the host
// does. An error of f fails the world.
func (g *Group) After(f func() error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closed {
		g.stream.Do("", f)
	}
}

// Subgroup splits like Split, for callers that go on with a *Group, whose calls are ordered against
// compute; nil means a private stream.
func (g *Group) Subgroup(ctx context.Context, colour, key int, compute tensor.Stream) (*Group, error) {
	return g.split(ctx, colour, key, compute)
}
