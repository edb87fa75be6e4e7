// Package device joins GPUs into a Group, a comm.Communicator on top of the group of their hosts. Exchanges use copy
// engines (package copyengine) within a node and NCCL elsewhere; collectives use NCCL. New makes a Group:
//
//	group, err := device.New(ctx, host, stream, device.Options{})
//	transfer, err := group.AllReduce(view, comm.Sum)
package device

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/check"
	"github.com/cprun/cprun/tensor"
)

// Group is a comm.Communicator of ranks with a device each. Views of the device move between the devices, views of the
// host over the host's group. The host's group also carries failures, and names the ranks to blame.
//
// The group queues work on a stream of its own after an event of the compute stream. One goroutine watches the calls in
// flight. If the host's group fails, a transfer makes no progress within the deadline, or the library reports an error,
// it ends all work on the device and poisons both streams with the cause. So no wait lasts for ever.
//
// If two groups of one device have calls in flight at once, their kernels wait for other devices and must fit on the
// device together: see maxCTAs. All ranks should make the calls of all groups in the same order.
//
// Three things differ from a comm.Group. Max and Min of floats may drop a NaN of some ranks. NCCL does not compare
// sizes of messages, so that a mismatch ends at the deadline. The first message between two ranks connects them, and
// blocks the call until then. Wait for a call on views of the host blocks the caller.
type Group struct {
	host   *comm.Group
	kit    *kit
	opts   Options
	stream gpuStream
	copies *engines // nil: exchanges use the library
	rules  check.Rules
	limit  atomic.Int64

	issuing sync.Mutex   // one call at a time
	events  sync.RWMutex // read to use the stream's events, locked to close the stream
	shut    bool         // guarded by events; the stream is closed

	mu       sync.Mutex
	lib      collectives // guarded by mu; nil until it is connected
	inflight []*inflight // guarded by mu; oldest first
	calls    uint64      // guarded by mu; so far
	cause    error       // guarded by mu; of the group's end
	ended    []comm.Wait // guarded by mu; the calls in flight then
	closed   bool        // guarded by mu
	children []*Group    // guarded by mu

	life   context.Context // done when cause is set
	die    context.CancelCauseFunc
	wake   chan struct{} // something is in flight
	quit   chan struct{} // closed by Close
	over   chan struct{} // closed when the watch has ended
	ending sync.WaitGroup
}

var (
	_ comm.Communicator   = (*Group)(nil)
	_ comm.DeadlineSetter = (*Group)(nil)
	_ comm.Streamer       = (*Group)(nil)
	_ comm.Hosted         = (*Group)(nil)
)

// newGroup joins the devices of host's ranks. It takes over host, also if it fails. If copy engines reach all ranks and
// late is set, it leaves it to the first call of the library to connect it.
func newGroup(ctx context.Context, host *comm.Group, kit *kit, opts Options, late bool) (*Group, error) {
	d := &Group{
		host: host, kit: kit, opts: opts,
		wake: make(chan struct{}, 1), quit: make(chan struct{}), over: make(chan struct{}),
	}
	d.life, d.die = context.WithCancelCause(context.Background())
	d.rules = check.Rules{Rank: d.Rank(), Size: d.Size(), Memory: d.onDevice}
	d.limit.Store(int64(host.Options().Deadline))
	err := d.connectEngines(ctx) // fails on all ranks together
	if err == nil {
		if err = d.connect(ctx, late); err != nil {
			host.Abort(d.fault("connect devices", err)) // the others may wait in the same call
		}
	}
	if err != nil {
		d.die(err)
		if d.copies != nil {
			d.copies.Abort(err)
			d.log(d.copies.Close())
		}
		if d.stream != nil {
			_ = d.stream.Close()
		}
		host.Close()
		return nil, d.fault("connect devices", err)
	}
	go d.watch() // until Close, or a failure
	return d, nil
}

func (d *Group) connect(ctx context.Context, late bool) (err error) {
	if d.stream, err = d.kit.newStream("comm"); err != nil {
		return err
	}
	if d.Size() == 1 {
		d.lib = solo{d.kit, d.stream}
	} else if !late || !d.copies.everywhere() {
		err = d.library(ctx)
	}
	return err
}

// library connects the library, unless it is connected. Its buffers take some 200 MiB of the device, so a group without
// reductions never does. All ranks make the first call, as part of a collective.
func (d *Group) library(ctx context.Context) error {
	if d.connected() != nil {
		return nil
	}
	if limit := time.Duration(d.limit.Load()); limit > 0 { // the watch sees only calls
		var end context.CancelFunc
		ctx, end = context.WithTimeoutCause(ctx, limit, blame.Deadline(limit))
		defer end()
	}
	lib, err := d.kit.connect(ctx, d.host, d.stream, d.host.Link().Failed())
	if err != nil {
		if errors.Is(err, comm.ErrAborted) {
			err = cmp.Or(d.host.Link().Err(), err) // the rank that ended it
		}
		return err
	}
	d.mu.Lock()
	cause := d.cause
	if cause == nil {
		d.lib = lib
	}
	d.mu.Unlock()
	if cause != nil { // meanwhile the group has ended without this library
		lib.abort()
	}
	return cause
}

// connected returns the library, or nil.
func (d *Group) connected() collectives {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lib
}

// connectEngines fails on all ranks or on none.
func (d *Group) connectEngines(ctx context.Context) (err error) {
	if d.opts, err = d.opts.withDefaults(); err != nil {
		return err
	}
	if d.Size() == 1 || d.opts.Transport == TransportNCCL {
		return nil
	}
	if d.kit.engine == nil {
		if d.opts.Transport == TransportCopy {
			return fmt.Errorf("transport copy: %v has no copy engines", d.kit.device)
		}
		return nil
	}
	if d.opts.Transport == TransportCopy {
		if err := acrossNodes(d.host); err != nil {
			return err
		}
	}
	here, near, err := reach(ctx, d.host)
	if err != nil || here.Size() == 1 {
		return err // a rank alone on its node needs no engine
	}
	m, err := d.kit.engine(ctx, here)
	if err == nil {
		d.copies = &engines{m, near}
	} else if d.opts.Transport == TransportAuto && d.host.Err() == nil {
		d.host.Options().Log("rank %d: exchanges go over NCCL: %v", d.Rank(), err)
		return nil
	}
	return err
}

// Rank returns this rank within the group.
func (d *Group) Rank() int { return d.host.Rank() }

// Size returns the number of ranks of the group.
func (d *Group) Size() int { return d.host.Size() }

// Host returns the group of the hosts. Its calls do not wait for work on the device.
func (d *Group) Host() *comm.Group { return d.host }

// Transport returns "nccl", "copy", or "copy and nccl" if the ranks are on several nodes and copy engines carry
// messages within this one.
func (d *Group) Transport() string {
	switch {
	case d.copies.everywhere():
		return TransportCopy
	case d.copies != nil:
		return TransportBoth
	}
	return TransportNCCL
}

// SetDeadline changes the deadline of later calls; see comm.Group.SetDeadline.
func (d *Group) SetDeadline(limit time.Duration) {
	d.limit.Store(int64(limit))
	d.host.SetDeadline(limit)
	if d.copies != nil {
		d.copies.SetDeadline(limit)
	}
}

// Streams returns the group's streams: first that of collectives and of exchanges over NCCL, then the copy engines'.
func (d *Group) Streams() []tensor.Stream {
	all := []tensor.Stream{d.stream}
	if d.copies != nil {
		all = append(all, d.copies.Streams()...)
	}
	return all
}

func (d *Group) fault(call string, err error) error {
	return blame.InCall(call, d.Rank(), d.Size(), err)
}

// Err returns the cause that ended the group, or nil.
func (d *Group) Err() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cause == nil {
		return d.host.Err()
	}
	return d.cause
}

// Barrier blocks the caller until every rank has called it. It involves no stream.
func (d *Group) Barrier(ctx context.Context) error { return d.host.Barrier(ctx) }

// Split makes groups of the ranks with the same colour, ordered by key, then by rank. Where copy engines reach all
// ranks of a new group, it connects NCCL only at its first reduction or broadcast.
func (d *Group) Split(ctx context.Context, colour, key int) (comm.Communicator, error) {
	host, err := d.host.Subgroup(ctx, colour, key, d.host.Compute())
	if err != nil {
		return nil, err
	}
	c, err := newGroup(ctx, host, d.kit, d.opts, true)
	if err != nil {
		return nil, d.fault("split", err)
	}
	d.mu.Lock()
	closed := d.closed
	if !closed {
		d.children = append(d.children, c)
	}
	d.mu.Unlock()
	if closed {
		c.Close()
		return nil, d.fault("split", comm.ErrClosed)
	}
	return c, nil
}

// Abort fails every pending and later call on all groups of the world, here and on the other ranks. It returns when the
// other ranks are informed, or after half a second.
func (d *Group) Abort(cause error) { d.fail(cause) }

// fail ends the group's world, unless it has ended already.
func (d *Group) fail(cause error) {
	d.host.Link().Fail(blame.OwnForm(cause))
	cause = d.host.Link().Err()
	if cause == nil {
		cause = comm.ErrAborted
	}
	d.end(cause, true)
}

// end fails pending and later calls here. If some are under way, the device ends them and drops their waiters on the
// compute stream. It informs the other ranks first, since this rank's callers may exit, and a connection that ends
// without a goodbye counts as a death.
func (d *Group) end(cause error, busy bool) {
	d.host.Link().AwaitNotified()
	d.markDone()
	waits := d.waits()
	d.mu.Lock()
	if d.cause != nil {
		d.mu.Unlock()
		return
	}
	d.cause, d.ended = cause, waits
	d.inflight = nil
	d.mu.Unlock()
	d.die(cause)
	lib := d.connected()
	if lib == nil {
		lib = solo{} // library connects none after the cause is set
	}
	if busy {
		d.kit.compute.Fail(cause)
		d.stream.Fail(cause)
	}
	d.ending.Go(func() {
		if busy {
			if d.copies != nil {
				d.copies.Abort(cause)
			}
			lib.abort()
		}
		if d.copies != nil {
			d.log(d.copies.Close())
		}
		if !busy {
			d.log(lib.close())
		}
		d.issuing.Lock()
		defer d.issuing.Unlock()
		d.events.Lock()
		defer d.events.Unlock()
		d.shut = true
		_ = d.stream.Close() // its error is the cause
	})
}

func (d *Group) log(err error) {
	if err != nil {
		d.host.Options().Log("rank %d: end of a device group: %v", d.Rank(), err)
	}
}

// endingBound limits Close's wait for the device to release the group's resources.
const endingBound = 5 * time.Second

// Close ends the group, those split from it, and the host's group. Pending calls fail.
func (d *Group) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	children := d.children
	d.children = nil
	d.mu.Unlock()
	for _, c := range children {
		c.Close()
	}
	close(d.quit)
	<-d.over
	d.end(comm.ErrClosed, d.countInflight() > 0)
	ended := make(chan struct{})
	go func() { // ends when the device has released the group
		d.ending.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(endingBound):
		d.log(errors.New("the device has not released its resources; they leak"))
	}
	return d.host.Close()
}

// Waits returns the pending calls on the device, of this group and all split from it; Host().Waits() has those on views
// of the host. After the group has ended, it returns the calls then in flight. Any goroutine may call it.
func (d *Group) Waits() []comm.Wait {
	all := d.waits()
	d.mu.Lock()
	children := slices.Clone(d.children)
	d.mu.Unlock()
	for _, c := range children {
		all = append(all, c.Waits()...)
	}
	return all
}

// waits lists the calls of d itself.
func (d *Group) waits() (all []comm.Wait) {
	d.mu.Lock()
	if d.cause != nil {
		defer d.mu.Unlock()
		return slices.Clone(d.ended)
	}
	calls := slices.Clone(d.inflight)
	d.mu.Unlock()
	before := true // all earlier calls are over
	for _, f := range calls {
		d.mu.Lock()
		w, start, end, done := d.wait(f), f.start, f.end, f.done
		d.mu.Unlock()
		if end != nil && !done {
			over, err := d.reached(end)
			done = over && err == nil // a failed call still counts as waited for
		}
		if done {
			continue
		}
		if len(all) == comm.MaxWaits {
			break
		}
		if came, _ := d.reached(start); came && before {
			w.Begun = true
		} else {
			w.Open = nil
		}
		before = false
		all = append(all, w)
	}
	if d.copies != nil {
		all = append(all, d.copies.Waits()...)
	}
	return all
}

// wait describes a call that has begun. d.mu is held.
func (d *Group) wait(f *inflight) comm.Wait {
	w := comm.Wait{
		Op: f.name, Label: f.label, Group: d.host.ID(), Via: TransportNCCL, Call: f.number,
		Needed: f.needed, Called: f.called, Vague: true, Bytes: f.bytes, Since: f.began,
	}
	for _, p := range f.peers[:min(len(f.peers), comm.MaxOpen)] {
		w.Open = append(w.Open, comm.Open{Peer: d.host.WorldRank(p), Since: f.began})
	}
	w.More = len(f.peers) - len(w.Open)
	return w
}
