//go:build cuda

package bench

import (
	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/internal/tensor"
)

// deviceClock is a clock of a GPU's stream; nil for another.
func deviceClock(s tensor.Stream, points int) (Clock, error) {
	if g, ok := s.(*cuda.Stream); ok {
		return g.NewClock(points)
	}
	return nil, nil
}
