//go:build cuda

package cuda

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/tensor"
)

func TestEventsOrderStreams(t *testing.T) {
	d := device(t)
	a, b := stream(t, d, "a"), stream(t, d, "b")
	g := newGate(t, a)
	x := put(t, a, []int32{0, 0})
	g.hold(a)
	a.Memset(x.addr, 1, 4)
	e := a.Record()
	b.Wait(e)
	b.Copy(x.addr+4, x.addr, 4)
	last := b.Record()
	if e.Done() || last.Done() || b.Idle() {
		t.Error("an event is done while the kernel before it runs")
	}
	soon, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := b.Sync(soon); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("waiting for a kernel that runs, with a deadline: %v", err)
	}
	g.open()
	wait(t, b)
	if !e.Done() || !last.Done() {
		t.Error("events are not done after Sync")
	}
	if got := get[int32](t, b, x.addr, 2); got[1] != 0x01010101 {
		t.Errorf("the second stream did not wait: %#x", got)
	}
}

// With more events than the ring has, old ones are reached.
func TestManyEvents(t *testing.T) {
	d := device(t)
	a, b := stream(t, d, "a"), stream(t, d, "b")
	x := must.Have(d.Alloc(4))
	var events []tensor.Event
	for range 2*eventRing + 10 {
		a.Memset(x.addr, 3, 4)
		events = append(events, a.Record())
	}
	for _, e := range events {
		b.Wait(e)
	}
	wait(t, b)
	for i, e := range events {
		if !e.Done() {
			t.Fatalf("event %d of %d is not done", i, len(events))
		}
		must.Do(t, e.Sync(t.Context()))
	}
}

func TestPoison(t *testing.T) {
	d := device(t)
	a, b, c := stream(t, d, "a"), stream(t, d, "b"), stream(t, d, "c")
	x := put(t, a, []int32{7})
	good := a.Record()
	var told []error
	a.OnFail(func(err error) { told = append(told, err) })
	cause := errors.New("first")
	a.Fail(cause)
	a.Fail(errors.New("second"))
	a.Memset(x.addr, 0, 4)
	a.Do("work", func() error { t.Error("work ran on a poisoned stream"); return nil })
	e := a.Record()
	if !e.Done() || !errors.Is(e.Sync(t.Context()), cause) || !errors.Is(a.Sync(t.Context()), cause) {
		t.Errorf("an event of a poisoned stream: %v; the stream: %v", e.Sync(t.Context()), a.Sync(t.Context()))
	}
	if len(told) != 1 || told[0] != cause {
		t.Errorf("OnFail was told %v", told)
	}
	b.Wait(good) // recorded before the failure
	if b.Err() != nil {
		t.Errorf("an event from before the error passed it on: %v", b.Err())
	}
	b.Wait(e)
	if !errors.Is(b.Sync(t.Context()), cause) {
		t.Errorf("the stream that waited: %v", b.Err())
	}
	if got := get[int32](t, c, x.addr, 1); got[0] != 7 {
		t.Errorf("a poisoned stream wrote %d", got[0])
	}
}

// A failed launch poisons only its stream.
func TestBadLaunch(t *testing.T) {
	d := device(t)
	a, b := stream(t, d, "a"), stream(t, d, "b")
	f := must.Have(compile(t, d, `extern "C" __global__ void nothing() {}`).Function("nothing", 0))
	a.Launch(f, Launch{Grid: Dim{X: 1}, Block: Dim{X: 4096}}, new(Args))
	err := a.Sync(t.Context())
	var e *Error
	if !errors.As(err, &e) || e.Device != 0 || !strings.Contains(err.Error(), "launch of nothing") ||
		!strings.HasPrefix(e.Name, "CUDA_ERROR_") {
		t.Errorf("error %v", err)
	}
	x := put(t, b, []int32{1})
	if got := get[int32](t, b, x.addr, 1); got[0] != 1 {
		t.Errorf("the other stream copied %d", got[0])
	}
	if _, err := compile(t, d, `extern "C" __global__ void nothing() {}`).Function("something", 0); err == nil ||
		!strings.Contains(err.Error(), "something") {
		t.Errorf("a kernel that does not exist: %v", err)
	}
}

func TestTrace(t *testing.T) {
	d := device(t)
	s := stream(t, d, "lane")
	x := must.Have(d.Alloc(1 << 20))
	var spans []tensor.Span
	s.Trace(func(sp tensor.Span) { spans = append(spans, sp) })
	s.Label("layer 1")
	s.Do("fill", func() error { s.Memset(x.addr, 0, x.bytes); return nil })
	wait(t, s)
	s.Trace(nil)
	s.Do("fill", func() error { return nil })
	wait(t, s)
	if len(spans) != 1 || spans[0].Lane != "lane" || spans[0].Name != "fill" || spans[0].Label != "layer 1" ||
		spans[0].Took <= 0 {
		t.Errorf("spans %+v", spans)
	}
}

func TestWaitedIsCounted(t *testing.T) {
	d := device(t)
	a, b := stream(t, d, "a"), stream(t, d, "b")
	g := newGate(t, a)
	begun := time.Now()
	if b.Wait(a.Record()); b.Waited() != 0 {
		t.Errorf("%v waited before anybody counts", b.Waited())
	}
	b.CountWaits()
	g.hold(a)
	b.Wait(a.Record())
	time.Sleep(5 * time.Millisecond)
	if n := b.Waited(); n != 0 {
		t.Errorf("%v waited, and the wait is not over", n)
	}
	g.open()
	wait(t, b)
	held := b.Waited()
	if all := time.Since(begun); held <= 0 || held > all {
		t.Errorf("%v waited of %v", held, all)
	}
	for range 3 * waitsOpen {
		b.Wait(a.Record())
	}
	wait(t, b)
	if n := b.Waited(); n < held || len(b.waits.open) > 0 {
		t.Errorf("%v after %v, %d pairs open", n, held, len(b.waits.open))
	}
}

func TestClock(t *testing.T) {
	d := device(t)
	s := stream(t, d, "clock")
	x := must.Have(d.Alloc(1 << 20))
	c := must.Have(s.NewClock(3))
	for i := range 3 {
		c.Mark(i)
		s.Memset(x.addr, 0, x.bytes)
	}
	wait(t, s)
	first, err1 := c.Between(0, 1)
	both, err2 := c.Between(0, 2)
	if err := errors.Join(err1, err2, c.Close()); err != nil || first <= 0 || both <= first {
		t.Errorf("%v s, then %v s, %v", first, both, err)
	}
}

func TestStreamsWaitForMemory(t *testing.T) {
	d := device(t)
	must.Do(t, d.MemOps())
	a, b := stream(t, d, "a"), stream(t, d, "b")
	g := newGate(t, a)
	flag, x := put(t, a, []uint64{0}), put(t, a, []int32{0})
	g.hold(a)
	a.WriteValue(flag.addr, 5)
	b.WaitValue(flag.addr, 4)
	b.Memset(x.addr, 1, 4)
	if b.Record().Done() {
		t.Error("the stream did not wait")
	}
	g.open()
	if got := get[int32](t, b, x.addr, 1); got[0] != 0x01010101 {
		t.Errorf("%#x", got)
	}
	if got := get[uint64](t, b, flag.addr, 1); got[0] != 5 {
		t.Errorf("the flag is %d", got[0])
	}
}
