package call

import (
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/tensor"
)

// ScaledProgram is the program of the kernels of Quantize.
const ScaledProgram = "ops_scaled"

// A QuantizeLaunch is the launch of a kernel of ScaledProgram with the arguments of Quantize.
type QuantizeLaunch struct {
	Kernel          string
	Grid            [2]int
	Threads, Shared int // of a block; Shared in bytes
}

// The constants of ops_scaled.cu.
const (
	quantizeOctet   = 8   // columns that a thread loads at once
	quantizeHeld    = 8   // octets of a thread
	quantizeSide    = 128 // of a tile
	quantizeWide    = 256 // columns of a block that finds the largest magnitudes
	quantizeThreads = 256 // of a block; 512 at most if it holds a row
)

var quantizeTypes = map[tensor.DType]string{tensor.F32: "fp32", tensor.F16: "fp16", tensor.BF16: "bf16"}

// ceilOrOne returns n/of rounded up, at least 1: an empty matrix has factors.
func ceilOrOne(n, of int) int { return max(1, (n+of-1)/of) }

// quantizeRows returns the launch of a kernel with a block for each row of a result; ok is false if a block has no room
// for a row.
func quantizeRows(kernel string, rows int, x View) (l QuantizeLaunch, ok bool) {
	threads := 32 * ceilOrOne(x.Cols(), 32*quantizeOctet*quantizeHeld)
	return QuantizeLaunch{"quantize_" + kernel + "_" + quantizeTypes[x.DType()], [2]int{rows, 1}, threads, 4 * 32},
		threads <= 512
}

// GroupQuantize returns the first argument and the launch of model.Ops.GroupQuantize; ok is false if rows do not fit a
// block. The caller has checked shapes and addresses.
func GroupQuantize(to kernels.Scaled, x, by View) (p source.Quantize, l QuantizeLaunch, ok bool) {
	p = source.Quantize{X: x.Addr(), ByRow: to.Addr(), RowFactors: to.Factors.Addr(), By: by.Addr(),
		Rows: int32(x.Rows()), Columns: int32(x.Cols())}
	l, ok = quantizeRows("places", to.Rows(), x)
	return p, l, ok
}

// Transpose returns the arguments and the launch of model.Ops.Transpose, of a matrix that is not empty.
func Transpose(dst, src View) (source.Quantize, QuantizeLaunch) {
	rows, columns := src.Rows(), src.Cols()
	grid := [2]int{(columns + quantizeSide - 1) / quantizeSide, (rows + quantizeSide - 1) / quantizeSide}
	return source.Quantize{X: src.Addr(), ByColumn: dst.Addr(), Rows: int32(rows), Columns: int32(columns)},
		QuantizeLaunch{"transpose", grid, quantizeThreads, quantizeSide*(quantizeSide+4) + 4*quantizeSide/32}
}

// Quantize returns the arguments and the launches of model.Ops.Quantize. The caller has checked shapes, and that codes
// begin at a multiple of 16 bytes. It sets Largest to memory with that number of zero bytes.
func Quantize(byRow, byColumn kernels.Scaled, x, by View) (p source.Quantize, zeros int64, list []QuantizeLaunch) {
	rows, columns := x.Rows(), x.Cols()
	p = source.Quantize{X: x.Addr(), ByRow: byRow.Addr(), ByColumn: byColumn.Addr(), RowFactors: byRow.Factors.Addr(),
		ColumnFactors: byColumn.Factors.Addr(), By: by.Addr(), Least: byRow.Least.Addr(), Rows: int32(rows),
		Columns: int32(columns), Stride: int32(byColumn.Cols())}
	name, any, ceil := quantizeTypes[x.DType()], "any_", ceilOrOne
	if columns%quantizeOctet == 0 && (x.Addr()|by.Addr())%16 == 0 {
		any = ""
		if l, ok := quantizeRows("rows", rows, x); ok && byColumn.IsZero() {
			return p, 0, []QuantizeLaunch{l}
		}
	}
	y := ceil(rows, quantizeSide)
	return p, 4 * int64(rows+columns), []QuantizeLaunch{
		{"quantize_largest_" + any + name, [2]int{ceil(columns, quantizeWide), y}, quantizeThreads,
			4 * quantizeThreads / 32 * quantizeWide},
		{"quantize_cast_" + any + name, [2]int{ceil(columns, quantizeSide), y}, quantizeThreads,
			quantizeSide*quantizeSide + 4*2*quantizeSide},
	}
}
