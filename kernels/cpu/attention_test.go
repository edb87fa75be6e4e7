package cpu

import (
	"context"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/tensor"
)

func newCPU(t testing.TB) *Kernels {
	stream := tensor.NewHostStream("compute")
	t.Cleanup(func() {
		if err := stream.Close(); err != nil {
			t.Error(err)
		}
	})
	return New(stream)
}

func newRig(t testing.TB) attentiontest.Rig {
	c := newCPU(t)
	return attentiontest.Rig{Kernel: c, Sync: c.Stream().Sync}
}

func TestAttention(t *testing.T) {
	attentiontest.TestKernel(t, newRig, attentiontest.Options{DTypes: []tensor.DType{tensor.F32}})
	others := []tensor.DType{tensor.BF16, tensor.F64, tensor.F16}
	attentiontest.TestKernel(t, newRig, attentiontest.Options{DTypes: others, Leaves: oneOf(6)})
}

// oneOf keeps one of n cases with -short. All types and levels run the same code for them.
func oneOf(n int) func(attentiontest.Case) bool {
	if !testing.Short() {
		return nil
	}
	i := -1
	return func(attentiontest.Case) bool { i++; return i%n != 0 }
}

// TestAttentionAtLevels runs the suite also with the other instructions. float64 has no levels, and all levels convert
// 16 bits the same way.
func TestAttentionAtLevels(t *testing.T) {
	atLevels(t, func(t *testing.T) {
		if used, best := Instructions(); used != best {
			attentiontest.TestKernel(
				t,
				newRig,
				attentiontest.Options{DTypes: []tensor.DType{tensor.F32}, Leaves: oneOf(6)},
			)
		}
	})
}

func TestAttentionFixtures(t *testing.T) {
	atLevels(t, func(t *testing.T) { attentiontest.TestFixtures(t, newRig) })
}

// TestAttentionBits checks that results do not depend on the number of goroutines, nor on old values in the scratch
// memory.
func TestAttentionBits(t *testing.T) {
	run := func(procs int) [][]float32 {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
		c, x := newCPU(t), newProblem(300, 24)
		for range 2 {
			x.forward(t, c)
			x.backward(t, c)
			check(t, c.Stream().Sync(context.Background()))
		}
		var all [][]float32
		for _, v := range []tensor.View{x.acc.O, x.acc.LSE, x.grads.DQ, x.grads.DK, x.grads.DV} {
			all = append(all, tensor.Data[float32](v))
		}
		return all
	}
	want := run(1)
	for _, procs := range []int{2, 3, 7} {
		for i, got := range run(procs) {
			if !slices.Equal(got, want[i]) {
				t.Errorf("result %d with %d goroutines differs from that with one", i, procs)
			}
		}
	}
}

// TestAttentionNaN checks that NaN in an input reaches the results, unlike an empty row, and that scores of hidden
// pairs have no effect.
func TestAttentionNaN(t *testing.T) {
	c, x := newCPU(t), newProblem(200, 16)
	nan := float32(math.NaN())
	q, k := tensor.Data[float32](x.q), tensor.Data[float32](x.k)
	q[150*8*16] = nan    // query 150, head 0
	k[199*2*16+16] = nan // key 199, KV head 1: only query 199 sees it
	x.forward(t, c)
	check(t, c.Stream().Sync(context.Background()))
	lse, o := tensor.Data[float32](x.acc.LSE), tensor.Data[float32](x.acc.O)
	isNaN := func(x float32) bool { return x != x }
	for i := range 200 {
		for h := range 8 {
			want := i == 150 && h == 0 || i == 199 && h >= 4
			if got := isNaN(lse[i*8+h]); got != want {
				t.Errorf("LSE of query %d, head %d is NaN: %t, want %t", i, h, got, want)
			}
			if got := isNaN(o[(i*8+h)*16+1]); got != want {
				t.Errorf("O of query %d, head %d is NaN: %t, want %t", i, h, got, want)
			}
		}
	}
}

// TestAttentionAllocates checks that a call's allocations do not grow with the problem after the first call.
func TestAttentionAllocates(t *testing.T) {
	count := func(seq int) float64 {
		c, x := newCPU(t), newProblem(seq, 16)
		return testing.AllocsPerRun(5, func() {
			x.forward(t, c)
			x.backward(t, c)
			check(t, c.Stream().Sync(context.Background()))
		})
	}
	if small, large := count(64), count(512); large > small+60 {
		t.Errorf("%.0f allocations for 64 tokens, %.0f for 512", small, large)
	}
}

func TestAttentionFaults(t *testing.T) {
	c, x := newCPU(t), newProblem(8, 4)
	half, double := tensor.New(tensor.BF16, 1, 8, 8, 1), tensor.New(tensor.F64, 1, 8, 8, 4)
	if _, err := c.Backward(x.grads.DQ, double, x.q, attention.Saved{O: x.acc.O, LSE: x.acc.LSE, Delta: x.delta},
		x.p); err == nil {
		t.Error("Backward took float64 beside float32")
	}
	if _, err := c.Forward(x.acc.O, attention.Partial{O: x.acc.O, LSE: half}, x.q, x.p); err == nil {
		t.Error("Forward took an LSE of bfloat16")
	}
}

func TestAddStrided(t *testing.T) {
	c := newCPU(t)
	for _, dtype := range []tensor.DType{tensor.F32, tensor.F64} {
		whole, part := tensor.New(dtype, 2, 5, 3, 4), tensor.New(dtype, 2, 2, 3, 4)
		fillAny(whole, 1)
		fillAny(part, 2)
		c.Add(whole.Slice(tensor.Seq, 1, 3), part)
		c.Zero(whole.Slice(tensor.Seq, 4, 5))
		check(t, c.Stream().Sync(context.Background()))
		for s, want := range []float64{1, 3, 3, 1, 0} {
			row := tensor.New(dtype, 2, 1, 3, 4)
			fillAny(row, want)
			attentiontest.Compare(t, "row", whole.Slice(tensor.Seq, s, s+1), row, 0)
		}
	}
}

// FuzzAttention runs random cases: a hop of a random layout under a random mask.
func FuzzAttention(f *testing.F) {
	seeds := uint64(30)
	if testing.Short() {
		seeds = 12
	}
	for seed := range seeds {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		c := newCPU(t)
		rig := attentiontest.Rig{Kernel: c, Sync: c.Stream().Sync}
		random := attentiontest.RandomCase(seed)
		// Go ends an input after 10 s. The largest cases take 2 s alone, and in CI other steps have the cores.
		if random.Batch*random.Heads*random.SeqQ*random.SeqK > 400_000 {
			random.Batch, random.Heads, random.KVHeads = 1, 1, 1
		}
		attentiontest.Check(t, rig, random, tensor.F32)
	})
}

// TestForwardPieces checks that a head's bits do not depend on the number of queries in a piece of work.
func TestForwardPieces(t *testing.T) {
	const heads, seq, dim = 32, 600, 8
	if queriesOf(heads, seq) == queriesOf(1, seq) {
		t.Fatal("pieces of one size")
	}
	rng := rand.New(rand.NewPCG(5, 6))
	draw := func() tensor.View {
		v := tensor.New(tensor.F32, 1, seq, heads, dim)
		for i := range tensor.Data[float32](v) {
			tensor.Data[float32](v)[i] = float32(rng.NormFloat64())
		}
		return v
	}
	x := newProblem(seq, dim)
	x.q, x.k, x.v = draw(), draw(), draw()
	c := newCPU(t)
	pass := func(q, k, v tensor.View) attention.Partial {
		h := q.Len(tensor.Heads)
		x := *x
		x.q, x.k, x.v = q, k, v
		x.acc = attention.Partial{O: tensor.New(tensor.F32, 1, seq, h, dim), LSE: tensor.New(tensor.F32, 1, seq, h, 1)}
		x.forward(t, c)
		check(t, c.Stream().Sync(context.Background()))
		return x.acc
	}
	all := pass(x.q, x.k, x.v)
	for h := range heads {
		head := func(v tensor.View) tensor.View { return v.Slice(tensor.Heads, h, h+1) }
		one := pass(head(x.q), head(x.k), head(x.v))
		attentiontest.Compare(t, "out", head(all.O), one.O, 0)
		attentiontest.Compare(t, "lse", head(all.LSE), one.LSE, 0)
	}
}

// TestAttentionNonFinite runs the suite of NaN and infinities with all instructions. Only float32 has several.
func TestAttentionNonFinite(t *testing.T) {
	sample := 1
	if testing.Short() {
		sample = 7
	}
	atLevels(t, func(t *testing.T) {
		opts := attentiontest.Options{DTypes: []tensor.DType{tensor.F32}, Sample: sample}
		if used, best := Instructions(); used != best {
			opts.Leaves = oneOf(3)
		}
		attentiontest.TestNonFinite(t, newRig, opts)
	})
	attentiontest.TestNonFinite(t, newRig, attentiontest.Options{
		DTypes: []tensor.DType{tensor.BF16, tensor.F64, tensor.F16}, Leaves: oneOf(3), Sample: sample})
}
