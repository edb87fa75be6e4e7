package comm

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/cprun/cprun/internal/tensor"
)

// flight is a call that is in flight on the device.
type flight struct {
	name  string
	peers []int // ranks of the group that it needs
	bytes int64
	limit time.Duration // how long it may stand still

	// Guarded by the group's mu. Events are nil while the call is being issued.
	start, end tensor.Event
	done       bool

	// Of the watch alone.
	began  time.Time // when it was seen to be able to move
	looked time.Time // when the other ranks were told that this one stands
	left   time.Time // when one of the peers was seen to have left
}

// with adds a message.
func (f *flight) with(peer int, bytes int64) {
	f.bytes += bytes
	for _, p := range f.peers {
		if p == peer {
			return
		}
	}
	f.peers = append(f.peers, peer)
}

// maxFlights bounds how far the host runs ahead of the device.
const maxFlights = 1024

// issue queues a call behind the compute stream's present work and behind the group's earlier
// calls.
func (d *DeviceGroup) issue(f *flight, queue func() error) (Pending, error) {
	d.issuing.Lock()
	defer d.issuing.Unlock()
	if p, err := d.admit(f); p != nil || err != nil {
		return p, err
	}
	for pause := (backoff{}); d.inFlight() >= maxFlights; pause.wait() {
	}
	d.kit.order.Lock()
	e := d.kit.compute.Record()
	d.events.RLock()
	d.stream.Wait(e)
	start := d.stream.Record()
	d.events.RUnlock()
	d.kit.order.Unlock()
	if !d.takeOff(f, start) {
		return &devicePending{d, f}, nil
	}
	var err error
	d.stream.Do(f.name, func() error {
		err = queue()
		return err
	})
	if err != nil {
		d.blame(f, err)
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

// admit returns a Pending, or an error, where a call cannot begin.
func (d *DeviceGroup) admit(f *flight) (Pending, error) {
	f.limit = time.Duration(d.limit.Load())
	if err := d.gone(); err != nil {
		return nil, d.host.fault(f.name, err)
	}
	if err := d.kit.compute.Err(); err != nil {
		// The error of a call on the compute stream is an error of what waits for it.
		d.fail(err)
		return &devicePending{d, f}, nil
	}
	if err := d.departed(f); err != nil {
		// The call before may be over here and about to be over on the other ranks.
		time.Sleep(partTime)
		d.fail(err)
		return nil, d.host.fault(f.name, d.gone())
	}
	return nil, nil
}

// gone is the cause that ended the group, also where the watch has not come to it yet.
func (d *DeviceGroup) gone() error {
	if err := d.host.t.err(); err != nil {
		d.end(err, true)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.cause
}

// departed is an error about a peer that has left, or nil.
func (d *DeviceGroup) departed(f *flight) error {
	for _, p := range f.peers {
		if w := d.host.ranks[p]; d.host.t.hasLeft(w) {
			return &PeerError{Rank: w, Name: d.PeerName(p), Op: f.op(), Cause: ErrPeerLeft}
		}
	}
	return nil
}

// op says what a call was waiting for, in errors.
func (f *flight) op() string { return fmt.Sprintf("%s of %d bytes", f.name, f.bytes) }

// takeOff puts a call before the watch. It is false where the group has ended.
func (d *DeviceGroup) takeOff(f *flight, start tensor.Event) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cause != nil {
		return false
	}
	f.start = start
	d.flights = append(d.flights, f)
	select {
	case d.wake <- struct{}{}:
	default:
	}
	return true
}

// inFlight is the number of calls that are not over.
func (d *DeviceGroup) inFlight() int {
	d.settleFlights()
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.flights)
}

// settleFlights forgets calls that are over, and returns the oldest that is not, or nil.
func (d *DeviceGroup) settleFlights() *flight {
	for {
		d.mu.Lock()
		if len(d.flights) == 0 {
			d.mu.Unlock()
			return nil
		}
		f := d.flights[0]
		d.mu.Unlock()
		if done, err := d.finished(f); !done || err != nil {
			return f
		}
		d.mu.Lock()
		if len(d.flights) > 0 && d.flights[0] == f {
			d.flights = d.flights[1:]
		}
		d.mu.Unlock()
	}
}

// finished reports whether a call is over, or what ended the group before it was.
func (d *DeviceGroup) finished(f *flight) (bool, error) {
	d.mu.Lock()
	done, end, cause := f.done, f.end, d.cause
	d.mu.Unlock()
	if done || cause != nil || end == nil {
		return done, cause
	}
	over, err := d.reached(end)
	if err != nil {
		d.blame(f, err)
		return false, d.gone()
	}
	if !over {
		return false, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cause != nil { // then the device was made to end it
		return false, d.cause
	}
	f.done = true
	return true, nil
}

// land marks the calls that have ended well although nobody has looked yet. It is for the last
// moment in which that can be told, before the device is made to end the others.
func (d *DeviceGroup) land() {
	d.mu.Lock()
	flights := slices.Clone(d.flights)
	d.mu.Unlock()
	for _, f := range flights {
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

// reached reports whether the group's stream has come to e, and the error that it has met.
func (d *DeviceGroup) reached(e tensor.Event) (bool, error) {
	d.events.RLock()
	defer d.events.RUnlock()
	if d.shut || !e.Done() {
		return false, nil
	}
	return true, e.Sync(context.Background()) // returns at once
}

const (
	// watchTick is how often calls in flight are looked at, for their deadlines and for errors
	// of the library. Who waits for a call looks more often.
	watchTick = 2 * time.Millisecond
	// newsTime is how long an error of the library may turn out to be the death of a peer. The
	// host's group tells that within milliseconds, and names who died.
	newsTime = 300 * time.Millisecond
	// leaveTime is what a call gets to end after one of its peers has left: it may have all it
	// needs by then.
	leaveTime = time.Second
	// partTime is how much later than here a call may end on other ranks.
	partTime = 50 * time.Millisecond
)

// watch is the group's goroutine. It ends with the group.
func (d *DeviceGroup) watch() {
	defer close(d.over)
	var standing *flight
	for {
		var tick <-chan time.Time
		f := d.settleFlights()
		if standing != nil && standing != f {
			standing = nil
			d.host.t.stand(-1)
		}
		if f != nil {
			if !f.looked.IsZero() {
				standing = f
			}
			tick = time.After(watchTick)
			d.look(f)
		}
		select {
		case <-d.host.t.failed():
			d.gone()
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

// look looks for what could keep the oldest call in flight from ever being over.
func (d *DeviceGroup) look(f *flight) {
	d.mu.Lock()
	start, issued := f.start, f.end != nil
	d.mu.Unlock()
	if err := d.kit.compute.Err(); err != nil {
		d.fail(err)
		return
	}
	if issued { // until then whoever issues it asks the library
		if err := d.lib.err(); err != nil {
			d.blame(f, err)
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
		f.began = now
	}
	d.hurry(f, now)
}

// hurry ends the group when a call has stood still for too long. Before that the ranks tell each
// other whom they stand waiting for, so that the one which stopped is blamed.
func (d *DeviceGroup) hurry(f *flight, now time.Time) {
	switch {
	case f.limit < 0 || now.Sub(f.began) < f.limit:
	case f.looked.IsZero():
		f.looked = now
		stand := -1
		if len(f.peers) > 0 {
			stand = d.host.ranks[f.peers[0]]
		}
		d.host.t.stand(stand)
	case now.Sub(f.looked) >= min(secondLook, f.limit):
		if done, err := d.finished(f); !done && err == nil {
			d.fail(d.silent(f))
		}
	}
}

// silent is the error of a call that has stood still for too long. It names the rank of those
// needed that does not stand itself or, where all stand, the one at the end of the chain.
func (d *DeviceGroup) silent(f *flight) error {
	t, own := d.host.t, d.host.ranks[d.Rank()]
	if len(f.peers) == 0 {
		return fmt.Errorf("%s: %w", f.op(), deadlineError{f.limit})
	}
	culprit := -1
	for _, p := range f.peers {
		if w := d.host.ranks[p]; culprit < 0 && t.standsOn(w) < 0 {
			culprit = w
		}
	}
	op := f.op()
	if culprit < 0 {
		first := d.host.ranks[f.peers[0]]
		culprit = first
		for range t.ranks() { // a circle of ranks that wait for each other has no end
			next := t.standsOn(culprit)
			if next < 0 {
				break
			}
			culprit = next
		}
		if t.standsOn(culprit) >= 0 || culprit == own {
			culprit = first
		}
		if culprit != first {
			op += fmt.Sprintf(" with %s, which waits itself", t.peerName(first))
		}
	}
	return &PeerError{Rank: culprit, Name: t.peerName(culprit), Op: op, Cause: deadlineError{f.limit}}
}

// blame ends the group for an error that the device or the library has met in a call. The death
// of a peer shows as one; who has died is known to the host's group.
func (d *DeviceGroup) blame(f *flight, err error) {
	select {
	case <-d.host.t.failed():
	case <-d.life.Done():
	case <-time.After(newsTime):
	}
	if left := d.departed(f); left != nil {
		err = left
	}
	d.fail(err)
}

// devicePending is a call on views of the device.
type devicePending struct {
	d *DeviceGroup
	f *flight
}

// Wait makes the compute stream wait for the transfer.
func (p *devicePending) Wait() {
	d := p.d
	d.mu.Lock()
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
		d.events.RLock() // and not more: the driver may keep us here, and the watch looks at events, too
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
	for pause := (backoff{}); ; pause.wait() {
		done, err := p.d.finished(p.f)
		switch {
		case done:
			return nil
		case err != nil:
			return p.d.host.fault(p.f.name, err)
		case ctx.Err() != nil:
			return p.d.host.fault(p.f.name, context.Cause(ctx))
		}
	}
}
