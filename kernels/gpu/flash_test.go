//go:build cuda

package gpu

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// newFlash returns a Flash on the rig's device.
func (r *cudaRig) newFlash(deterministic bool) *Flash {
	r.t.Helper()
	f, err := NewFlash(r.stream, r.loader, FlashOptions{Deterministic: deterministic})
	check(r.t, err)
	return f
}

// attention adapts a kernel on the rig's device to the conformance suite.
func (r *cudaRig) attention(k attention.Kernel) attentiontest.Rig {
	return attentiontest.Rig{
		Kernel: k, Sync: r.stream.Sync, Upload: r.transfers.uploadAll, Download: r.transfers.downloadAll,
	}
}

var flashSuite = attentiontest.Options{
	DTypes:     []tensor.DType{tensor.F32, tensor.BF16, tensor.F16},
	MaxHeadDim: source.FlashMaxDim,
	NoScores:   true,
}

func TestFlash(t *testing.T) { testFlash(t, (*cudaRig).newFlash) }

// TestFlashBeforeHopper runs the suite with the kernels of GPUs before Hopper.
func TestFlashBeforeHopper(t *testing.T) { testFlash(t, (*cudaRig).newOlderFlash) }

func testFlash(t *testing.T, make func(*cudaRig, bool) *Flash) {
	r := newCUDARig(t)
	compileFlash(t, suiteDims, make(r, false), make(r, true))
	for _, deterministic := range []bool{false, true} {
		t.Run(fmt.Sprintf("deterministic %t", deterministic), func(t *testing.T) {
			attentiontest.TestKernel(t, func(t testing.TB) attentiontest.Rig {
				r := newCUDARig(t)
				return r.attention(make(r, deterministic))
			}, flashSuite)
		})
	}
}

// TestFlashSections runs the suite with launches of few keys, on Hopper.
func TestFlashSections(t *testing.T) {
	make := func(r *cudaRig, deterministic bool) *Flash {
		f := r.newFlash(deterministic)
		f.section = 24
		return f
	}
	if make(newCUDARig(t), false).hopper != nil {
		testFlash(t, make)
	}
}

// newOlderFlash returns a Flash without the kernels for Hopper.
func (r *cudaRig) newOlderFlash(deterministic bool) *Flash {
	f := r.newFlash(deterministic)
	f.hopper = nil
	return f
}

// newSmallFlash returns a Flash with the shapes for GPUs with little shared memory.
func (r *cudaRig) newSmallFlash(deterministic bool) *Flash {
	f := r.newOlderFlash(deterministic)
	f.shared = source.SmallShared
	return f
}

// flashVariants holds the flash kernels: of this GPU, of GPUs before Hopper, and with the shapes for little shared
// memory.
type flashVariants struct{ fast, ordered, older, olderOrdered, small *Flash }

// flashVariants returns kernels with programs for some head dims.
func (r *cudaRig) flashVariants(t testing.TB, dims ...[2]int) flashVariants {
	t.Helper()
	v := flashVariants{r.newFlash(false), r.newFlash(true), r.newOlderFlash(false), r.newOlderFlash(true),
		r.newSmallFlash(false)}
	compileFlash(t, dims, v.fast, v.ordered, v.older, v.olderOrdered, v.small)
	return v
}

// TestFlashShapes runs bands, tiles and folds with head dims of every program.
func TestFlashShapes(t *testing.T) {
	r := newCUDARig(t)
	fast := r.newFlash(false)
	r.testFlashShapes(t, flashDims, fast, r.newFlash(true), r.newOlderFlash(false), r.newOlderFlash(true))
	if fast.hopper == nil {
		return
	}
	for _, s := range source.HopperShapes { // these shapes, not substitutes
		for _, ordered := range []bool{false, true} {
			k := functionKey{s.Backward(false, ordered).Name, "hopper_backward_bf16", s.BackwardShared(false)}
			if r.loader.functions.known[k] == nil {
				t.Errorf("%+v has not run", k)
			}
		}
	}
}

// TestFlashSmallShapes does what TestFlashShapes does, with the shapes for GPUs with little shared memory. It also runs
// the suite's cases with head dims for which these differ.
func TestFlashSmallShapes(t *testing.T) {
	r := newCUDARig(t)
	fast, ordered := r.newSmallFlash(false), r.newSmallFlash(true)
	r.testFlashShapes(t, flashDims, fast, ordered)
	compileFlash(t, suiteDims, fast, ordered)
	wide := flashSuite
	wide.Leaves = func(c attentiontest.Case) bool { return max(c.Dim, c.DimV) <= 64 }
	for _, f := range []*Flash{fast, ordered} {
		t.Run(fmt.Sprintf("deterministic %t", f.deterministic), func(t *testing.T) {
			attentiontest.TestKernel(t, func(testing.TB) attentiontest.Rig { return r.attention(f) }, wide)
		})
	}
	t.Run("every one has run", func(t *testing.T) {
		for _, s := range source.FlashShapes {
			if s.QK <= 64 || s.BackwardShared() > source.SmallShared {
				continue
			}
			forward, _ := source.FlashShapeFor(s.Float32, s.QK, s.V, source.SmallShared, source.FlashShape.ForwardShared)
			dtype := "bf16"
			if s.Float32 {
				dtype = "fp32"
			}
			for _, k := range []functionKey{
				{forward.Forward().Name, "flash_forward_" + dtype, forward.ForwardShared()},
				{s.Backward().Name, "flash_backward_" + dtype, s.BackwardShared()},
			} {
				if r.loader.functions.known[k] == nil {
					t.Errorf("%+v has not", k)
				}
			}
		}
	})
}

// flashDims lists head dims of q and v, some for each compiled shape.
var flashDims = [][2]int{{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}, {512, 512}, {72, 40}, {101, 33}}

// suiteDims lists head dims of the conformance suite, one for each compiled shape.
var suiteDims = [][2]int{{8, 8}, {64, 64}, {80, 80}, {128, 128}, {192, 128}, {256, 256}, {512, 512}}

// compileFlash compiles missing programs in parallel. One after the other would take minutes.
func compileFlash(t testing.TB, list [][2]int, kernels ...*Flash) {
	t.Helper()
	var g errgroup.Group
	for _, f := range kernels {
		for _, dims := range list {
			for _, dtype := range []tensor.DType{tensor.BF16, tensor.F32} {
				g.Go(func() error { return f.Preload(dtype, dims[0], dims[1]) })
			}
		}
	}
	check(t, g.Wait())
}

func (r *cudaRig) testFlashShapes(t *testing.T, list [][2]int, kernels ...*Flash) {
	compileFlash(t, list, kernels...)
	for _, dims := range list {
		t.Run(fmt.Sprintf("%d and %d", dims[0], dims[1]), func(t *testing.T) {
			var cases []attentiontest.Case
			for seed := range uint64(12) {
				c := attentiontest.RandomCase(seed)
				c.Dim, c.DimV = dims[0], dims[1]
				c.Softmax.Scale = 1 / math.Sqrt(float64(c.Dim))
				cases = append(cases, c)
			}
			p := attentiontest.Prepare(t, cases, []tensor.DType{tensor.BF16, tensor.F32})
			for _, f := range kernels {
				name := fmt.Sprintf("deterministic %t, before Hopper %t, margin %d", f.deterministic, f.hopper == nil, f.margin)
				t.Run(name, func(t *testing.T) { p.Check(t, r.attention(f), flashSuite) })
			}
		})
	}
}

// attended holds the results of attention, as float32 on the host.
type attended struct{ out, lse, dq, dk, dv []float32 }

func (a attended) named() map[string][]float32 {
	return map[string][]float32{"out": a.out, "lse": a.lse, "dq": a.dq, "dk": a.dk, "dv": a.dv}
}

// attend runs a kernel forward and backward in one call over a complete sequence, with inputs rounded to dtype.
func (r *cudaRig) attend(k attention.Kernel, dtype tensor.DType, f attentiontest.Fixture) attended {
	r.t.Helper()
	return r.attendLate(k, dtype, f, func(*attention.Block) func() { return func() {} })
}

// attendLate does the same with keys that arrive late: it calls late with the block of each pass, and the returned
// function after it has queued the call.
func (r *cudaRig) attendLate(k attention.Kernel, dtype tensor.DType, f attentiontest.Fixture,
	late func(*attention.Block) func()) attended {
	r.t.Helper()
	put := func(v View) View {
		shape := v.Shape()
		host := tensor.New(tensor.F32, shape[:]...)
		tensor.Copy(host, v)
		return r.put(dtype, host)
	}
	q, keys, v, do := put(f.Q), put(f.K), put(f.V), put(f.DOut)
	acc := attention.Partial{O: r.like(tensor.F32, f.DOut), LSE: r.like(tensor.F32, f.LSE)}
	g := attention.Grads{DQ: r.like(tensor.F32, q), DK: r.like(tensor.F32, keys), DV: r.like(tensor.F32, v)}
	o, delta := r.like(dtype, do), r.like(tensor.F32, f.LSE)
	n, m := q.Len(tensor.Seq), keys.Len(tensor.Seq)
	shape := partition.Shape{SeqQ: n, SeqKV: m, Size: 1, Layout: partition.Contiguous{}, Mask: f.Mask}
	tiles := partition.Plan(shape, 0, 0)
	b := attention.Block{K: keys, V: v, Tiles: tiles, First: true, Last: true}
	forward, err := k.Forward(o, acc, q, f.Softmax)
	check(r.t, err)
	come := late(&b)
	check(r.t, forward.Block(b))
	come()
	check(r.t, forward.End())
	backward, err := k.Backward(g.DQ, do, q, attention.Saved{O: o, LSE: acc.LSE, Delta: delta}, f.Softmax)
	check(r.t, err)
	come = late(&b)
	grads := attention.KeyGrads{DK: g.DK, DV: g.DV}
	check(r.t, backward.Block(attention.GradBlock{Block: b, KeyGrads: grads, Fresh: span(0, m)}))
	come()
	check(r.t, backward.End())
	return attended{r.values(o), r.values(acc.LSE), r.values(g.DQ), r.values(g.DK), r.values(g.DV)}
}

// TestFlashFixtures checks that the error against float64 of unrounded inputs is not much larger than the error of
// exact arithmetic on the rounded inputs.
func TestFlashFixtures(t *testing.T) {
	r := newCUDARig(t)
	flash, exact := r.newFlash(false), r.newDeviceReference()
	for _, f := range attentiontest.Fixtures(t) {
		for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16, tensor.F16} {
			t.Run(f.Name+"/"+dtype.String(), func(t *testing.T) {
				r := r.within(t)
				got, best := r.attend(flash, dtype, f), r.attend(exact, dtype, f)
				for name, want := range map[string]View{"out": f.Out, "lse": f.LSE, "dq": f.DQ, "dk": f.DK, "dv": f.DV} {
					e, least := farthest(t, got.named()[name], want), farthest(t, best.named()[name], want)
					t.Logf("%-3s error %.2e, the reference kernel's %.2e, ratio %.2f", name, e, least, e/least)
					if !(e <= 2*least+1e-5) {
						t.Errorf("%s: error %g, the reference kernel's is %g", name, e, least)
					}
				}
			})
		}
	}
}

// farthest returns the largest distance of got from want, relative to the largest value.
func farthest(t *testing.T, got []float32, want View) float64 {
	t.Helper()
	shape := want.Shape()
	dense := tensor.New(tensor.F32, shape[:]...)
	tensor.Copy(dense, want)
	d, err := near.Of(got, tensor.Data[float32](dense), near.Infinities)
	check(t, err)
	return d.Relative()
}

// TestFlashIsDeterministic checks that the gradients of the deterministic kernel, and all forward results, repeat bit
// for bit.
func TestFlashIsDeterministic(t *testing.T) {
	r := newCUDARig(t)
	for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16} {
		for name, make := range map[string]func(r *cudaRig, deterministic bool) *Flash{
			"shapes of this GPU": (*cudaRig).newFlash, "before Hopper": (*cudaRig).newOlderFlash,
			"small shapes": (*cudaRig).newSmallFlash,
		} {
			t.Run(dtype.String()+", "+name, func(t *testing.T) {
				flash, fast := make(r, true), make(r, false)
				compileFlash(t, [][2]int{usualDims}, flash, fast)
				r := r.within(t)
				r.testRepeats(dtype, r.masked(1500, -1, usualDims), 5, flash, fast)
				r.testRepeats(dtype, r.masked(2000, -1, usualDims, 700, 100, 1200), 5, flash, fast)
			})
		}
	}
}

// TestLongSequencesRepeat does the same with so many blocks of keys that a GPU cannot run half of a head's at once, so
// that they add to dQ in parts.
func TestLongSequencesRepeat(t *testing.T) {
	r := newCUDARig(t)
	for _, seq := range []int{40_000, 70_001} {
		t.Run(strconv.Itoa(seq), func(t *testing.T) {
			r.within(t).testRepeats(tensor.BF16, r.masked(seq, -1, usualDims), 3, r.newFlash(true), r.newFlash(false))
		})
	}
}

// TestSweeps checks a backward pass whose blocks of keys fill a Hopper GPU at once, so that they go down and up the
// queries, against the deterministic kernel.
func TestSweeps(t *testing.T) {
	r := newCUDARig(t)
	f := r.masked(16_384, -1, usualDims)
	got := r.attend(r.newFlash(false), tensor.BF16, f).named()
	want := r.attend(r.newFlash(true), tensor.BF16, f).named()
	for _, name := range []string{"dq", "dk", "dv"} {
		var off, size float64
		for i, w := range want[name] {
			off += math.Pow(float64(got[name][i]-w), 2)
			size += float64(w) * float64(w)
		}
		if ratio := math.Sqrt(off / size); !(ratio < 0.01) {
			t.Errorf("%s is off by %g of its size", name, ratio)
		}
	}
}

// usualDims lists the head dims of most models.
var usualDims = [2]int{128, 128}

// masked returns causal attention of random inputs with the given window, or none for -1, and packed documents, if any.
func (r *cudaRig) masked(seq, window int, dims [2]int, docs ...int) attentiontest.Fixture {
	const heads, kvHeads = 8, 2
	dim, dimV := dims[0], dims[1]
	draw := func(heads, dim int) View { return normal(r.rng, 1, seq, heads, dim) }
	mask, err := partition.NewMask(true, window, seq, seq, docs)
	check(r.t, err)
	return attentiontest.Fixture{
		Q: draw(heads, dim), K: draw(kvHeads, dim), V: draw(kvHeads, dimV),
		DOut: draw(heads, dimV), LSE: draw(heads, 1),
		Mask: mask, Softmax: attention.Softmax{Scale: 1 / math.Sqrt(float64(dim))},
	}
}

// sameBits checks that results are equal.
func sameBits(t testing.TB, got, want attended) {
	t.Helper()
	for name, x := range got.named() {
		if !slices.Equal(x, want.named()[name]) {
			t.Errorf("%s is not the same bits", name)
		}
	}
}

// TestProbabilitiesFromSharedMemory detects wrong register assignments of this machine's compiler: products on Hopper
// must return the same bits with probabilities from shared memory. Other GPUs use the same kernel for both.
func TestProbabilitiesFromSharedMemory(t *testing.T) {
	r := newCUDARig(t)
	registers, memory := r.newFlash(true), r.newFlash(true)
	memory.change = func(s *source.HopperShape) { s.SharedP = true }
	for _, window := range []int{-1, 1000} {
		for _, dtype := range []tensor.DType{tensor.BF16, tensor.F16} {
			f := r.masked(4000, window, usualDims)
			sameBits(t, r.attend(memory, dtype, f), r.attend(registers, dtype, f))
		}
	}
}

// TestWideHeads checks head dim 512 on Hopper, whose passes take many steps, against the kernels before Hopper, and that
// deterministic passes repeat bit for bit.
func TestWideHeads(t *testing.T) {
	r := newCUDARig(t)
	fast, ordered, older := r.newFlash(false), r.newFlash(true), r.newOlderFlash(false)
	dims := [2]int{512, 512}
	for _, f := range []attentiontest.Fixture{r.masked(3000, -1, dims), r.masked(2000, 300, dims),
		r.masked(2000, -1, dims, 700, 100, 1200)} {
		r.testRepeats(tensor.BF16, f, 2, ordered, fast)
		want := r.attend(older, tensor.BF16, f).named()
		for name, x := range r.attend(fast, tensor.BF16, f).named() {
			d, err := near.Of(x, want[name], near.Infinities)
			check(t, err)
			if t.Logf("%s: %g", name, d.Relative()); !(d.Relative() < 0.01) {
				t.Errorf("%s is off by %g", name, d.Relative())
			}
		}
	}
}

// TestEveryLaneArrives checks that kernels on Hopper return the same bits if all lanes of a warp arrive at barriers,
// not one. Under compute-sanitizer's racecheck, the first of each two subtests checks that no other synchronisation is
// missing.
func TestEveryLaneArrives(t *testing.T) {
	r := newCUDARig(t)
	if r.newFlash(false).hopper != nil {
		var names []string
		for _, s := range source.HopperEveryLane {
			names = append(names, s.Forward(false).Name, s.Backward(false, false).Name, s.Backward(false, true).Name)
		}
		check(t, r.loader.Preload(names...))
	}
	for _, s := range source.HopperEveryLane {
		for i := range 4 {
			deterministic, margin := i%2 == 1, i/2*1000 // one SM remains, on which one block does all the work
			of := fmt.Sprintf("head dim %d, deterministic %t, margin %d", s.QK, deterministic, margin)
			f := r.masked(300, 200, [2]int{s.QK, s.V})
			var every attended
			t.Run("every lane, "+of, func(t *testing.T) {
				k := r.within(t).newFlash(deterministic)
				k.margin = margin
				k.change = func(s *source.HopperShape) { s.EveryLane = true }
				every = r.within(t).attend(k, tensor.BF16, f)
			})
			t.Run("one lane, "+of, func(t *testing.T) {
				one := r.within(t).attend(r.newFlash(deterministic), tensor.BF16, f)
				if !deterministic {
					one.dq = every.dq // its order of sums is not fixed
				}
				sameBits(t, every, one)
			})
		}
	}
}

// TestFlashLeavesSMs runs kernels for Hopper on a part of the SMs, so that blocks compute several blocks of queries or
// keys.
func TestFlashLeavesSMs(t *testing.T) {
	r := newCUDARig(t)
	var kernels []*Flash
	for _, margin := range []int{100, 1000} { // the second leaves one SM
		for _, deterministic := range []bool{false, true} {
			f := r.newFlash(deterministic)
			f.margin = margin
			kernels = append(kernels, f)
		}
	}
	r.testFlashShapes(t, [][2]int{{64, 64}, {128, 128}, {192, 128}, {256, 256}, {512, 512}}, kernels...)
}

func (r *cudaRig) testRepeats(dtype tensor.DType, f attentiontest.Fixture, times int, flash, fast *Flash) {
	t := r.t
	want := r.attend(flash, dtype, f)
	for range times {
		sameBits(t, r.attend(flash, dtype, f), want)
	}
	// The fast kernel adds to dQ in no fixed order. All other results are the same, except on Hopper, where the
	// deterministic kernel subtracts LSE at another point.
	got := r.attend(fast, dtype, f)
	otherwise := flash.hopper != nil && dtype != tensor.F32
	if !slices.Equal(got.out, want.out) ||
		!otherwise && (!slices.Equal(got.dk, want.dk) || !slices.Equal(got.dv, want.dv)) {
		t.Error("the fast kernel and the deterministic one differ in more than dq")
	}
}

// TestFlashRefuses checks that unsupported inputs return an error with an alternative, and that limits of the backward
// pass do not affect the forward pass.
func TestFlashRefuses(t *testing.T) {
	r := newCUDARig(t)
	all := r.newFlash(false).shared
	for _, c := range []struct {
		name              string
		dtype             tensor.DType
		dim, shared       int
		forward, backward bool // whether the pass is supported
	}{
		{"float32", tensor.F32, 64, all, true, true},
		{"float32, head dim 520", tensor.F32, 520, all, false, false},
		{"float64", tensor.F64, 64, all, false, false},
		{"head dim 520", tensor.BF16, 520, all, false, false},
		{"head dim 128", tensor.BF16, 128, all, true, true},
		{"head dim 128, 66 KiB of shared memory", tensor.BF16, 128, 66 << 10, true, false},
		{"head dim 128, 48 KiB of shared memory", tensor.BF16, 128, 48 << 10, false, false},
	} {
		f := r.newFlash(false)
		f.shared = c.shared
		q := r.like(c.dtype, tensor.New(tensor.F32, 1, 16, 1, c.dim))
		rows := func() View { return r.like(tensor.F32, tensor.New(tensor.F32, 1, 16, 1, 1)) }
		acc := attention.Partial{O: r.like(tensor.F32, q), LSE: rows()}
		p := attention.Softmax{Scale: 1}
		b := attention.Block{K: q, V: q}
		forward, err := f.Forward(acc.O, acc, q, p)
		if err == nil {
			err = forward.Block(b)
		}
		if (err == nil) != c.forward {
			t.Errorf("%s, forward: %v", c.name, err)
		}
		g := attention.KeyGrads{DK: r.like(tensor.F32, q), DV: r.like(tensor.F32, q)}
		backward, err := f.Backward(acc.O, q, q, attention.Saved{O: q, LSE: acc.LSE, Delta: rows()}, p)
		if err == nil {
			err = backward.Block(attention.GradBlock{Block: b, KeyGrads: g})
		}
		if (err == nil) != c.backward {
			t.Errorf("%s, backward: %v", c.name, err)
		}
	}
}
