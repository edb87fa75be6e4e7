package train

import (
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// scales runs n steps on a scaler and returns the scale of each. A step overflows if its scale is above limit. No step
// is unfinished before the steps in drained, counted from 0.
func scales(s *scaler, n int, limit func(step int) float64, drained ...int) []float64 {
	var used []float64
	done := 0
	finish := func() {
		norm := 1.0
		if used[done] > limit(done) {
			norm = math.Inf(1)
		}
		s.finish(used[done], norm)
		done++
	}
	for i := range n {
		for done < i && (i-done > s.lag || slices.Contains(drained, i)) {
			finish()
		}
		used = append(used, s.begin(i-done).Scale)
	}
	for done < n {
		finish()
	}
	return used
}

func scalerOf(lag int) *scaler { return newScaler(&Device{ScaleLoss: true, RunAhead: lag}) }

func at(limit float64) func(int) float64 { return func(int) float64 { return limit } }

// The schedule equals GradScaler's: half after an overflow, double after 2000 good steps in a row.
func TestScalerFollowsOverflows(t *testing.T) {
	s := scalerOf(0)
	if got, want := scales(s, 5, at(1<<14)), []float64{1 << 16, 1 << 15, 1 << 14, 1 << 14, 1 << 14}; !slices.Equal(got,
		want) {
		t.Errorf("scales %v, want %v", got, want)
	}
	if got, want := s.states[len(s.states)-1], (scaling{Scale: 1 << 14, Good: 3, Skipped: 2}); got != want {
		t.Errorf("state %+v, want %+v", got, want)
	}
	s = scalerOf(0)
	got := scales(s, 4100, func(step int) float64 {
		if step == 1500 { // the count of good steps restarts
			return 0
		}
		return math.Inf(1)
	})
	for i, c := range []struct {
		step int
		want float64
	}{{1500, 1 << 16}, {1501, 1 << 15}, {3500, 1 << 15}, {3501, 1 << 16}, {4099, 1 << 16}} {
		if got[c.step] != c.want {
			t.Errorf("case %d: scale of step %d is %v, want %v", i, c.step, got[c.step], c.want)
		}
	}
	s = scalerOf(1)
	if got := scales(s, 20*growthSteps, at(math.Inf(1))); got[len(got)-1] != mostScale {
		t.Errorf("after %d good steps the scale is %v, want %v", len(got), got[len(got)-1], float64(mostScale))
	}
}

// Of the steps queued with one scale, only the first overflow halves it.
func TestScalerHalvesOnceForStepsBehind(t *testing.T) {
	s := scalerOf(1)
	want := []float64{1 << 16, 1 << 16, 1 << 15, 1 << 15, 1 << 14, 1 << 14, 1 << 14}
	if got := scales(s, 7, at(1<<14)); !slices.Equal(got, want) {
		t.Errorf("scales %v, want %v", got, want)
	}
	if got := s.states[len(s.states)-1].Skipped; got != 4 {
		t.Errorf("%d steps are skipped, want 4", got)
	}
	s = scalerOf(1)
	s.begin(0)
	s.begin(1)
	skipped, lowered := s.finish(1<<16, math.NaN())
	again, twice := s.finish(1<<16, math.NaN())
	if !skipped || lowered != 1<<15 || !again || twice != 0 {
		t.Errorf("two overflows with one scale: %t %v, %t %v", skipped, lowered, again, twice)
	}
}

// The scale of a step does not depend on the waits of the host, nor on a stop and resume before it.
func TestScalerIsTheSameHoweverStepsAreWaitedFor(t *testing.T) {
	limit := func(step int) float64 { return []float64{1 << 20, 1 << 15, 1 << 13}[step/7%3] }
	for lag := range 3 {
		want := scales(scalerOf(lag), 40, limit)
		for _, drained := range [][]int{{8}, {7, 9}, {1, 2, 3, 14, 15, 16, 17}} {
			if got := scales(scalerOf(lag), 40, limit, drained...); !slices.Equal(got, want) {
				t.Errorf("lag %d, drained before %v: scales %v, want %v", lag, drained, got, want)
			}
		}
		for stop := range 40 {
			s := scalerOf(lag)
			got := scales(s, stop, limit)
			text, err := json.Marshal(s.save())
			if err != nil {
				t.Fatal(err)
			}
			s = scalerOf(lag)
			if err := s.restore(map[string]json.RawMessage{scalerState: text}, stop); err != nil {
				t.Fatal(err)
			}
			got = append(got, scales(s, 40-stop, func(step int) float64 { return limit(stop + step) })...)
			if !slices.Equal(got, want) {
				t.Errorf("lag %d, stopped before step %d: scales %v, want %v", lag, stop, got, want)
			}
		}
	}
}

func TestScalerState(t *testing.T) {
	s := scalerOf(1)
	extra := map[string]json.RawMessage{scalerState: json.RawMessage(
		`[{"scale": 2048, "good_steps": 3, "skipped_steps": 5, "new": 1}]`)}
	if err := s.restore(extra, 8); err != nil || !reflect.DeepEqual(s.states, []scaling{{2048, 3, 5}}) {
		t.Errorf("restored %+v, %v", s.states, err)
	}
	// A checkpoint without a scale: it starts over.
	s = scalerOf(1)
	if err := s.restore(nil, 8); err != nil || !reflect.DeepEqual(s.states, scalerOf(1).states) {
		t.Errorf("restored of nothing: %+v, %v", s.states, err)
	}
	for _, text := range []string{
		`[]`, `{}`, `[{"scale": 3}]`, `[{"scale": 0}]`, `[{"scale": 0.5}]`, `[{"scale": -2}]`, `[{"scale": 1e30}]`,
		`[{"scale": 2}, {}]`, `[{"scale": 2, "good_steps": -1}]`, `[{"scale": 2, "good_steps": 2000}]`,
		`[{"scale": 2, "skipped_steps": 9}]`, `[{"scale": 2, "skipped_steps": -1}]`,
	} {
		err := scalerOf(1).restore(map[string]json.RawMessage{scalerState: json.RawMessage(text)}, 8)
		if err == nil || !strings.Contains(err.Error(), scalerState) {
			t.Errorf("restore of %s: %v", text, err)
		}
	}
}

// A device without scaling ignores a scale in the checkpoint.
func TestNoScaler(t *testing.T) {
	s := newScaler(&Device{RunAhead: 1})
	if states := s.save(); s != nil || states != nil {
		t.Errorf("scaler %v saves %v", s, states)
	}
	if err := s.restore(map[string]json.RawMessage{scalerState: json.RawMessage(`no`)}, 1); err != nil {
		t.Error(err)
	}
	if now := s.begin(1); now != (scaling{}) {
		t.Errorf("begin = %+v", now)
	}
	if skipped, lowered := s.finish(0, math.NaN()); skipped || lowered != 0 {
		t.Errorf("finish = %t, %v", skipped, lowered)
	}
}
