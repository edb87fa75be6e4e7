package copyengine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/cprun/cprun/tensor"
)

// The fake device of the copy engine's tests: host memory, and streams that behave as a
// GPU's do. What has been queued is carried out whatever happens on the host, a stream that
// waits for a flag waits until the flag is there, and several streams may share one queue.

// fakeQueue carries out tasks in order. With little room for waiting ones, push blocks.
type fakeQueue struct{ tasks chan func() }

// newFakeQueue returns a queue with that much room; 0: more than the tests need.
func newFakeQueue(room int) *fakeQueue {
	if room == 0 {
		room = 4096
	}
	q := &fakeQueue{make(chan func(), room)}
	go func() { // ends with the tasks, after close
		for f := range q.tasks {
			f()
		}
	}()
	return q
}

func (q *fakeQueue) push(f func()) { q.tasks <- f }
func (q *fakeQueue) close()        { close(q.tasks) }

// A fakeStream is a tensor.Stream and a lane, on a queue of its own or on a shared one.
type fakeStream struct {
	q      *fakeQueue
	own    bool
	left   atomic.Int64 // tasks not carried out yet
	broken bool         // used by tasks alone: an error came from the device itself

	mu   sync.Mutex
	err  error       // guarded by mu
	hook func(error) // guarded by mu
}

// newFakeStream returns a stream on q; nil: on a new queue with that much room.
func newFakeStream(q *fakeQueue, room int) *fakeStream {
	if q == nil {
		return &fakeStream{q: newFakeQueue(room), own: true}
	}
	return &fakeStream{q: q}
}

// do queues f, unless the stream has been failed.
func (s *fakeStream) do(f func()) {
	if s.fault() != nil {
		return
	}
	s.left.Add(1)
	s.q.push(func() {
		if !s.broken {
			f()
		}
		s.left.Add(-1)
	})
}

func (s *fakeStream) fault() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

func (s *fakeStream) Fail(err error) {
	s.mu.Lock()
	first, f := s.err == nil, s.hook
	if first {
		s.err = err
	}
	s.mu.Unlock()
	if first && f != nil {
		f(err)
	}
}

type fakeEvent struct {
	done chan struct{}
	s    *fakeStream
}

func (e *fakeEvent) Done() bool {
	select {
	case <-e.done:
		return true
	default:
		return false
	}
}

func (e *fakeEvent) Sync(ctx context.Context) error {
	select {
	case <-e.done:
		return e.s.fault()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (s *fakeStream) Record() tensor.Event {
	e := &fakeEvent{done: make(chan struct{}), s: s}
	s.q.push(func() { close(e.done) })
	return e
}

func (s *fakeStream) Wait(e tensor.Event) {
	s.do(func() {
		if err := e.Sync(context.Background()); err != nil {
			s.broken = true
			s.Fail(err)
		}
	})
}

func (s *fakeStream) Label(string)     {}
func (s *fakeStream) Labelled() string { return "" }

func (s *fakeStream) Sync(ctx context.Context) error {
	err := s.Record().Sync(ctx)
	return cmp.Or(s.fault(), err)
}

func (s *fakeStream) after(e tensor.Event)      { s.Wait(e) }
func (s *fakeStream) record() tensor.Event      { return s.Record() }
func (s *fakeStream) fail(err error)            { s.Fail(err) }
func (s *fakeStream) stream() tensor.Stream     { return s }
func (s *fakeStream) idle() bool                { return s.left.Load() == 0 }
func (s *fakeStream) write(f *uint64, n uint64) { s.do(func() { atomic.StoreUint64(f, n) }) }
func (s *fakeStream) wait(f *uint64, n uint64)  { s.do(func() { pollFlag(f, n) }) }

func (s *fakeStream) onFail(f func(error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hook = f
}

func (s *fakeStream) copy(dst, src uint64, bytes int64, _ int) {
	s.do(func() { copy(fakeMemory.at(dst, bytes), fakeMemory.at(src, bytes)) })
}

func (s *fakeStream) close() error {
	if s.own {
		s.q.close()
	}
	return nil
}

func pollFlag(f *uint64, n uint64) {
	for !reached(atomic.LoadUint64(f), n) {
		time.Sleep(10 * time.Microsecond)
	}
}

// fakeMemory holds the memory of all fake devices of the process.
var fakeMemory = &fakeSpace{ids: map[*tensor.Host]uint64{}, opened: map[string]uint64{}}

type fakeSpace struct {
	mu     sync.Mutex
	blocks []fakeBlock             // guarded by mu; block i begins at address (i+1) << fakeShift
	ids    map[*tensor.Host]uint64 // guarded by mu
	opened map[string]uint64       // guarded by mu; addresses of other processes' blocks
}

type fakeBlock struct {
	bytes []byte
	path  string // of the file that other processes map; "" is memory of this process alone
}

const fakeShift = 40

func (m *fakeSpace) at(addr uint64, n int64) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	off := int64(addr & (1<<fakeShift - 1))
	return m.blocks[addr>>fakeShift-1].bytes[off : off+n]
}

func (m *fakeSpace) add(b fakeBlock) uint64 {
	m.blocks = append(m.blocks, b)
	return uint64(len(m.blocks)) << fakeShift
}

func (m *fakeSpace) host(h *tensor.Host, path string) uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	addr, ok := m.ids[h]
	if !ok {
		addr = m.add(fakeBlock{unsafe.Slice((*byte)(h.Ptr()), h.Bytes()), path})
		m.ids[h] = addr
	}
	return addr
}

// region returns the block that begins at base.
func (m *fakeSpace) region(base uint64) region {
	m.mu.Lock()
	defer m.mu.Unlock()
	return region{base, int64(len(m.blocks[base>>fakeShift-1].bytes))}
}

// open maps another process's block.
func (m *fakeSpace) open(path string) (uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if addr, ok := m.opened[path]; ok {
		return addr, nil
	}
	b, err := mapFile(path, 0)
	if err != nil {
		return 0, err
	}
	addr := m.add(fakeBlock{b, path})
	m.opened[path] = addr
	return addr, nil
}

// mapFile maps a file. With a number of bytes it makes the file.
func mapFile(path string, bytes int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if bytes > 0 {
		if err := f.Truncate(bytes); err != nil {
			return nil, err
		}
	}
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return syscall.Mmap(int(f.Fd()), 0, int(info.Size()), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
}

// A fakeDevice stands in for the device of one rank. A call with an entry in faults returns that error.
type fakeDevice struct {
	queue  *fakeQueue // of all streams, or nil: each has its own
	room   int        // of those
	dir    string     // for memory that other processes map, or ""
	rank   int
	faults map[string]error
	files  int
	flags  []*uint64 // by the address that kernels know
}

func (d *fakeDevice) attach([]uint64) error { return d.faults["attach"] }
func (d *fakeDevice) detach() error         { return nil }

func (d *fakeDevice) identity() uint64 { return uint64(d.rank + 1) }

// address returns the number of a flag. One goroutine calls it, the caller of Exchange.
func (d *fakeDevice) address(flag *uint64) uint64 {
	i := slices.Index(d.flags, flag)
	if i < 0 {
		i, d.flags = len(d.flags), append(d.flags, flag)
	}
	return uint64(i)
}

func (d *fakeDevice) lane(string) (lane, error) {
	if err := d.faults["lane"]; err != nil {
		return nil, err
	}
	return newFakeStream(d.queue, d.room), nil
}

func (d *fakeDevice) probe() (location, error) {
	v, err := d.alloc(8)
	if err = errors.Join(err, d.faults["probe"]); err != nil {
		return location{}, err
	}
	addr, _ := d.local(v) // it is the host's memory
	return d.export(addr)
}

func (d *fakeDevice) local(v tensor.View) (uint64, error) {
	h, ok := v.Memory().(*tensor.Host)
	if !ok {
		return 0, fmt.Errorf("%v is not memory of a fake device", v)
	}
	return fakeMemory.host(h, "") + uint64(v.Offset()*int64(v.DType().Size())), nil
}

func (d *fakeDevice) export(addr uint64) (location, error) {
	p := location{addr: addr, offset: addr & (1<<fakeShift - 1)}
	fakeMemory.mu.Lock()
	defer fakeMemory.mu.Unlock()
	copy(p.handle[:], fakeMemory.blocks[addr>>fakeShift-1].path)
	return p, nil
}

func (d *fakeDevice) reach(p *location, sameProcess bool) (region, error) {
	if err := d.faults["reach"]; err != nil {
		return region{}, err
	}
	if sameProcess {
		return fakeMemory.region(p.addr - p.offset), nil
	}
	path := strings.TrimRight(string(p.handle[:]), "\x00")
	if path == "" {
		return region{}, errors.New("memory of another process that is not exported")
	}
	base, err := fakeMemory.open(path)
	if err != nil {
		return region{}, err
	}
	return fakeMemory.region(base), nil
}

// hold queues a wait on either kind of stream that the tests compute on.
func (d *fakeDevice) hold(compute tensor.Stream, l lane) {
	e := l.record()
	if s, ok := compute.(*tensor.HostStream); ok {
		s.Do("wait", func() error { return e.Sync(context.Background()) })
		return
	}
	compute.Wait(e)
}

// alloc returns memory that other processes can map if the device has a directory.
func (d *fakeDevice) alloc(bytes int) (tensor.View, error) {
	if d.dir == "" {
		return tensor.New(tensor.U8, bytes), nil
	}
	d.files++
	path := filepath.Join(d.dir, fmt.Sprintf("%d-%d", d.rank, d.files))
	b, err := mapFile(path, int64(bytes+7)/8*8)
	if err != nil {
		return tensor.View{}, err
	}
	h := tensor.HostAt(unsafe.Pointer(unsafe.SliceData(b)), int64(len(b)))
	fakeMemory.host(h, path)
	return tensor.Dense(h, tensor.U8, 0, [4]int{1, 1, 1, bytes}), nil
}
