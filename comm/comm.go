// Package comm moves tensors between the ranks of a group: point-to-point exchanges for
// the ring and collectives for everything else, over memory of one process, Unix sockets
// between the processes of a node, or TCP between nodes, behind one interface.
package comm

import (
	"context"
	"errors"
	"fmt"

	"github.com/cprun/cprun/internal/tensor"
)

// View is a strided window onto device memory; communicators take dense ones.
type View = tensor.View

// Message is one view to or from one peer. Of messages between the same two ranks in one
// Exchange, the first sent meets the first received.
type Message struct {
	Peer int // rank within the group
	View View
}

// Op is how a reduction combines elements.
type Op int

// The reductions.
const (
	Sum Op = iota
	Max
	Min
)

func (o Op) String() string { return [...]string{"sum", "max", "min"}[o] }

// A Communicator joins the ranks of one group. All ranks make the same collective calls in
// the same order; an Exchange is called by the ranks that it names, each for its own part.
//
// Calls are queued: data is read and written only after the work that the compute stream
// held at the time of the call, and the call returns at once. Views passed in must not be
// touched by other work until Pending.Wait has ordered it behind the transfer. Results are
// the same, bit for bit, each time that the same ranks reduce the same data.
//
// Every wait ends: in data, in an error that names the peer, or in an abort. After an error
// the group is dead: all pending and later calls on it fail with the same cause.
type Communicator interface {
	Rank() int
	Size() int
	// Exchange sends and receives, as one group, so that no order of peers can deadlock.
	// A message to the own rank is a copy.
	Exchange(send, recv []Message) (Pending, error)
	// AllReduce combines v over the ranks, in place.
	AllReduce(v View, op Op) (Pending, error)
	// AllGather fills dst, Size equal parts in rank order, with the ranks' src, which may
	// be part Rank of dst and no other memory of it.
	AllGather(dst, src View) (Pending, error)
	// ReduceScatter combines the ranks' src, Size equal parts, and leaves part Rank in dst,
	// which may be that part of src and no other memory of it.
	ReduceScatter(dst, src View, op Op) (Pending, error)
	// AllToAll sends part p of src to rank p, and fills part p of dst from rank p.
	AllToAll(dst, src View) (Pending, error)
	// Broadcast copies root's v to every rank.
	Broadcast(v View, root int) (Pending, error)
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
	// Wait makes the compute stream wait for the transfer; the caller goes on.
	Wait()
	// Sync blocks the caller until the transfer has ended, and returns its error.
	Sync(ctx context.Context) error
}

// ErrAborted is the cause of calls that failed because the group was aborted.
var ErrAborted = errors.New("group aborted")

// PeerError says which peer a transfer failed on. It is what every other rank reports when
// one rank dies.
type PeerError struct {
	Rank  int    // of the peer, in the world group
	Name  string // "rank 2 (pid 4711 on node-a)"
	Op    string // what was waiting: "receive of 4096 bytes", or "" when nothing was
	Cause error
}

func (e *PeerError) Error() string {
	if e.Op == "" {
		return fmt.Sprintf("%s: %v", e.Name, e.Cause)
	}
	return fmt.Sprintf("%s: %s: %v", e.Name, e.Op, e.Cause)
}

func (e *PeerError) Unwrap() error { return e.Cause }

// ErrPeerLost is the cause of a PeerError whose peer closed its connection without a goodbye.
var ErrPeerLost = errors.New("connection lost")
