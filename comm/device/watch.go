package device

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/pace"
	"github.com/cprun/cprun/tensor"
)

// An inflight is a call in flight on the device.
type inflight struct {
	name   string
	detail string // in a trace
	label  string // of the compute stream at the call
	peers  []int  // ranks of the group that it needs
	bytes  int64
	limit  time.Duration // its deadline

	// Guarded by the group's mu. Events are nil while the call is being issued.
	number     uint64 // among the calls of the group
	start, end tensor.Event
	done       bool
	needed     bool // the compute stream was made to wait for it
	called     bool // a caller waits for it, or has

	began time.Time // when the watch first saw that it can move; written by the watch, guarded by the group's mu

	// Used by the watch alone.
	announced time.Time // of the wait to the other ranks
	left      time.Time // when the watch saw that a peer had left
}

func (f *inflight) with(peer int, bytes int64) {
	f.bytes += bytes
	if !slices.Contains(f.peers, peer) {
		f.peers = append(f.peers, peer)
	}
}

// maxInflight bounds how far the host runs ahead of the device.
const maxInflight = 1024

// issue queues a call after the present work of the compute stream and after the group's earlier calls.
func (d *Group) issue(f *inflight, queue func() error) (comm.Pending, error) {
	d.issuing.Lock()
	defer d.issuing.Unlock()
	if p, err := d.admit(f); p != nil || err != nil {
		return p, err
	}
	for pause := (pace.Backoff{}); d.countInflight() >= maxInflight; pause.Wait() {
	}
	d.kit.order.Lock()
	f.label = d.kit.compute.Labelled()
	e := d.kit.compute.Record()
	d.events.RLock()
	d.stream.Wait(e)
	start := d.stream.Record()
	d.events.RUnlock()
	d.kit.order.Unlock()
	if !d.register(f, start) {
		return &devicePending{d, f}, nil
	}
	err := d.library(d.life)
	if err != nil {
		err = fmt.Errorf("connect devices: %w", err)
	} else {
		d.stream.Label(f.label)
		d.stream.DoDetailed(f.name, f.detail, func() error {
			err = queue()
			return err
		})
	}
	if err != nil {
		d.accuse(f, err)
		return &devicePending{d, f}, nil
	}
	d.events.RLock()
	end := d.stream.Record()
	d.events.RUnlock()
	d.mu.Lock()
	f.end = end
	d.mu.Unlock()
	return &devicePending{d, f}, nil
}

// admit returns a Pending, or an error, if a call cannot begin.
func (d *Group) admit(f *inflight) (comm.Pending, error) {
	f.limit = time.Duration(d.limit.Load())
	if err := d.failure(); err != nil {
		return nil, d.fault(f.name, err)
	}
	if err := d.kit.compute.Err(); err != nil {
		// An error of the compute stream fails everything that waits for it.
		d.fail(err)
		return &devicePending{d, f}, nil
	}
	if err := d.departed(f); err != nil {
		// The earlier call has ended here, but may still run on the other ranks.
		time.Sleep(partTime)
		d.fail(err)
		return nil, d.fault(f.name, d.failure())
	}
	return nil, nil
}

// failure returns the cause that ended the group, even before the watch has noticed it.
func (d *Group) failure() error {
	if err := d.host.Link().Err(); err != nil {
		d.end(err, true)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.cause
}

// departed returns an error about a peer that has left, or nil.
func (d *Group) departed(f *inflight) error {
	for _, p := range f.peers {
		if w := d.host.WorldRank(p); d.host.Link().HasLeft(w) {
			return blame.On(d.host.Link(), w, f.op(), comm.ErrPeerLeft)
		}
	}
	return nil
}

func (f *inflight) op() string { return fmt.Sprintf("%s of %d bytes", f.name, f.bytes) }

// register adds a call for the watch. It returns false if the group has ended.
func (d *Group) register(f *inflight, start tensor.Event) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cause != nil {
		return false
	}
	d.calls++
	f.number, f.start = d.calls, start
	d.inflight = append(d.inflight, f)
	select {
	case d.wake <- struct{}{}:
	default:
	}
	return true
}

func (d *Group) countInflight() int {
	d.oldestInflight()
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.inflight)
}

// oldestInflight drops calls that have ended, and returns the oldest other one, or nil.
func (d *Group) oldestInflight() *inflight {
	for {
		d.mu.Lock()
		if len(d.inflight) == 0 {
			d.mu.Unlock()
			return nil
		}
		f := d.inflight[0]
		d.mu.Unlock()
		if done, err := d.finished(f); !done || err != nil {
			return f
		}
		d.mu.Lock()
		if len(d.inflight) > 0 && d.inflight[0] == f {
			d.inflight = d.inflight[1:]
		}
		d.mu.Unlock()
	}
}

// finished reports whether a call has ended, or returns the cause that ended the group before.
func (d *Group) finished(f *inflight) (bool, error) {
	d.mu.Lock()
	done, end, cause := f.done, f.end, d.cause
	d.mu.Unlock()
	if done || cause != nil || end == nil {
		return done, cause
	}
	over, err := d.reached(end)
	if err != nil {
		d.accuse(f, err)
		return false, d.failure()
	}
	if !over {
		return false, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cause != nil { // the device may have been made to end it
		return false, d.cause
	}
	f.done = true
	return true, nil
}

// markDone marks calls that have ended well. It runs before the device ends the others, when the two can still be
// distinguished.
func (d *Group) markDone() {
	d.mu.Lock()
	calls := slices.Clone(d.inflight)
	d.mu.Unlock()
	for _, f := range calls {
		d.mu.Lock()
		end, cause := f.end, d.cause
		d.mu.Unlock()
		if end == nil || cause != nil {
			return
		}
		if over, err := d.reached(end); !over || err != nil {
			return
		}
		d.mu.Lock()
		f.done = true
		d.mu.Unlock()
	}
}

// reached reports whether the group's stream has come to e, and its error there.
func (d *Group) reached(e tensor.Event) (bool, error) {
	d.events.RLock()
	defer d.events.RUnlock()
	if d.shut || !e.Done() {
		return false, nil
	}
	return true, e.Sync(context.Background()) // returns at once
}

const (
	// watchTick is the period of checks of calls in flight, for announcements, deadlines and errors of the library. A
	// waiting caller checks more often.
	watchTick = 2 * time.Millisecond
	// newsTime is how long an error of the library may turn out to be the death of a peer. The host's group reports the
	// death and its rank within milliseconds.
	newsTime = 300 * time.Millisecond
	// leaveTime is a call's time to end after a peer has left: it may have all its data by then.
	leaveTime = time.Second
	// partTime is how much later than here a call may end on other ranks.
	partTime = 50 * time.Millisecond
)

// watch runs as the group's goroutine. It ends with the group.
func (d *Group) watch() {
	defer close(d.over)
	var waiting *inflight
	for {
		var tick <-chan time.Time
		f := d.oldestInflight()
		if waiting != nil && waiting != f {
			waiting = nil
			d.host.Link().AnnounceWait(d, -1)
		}
		if f != nil {
			if !f.announced.IsZero() {
				waiting = f
			}
			tick = time.After(watchTick)
			d.inspect(f)
		}
		select {
		case <-d.host.Link().Failed():
			d.failure()
			return
		case <-d.life.Done():
			return
		case <-d.quit:
			return
		case <-d.wake:
		case <-tick:
		}
	}
}

// inspect checks whether the oldest call in flight can still end.
func (d *Group) inspect(f *inflight) {
	d.mu.Lock()
	start, issued := f.start, f.end != nil
	d.mu.Unlock()
	if err := d.kit.compute.Err(); err != nil {
		d.fail(err)
		return
	}
	if issued { // until then its caller checks the library
		if err := d.connected().err(); err != nil {
			d.accuse(f, err)
			return
		}
	}
	now := time.Now()
	switch err := d.departed(f); {
	case err == nil:
		f.left = time.Time{}
	case f.left.IsZero():
		f.left = now
	case now.Sub(f.left) > leaveTime:
		d.fail(err)
		return
	}
	if f.began.IsZero() {
		if over, _ := d.reached(start); !over && issued {
			return
		}
		d.mu.Lock()
		f.began = now
		d.mu.Unlock()
	}
	d.checkDeadline(f, now)
}

// checkDeadline ends the group if a call makes no progress within its deadline. Before that the ranks announce their
// waits to each other, so that all blame the rank that stopped.
func (d *Group) checkDeadline(f *inflight, now time.Time) {
	switch {
	case f.limit < 0 || now.Sub(f.began) < f.limit:
	case f.announced.IsZero():
		f.announced = now
		peer := -1
		if len(f.peers) > 0 {
			peer = d.host.WorldRank(f.peers[0])
		}
		d.host.Link().AnnounceWait(d, peer)
	case now.Sub(f.announced) >= min(blame.SecondLook, f.limit):
		if done, err := d.finished(f); !done && err == nil {
			d.fail(d.stalled(f))
		}
	}
}

// stalled returns the error of a call at its deadline.
func (d *Group) stalled(f *inflight) error {
	if len(f.peers) == 0 {
		return fmt.Errorf("%s: %w", f.op(), blame.Deadline(f.limit))
	}
	peers := make([]int, len(f.peers))
	for i, p := range f.peers {
		peers[i] = d.host.WorldRank(p)
	}
	return blame.Stalled(d.host.Link(), d.host.WorldRank(d.Rank()), peers, blame.Op{What: f.op(), Way: "with"}, f.limit)
}

// accuse ends the group for an error of the device or the library in a call. The cause may be the death of a peer,
// which the host's group reports.
func (d *Group) accuse(f *inflight, err error) {
	select {
	case <-d.host.Link().Failed():
	case <-d.life.Done():
	case <-time.After(newsTime):
	}
	if left := d.departed(f); left != nil {
		err = left
	}
	d.fail(err)
}

// A devicePending is a call on views of the device.
type devicePending struct {
	d *Group
	f *inflight
}

// Wait makes the compute stream wait for the transfer.
func (p *devicePending) Wait() {
	d := p.d
	d.mu.Lock()
	p.f.needed = true
	end, cause := p.f.end, d.cause
	done := p.f.done
	d.mu.Unlock()
	switch {
	case done:
	case cause != nil:
		d.kit.compute.Fail(cause)
	case end != nil:
		d.kit.order.Lock()
		defer d.kit.order.Unlock()
		d.events.RLock() // only to read: the driver may block here, and the watch also reads events
		defer d.events.RUnlock()
		if d.shut {
			d.kit.compute.Fail(d.Err())
			return
		}
		d.kit.compute.Wait(end)
	}
}

// Sync blocks until the transfer has ended.
func (p *devicePending) Sync(ctx context.Context) error {
	p.d.mu.Lock()
	p.f.called = true
	p.d.mu.Unlock()
	for pause := (pace.Backoff{}); ; pause.Wait() {
		done, err := p.d.finished(p.f)
		switch {
		case done:
			return nil
		case err != nil:
			return p.d.fault(p.f.name, err)
		case ctx.Err() != nil:
			return p.d.fault(p.f.name, context.Cause(ctx))
		}
	}
}
