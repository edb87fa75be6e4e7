package device

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/check"
	"github.com/cprun/cprun/tensor"
)

// A gpuStream is a stream of a device. Do runs its argument at once, which queues work.
type gpuStream interface {
	tensor.Stream
	Do(name string, work func() error)
	// DoDetailed is Do with the detail of its span in a trace.
	DoDetailed(name, detail string, work func() error)
	Traced() bool
	Fail(err error)
	Err() error
	Close() error
}

// collectives are the calls of NCCL between the devices of a group. They queue work on the stream that they were made
// with, and return nil when it is queued. One goroutine calls them; any may call err, abort and close.
type collectives interface {
	exchange(send, recv []comm.Message) error // none to the own rank, none empty
	allReduce(v tensor.View, op comm.Op) error
	allGather(dst, src tensor.View) error
	reduceScatter(dst, src tensor.View, op comm.Op) error
	broadcast(v tensor.View, root int) error
	// err returns an asynchronous error, or nil.
	err() error
	// abort ends all work on the device and frees all resources.
	abort()
	// close frees all resources. Nothing is under way.
	close() error
}

// A solo implements the collectives of one rank.
type solo struct {
	kit    *kit
	stream gpuStream
}

func (s solo) exchange([]comm.Message, []comm.Message) error { return nil }
func (s solo) allReduce(tensor.View, comm.Op) error          { return nil }
func (s solo) broadcast(tensor.View, int) error              { return nil }
func (s solo) err() error                                    { return nil }
func (s solo) abort()                                        {}
func (s solo) close() error                                  { return nil }

func (s solo) allGather(dst, src tensor.View) error {
	if !check.Same(dst, src) {
		s.kit.copy(s.stream, dst, src)
	}
	return nil
}

func (s solo) reduceScatter(dst, src tensor.View, _ comm.Op) error { return s.allGather(dst, src) }

// A mover carries exchanges between the devices of a group, with all messages of a call, also to the own rank. Its
// errors need not name the call.
type mover interface {
	Exchange(send, recv []comm.Message) (comm.Pending, error)
	// SetDeadline bounds the time without progress of a message; negative: no bound.
	SetDeadline(limit time.Duration)
	// Streams returns the streams that copy, for traces.
	Streams() []tensor.Stream
	// Waits returns the pending calls; see comm.Group.
	Waits() []comm.Wait
	// Abort fails all calls, and makes the device end them.
	Abort(cause error)
	Close() error
}

// A kit holds the device, which all groups of a rank share.
type kit struct {
	device    tensor.Device
	compute   gpuStream
	newStream func(name string) (gpuStream, error)
	copy      func(s gpuStream, dst, src tensor.View) // of the device, dense and of one size
	// connect joins the ranks of host; it returns when stop is closed.
	connect func(ctx context.Context, host *comm.Group, s gpuStream, stop <-chan struct{}) (collectives, error)
	// engine joins the ranks of host by their copy engines. It fails on all ranks or on none. It may be nil.
	engine func(ctx context.Context, host *comm.Group) (mover, error)

	// order guards the compute stream, which several groups may use from their own goroutines. Lock it before a group's
	// events.
	order sync.Mutex
}

// shareID sends the bytes that make returns on rank 0 to all ranks of host. If make fails, rank 0 aborts the group, so
// that the others do not wait.
func shareID(ctx context.Context, host *comm.Group, size int, make func() ([]byte, error)) ([]byte, error) {
	v := tensor.New(tensor.U8, size)
	if host.Rank() == 0 {
		id, err := make()
		if err != nil {
			host.Abort(fmt.Errorf("an id for the devices: %w", err))
			return nil, err
		}
		copy(tensor.Bytes(v), id)
	}
	if err := comm.Finish(ctx)(host.Broadcast(v, 0)); err != nil {
		return nil, fmt.Errorf("the id of the devices: %w", err)
	}
	return tensor.Bytes(v), nil
}

// Options of a Group. The zero value is usable. All ranks give the same.
type Options struct {
	// Transport selects the carrier of exchanges between devices: "copy" for the copy engines, which need all devices
	// on one node and take no processor from kernels; "nccl"; or "auto", the default, for copy engines within nodes and
	// NCCL elsewhere. Reductions always use NCCL; gathers go like exchanges, except over several nodes, which NCCL
	// does.
	Transport string
}

// The transports of Options.
const (
	TransportAuto = "auto"
	TransportNCCL = "nccl"
	TransportCopy = "copy"

	// TransportBoth is the result of Group.Transport for a group over several nodes; Options do not accept it.
	TransportBoth = "copy and nccl"
)

func (o Options) withDefaults() (Options, error) {
	switch o.Transport {
	case "":
		o.Transport = TransportAuto
	case TransportAuto, TransportNCCL, TransportCopy:
	default:
		return o, fmt.Errorf("transport %q: use auto, nccl or copy", o.Transport)
	}
	return o, nil
}

// Copy engines reach the devices of one node. If the ranks of a group are on several, they carry messages within a
// node, and the library carries those between nodes. The ranks' nodes determine the carrier, so that both ends of a
// message choose the same.

// engines are the copy engines of a group, and the ranks that they reach.
type engines struct {
	mover
	near []int // by rank of the group, the rank for the engines, or -1; nil: they reach all
}

// reach returns a group of the ranks on this rank's node, and their ranks in it by rank of host: -1 for others. If all
// are on one node, it returns host and nil.
func reach(ctx context.Context, host *comm.Group) (*comm.Group, []int, error) {
	if host.OneNode() {
		return host, nil, nil
	}
	here, err := host.Subgroup(ctx, host.Node(host.Rank()), host.Rank(), host.Compute())
	if err != nil {
		return nil, nil, err
	}
	near := make([]int, host.Size())
	n := 0
	for r := range near {
		near[r] = -1
		if host.Node(r) == host.Node(host.Rank()) {
			near[r] = n
			n++
		}
	}
	return here, near, nil
}

// acrossNodes returns an error that names two ranks of different nodes.
func acrossNodes(host *comm.Group) error {
	for r := range host.Size() {
		if host.Node(r) != host.Node(0) {
			return fmt.Errorf("transport copy: %s is on node %d and %s on node %d, and copy engines reach the "+
				"devices of one: use nccl or auto",
				host.PeerName(0), host.Node(0), host.PeerName(r), host.Node(r))
		}
	}
	return nil
}

// everywhere reports whether the engines reach all ranks of the group.
func (e *engines) everywhere() bool { return e != nil && e.near == nil }

// split separates an exchange into messages for the engines, by their ranks, and all others.
func (e *engines) split(c *exchanged) (near, far *exchanged) {
	near, far = &exchanged{own: c.own, into: c.into}, &exchanged{}
	near.send, far.out = e.part(c.send)
	near.recv, far.in = e.part(c.recv)
	return near, far
}

// part separates messages. Far messages that are empty do not move.
func (e *engines) part(ms []comm.Message) (near, far []comm.Message) {
	for _, m := range ms {
		switch {
		case e.near[m.Peer] >= 0:
			near = append(near, comm.Message{Peer: e.near[m.Peer], View: m.View})
		case m.View.Size() > 0:
			far = append(far, m)
		}
	}
	return near, far
}

// moveBoth sends messages to other nodes over the library and the rest over the engines. All ranks call the library
// first, which may wait for the peers' calls.
func (d *Group) moveBoth(f *inflight, c *exchanged) (comm.Pending, error) {
	near, far := d.copies.split(c)
	if len(far.out)+len(far.in) == 0 {
		return d.moveByEngine(f, near)
	}
	g := d.newInflight(f.name, far)
	p, err := d.issue(g, func() error { return d.connected().exchange(far.out, far.in) })
	if err != nil || len(near.send)+len(near.recv) == 0 {
		return p, err
	}
	q, err := d.moveByEngine(f, near)
	if err != nil {
		return nil, err
	}
	return bothPending{p, q}, nil
}

// A bothPending is a call in two parts.
type bothPending struct{ far, near comm.Pending }

// Wait makes the compute stream wait for both.
func (b bothPending) Wait() {
	b.far.Wait()
	b.near.Wait()
}

// Sync blocks the caller until both have ended.
func (b bothPending) Sync(ctx context.Context) error {
	if err := b.far.Sync(ctx); err != nil {
		return err
	}
	return b.near.Sync(ctx)
}
