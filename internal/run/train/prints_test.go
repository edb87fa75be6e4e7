package train

import (
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/model/config"
)

// TestAnswersWaitForTheQueue checks that no step is queued where answers follow, after every n-th step and the last.
func TestAnswersWaitForTheQueue(t *testing.T) {
	r := run{Trainer: &Trainer{cfg: &config.Config{}}}
	r.cfg.Log.Samples.Every, r.cfg.Train.Steps, r.opts.NoSave = 3, 7, true
	for n := 2; n <= 7; n++ {
		if want := n == 3 || n == 6 || n == 7; r.drains(n) != want {
			t.Errorf("step %d: the queue ends: %v, want %v", n, !want, want)
		}
	}
}

// TestLinesOfARun checks which steps get a line: with log.every auto the first few, the last, and about 60 in all, also
// after a resume.
func TestLinesOfARun(t *testing.T) {
	steps := func(every, began, of int) (list []int) {
		r := run{Trainer: &Trainer{cfg: &config.Config{}}, began: began}
		r.cfg.Log.Every, r.cfg.Train.Steps = every, of
		for n := began + 1; n <= of; n++ {
			if r.prints(n) {
				list = append(list, n)
			}
		}
		return list
	}
	for _, c := range []struct {
		every, began, of int
		want             []int
	}{
		{0, 0, 5, []int{1, 2, 3, 4, 5}},
		{0, 292, 303, []int{293, 300, 303}}, // the interval of 303 steps is 10
		{4, 0, 10, []int{4, 8, 10}},
		{4, 5, 10, []int{8, 10}},
	} {
		if got := steps(c.every, c.began, c.of); !slices.Equal(got, c.want) {
			t.Errorf("every %d, steps %d to %d: %v, want %v", c.every, c.began, c.of, got, c.want)
		}
	}
	if got := steps(0, 0, 9999); !slices.Equal(got[:9], []int{1, 2, 5, 10, 20, 50, 100, 200, 400}) {
		t.Errorf("a long run begins with lines of %v", got[:9])
	}
	for of := 1; of < 20000; of = of*11/10 + 1 {
		if n := len(steps(0, 0, of)); n > lines+8 || n < min(of, lines/3) {
			t.Errorf("%d lines of %d steps", n, of)
		}
	}
}
