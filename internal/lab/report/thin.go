package report

import (
	"slices"

	"github.com/cprun/cprun/internal/model/metrics"
)

// thin leaves about n steps: the extremes of each of n/2 stretches.
func thin(steps []metrics.Step, n int) []metrics.Step {
	if len(steps) <= n {
		return steps
	}
	stretches := max(1, n/2)
	kept := make([]metrics.Step, 0, n)
	for i := range stretches {
		kept = append(kept, extremes(slices.Clone(steps[i*len(steps)/stretches:(i+1)*len(steps)/stretches]))...)
	}
	return kept
}

// thinner does the same for steps that come one by one, however many: it keeps all of most steps, and of more
// the extremes of stretches that are as long as each other, most/4 to most/2 of them.
type thinner struct {
	most      int
	seen      int              // steps
	long      int              // of a stretch, in steps
	stretches [][]metrics.Step // what is kept of each
}

// add takes the next step.
func (t *thinner) add(s metrics.Step) {
	if t.long == 0 {
		t.long = 2 // whose steps are both extremes
	}
	if t.seen/t.long >= max(1, t.most/2) {
		var joined [][]metrics.Step
		for pair := range slices.Chunk(t.stretches, 2) {
			joined = append(joined, extremes(slices.Concat(pair...)))
		}
		t.stretches, t.long = joined, 2*t.long
	}
	i := t.seen / t.long
	if i == len(t.stretches) {
		t.stretches = append(t.stretches, nil)
	}
	t.stretches[i] = extremes(append(t.stretches[i], s))
	t.seen++
}

// steps returns those that are kept.
func (t *thinner) steps() []metrics.Step { return slices.Concat(t.stretches...) }

// extremes leaves the steps with the lowest and the highest loss and those with a validation.
func extremes(steps []metrics.Step) []metrics.Step {
	lo, hi := 0, len(steps)-1
	for i, s := range steps {
		if s.Loss < steps[lo].Loss {
			lo = i
		}
		if s.Loss > steps[hi].Loss {
			hi = i
		}
	}
	kept := steps[:0]
	for i, s := range steps {
		if i == lo || i == hi || s.ValLoss != nil {
			kept = append(kept, s)
		}
	}
	return kept
}
