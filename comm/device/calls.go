package device

import (
	"context"
	"fmt"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/check"
	"github.com/cprun/cprun/tensor"
)

// Exchange sends and receives as one group. All views of a call lie on the device, or all on the host.
func (d *Group) Exchange(send, recv []comm.Message) (comm.Pending, error) {
	if onHost(send) || onHost(recv) {
		return d.viaHost(func() (comm.Pending, error) { return d.host.Exchange(send, recv) })
	}
	if err := check.Exchange(d.rules, send, recv); err != nil {
		return nil, d.fault("exchange", err)
	}
	return d.move("exchange", d.sort(send, recv))
}

// onHost reports whether the first message has a view of the host. The check of the others finds a mixture.
func onHost(ms []comm.Message) bool { return len(ms) > 0 && hostView(ms[0].View) }

func hostView(v tensor.View) bool { return !v.IsZero() && v.Memory().Device() == tensor.Device{} }

// An exchanged is a checked exchange.
type exchanged struct {
	send, recv []comm.Message // all of them
	out, in    []comm.Message // moved between ranks: not empty, not of the own rank
	own, into  []tensor.View  // of the own rank, pair by pair
}

func (d *Group) sort(send, recv []comm.Message) *exchanged {
	c := &exchanged{send: send, recv: recv}
	c.out, c.own = d.parts(send)
	c.in, c.into = d.parts(recv)
	return c
}

func (d *Group) parts(ms []comm.Message) (others []comm.Message, own []tensor.View) {
	for _, m := range ms {
		switch {
		case m.Peer == d.Rank():
			own = append(own, m.View)
		case m.View.Size() > 0:
			others = append(others, m)
		}
	}
	return others, own
}

func (d *Group) onDevice(v tensor.View) error {
	if at := v.Memory().Device(); at != d.kit.device {
		return fmt.Errorf("lies on %v: this rank's device is %v, and the views of a call lie all on it or all on the "+
			"host", at, d.kit.device)
	}
	return nil
}

// move runs an exchange over the copy engines or the library.
func (d *Group) move(name string, c *exchanged) (comm.Pending, error) {
	f := d.newInflight(name, c)
	switch {
	case d.copies.everywhere():
		return d.moveByEngine(f, c)
	case d.copies != nil:
		return d.moveBoth(f, c)
	}
	return d.issue(f, func() error {
		for i := range c.own {
			d.kit.copy(d.stream, c.into[i], c.own[i])
		}
		if len(c.out)+len(c.in) == 0 {
			return nil
		}
		return d.connected().exchange(c.out, c.in)
	})
}

// newInflight returns the record of an exchange.
func (d *Group) newInflight(name string, c *exchanged) *inflight {
	f := &inflight{name: name}
	if d.stream.Traced() {
		f.detail = check.Detail(c.send, c.recv)
	}
	for _, m := range append(append([]comm.Message{}, c.out...), c.in...) {
		f.with(m.Peer, check.Bytes(m.View))
	}
	return f
}

// moveByEngine runs the call over the copy engines, which watch it themselves.
func (d *Group) moveByEngine(f *inflight, c *exchanged) (comm.Pending, error) {
	d.issuing.Lock()
	defer d.issuing.Unlock()
	if p, err := d.admit(f); p != nil || err != nil {
		return p, err
	}
	d.kit.order.Lock()
	p, err := d.copies.Exchange(c.send, c.recv)
	d.kit.order.Unlock()
	if err != nil {
		return nil, d.fault(f.name, err)
	}
	return p, nil
}

// AllReduce combines v over the ranks, in place.
func (d *Group) AllReduce(v tensor.View, op comm.Op) (comm.Pending, error) {
	if hostView(v) {
		return d.viaHost(func() (comm.Pending, error) { return d.host.AllReduce(v, op) })
	}
	return d.collective("all-reduce", v, d.rules.AllReduce(v, op), func() error { return d.connected().allReduce(v, op) })
}

// AllGather fills dst with the ranks' src. src may be the own part of dst.
func (d *Group) AllGather(dst, src tensor.View) (comm.Pending, error) {
	if hostView(dst) || hostView(src) {
		return d.viaHost(func() (comm.Pending, error) { return d.host.AllGather(dst, src) })
	}
	err := d.rules.AllGather(dst, src)
	if err == nil && d.copies.everywhere() {
		return d.gather(dst, src)
	}
	return d.collective("all-gather", dst, err, func() error { return d.connected().allGather(dst, src) })
}

// ReduceScatter combines the ranks' src and leaves part Rank in dst, which may be that part
// of src.
func (d *Group) ReduceScatter(dst, src tensor.View, op comm.Op) (comm.Pending, error) {
	if hostView(dst) || hostView(src) {
		return d.viaHost(func() (comm.Pending, error) { return d.host.ReduceScatter(dst, src, op) })
	}
	return d.collective("reduce-scatter", src, d.rules.ReduceScatter(dst, src, op),
		func() error { return d.connected().reduceScatter(dst, src, op) })
}

// Broadcast copies root's v to every rank.
func (d *Group) Broadcast(v tensor.View, root int) (comm.Pending, error) {
	if hostView(v) {
		return d.viaHost(func() (comm.Pending, error) { return d.host.Broadcast(v, root) })
	}
	return d.collective("broadcast", v, d.rules.Broadcast(v, root),
		func() error { return d.connected().broadcast(v, root) })
}

// gather fills the parts of dst from the ranks' src by an exchange.
func (d *Group) gather(dst, src tensor.View) (comm.Pending, error) {
	var send, recv []comm.Message
	size, all := src.Size(), dst.Reshape([4]int{1, 1, 1, dst.Size()})
	for i := range d.Size() { // the next rank first, so that not all begin with the same
		p := (d.Rank() + 1 + i) % d.Size()
		part := all.Slice(tensor.Dim, p*size, (p+1)*size)
		if p != d.Rank() || !check.Same(src, part) {
			send, recv = append(send, comm.Message{Peer: p, View: src}), append(recv, comm.Message{Peer: p, View: part})
		}
	}
	return d.move("all-gather", d.sort(send, recv))
}

// collective runs a call of all ranks, unless there is an error to return.
func (d *Group) collective(name string, v tensor.View, err error, queue func() error) (comm.Pending, error) {
	if err != nil {
		return nil, d.fault(name, err)
	}
	f := &inflight{name: name, bytes: check.Bytes(v)}
	if d.stream.Traced() {
		f.detail = check.Collective(v, d.Size())
	}
	for i := 1; i < d.Size(); i++ { // the next rank first
		f.peers = append(f.peers, (d.Rank()+i)%d.Size())
	}
	return d.issue(f, func() error {
		if v.Size() == 0 {
			return nil
		}
		return queue()
	})
}

// viaHost runs a call on views of the host after the present work of the compute stream, which may fill them.
func (d *Group) viaHost(call func() (comm.Pending, error)) (comm.Pending, error) {
	d.issuing.Lock()
	defer d.issuing.Unlock()
	d.kit.order.Lock()
	e := d.kit.compute.Record()
	d.kit.order.Unlock()
	d.host.After(func() error { return e.Sync(d.life) })
	p, err := call()
	if err != nil {
		return nil, err
	}
	return &hostPending{d, p}, nil
}

// A hostPending is a call on views of the host.
type hostPending struct {
	d *Group
	comm.Pending
}

// Wait blocks the caller until the transfer has ended: the device has no part in it.
func (p *hostPending) Wait() {
	if err := p.Sync(context.Background()); err != nil {
		p.d.kit.compute.Fail(err)
	}
}
