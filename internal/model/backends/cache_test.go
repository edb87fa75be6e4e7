package backends

import (
	"errors"
	"sync"
	"testing"
)

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
		if n := len(s.known); n > maxChoices {
			t.Fatalf("%d choices are kept, more than %d", n, maxChoices)
		}
	}
}

// Concurrent callers select one shape once.
func TestSelectorSelectsOnce(t *testing.T) {
	var s Selector
	shapes := []Params{with(""), with("cp=4"), with("arch=80"), with("d=104"), with("cp=2 docs=1")}
	first := make([]*Choice, len(shapes))
	for i, p := range shapes {
		first[i], _ = s.Select(p)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range 400 {
				if c, err := s.Select(shapes[i%len(shapes)]); c != first[i%len(shapes)] || err != nil {
					t.Error("another selection", err)
				}
			}
		})
	}
	wg.Wait()
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
