// Package blas multiplies matrices on a GPU with cuBLASLt, on one stream. A Handle caches the algorithm for each
// Problem, so that a product costs one call:
//
//	h, err := blas.Open(stream, workspace)
//	ok := h.Multiply("linear", blas.Problem{M: m, N: n, K: k, In: t, Out: t, A: a, B: b, D: d})
//
// Open loads the library. Without the build tag cuda, the package only describes problems.
package blas

import (
	"fmt"
	"math/bits"

	"github.com/cprun/cprun/tensor"
)

// Matrix is a row-major operand at address Addr of device memory. Rows are Stride elements apart. The problem
// determines its numbers of rows and columns.
type Matrix struct {
	Addr    uint64
	Stride  int64
	Factors uint64 // of an operand in E4M3: the address of a float32 for each row
}

// Problem is D = A B, or D = A B + C if C has an address. A is m by k and B is k by n; TransA and TransB mean that they
// are stored transposed. C and D are m by n and may be the same memory; no other two may overlap. Sums are float32.
// Operands in E4M3 need TransB without TransA. Their sums have the precision of cuBLASLt's fast accumulation.
type Problem struct {
	M, N, K        int
	TransA, TransB bool
	In             tensor.DType // of A and B: float32, float16, bfloat16, or uint8 for E4M3
	Out            tensor.DType // of C and D: In, or float32; of E4M3, any float
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

// A key holds all properties of a problem that affect the choice of algorithm.
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

// operands returns A, B, C and D, with D in place of an absent C.
func (p Problem) operands() [4]Matrix {
	if p.C.Addr == 0 {
		p.C = p.D
	}
	return [4]Matrix{p.A, p.B, p.C, p.D}
}

// alignment returns the largest power of two, up to 128 bytes, that divides an address. Kernels do not use more.
func alignment(addr uint64) uint8 {
	return 1 << min(bits.TrailingZeros64(addr), 7)
}
