//go:build !cuda

package bench

import "github.com/cprun/cprun/internal/tensor"

func deviceClock(tensor.Stream, int) (Clock, error) { return nil, nil }
