//go:build cuda

package blas

import (
	"context"
	"errors"
	"fmt"
	"math"
)

// Tune turns measuring on or off. With it, the first use of a problem runs what cuBLASLt has
// to offer for it, one after the other, and keeps the fastest; the caller waits meanwhile.
// Times vary, so that runs may differ in rounding; without it cuBLASLt's own first
// choice is taken, always the same.
func (h *Handle) Tune(on bool) { h.tune = on }

// rounds is how often a choice is run in a row; the first is not counted, and of the others
// the shortest.
const rounds = 4

// measure picks the fastest choice of a plan. The product is scaled by the smallest number there
// is, so that what is in D stays where it is added to, and no kernel can leave the work out.
// If it is not added to, D is overwritten, as it will be anyway.
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
