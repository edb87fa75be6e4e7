package opstest

import (
	"math"
	"testing"

	"github.com/cprun/cprun/internal/base/half"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// scaled returns a random matrix in E4M3, and its values. Codes of a row have one exponent, so that sums are exact also
// with the 14 bits of Hopper's partial sums.
func (r *rig) scaled(rows, cols int, nan bool) (kernels.Scaled, []float64) {
	codes, factors, values := make([]uint8, rows*cols), make([]float32, rows), zeros(rows*cols)
	for i := range factors {
		factors[i] = float32(math.Ldexp(1+r.rng.Float64(), 7-i%16))
		for k := range cols {
			c := min(uint8(i%16<<3|r.rng.IntN(8)), 0x7e) | uint8(r.rng.IntN(2)<<7)
			if nan && i == 4 && k == 5 {
				c = 0x7f
			}
			codes[i*cols+k], values[i*cols+k] = c, float64(half.FromE4M3(c))*float64(factors[i])
		}
	}
	return kernels.Scaled{View: r.dev.Upload(tensor.FromSlice(codes, 1, rows, 1, cols)),
		Factors: r.dev.Upload(tensor.FromSlice(factors, 1, rows, 1, 1))}, values
}

// testQuantize compares codes and factors with their definition, bit for bit. Rows, and then columns, differ in kind: a
// wide range, zeros, around the least factor, subnormal, large, infinities, NaN, ties and their neighbours.
func testQuantize(r *rig) {
	scales := []float64{1, 0, 30 * kernels.LeastFactor, 1e-40, 3e36, math.Inf(1), math.NaN()}
	if r.act == tensor.F16 {
		scales[4] = 500
	}
	element := func(line, at int) float64 {
		switch kind, x := line%8, math.Pow(r.rng.NormFloat64(), 3); {
		case kind < 5 || kind < 7 && at%3 == 1:
			return x * scales[kind]
		case kind < 7:
			return x
		case at == 0: // the factor is 1
			return kernels.LargestE4M3
		}
		low := uint8(r.rng.IntN(126))
		tie := (half.FromE4M3(low) + half.FromE4M3(low+1)) / 2
		return float64(math.Nextafter32(tie, []float32{0, tie, 448}[r.rng.IntN(3)]))
	}
	each(r, [][4]int{{1, 1, 1, 1}, {1, 0, 1, 16}, {2, 3, 5, 7}, {1, 16, 1, 32}, {1, 37, 2, 72}, {2, 150, 1, 208},
		{1, 11, 1, 2064}, {1, 1029, 1, 16}}, func(r *rig, s [4]int) {
		rows, cols := s[0]*s[1], s[2]*s[3]
		for pass := range 6 { // both results, or one, of both kinds of x
			xs := zeros(rows * cols)
			for i := range xs {
				if xs[i] = element(i/cols, i%cols); pass%2 == 1 {
					xs[i] = element(i%cols, i/cols)
				}
			}
			x, xs := r.put(r.act, xs, s[:]...)
			var byRow, byColumn kernels.Scaled
			if pass < 4 {
				byRow, _ = r.scaled(rows, cols, true)
			}
			if pass < 2 || pass > 3 {
				byColumn, _ = r.scaled(cols, (rows+15)/16*16, true)
			}
			r.ops.Quantize(byRow, byColumn, x, View{})
			r.quantized("by row", byRow, xs, cols, cols, 1)
			r.quantized("by column", byColumn, xs, rows, 1, cols)
			r.quantizedBy(byRow, byColumn, x, xs)
		}
	})
}

// quantizedBy quantizes x with factors of its columns, and with bounds of the factors of its rows.
func (r *rig) quantizedBy(byRow, byColumn kernels.Scaled, x View, xs []float64) {
	r.t.Helper()
	if byRow.IsZero() {
		return
	}
	rows, cols := x.Rows(), x.Cols()
	by, bys := r.random(tensor.F32, 1, 1, 1, cols)
	products := zeros(len(xs))
	for i, v := range xs {
		products[i] = float64(float32(v) * float32(bys[i%cols]))
	}
	r.ops.Quantize(byRow, byColumn, x, by)
	r.quantized("by row, with factors of columns", byRow, products, cols, cols, 1)
	r.quantized("by column, beside it", byColumn, xs, rows, 1, cols)
	byRow.Least, _ = r.random(tensor.F32, 1, rows, 1, 1)
	r.ops.Quantize(byRow, byColumn, x, View{})
	r.quantized("by row, at least", byRow, xs, cols, cols, 1)
	byRow.Least = byRow.Factors
	r.ops.Quantize(byRow, byColumn, x, View{})
	r.quantized("by row, at least its own factors", byRow, xs, cols, cols, 1)
}

// testTranspose covers parts of a tile, and several.
func testTranspose(r *rig) {
	each(r, [][2]int{{0, 16}, {16, 16}, {16, 144}, {144, 48}, {272, 400}}, func(r *rig, s [2]int) {
		src, _ := r.scaled(s[0], s[1], true)
		dst, _ := r.scaled(s[1], s[0], false)
		r.ops.Transpose(dst.View, src.View)
		from, to := r.bytes(src.View), r.bytes(dst.View)
		for i, want := range from {
			if got := to[i%s[1]*s[0]+i/s[1]]; got != want {
				r.t.Fatalf("byte %d of %v moved to %#02x, want %#02x", i, s, got, want)
			}
		}
	})
}

func (r *rig) bytes(v View) []byte {
	r.t.Helper()
	host, err := r.dev.Download(v)
	if err != nil {
		r.t.Fatalf("stream: %v", err)
	}
	return tensor.Bytes(host)
}

// quantized fails the test unless q, which may be zero, has rows of n elements and then 0: element (i, k) is
// xs[i*line+k*step]. Of rows with NaN or infinities it checks only those.
func (r *rig) quantized(what string, q kernels.Scaled, xs []float64, n, line, step int) {
	r.t.Helper()
	if q.IsZero() {
		return
	}
	codes, cols, least := r.bytes(q.View), q.Cols(), zeros(q.Rows())
	if !q.Least.IsZero() {
		least = r.read(q.Least)
	}
	for i, got := range r.read(q.Factors) {
		row, largest := make([]float32, cols), float32(0)
		for k := range n {
			row[k] = float32(xs[i*line+k*step])
			largest = max(largest, row[k], -row[k])
		}
		factor, finite := max(largest/kernels.LargestE4M3, kernels.LeastFactor,
			float32(least[i])), largest-largest == 0
		if finite && got != float64(factor) {
			r.t.Fatalf("%s: factor %d of %v is %g, want %g", what, i, q.Shape(), got, factor)
		}
		for k, got := range codes[i*cols:][:cols] {
			want := half.ToE4M3(row[k] * (1 / factor))
			switch {
			case finite:
			case k >= n:
				want = 0
			case row[k]-row[k] == 0:
				continue
			default:
				got, want = got&0x7f, 0x7f
			}
			if got != want {
				r.t.Fatalf("%s: code [%d, %d] of %v is %#02x, want %#02x, of %g", what, i, k, q.Shape(), got, want, row[k])
			}
		}
	}
}

// testScaledLinear covers empty sums, sizes beyond one tile, and NaN, which reaches its row or column.
func testScaledLinear(r *rig) {
	each(r, [][3]int{{1, 16, 16}, {0, 16, 32}, {5, 32, 0}, {7, 48, 32}, {65, 400, 272}, {300, 16, 80}, {5, 16, 528}},
		func(r *rig, s [3]int) {
			for _, nan := range []bool{false, true} {
				a, as := r.scaled(s[0], s[2], nan)
				b, bs := r.scaled(s[1], s[2], nan)
				want := refLinear(as, bs, s[0], s[2], s[1])
				for _, dtype := range []tensor.DType{r.act, r.par} {
					y := r.garbage(dtype, 1, s[0], 1, s[1])
					r.ops.ScaledLinear(y, a, b, View{})
					r.same("y of "+dtype.String(), y, want)
					add, adds := r.random(dtype, 1, s[0], 1, s[1])
					r.ops.ScaledLinear(y, a, b, add)
					r.same("y with an addend", y, plus(adds, want))
					r.ops.ScaledLinear(add, a, b, add)
					// cuBLASLt rounds a product to 16 bits before it adds it in place.
					r.agree("y in place of the addend", add, plus(adds, want), near.NonFinite, want)
				}
			}
		})
}

// groupScaledSizes lists mixes with widths of E4M3, beyond one tile, and without elements.
func groupScaledSizes() []sized {
	return append(allSized([2]int{16, 32}, [2]int{48, 16}, [2]int{80, 272}), sized{mix{9, 4, 2, false}, 1040, 16},
		sized{mix{300, 4, 2, true}, 32, 528}, sized{mix{3, 4, 2, false}, 16, 0}, sized{mix{3, 4, 2, false}, 0, 16})
}

// testGroupQuantize compares codes with rows times factors of their experts. Some rows are large, small, infinite, NaN
// and 0.
func testGroupQuantize(r *rig) {
	each(r, groupScaledSizes(), func(r *rig, s sized) {
		d := r.deal(s.mix)
		bys := zeros(s.experts * s.in)
		for i := range bys {
			bys[i] = math.Ldexp(1+r.rng.Float64(), -r.rng.IntN(20))
		}
		by, bys := r.put(tensor.F32, bys, 1, len(bys), 1, 1)
		for _, byToken := range []bool{false, true} {
			x, xs := r.operand(d, s.in, byToken)
			for i, scale := range []float64{1e4, 1e-7, math.Inf(1), math.NaN(), 0} {
				for k := 0; k < s.in && i < x.Rows(); k += 1 + k%2 {
					xs[i*s.in+k] *= scale
				}
			}
			x.View, xs = r.put(r.act, xs, 1, x.Rows(), 1, s.in)
			var want []float64
			for i := range d.pairs() {
				for k, v := range d.row(xs, s.in, i, byToken) {
					want = append(want, float64(float32(v)*float32(bys[d.expert(i)*s.in+k])))
				}
			}
			to, _ := r.scaled(d.pairs(), s.in, true)
			r.ops.GroupQuantize(to, x, by, d.views)
			r.quantized("of places", to, want, s.in, s.in, 1)
		}
	})
}

// turned returns the transposed codes of a random matrix in E4M3, from 1 to 2, and its values.
func (r *rig) turned(rows, cols int, nan bool) (kernels.Scaled, []float64) {
	codes, values := make([]uint8, rows*cols), zeros(rows*cols)
	for i := range codes {
		if codes[i] = uint8(7<<3 | r.rng.IntN(8) | r.rng.IntN(2)<<7); nan && i == 4*rows+5 {
			codes[i] = 0x7f
		}
		values[i%rows*cols+i/rows] = float64(half.FromE4M3(codes[i]))
	}
	return kernels.Scaled{View: r.dev.Upload(tensor.FromSlice(codes, 1, cols, 1, rows))}, values
}

// fusedOperands returns operands of a product from in to out columns, with the weights by row or transposed: in E4M3 if
// both are multiples of 16.
func (r *rig) fusedOperands(d deal, in, out int, byRow bool) (from kernels.Operand, xs []float64, w kernels.Scaled,
	ws []float64) {
	switch scaled := in%kernels.ScaledUnit == 0 && out%kernels.ScaledUnit == 0; {
	case !scaled:
		rows, cols := d.experts*in, out
		if byRow {
			rows, cols = d.experts*out, in
		}
		from, xs = r.operand(d, in, true)
		w.View, ws = r.random(r.act, 1, rows, 1, cols)
		return from, xs, w, ws
	case byRow:
		w, ws = r.scaled(d.experts*out, in, false)
	default:
		w, ws = r.turned(d.experts*in, out, false)
	}
	rows := d.pairs()
	if byRow {
		rows = d.tokens
	}
	x, xs := r.scaled(rows, in, false)
	return kernels.Operand{View: x.View, Factors: x.Factors, ByToken: byRow}, xs, w, ws
}

// testGroupScaledLinear covers rows of places and of tokens, transposed weights, and NaN, which reaches its rows or its
// expert's column.
func testGroupScaledLinear(r *rig) {
	each(r, groupScaledSizes(), func(r *rig, s sized) {
		d := r.deal(s.mix)
		for i := range 4 {
			byToken, nan, rows := i&1 > 0, i&2 > 0, d.pairs()
			if testing.Short() && byToken != nan {
				continue
			}
			if byToken {
				rows = s.tokens
			}
			a, as := r.scaled(rows, s.in, nan)
			b, bs := r.scaled(s.experts*s.out, s.in, nan)
			x := kernels.Operand{View: a.View, Factors: a.Factors, ByToken: byToken}
			y := r.garbage(r.act, 1, d.pairs(), 1, s.out)
			r.ops.GroupScaledLinear(y, x, b, d.views)
			r.same("y", y, refGroupLinear(d, as, bs, s.in, s.out, byToken))

			w, ws := r.turned(s.in*s.experts, s.out, nan)
			r.ops.GroupScaledLinear(y, x, w, d.views)
			r.same("y of transposed weights", y, refGroupLinearDX(d, as, ws, s.out, s.in, byToken))
		}
	})
}

// scaledResults runs the products in E4M3 on fixed inputs that are large enough to be split.
func (r *rig) scaledResults() []View {
	const rows, cols = 336, 144
	x, _ := r.random(r.act, 1, rows, 1, cols)
	a, _ := r.scaled(rows, cols, true)
	b, _ := r.scaled(cols, rows, true)
	y, dw := r.garbage(r.act, 1, rows, 1, rows), r.garbage(r.par, 1, cols, 1, cols)
	r.ops.Quantize(a, b, x, View{})
	r.ops.ScaledLinear(y, a, a, View{})
	r.ops.ScaledLinear(dw, b, b, View{})
	return []View{a.View, a.Factors, b.View, b.Factors, y, dw}
}
