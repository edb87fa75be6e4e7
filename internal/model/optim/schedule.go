package optim

import (
	"fmt"
	"math"
)

// Schedule is the learning rate of an optimizer step, counted from 0.
type Schedule func(step int) float64

// NewSchedule returns the schedule called name over total steps:
//
//   - "constant" stays at lr; minLR is not used,
//   - "cosine" falls from lr to minLR along half a cosine (arXiv:1608.03983),
//   - "linear" falls from lr to minLR in a straight line,
//   - "wsd" stays at lr and falls to minLR over the last 20% of the steps as 1 - sqrt(x)
//     (arXiv:2405.18392).
//
// Before, over warmup steps, the rate rises in a straight line, lr/warmup at step 0. Decay
// reaches minLR at step total, the first one that is not run, as in llm.c, transformers and
// torchtitan, and stays there.
func NewSchedule(name string, lr, minLR float64, warmup, total int) (Schedule, error) {
	decay := func(from, step int, shape func(x float64) float64) float64 {
		x := 1.0
		if step < total {
			x = float64(step-from) / float64(total-from)
		}
		high := shape(x)
		return lr*high + minLR*(1-high) // exactly lr at the start and minLR at the end
	}
	var after Schedule
	switch name {
	case "constant":
		after = func(int) float64 { return lr }
	case "cosine":
		after = func(step int) float64 {
			return decay(warmup, step, func(x float64) float64 { return (1 + math.Cos(math.Pi*x)) / 2 })
		}
	case "linear":
		after = func(step int) float64 {
			return decay(warmup, step, func(x float64) float64 { return 1 - x })
		}
	case "wsd":
		from := max(warmup, total*4/5)
		after = func(step int) float64 {
			if step < from {
				return lr
			}
			return decay(from, step, func(x float64) float64 { return 1 - math.Sqrt(x) })
		}
	default:
		return nil, fmt.Errorf("lr_schedule.name %q: known are cosine, linear, constant and wsd", name)
	}
	return func(step int) float64 {
		if step < warmup {
			return lr * float64(step+1) / float64(warmup)
		}
		return after(step)
	}, nil
}
