package launch

import (
	"slices"
	"testing"
)

// TestRestarts checks that a start is repeated while each gets beyond the one before, up to the limit.
func TestRestarts(t *testing.T) {
	r := Retries{Max: 3}
	verdict := func(step int64) Verdict { return r.Verdict(Ending{Failures: []Failure{{Rank: 1}}, Step: step}) }
	for i := range 2 {
		if v := verdict(int64(i)); !v.Again || v.Restarts != i+1 || len(v.Notes) != 0 {
			t.Fatalf("failure %d: %+v", i, v)
		}
	}
	if v := verdict(1); v.Again || v.Restarts != 2 || len(v.Notes) != 1 {
		t.Errorf("no step was reached since: %+v", v)
	}
	if v := verdict(2); !v.Again {
		t.Errorf("the third restart: %+v", v)
	}
	if v := verdict(3); v.Again || v.Restarts != 3 || len(v.Notes) != 0 {
		t.Errorf("beyond the limit: %+v", v)
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
