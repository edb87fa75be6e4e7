package kernels

import "github.com/cprun/cprun/tensor"

// Scaled is a matrix in E4M3 (arXiv:2209.05433): element (i, k) is the value of its code times factor i. A factor is
// the largest magnitude of its row over Largest, as float32; of a row of zeros, and of magnitudes below
// Largest*LeastFactor, it is LeastFactor. A code is that of the element, as float32, times 1/factor, both rounded to
// float32, then to the nearest E4M3, ties to even, at most Largest. A row with NaN or infinity has a NaN code there.
type Scaled struct {
	tensor.View             // uint8 [1, rows, 1, cols]
	Factors     tensor.View // float32 [1, rows, 1, 1]
	// Least, of the shape of Factors, makes a quantization raise each factor to it; it may be Factors itself. Ranks with
	// parts of a row so agree on its factor. Zero: none.
	Least tensor.View
}

const (
	// LargestE4M3 is the largest number of E4M3.
	LargestE4M3 = 448
	// LeastFactor is a factor whose inverse is finite.
	LeastFactor = 0x1p-100
	// ScaledUnit divides the columns of Scaled operands of a product.
	ScaledUnit = 16
)
