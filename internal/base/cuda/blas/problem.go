// Package blas multiplies matrices on a GPU with cuBLASLt, on one stream. What cuBLASLt chose for
// a problem is kept, so that a product costs one call. The library is loaded when it is first
// used; without the build tag cuda only the problems can be described.
package blas

import (
	"fmt"
	"math/bits"

	"github.com/cprun/cprun/tensor"
)

// Matrix is an operand at address Addr of device memory, row-major: row i begins Stride elements
// behind row i-1. Its number of rows and columns follows from the problem.
type Matrix struct {
	Addr   uint64
	Stride int64
}

// Problem is D = A B, or D = A B + C where C has an address. A is m by k and B k by n; they
// are given transposed where TransA and TransB say so. C and D are m by n and may be the same
// memory; no other two may overlap. Sums are float32.
type Problem struct {
	M, N, K        int
	TransA, TransB bool
	In             tensor.DType // of A and B: float32, float16 or bfloat16
	Out            tensor.DType // of C and D: In, or float32
	A, B, C, D     Matrix
}

func (p Problem) String() string {
	t := func(b bool) string {
		if b {
			return "T"
		}
		return "N"
	}
	add := ""
	if p.C.Addr != 0 {
		add = " + C"
	}
	return fmt.Sprintf("%s%s product %dx%dx%d, %v to %v%s", t(p.TransA), t(p.TransB), p.M, p.N, p.K, p.In, p.Out, add)
}

// A key holds everything that a choice depends on.
type key struct {
	m, n, k        int
	transA, transB bool
	in, out        tensor.DType
	add, inPlace   bool
	stride         [4]int64
	align          [4]uint8
}

func (p Problem) key() key {
	k := key{
		m: p.M, n: p.N, k: p.K, transA: p.TransA, transB: p.TransB, in: p.In, out: p.Out,
		add: p.C.Addr != 0, inPlace: p.C.Addr == p.D.Addr,
	}
	for i, x := range p.operands() {
		k.stride[i], k.align[i] = x.Stride, alignment(x.Addr)
	}
	return k
}

// operands are A, B, C and D; C is D where there is none.
func (p Problem) operands() [4]Matrix {
	if p.C.Addr == 0 {
		p.C = p.D
	}
	return [4]Matrix{p.A, p.B, p.C, p.D}
}

// alignment returns the largest power of two up to 128 bytes that divides an address; more makes no
// difference to any kernel.
func alignment(addr uint64) uint8 {
	return 1 << min(bits.TrailingZeros64(addr), 7)
}
