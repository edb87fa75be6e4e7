package cpu

import (
	"math"

	"github.com/cprun/cprun/internal/base/half"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// fromE4M3 lists the values of E4M3 by code.
var fromE4M3 = func() (list [256]float32) {
	for c := range list {
		list[c] = half.FromE4M3(uint8(c))
	}
	return list
}()

// Quantize sets byRow to x [R, C] in E4M3, and byColumn to its transpose, [C, N] with zeros from column R. One of them
// may be the zero value.
func (c *Kernels) Quantize(byRow, byColumn kernels.Scaled, x tensor.View) {
	denseActivations("quantize", x)
	shape.Quantize("quantize", byRow, byColumn, x)
	if !byRow.IsZero() {
		forType(x, quantizeRows[float64], quantizeRows[float32])(c, byRow, x)
	}
	if !byColumn.IsZero() {
		forType(x, quantizeColumns[float64], quantizeColumns[float32])(c, byColumn, x)
	}
}

func quantizeRows[T tensor.Float](c *Kernels, to kernels.Scaled, x tensor.View) {
	codes, factors := tensor.Data[uint8](to.View), tensor.Data[float32](to.Factors)
	xs, rows, cols := memoryOf[T](x), x.Rows(), x.Cols()
	c.queue("quantize", func() {
		c.split(rows, func(s *scratch, r int) {
			mem, most, inverse := open[T](s, cols), uint32(0), float32(0)
			row := mem.take(cols)
			xs.load(row, r*cols)
			for _, x := range row {
				most = max(most, magnitude(x))
			}
			factors[r], inverse = scaleOf(most)
			for k, x := range row {
				codes[r*cols+k] = half.ToE4M3(float32(x) * inverse)
			}
		})
	})
}

// quantizeColumns reads each strip of columns twice, so that a piece of work holds all rows of its maxima.
func quantizeColumns[T tensor.Float](c *Kernels, to kernels.Scaled, x tensor.View) {
	const strip = 64
	codes, factors := tensor.Data[uint8](to.View), tensor.Data[float32](to.Factors)
	xs, rows, cols, padded := memoryOf[T](x), x.Rows(), x.Cols(), to.Cols()
	c.queue("quantize", func() {
		c.split(blocks(cols, strip), func(s *scratch, piece int) {
			from := piece * strip
			n := min(strip, cols-from)
			mem, most, inverse := open[T](s, n), [strip]uint32{}, [strip]float32{}
			row := mem.take(n)
			for r := range rows {
				xs.load(row, r*cols+from)
				for i, x := range row {
					most[i] = max(most[i], magnitude(x))
				}
			}
			for i := range n {
				factors[from+i], inverse[i] = scaleOf(most[i])
				clear(codes[(from+i)*padded+rows : (from+i+1)*padded])
			}
			for r := range rows {
				xs.load(row, r*cols+from)
				for i, x := range row {
					codes[(from+i)*padded+r] = half.ToE4M3(float32(x) * inverse[i])
				}
			}
		})
	})
}

// magnitude returns the bits of |x| as float32. Their order is that of numbers, then infinity, then NaN.
func magnitude[T tensor.Float](x T) uint32 { return math.Float32bits(float32(x)) &^ (1 << 31) }

// scaleOf returns the factor of a row with the given largest magnitude, and its inverse.
func scaleOf(most uint32) (factor, inverse float32) {
	factor = max(math.Float32frombits(most)/kernels.LargestE4M3, kernels.LeastFactor)
	return factor, 1 / factor
}

// ScaledLinear sets y [M, N] to a [M, K] times b [N, K] transposed, plus add unless that is the zero View.
func (c *Kernels) ScaledLinear(y tensor.View, a, b kernels.Scaled, add tensor.View) {
	denseActivations("scaled linear", y)
	if !add.IsZero() {
		denseActivations("scaled linear", y, add)
	}
	shape.ScaledLinear("scaled linear", y, a, b, add)
	forType(y, scaledLinear[float64], scaledLinear[float32])(c, y, a, b, add)
}

func scaledLinear[T tensor.Float](c *Kernels, y tensor.View, a, b kernels.Scaled, add tensor.View) {
	newProduct(c, y, scaledFactor[T](a, false), scaledFactor[T](b, true), a.Cols()).queue(c, "scaled linear", add)
}

func scaledFactor[T tensor.Float](x kernels.Scaled, transposed bool) factor[T] {
	return factor[T]{codes: tensor.Data[uint8](x.View), scales: tensor.Data[float32](x.Factors), ld: x.Cols(),
		transposed: transposed}
}
