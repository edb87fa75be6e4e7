//go:build cuda

package blas

import (
	"context"
	"errors"
	"fmt"
	"math"
)

// Tune turns measurements on or off. With them, the first use of a problem runs all algorithms of cuBLASLt, and the
// handle keeps the fastest; the caller waits meanwhile. Times vary, so runs may differ in rounding. Without
// measurements, the handle uses cuBLASLt's first choice, which is always the same.
func (h *Handle) Tune(on bool) { h.tune = on }

// rounds is the number of runs of each algorithm. The first is not timed, and the shortest of the others counts.
const rounds = 4

// measure picks the fastest algorithm of a plan. It scales the product by the smallest float32, so that D keeps its
// value if the product is added to it, and no kernel can skip the work. Otherwise it overwrites D, as the product does
// later.
func (h *Handle) measure(x *plan, p Problem) (err error) {
	x.tuned = true
	clock, err := h.stream.NewClock(rounds + 1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, clock.Close()) }()
	best, fastest := 0, math.Inf(1)
	for x.choice = range int(x.c.choices) {
		for i := range rounds {
			clock.Mark(i)
			if err := h.run(x, p, math.SmallestNonzeroFloat32); err != nil {
				return fmt.Errorf("choice %d: %w", x.choice, err)
			}
		}
		clock.Mark(rounds)
		if err := h.stream.Sync(context.Background()); err != nil {
			return fmt.Errorf("choice %d: %w", x.choice, err)
		}
		for i := 1; i < rounds; i++ {
			took, err := clock.Between(i, i+1)
			if err != nil {
				return err
			}
			if took < fastest {
				best, fastest = x.choice, took
			}
		}
	}
	x.choice = best
	return nil
}
