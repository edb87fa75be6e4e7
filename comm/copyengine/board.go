package copyengine

import (
	"fmt"
	"sync/atomic"
	"unsafe"
)

// board is host memory that the ranks of a group share, on which they tell each other
// where they stand. It has three parts, all of 64-bit words and zero at first:
//
//   - Flags, which devices write and wait for, in a line of 64 bytes for each (rank, peer).
//     Only streams of the rank wait for the flags of its lines, so a rank that gives up can
//     end its own waits by writing to them, and harms no one.
//   - For each rank one word, set when it has left in good order.
//   - For each (sender, receiver) the addresses that the receiver has posted, in a ring, and
//     two counters: messages posted, and messages whose copy the sender has queued.
//
// Messages from one rank to another are counted from 1, for as long as the group lives.
type board struct {
	words []uint64
	ranks int
}

// The flags of rank w and peer p. Each holds the number of the last message that it says
// something of.
const (
	flagBegun   = iota // w's compute stream has come to its send to p; written by w's device
	flagReady          // p's compute stream has come to its receive from w; by p's device
	flagSent           // the message from w to p has been copied; by w's device
	flagArrived        // the message from p to w has been copied; by p's device
	flagCalled         // p is w: w's compute stream has come to this call; by w's device
)

const (
	lineWords = 8 // a cache line
	pageWords = 512

	// postRing is how many receives a rank can post ahead of their sender. It keeps the rest
	// until there is room. Calls run one after the other, so only a call with more messages
	// than this from one peer has a rest.
	postRing  = 32
	postWords = 12
	pairWords = 2*lineWords + postRing*postWords // 3,200 bytes
)

// flagOver ends waits on a rank's flags: it is above any message's number, and less than 1<<63 ahead of it.
const flagOver = 1 << 62

func flagWords(ranks int) int {
	return (ranks*ranks*lineWords + pageWords - 1) / pageWords * pageWords
}

// boardWords returns the size of a board in words: 56 KiB for 4 ranks, 208 KiB for 8.
func boardWords(ranks int) int {
	n := flagWords(ranks) + ranks*lineWords + ranks*ranks*pairWords
	return (n + pageWords - 1) / pageWords * pageWords
}

// flags returns the part that devices see, whole pages.
func (b *board) flags() []uint64 { return b.words[:flagWords(b.ranks)] }

func (b *board) flag(rank, peer, kind int) *uint64 {
	return &b.words[(rank*b.ranks+peer)*lineWords+kind]
}

func (b *board) at(rank, peer, kind int) uint64 {
	return atomic.LoadUint64(b.flag(rank, peer, kind))
}

// left returns the word that a rank sets when it closes in good order.
func (b *board) left(rank int) *uint64 { return &b.words[flagWords(b.ranks)+rank*lineWords] }

func (b *board) pair(sender, receiver int) []uint64 {
	at := flagWords(b.ranks) + b.ranks*lineWords + (sender*b.ranks+receiver)*pairWords
	return b.words[at : at+pairWords : at+pairWords]
}

// posted returns the counter of posted receives; the receiver writes it.
func (b *board) posted(sender, receiver int) *uint64 { return &b.pair(sender, receiver)[0] }

// queued counts the messages whose copy the sender has queued, which is when their places in
// the ring become free.
func (b *board) queued(sender, receiver int) *uint64 {
	return &b.pair(sender, receiver)[lineWords]
}

// A notice is a receive on the board.
type notice struct {
	bytes uint64
	place location
}

// A location is where a view lies: as an address for ranks of the same process, and as an
// exported allocation and the offset in it for others.
type location struct {
	addr, offset uint64
	handle       [64]byte
}

// A region is an allocation as a device finds it.
type region struct {
	base  uint64
	bytes int64
}

// at returns the address of some bytes of the region at an offset, which a peer has said.
func (r region) at(offset, bytes uint64) (uint64, error) {
	if all := uint64(r.bytes); offset > all || bytes > all-offset {
		return 0, fmt.Errorf("%d bytes at offset %d are not within its allocation of %d", bytes, offset, r.bytes)
	}
	return r.base + offset, nil
}

// put writes message n of a pair to the board and publishes it. It reports false if there
// is no room.
func (b *board) put(sender, receiver int, n uint64, p *notice) bool {
	if n > atomic.LoadUint64(b.queued(sender, receiver))+postRing {
		return false
	}
	*b.post(sender, receiver, n) = *p
	atomic.StoreUint64(b.posted(sender, receiver), n)
	return true
}

func (b *board) post(sender, receiver int, n uint64) *notice {
	at := 2*lineWords + int((n-1)%postRing)*postWords
	return (*notice)(unsafe.Pointer(&b.pair(sender, receiver)[at]))
}

// A post fits its place.
var _ [postWords*8 - unsafe.Sizeof(notice{})]byte

func reached(at, n uint64) bool { return int64(at-n) >= 0 }
