package comm

import (
	"cmp"
	"fmt"
	"time"
	"unsafe"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
	"github.com/cprun/cprun/tensor"
)

// A part is a buffer to or from one rank of the group.
type part struct {
	peer int
	buf  []byte
}

// exchange runs all sends and receives at once, and returns when all have ended. Every call consists of exchanges. It
// runs on the group's stream; the caller handles parts for the own rank.
func (g *Group) exchange(sends, recvs []part) error {
	n := len(sends) + len(recvs)
	if err := g.cause(); err != nil {
		return err
	}
	if n == 0 {
		return nil
	}
	if len(g.xfers) < n {
		g.xfers = make([]link.Transfer, n)
	}
	xs := g.xfers[:n]
	g.round.Begin(n)
	for i := range xs {
		g.prepare(&xs[i], i, sends, recvs)
	}
	g.ledger.post(xs)
	// The receives go first: a message with a posted receive needs no buffer.
	for i := range xs {
		g.link.Post(&xs[i])
	}
	g.await(xs)
	var first error
	for i := range xs {
		first = cmp.Or(first, xs[i].Err())
	}
	if first != nil {
		g.keepWaits()
	}
	g.ledger.clear()
	for i := range xs {
		xs[i].Buf = nil // the buffer must not outlive the call
	}
	if first == nil {
		return nil
	}
	g.link.Fail(first)
	g.link.AwaitNotified()
	return g.link.Err()
}

// prepare makes x the i-th message of a round: receives first, then sends.
func (g *Group) prepare(x *link.Transfer, i int, sends, recvs []part) {
	seqs, p, send := g.recvSeq, part{}, i >= len(recvs)
	if send {
		seqs, p = g.sendSeq, sends[i-len(recvs)]
	} else {
		p = recvs[i]
	}
	x.Prepare(g.round, link.MsgID{Group: g.id, Seq: seqs[p.peer]}, g.ranks[p.peer], send, p.buf)
	seqs[p.peer]++
}

// alarmLook is the delay after which a call that begins while a rank is overdue reports its waits.
const alarmLook = 20 * time.Millisecond

// await returns when all transfers have ended. If one makes no progress within the deadline, it fails the transport,
// and with it all transfers.
func (g *Group) await(xs []link.Transfer) {
	limit := time.Duration(g.limit.Load())
	bell := g.link.Alarm()
	if limit >= 0 {
		first := limit
		if bell.On() { // another rank is overdue already, and may wait for this one
			first = min(alarmLook, limit)
		}
		g.timer.Reset(first)
		defer g.timer.Stop()
	}
	announced := -1 // the announced peer
	say := func(peer int) {
		if peer != announced {
			announced = peer
			g.link.AnnounceWait(g, peer)
		}
	}
	defer func() { say(-1) }()
	overdue := false // the deadline has passed
	for alarm := bell.Next(); ; {
		var x *link.Transfer
		var stood time.Duration
		select {
		case <-g.round.Done():
			return
		case <-alarm: // another rank is overdue, and may wait for this one
			alarm = bell.Next()
			if x, _ = slowest(xs); x != nil {
				say(x.Peer)
			}
			continue
		case <-g.timer.C:
			x, stood = slowest(xs)
		}
		switch {
		case x == nil: // all have ended; Done follows
			<-g.round.Done()
			return
		case stood < limit:
			overdue = false
			if bell.On() {
				say(x.Peer)
			} else {
				say(-1)
			}
			g.timer.Reset(limit - stood)
		case !overdue:
			overdue = true
			say(x.Peer)
			g.timer.Reset(min(blame.SecondLook, limit))
		default:
			g.link.Fail(g.stalled(x, limit))
			<-g.round.Done()
			return
		}
	}
}

// stalled returns the error of a transfer at its deadline.
func (g *Group) stalled(x *link.Transfer, limit time.Duration) *PeerError {
	err := blame.Stalled(g.link, g.ranks[g.rank], []int{x.Peer}, x.Op(), limit)
	if why := g.link.Unreached(x.Peer); why != nil && err.Rank == x.Peer {
		err.Cause = fmt.Errorf("%w: not connected: %v", err.Cause, why)
	}
	return err
}

// slowest returns the transfer without progress for longest; nil: all have ended.
func slowest(xs []link.Transfer) (oldest *link.Transfer, stood time.Duration) {
	for i := range xs {
		x := &xs[i]
		if x.Ended() {
			continue
		}
		if d := x.Stood(); oldest == nil || d > stood {
			oldest, stood = x, d
		}
	}
	return oldest, stood
}

// combine folds srcs into acc, one after the other. All hold elements of one reducible type, aligned for it.
func combine(d tensor.DType, op Op, acc []byte, srcs ...[]byte) {
	switch d {
	case tensor.F32:
		foldAll[float32](op, acc, srcs)
	case tensor.F64:
		foldAll[float64](op, acc, srcs)
	case tensor.I64:
		foldAll[int64](op, acc, srcs)
	case tensor.I32:
		foldAll[int32](op, acc, srcs)
	default:
		panic(fmt.Sprintf("comm: reduction of %s", d))
	}
}

// combineAll sets dst to the reduction of the ranks' slots, in rank order. dst may be one of them: it writes block by
// block, after all parts of a block are read. A block stays in the first-level cache meanwhile.
func combineAll(d tensor.DType, op Op, dst []byte, ranks int, slot func(r int) []byte) {
	var words [512]uint64 // so that any element type is aligned
	block := unsafe.Slice((*byte)(unsafe.Pointer(&words)), unsafe.Sizeof(words))
	var srcs [unroll][]byte
	for lo := 0; lo < len(dst); lo += len(block) {
		hi := min(lo+len(block), len(dst))
		acc := block[:hi-lo]
		copy(acc, slot(0)[lo:])
		for r := 1; r < ranks; r += len(srcs) {
			n := min(len(srcs), ranks-r)
			for i := range n {
				srcs[i] = slot(r + i)[lo:hi]
			}
			combine(d, op, acc, srcs[:n]...)
		}
		copy(dst[lo:hi], acc)
	}
}

// unroll is the number of ranks whose elements are added at once: to write and reread a partial sum takes longer than
// to add.
const unroll = 3

func foldAll[T float32 | float64 | int64 | int32](op Op, acc []byte, srcs [][]byte) {
	to := elements[T](acc)
	for ; op == Sum && len(srcs) >= unroll; srcs = srcs[unroll:] {
		a, b, c := elements[T](srcs[0])[:len(to)], elements[T](srcs[1])[:len(to)], elements[T](srcs[2])[:len(to)]
		for i, x := range to {
			to[i] = x + a[i] + b[i] + c[i] // in this order, as one by one
		}
	}
	for _, src := range srcs {
		fold(op, to, elements[T](src))
	}
}

// fold relies on the language: min and max of a NaN are NaN, so that no NaN is lost.
func fold[T float32 | float64 | int64 | int32](op Op, acc, src []T) {
	src = src[:len(acc)]
	switch op {
	case Sum:
		for i, x := range src {
			acc[i] += x
		}
	case Max:
		for i, x := range src {
			acc[i] = max(acc[i], x)
		}
	case Min:
		for i, x := range src {
			acc[i] = min(acc[i], x)
		}
	}
}

// elements reads bytes as elements. Views and the group's scratch are aligned for any type.
func elements[T any](b []byte) []T {
	var zero T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(zero)))
}

// scratchBytes returns memory of the group for one call.
func (g *Group) scratchBytes(n int) []byte {
	if words := (n + 7) / 8; len(g.scratch) < words {
		g.scratch = make([]uint64, words)
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(g.scratch))), n)
}

// padded rounds n up, so that slots of the scratch memory are aligned for every element type.
func padded(n int) int { return (n + 7) &^ 7 }

// share returns the parts of ranks lo to hi-1 of a vector with elements of that size.
func share(b []byte, size, ranks, lo, hi int) []byte {
	n := len(b) / size
	return b[n*lo/ranks*size : n*hi/ranks*size]
}
