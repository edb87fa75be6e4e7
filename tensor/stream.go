package tensor

import (
	"context"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Stream is a queue of work that a device does in order. Host code queues and continues; it waits only in Sync. The
// first error of its work poisons a stream: later work does not run, events still complete, streams that wait for them
// fail too, and Sync returns that error, so that no caller hangs.
type Stream interface {
	// Record returns an event that completes when all that is queued so far is done.
	Record() Event
	// Wait makes later work wait for e. The caller continues.
	Wait(e Event)
	// Label names the context of later work in traces, from large to small: "step 7/forward/layer 3/hop 2 owner 1".
	// Traces of all devices can keep strings.
	Label(name string)
	// Labelled returns the present label. A transfer takes that of the compute stream: of its step, layer and hop.
	Labelled() string
	// Sync blocks the caller until all queued work is done, and returns the first error of the stream or ctx's.
	Sync(ctx context.Context) error
}

// Event is a point in a stream. Record makes it; only Wait of a stream of the same device takes it.
type Event interface {
	// Done reports without blocking whether the point has been reached.
	Done() bool
	// Sync blocks the caller until the stream has reached the point, and returns the stream's error there or ctx's. It
	// bounds how far the host runs ahead of the device.
	Sync(ctx context.Context) error
}

// Gate is a number by which a running kernel learns of an event elsewhere: it is open when the 64-bit word has reached
// Count, modulo 2^64. The writer of the word has written its data before.
type Gate struct {
	Word  uint64 // its address, as the device has it
	Count uint64
}

// Span is one piece of a stream's work, for traces.
type Span struct {
	Lane  string // the stream's name
	Name  string // "attention forward"
	Label string // "step 7/forward/layer 3/hop 2 owner 1"
	// Detail is the peers and bytes of a transfer, also for a wait for it; "": none.
	Detail string
	Start  time.Time
	Took   time.Duration
}

// HostStream is a Stream of the CPU: one goroutine, from NewHostStream to Close, runs closures in order.
type HostStream struct {
	name  string
	label atomic.Pointer[string]
	trace atomic.Pointer[func(Span)]

	mu     sync.Mutex
	cond   *sync.Cond
	queue  []task      // guarded by mu
	closed bool        // guarded by mu
	err    error       // guarded by mu; the first error
	at     Work        // guarded by mu; zero if there is nothing to do
	last   string      // guarded by mu; name and detail of the last work, if traced
	onFail func(error) // guarded by mu

	done   chan struct{} // closed when the goroutine has ended
	waited atomic.Int64  // ns spent in Wait for events of other streams
}

type task struct {
	name, label string
	detail      string
	run         func() error // nil for an event of another stream
	wait        *hostEvent
	event       *hostEvent // that it completes; nil for other work
	always      bool       // runs on a poisoned stream too
}

// NewHostStream starts a stream. The name is its lane in traces.
func NewHostStream(name string) *HostStream {
	s := &HostStream{name: name, done: make(chan struct{})}
	s.cond = sync.NewCond(&s.mu)
	empty := ""
	s.label.Store(&empty)
	go s.loop()
	return s
}

// Do queues work under a name for traces and errors.
func (s *HostStream) Do(name string, run func() error) { s.DoDetailed(name, "", run) }

// DoDetailed queues work with the detail of its span. Waiters for later events show name and detail.
func (s *HostStream) DoDetailed(name, detail string, run func() error) {
	s.push(task{name: name, label: *s.label.Load(), detail: detail, run: run})
}

// Name returns the stream's lane in traces.
func (s *HostStream) Name() string { return s.name }

// Label names later work.
func (s *HostStream) Label(name string) { s.label.Store(&name) }

// Labelled returns that name.
func (s *HostStream) Labelled() string { return *s.label.Load() }

// Traced reports whether Trace has set a function.
func (s *HostStream) Traced() bool { return s.trace.Load() != nil }

// Trace calls f on the stream's goroutine after each piece of work; nil turns it off.
func (s *HostStream) Trace(f func(Span)) {
	if f == nil {
		s.trace.Store(nil)
		return
	}
	s.trace.Store(&f)
}

// Waited returns the time that the stream has waited for other streams.
func (s *HostStream) Waited() time.Duration { return time.Duration(s.waited.Load()) }

// Err returns the error that poisoned the stream, or nil.
func (s *HostStream) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Fail poisons the stream from outside: pending work is skipped.
func (s *HostStream) Fail(err error) {
	s.mu.Lock()
	first, f := s.err == nil, s.onFail
	if first {
		s.err = err
	}
	s.mu.Unlock()
	if first && f != nil {
		f(err)
	}
}

// OnFail calls f once, with the first error, on the goroutine that failed the stream. A communicator uses it to inform
// the other ranks, since the stream skips its own work then.
func (s *HostStream) OnFail(f func(error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onFail = f
}

type hostEvent struct {
	done chan struct{}
	err  error  // of the recording stream at that point; read after done is closed
	last string // name and detail of the work before it, if the stream is traced
}

func (e *hostEvent) Done() bool {
	select {
	case <-e.done:
		return true
	default:
		return false
	}
}

func (e *hostEvent) Sync(ctx context.Context) error {
	select {
	case <-e.done:
		return e.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Record returns an event that completes when all that is queued so far is done.
func (s *HostStream) Record() Event {
	e := &hostEvent{done: make(chan struct{})}
	s.push(task{always: true, event: e, run: func() error {
		e.err = s.Err()
		close(e.done)
		// With one processor a waiter for e would otherwise start up to 10 ms later, after the next piece of work: a
		// transfer would begin when the work that should hide it is over.
		runtime.Gosched()
		return nil
	}})
	return e
}

// Wait makes later work wait for e. If the recording stream had failed by then, this one fails with the same error.
func (s *HostStream) Wait(e Event) {
	he := e.(*hostEvent)
	if he.Done() && he.err == nil {
		return
	}
	s.push(task{name: "wait", label: *s.label.Load(), detail: he.last, wait: he})
}

// Sync blocks until all that is queued is done.
func (s *HostStream) Sync(ctx context.Context) error {
	return s.Record().Sync(ctx)
}

// Close ends the goroutine after the work that is queued, and returns the stream's error.
func (s *HostStream) Close() error {
	s.mu.Lock()
	s.closed = true
	s.cond.Signal()
	s.mu.Unlock()
	<-s.done
	return s.Err()
}

func (s *HostStream) push(t task) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		panic("tensor: work queued on the closed stream " + s.name)
	}
	if t.event != nil {
		t.event.last = s.last
	} else if t.name != "" && s.Traced() {
		s.last = strings.TrimSuffix(t.name+": "+t.detail, ": ")
	}
	s.queue = append(s.queue, t)
	s.cond.Signal()
}

func (s *HostStream) loop() {
	defer close(s.done)
	var batch []task
	for {
		s.mu.Lock()
		for len(s.queue) == 0 && !s.closed {
			s.at = Work{}
			s.cond.Wait()
		}
		if len(s.queue) == 0 {
			s.at = Work{}
			s.mu.Unlock()
			return
		}
		batch, s.queue = s.queue, batch[:0]
		s.mu.Unlock()
		for i := range batch {
			s.run(&batch[i])
			batch[i] = task{} // the closure must not outlive its turn
		}
	}
}

func (s *HostStream) run(t *task) {
	start := time.Now()
	if !t.always && !s.begin(t, start) {
		return
	}
	if t.wait != nil {
		<-t.wait.done
		s.waited.Add(int64(time.Since(start)))
		if t.wait.err != nil {
			s.Fail(t.wait.err)
		}
	} else if err := t.run(); err != nil {
		s.Fail(err)
	}
	if f := s.trace.Load(); f != nil && t.name != "" {
		(*f)(Span{Lane: s.name, Name: t.name, Label: t.label, Detail: t.detail, Start: start, Took: time.Since(start)})
	}
}

// begin records the present work of the stream. It returns false if the stream has failed.
func (s *HostStream) begin(t *task, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return false
	}
	s.at = Work{Name: t.name, Label: t.label, Since: now}
	if t.wait != nil {
		s.at.For = t.wait
	}
	return true
}

var _ Stream = (*HostStream)(nil)

// Work describes the present work of a stream.
type Work struct {
	Name, Label string // as a Span has them
	Since       time.Time
	For         Event // of another stream that it waits for; nil: it works
}

// At returns the present work of the stream, for reports of stalls; false: there is none. The host does not know the
// present work of a GPU's stream, which has no such method.
func (s *HostStream) At() (w Work, busy bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.at, !s.at.Since.IsZero()
}

// WaitCounter is a Stream that counts its time of waiting for events of other streams, such as those of transfers.
// HostStream and the streams of GPUs implement it.
type WaitCounter interface {
	// CountWaits starts the count on streams that do not always count.
	CountWaits()
	// Waited returns the time counted so far.
	Waited() time.Duration
}

var _ WaitCounter = (*HostStream)(nil)

// CountWaits does nothing: a stream of the host always counts.
func (s *HostStream) CountWaits() {}
