//go:build cuda

package gpu

import (
	"context"
	"fmt"
	"testing"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// scaled returns uninitialised codes and factors on the device.
func (r *cudaRig) scaled(rows, columns int) kernels.Scaled {
	r.t.Helper()
	dev := r.loader.Device()
	return kernels.Scaled{View: place(r.t, dev, tensor.U8, [4]int{1, rows, 1, columns}),
		Factors: place(r.t, dev, tensor.F32, [4]int{1, rows, 1, 1})}
}

// both returns x by row and by column.
func (r *cudaRig) both(x View) (byRow, byColumn kernels.Scaled) {
	r.t.Helper()
	byRow, byColumn = r.scaled(x.Rows(), x.Cols()), r.scaled(x.Cols(), x.Rows())
	r.Quantize(byRow, byColumn, x, View{})
	return byRow, byColumn
}

// turned returns the transposed codes of w, with factors of 1.
func (r *cudaRig) turned(w kernels.Scaled) kernels.Scaled {
	r.t.Helper()
	t := r.scaled(w.Cols(), w.Rows())
	r.Transpose(t.View, w.View)
	r.Zero(t.Factors)
	r.Affine(t.Factors, t.Factors, 0, 1)
	return t
}

// TestCUDAScaledSizes compares the three products of a layer with products in bfloat16. Rounding to 4 bits changes an
// operand by 2.6 %, and a product by 3.7 %.
func TestCUDAScaledSizes(t *testing.T) {
	const tokens, in, out = 8192, 4096, 1536
	rig := newCUDARig(t)
	x, _ := rig.normal(tensor.BF16, 1, tokens, 1, in)
	w, _ := rig.normal(tensor.BF16, 1, out, 1, in)
	dy, _ := rig.normal(tensor.BF16, 1, tokens, 1, out)
	xRow, xColumn := rig.both(x)
	wRow := rig.scaled(out, in)
	rig.Quantize(wRow, kernels.Scaled{}, w, View{})
	wTurned := rig.turned(wRow)
	dyRow, dyColumn := rig.scaled(tokens, out), rig.scaled(out, tokens)
	rig.Quantize(dyRow, dyColumn, dy, wRow.Factors)
	for _, p := range []struct {
		name   string
		like   View
		dtype  tensor.DType
		scaled func(y View)
		plain  func(y View)
	}{
		{"y", dy, tensor.BF16, func(y View) { rig.ScaledLinear(y, xRow, wRow, View{}) },
			func(y View) { rig.Linear(y, x, w, View{}) }},
		{"dx", x, tensor.BF16, func(y View) { rig.ScaledLinear(y, dyRow, wTurned, View{}) },
			func(y View) { rig.LinearDX(y, dy, w, false) }},
		{"dw", w, tensor.F32, func(y View) { rig.ScaledLinear(y, dyColumn, xColumn, View{}) },
			func(y View) { rig.LinearDW(y, dy, x, false) }},
	} {
		got, want := rig.like(p.dtype, p.like), rig.like(p.dtype, p.like)
		p.scaled(got)
		p.plain(want)
		d, err := near.Of(rig.values(got), rig.values(want), near.Finite)
		check(t, err)
		if t.Logf("%s differs by %.2f %%", p.name, 100*d.Norm); d.Norm > 0.05 {
			t.Errorf("%s differs by %.2f %%", p.name, 100*d.Norm)
		}
	}
}

// BenchmarkScaled measures Quantize, and the three products of layers of models of 3 and 8 billion parameters with 16K
// tokens, each beside that in bfloat16.
func BenchmarkScaled(b *testing.B) {
	const tokens = 16384
	rig := newCUDARig(b)
	random := func(dtype tensor.DType, rows, columns int) View {
		v := place(b, rig.loader.Device(), dtype, [4]int{1, rows, 1, columns})
		rig.Draw(v, 0, kernels.Normals{Seed: uint64(columns), Std: 1})
		return v
	}
	measure := func(name, unit string, work float64, queue func()) {
		b.Run(name, func(b *testing.B) {
			queue()
			check(b, rig.stream.Sync(context.Background()))
			b.ResetTimer()
			for range b.N {
				queue()
			}
			check(b, rig.stream.Sync(context.Background()))
			b.ReportMetric(work*float64(b.N)/b.Elapsed().Seconds()/1e12, unit)
		})
	}
	for _, n := range []int{3072, 4096, 8192, 14336} {
		x, name, size := random(tensor.BF16, tokens, n), fmt.Sprintf("quantize/%d", n), float64(tokens*n)
		byRow, byColumn := rig.both(x)
		measure(name+"/row", "TB/s", 3*size, func() { rig.Quantize(byRow, kernels.Scaled{}, x, View{}) })
		measure(name+"/row by", "TB/s", 3*size, func() { rig.Quantize(byRow, kernels.Scaled{}, x, byColumn.Factors) })
		measure(name+"/column", "TB/s", 5*size, func() { rig.Quantize(kernels.Scaled{}, byColumn, x, View{}) })
		measure(name+"/both", "TB/s", 6*size, func() { rig.Quantize(byRow, byColumn, x, View{}) })
		measure(name+"/both by", "TB/s", 6*size, func() { rig.Quantize(byRow, byColumn, x, byColumn.Factors) })
		measure(name+"/transpose", "TB/s", 2*size, func() { rig.Transpose(byColumn.View, byRow.View) })
	}
	for _, s := range [][2]int{{3072, 8192}, {8192, 3072}, {3072, 1024}, {4096, 14336}, {14336, 4096}, {4096, 1024}} {
		in, out := s[0], s[1]
		x, w, y := random(tensor.BF16, tokens, in), random(tensor.BF16, out, in), random(tensor.BF16, tokens, out)
		dx, dw := random(tensor.BF16, tokens, in), random(tensor.F32, out, in)
		xRow, xColumn := rig.both(x)
		wRow, wColumn := rig.both(w)
		dyRow, dyColumn := rig.both(y)
		name, flops := fmt.Sprintf("product/%d to %d/", in, out), 2*tokens*float64(in*out)
		measure(name+"y/bf16", "TFLOP/s", flops, func() { rig.Linear(y, x, w, View{}) })
		measure(name+"y/e4m3", "TFLOP/s", flops, func() { rig.ScaledLinear(y, xRow, wRow, View{}) })
		measure(name+"dx/bf16", "TFLOP/s", flops, func() { rig.LinearDX(dx, y, w, false) })
		measure(name+"dx/e4m3", "TFLOP/s", flops, func() { rig.ScaledLinear(dx, dyRow, wColumn, View{}) })
		measure(name+"dw/bf16", "TFLOP/s", flops, func() { rig.LinearDW(dw, y, x, true) })
		measure(name+"dw/e4m3", "TFLOP/s", flops, func() { rig.ScaledLinear(dw, dyColumn, xColumn, dw) })
	}
}
