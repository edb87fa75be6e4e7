//go:build cuda

package call

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/base/half"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// TestQuantizeOnHost compares codes and factors with their definition: whole and partial tiles, several tiles and
// blocks, rows too long for a block, empty matrices, NaN, infinities and small magnitudes, with vectors and without.
func TestQuantizeOnHost(t *testing.T) {
	var names []string
	for _, k := range []string{"rows", "largest", "largest_any", "cast", "cast_any"} {
		for _, ty := range []string{"bf16", "fp16", "fp32"} {
			names = append(names, "quantize_"+k+"_"+ty)
		}
	}
	h := newHostExperts(t, ScaledProgram, names...)
	for _, s := range []struct{ rows, columns, shift int }{
		{1, 8, 0}, {17, 520, 0}, {300, 264, 0}, {40, 136, 1}, {129, 263, 0}, {16, 1, 0}, {3, 2056, 0}, {2, 65544, 0},
		{0, 16, 0}, {9, 0, 0},
	} {
		for _, dtype := range []tensor.DType{tensor.BF16, tensor.F16, tensor.F32} {
			h.used = 0
			n := s.rows * s.columns
			xs := make([]float64, n+s.shift)
			for i := range xs {
				xs[i] = h.rng.NormFloat64() * math.Pow(2, float64(h.rng.IntN(12)))
			}
			if s.rows > 4 && n > 1000 { // rows and columns of their own kind
				for i := range s.columns {
					xs[s.shift+i] = 0
					xs[s.shift+s.columns+i] *= 1e-33
				}
				xs[s.shift+2*s.columns+5], xs[s.shift+3*s.columns+6] = math.NaN(), math.Inf(-1)
			}
			v, _ := h.put(dtype, xs, 1, 1, 1, len(xs))
			x := v.Slice(tensor.Dim, s.shift, len(xs)).Reshape([4]int{1, s.rows, 1, s.columns})
			for wanted := 1; wanted < 4; wanted++ {
				var byRow, byColumn kernels.Scaled
				if wanted&1 > 0 {
					byRow = h.scaled(s.rows, s.columns)
				}
				if wanted&2 > 0 {
					byColumn = h.scaled(s.columns, (s.rows+kernels.ScaledUnit-1)/kernels.ScaledUnit*kernels.ScaledUnit)
				}
				p, zeros, launches := Quantize(byRow, byColumn, x)
				p.Largest = h.ints(make([]int32, zeros/4), 1, int(zeros/4), 1, 1).Addr()
				for _, l := range launches {
					h.call(ScaledProgram, l.Kernel, l.Grid, [2]int{l.Threads, 1}, l.Shared, p)
				}
				of := near.Decode(x)
				what := fmt.Sprintf("%v of %v, results %d", s, dtype, wanted)
				at := func(row, column int) float32 { return float32(of[row*s.columns+column]) }
				checkScaled(t, what+" by row", byRow, at, s.columns)
				checkScaled(t, what+" by column", byColumn, func(i, k int) float32 { return at(k, i) }, s.rows)
			}
		}
	}
}

// scaled returns a matrix of NaN.
func (h hostExperts) scaled(rows, columns int) kernels.Scaled {
	mem, err := h.alloc(int64(rows*columns+16) &^ 15)
	ok(h.t, err)
	codes := tensor.Dense(mem, tensor.U8, 0, [4]int{1, rows, 1, columns})
	for i := range tensor.Data[uint8](codes) {
		tensor.Data[uint8](codes)[i] = 0xff
	}
	factors, _ := h.put(tensor.F32, slices.Repeat([]float64{math.NaN()}, rows), 1, rows, 1, 1)
	return kernels.Scaled{View: codes, Factors: factors}
}

// checkScaled compares a matrix with the codes of the first n columns of x, and zeros after them.
func checkScaled(t *testing.T, what string, got kernels.Scaled, x func(i, k int) float32, n int) {
	t.Helper()
	if got.IsZero() {
		return
	}
	columns := got.Cols()
	for i, factor := range tensor.Data[float32](got.Factors) {
		largest := float32(0)
		for k := range n {
			if a := float32(math.Abs(float64(x(i, k)))); a > largest {
				largest = a
			}
		}
		want := max(largest/kernels.LargestE4M3, kernels.LeastFactor)
		if factor != want {
			t.Fatalf("%s: factor %d is %v, want %v", what, i, factor, want)
		}
		for k, code := range tensor.Data[uint8](got.View)[i*columns:][:columns] {
			want, inverse := uint8(0), 1/want
			if k < n {
				want = half.ToE4M3(x(i, k) * inverse)
			}
			if code != want && (code&0x7f != 0x7f || want&0x7f != 0x7f) {
				t.Fatalf("%s: code (%d, %d) is %#02x, want %#02x of %v", what, i, k, code, want, x(i, k))
			}
		}
	}
}
