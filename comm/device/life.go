package device

import (
	"errors"
	"slices"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/blame"
)

// Abort fails every pending and later call on all groups of the world, here and on the other
// ranks. It returns when the other ranks have been told, or after half a second.
func (d *Group) Abort(cause error) { d.fail(cause) }

// fail ends the world of the group, unless that has ended already.
func (d *Group) fail(cause error) {
	d.host.Link().Fail(blame.OwnForm(cause))
	cause = d.host.Link().Err()
	if cause == nil {
		cause = comm.ErrAborted
	}
	d.end(cause, true)
}

// end fails the pending calls and all later ones here. If some are under way, it makes the device end them and drops
// their waiters on the compute stream. It informs the other ranks first, since this rank's callers may exit, and a
// connection that ends without a word counts as a death.
func (d *Group) end(cause error, busy bool) {
	d.host.Link().AwaitTold()
	d.markDone()
	waits := d.waits()
	d.mu.Lock()
	if d.cause != nil {
		d.mu.Unlock()
		return
	}
	d.cause, d.ended = cause, waits
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
				d.copies.Abort(cause)
			}
			d.lib.abort()
		}
		if d.copies != nil {
			d.log(d.copies.Close())
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

func (d *Group) log(err error) {
	if err != nil {
		d.host.Options().Log("rank %d: end of a device group: %v", d.Rank(), err)
	}
}

// endingBound limits Close's wait for the device to release the group's resources.
const endingBound = 5 * time.Second

// Close ends the group and those split from it, and the host's group. Calls still pending
// fail.
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
	d.end(comm.ErrClosed, d.inFlight() > 0)
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

// Waits returns the calls of this group, and of all that were split from it, that are not over on the
// device. Those of views of the host are Host().Waits(). Once the group has ended it returns what was
// in flight at that moment. Any goroutine may call it, at any time.
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
	flights := slices.Clone(d.flights)
	d.mu.Unlock()
	before := true // all calls so far are over
	for _, f := range flights {
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
		// The library's kernels run one after the other.
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

// wait returns a call as one that has begun. d.mu is held.
func (d *Group) wait(f *flight) comm.Wait {
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
