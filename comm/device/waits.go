package device

import (
	"slices"

	"github.com/cprun/cprun/comm"
)

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
			done = over && err == nil // one that a failure has ended is what was waited for
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
