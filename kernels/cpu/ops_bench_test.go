package cpu

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/gonum"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// rate reports work per second, in units of 1e9.
func rate(b *testing.B, unit string, work int, f func()) {
	b.Helper()
	for b.Loop() {
		f()
	}
	b.ReportMetric(float64(work)*float64(b.N)/b.Elapsed().Seconds()/1e9, unit)
}

// BenchmarkLinear is the three products of a linear layer, and gonum's own three forms of
// the whole product for comparison.
func BenchmarkLinear(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 1))
	for _, s := range [][3]int{{256, 128, 384}, {1024, 256, 688}, {1024, 688, 256}} {
		m, k, n := s[0], s[1], s[2]
		x, w, y := normal(rng, 1, m, 1, k), normal(rng, 1, n, 1, k), normal(rng, 1, m, 1, n)
		xs, ws, ys := tensor.Data[float32](x), tensor.Data[float32](w), tensor.Data[float32](y)
		name := fmt.Sprintf("%dx%dx%d/", m, k, n)
		c := newTestCPU(b)
		run := func(what string, f func()) {
			b.Run(name+what, func(b *testing.B) { rate(b, "GFLOP/s", 2*m*k*n, f) })
		}
		run("forward", func() { c.Linear(y, x, w, View{}); settle(b, c) })
		run("dx", func() { c.LinearDX(x, y, w, false); settle(b, c) })
		run("dw", func() { c.LinearDW(w, y, x); settle(b, c) })
		g := gonum.Implementation{}
		run("gonum-NN", func() { g.Sgemm(blas.NoTrans, blas.NoTrans, m, n, k, 1, xs, k, ws, n, 0, ys, n) })
		run("gonum-NT", func() { g.Sgemm(blas.NoTrans, blas.Trans, m, n, k, 1, xs, k, ws, k, 0, ys, n) })
		run("gonum-TN", func() { g.Sgemm(blas.Trans, blas.NoTrans, n, k, m, 1, ys, n, xs, k, 0, ws, k) })
	}
}

// BenchmarkOps is the operations that memory bounds, by the bytes that they must move.
func BenchmarkOps(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 1))
	const rows, n, vocab = 1024, 512, 2048
	view := func(n int) View { return normal(rng, 1, rows, 1, n) }
	x, y, z, gate, up := view(n), view(n), view(n), view(n), view(n)
	w, dw, inv := normal(rng, n), normal(rng, n), normal(rng, 1, rows, 1, 1)
	logits, loss, sum := view(vocab), tensor.New(tensor.F64, 1), tensor.New(tensor.F64, 1)
	table := normal(rng, 1, vocab, 1, n)
	ids := tensor.New(tensor.I32, 1, rows, 1, 1)
	for i := range rows {
		tensor.Data[int32](ids)[i] = int32(i * 37 % vocab)
	}
	heads := [4]int{1, rows, n / 64, 64}
	cos, sin := normal(rng, 1, rows, 1, 32), normal(rng, 1, rows, 1, 32)
	p, g, m, v := normal(rng, 1<<20), normal(rng, 1<<20), tensor.New(tensor.F32, 1<<20), tensor.New(tensor.F32, 1<<20)
	const bytes = 4 * rows * n
	c := newTestCPU(b)
	tests := []struct {
		name  string
		bytes int
		run   func()
	}{
		{"RMSNorm", 2 * bytes, func() { c.RMSNorm(y, inv, x, w, 1e-5) }},
		{"AddRMSNorm", 4 * bytes, func() { c.AddRMSNorm(y, inv, z, x, gate, w, 1e-5) }},
		{"RMSNormBackward", 3 * bytes, func() { c.RMSNormBackward(z, dw, y, x, inv, w, false) }},
		{"NormRope", 2 * bytes, func() { c.NormRope(y.Reshape(heads), View{}, y.Reshape(heads), View{}, cos, sin, 0) }},
		{"SwiGLU", 3 * bytes, func() { c.SwiGLU(y, gate, up) }},
		{"SwiGLUBackward", 5 * bytes, func() { c.SwiGLUBackward(z, x, y, gate, up) }},
		{"Embed", 2 * bytes, func() { c.Embed(y, table, ids) }},
		{"EmbedBackward", 3 * bytes, func() { c.EmbedBackward(table, y, ids) }},
		{"CrossEntropy", 4 * rows * vocab, func() { c.CrossEntropy(loss, logits, ids, 1, false) }},
		{"CrossEntropyGrad", 8 * rows * vocab, func() { c.CrossEntropy(loss, logits, ids, 1, true) }},
		{"SumSquares", 4 << 20, func() { c.SumSquares(sum, g) }},
		{"AdamW", 28 << 20, func() {
			c.AdamW(p, View{}, g, m, v, sum, kernels.AdamStep{LR: 1e-3, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, MaxNorm: 1})
		}},
	}
	for _, test := range tests {
		b.Run(test.name, func(b *testing.B) { rate(b, "GB/s", test.bytes, func() { test.run(); settle(b, c) }) })
	}
}
