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

// Quantize sets byRow to x [R, C] in E4M3, each column times its element of by unless that is the zero View, and
// byColumn to the transpose of x, [C, N] with zeros from column R. One of them may be the zero value.
func (c *Kernels) Quantize(byRow, byColumn kernels.Scaled, x, by tensor.View) {
	denseActivations("quantize", x)
	shape.Quantize("quantize", byRow, byColumn, x, by)
	c.queue("quantize", func() { forType(x, quantize[float64], quantize[float32])(c, byRow, byColumn, x, by) })
}

// quantize transposes strips of columns, so that a piece of work has all rows of its maxima.
func quantize[T tensor.Float](c *Kernels, byRow, byColumn kernels.Scaled, x, by tensor.View) {
	const strip = 16
	xs, rows, cols := memoryOf[T](x), x.Rows(), x.Cols()
	if !byRow.IsZero() {
		set := quantizer[T](byRow)
		var times []float32
		if !by.IsZero() {
			times = tensor.Data[float32](by)
		}
		c.split(rows, func(s *scratch, r int) {
			mem := open[T](s, cols)
			row := mem.take(cols)
			xs.load(row, r*cols)
			for i, f := range times {
				row[i] = T(float32(row[i]) * f)
			}
			set(r, row)
		})
	}
	if byColumn.IsZero() {
		return
	}
	set := quantizer[T](byColumn)
	c.split(blocks(cols, strip), func(s *scratch, piece int) {
		from := piece * strip
		n := min(strip, cols-from)
		ld := rows + 16 // not a power of two: columns would share a set of the cache
		mem := open[T](s, n, n*ld)
		row, columns := mem.take(n), mem.take(n*ld)
		for r := range rows {
			xs.load(row, r*cols+from)
			for i, x := range row {
				columns[i*ld+r] = x
			}
		}
		for i := range n {
			set(from+i, columns[i*ld:][:rows])
		}
	})
}

// quantizer returns a function that sets row i. Bits of magnitudes have the order of the numbers, with NaN above all.
func quantizer[T tensor.Float](to kernels.Scaled) func(i int, xs []T) {
	codes, factors, cols := tensor.Data[uint8](to.View), tensor.Data[float32](to.Factors), to.Cols()
	var least []float32
	if !to.Least.IsZero() {
		least = tensor.Data[float32](to.Least)
	}
	return func(i int, xs []T) {
		row, largest := codes[i*cols:][:cols], uint32(0)
		for _, x := range xs {
			largest = max(largest, math.Float32bits(float32(x))&^(1<<31))
		}
		factor := max(math.Float32frombits(largest)/kernels.LargestE4M3, kernels.LeastFactor)
		if least != nil {
			factor = max(factor, least[i])
		}
		inverse := 1 / factor
		for k, x := range xs {
			row[k] = half.ToE4M3(float32(x) * inverse)
		}
		clear(row[len(xs):])
		factors[i] = factor
	}
}

// Transpose sets dst [C, R] to the transpose of src [R, C], of bytes.
func (c *Kernels) Transpose(dst, src tensor.View) {
	const side = 64
	shape.Transpose("transpose", dst, src)
	c.queue("transpose", func() {
		from, to, rows, cols := tensor.Data[uint8](src), tensor.Data[uint8](dst), src.Rows(), src.Cols()
		c.split(blocks(cols, side), func(_ *scratch, piece int) {
			left := piece * side
			for top := 0; top < rows; top += side {
				for j := left; j < min(left+side, cols); j++ {
					for i := top; i < min(top+side, rows); i++ {
						to[j*rows+i] = from[i*cols+j]
					}
				}
			}
		})
	})
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
	return factor[T]{codes: tensor.Data[uint8](x.View), scales: optional[float32](x.Factors), ld: x.Cols(),
		transposed: transposed}
}

// GroupQuantize sets to [P, C] to the row of x [P or T, C] of each place, times its expert's part of by [E*C].
func (c *Kernels) GroupQuantize(to kernels.Scaled, x kernels.Operand, by tensor.View, p kernels.Pairs) {
	const op = "group quantize"
	g := pairsOf(op, p)
	denseActivations(op, x.View)
	g.holds(op, x)
	shape.GroupQuantize(op, to, x.View, by, p)
	forType(x.View, groupQuantize[float64], groupQuantize[float32])(c, op, to, x, by, g)
}

func groupQuantize[T tensor.Float](c *Kernels, op string, to kernels.Scaled, x kernels.Operand, by tensor.View,
	g pairs) {
	xs, bys, n, set := memoryOf[T](x.View), tensor.Data[float32](by), x.Cols(), quantizer[T](to)
	c.eachRow(op, to.Rows(), n, func(s *scratch, lo, hi int) {
		mem := open[T](s, n)
		row := mem.take(n)
		g.each(lo, hi, func(place, e int) {
			from := place
			if x.ByToken {
				from = int(g.tokens[place])
			}
			xs.load(row, from*n)
			for i, f := range bys[e*n:][:n] {
				row[i] = T(float32(row[i]) * f)
			}
			set(place, row)
		})
	})
}

// GroupScaledLinear sets y [P, N] to each row of a [P or T, K] times the transpose of its expert's rows of b [E*N, K]
// or, if b has no factors, of its columns of b [N, E*K].
func (c *Kernels) GroupScaledLinear(y tensor.View, a kernels.Operand, b kernels.Scaled, p kernels.Pairs) {
	const op = "group scaled linear"
	denseActivations(op, y)
	shape.GroupScaledLinear(op, y, a, b, p)
	if y.Size() > 0 {
		forType(y, groupScaledLinear[float64], groupScaledLinear[float32])(c, op, y, a, b, pairsOf(op, p))
	}
}

func groupScaledLinear[T tensor.Float](c *Kernels, op string, y tensor.View, a kernels.Operand, b kernels.Scaled,
	g pairs) {
	left, right := scaledFactor[T](kernels.Scaled{View: a.View, Factors: a.Factors}, false), scaledFactor[T](b, true)
	if a.ByToken {
		left.gather = g.tokens
	}
	step := y.Cols() * a.Cols()
	if b.Factors.IsZero() {
		step = a.Cols()
	}
	groupProduct(c, op, g, y, left, right, step, a.Cols(), false)
}
