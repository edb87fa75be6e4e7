package copyengine

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/pace"
)

const (
	// graceOver is the time in which a failed group's streams may end by themselves, as they do unless a peer has died.
	// Then the rank writes its own flags. By that time the peers know of the failure and use no copied data.
	graceOver = 250 * time.Millisecond
	// drainBound limits the wait for streams that do not end.
	drainBound = 10 * time.Second
	// closeBound limits Close's wait for the streams; the watch releases them later.
	closeBound = 2 * time.Second
)

// watch runs as the engine's goroutine, for its whole life. It makes progress without callers, and detects messages
// without progress. It ends after close, or after a failure.
func (e *Engine) watch() {
	defer close(e.ended)
	last, fast := time.Now(), minTick
	for {
		if !e.seize() {
			e.drain()
			return
		}
		waiting := e.progress()
		now := time.Now()
		open := e.inspect(now.Sub(last))
		last, e.dozing = now, !waiting && !open
		dozing := e.dozing
		e.mu.Unlock()
		var tick <-chan time.Time
		switch {
		case waiting:
			tick, fast = time.After(fast), min(2*fast, maxTick)
		case open:
			tick, fast = time.After(e.tick()), minTick
		}
		select {
		case <-e.failed:
			e.drain()
			return
		case <-e.ending:
			e.finish()
			return
		case <-e.wake:
			if fast = minTick; dozing {
				last = time.Now() // no message was pending meanwhile
			}
		case <-tick:
		}
	}
}

// seize locks e.mu for the watch, or returns false if the group has failed. The holder may be blocked in the driver,
// whose queues are full after a wait for a peer. In a live world that ends; otherwise it counts as a stalled message.
func (e *Engine) seize() bool {
	last, stood := time.Now(), time.Duration(0)
	for pause := (pace.Backoff{}); !e.mu.TryLock(); pause.Wait() {
		select {
		case <-e.failed:
			return false
		default:
		}
		now := time.Now()
		stood, last = stood+e.awake(now.Sub(last)), now
		if limit := e.deadline(); limit > 0 && stood >= limit {
			e.fail(e.stuck())
		}
	}
	return true
}

// awake returns took, or less if the process must have been stopped meanwhile.
func (e *Engine) awake(took time.Duration) time.Duration {
	if limit := e.deadline(); limit > 0 {
		return min(took, max(limit/4, maxTick))
	}
	return took
}

// stuck returns the error of a device that takes no more work.
func (e *Engine) stuck() error {
	const op = "calls behind a full queue of the device"
	if rank := blame.Last(boardWaits{e}, e.rank, e.rank); rank >= 0 {
		return e.blame(rank, op, blame.Deadline(e.deadline()))
	}
	return fmt.Errorf("%s: %w", op, blame.Deadline(e.deadline()))
}

// The bounds of the watch's period while it waits for a peer's host to make a call.
const (
	minTick = 50 * time.Microsecond
	maxTick = 2 * time.Millisecond
)

// tick returns the period of checks of messages that wait only for devices.
func (e *Engine) tick() time.Duration {
	limit := e.deadline()
	if limit < 0 {
		return time.Second
	}
	return max(min(limit/8, 100*time.Millisecond), maxTick)
}

func (e *Engine) deadline() time.Duration { return time.Duration(e.limit.Load()) }

// SetDeadline changes the time that a message may take without progress; negative: no bound.
func (e *Engine) SetDeadline(d time.Duration) { e.limit.Store(int64(d)) }

// A stall measures how long the next message of a queue has not been copied since this rank's device came to it. Before
// that this rank is late itself.
type stall struct {
	at    uint64
	stood time.Duration
}

// inspect reports whether some message is pending, and ends the group if one exceeds its deadline. took is the time
// since the last inspection. e.mu is held.
func (e *Engine) inspect(took time.Duration) (open bool) {
	if e.err() != nil {
		return false
	}
	took = e.awake(took)
	b := e.board
	for p := range b.ranks {
		in, out := &e.receives[p], &e.sends[p]
		e.examine(p, out, true, b.at(e.rank, p, flagBegun), b.at(e.rank, p, flagSent), took)
		e.examine(p, in, false, b.at(p, e.rank, flagReady), b.at(e.rank, p, flagArrived), took)
		open = open || len(in.open) > 0 || len(out.open) > 0
	}
	return open
}

// examine checks the messages to or from a peer. mine is the last message that this rank's device has come to, done the
// last copied one.
func (e *Engine) examine(peer int, q *backlog, send bool, mine, done uint64, took time.Duration) {
	q.forget(done)
	if len(q.open) == 0 {
		q.at = stall{}
		return
	}
	m := &q.open[0]
	if atomic.LoadUint64(e.board.left(peer)) != 0 && peer != e.rank && !e.promised(peer, m.n, send) {
		e.fail(e.blame(peer, describe(m, send).What, comm.ErrPeerLeft))
		return
	}
	if mine <= done || q.at.at != m.n {
		q.at = stall{at: m.n}
		return
	}
	q.at.stood += took
	if limit := e.deadline(); limit > 0 && q.at.stood >= limit {
		e.fail(e.stalled(peer, m, send))
	}
}

func describe(m *message, send bool) blame.Op {
	op := blame.Message(send, int(m.bytes))
	op.What += fmt.Sprintf(" (message %d)", m.n)
	return op
}

// stalled returns the error of a message at its deadline. In a ring a neighbour may itself wait for its own neighbour;
// the board shows the rank that stopped.
func (e *Engine) stalled(peer int, m *message, send bool) error {
	return e.world(blame.Stalled(boardWaits{e}, e.rank, []int{peer}, describe(m, send), e.deadline()))
}

// boardWaits derives the waits of ranks from the board. Ranks count within the group.
type boardWaits struct{ *Engine }

func (w boardWaits) Ranks() int               { return w.board.ranks }
func (w boardWaits) PeerName(rank int) string { return w.peerName(rank) }

// WaitsFor returns a rank that has not come to a message which the given rank's device has come to, or -1.
func (w boardWaits) WaitsFor(rank int) int {
	b := w.board
	for p := range b.ranks {
		if p == rank {
			continue
		}
		sent, arrived := b.at(rank, p, flagSent), b.at(rank, p, flagArrived)
		if b.at(rank, p, flagBegun) > sent && b.at(rank, p, flagReady) <= sent ||
			b.at(p, rank, flagReady) > arrived && b.at(p, rank, flagBegun) <= arrived {
			return p
		}
	}
	return -1
}

func (e *Engine) peerName(peer int) string { return e.host.PeerName(peer) }

func (e *Engine) blame(peer int, op string, cause error) error {
	return e.world(blame.On(boardWaits{e}, peer, op, cause))
}

func (e *Engine) world(err *comm.PeerError) error {
	err.Rank = e.host.WorldRank(err.Rank)
	return err
}

func (e *Engine) fault(err error) error {
	return blame.InCall("exchange", e.rank, e.board.ranks, err)
}

// err returns the cause that ended the group, or nil. e.mu is held.
func (e *Engine) err() error {
	if c := e.cause.Load(); c != nil {
		return *c
	}
	if e.closed {
		return comm.ErrClosed
	}
	return nil
}

// Abort fails all pending and later calls. Any goroutine may call it; it does not block.
func (e *Engine) Abort(cause error) { e.fail(cause) }

// fail ends the group with its first cause. Queued copies continue, so that peers that are not yet informed get their
// data; the watch ends them.
func (e *Engine) fail(cause error) {
	cause = blame.OwnForm(cause)
	if !e.cause.CompareAndSwap(nil, &cause) {
		return
	}
	for l := range e.streams {
		l.fail(cause)
	}
	close(e.failed)
}

// inform informs the other ranks, as far as it can reach them, and the compute stream of a failure. Callers learn of it
// only then: they may exit, and a connection that ends without a goodbye counts as a death; or they may wait for the
// stream, which must not end without an error. The wait is bounded; the watch needs no lock held meanwhile.
func (e *Engine) inform() {
	if cause := e.cause.Load(); cause != nil {
		e.host.Abort(*cause)
		e.compute.Fail(*cause)
	}
}

// drain informs the other ranks and the compute stream of a failure, and ends the waits of this rank's streams. Until
// then they wait for missing data, so that nothing is computed from it.
//
// It writes the flags repeatedly: a peer's device may still carry out earlier writes. The board stays mapped after a
// failure, because the compute stream, or a device that hangs, may still read it.
func (e *Engine) drain() {
	e.inform()
	waits := e.Waits() // before they end
	e.stood.Store(&waits)
	for start := time.Now(); ; time.Sleep(time.Millisecond) {
		took := time.Since(start)
		if took > graceOver {
			e.release() // without the lock, whose holder may be blocked in the driver until a wait ends
		}
		if e.drained(took) || took > drainBound {
			return
		}
	}
}

// drained closes the lanes if they are idle.
func (e *Engine) drained(took time.Duration) bool {
	if !e.mu.TryLock() {
		return false
	}
	defer e.mu.Unlock()
	if !e.idle() || took <= graceOver && !e.allCopied() {
		return false
	}
	e.gone = true
	for l := range e.streams {
		_ = l.close() // its error is the cause
	}
	return true
}

// release writes to all flags that this rank's streams wait for.
func (e *Engine) release() {
	for p := range e.board.ranks {
		for kind := flagBegun; kind <= flagCalled; kind++ {
			atomic.StoreUint64(e.board.flag(e.rank, p, kind), flagOver)
		}
	}
}

// allCopied reports whether every message of this rank has been copied. e.mu is held.
func (e *Engine) allCopied() bool {
	for p := range e.board.ranks {
		if !reached(e.board.at(e.rank, p, flagSent), e.sends[p].last) ||
			!reached(e.board.at(e.rank, p, flagArrived), e.receives[p].last) {
			return false
		}
	}
	return true
}

// idle reports whether the lanes have done all their work. e.mu is held.
func (e *Engine) idle() bool {
	for l := range e.streams {
		if !l.idle() {
			return false
		}
	}
	return true
}

// Close leaves the group. Messages that are queued on both sides are still copied; all other pending calls fail.
func (e *Engine) Close() error {
	e.leave()
	select {
	case <-e.ended:
	case <-time.After(closeBound):
	}
	return nil
}

func (e *Engine) leave() {
	e.using.Lock()
	defer e.using.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return
	}
	e.closed = true
	if e.cause.Load() == nil {
		// When the post lane has come here, the compute stream is past all its waits.
		e.post.after(e.compute.Record())
		atomic.StoreUint64(e.board.left(e.rank), 1)
	}
	close(e.ending)
}

// finish frees the resources when the lanes are idle.
func (e *Engine) finish() {
	for pause := (pace.Backoff{}); ; pause.Wait() {
		if e.cause.Load() != nil {
			e.drain()
			return
		}
		e.mu.Lock()
		if e.idle() {
			break
		}
		e.mu.Unlock()
	}
	defer e.mu.Unlock()
	e.gone = true
	if err := e.giveBack(); err != nil {
		e.host.Options().Log("rank %d: end of the copy engines: %v", e.rank, err)
	}
}
