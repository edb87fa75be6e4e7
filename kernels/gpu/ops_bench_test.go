//go:build cuda

package gpu

import (
	"testing"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// BenchmarkCUDAOps measures the memory-bound operations in bytes per second, at the shapes of llama-3.2-3B with 32K
// tokens in bfloat16. "copy" is the rate of the memory. `cprun bench ops` measures more carefully.
func BenchmarkCUDAOps(b *testing.B) {
	r := newCUDARig(b)
	const rows, n, inner, vocab, chunk, params = 32 << 10, 3072, 8192, 128256, 2048, 128 << 20
	fill, _ := r.normal(tensor.F32, 1<<20)
	view := func(dtype tensor.DType, shape ...int) View {
		v := r.like(dtype, tensor.Dense(extent{}, tensor.U8, 0, [4]int{1, 1, 1, product(shape)}))
		for lo := 0; lo < v.Size(); lo += fill.Size() {
			hi := min(lo+fill.Size(), v.Size())
			r.Copy(v.Slice(tensor.Dim, lo, hi), fill.Slice(tensor.Dim, 0, hi-lo))
		}
		return v.Reshape([4]int(append([]int{1, 1, 1, 1}[len(shape):], shape...)))
	}
	act := func(shape ...int) View { return view(tensor.BF16, shape...) }
	f32 := func(shape ...int) View { return view(tensor.F32, shape...) }

	x, y, z, d := act(rows, 1, n), act(rows, 1, n), act(rows, 1, n), act(rows, 1, n)
	inv, w, dw := f32(rows, 1, 1), f32(n), f32(n)
	gate, up, out := act(rows, 1, inner), act(rows, 1, inner), act(rows, 1, inner)
	heads := func(v View) View { return v.Reshape([4]int{1, rows, 24, 128}) }
	keys := func(v View) View { return v.Slice(tensor.Seq, 0, rows/3).Reshape([4]int{1, rows / 3, 24, 128}) }
	cos, sin, hinv, hw, hdw := f32(rows, 1, 64), f32(rows, 1, 64), f32(rows, 24, 1), f32(128), f32(128)
	wide := f32(rows, 24, 128)
	table, dtable, logits := act(1, vocab, 1, n), f32(1, vocab, 1, n), act(chunk, 1, vocab)
	ids := tensor.New(tensor.I32, 1, rows, 1, 1)
	for i := range tensor.Data[int32](ids) { // as in text, a few ids are frequent
		u := r.rng.Float64()
		tensor.Data[int32](ids)[i] = int32(u * u * u * u * vocab)
	}
	at := r.upload(ids)
	loss := r.upload(tensor.New(tensor.F64, 1))
	p, g, m, v, c := f32(params), f32(params), f32(params), f32(params), act(params)
	r.Zero(m, v)
	step := kernels.AdamStep{LR: 1e-5, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, MaxNorm: 1}
	none := View{}

	row, mlp, turned := 2*rows*n, 2*rows*inner, 2*rows*n*2+rows*128*4
	tests := []struct {
		name  string
		bytes int
		run   func()
	}{
		{"copy", 8 * params, func() { r.Copy(p, g) }},
		{"RMSNorm", 2 * row, func() { r.RMSNorm(y, inv, x, w, 1e-5) }},
		{"AddRMSNorm", 4 * row, func() { r.AddRMSNorm(y, inv, z, x, d, w, 1e-5) }},
		{"RMSNormBackward", 3 * row, func() { r.RMSNormBackward(z, dw, y, x, inv, w, false) }},
		{"RMSNormBackwardAdd", 4 * row, func() { r.RMSNormBackward(z, dw, y, x, inv, w, true) }},
		{"Rope", turned, func() { r.NormRope(heads(y), none, heads(y), none, cos, sin, 0) }},
		{"RopeThird", turned / 3, func() { r.NormRope(keys(y), none, keys(y), none, keys3(cos), keys3(sin), 0) }},
		{"NormRope", turned + 4*rows*24, func() { r.NormRope(heads(y), hinv, heads(x), hw, cos, sin, 1e-5) }},
		{"RopeBackward", turned + row, func() { r.NormRopeBackward(heads(y), none, wide, none, none, none, cos, sin) }},
		{
			"NormRopeBackward",
			turned + 2*row + 4*rows*24,
			func() { r.NormRopeBackward(heads(y), hdw, wide, heads(x), hinv, hw, cos, sin) },
		},
		{"SwiGLU", 3 * mlp, func() { r.GLU(out, gate, up, kernels.SiLU) }},
		{"SwiGLUBackward", 5 * mlp, func() { r.GLUBackward(gate, up, out, gate, up, kernels.SiLU) }},
		{"Embed", 2 * row, func() { r.Embed(y, table, at) }},
		{"EmbedBackward", row, func() { r.EmbedBackward(dtable, y, at) }},
		{
			"CrossEntropy",
			2 * chunk * vocab,
			func() { r.CrossEntropy(loss, logits, at.Slice(tensor.Seq, 0, chunk), 1, 0, false) },
		},
		{
			"CrossEntropyGrad",
			4 * chunk * vocab,
			func() { r.CrossEntropy(loss, logits, at.Slice(tensor.Seq, 0, chunk), 1, 0, true) },
		},
		{"SumSquares", 4 * params, func() { r.SumSquares(loss, g) }},
		{"AdamW", 30 * params, func() { r.AdamW(p, c, g, m, v, loss, step) }},
		{"Cast", 6 * params, func() { r.Copy(c, g) }},
		{"Add", 12 * params, func() { r.Add(p, g) }},
	}
	for _, test := range tests {
		b.Run(test.name, func(b *testing.B) {
			test.run()
			clock, err := r.stream.NewClock(2)
			check(b, err)
			clock.Mark(0)
			for range b.N {
				test.run()
			}
			clock.Mark(1)
			check(b, r.stream.Sync(b.Context()))
			took, err := clock.Between(0, 1)
			check(b, err)
			check(b, clock.Close())
			b.ReportMetric(float64(test.bytes)*float64(b.N)/took/1e9, "GB/s")
			b.ReportMetric(took*1e6/float64(b.N), "µs")
		})
	}
}

// keys3 returns the first third of the tokens.
func keys3(v View) View { return v.Slice(tensor.Seq, 0, v.Len(tensor.Seq)/3) }

func product(xs []int) int {
	n := 1
	for _, x := range xs {
		n *= x
	}
	return n
}
