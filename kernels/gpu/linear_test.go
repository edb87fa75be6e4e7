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
