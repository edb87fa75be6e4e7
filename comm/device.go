package comm

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cprun/cprun/internal/tensor"
)

// DeviceOptions of a DeviceGroup. The zero value is usable. All ranks give the same.
type DeviceOptions struct {
	// Transport is what exchanges between devices go over: "copy" for the copy engines, which
	// need all devices on one host and take no processor from kernels; "nccl"; or "auto", the
	// default, for copy engines where they can and NCCL elsewhere. Reductions always go over
	// NCCL; gathers go the way of exchanges.
	Transport string
	// MaxCTAs is how many processors of a device a collective may take at most, 16 by default.
	// Groups whose calls are in flight at once must find room on the device together.
	MaxCTAs int
}

// The transports of DeviceOptions.
const (
	TransportAuto = "auto"
	TransportNCCL = "nccl"
	TransportCopy = "copy"
)

const defaultCTAs = 16

func (o DeviceOptions) withDefaults() (DeviceOptions, error) {
	switch o.Transport {
	case "":
		o.Transport = TransportAuto
	case TransportAuto, TransportNCCL, TransportCopy:
	default:
		return o, fmt.Errorf("transport %q: known are auto, nccl and copy", o.Transport)
	}
	if o.MaxCTAs == 0 {
		o.MaxCTAs = defaultCTAs
	}
	return o, nil
}

// deviceStream is a stream of a device. Do queues what its argument queues, and returns.
type deviceStream interface {
	tensor.Stream
	Do(name string, queue func() error)
	Fail(err error)
	Err() error
	Close() error
}

// collectives are the calls of a library, NCCL, between the devices of a group. Those that
// queue do so on the stream that they were made with; they return nil when the work is queued.
// One goroutine makes them; err, abort and close are for any.
type collectives interface {
	exchange(send, recv []Message) error // none to the own rank, none empty
	allReduce(v View, op Op) error
	allGather(dst, src View) error
	reduceScatter(dst, src View, op Op) error
	broadcast(v View, root int) error
	// err is what has gone wrong since, or nil.
	err() error
	// abort ends what is under way on the device, as an error or not, and gives everything back.
	abort()
	// close gives everything back. Nothing is under way.
	close() error
}

// solo is the collectives of one rank.
type solo struct {
	kit    *deviceKit
	stream deviceStream
}

func (s solo) exchange([]Message, []Message) error { return nil }
func (s solo) allReduce(View, Op) error            { return nil }
func (s solo) broadcast(View, int) error           { return nil }
func (s solo) err() error                          { return nil }
func (s solo) abort()                              {}
func (s solo) close() error                        { return nil }

func (s solo) allGather(dst, src View) error {
	if spanOf(dst) != spanOf(src) {
		s.kit.copy(s.stream, dst, src)
	}
	return nil
}

func (s solo) reduceScatter(dst, src View, _ Op) error { return s.allGather(dst, src) }

// mover carries exchanges between the devices of a group: all messages of a call, also those to
// the own rank. Its errors need not say what call they are of.
type mover interface {
	exchange(send, recv []Message) (Pending, error)
	// abort fails all calls and has the device end them.
	abort(cause error)
	close() error
}

// deviceKit is what a DeviceGroup needs of its device. All groups of a rank share it.
type deviceKit struct {
	place     tensor.Device
	compute   deviceStream
	newStream func(name string) (deviceStream, error)
	copy      func(s deviceStream, dst, src View) // of the device, dense and of one size
	// connect joins the ranks of host; it gives up when stop is closed.
	connect func(ctx context.Context, host *Group, s deviceStream, opts DeviceOptions, stop <-chan struct{}) (collectives, error)
	// engine joins the ranks of host by their copy engines. If it fails on one rank, it does
	// on all. It may be nil.
	engine func(ctx context.Context, host *Group) (mover, error)

	// order guards the compute stream, which several groups may use from goroutines of their
	// own. It comes before a group's events.
	order sync.Mutex
}

// DeviceGroup is a Communicator of ranks that compute on a device each. Views of the device
// move between the devices; views of the host move over the host's group, which also is what
// ranks meet over, learn of failures by, and blame each other through.
//
// Work is queued on a stream of the group's own behind an event of the compute stream. One
// goroutine watches what is in flight. When the host's group fails, because a peer has died or
// has aborted, when a transfer stands still beyond the deadline of the host's group, or when
// the library reports an error, the watch ends everything under way on the device and poisons
// both streams with the cause, so that nothing waits for what will never come.
//
// Where two groups of one device have calls in flight at once, their kernels wait for those of
// other devices and must fit on the device together: see DeviceOptions.MaxCTAs. Whatever the
// number of groups, all ranks should make the calls of all groups in the same order.
//
// Three things are different from a Group: Max and Min of floats pass over a NaN that only
// some ranks have; sizes of messages are not compared between the ranks by NCCL, so that a
// mismatch ends at the deadline; and the first message between two ranks connects them, until
// which the call does not return. Wait for a call on views of the host blocks the caller.
type DeviceGroup struct {
	host   *Group
	kit    *deviceKit
	opts   DeviceOptions
	stream deviceStream
	lib    collectives
	copies mover // nil where exchanges go over lib
	limit  atomic.Int64

	issuing sync.Mutex   // one call at a time
	events  sync.RWMutex // held by who uses the stream's events: locked to close the stream
	shut    bool         // guarded by events; the stream is closed

	mu       sync.Mutex
	flights  []*flight      // guarded by mu; oldest first
	cause    error          // guarded by mu; what ended the group
	closed   bool           // guarded by mu
	children []*DeviceGroup // guarded by mu

	life   context.Context // done when cause is set
	die    context.CancelCauseFunc
	wake   chan struct{} // something is in flight
	quit   chan struct{} // closed by Close
	over   chan struct{} // closed when the watch has ended
	ending sync.WaitGroup
}

var _ Communicator = (*DeviceGroup)(nil)

// newDeviceGroup joins the devices of host's ranks. It takes host over, also where it fails.
func newDeviceGroup(ctx context.Context, host *Group, kit *deviceKit, opts DeviceOptions) (*DeviceGroup, error) {
	d := &DeviceGroup{
		host: host, kit: kit, opts: opts,
		wake: make(chan struct{}, 1), quit: make(chan struct{}), over: make(chan struct{}),
	}
	d.life, d.die = context.WithCancelCause(context.Background())
	d.limit.Store(int64(host.opts.Deadline))
	err := d.connect(ctx)
	if err != nil {
		host.Abort(d.host.fault("connect devices", err)) // the others may stand in the same call
	} else {
		err = d.connectEngines(ctx) // who fails in this knows that all do
	}
	if err != nil {
		d.die(err)
		if d.lib != nil {
			d.lib.abort()
		}
		if d.stream != nil {
			_ = d.stream.Close()
		}
		host.Close()
		return nil, d.host.fault("connect devices", err)
	}
	go d.watch() // until Close, or a failure
	return d, nil
}

func (d *DeviceGroup) connect(ctx context.Context) (err error) {
	if d.opts, err = d.opts.withDefaults(); err != nil {
		return err
	}
	if d.stream, err = d.kit.newStream("comm"); err != nil {
		return err
	}
	if d.Size() == 1 {
		d.lib = solo{d.kit, d.stream}
		return nil
	}
	d.lib, err = d.kit.connect(ctx, d.host, d.stream, d.opts, d.host.t.failed())
	return err
}

// connectEngines fails on all ranks or on none.
func (d *DeviceGroup) connectEngines(ctx context.Context) (err error) {
	if d.Size() == 1 || d.opts.Transport == TransportNCCL {
		return nil
	}
	if d.kit.engine == nil {
		if d.opts.Transport == TransportCopy {
			return fmt.Errorf("transport copy: %v has no copy engines", d.kit.place)
		}
		return nil
	}
	d.copies, err = d.kit.engine(ctx, d.host)
	if err != nil && d.opts.Transport == TransportAuto && d.host.Err() == nil {
		d.host.opts.Log("rank %d: exchanges go over NCCL: %v", d.Rank(), err)
		return nil
	}
	return err
}

// Rank is this rank within the group.
func (d *DeviceGroup) Rank() int { return d.host.Rank() }

// Size is the number of ranks of the group.
func (d *DeviceGroup) Size() int { return d.host.Size() }

// Host is the group of the same ranks that moves views of the host. Its calls wait for nothing
// that is queued on the device.
func (d *DeviceGroup) Host() *Group { return d.host }

// Transport is what exchanges go over: "nccl", or "copy".
func (d *DeviceGroup) Transport() string {
	if d.copies != nil {
		return TransportCopy
	}
	return TransportNCCL
}

// SetDeadline changes how long a transfer may stand still, for calls made after it; see
// Group.SetDeadline.
func (d *DeviceGroup) SetDeadline(limit time.Duration) {
	d.limit.Store(int64(limit))
	d.host.SetDeadline(limit)
	if e, ok := d.copies.(interface{ setDeadline(time.Duration) }); ok {
		e.setDeadline(limit)
	}
}

// PeerName is how errors name a rank of the group.
func (d *DeviceGroup) PeerName(rank int) string { return d.host.PeerName(rank) }

// Err is the cause that ended the group, or nil.
func (d *DeviceGroup) Err() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cause == nil {
		return d.host.Err()
	}
	return d.cause
}

// Barrier blocks the caller until every rank has called it. No stream has a part in it.
func (d *DeviceGroup) Barrier(ctx context.Context) error { return d.host.Barrier(ctx) }

// Split makes groups of the ranks with the same colour, ordered by key, then by rank.
func (d *DeviceGroup) Split(ctx context.Context, colour, key int) (Communicator, error) {
	host, err := d.host.Split(ctx, colour, key)
	if err != nil {
		return nil, err
	}
	c, err := newDeviceGroup(ctx, host.(*Group), d.kit, d.opts)
	if err != nil {
		return nil, d.host.fault("split", err)
	}
	d.mu.Lock()
	closed := d.closed
	if !closed {
		d.children = append(d.children, c)
	}
	d.mu.Unlock()
	if closed {
		c.Close()
		return nil, d.host.fault("split", ErrClosed)
	}
	return c, nil
}

// Abort fails every pending and later call on all groups of the world, here and on the other
// ranks. It returns when the other ranks have been told, or after half a second.
func (d *DeviceGroup) Abort(cause error) { d.fail(cause) }

// fail ends the world of the group, unless that has ended already.
func (d *DeviceGroup) fail(cause error) {
	d.host.t.fail(ownForm(cause))
	cause = d.host.t.err()
	if cause == nil {
		cause = ErrAborted
	}
	d.end(cause, true)
}

// end fails what is pending and what comes later here. Where something is under way, the device
// is made to end it, and what waits for it on the compute stream is dropped. All that comes
// after the other ranks have been told why, if they can be: what this rank's callers do with the
// error may be to exit, and a connection that ends without a word is taken for a death.
func (d *DeviceGroup) end(cause error, busy bool) {
	d.host.t.flush()
	d.land()
	d.mu.Lock()
	if d.cause != nil {
		d.mu.Unlock()
		return
	}
	d.cause = cause
	d.flights = nil
	d.mu.Unlock()
	d.die(cause)
	if busy {
		d.kit.compute.Fail(cause)
		d.stream.Fail(cause)
	}
	d.ending.Go(func() {
		if busy {
			if d.copies != nil {
				d.copies.abort(cause)
			}
			d.lib.abort()
		}
		if d.copies != nil {
			d.log(d.copies.close())
		}
		if !busy {
			d.log(d.lib.close())
		}
		d.issuing.Lock()
		defer d.issuing.Unlock()
		d.events.Lock()
		defer d.events.Unlock()
		d.shut = true
		// What it says is the cause, which everybody has been told.
		_ = d.stream.Close()
	})
}

func (d *DeviceGroup) log(err error) {
	if err != nil {
		d.host.opts.Log("rank %d: end of a device group: %v", d.Rank(), err)
	}
}

// endingBound is how long Close waits for the device to give back what the group held.
const endingBound = 5 * time.Second

// Close ends the group and those split from it, and the host's group. Calls still pending
// fail.
func (d *DeviceGroup) Close() error {
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
	d.end(ErrClosed, d.inFlight() > 0)
	ended := make(chan struct{})
	go func() { // ends when the device lets it
		d.ending.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(endingBound):
		d.log(errors.New("the device does not let go of it; it is left behind"))
	}
	return d.host.Close()
}
