package comm

import (
	"context"
	"fmt"

	"github.com/cprun/cprun/internal/tensor"
)

// Exchange sends and receives as one group. All views of a call lie on the device, or all on
// the host.
func (d *DeviceGroup) Exchange(send, recv []Message) (Pending, error) {
	if onHost(send) || onHost(recv) {
		return d.viaHost(func() (Pending, error) { return d.host.Exchange(send, recv) })
	}
	c, err := d.sort(send, recv)
	if err != nil {
		return nil, d.host.fault("exchange", err)
	}
	return d.move("exchange", c)
}

// onHost reports whether the first of the messages is of the host. The check of the others
// finds what is mixed.
func onHost(ms []Message) bool { return len(ms) > 0 && hostView(ms[0].View) }

func hostView(v View) bool { return !v.IsZero() && v.Memory().Device() == tensor.Device{} }

// exchanged is an exchange that has been checked.
type exchanged struct {
	send, recv []Message // all of them
	out, in    []Message // those that move between ranks: not empty, not of the own rank
	own, into  []View    // those of the own rank, pair by pair
}

func (d *DeviceGroup) sort(send, recv []Message) (*exchanged, error) {
	c := &exchanged{send: send, recv: recv}
	var err error
	if c.out, c.own, err = d.parts("send", send); err != nil {
		return nil, err
	}
	if c.in, c.into, err = d.parts("receive", recv); err != nil {
		return nil, err
	}
	if len(c.own) != len(c.into) {
		return nil, fmt.Errorf("%d messages to the own rank, %d from it", len(c.own), len(c.into))
	}
	for i := range c.own {
		if a, b := bytesIn(c.own[i]), bytesIn(c.into[i]); a != b {
			return nil, fmt.Errorf("message %d to the own rank has %d bytes, it is received into %d", i, a, b)
		}
	}
	return c, nil
}

func (d *DeviceGroup) parts(verb string, ms []Message) (others []Message, own []View, err error) {
	for i, m := range ms {
		if m.Peer < 0 || m.Peer >= d.Size() {
			return nil, nil, fmt.Errorf("%s %d names rank %d of a group of %d", verb, i, m.Peer, d.Size())
		}
		if err := d.check(fmt.Sprintf("the view of %s %d (rank %d)", verb, i, m.Peer), m.View); err != nil {
			return nil, nil, err
		}
		switch {
		case m.Peer == d.Rank():
			own = append(own, m.View)
		case m.View.Size() > 0:
			others = append(others, m)
		}
	}
	return others, own, nil
}

// check checks that a view is one that moves between devices.
func (d *DeviceGroup) check(what string, v View) error {
	if err := checkView(what, v); err != nil {
		return err
	}
	if at := v.Memory().Device(); at != d.kit.place {
		return fmt.Errorf("%s lies on %v: this rank's device is %v, and the views of a call lie all on it or all on the host", what, at, d.kit.place)
	}
	return nil
}

func (d *DeviceGroup) checkPair(dst, src View) error {
	if err := d.check("dst", dst); err != nil {
		return err
	}
	return d.check("src", src)
}

func bytesIn(v View) int64 { return int64(v.Size()) * int64(v.DType().Size()) }

// move runs an exchange over the copy engines or the library.
func (d *DeviceGroup) move(name string, c *exchanged) (Pending, error) {
	f := &flight{name: name}
	for _, m := range append(append([]Message{}, c.out...), c.in...) {
		f.with(m.Peer, bytesIn(m.View))
	}
	if d.copies != nil {
		return d.moveByEngine(f, c)
	}
	return d.issue(f, func() error {
		for i := range c.own {
			d.kit.copy(d.stream, c.into[i], c.own[i])
		}
		if len(c.out)+len(c.in) == 0 {
			return nil
		}
		return d.lib.exchange(c.out, c.in)
	})
}

// moveByEngine leaves the call to the copy engines, which watch it themselves.
func (d *DeviceGroup) moveByEngine(f *flight, c *exchanged) (Pending, error) {
	d.issuing.Lock()
	defer d.issuing.Unlock()
	if p, err := d.admit(f); p != nil || err != nil {
		return p, err
	}
	d.kit.order.Lock()
	p, err := d.copies.exchange(c.send, c.recv)
	d.kit.order.Unlock()
	if err != nil {
		return nil, d.host.fault(f.name, err)
	}
	return p, nil
}

// AllReduce combines v over the ranks, in place.
func (d *DeviceGroup) AllReduce(v View, op Op) (Pending, error) {
	if hostView(v) {
		return d.viaHost(func() (Pending, error) { return d.host.AllReduce(v, op) })
	}
	err := d.check("the view", v)
	if err == nil {
		err = checkReduce(v, op)
	}
	return d.collective("all-reduce", v, err, func() error { return d.lib.allReduce(v, op) })
}

// AllGather fills dst with the ranks' src. src may be the own part of dst.
func (d *DeviceGroup) AllGather(dst, src View) (Pending, error) {
	if hostView(dst) || hostView(src) {
		return d.viaHost(func() (Pending, error) { return d.host.AllGather(dst, src) })
	}
	err := d.checkPair(dst, src)
	if err == nil {
		err = checkParts("dst", dst, "src", src, d.Size())
	}
	if err == nil {
		err = checkInPlace("dst", dst, "src", src, d.Rank())
	}
	if err == nil && d.copies != nil {
		return d.moveParts("all-gather", dst, src, func(int) View { return src })
	}
	return d.collective("all-gather", dst, err, func() error { return d.lib.allGather(dst, src) })
}

// ReduceScatter combines the ranks' src and leaves part Rank in dst, which may be that part
// of src.
func (d *DeviceGroup) ReduceScatter(dst, src View, op Op) (Pending, error) {
	if hostView(dst) || hostView(src) {
		return d.viaHost(func() (Pending, error) { return d.host.ReduceScatter(dst, src, op) })
	}
	err := d.checkPair(dst, src)
	if err == nil {
		err = checkParts("src", src, "dst", dst, d.Size())
	}
	if err == nil {
		err = checkInPlace("src", src, "dst", dst, d.Rank())
	}
	if err == nil {
		err = checkReduce(src, op)
	}
	return d.collective("reduce-scatter", src, err, func() error { return d.lib.reduceScatter(dst, src, op) })
}

// AllToAll sends part p of src to rank p and fills part p of dst from rank p.
func (d *DeviceGroup) AllToAll(dst, src View) (Pending, error) {
	if hostView(dst) || hostView(src) {
		return d.viaHost(func() (Pending, error) { return d.host.AllToAll(dst, src) })
	}
	err := d.checkPair(dst, src)
	if err == nil {
		err = checkAllToAll(dst, src, d.Size())
	}
	if err == nil && spanOf(dst).overlaps(spanOf(src)) {
		err = errOverlap
	}
	if err != nil {
		return nil, d.host.fault("all-to-all", err)
	}
	return d.moveParts("all-to-all", dst, src, func(rank int) View { return shareOf(src, d.Size(), rank) })
}

// Broadcast copies root's v to every rank.
func (d *DeviceGroup) Broadcast(v View, root int) (Pending, error) {
	if hostView(v) {
		return d.viaHost(func() (Pending, error) { return d.host.Broadcast(v, root) })
	}
	err := d.check("the view", v)
	if err == nil {
		err = checkRoot(root, d.Size())
	}
	return d.collective("broadcast", v, err, func() error { return d.lib.broadcast(v, root) })
}

// shareOf is one of n equal parts of a dense view, as a vector.
func shareOf(v View, n, i int) View {
	size := v.Size() / n
	return v.Reshape([4]int{1, 1, 1, v.Size()}).Slice(tensor.Dim, i*size, (i+1)*size)
}

// moveParts fills the parts of dst from the ranks, each of which gets what of says.
func (d *DeviceGroup) moveParts(name string, dst, src View, of func(rank int) View) (Pending, error) {
	n := d.Size()
	c := &exchanged{}
	for i := range n { // the next rank first, so that not all begin with the same
		p := (d.Rank() + 1 + i) % n
		from, to := of(p), shareOf(dst, n, p)
		if to.Size() == 0 || p == d.Rank() && spanOf(from) == spanOf(to) {
			continue
		}
		c.send, c.recv = append(c.send, Message{p, from}), append(c.recv, Message{p, to})
		if p == d.Rank() {
			c.own, c.into = append(c.own, from), append(c.into, to)
		} else {
			c.out, c.in = append(c.out, Message{p, from}), append(c.in, Message{p, to})
		}
	}
	return d.move(name, c)
}

// collective runs a call of all ranks, unless there is an error to return.
func (d *DeviceGroup) collective(name string, v View, err error, queue func() error) (Pending, error) {
	if err != nil {
		return nil, d.host.fault(name, err)
	}
	f := &flight{name: name, bytes: bytesIn(v)}
	d.host.others(func(_, peer int) { f.peers = append(f.peers, peer) })
	return d.issue(f, func() error {
		if v.Size() == 0 {
			return nil
		}
		return queue()
	})
}

// viaHost runs a call on views of the host, behind the present work of the compute stream,
// which may be about to fill them.
func (d *DeviceGroup) viaHost(call func() (Pending, error)) (Pending, error) {
	d.issuing.Lock()
	defer d.issuing.Unlock()
	d.kit.order.Lock()
	e := d.kit.compute.Record()
	d.kit.order.Unlock()
	d.host.after(func() error { return e.Sync(d.life) })
	p, err := call()
	if err != nil {
		return nil, err
	}
	return &hostPending{d, p}, nil
}

// hostPending is a call on views of the host.
type hostPending struct {
	d *DeviceGroup
	Pending
}

// Wait blocks the caller until the transfer has ended: the device has no part in it, so that
// what is queued later comes behind it.
func (p *hostPending) Wait() {
	if err := p.Sync(context.Background()); err != nil {
		p.d.kit.compute.Fail(err)
	}
}
