//go:build cuda

package cuda

// #include "driver.h"
import "C"

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/cprun/cprun/tensor"
)

// spans times the work of a stream with pairs of events, and reads them after a Sync. It costs nothing without a
// listener.
type spans struct {
	listen atomic.Pointer[func(tensor.Span)]
	base   C.CUevent // reference for the times of other events
	zero   time.Time // the time of base
	open   []span
	free   []C.CUevent
}

type span struct {
	name, label, detail string
	from, to            C.CUevent
}

func nothing() {}

// Trace makes Sync call f with the times of all work queued by Do, and of waits for other streams, named wait. nil
// turns it off, which any goroutine may do. Only the goroutine that queues may turn it on.
func (s *Stream) Trace(f func(tensor.Span)) {
	if f == nil {
		s.spans.listen.Store(nil)
		return
	}
	if s.spans.base == nil {
		s.spans.base = s.timing()
	}
	C.cprun_event_record(s.dev.ctx, s.spans.base, s.handle)
	s.Fail(s.dev.check("cuEventSynchronize", C.cprun_event_sync(s.dev.ctx, s.spans.base)))
	s.spans.zero = time.Now()
	s.spans.listen.Store(&f)
}

// begin records the start of a span; the returned function records its end.
func (p *spans) begin(s *Stream, name, detail string) func() {
	if p.listen.Load() == nil {
		return nothing
	}
	sp := span{name: name, label: s.label, detail: detail, from: p.event(s), to: p.event(s)}
	C.cprun_event_record(s.dev.ctx, sp.from, s.handle)
	return func() {
		C.cprun_event_record(s.dev.ctx, sp.to, s.handle)
		p.open = append(p.open, sp)
	}
}

func (p *spans) event(s *Stream) C.CUevent {
	if n := len(p.free); n > 0 {
		e := p.free[n-1]
		p.free = p.free[:n-1]
		return e
	}
	return s.timing()
}

func (s *Stream) timing() (e C.CUevent) {
	s.Fail(s.dev.check("cuEventCreate", C.cprun_event_new(s.dev.ctx, &e, C.CU_EVENT_DEFAULT)))
	return e
}

// flush reports the finished spans. The caller has waited for the stream.
func (p *spans) flush(s *Stream) {
	for _, sp := range p.open {
		var at, took C.float
		ok := C.cprun_event_elapsed(s.dev.ctx, &at, p.base, sp.from) == C.CUDA_SUCCESS &&
			C.cprun_event_elapsed(s.dev.ctx, &took, sp.from, sp.to) == C.CUDA_SUCCESS
		if f := p.listen.Load(); ok && f != nil {
			(*f)(tensor.Span{
				Lane: s.name, Name: sp.name, Label: sp.label, Detail: sp.detail,
				Start: p.zero.Add(milliseconds(at)), Took: milliseconds(took),
			})
		}
		p.free = append(p.free, sp.from, sp.to)
	}
	p.open = p.open[:0]
}

func milliseconds(ms C.float) time.Duration {
	return time.Duration(float64(ms) * float64(time.Millisecond))
}

// Clock records the device's time at points of a stream, without a wait between them.
type Clock struct {
	s      *Stream
	events []C.CUevent
}

// NewClock returns a clock with the given number of points. The caller closes it.
func (s *Stream) NewClock(points int) (*Clock, error) {
	c := &Clock{s: s, events: make([]C.CUevent, points)}
	for i := range c.events {
		if err := s.dev.check("cuEventCreate", C.cprun_event_new(s.dev.ctx, &c.events[i],
			C.CU_EVENT_DEFAULT)); err != nil {
			return nil, errors.Join(err, c.Close())
		}
	}
	return c, nil
}

// Mark queues the recording of point i.
func (c *Clock) Mark(i int) {
	if c.s.failed.Load() {
		return
	}
	c.s.Fail(c.s.dev.check("cuEventRecord", C.cprun_event_record(c.s.dev.ctx, c.events[i], c.s.handle)))
}

// Between returns the seconds from point i to point j. The caller has waited for the stream.
func (c *Clock) Between(i, j int) (float64, error) {
	var ms C.float
	if err := c.s.dev.check("cuEventElapsedTime", C.cprun_event_elapsed(c.s.dev.ctx, &ms, c.events[i],
		c.events[j])); err != nil {
		return 0, fmt.Errorf("time from point %d to %d: %w", i, j, err)
	}
	return float64(ms) / 1e3, nil
}

// Close frees the events.
func (c *Clock) Close() error {
	var all []error
	for _, e := range c.events {
		if e != nil {
			all = append(all, c.s.dev.check("cuEventDestroy", C.cprun_event_free(c.s.dev.ctx, e)))
		}
	}
	c.events = nil
	return errors.Join(all...)
}
