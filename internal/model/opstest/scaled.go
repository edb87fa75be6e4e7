package opstest

import (
	"math"
	"sort"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// e4m3 returns the magnitude of a code of E4M3 below NaN, or of a point between two neighbours.
func e4m3(code float64) float64 {
	exponent := math.Floor(code / 8)
	return math.Ldexp(min(1, exponent)+code/8-exponent, int(max(1, exponent))-7)
}

// refCode returns the code nearest to x: ties to even, at most the largest.
func refCode(x float32) uint8 {
	if x-x != 0 {
		return 0x7f
	}
	abs, sign := math.Abs(float64(x)), uint8(math.Float32bits(x)>>24&0x80)
	tie := func(c int) float64 { return e4m3(float64(c) + 0.5) }
	c := sort.Search(126, func(c int) bool { return abs <= tie(c) })
	if abs == tie(c) {
		c += c & 1
	}
	return uint8(c) | sign
}

// scaled returns a matrix in E4M3 with the given codes, and its values. Those of a row are at most 2 in magnitude.
func (r *rig) scaled(rows, cols int, code func(i, k int) uint8) (kernels.Scaled, []float64) {
	codes, factors, values := make([]uint8, rows*cols), make([]float32, rows), zeros(rows*cols)
	for i := range factors {
		line, largest := values[i*cols:][:cols], 0x1p-9
		for k := range line {
			c := code(i, k)
			codes[i*cols+k] = c
			if c&0x7f == 0x7f {
				line[k] = math.NaN()
				continue
			}
			line[k] = math.Copysign(e4m3(float64(c&0x7f)), float64(int8(c)))
			largest = max(largest, math.Abs(line[k]))
		}
		factors[i] = float32((1 + r.rng.Float64()) / largest)
		for k := range line {
			line[k] *= float64(factors[i])
		}
	}
	return kernels.Scaled{View: r.dev.Upload(tensor.FromSlice(codes, 1, rows, 1, cols)),
		Factors: r.dev.Upload(tensor.FromSlice(factors, 1, rows, 1, 1))}, values
}

// stale returns a matrix for results that must not depend on old values.
func (r *rig) stale(rows, cols int) kernels.Scaled {
	s, _ := r.scaled(rows, cols, func(int, int) uint8 { return 0x55 })
	return s
}

// testQuantize compares codes and factors with their definition, bit for bit. Rows, and then columns, differ in kind: a
// wide range, zeros, around the least factor, subnormal, large, ties and their neighbours, NaN, infinities.
func testQuantize(r *rig) {
	scales, normal := []float64{1, 0, 30 * kernels.LeastFactor, 1e-40, 3e36}, r.rng.NormFloat64
	if r.act == tensor.F16 {
		scales[4] = 500
	}
	element := func(line, at int) float64 {
		switch kind := line % 9; kind {
		case 5, 6:
			if at == 0 { // the factor is 1
				return kernels.LargestE4M3
			}
			tie := math.Copysign(e4m3(float64(r.rng.IntN(126))+0.5), normal())
			if kind == 6 {
				tie = float64(math.Nextafter32(float32(tie), float32(1000*normal())))
			}
			return tie
		case 7:
			return []float64{normal(), normal(), math.NaN()}[at%3]
		case 8:
			return []float64{normal(), math.Inf(1), math.Inf(-1)}[at%3]
		default:
			return scales[kind] * math.Pow(normal(), 3)
		}
	}
	shapes := [][4]int{{1, 1, 1, 1}, {1, 0, 1, 16}, {2, 3, 5, 7}, {1, 16, 1, 32}, {1, 37, 2, 72}, {2, 150, 1, 208},
		{1, 11, 1, 2064}, {1, 1029, 1, 16}}
	each(r, shapes, func(r *rig, s [4]int) {
		rows, cols := s[0]*s[1], s[2]*s[3]
		for pass := range 6 {
			xs := zeros(rows * cols)
			for i := range xs {
				xs[i] = element(i/cols, i%cols)
				if pass%2 == 1 {
					xs[i] = element(i%cols, i/cols)
				}
			}
			x, xs := r.put(r.act, xs, s[:]...)
			byRow, byColumn := r.stale(rows, cols), r.stale(cols, (rows+15)/16*16)
			switch pass / 2 {
			case 1:
				byRow = kernels.Scaled{}
			case 2:
				byColumn = kernels.Scaled{}
			}
			r.ops.Quantize(byRow, byColumn, x)
			r.quantized("by row", byRow, xs, cols, cols, 1)
			r.quantized("by column", byColumn, xs, rows, 1, cols)
		}
	})
}

// quantized fails the test unless q, which may be zero, has rows of n elements and then 0: element (i, k) is
// xs[i*line+k*step]. Of rows with NaN or infinities it checks only those.
func (r *rig) quantized(what string, q kernels.Scaled, xs []float64, n, line, step int) {
	r.t.Helper()
	if q.IsZero() {
		return
	}
	host, err := r.dev.Download(q.View)
	if err != nil {
		r.t.Fatalf("stream: %v", err)
	}
	cols := q.Cols()
	for i, got := range r.read(q.Factors) {
		row, largest := make([]float32, cols), float32(0)
		for k := range n {
			row[k] = float32(xs[i*line+k*step])
			largest = max(largest, float32(math.Abs(float64(row[k]))))
		}
		factor, finite := max(largest/kernels.LargestE4M3, kernels.LeastFactor), largest-largest == 0
		if !finite {
			factor = 1
		} else if got != float64(factor) {
			r.t.Fatalf("%s: factor %d of %v is %g, want %g", what, i, q.Shape(), got, factor)
		}
		for k, got := range tensor.Bytes(host)[i*cols:][:cols] {
			x := row[k]
			if k < n && !finite {
				if x-x == 0 {
					continue
				}
				got &= 0x7f
			}
			if want := refCode(x * (1 / factor)); got != want {
				r.t.Fatalf("%s: code [%d, %d] of %v is %#02x, want %#02x, of %g", what, i, k, q.Shape(), got, want, x)
			}
		}
	}
}

// testScaledLinear covers empty sums, sizes beyond one tile, and NaN, which reaches its row or column. Codes of a row
// have one exponent, so that sums are exact also with the 14 bits of Hopper's products.
func testScaledLinear(r *rig) {
	code := func(i, _ int) uint8 { return min(uint8(i%16<<3|r.rng.IntN(8)), 0x7e) | uint8(r.rng.IntN(2)<<7) }
	withNaN := func(i, k int) uint8 {
		if i == 4 && k == 5 {
			return 0x7f
		}
		return code(i, k)
	}
	shapes := [][3]int{{1, 16, 16}, {0, 16, 32}, {5, 32, 0}, {7, 48, 32}, {65, 400, 272}, {300, 16, 80}, {5, 16, 528}}
	each(r, shapes, func(r *rig, s [3]int) {
		for _, code := range []func(i, k int) uint8{code, withNaN} {
			a, as := r.scaled(s[0], s[2], code)
			b, bs := r.scaled(s[1], s[2], code)
			want := refLinear(as, bs, s[0], s[2], s[1])
			for _, dtype := range []tensor.DType{r.act, r.par} {
				y := r.garbage(dtype, 1, s[0], 1, s[1])
				r.ops.ScaledLinear(y, a, b, View{})
				r.same("y of "+dtype.String(), y, want)
				add, adds := r.random(dtype, 1, s[0], 1, s[1])
				r.ops.ScaledLinear(y, a, b, add)
				r.same("y with an addend", y, plus(adds, want))
				r.ops.ScaledLinear(add, a, b, add)
				r.same("y in place of the addend", add, plus(adds, want))
			}
		}
	})
}

// scaledResults runs the products in E4M3 on fixed inputs that are large enough to be split.
func (r *rig) scaledResults() []View {
	const rows, cols = 336, 144
	x, _ := r.random(r.act, 1, rows, 1, cols)
	a, b := r.stale(rows, cols), r.stale(cols, rows)
	y, dw := r.garbage(r.act, 1, rows, 1, rows), r.garbage(r.par, 1, cols, 1, cols)
	r.ops.Quantize(a, b, x)
	r.ops.ScaledLinear(y, a, a, View{})
	r.ops.ScaledLinear(dw, b, b, View{})
	return []View{a.View, a.Factors, b.View, b.Factors, y, dw}
}
