package copyengine

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// A config holds the parts of an engine.
type config struct {
	host    *comm.Group // a host group of the same ranks, all of one host
	dev     device
	compute Compute
	using   sync.Locker   // held to use the compute stream
	limit   time.Duration // comm.Options.Deadline
	share   boardSource
}

// boardSource makes the memory that the ranks share.
type boardSource interface {
	open(ctx context.Context, host *comm.Group) (*board, error)
	done(b *board) error
}

// process returns a random number that the ranks of this process share.
var process = sync.OnceValue(func() uint64 {
	var b [8]byte
	rand.Read(b[:])
	return binary.NativeEndian.Uint64(b[:]) | 1
})

// connect joins the ranks of c.host. All of them call it. It fails on all ranks or on none, and then leaves nothing
// behind.
func connect(ctx context.Context, c config) (*Engine, error) {
	board, err := c.share.open(ctx, c.host)
	if err != nil {
		return nil, fmt.Errorf("copy engines: %w", err)
	}
	n := board.ranks
	e := &Engine{
		rank: c.host.Rank(), host: c.host, compute: c.compute, using: c.using, dev: c.dev,
		share: c.share, board: board, same: make([]bool, n), near: make([]bool, n),
		failed: make(chan struct{}), wake: make(chan struct{}, 1),
		ending: make(chan struct{}), ended: make(chan struct{}),
		lanes: make([]lane, n), sends: make([]backlog, n), receives: make([]backlog, n),
	}
	e.limit.Store(int64(c.limit))
	places, err := e.introduce(ctx, e.open())
	if err == nil {
		err = agree(ctx, c.host, e.reachAll(places))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("copy engines: %w", err), e.giveBack())
	}
	for l := range e.streams {
		l.onFail(e.fail)
	}
	go e.watch() // ends after close, or a failure
	return e, nil
}

// open makes the streams now: later a device that waits for a flag could block that.
func (e *Engine) open() (err error) {
	if err := e.dev.attach(e.board.flags()); err != nil {
		return err
	}
	if e.post, err = e.dev.lane("comm post"); err != nil {
		return err
	}
	if e.order, err = e.dev.lane("comm order"); err != nil {
		return err
	}
	if e.end, err = e.dev.lane("comm end"); err != nil {
		return err
	}
	for p := range e.lanes {
		if e.lanes[p], err = e.dev.lane(fmt.Sprintf("comm to rank %d", p)); err != nil {
			return err
		}
	}
	return nil
}

func (e *Engine) streams(yield func(lane) bool) {
	for _, l := range append([]lane{e.post, e.order, e.end}, e.lanes...) {
		if l != nil && !yield(l) {
			return
		}
	}
}

// giveBack frees the resources of the engine. Its lanes must be idle.
func (e *Engine) giveBack() error {
	var errs []error
	for l := range e.streams {
		errs = append(errs, l.close())
	}
	return errors.Join(append(errs, e.dev.detach(), e.share.done(e.board))...)
}

// introduce sends each rank's test memory to all others, unless err reports an earlier failure.
func (e *Engine) introduce(ctx context.Context, err error) ([]location, error) {
	var place location
	if err == nil {
		place, err = e.dev.probe()
	}
	const words = 2 + int(unsafe.Sizeof(place)/8)
	mine := make([]int64, words)
	mine[0], mine[1] = int64(process()), int64(e.dev.identity())
	*(*location)(unsafe.Pointer(&mine[2])) = place
	all, gatherErr := gather(ctx, e.host, mine)
	if gatherErr != nil {
		return nil, errors.Join(err, gatherErr)
	}
	places := make([]location, e.board.ranks)
	for p := range places {
		e.same[p], e.near[p] = all[p*words] == mine[0], all[p*words+1] == mine[1]
		places[p] = *(*location)(unsafe.Pointer(&all[p*words+2]))
	}
	return places, agree(ctx, e.host, err)
}

// reachAll tests access to the other devices, so that a host without it fails now.
func (e *Engine) reachAll(places []location) error {
	for p := range places {
		if p == e.rank {
			continue
		}
		if _, err := e.dev.reach(&places[p], e.same[p]); err != nil {
			return fmt.Errorf("the device of %s cannot be reached from this one: %w", e.peerName(p), err)
		}
	}
	return nil
}

// gather collects the ranks' words, in rank order.
func gather(ctx context.Context, host *comm.Group, mine []int64) ([]int64, error) {
	all := tensor.New(tensor.I64, host.Size(), len(mine))
	err := comm.Finish(ctx)(host.AllGather(all, tensor.FromSlice(mine, len(mine))))
	return tensor.Data[int64](all), err
}

// agree returns an error on all ranks if one has one: the own error, or the names of the ranks with errors.
func agree(ctx context.Context, host *comm.Group, own error) error {
	mine := int64(0)
	if own != nil {
		mine = 1
	}
	all, err := gather(ctx, host, []int64{mine})
	if own != nil || err != nil {
		return errors.Join(own, err)
	}
	var faulty []string
	for r, x := range all {
		if x != 0 {
			faulty = append(faulty, host.PeerName(r))
		}
	}
	if len(faulty) > 0 {
		return fmt.Errorf("%s could not set them up", strings.Join(faulty, ", "))
	}
	return nil
}

// A sharedFile is the boardSource of processes: a file in memory that rank 0 makes, all ranks map, and rank 0 then
// removes.
type sharedFile struct{}

// shmDir holds files in memory. On another file system devices may not be allowed to write to mapped pages.
const shmDir = "/dev/shm"

// maxShmName bounds the path that rank 0 sends to the others.
const maxShmName = 256

func (sharedFile) open(ctx context.Context, host *comm.Group) (b *board, err error) {
	size := boardWords(host.Size()) * 8
	name := tensor.New(tensor.U8, maxShmName)
	var f *os.File
	if host.Rank() == 0 {
		if f, err = newShm(size); err == nil {
			defer os.Remove(f.Name())
			copy(tensor.Bytes(name), f.Name())
		}
	}
	castErr := comm.Finish(ctx)(host.Broadcast(name, 0))
	if host.Rank() != 0 && castErr == nil {
		if path := strings.TrimRight(string(tensor.Bytes(name)), "\x00"); path != "" {
			f, err = os.OpenFile(path, os.O_RDWR|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
		}
	}
	if f != nil {
		defer f.Close()
		if castErr == nil {
			b, err = mapBoard(f, host.Size())
		}
	}
	if castErr != nil {
		return nil, errors.Join(err, castErr)
	}
	if err := agree(ctx, host, err); err != nil {
		if b != nil {
			return nil, errors.Join(err, sharedFile{}.done(b))
		}
		return nil, err
	}
	return b, nil
}

// newShm makes a file of zeros that only this user can open.
func newShm(size int) (*os.File, error) {
	f, err := os.CreateTemp(shmDir, "cprun-*")
	if err != nil {
		return nil, fmt.Errorf("shared memory of %d bytes (is a tmpfs mounted on %s?): %w", size, shmDir, err)
	}
	// Unlike Truncate, Write allocates the pages now. If memory were short at the first access to a page, the
	// access would end the process.
	if _, err := f.Write(make([]byte, size)); err != nil {
		f.Close()
		return nil, errors.Join(fmt.Errorf("shared memory of %d bytes in %s: %w", size, shmDir, err),
			os.Remove(f.Name()))
	}
	return f, nil
}

// mapBoard maps the file of a board. It checks the size, since an access beyond the end of a file would end the
// process.
func mapBoard(f *os.File, ranks int) (*board, error) {
	n := boardWords(ranks)
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() < int64(n)*8 {
		return nil, fmt.Errorf("%s is no shared memory of %d bytes: %v, %d bytes", f.Name(), n*8, info.Mode(),
			info.Size())
	}
	m, err := syscall.Mmap(int(f.Fd()), 0, n*8, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mapping %s: %w", f.Name(), err)
	}
	return &board{words: unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(m))), n), ranks: ranks}, nil
}

func (sharedFile) done(b *board) error {
	return syscall.Munmap(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(b.words))), len(b.words)*8))
}

// A board is host memory that the ranks of a group share, with their progress. It has three parts, all of 64-bit words
// and zero at first:
//
//   - Flags, which devices write and wait for, in a line of 64 bytes for each (rank, peer).
//     Only streams of the rank wait for the flags of its lines, so a rank that gives up can
//     end its own waits by writing to them, without harm to others.
//   - For each rank one word, set when it has left in good order.
//   - For each (sender, receiver) the addresses that the receiver has posted, in a ring, and
//     two counters: messages posted, and messages whose copy the sender has queued.
//
// Messages from one rank to another are counted from 1, for the life of the group.
type board struct {
	words []uint64
	ranks int
}

// The flags of rank w and peer p. Each holds the number of the last message in its state.
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

	// postRing is how many receives a rank can post ahead of their sender. It keeps the others until there is room.
	// Calls run one after the other, so this happens only in a call with more messages from one peer.
	postRing  = 32
	postWords = 12
	pairWords = 2*lineWords + postRing*postWords // 3,200 bytes
)

// flagOver ends waits on a rank's flags: it exceeds any message's number, by less than 1<<63.
const flagOver = 1 << 62

func flagWords(ranks int) int {
	return (ranks*ranks*lineWords + pageWords - 1) / pageWords * pageWords
}

// boardWords returns the size of a board in words: 56 KiB for 4 ranks, 208 KiB for 8.
func boardWords(ranks int) int {
	n := flagWords(ranks) + ranks*lineWords + ranks*ranks*pairWords
	return (n + pageWords - 1) / pageWords * pageWords
}

// flags returns the part that devices access, in whole pages.
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

// queued returns the counter of messages whose copy the sender has queued; their entries in the ring are then free.
func (b *board) queued(sender, receiver int) *uint64 {
	return &b.pair(sender, receiver)[lineWords]
}

// A notice is a posted receive.
type notice struct {
	bytes uint64
	place location
}

// A location is the place of a view: an address for ranks of the same process, and an exported allocation with an
// offset for others.
type location struct {
	addr, offset uint64
	handle       [64]byte
}

// A region is an allocation as a device finds it.
type region struct {
	base  uint64
	bytes int64
}

// at returns the address of a peer's bytes at an offset, if they lie within the region.
func (r region) at(offset, bytes uint64) (uint64, error) {
	if all := uint64(r.bytes); offset > all || bytes > all-offset {
		return 0, fmt.Errorf("%d bytes at offset %d are not within its allocation of %d", bytes, offset, r.bytes)
	}
	return r.base + offset, nil
}

// put writes message n of a pair to the board and publishes it, or returns false without room.
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
