package launch

import (
	"slices"
	"testing"
	"time"
)

// TestRestartsBackOff checks that repeated failures of one rank increase the wait, and that another rank's failure
// resets it.
func TestRestartsBackOff(t *testing.T) {
	r := Retries{Max: 20}
	var waits []time.Duration
	for i, rank := range []int{3, 3, 3, 3, 3, 3, 3, 3, 1, 3, 3} {
		v := r.Verdict(Ending{Failures: []Failure{{Rank: rank}}, Step: int64(i + 1)})
		if !v.Again || v.Restarts != i+1 {
			t.Fatalf("failure %d: %+v", i, v)
		}
		waits = append(waits, v.After/time.Second)
	}
	if want := []time.Duration{0, 1, 2, 4, 8, 16, 30, 30, 0, 0, 1}; !slices.Equal(waits, want) {
		t.Errorf("waits of %v seconds, want %v", waits, want)
	}
	if v := r.Verdict(Ending{Failures: []Failure{{Rank: 1}}, Step: 11}); v.Again || len(v.Notes) != 1 {
		t.Errorf("no step was reached since: %+v", v)
	}
}

func TestMergedEndings(t *testing.T) {
	own := Failure{Rank: 1, Class: classOwn, Order: 1}
	killed := Failure{Rank: 6, Class: classSignal, Order: 2}
	victim := Failure{Rank: 0, Class: classRemote, Order: 1}
	e := Merge(
		Ending{Failures: []Failure{own, victim}, Step: 7, Asked: true},
		Ending{Failures: []Failure{killed}, Step: 9, Stopped: true, Forced: true},
	)
	var order []int
	for _, f := range e.Failures {
		order = append(order, f.Rank)
	}
	if !slices.Equal(order, []int{6, 1, 0}) || e.Step != 9 || !e.Asked || !e.Stopped || !e.Forced || e.Hung {
		t.Errorf("%+v", e)
	}
}
