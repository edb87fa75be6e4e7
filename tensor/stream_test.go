package tensor

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var errWork = errors.New("work went wrong")

func TestStreamRunsInOrder(t *testing.T) {
	s := NewHostStream("compute")
	defer s.Close()
	var got []int
	for i := range 1000 {
		s.Do("work", func() error { got = append(got, i); return nil })
	}
	if err := s.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(got) != 1000 || !slices.IsSorted(got) {
		t.Errorf("%d pieces of work ran, sorted: %t", len(got), slices.IsSorted(got))
	}
}

func TestStreamWaitsForAnEvent(t *testing.T) {
	first, second := NewHostStream("compute"), NewHostStream("comm")
	defer first.Close()
	defer second.Close()
	gate := make(chan struct{})
	value := 0
	first.Do("slow", func() error { <-gate; value = 1; return nil })
	e := first.Record()
	second.Wait(e)
	seen := 0
	second.Do("read", func() error { seen = value; return nil })
	if e.Done() {
		t.Error("the event is done before its work")
	}
	close(gate)
	if err := second.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	if seen != 1 || !e.Done() {
		t.Errorf("the second stream read %d, event done: %t", seen, e.Done())
	}
}

// The first error stops a stream and all streams that wait for it. Nothing hangs, and the error stays.
func TestStreamErrorsSpread(t *testing.T) {
	first, second := NewHostStream("compute"), NewHostStream("comm")
	var told []error
	second.OnFail(func(err error) { told = append(told, err) })
	before := first.Record()
	first.Do("bad", func() error { return errWork })
	first.Do("skipped", func() error { t.Error("work behind an error was run"); return nil })
	second.Wait(before) // from before the error: harmless
	ran := false
	second.Do("fine", func() error { ran = true; return nil })
	second.Wait(first.Record())
	second.Do("skipped", func() error { t.Error("work behind a failed event was run"); return nil })
	for _, s := range []*HostStream{first, second} {
		if err := s.Sync(t.Context()); !errors.Is(err, errWork) {
			t.Errorf("Sync of %s = %v, want the error", s.Name(), err)
		}
	}
	second.Fail(errors.New("later"))
	for _, s := range []*HostStream{first, second} {
		if err := s.Close(); !errors.Is(err, errWork) {
			t.Errorf("Close of %s = %v, want the first error", s.Name(), err)
		}
	}
	if !ran || len(told) != 1 || !errors.Is(told[0], errWork) {
		t.Errorf("work before the error ran: %t; OnFail was told %v", ran, told)
	}
}

func TestSyncEndsWithItsContext(t *testing.T) {
	s := NewHostStream("compute")
	gate := make(chan struct{})
	s.Do("slow", func() error { <-gate; return nil })
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errWork)
	if err := s.Sync(ctx); !errors.Is(err, errWork) {
		t.Errorf("Sync = %v, want the cause of the context", err)
	}
	close(gate)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func TestTraceHasLanesAndLabels(t *testing.T) {
	s := NewHostStream("compute")
	var mu sync.Mutex
	var spans []Span
	s.Trace(func(x Span) { mu.Lock(); spans = append(spans, x); mu.Unlock() })
	s.Label("hop 1 owner 0")
	s.Do("attention forward", func() error { return nil })
	s.Label("")
	s.Do("linear", func() error { return nil })
	s.Close()
	if len(spans) != 2 || spans[0].Lane != "compute" || spans[0].Name != "attention forward" ||
		spans[0].Label != "hop 1 owner 0" || spans[1].Label != "" {
		t.Errorf("spans %+v", spans)
	}
}

// At returns a stream's work, the event that it waits for, or nothing.
func TestStreamSaysWhatItIsAt(t *testing.T) {
	first, second := NewHostStream("compute"), NewHostStream("comm")
	defer first.Close()
	defer second.Close()
	begun, gate := make(chan struct{}), make(chan struct{})
	second.Label("step 1/hop 2")
	second.Do("exchange", func() error { close(begun); <-gate; return nil })
	second.Label("step 2")
	e := second.Record()
	first.Label("step 1")
	first.Wait(e)
	<-begun
	if w, busy := second.At(); !busy || w.Name != "exchange" || w.Label != "step 1/hop 2" || w.For != nil ||
		w.Since.IsZero() {
		t.Errorf("%+v, busy: %t", w, busy)
	}
	for {
		w, busy := first.At()
		if !busy { // it has not come to the wait yet
			runtime.Gosched()
			continue
		}
		if w.Label != "step 1" || w.For != e {
			t.Errorf("%+v", w)
		}
		break
	}
	close(gate)
	for _, s := range []*HostStream{first, second} {
		if err := s.Sync(t.Context()); err != nil {
			t.Error(err)
		}
	}
	for busy := true; busy; _, busy = first.At() { // it records its end after its waiters have continued
		runtime.Gosched()
	}
}
