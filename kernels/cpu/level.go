package cpu

import (
	"sync/atomic"

	"github.com/cprun/cprun/kernels/cpu/internal/simd"
)

// level is what kernels compute with that are made from now on.
var level = func() *atomic.Int64 {
	l := new(atomic.Int64)
	l.Store(int64(simd.Best()))
	return l
}()

// Use sets the instructions of the kernels that New makes from now on: generic (plain Go), avx2 (with FMA) or avx512;
// "" stands for the best that this machine has. It returns an error for what there is not, here or anywhere.
func Use(name string) error {
	l, err := simd.Parse(name)
	if err == nil {
		level.Store(int64(l))
	}
	return err
}

// Instructions returns the name of what kernels compute with, and of the best that this machine has.
func Instructions() (used, best string) {
	return current().String(), simd.Best().String()
}

func current() simd.Level { return simd.Level(level.Load()) }
