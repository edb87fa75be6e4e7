//go:build cuda

package cuda

// #include "driver.h"
import "C"

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/cprun/cprun/tensor"
)

// Stream is a tensor.Stream of a GPU. One goroutine at a time may call methods that queue work. Any goroutine may call
// Err, Fail, OnFail and the methods of events.
type Stream struct {
	dev    *Device
	name   string
	handle C.CUstream
	label  string
	last   string // name and detail of the last queued work, while traced

	events [eventRing]C.CUevent // a ring: the n-th Record uses events[n % eventRing]; set before seq advances
	seq    atomic.Uint64        // number of Records so far; written by Record and Close

	failed atomic.Bool
	mu     sync.Mutex
	err    error       // guarded by mu; the first error
	onFail func(error) // guarded by mu

	spans spans
	waits waits
}

// eventRing is the number of distinct events of a stream. Record reuses an event after the stream has reached it.
const eventRing = 4096

// NewStream makes a stream. The device schedules urgent streams first; they are for transfers, whose kernels are short
// and hold up other streams.
func (d *Device) NewStream(name string, urgent bool) (*Stream, error) {
	s := &Stream{dev: d, name: name}
	err := d.With(func() error {
		_, highest, err := cu.StreamPriorityRange()
		if err != nil {
			return err
		}
		priority := 0
		if urgent {
			priority = highest
		}
		h, err := cu.MakeStreamWithPriority(priority, cu.StreamFlags(C.CU_STREAM_NON_BLOCKING))
		s.handle = C.CUstream(unsafe.Pointer(h.C()))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%v: stream %s: %w", d, name, d.named("cuStreamCreateWithPriority", err))
	}
	return s, nil
}

// Close destroys the stream after its work.
func (s *Stream) Close() error {
	n := s.seq.Load()
	s.seq.Store(n + eventRing) // all events are now stale
	for i := range min(n, eventRing) {
		s.dev.check("cuEventDestroy", C.cprun_event_free(s.dev.ctx, s.events[i]))
	}
	err := s.dev.check("cuStreamDestroy", C.cprun_stream_free(s.dev.ctx, s.handle))
	if e := s.Err(); e != nil {
		return e
	}
	return err
}

// Device returns the GPU that the stream belongs to.
func (s *Stream) Device() *Device { return s.dev }

// Name returns the stream's lane in traces.
func (s *Stream) Name() string { return s.name }

// Handle returns the CUstream, for libraries.
func (s *Stream) Handle() unsafe.Pointer { return unsafe.Pointer(s.handle) }

// Label names all later work, for traces.
func (s *Stream) Label(name string) { s.label = name }

// Labelled returns that name.
func (s *Stream) Labelled() string { return s.label }

// Traced reports whether Trace has set a function.
func (s *Stream) Traced() bool { return s.spans.listen.Load() != nil }

// Err returns the error that poisoned the stream, or nil.
func (s *Stream) Err() error {
	if !s.failed.Load() {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Fail poisons the stream: it drops later work, and waits return err.
func (s *Stream) Fail(err error) {
	if err == nil {
		return
	}
	s.mu.Lock()
	first, f := s.err == nil, s.onFail
	if first {
		s.err = err
		s.failed.Store(true)
	}
	s.mu.Unlock()
	if first && f != nil {
		f(err)
	}
}

// OnFail makes the goroutine that first fails the stream call f with the error.
func (s *Stream) OnFail(f func(error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onFail = f
}

// Do calls queue, which queues work on the stream, unless the stream is poisoned. An error of queue poisons it. Traces
// show name.
func (s *Stream) Do(name string, queue func() error) { s.DoDetailed(name, "", queue) }

// DoDetailed does what Do does and adds a detail to the span. Waits for later events show name and detail.
func (s *Stream) DoDetailed(name, detail string, queue func() error) {
	if s.failed.Load() {
		return
	}
	end := s.spans.begin(s, name, detail)
	if s.Traced() {
		s.last = strings.TrimSuffix(name+": "+detail, ": ")
	}
	if err := queue(); err != nil {
		s.Fail(fmt.Errorf("%s: %w", name, err))
	}
	end()
}

// An event is a point of a stream: its n-th Record.
type event struct {
	s   *Stream
	seq uint64
	err error // of a stream that was already poisoned

	last string // name and detail of the previous work, if the stream is traced
}

// Record returns an event that completes after all work queued so far.
func (s *Stream) Record() tensor.Event {
	n := s.seq.Load()
	e := &event{s: s, seq: n, err: s.Err(), last: s.last}
	if e.err != nil {
		return e
	}
	i := n % eventRing
	if n < eventRing {
		var h C.CUevent
		if err := s.dev.check("cuEventCreate", C.cprun_event_new(s.dev.ctx, &h,
			C.CU_EVENT_DISABLE_TIMING)); err != nil {
			s.Fail(err)
			e.err = err
			return e
		}
		s.events[i] = h
	} else {
		s.catchUp(s.events[i])
	}
	s.seq.Store(n + 1) // first, so that the previous event of this slot is stale
	s.Fail(s.dev.check("cuEventRecord", C.cprun_event_record(s.dev.ctx, s.events[i], s.handle)))
	e.err = s.Err()
	return e
}

// catchUp waits until the stream has reached an event that Record will reuse; the host is thousands of events ahead. It
// polls, so that a failure of the stream ends it.
func (s *Stream) catchUp(e C.CUevent) {
	for !s.failed.Load() {
		switch r := C.cprun_event_query(s.dev.ctx, e); r {
		case C.CUDA_SUCCESS:
			return
		case C.CUDA_ERROR_NOT_READY:
			time.Sleep(20 * time.Microsecond)
		default:
			s.Fail(s.dev.check("device work", r))
		}
	}
}

// stale reports whether a later event has reused the slot in the ring. The stream has then reached e.
func (e *event) stale() bool { return e.s.seq.Load() >= e.seq+eventRing }

func (e *event) handle() C.CUevent { return e.s.events[e.seq%eventRing] }

// Done reports whether the stream has reached the event, or is poisoned.
func (e *event) Done() bool {
	if e.err != nil || e.s.failed.Load() || e.stale() {
		return true
	}
	return C.cprun_event_query(e.s.dev.ctx, e.handle()) != C.CUDA_ERROR_NOT_READY
}

// Sync blocks until the stream has reached the event. It polls, at growing intervals, so that an aborted stream or a
// cancelled ctx ends it.
func (e *event) Sync(ctx context.Context) error {
	for pause := time.Duration(0); ; {
		if e.err != nil {
			return e.err
		}
		if err := e.s.Err(); err != nil {
			return err
		}
		if e.stale() {
			return nil
		}
		switch r := C.cprun_event_query(e.s.dev.ctx, e.handle()); r {
		case C.CUDA_SUCCESS:
			return e.s.Err()
		case C.CUDA_ERROR_NOT_READY:
		default:
			e.s.Fail(e.s.dev.check("device work", r))
			continue
		}
		if pause == 0 {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			pause = 10 * time.Microsecond
			continue
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
		pause = min(2*pause, 200*time.Microsecond)
	}
}

// Wait makes later work wait for e, of this or another stream of the device. If e's stream has failed, this one fails
// with the same error.
func (s *Stream) Wait(e tensor.Event) {
	if ev := e.(*event); s.waitsFor(ev) {
		defer s.waits.begin(s)()
		s.follow(ev)
	}
}

// Follow does what Wait does; Waited does not count it.
func (s *Stream) Follow(e tensor.Event) {
	if ev := e.(*event); s.waitsFor(ev) {
		s.follow(ev)
	}
}

// waitsFor reports whether the stream has to wait for e. If e's stream has failed, it fails this one.
func (s *Stream) waitsFor(e *event) bool {
	if e.err != nil {
		s.Fail(e.err)
	}
	return !s.failed.Load() && e.s != s && !e.stale()
}

func (s *Stream) follow(ev *event) {
	defer s.spans.begin(s, "wait", ev.last)()
	s.Fail(s.dev.check("cuStreamWaitEvent", C.cprun_stream_wait(s.dev.ctx, s.handle, ev.handle())))
}

// Sync blocks until all queued work is done.
func (s *Stream) Sync(ctx context.Context) error {
	err := s.Record().Sync(ctx)
	s.spans.flush(s)
	return err
}

// Copy queues a copy of bytes. Both addresses may be in device memory or in pinned host memory.
func (s *Stream) Copy(dst, src uint64, bytes int64) {
	if bytes == 0 || s.failed.Load() {
		return
	}
	s.Fail(s.dev.check("cuMemcpyAsync", C.cprun_copy(s.dev.ctx, s.handle, C.CUdeviceptr(dst), C.CUdeviceptr(src),
		C.size_t(bytes))))
}

// Memset queues setting bytes to x.
func (s *Stream) Memset(dst uint64, x byte, bytes int64) {
	if bytes == 0 || s.failed.Load() {
		return
	}
	s.Fail(s.dev.check("cuMemsetD8Async", C.cprun_memset(s.dev.ctx, s.handle, C.CUdeviceptr(dst), C.uchar(x),
		C.size_t(bytes))))
}

var _ tensor.Stream = (*Stream)(nil)
