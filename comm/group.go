package comm

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
	"github.com/cprun/cprun/tensor"
)

// Options of a group. The zero value is usable.
type Options struct {
	// Deadline is the longest time without progress of a transfer, 5 minutes by default. It must be longer than the
	// ranks differ in reaching the same call. Negative: none.
	Deadline time.Duration
	// Connect bounds the time in which all ranks must connect, 1 minute by default.
	Connect time.Duration
	// Log reports accepted and refused connections. It may be nil. Several goroutines call it.
	Log func(format string, args ...any)
}

const (
	defaultDeadline = 5 * time.Minute
	defaultConnect  = time.Minute
)

func (o Options) withDefaults() Options {
	if o.Deadline == 0 {
		o.Deadline = defaultDeadline
	}
	if o.Connect <= 0 {
		o.Connect = defaultConnect
	}
	if o.Log == nil {
		o.Log = func(string, ...any) {}
	}
	return o
}

// Group is a Communicator over any transport. Its calls run one after the other on a stream
// of its own, named "comm"; the messages within a call run at once.
//
// All groups that were split from one share its transport: a failure of one fails all.
type Group struct {
	id    uint64
	rank  int
	ranks []int // world rank of each rank of the group
	link  link.Link
	opts  Options      // except for the deadline
	limit atomic.Int64 // a time.Duration: the deadline

	compute tensor.Stream
	private *tensor.HostStream // the compute stream, if the group made it itself
	stream  *tensor.HostStream
	failed  chan struct{} // closed when stream is poisoned

	mu       sync.Mutex
	closed   bool     // guarded by mu
	splits   uint64   // guarded by mu; calls of Split so far
	children []*Group // guarded by mu; the groups split from this one

	ledger ledger // of pending calls

	// Used on the stream's goroutine alone.
	sendSeq, recvSeq []uint64 // per rank of the group, the number of the next message
	xfers            []link.Transfer
	round            *link.Round
	timer            *time.Timer
	scratch          []uint64 // words, so that any element type is aligned
}

var (
	_ Communicator   = (*Group)(nil)
	_ DeadlineSetter = (*Group)(nil)
	_ Streamer       = (*Group)(nil)
)

// worldID is the group id of the group that a constructor makes.
const worldID = 0

// NewWorld returns the group of all ranks that a link joins, as this rank. The constructors of all transports, in
// packages inside comm, call it. A nil compute stream: a private one.
func NewWorld(l link.Link, rank int, compute tensor.Stream, opts Options) *Group {
	ranks := make([]int, l.Ranks())
	for r := range ranks {
		ranks[r] = r
	}
	return newGroup(l, worldID, ranks, rank, compute, opts.withDefaults())
}

// newGroup starts a group over l. A nil compute stream means one of its own.
func newGroup(l link.Link, id uint64, ranks []int, rank int, compute tensor.Stream, opts Options) *Group {
	g := &Group{
		id: id, rank: rank, ranks: ranks, link: l, opts: opts, compute: compute,
		stream:  tensor.NewHostStream("comm"),
		failed:  make(chan struct{}),
		sendSeq: make([]uint64, len(ranks)), recvSeq: make([]uint64, len(ranks)),
		round: link.NewRound(),
		timer: time.NewTimer(time.Hour),
	}
	g.timer.Stop()
	g.limit.Store(int64(opts.Deadline))
	if compute == nil {
		g.private = tensor.NewHostStream("compute")
		g.compute = g.private
	}
	// A poisoned stream skips its calls, so they cannot inform the other ranks. The error may come from the compute
	// stream.
	g.stream.OnFail(func(err error) {
		g.keepWaits()
		l.Fail(err)
		l.AwaitNotified()
		close(g.failed)
	})
	return g
}

// Rank returns this rank within the group.
func (g *Group) Rank() int { return g.rank }

// Size returns the number of ranks of the group.
func (g *Group) Size() int { return len(g.ranks) }

// Stream returns the stream that transfers run on, for traces and for the time that it waits.
func (g *Group) Stream() *tensor.HostStream { return g.stream }

// Streams returns that stream.
func (g *Group) Streams() []tensor.Stream { return []tensor.Stream{g.stream} }

// Compute returns the stream that calls are ordered against.
func (g *Group) Compute() tensor.Stream { return g.compute }

// SetDeadline changes the deadline of later calls; negative: none. All ranks set the same. Ranks that wait for each
// other's disks need a longer one than ranks that compute.
func (g *Group) SetDeadline(d time.Duration) {
	g.stream.Do("", func() error { g.limit.Store(int64(d)); return nil })
}

// PeerName returns how errors name a rank of the group.
func (g *Group) PeerName(rank int) string { return g.link.PeerName(g.ranks[rank]) }

// Err returns the cause that ended the group, or nil.
func (g *Group) Err() error { return g.link.Err() }

// Abort fails every pending and later call on all groups of the world, here and on the other
// ranks. It returns when the other ranks are informed, or after half a second.
func (g *Group) Abort(cause error) {
	g.link.Fail(blame.OwnForm(cause))
	g.link.AwaitNotified()
}

// Close ends the group and those split from it. Close of a constructor's group also informs the other ranks that this
// one leaves in good order. Pending calls fail.
func (g *Group) Close() error {
	g.mu.Lock()
	if g.closed {
		g.mu.Unlock()
		return nil
	}
	g.closed = true
	children := g.children
	g.children = nil
	g.mu.Unlock()
	for _, c := range children {
		c.Close()
	}
	var err error
	if g.id == worldID {
		err = g.link.Close()
	}
	// Closing a stream waits for its queue, which may wait for the compute stream. The goroutine ends with the queue:
	// its calls fail now, or run to their end.
	go func() {
		g.stream.Close()
		g.timer.Stop()
		g.link.Forget(g.id)
		if g.private != nil {
			g.private.Close()
		}
	}()
	return err
}

// adopt makes c end with g.
func (g *Group) adopt(c *Group) (*Group, error) {
	g.mu.Lock()
	closed := g.closed
	if !closed {
		g.children = append(g.children, c)
	}
	g.mu.Unlock()
	if closed {
		c.Close()
		return nil, g.fault("split", ErrClosed)
	}
	return c, nil
}

// enqueue orders f after the compute stream's present work and after the group's earlier
// calls. Without a compute stream to wait for, ordered is false.
func (g *Group) enqueue(name, detail string, ordered bool, f func() error) (Pending, error) {
	if err := g.cause(); err != nil {
		return nil, g.fault(name, err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, g.fault(name, ErrClosed)
	}
	p := &pending{g: g, name: name, done: make(chan struct{})}
	if ordered {
		p.label = g.compute.Labelled()
		g.stream.Label(p.label)
		g.stream.Wait(g.compute.Record())
	}
	g.ledger.add(p)
	g.stream.DoDetailed(name, detail, func() error {
		p.err = f()
		if p.err != nil {
			p.err = g.fault(name, p.err)
			g.keepWaits()
		}
		g.ledger.remove()
		close(p.done)
		return p.err
	})
	p.event = g.stream.Record()
	return p, nil
}

// cause returns why the world has failed, or nil. It informs the other ranks first, since the caller may exit, and a
// connection that ends without a goodbye counts as a death.
func (g *Group) cause() error {
	err := g.link.Err()
	if err != nil {
		g.link.AwaitNotified()
	}
	return err
}

func (g *Group) fault(call string, err error) error {
	return blame.InCall(call, g.rank, len(g.ranks), err)
}

// A pending is a call in flight.
type pending struct {
	g     *Group
	name  string
	event tensor.Event
	done  chan struct{} // closed after the call; never if the stream skipped it
	err   error         // read after done
	entry
}

// Wait makes the compute stream wait for the transfer.
func (p *pending) Wait() { p.g.compute.Wait(p.event) }

// Sync blocks until the transfer has ended.
func (p *pending) Sync(ctx context.Context) error {
	p.callers.Add(1)
	defer p.callers.Add(-1)
	select {
	case <-p.done:
		return p.err
	case <-p.g.failed:
	case <-ctx.Done():
		return p.g.fault(p.name, context.Cause(ctx))
	}
	select {
	case <-p.done: // it had ended before the stream failed
		return p.err
	default:
		return p.g.fault(p.name, p.g.link.Err())
	}
}

// Methods for groups of devices on top of g.

// ID returns the number of the group in the world, the same on all its ranks; 0: all ranks.
func (g *Group) ID() uint64 { return g.id }

// WorldRank returns the world rank of a rank of the group, as in PeerError.Rank.
func (g *Group) WorldRank(rank int) int { return g.ranks[rank] }

// Node returns the number of a rank's node. Ranks of one node share its memory and devices.
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

// Options returns the group's options with defaults filled in, and its present deadline.
func (g *Group) Options() Options {
	o := g.opts
	o.Deadline = time.Duration(g.limit.Load())
	return o
}

// Link returns the group's link, for packages inside comm that build on a group: the first failure of any of them ends
// the world.
func (g *Group) Link() link.Link { return g.link }

// After queues f before the group's later calls. f may wait for work on a device. An error of f fails the world.
func (g *Group) After(f func() error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closed {
		g.stream.Do("", f)
	}
}
