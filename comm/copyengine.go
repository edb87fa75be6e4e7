package comm

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/cprun/cprun/internal/tensor"
)

// copyEngine moves messages between the devices of one host by their copy engines, straight
// from the sender's view into the receiver's. No processor of a device takes part, so a
// transfer beside a kernel costs the kernel nothing but memory bandwidth.
//
// A message goes like this:
//
//	receiver   compute stream ──event──> post lane: ready = n;   host: posts n on the board
//	sender     compute stream ──event──> post lane: begun = n
//	           copy lane: wait begun, ready >= n; copy; sent = n, arrived = n;   host: queued = n
//	both       Pending.Wait: end lane: wait sent, or arrived, >= n ──event──> compute stream
//
// The words are flags in host memory that all ranks map (copyBoard). Devices write them with
// a system-wide fence and wait for them without a kernel. The host reads them to find out who
// stands still, and writes its own rank's to end waits when the group has failed.
//
// The compute stream itself waits for events alone. Waiting for a flag costs a stream some 10 µs
// even where the flag is there already, an event that is over next to nothing, and mostly the
// data has arrived long before it is needed. One end lane does for all calls, in whatever order
// they are waited for: its waits come in the order of the compute stream's own, so whatever an
// event comes behind on the lane, the compute stream is behind already.
//
// One rule keeps this from locking up: a wait is given to the driver only after the write
// that ends it has been, on whatever rank. The order in which work is given to the drivers of
// all ranks is then an order in which all of it can be done. So it does no harm that streams
// share queues of the device, that queues are full, or that a call such as the first launch of a
// kernel waits for all that is queued. To keep the rule a receive is posted after its ready is
// queued, and Pending.Wait waits for the peers' hosts, never for a device, until they have
// made the same call.
type copyEngine struct {
	rank    int
	host    *Group // the same ranks; tells of failures, names peers
	compute tensor.Stream
	using   sync.Locker // held by who uses compute; before mu
	dev     copyDevice
	limit   atomic.Int64 // a time.Duration: how long a message may stand still
	split   int64        // the least bytes that are worth a lane of their own
	share   boardSource
	board   *copyBoard
	same    []bool // per rank: it is of this process

	cause  atomic.Pointer[error] // what ended the group
	failed chan struct{}         // closed then
	wake   chan struct{}         // there is work for the watch
	ending chan struct{}         // closed by close
	ended  chan struct{}         // closed when the watch has ended

	mu       sync.Mutex
	closed   bool         // guarded by mu, as all below
	gone     bool         // the lanes and the board are no longer to be touched
	dozing   bool         // the watch waits for wake alone
	calls    uint64       // of exchange
	deferred []copyCall   // not begun yet, in order
	post     copyLane     // writes begun and ready behind the compute stream
	order    copyLane     // writes them for deferred calls
	end      copyLane     // waits for what the compute stream is to come behind
	lanes    [][]copyLane // per peer, what copies to it
	sends    []copyQueue  // per peer
	receives []copyQueue  // per peer
}

// copyDevice is what the engine needs of a device. Addresses are the device's own.
type copyDevice interface {
	// attach has the device know the flags, which live until detach.
	attach(flags []uint64) error
	detach() error
	// lane makes a stream for copies.
	lane(name string) (copyLane, error)
	// probe is some memory of the device that peers can try to reach.
	probe() (copyPlace, error)
	// local checks that v is memory of this device and returns where it begins.
	local(v View) (uint64, error)
	// export says how the peers find the memory at addr, which is this device's.
	export(addr uint64) (copyPlace, error)
	// reach returns where this device finds a peer's memory.
	reach(p *copyPlace, sameProcess bool) (uint64, error)
	// hold makes compute wait for all that l has been given.
	hold(compute tensor.Stream, l copyLane)
}

// copyLane is a stream of a device. Its methods are called under the engine's lock, but for
// fail. What has been queued is carried out also after fail, what is queued later is not.
type copyLane interface {
	after(e tensor.Event)
	record() tensor.Event
	wait(flag *uint64, n uint64)
	write(flag *uint64, n uint64)
	copy(dst, src uint64, bytes int64)
	fail(err error)
	onFail(f func(error))
	idle() bool
	close() error
}

// copyMessage is one end of a message.
type copyMessage struct {
	n        uint64
	bytes    int64
	src, dst uint64    // dst only of messages to the own rank
	place    copyPlace // of a receive
}

// copyQueue is the messages to or from one peer.
type copyQueue struct {
	last uint64        // the number of the newest message
	free uint64        // that of the newest one that the compute stream has not waited for, or 0
	todo []copyMessage // not queued on a lane, or not posted, yet
	open []copyMessage // not known to be over, for errors
	at   standstill
}

// copyEnd is the last of a pending call's messages to or from a peer.
type copyEnd struct {
	peer int
	n    uint64
}

// copyPending is a call in flight.
type copyPending struct {
	e           *copyEngine
	sent, recvd []copyEnd
	over        bool // guarded by e.mu; it has been seen to be complete
}

// exchange queues messages; see Communicator.Exchange. The caller holds the compute stream.
func (e *copyEngine) exchange(send, recv []Message) (Pending, error) {
	p, err := e.queue(send, recv)
	if err != nil {
		e.tell()
		return nil, err
	}
	return p, nil
}

func (e *copyEngine) queue(send, recv []Message) (*copyPending, error) {
	outs, own, err := e.check("send", send)
	if err != nil {
		return nil, err
	}
	ins, into, err := e.check("receive", recv)
	if err == nil {
		err = pairUp(own, into)
	}
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.err(); err != nil {
		return nil, err
	}
	e.calls++
	c := copyCall{n: e.calls, ins: ins, outs: append(outs, own...), p: &copyPending{e: e}}
	for i := range c.ins {
		in := &c.ins[i]
		e.receives[in.peer].number(&in.copyMessage)
		c.p.recvd = ends(c.p.recvd, in.peer, in.n)
	}
	for i := range c.outs {
		out := &c.outs[i]
		e.sends[out.peer].number(&out.copyMessage)
		c.p.sent = ends(c.p.sent, out.peer, out.n)
	}
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

// ends raises the peer's last message.
func ends(all []copyEnd, peer int, n uint64) []copyEnd {
	for i := range all {
		if all[i].peer == peer {
			all[i].n = n
			return all
		}
	}
	return append(all, copyEnd{peer, n})
}

// number gives a message its number.
func (q *copyQueue) number(m *copyMessage) {
	q.last++
	m.n = q.last
	q.open = append(q.open, *m)
}

// copyCall is a call of exchange.
type copyCall struct {
	n         uint64
	ins, outs []peerMessage
	p         *copyPending
}

// peerMessage is a message and the rank it goes to or comes from.
type peerMessage struct {
	peer int
	copyMessage
}

// check looks at the messages and sorts out those of the own rank.
func (e *copyEngine) check(verb string, ms []Message) (others, own []peerMessage, err error) {
	for i, m := range ms {
		if m.Peer < 0 || m.Peer >= e.board.ranks {
			return nil, nil, fmt.Errorf("%s %d names rank %d of a group of %d", verb, i, m.Peer, e.board.ranks)
		}
		what := fmt.Sprintf("the view of %s %d (rank %d)", verb, i, m.Peer)
		if err := checkView(what, m.View); err != nil {
			return nil, nil, err
		}
		p := peerMessage{m.Peer, copyMessage{bytes: bytesIn(m.View)}}
		if p.bytes > 0 {
			if p.src, err = e.dev.local(m.View); err != nil {
				return nil, nil, fmt.Errorf("%s: %w", what, err)
			}
		}
		if m.Peer == e.rank {
			own = append(own, p)
			continue
		}
		if verb == "receive" && p.bytes > 0 {
			if p.place, err = e.dev.export(p.src); err != nil {
				return nil, nil, fmt.Errorf("%s: %w", what, err)
			}
		}
		others = append(others, p)
	}
	return others, own, nil
}

// pairUp gives the messages to the own rank their destinations.
func pairUp(own, into []peerMessage) error {
	if len(own) != len(into) {
		return fmt.Errorf("%d messages to the own rank, %d from it", len(own), len(into))
	}
	for i := range own {
		if own[i].bytes != into[i].bytes {
			return fmt.Errorf("message %d to the own rank has %d bytes, it is received into %d", i, own[i].bytes, into[i].bytes)
		}
		own[i].dst = into[i].src
	}
	return nil
}

// Wait makes the compute stream wait for the transfer. Until the peers' hosts have made the
// same call it blocks the caller, but it waits for no device.
func (p *copyPending) Wait() {
	e := p.e
	for pause := (backoff{}); ; pause.wait() {
		if ready, err := p.tryWait(); err != nil {
			e.tell()
			e.poison(e.fault(err))
			return
		} else if ready {
			return
		}
	}
}

// tryWait makes the compute stream wait once all the writes that end the waits are queued.
func (p *copyPending) tryWait() (bool, error) {
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
	for _, s := range p.sent {
		if !e.promised(s.peer, s.n, true) {
			return false, e.err()
		}
	}
	for _, r := range p.recvd {
		if !e.promised(r.peer, r.n, false) {
			return false, e.err()
		}
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

// tie notes that the compute stream waits for message n.
func (q *copyQueue) tie(n uint64) {
	if q.free <= n {
		q.free = 0
	}
}

// Sync blocks until the transfer has ended.
func (p *copyPending) Sync(ctx context.Context) error {
	e := p.e
	for pause := (backoff{}); ; pause.wait() {
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
			e.tell()
			return e.fault(err)
		case ctx.Err() != nil:
			return e.fault(context.Cause(ctx))
		}
	}
}

// complete reports whether all of a call's messages have been copied, and not only been given
// up. e.mu is held.
func (e *copyEngine) complete(p *copyPending) bool {
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
