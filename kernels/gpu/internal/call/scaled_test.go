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

// scaledKernels names the kernels of ScaledProgram.
func scaledKernels() []string {
	names := []string{"transpose"}
	for _, k := range []string{"rows", "places", "largest", "largest_any", "cast", "cast_any"} {
		for _, ty := range []string{"bf16", "fp16", "fp32"} {
			names = append(names, "quantize_"+k+"_"+ty)
		}
	}
	return names
}

// TestQuantizeOnHost compares codes and factors with their definition: whole and partial tiles, several tiles and
// blocks, rows too long for a block, empty matrices, NaN, infinities and small magnitudes, with vectors and without.
func TestQuantizeOnHost(t *testing.T) {
	h := newHostExperts(t, ScaledProgram, scaledKernels()...)
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
				by, least := View{}, View{}
				var bys []float32
				if byRow.Size() > 0 {
					by, _ = h.put(tensor.F32, normals(h, s.columns), 1, 1, 1, s.columns)
					least, _ = h.put(tensor.F32, normals(h, s.rows), 1, s.rows, 1, 1)
					bys, byRow.Least = tensor.Data[float32](by), least
				}
				p, zeros, launches := Quantize(byRow, byColumn, x, by)
				p.Largest = h.ints(make([]int32, zeros/4), 1, int(zeros/4), 1, 1).Addr()
				for _, l := range launches {
					h.call(ScaledProgram, l.Kernel, l.Grid, [2]int{l.Threads, 1}, l.Shared, p)
				}
				of := near.Decode(x)
				what := fmt.Sprintf("%v of %v, results %d", s, dtype, wanted)
				at := func(row, column int) float32 { return float32(of[row*s.columns+column]) }
				checkScaled(t, what+" by row", byRow, func(i, k int) float32 { return at(i, k) * bys[k] }, s.columns)
				checkScaled(t, what+" by column", byColumn, func(i, k int) float32 { return at(k, i) }, s.rows)
			}
		}
	}
}

// TestGroupQuantizeOnHost compares rows of places and of tokens times factors of their experts.
func TestGroupQuantizeOnHost(t *testing.T) {
	h := newHostExperts(t, ScaledProgram, scaledKernels()...)
	for i, columns := range []int{16, 2064, 528} {
		dtype := []tensor.DType{tensor.BF16, tensor.F16, tensor.F32}[i]
		for _, byToken := range []bool{false, true} {
			h.used = 0
			d := h.deal(9, 5, 2)
			rows := map[bool]int{true: d.tokens, false: len(d.pair)}[byToken]
			x, xs := h.random(dtype, 1, rows, 1, columns)
			by, bys := h.random(tensor.F32, 1, d.experts*columns, 1, 1)
			to := h.scaled(len(d.pair), columns)
			p, l, ok := GroupQuantize(to, x, by)
			if !ok {
				t.Fatal("rows do not fit a block")
			}
			h.call(ScaledProgram, l.Kernel, l.Grid, [2]int{l.Threads, 1}, l.Shared, p, d.args, map[bool]int{true: 1}[byToken])
			checkScaled(t, fmt.Sprint(dtype, columns, byToken), to, func(place, k int) float32 {
				e := d.choice[d.pair[place]]
				return float32(d.row(xs, columns, place, byToken)[k]) * float32(bys[int(e)*columns+k])
			}, columns)
		}
	}
	if _, _, ok := GroupQuantize(kernels.Scaled{}, h.ints(nil, 1, 0, 1, 32784), View{}); ok {
		t.Error("rows of 32784 columns fit a block")
	}
}

func normals(h hostExperts, n int) []float64 {
	list := make([]float64, n)
	for i := range list {
		list[i] = h.rng.NormFloat64()
	}
	return list
}

// TestTransposeOnHost compares bytes: parts of a tile, and several.
func TestTransposeOnHost(t *testing.T) {
	h := newHostExperts(t, ScaledProgram, scaledKernels()...)
	for _, s := range [][2]int{{16, 16}, {144, 48}, {272, 400}} {
		h.used = 0
		src, dst := h.scaled(s[0], s[1]).View, h.scaled(s[1], s[0]).View
		from := tensor.Data[uint8](src)
		for i := range from {
			from[i] = uint8(h.rng.IntN(256))
		}
		p, l := Transpose(dst, src)
		h.call(ScaledProgram, l.Kernel, l.Grid, [2]int{l.Threads, 1}, l.Shared, p)
		for i, want := range from {
			if got := tensor.Data[uint8](dst)[i%s[1]*s[0]+i/s[1]]; got != want {
				t.Fatalf("byte %d of %v moved to %#02x, want %#02x", i, s, got, want)
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
		if !got.Least.IsZero() {
			want = max(want, tensor.Data[float32](got.Least)[i])
		}
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
