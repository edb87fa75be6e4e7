//go:build cuda

package gpu

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/base/cuda/blas"
	"github.com/cprun/cprun/tensor"
)

// A linearWay is one implementation of matrix products.
type linearWay struct {
	name string
	run  func(r *cudaRig, p blas.Problem)
}

var linearWays = []linearWay{
	{"default", func(r *cudaRig, p blas.Problem) { r.multiply("product", p) }},
	{"simple", func(r *cudaRig, p blas.Problem) { check(r.t, r.simple(p)) }},
}

// Sizes for which vector loads and tiles do not fit, and 0.
var linearSizes = [][3]int{ // rows, in, out
	{1, 1, 1}, {3, 5, 7}, {64, 64, 64}, {65, 33, 127}, {128, 256, 136}, {257, 1000, 24}, {1, 3000, 2},
	{8, 0, 8}, {0, 8, 8}, {8, 8, 0}, {513, 96, 1000},
}

func TestCUDALinear(t *testing.T) {
	rig := newCUDARig(t)
	for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16, tensor.F16} {
		for _, way := range linearWays {
			for _, n := range linearSizes {
				t.Run(fmt.Sprintf("%v/%s/%v", dtype, way.name, n), func(t *testing.T) {
					testCUDALinear(rig.within(t), way.run, dtype, n[0], n[1], n[2], 0)
				})
			}
			t.Run(fmt.Sprintf("%v/%s/odd address", dtype, way.name), func(t *testing.T) {
				testCUDALinear(rig.within(t), way.run, dtype, 32, 64, 48, 1)
			})
		}
	}
}

// shifted copies v to an address n elements after the start of an allocation.
func (r *cudaRig) shifted(v View, n int) View {
	size := v.DType().Size()
	mem, err := r.loader.Device().Alloc(int64((v.Size() + n) * size))
	check(r.t, err)
	w := tensor.Dense(mem, v.DType(), int64(n), v.Shape())
	if v.Size() > 0 {
		r.Copy(w, v)
	}
	return w
}

func testCUDALinear(r *cudaRig, run func(*cudaRig, blas.Problem), dtype tensor.DType, rows, in, out, shift int) {
	random := func(t tensor.DType, rows, cols int) (device, host View) {
		device, host = r.normal(t, 1, rows, 1, cols)
		return r.shifted(device, shift), host
	}
	x, xh := random(dtype, rows, in)
	w, wh := random(dtype, out, in)
	y, yh := random(dtype, rows, out)
	add, addh := random(dtype, rows, out)
	weight, weighth := w.Reshape([4]int{1, out, 1, in}), wh.Reshape([4]int{1, out, 1, in})

	run(r, linearProblem(y, x, weight, View{}))
	r.cpu.Linear(yh, xh, weighth, View{})
	r.near("linear", y, yh)
	run(r, linearProblem(y, x, weight, add))
	r.cpu.Linear(yh, xh, weighth, addh)
	r.near("linear with add", y, yh)
	run(r, linearProblem(add, x, weight, add))
	r.nearSum("linear added in place", add, yh, tensor.Data[float32](addh))

	dy, dyh := random(dtype, rows, out)
	dx, dxh := random(dtype, rows, in)
	before := slices.Clone(tensor.Data[float32](dxh))
	run(r, linearDXProblem(dx, dy, weight, true))
	r.cpu.LinearDX(dxh, dyh, weighth, true)
	r.nearSum("linear dx, added", dx, dxh, before)
	run(r, linearDXProblem(dx, dy, weight, false))
	r.cpu.LinearDX(dxh, dyh, weighth, false)
	r.near("linear dx", dx, dxh)

	dw, dwh := random(tensor.F32, out, in)
	run(r, linearDWProblem(dw, dy, x, true))
	r.cpu.LinearDW(dwh, dyh, xh, true)
	r.near("linear dw, added", dw, dwh)
	r.stream.Memset(dw.Addr(), 0xff, 4*int64(out)*int64(in)) // NaN
	run(r, linearDWProblem(dw, dy, x, false))
	r.cpu.LinearDW(dwh, dyh, xh, false)
	r.near("linear dw", dw, dwh)
}

// A repeated problem reuses the choice.
func TestCUDALinearPlans(t *testing.T) {
	r := newCUDARig(t)
	x, _ := r.normal(tensor.BF16, 1, 16, 1, 32)
	w, _ := r.normal(tensor.BF16, 1, 64, 1, 32)
	y := r.like(tensor.BF16, tensor.New(tensor.BF16, 1, 16, 1, 64))
	for range 3 {
		r.Linear(y, x, w, View{})
	}
	check(t, r.stream.Sync(context.Background()))
	if n := r.blas.Plans(); n != 1 {
		t.Errorf("one product three times made %d plans", n)
	}
}

// BenchmarkCUDALinear measures the products of a llama-3.2-3B layer, and of a chunk of its logits, over 8192 tokens.
func BenchmarkCUDALinear(b *testing.B) {
	const tokens = 8192
	rig := newCUDARig(b)
	for _, s := range []struct {
		name    string
		in, out int
	}{{"qkv", 3072, 5120}, {"o", 3072, 3072}, {"up", 3072, 8192}, {"down", 8192, 3072}, {"square", 8192, 8192},
		{"head", 3072, 128256}} {
		rows := tokens
		if s.name == "head" {
			rows = 2048
		}
		x, w, y, dw := rig.operands(b, rows, s.in, s.out)
		for _, p := range []struct {
			name string
			run  func()
		}{
			{"forward", func() { rig.Linear(y, x, w, View{}) }},
			{"dx", func() { rig.LinearDX(x, y, w, false) }},
			{"dw", func() { rig.LinearDW(dw, y, x, false) }},
			{"dw added", func() { rig.LinearDW(dw, y, x, true) }},
		} {
			b.Run(s.name+"/"+p.name, func(b *testing.B) {
				rig.within(b).rate(b, 2*float64(rows)*float64(s.in)*float64(s.out), p.run)
			})
		}
	}
}

// operands returns x [rows, in], w [out, in], y [rows, out] and a float32 dw [out, in] of zeros. Power, and with it the
// clock, depends on the values: zeros are faster than real data.
func (r *cudaRig) operands(b *testing.B, rows, in, out int) (x, w, y, dw View) {
	mark := func(dtype tensor.DType, rows, cols int) View {
		mem, err := r.loader.Device().Alloc(int64(rows) * int64(cols) * int64(dtype.Size()))
		check(b, err)
		return tensor.Dense(mem, dtype, 0, [4]int{1, rows, 1, cols})
	}
	x, w, y, dw = mark(tensor.BF16, rows, in), mark(tensor.BF16, out, in), mark(tensor.BF16, rows, out),
		mark(tensor.F32, out, in)
	for _, v := range []View{x, w, y} {
		r.noise(b, v)
	}
	r.Zero(dw)
	return x, w, y, dw
}

// noise fills a 16-bit view with values of similar size.
func (r *cudaRig) noise(b *testing.B, v View) {
	const n = 1 << 20
	block := tensor.New(tensor.BF16, 1, 1, 1, n)
	for i := range tensor.Data[uint16](block) {
		tensor.Data[uint16](block)[i] = uint16(0x3c00 + r.rng.IntN(0x180) | r.rng.IntN(2)<<15)
	}
	from := r.upload(block)
	flat := v.Reshape([4]int{1, 1, 1, v.Size()})
	for lo := 0; lo < v.Size(); lo += n {
		hi := min(lo+n, v.Size())
		r.Copy(flat.Slice(tensor.Dim, lo, hi), from.Slice(tensor.Dim, 0, hi-lo))
	}
}

// rate measures f on the device and reports TFLOP/s.
func (r *cudaRig) rate(b *testing.B, flop float64, f func()) {
	f()
	f()
	check(b, r.stream.Sync(context.Background()))
	clock, err := r.stream.NewClock(2)
	check(b, err)
	clock.Mark(0)
	for range b.N {
		f()
	}
	clock.Mark(1)
	check(b, r.stream.Sync(context.Background()))
	took, err := clock.Between(0, 1)
	check(b, err)
	check(b, clock.Close())
	b.ReportMetric(flop*float64(b.N)/took/1e12, "TFLOP/s")
	b.ReportMetric(took/float64(b.N)*1e6, "us/op")
}
