// Package copyengine moves exchanges between the devices of one host by their copy engines. New joins the devices of a
// comm.Group's ranks into an Engine, which package device uses as the carrier of its exchanges.
package copyengine

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/check"
	"github.com/cprun/cprun/comm/internal/pace"
	"github.com/cprun/cprun/tensor"
)

// Engine moves messages between the devices of one host by their copy engines, straight from the sender's view into the
// receiver's. No processor of a device takes part, so a transfer beside a kernel costs the kernel nothing but memory
// bandwidth.
//
// A message takes these steps:
//
//	receiver   compute stream ──event──> post lane: ready = n;   host: posts n on the board
//	sender     compute stream ──event──> post lane: begun = n
//	           copy lane: wait begun, ready >= n; copy; sent = n, arrived = n;   host: queued = n
//	both       Pending.Wait: end lane: wait sent, or arrived, >= n ──event──> compute stream
//
// The words are flags in host memory that all ranks map (board). Devices write them with a system-wide fence, and wait
// for them without a kernel. The host reads them to find the rank that stopped, and writes its own rank's flags to end
// waits when the group has failed.
//
// The compute stream itself waits for events alone. A wait for a flag costs a stream some 10 µs even if the flag is
// set, an event that is over next to nothing, and mostly the data arrives long before it is needed. One end lane serves
// all calls, in any order of Wait: its waits have the order of the compute stream's own, so the compute stream already
// follows all earlier work of the lane.
//
// One rule prevents deadlocks: a wait is given to the driver only after the write that ends it, on whatever rank. So
// the order in which the drivers of all ranks get work is an order in which all of it can be done. Streams may
// therefore share queues of the device, queues may be full, and a call may wait for all queued work, such as the first
// launch of a kernel. To keep the rule a receive is posted after its ready is queued, and Pending.Wait waits until the
// peers' hosts have made the same call, but never for a device.
type Engine struct {
	rank    int
	host    *comm.Group // the same ranks; reports failures, names peers
	compute Compute
	using   sync.Locker // held to use compute; before mu
	dev     device
	limit   atomic.Int64 // a time.Duration: the deadline of a message
	share   boardSource
	board   *board
	same    []bool // by rank: in this process
	near    []bool // by rank: on this rank's device, whose processors may copy between the two

	cause  atomic.Pointer[error]       // of the group's end
	stood  atomic.Pointer[[]comm.Wait] // waits at that time; nil before
	failed chan struct{}               // closed then
	wake   chan struct{}               // there is work for the watch
	ending chan struct{}               // closed by close
	ended  chan struct{}               // closed when the watch has ended

	mu       sync.Mutex
	closed   bool      // guarded by mu, as all below
	gone     bool      // the lanes and the board are closed
	dozing   bool      // the watch waits for wake alone
	calls    uint64    // of Exchange
	deferred []call    // not begun yet, in order
	post     lane      // writes begun and ready after the compute stream
	order    lane      // writes them for deferred calls
	end      lane      // waits for work that the compute stream must follow
	lanes    []lane    // per peer
	sends    []backlog // per peer
	receives []backlog // per peer
}

// Compute is the stream that an engine's calls are ordered against.
type Compute interface {
	tensor.Stream
	// Fail ends all work after the group's transfers if the group has failed.
	Fail(err error)
}

// A device is the engine's access to a device. Addresses are the device's own.
type device interface {
	// attach registers the flags with the device, until detach.
	attach(flags []uint64) error
	detach() error
	// lane makes a stream for copies.
	lane(name string) (lane, error)
	// probe returns some memory of the device, for peers to test access.
	probe() (location, error)
	// local checks that v is memory of this device, and returns its address.
	local(v tensor.View) (uint64, error)
	// export returns how peers find the memory at addr, which is this device's.
	export(addr uint64) (location, error)
	// reach returns the allocation of a peer that p lies in, at this device's address.
	reach(p *location, sameProcess bool) (region, error)
	// identity distinguishes devices of the host; 0: unknown.
	identity() uint64
	// address returns the address of a flag for kernels of the device.
	address(flag *uint64) uint64
	// hold makes compute wait for all queued work of l.
	hold(compute tensor.Stream, l lane)
}

// A lane is a stream of a device. Its methods need the engine's lock, except fail. After fail, earlier work is still
// carried out, later work is not.
type lane interface {
	after(e tensor.Event)
	record() tensor.Event
	wait(flag *uint64, n uint64)
	write(flag *uint64, n uint64)
	copy(dst, src uint64, bytes int64, peer int)
	fail(err error)
	onFail(f func(error))
	idle() bool
	stream() tensor.Stream // for traces
	close() error
}

// A message is one end of a message.
type message struct {
	n        uint64
	call     uint64 // its number
	bytes    int64
	src, dst uint64   // dst only of messages to the own rank
	place    location // of a receive
	label    string   // of the call, for traces
}

// A backlog holds the messages to or from one peer.
type backlog struct {
	last uint64    // the number of the newest message
	free uint64    // that of the newest one that the compute stream has not waited for, or 0
	todo []message // not yet queued on a lane, or not posted
	open []message // may still run, for errors
	at   stall
}

// A lastOf is the last of a pending call's messages to or from a peer.
type lastOf struct {
	peer int
	n    uint64
}

// A pending is a call in flight.
type pending struct {
	e           *Engine
	sent, recvd []lastOf
	over        bool // guarded by e.mu; complete
}

// Exchange queues messages; see comm.Exchanger. The caller holds the lock of the compute stream.
func (e *Engine) Exchange(send, recv []comm.Message) (comm.Pending, error) {
	p, err := e.queue(send, recv)
	if err != nil {
		e.inform()
	}
	return p, err
}

func (e *Engine) queue(send, recv []comm.Message) (comm.Pending, error) {
	anywhere := func(tensor.View) error { return nil } // locateAll checks it
	rules := check.Rules{Rank: e.rank, Size: e.board.ranks, Memory: anywhere}
	if err := check.Exchange(rules, send, recv); err != nil {
		return nil, err
	}
	outs, own, err := e.locateAll("send", send)
	if err != nil {
		return nil, err
	}
	ins, into, err := e.locateAll("receive", recv)
	if err != nil {
		return nil, err
	}
	for i := range own {
		own[i].dst = into[i].src
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.err(); err != nil {
		return nil, err
	}
	e.calls++
	label := e.compute.Labelled()
	c := call{n: e.calls, ins: ins, outs: append(outs, own...), p: &pending{e: e}}
	number := func(list []peerMessage, queues []backlog) (last []lastOf) {
		for i := range list {
			m := &list[i]
			q := &queues[m.peer]
			q.last++
			m.n, m.call, m.label = q.last, c.n, label
			q.open = append(q.open, m.message)
			last = ends(last, m.peer, m.n)
		}
		return last
	}
	c.p.recvd, c.p.sent = number(c.ins, e.receives), number(c.outs, e.sends)
	e.post.after(e.compute.Record())
	if len(e.deferred) == 0 && !e.loose() {
		e.begin(&c, e.post)
	} else {
		e.post.write(e.board.flag(e.rank, e.rank, flagCalled), c.n)
		e.deferred = append(e.deferred, c)
	}
	if e.progress() || e.dozing {
		select {
		case e.wake <- struct{}{}:
		default:
		}
	}
	return c.p, nil
}

func ends(all []lastOf, peer int, n uint64) []lastOf {
	for i := range all {
		if all[i].peer == peer {
			all[i].n = n
			return all
		}
	}
	return append(all, lastOf{peer, n})
}

// A call is a call of Exchange.
type call struct {
	n         uint64
	ins, outs []peerMessage
	p         *pending
}

// A peerMessage is a message and the rank it goes to or comes from.
type peerMessage struct {
	peer int
	message
}

// Streams returns the streams that copy, for traces. A caller may wait for them while nothing is in flight.
func (e *Engine) Streams() (all []tensor.Stream) {
	for _, l := range e.lanes {
		all = append(all, l.stream())
	}
	return all
}

// locateAll finds the memory of checked messages, and separates those to the own rank.
func (e *Engine) locateAll(verb string, ms []comm.Message) (others, own []peerMessage, err error) {
	fault := func(i int, err error) ([]peerMessage, []peerMessage, error) {
		return nil, nil, fmt.Errorf("the view of %s %d (rank %d): %w", verb, i, ms[i].Peer, err)
	}
	for i, m := range ms {
		p := peerMessage{m.Peer, message{bytes: check.Bytes(m.View)}}
		if p.bytes > 0 {
			if p.src, err = e.dev.local(m.View); err != nil {
				return fault(i, err)
			}
		}
		if m.Peer == e.rank {
			own = append(own, p)
			continue
		}
		if verb == "receive" && p.bytes > 0 {
			if p.place, err = e.dev.export(p.src); err != nil {
				return fault(i, err)
			}
		}
		others = append(others, p)
	}
	return others, own, nil
}

// Wait makes the compute stream wait for the transfer. It blocks the caller until the peers' hosts have made the same
// call, but waits for no device.
func (p *pending) Wait() {
	e := p.e
	for pause := (pace.Backoff{}); ; pause.Wait() {
		if ready, err := p.tryWait(); err != nil {
			e.inform()
			e.compute.Fail(e.fault(err))
			return
		} else if ready {
			return
		}
	}
}

// tryWait makes the compute stream wait once all the writes that end the waits are queued.
func (p *pending) tryWait() (bool, error) {
	e := p.e
	e.using.Lock()
	defer e.using.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if p.over || e.complete(p) {
		return true, nil
	}
	if err := e.err(); err != nil {
		return false, err
	}
	e.progress()
	if !e.promisedAll(p.sent, true) || !e.promisedAll(p.recvd, false) {
		return false, e.err()
	}
	for _, s := range p.sent {
		e.end.wait(e.board.flag(e.rank, s.peer, flagSent), s.n)
		e.sends[s.peer].tie(s.n)
	}
	for _, r := range p.recvd {
		e.end.wait(e.board.flag(e.rank, r.peer, flagArrived), r.n)
		e.receives[r.peer].tie(r.n)
	}
	e.dev.hold(e.compute, e.end)
	return true, nil
}

// promisedAll reports whether the copies of a call's messages, up to the last of each peer, are queued. e.mu is held.
func (e *Engine) promisedAll(messages []lastOf, send bool) bool {
	for _, m := range messages {
		if !e.promised(m.peer, m.n, send) {
			return false
		}
	}
	return true
}

// Gates returns the gates of the call's receives; see comm.Gated. It returns none if a copy may need the processors
// that wait for it, or if the group has failed; Wait returns that error.
func (p *pending) Gates() []comm.PeerGate {
	e := p.e
	for _, r := range p.recvd {
		if e.near[r.peer] {
			return nil
		}
	}
	for pause := (pace.Backoff{}); ; pause.Wait() {
		e.mu.Lock()
		err := e.err()
		if err == nil {
			e.progress()
		}
		queued := err == nil && e.promisedAll(p.recvd, false)
		e.mu.Unlock()
		if err != nil {
			return nil
		}
		if queued {
			break
		}
	}
	gates := make([]comm.PeerGate, 0, len(p.recvd))
	for _, r := range p.recvd {
		word := e.dev.address(e.board.flag(e.rank, r.peer, flagArrived))
		gates = append(gates, comm.PeerGate{Peer: r.peer, Gate: tensor.Gate{Word: word, Count: r.n}})
	}
	return gates
}

// tie records that the compute stream waits for message n.
func (q *backlog) tie(n uint64) {
	if q.free <= n {
		q.free = 0
	}
}

// Sync blocks until the transfer has ended.
func (p *pending) Sync(ctx context.Context) error {
	e := p.e
	for pause := (pace.Backoff{}); ; pause.Wait() {
		e.mu.Lock()
		over := p.over || e.complete(p)
		err := e.err()
		if !over && err == nil {
			e.progress()
		}
		e.mu.Unlock()
		switch {
		case over:
			return nil
		case err != nil:
			e.inform()
			return e.fault(err)
		case ctx.Err() != nil:
			return e.fault(context.Cause(ctx))
		}
	}
}

// complete reports whether all of a call's messages have been copied, not given up. e.mu is held.
func (e *Engine) complete(p *pending) bool {
	if e.gone {
		return false
	}
	for _, s := range p.sent {
		if at := e.board.at(e.rank, s.peer, flagSent); at < s.n || at == flagOver {
			return false
		}
	}
	for _, r := range p.recvd {
		if at := e.board.at(e.rank, r.peer, flagArrived); at < r.n || at == flagOver {
			return false
		}
	}
	p.over = true
	return true
}
