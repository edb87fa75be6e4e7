//go:build cuda

package gpu

import (
	"fmt"
	"math"
	"testing"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// These tests use the sizes of real models, which opstest lacks: every kernel for rows, and grids whose blocks loop
// several times. They compare with the CPU.

var cudaTypes = []tensor.DType{tensor.BF16, tensor.F16, tensor.F32}

func TestCUDANormSizes(t *testing.T) {
	rig := newCUDARig(t)
	for _, dtype := range cudaTypes {
		sizes := []int{8, 264, 504, 1024, 2048, 3072, 4096, 5120, 8192, 10000, 16384, 20000, 3001}
		if dtype == tensor.F16 { // the same code, except for the conversions
			sizes = []int{3072}
		}
		for _, n := range sizes {
			t.Run(fmt.Sprint(dtype, n), func(t *testing.T) {
				testCUDANorm(rig.within(t), dtype, min(20_000, 3_000_000/n)/rig.fewer(), n)
			})
		}
	}
}

// fewer returns the divisor of sizes for short tests.
func (r *cudaRig) fewer() int {
	if testing.Short() {
		return 50
	}
	return 1
}

func testCUDANorm(r *cudaRig, dtype tensor.DType, rows, n int) {
	const eps = 1e-5
	rows = max(rows, 9)
	x, xs := r.normal(dtype, 1, rows, 1, n)
	b, bs := r.normal(dtype, 1, rows, 1, n)
	w, ws := r.normal(tensor.F32, 1, 1, 1, n)
	inv, invs := r.like(tensor.F32, tensor.New(tensor.F32, 1, rows, 1, 1)), tensor.New(tensor.F32, 1, rows, 1, 1)
	y, sum := r.like(dtype, x), r.like(dtype, x)
	ys, sums := tensor.New(tensor.F32, 1, rows, 1, n), tensor.New(tensor.F32, 1, rows, 1, n)

	r.RMSNorm(y, inv, x, w, eps)
	r.cpu.RMSNorm(ys, invs, xs, ws, eps)
	r.near("y", y, ys)
	r.near("inv", inv, invs)

	r.AddRMSNorm(y, inv, sum, x, b, w, eps)
	r.cpu.AddRMSNorm(ys, invs, sums, xs, bs, ws, eps)
	r.near("sum", sum, sums)
	copy(tensor.Data[float32](sums), r.values(sum)) // the norm is of the rounded sum
	r.cpu.RMSNorm(ys, invs, sums, ws, eps)
	r.near("y of the sum", y, ys)

	r.RMSNorm(y, inv, x, w, eps)
	r.cpu.RMSNorm(ys, invs, xs, ws, eps)
	for _, accumulate := range []bool{false, true} {
		dx, dxs := r.normal(dtype, 1, rows, 1, n)
		dw, dws := r.normal(tensor.F32, 1, 1, 1, n)
		r.RMSNormBackward(dx, dw, b, x, inv, w, accumulate)
		r.cpu.RMSNormBackward(dxs, dws, bs, xs, invs, ws, accumulate)
		r.near("dx", dx, dxs)
		r.near("dw", dw, dws)
	}
}

func TestCUDARopeSizes(t *testing.T) {
	rig := newCUDARig(t)
	for _, dtype := range cudaTypes {
		shapes := [][2]int{{24, 128}, {8, 128}, {5, 64}, {3, 192}, {7, 256}, {1, 16}, {4, 96}, {2, 512}, {3, 90}}
		if dtype == tensor.F16 {
			shapes = shapes[:1]
		}
		for _, s := range shapes {
			t.Run(fmt.Sprint(dtype, s), func(t *testing.T) {
				testCUDARope(rig.within(t), dtype, 1+2000/rig.fewer(), s[0], s[1])
			})
		}
	}
}

func testCUDARope(r *cudaRig, dtype tensor.DType, seq, heads, dim int) {
	const eps = 1e-6
	x, xs := r.normal(dtype, 1, seq, heads, dim)
	cos, coss := r.normal(tensor.F32, 1, seq, 1, dim/2)
	sin, sins := r.normal(tensor.F32, 1, seq, 1, dim/2)
	weight, weights := r.normal(tensor.F32, 1, 1, 1, dim)
	ys := tensor.New(tensor.F32, 1, seq, heads, dim)
	inv, invs := r.like(tensor.F32, tensor.New(tensor.F32, 1, seq, heads, 1)), tensor.New(tensor.F32, 1, seq, heads, 1)
	for _, norm := range []bool{false, true} {
		w, ws := View{}, View{}
		if norm {
			w, ws = weight, weights
		}
		y := r.like(dtype, x)
		r.NormRope(y, inv, x, w, cos, sin, eps)
		r.cpu.NormRope(ys, invs, xs, ws, coss, sins, eps)
		r.near("y", y, ys)
		if norm {
			r.near("inv", inv, invs)
		}
		for _, of := range []tensor.DType{tensor.F32, dtype} {
			dy, dys := r.normal(of, 1, seq, heads, dim)
			dw, dws := r.normal(tensor.F32, 1, 1, 1, dim)
			dx := dy
			if of != dtype {
				dx = r.like(dtype, dy)
			}
			dxs := tensor.New(tensor.F32, 1, seq, heads, dim)
			r.NormRopeBackward(dx, dw, dy, x, inv, w, cos, sin)
			r.cpu.NormRopeBackward(dxs, dws, dys, xs, invs, ws, coss, sins)
			r.near("dx", dx, dxs)
			r.near("dw", dw, dws)
		}
	}
}

// TestCUDAEmbedBackward uses ids that repeat over segments and over chunks of the sort. A third of the tokens have the
// same id.
func TestCUDAEmbedBackward(t *testing.T) {
	rig := newCUDARig(t)
	for _, s := range []struct{ tokens, vocab, hidden int }{{40000, 300000, 40}, {17000, 50, 136}, {3000, 1000, 3072},
		{500, 2, 7}} {
		for _, dtype := range cudaTypes {
			t.Run(fmt.Sprint(dtype, s), func(t *testing.T) {
				r := rig.within(t)
				tokens := max(200, s.tokens/rig.fewer())
				ids := tensor.New(tensor.I32, 1, tokens, 1, 1)
				for i := range tensor.Data[int32](ids) {
					if i%3 > 0 {
						tensor.Data[int32](ids)[i] = int32(r.rng.IntN(s.vocab))
					}
				}
				dy, dys := r.normal(dtype, 1, tokens, 1, s.hidden)
				dtable, dtables := r.normal(tensor.F32, 1, s.vocab, 1, s.hidden)
				r.EmbedBackward(dtable, dy, r.upload(ids))
				r.cpu.EmbedBackward(dtables, dys, ids)
				r.near("dtable", dtable, dtables)
			})
		}
	}
}

// TestCUDAUnknownIDs checks that ids and targets outside the vocabulary write no other memory, and are visible in the
// results.
func TestCUDAUnknownIDs(t *testing.T) {
	r := newCUDARig(t)
	ids := tensor.FromSlice([]int32{1, -1, 2, 1 << 30, 0}, 1, 5, 1, 1)
	for _, dtype := range cudaTypes {
		for _, n := range []int{5, 16} {
			table, tables := r.normal(dtype, 1, 3, 1, n)
			y := r.like(dtype, tensor.New(tensor.U8, 1, 5, 1, n))
			r.Embed(y, table, r.upload(ids))
			for i, x := range r.values(y) {
				if id := tensor.Data[int32](ids)[i/n]; id < 0 || id > 2 {
					if !math.IsNaN(float64(x)) {
						t.Errorf("%v: element %d of an unknown id is %g, want NaN", dtype, i, x)
					}
				} else if want := tensor.Data[float32](tables)[int(id)*n+i%n]; x != want {
					t.Errorf("%v: element %d is %g, want %g", dtype, i, x, want)
				}
			}
			dtable, dtables := r.normal(tensor.F32, 1, 3, 1, n)
			dy, dys := r.normal(dtype, 1, 5, 1, n)
			r.EmbedBackward(dtable, dy, r.upload(ids))
			known := tensor.FromSlice([]int32{1, 0, 2, 0, 0}, 1, 5, 1, 1)
			for i := range n {
				tensor.Data[float32](dys)[n+i], tensor.Data[float32](dys)[3*n+i] = 0, 0
			}
			r.cpu.EmbedBackward(dtables, dys, known)
			r.near("dtable", dtable, dtables)
		}
	}
	logits, _ := r.normal(tensor.F32, 1, 1, 1, 9)
	loss := r.upload(tensor.New(tensor.F64, 1))
	r.CrossEntropy(loss, logits, r.upload(tensor.FromSlice([]int32{9}, 1, 1, 1, 1)), 1, 0, true)
	if x := r.values(loss)[0]; !math.IsNaN(float64(x)) {
		t.Errorf("loss of an unknown target is %g", x)
	}
}

// TestCUDACrossEntropySizes uses vocabularies of models, unaligned rows, and a vocabulary that does not fit in shared
// memory.
func TestCUDACrossEntropySizes(t *testing.T) {
	rig := newCUDARig(t)
	for _, dtype := range cudaTypes {
		for _, vocab := range []int{7, 4099, 32000, 50257, 128256, 262144} {
			t.Run(fmt.Sprint(dtype, vocab), func(t *testing.T) {
				r := rig.within(t)
				const rows, scale = 7, 0.25
				targets := tensor.New(tensor.I32, 1, rows, 1, 1)
				for i := range tensor.Data[int32](targets) {
					tensor.Data[int32](targets)[i] = int32(r.rng.IntN(vocab))
				}
				tensor.Data[int32](targets)[3] = -100
				logits, logitss := r.normal(dtype, 1, rows, 1, vocab)
				loss, losses := r.upload(tensor.New(tensor.F64, 1)), tensor.New(tensor.F64, 1)
				r.CrossEntropy(loss, logits, r.upload(targets), scale, 0, false)
				r.CrossEntropy(loss, logits, r.upload(targets), scale, 0, true)
				r.cpu.CrossEntropy(losses, logitss, targets, scale, 0, false)
				r.cpu.CrossEntropy(losses, logitss, targets, scale, 0, true)
				if dtype == tensor.F16 { // the smallest float16
					want := tensor.Data[float32](logitss)
					check(t, near.Each(r.values(logits), want, near.Finite, func(i int) float64 {
						return math.Abs(float64(want[i]))*0x1p-10 + 0x1p-24
					}))
				} else {
					r.near("gradient", logits, logitss)
				}
				host, err := r.download(loss)
				check(t, err)
				if got, want := tensor.Data[float64](host)[0], tensor.Data[float64](losses)[0]; !(math.Abs(got-want) <= 1e-6*want) {
					t.Errorf("loss %g, want %g", got, want)
				}
			})
		}
	}
}

// TestCUDAOptim compares with the CPU: aligned and unaligned, with a remainder after the last vector, with each type of
// copy, with and without clipping.
func TestCUDAOptim(t *testing.T) {
	rig := newCUDARig(t)
	for _, n := range []int{1, 4096, 100_003, 3_000_000 / rig.fewer()} {
		for lo := range 2 {
			for _, dtype := range append([]tensor.DType{tensor.Invalid}, cudaTypes...) {
				t.Run(fmt.Sprint(n, lo, dtype), func(t *testing.T) { testCUDAOptim(rig.within(t), n, lo, dtype) })
			}
		}
	}
}

func testCUDAOptim(r *cudaRig, n, lo int, dtype tensor.DType) {
	part := func(v View) View { return v.Slice(tensor.Dim, lo, lo+n) }
	p, ps := r.normal(tensor.F32, 1, 1, 1, lo+n)
	g, gs := r.normal(tensor.F32, 1, 1, 1, lo+n)
	m, ms := r.normal(tensor.F32, 1, 1, 1, lo+n)
	v := tensor.New(tensor.F32, lo+n)
	for i, x := range tensor.Data[float32](ms) {
		tensor.Data[float32](v)[i] = x * x
	}
	vs := v
	v = r.upload(v)
	sum, sums := r.upload(tensor.New(tensor.F64, 1)), tensor.New(tensor.F64, 1)
	r.SumSquares(sum, part(g))
	r.cpu.SumSquares(sums, part(gs))
	settle(r.t, r.cpu)
	host, err := r.download(sum)
	check(r.t, err)
	if got, want := tensor.Data[float64](host)[0], tensor.Data[float64](sums)[0]; !(math.Abs(got-want) <= 1e-13*want) {
		r.t.Fatalf("sum of squares %g, want %g", got, want)
	}
	for step, clip := range []float64{1, 0, 1e9} {
		h := kernels.AdamStep{LR: 1e-2, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, MaxNorm: clip, Step: step}
		copied := View{}
		if dtype != tensor.Invalid {
			copied = part(r.like(dtype, p))
		}
		norm2, norm2s := sum, sums
		if clip == 0 {
			norm2, norm2s = View{}, View{}
		}
		r.AdamW(part(p), copied, part(g), part(m), part(v), norm2, h)
		r.cpu.AdamW(part(ps), View{}, part(gs), part(ms), part(vs), norm2s, h)
		r.near("p", p, ps)
		r.near("m", m, ms)
		r.near("v", v, vs)
		if dtype == tensor.Invalid {
			continue
		}
		want := r.values(p)[lo:]
		rounded := tensor.FromSlice(append([]float32(nil), want...), len(want))
		r.put(dtype, rounded)
		for i, x := range r.values(copied) {
			if w := tensor.Data[float32](rounded)[i]; x != w {
				r.t.Fatalf("copy: element %d is %g, want exactly %g", i, x, w)
			}
		}
	}
}

func TestCUDAStrided(t *testing.T) {
	r := newCUDARig(t)
	slice := func(v View) View { return v.Slice(tensor.Seq, 2, 5).Slice(tensor.Heads, 1, 3) }
	for _, from := range cudaTypes {
		for _, to := range cudaTypes {
			dst, dsts := r.normal(to, 3, 7, 4, 5)
			src, srcs := r.normal(from, 3, 7, 4, 5)
			r.Copy(slice(dst), slice(src))
			r.cpu.Copy(slice(dsts), slice(srcs))
			r.near(fmt.Sprintf("copy of %v to %v", from, to), dst, dsts)
			if to == from || to == tensor.F32 {
				r.Add(slice(dst), slice(src))
				r.cpu.Add(slice(dsts), slice(srcs))
				r.near("sum", dst, dsts)
			}
			r.Zero(slice(dst))
			r.cpu.Zero(slice(dsts))
			r.near("zero", dst, dsts)
		}
	}
	defer func() {
		if recover() == nil {
			t.Error("float32 was added to bfloat16")
		}
	}()
	r.Add(r.upload(tensor.New(tensor.BF16, 3)), r.upload(tensor.New(tensor.F32, 3)))
}
