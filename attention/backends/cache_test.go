package backends

import (
	"errors"
	"sync"
	"testing"
)

func TestSelectorHitAllocatesNothing(t *testing.T) {
	var s Selector
	good, bad := with("cp=8 window=512"), with("cp=2 dropout=1 docs=1 fp8=delayed")
	want, err := s.Select(good)
	if err != nil {
		t.Fatal(err)
	}
	s.Select(bad)
	n := testing.AllocsPerRun(100, func() {
		c, err := s.Select(good)
		_, errBad := s.Select(bad)
		if c != want || err != nil || errBad == nil {
			t.Fatal("the cache forgot")
		}
	})
	if n != 0 {
		t.Errorf("a hit allocates %v times", n)
	}
	if s.Selections() != 2 {
		t.Errorf("%d selections, want 2", s.Selections())
	}
}

func TestSelectorAgreesWithSelect(t *testing.T) {
	var s Selector
	for _, r := range readRows(t) {
		want, wantErr := Select(r.params)
		for range 2 {
			got, err := s.Select(r.params)
			var none *NoBackendError
			if (err == nil) != (wantErr == nil) || err != nil && !errors.As(err, &none) {
				t.Fatalf("%s: %v, want %v", r.text, err, wantErr)
			}
			if err == nil && (got.Backend != want.Backend || got.Reason != want.Reason) {
				t.Fatalf("%s: %s, want %s", r.text, got.Backend, want.Backend)
			}
		}
	}
}

func TestSelectorIsBounded(t *testing.T) {
	var s Selector
	for i := range 3 * maxChoices {
		p := defaults()
		p.SeqQ, p.SeqKV = 1+i, 1+i
		if _, err := s.Select(p); err != nil {
			t.Fatal(err)
		}
		if n := len(*s.known.Load()); n > maxChoices {
			t.Fatalf("%d choices are kept, more than %d", n, maxChoices)
		}
	}
}

func TestSelectorIsSafeForConcurrentUse(t *testing.T) {
	var s Selector
	shapes := []Params{with(""), with("cp=4"), with("arch=80"), with("d=100"), with("cp=2 dropout=1 docs=1 fp8=delayed")}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range 400 {
				s.Select(shapes[i%len(shapes)])
			}
		})
	}
	wg.Wait()
	if n := s.Selections(); n != int64(len(shapes)) {
		t.Errorf("%d selections for %d shapes", n, len(shapes))
	}
}

func BenchmarkSelectorHit(b *testing.B) {
	var s Selector
	p := with("cp=8 window=512 s=131072")
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Select(p); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSelect(b *testing.B) {
	for _, params := range []string{"", "cp=8 s=131072", "cp=64 s=1000001 window=4096"} {
		b.Run(params, func(b *testing.B) {
			p := with(params)
			for b.Loop() {
				Select(p)
			}
		})
	}
}
