package model

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/tensor"
)

func (refOps) Quantize(byRow, byColumn kernels.Scaled, x, by View) {
	X, rows, cols := get(x), x.Rows(), x.Cols()
	times := slices.Repeat([]float64{1}, cols)
	if !by.IsZero() {
		times = get(by)
	}
	if !byRow.IsZero() {
		putScaled(byRow, cols, func(i, k int) float64 { return float64(float32(X[i*cols+k]) * float32(times[k])) })
	}
	if !byColumn.IsZero() {
		putScaled(byColumn, rows, func(i, k int) float64 { return X[k*cols+i] })
	}
}

// putScaled rounds rows of n elements to E4M3: to multiples of an eighth of their binade, or of 2^-9 below 2^-6.
func putScaled(to kernels.Scaled, n int, at func(i, k int) float64) {
	codes, factors, cols := tensor.Data[uint8](to.View), tensor.Data[float32](to.Factors), to.Cols()
	clear(codes)
	least := make([]float32, len(factors))
	if !to.Least.IsZero() {
		copy(least, tensor.Data[float32](to.Least))
	}
	for i := range factors {
		largest := 0.0
		for k := range n {
			largest = max(largest, math.Abs(at(i, k)))
		}
		factors[i] = max(float32(largest)/kernels.LargestE4M3, kernels.LeastFactor, least[i])
		for k := range n {
			x := float64(float32(at(i, k)) * (1 / factors[i]))
			binade := max(math.Ilogb(x), -6)
			steps := math.RoundToEven(math.Abs(math.Ldexp(x, 3-binade)))
			code := uint8(min((binade+6)*8+int(steps), 0x7e))
			switch {
			case x != x:
				code = 0x7f
			case math.Signbit(x):
				code |= 0x80
			}
			codes[i*cols+k] = code
		}
	}
}

func (refOps) Transpose(dst, src View) {
	from, to, rows, cols := tensor.Data[uint8](src), tensor.Data[uint8](dst), src.Rows(), src.Cols()
	for i, x := range from {
		to[i%cols*rows+i/cols] = x
	}
}

// getScaled returns the elements as a view of float64.
func getScaled(s kernels.Scaled) View {
	out, factors := make([]float64, s.Size()), get(s.Factors)
	for i, code := range tensor.Data[uint8](s.View) {
		exponent, fraction := float64(code>>3&15), float64(code&7)/8
		x := (min(1, exponent) + fraction) * math.Exp2(max(1, exponent)-7)
		if code&0x7f == 0x7f {
			x = math.NaN()
		}
		out[i] = math.Copysign(x, float64(int8(code))) * factors[i/s.Cols()]
	}
	return tensor.FromSlice(out, 1, s.Rows(), 1, s.Cols())
}

func (refOps) GroupQuantize(to kernels.Scaled, x kernels.Operand, by View, p kernels.Pairs) {
	X, B, n := get(x.View), get(by), x.Cols()
	times := make([]float64, p.Tokens.Size()*n)
	eachPlace(x, p, func(i, e, from int) {
		for k := range n {
			times[i*n+k] = float64(float32(X[from*n+k]) * float32(B[e*n+k]))
		}
	})
	putScaled(to, n, func(i, k int) float64 { return times[i*n+k] })
}

func (o refOps) GroupScaledLinear(y View, a kernels.Operand, b kernels.Scaled, p kernels.Pairs) {
	x := kernels.Operand{View: getScaled(kernels.Scaled{View: a.View, Factors: a.Factors}), ByToken: a.ByToken}
	if !b.Factors.IsZero() {
		o.GroupLinear(y, x, getScaled(b), p, false)
		return
	}
	b.Factors = tensor.FromSlice(slices.Repeat([]float32{1}, b.Rows()), 1, b.Rows(), 1, 1)
	turned := get(getScaled(b))
	w := make([]float64, len(turned)) // [E*K, N]
	for i := range w {
		w[i] = turned[i%y.Cols()*b.Cols()+i/y.Cols()]
	}
	o.GroupLinearDX(y, x, tensor.FromSlice(w, 1, b.Cols(), 1, y.Cols()), p, false)
}

func (o refOps) ScaledLinear(y View, a, b kernels.Scaled, add View) {
	o.Linear(y, getScaled(a), getScaled(b), add)
}

// TestScaledReference compares the definitions with the CPU's kernels: codes and factors exactly.
func TestScaledReference(t *testing.T) {
	stream := tensor.NewHostStream("test")
	defer stream.Close()
	const rows, cols = 37, 48
	results := func(ops Ops) (list []View) {
		rng := rand.New(rand.NewPCG(1, 2))
		x, y := tensor.New(tensor.F64, 1, rows, 1, cols), tensor.New(tensor.F64, 1, rows, 1, cols)
		for i := range tensor.Data[float64](x) {
			tensor.Data[float64](x)[i] = math.Exp(3 * rng.NormFloat64())
			tensor.Data[float64](y)[i] = rng.NormFloat64()
		}
		scaled := func(rows, cols int) kernels.Scaled {
			return kernels.Scaled{View: tensor.New(tensor.U8, 1, rows, 1, cols),
				Factors: tensor.New(tensor.F32, 1, rows, 1, 1)}
		}
		a, b, c, d := scaled(rows, cols), scaled(cols, 48), scaled(rows, cols), scaled(cols, 48)
		ops.Quantize(a, b, x, View{})
		c.Least = a.Factors
		ops.Quantize(c, d, y, b.Factors)
		z := tensor.New(tensor.F64, 1, cols, 1, cols)
		ops.ScaledLinear(y, c, b, y)
		ops.ScaledLinear(z, b, d, View{})
		if err := stream.Sync(context.Background()); err != nil {
			t.Fatal(err)
		}
		return []View{getScaled(a), getScaled(b), getScaled(c), getScaled(d), y, z}
	}
	want := results(cpu.New(stream))
	for i, v := range results(refOps{}) {
		tolerance := 1e-8
		if i < 4 {
			tolerance = 0
		}
		for j, x := range get(v) {
			near(t, fmt.Sprintf("element %d of result %d", j, i), x, get(want[i])[j], tolerance)
		}
	}
}
