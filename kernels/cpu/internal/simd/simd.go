// Package simd holds the inner loops of the CPU kernels: in assembly for AVX2 with FMA and for AVX-512, written by gen,
// and each once more in plain Go for every other machine and as the reference of the assembly's tests.
//
// Functions take slices and sizes without checks, and keep none of their arguments. A result depends on its inputs and
// on the level alone, never on alignment or neighbours in memory.
package simd

import (
	"fmt"
	"slices"
	"strings"
)

// Level is a set of instructions.
type Level int

// The levels, in order of their instruction sets.
const (
	Generic Level = iota // plain Go
	AVX2                 // AVX2, FMA and F16C: vectors of 8 float32
	AVX512               // AVX-512 F, BW, CD, DQ and VL: vectors of 16 float32
)

var names = []string{"generic", "avx2", "avx512"}

// String returns the name of l, as Parse takes it.
func (l Level) String() string { return names[l] }

// Best returns the best level of this machine.
func Best() Level { return best() }

// Parse returns the level of a name; "" is the best. A level that this machine does not have is an error.
func Parse(name string) (Level, error) {
	if name == "" {
		return Best(), nil
	}
	n := slices.Index(names, name)
	if n < 0 {
		return Best(), fmt.Errorf("%q is none of %s", name, strings.Join(names, ", "))
	}
	if Level(n) > Best() {
		return Best(), fmt.Errorf("%s: this machine has no more than %v", name, Best())
	}
	return Level(n), nil
}
