package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

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

// BenchmarkLinear measures the three products of a linear layer: the example's, and square ones, as in scripts/peer.
func BenchmarkLinear(b *testing.B) { benchmarkLinear(b, tensor.F32) }

// BenchmarkHalfLinear does the same with 16-bit activations.
func BenchmarkHalfLinear(b *testing.B) { benchmarkLinear(b, tensor.BF16) }

func benchmarkLinear(b *testing.B, dtype tensor.DType) {
	rng := rand.New(rand.NewPCG(1, 1))
	for _, s := range [][3]int{{256, 128, 384}, {1024, 256, 688}, {1024, 688, 256}, {512, 512, 512}, {1024, 1024, 1024},
		{2048, 2048, 2048}} {
		m, k, n := s[0], s[1], s[2]
		c := newTestCPU(b)
		draw := func(rows, cols int) tensor.View {
			v := tensor.New(dtype, 1, rows, 1, cols)
			c.Copy(v, normal(rng, 1, rows, 1, cols))
			return v
		}
		x, w, y, dw := draw(m, k), draw(n, k), draw(m, n), tensor.New(tensor.F32, 1, n, 1, k)
		name := fmt.Sprintf("%dx%dx%d/", m, k, n)
		run := func(what string, f func()) {
			b.Run(name+what, func(b *testing.B) { rate(b, "GFLOP/s", 2*m*k*n, f) })
		}
		run("forward", func() { c.Linear(y, x, w, tensor.View{}); settle(b, c) })
		run("dx", func() { c.LinearDX(x, y, w, false); settle(b, c) })
		run("dw", func() { c.LinearDW(dw, y, x, true); settle(b, c) })
	}
}

// BenchmarkOps measures the memory-bound operations, in bytes per second.
func BenchmarkOps(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 1))
	const rows, n, vocab, large = 1024, 512, 2048, 8192
	view := func(n int) tensor.View { return normal(rng, 1, rows, 1, n) }
	x, y, z, gate, up := view(n), view(n), view(n), view(n), view(n)
	w, dw, inv := normal(rng, n), normal(rng, n), normal(rng, 1, rows, 1, 1)
	logits, wide, half := view(vocab), view(large), tensor.New(tensor.BF16, 1<<20)
	loss, sum := tensor.New(tensor.F64, 1), tensor.New(tensor.F64, 1)
	table := normal(rng, 1, vocab, 1, n)
	ids := tensor.New(tensor.I32, 1, rows, 1, 1)
	for i := range rows {
		tensor.Data[int32](ids)[i] = int32(i * 37 % vocab)
	}
	heads := [4]int{1, rows, n / 64, 64}
	cos, sin := normal(rng, 1, rows, 1, 32), normal(rng, 1, rows, 1, 32)
	for i, x := range tensor.Data[float32](cos) { // real angles, so that repeated rotations keep the length
		s, c := math.Sincos(float64(x))
		tensor.Data[float32](sin)[i], tensor.Data[float32](cos)[i] = float32(s), float32(c)
	}
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
		{
			"NormRope",
			2 * bytes,
			func() { c.NormRope(y.Reshape(heads), tensor.View{}, y.Reshape(heads), tensor.View{}, cos, sin, 0) },
		},
		{"SwiGLU", 3 * bytes, func() { c.GLU(y, gate, up, kernels.SiLU) }},
		{"SwiGLUBackward", 5 * bytes, func() { c.GLUBackward(z, x, y, gate, up, kernels.SiLU) }},
		{"Embed", 2 * bytes, func() { c.Embed(y, table, ids) }},
		{"EmbedBackward", 3 * bytes, func() { c.EmbedBackward(table, y, ids) }},
		{"CrossEntropy", 4 * rows * vocab, func() { c.CrossEntropy(loss, logits, ids, 1, 0, false) }},
		{"CrossEntropyGrad", 8 * rows * vocab, func() { c.CrossEntropy(loss, logits, ids, 1, 0, true) }},
		{"CrossEntropyLarge", 4 * rows * large, func() { c.CrossEntropy(loss, wide, ids, 1, 0, false) }},
		{"CrossEntropyLargeGrad", 8 * rows * large, func() { c.CrossEntropy(loss, wide, ids, 1, 0, true) }},
		{"Add", 12 << 20, func() { c.Add(p, g) }},
		{"ToBF16", 6 << 20, func() { c.Copy(half, p) }},
		{"FromBF16", 6 << 20, func() { c.Copy(m, half) }},
		{"SumSquares", 4 << 20, func() { c.SumSquares(sum, g) }},
		{"AdamW", 28 << 20, func() {
			c.AdamW(
				p,
				tensor.View{},
				g,
				m,
				v,
				sum,
				kernels.AdamStep{LR: 1e-3, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, MaxNorm: 1},
			)
		}},
	}
	for _, test := range tests {
		b.Run(test.name, func(b *testing.B) { rate(b, "GB/s", test.bytes, func() { test.run(); settle(b, c) }) })
	}
}

// BenchmarkExperts measures grouped products of a small mixture of experts: of evenly spread tokens, and with all tokens
// at the same experts.
func BenchmarkExperts(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 1))
	const tokens, experts, k, in, out = 512, 64, 8, 512, 256
	for name, choose := range map[string]func() []int{
		"spread": func() []int { return rng.Perm(experts) },
		"same":   func() []int { return []int{1, 8, 3, 4, 60, 6, 7, 2} },
	} {
		for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16} {
			c := newTestCPU(b)
			p := dealt(c, tokens, experts, k, choose)
			view := func(rows, cols int) tensor.View { return tensor.New(dtype, 1, rows, 1, cols) }
			x, y, dx := kernels.Operand{View: view(tokens, in), ByToken: true}, view(tokens*k, out), view(tokens*k, in)
			w, dw := view(experts*out, in), tensor.New(tensor.F32, 1, experts*out, 1, in)
			run := func(what string, f func()) {
				b.Run(fmt.Sprintf("%s/%v/%s", name, dtype, what), func(b *testing.B) {
					rate(b, "GFLOP/s", 2*tokens*k*in*out, func() { f(); settle(b, c) })
				})
			}
			run("forward", func() { c.GroupLinear(y, x, w, p, false) })
			run("dx", func() { c.GroupLinearDX(dx, kernels.Operand{View: y}, w, p, false) })
			run("dw", func() { c.GroupLinearDW(dw, kernels.Operand{View: y}, x, p, false) })
		}
	}
}
