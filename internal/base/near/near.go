// Package near compares tensors in tests. All tests use it, so that one place defines agreement: the distance of NaN
// from everything is infinite, and infinities agree only under some contracts.
//
//	d, err := near.Of(got, want, near.Finite)
//	if err != nil || !(d.Relative() <= 1e-5) { ... }
package near

import (
	"errors"
	"fmt"
	"math"
)

// Contract defines agreement of elements whose difference is not a number.
type Contract int

// The contracts. An infinity agrees only with one of the same sign.
const (
	Finite     Contract = iota // none: the distance of NaN and infinities from all elements is infinite
	Infinities                 // equal infinities, such as the LSE of rows without a key
	NonFinite                  // equal infinities, and NaN with NaN
)

// Distance holds the distance of one tensor from another.
type Distance struct {
	Abs     float64 // the largest |got - want|; +Inf if two elements disagree by contract
	At      int     // the first element with that difference
	Largest float64 // the largest finite |want|
	Norm    float64 // the norm of got - want over the norm of want; elements that agree by contract count 0
}

// Relative returns the largest difference over the largest finite |want|. If want is all zeros, it returns 0 if all
// elements agree, and otherwise +Inf.
func (d Distance) Relative() float64 { return over(d.Abs, d.Largest) }

type float interface{ ~float32 | ~float64 }

// Of returns the distance of got from want. Abs and At stay the same if got and want swap. Tensors of different lengths
// and empty tensors are errors.
func Of[A, B float](got []A, want []B, c Contract) (d Distance, err error) {
	if len(got) != len(want) {
		return d, fmt.Errorf("%d elements, want %d", len(got), len(want))
	}
	if len(got) == 0 {
		return d, errors.New("no elements to compare")
	}
	for i := range want {
		g, w := float64(got[i]), float64(want[i])
		if gap := Gap(g, w, c); gap > d.Abs {
			d.Abs, d.At = gap, i
		}
		if finite(w) {
			d.Largest = max(d.Largest, math.Abs(w))
		}
	}
	if d.Norm = d.Relative(); d.Norm == 0 || math.IsInf(d.Norm, 1) {
		return d, nil
	}
	var off, all float64 // over the largest, so that squares neither overflow nor underflow
	for i := range want {
		g, w := float64(got[i]), float64(want[i])
		gap := Gap(g, w, c) / d.Abs
		off += gap * gap
		if finite(w) {
			all += w / d.Largest * (w / d.Largest)
		}
	}
	d.Norm *= math.Sqrt(off / all)
	return d, nil
}

// Within returns an error unless the largest difference is at most a share of the largest finite |want|.
func Within[A, B float](got []A, want []B, c Contract, share float64) error {
	d, err := Of(got, want, c)
	if err == nil && !(d.Relative() <= share) {
		err = fmt.Errorf("element %d is %v, want %v: off by %.3g of %.3g, at most %.3g of it allowed",
			d.At, got[d.At], want[d.At], d.Abs, d.Largest, share)
	}
	return err
}

// Each returns an error unless every element is within allowed(i) of the wanted one.
func Each[A, B float](got []A, want []B, c Contract, allowed func(i int) float64) error {
	d, err := Of(got, want, c)
	for i := 0; err == nil && i < len(want); i++ {
		if gap, most := Gap(float64(got[i]), float64(want[i]), c), allowed(i); !(gap <= most) {
			err = fmt.Errorf("element %d is %v, want %v: off by %.3g, %.3g allowed; at most %.3g off, of %.3g",
				i, got[i], want[i], gap, most, d.Abs, d.Largest)
		}
	}
	return err
}

// Gap returns the distance of two elements, never NaN.
func Gap(a, b float64, c Contract) float64 {
	switch {
	case finite(a) && finite(b):
		return math.Abs(a - b)
	case c >= Infinities && a == b, c == NonFinite && a != a && b != b:
		return 0
	}
	return math.Inf(1)
}

func finite(x float64) bool { return x-x == 0 }

func over(part, whole float64) float64 {
	if part == 0 {
		return 0
	}
	return part / whole
}
