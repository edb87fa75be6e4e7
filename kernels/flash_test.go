//go:build cuda

package kernels

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/partition"
)

// newFlash is a Flash on the rig's device.
func (r *cudaRig) newFlash(deterministic bool) *Flash {
	r.t.Helper()
	f, err := NewFlash(r.stream, r.loader, deterministic)
	check(r.t, err)
	return f
}

// attention is a kernel on the rig's device as the conformance suite wants it.
func (r *cudaRig) attention(k attention.Kernel) attentiontest.Rig {
	bytes := func(m tensor.Memory) View { return tensor.Dense(m, tensor.U8, 0, [4]int{1, 1, 1, int(m.Bytes())}) }
	return attentiontest.Rig{
		Kernel: k, Sync: r.stream.Sync,
		Upload: func(h *tensor.Host) (tensor.Memory, error) { return r.upload(bytes(h)).Memory(), nil },
		Download: func(dst *tensor.Host, src tensor.Memory) error {
			host, err := r.download(bytes(src))
			copy(hostBytes(dst), tensor.Bytes(host))
			return err
		},
	}
}

var flashSuite = attentiontest.Options{DTypes: []tensor.DType{tensor.BF16, tensor.F16}, MaxHeadDim: 256}

func TestFlash(t *testing.T) {
	for _, deterministic := range []bool{false, true} {
		t.Run(fmt.Sprintf("deterministic %t", deterministic), func(t *testing.T) {
			attentiontest.TestKernel(t, func(t testing.TB) attentiontest.Rig {
				r := newCUDARig(t)
				return r.attention(r.newFlash(deterministic))
			}, flashSuite)
		})
	}
}

// TestFlashShapes runs bands, tiles and folds with head dims of every program.
func TestFlashShapes(t *testing.T) {
	r := newCUDARig(t)
	rigs := []attentiontest.Rig{r.attention(r.newFlash(false)), r.attention(r.newFlash(true))}
	for _, dims := range [][2]int{{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}, {72, 40}, {101, 33}} {
		t.Run(fmt.Sprintf("%d and %d", dims[0], dims[1]), func(t *testing.T) {
			for seed := range uint64(12) {
				c := attentiontest.RandomCase(seed)
				c.Dim, c.DimV = dims[0], dims[1]
				c.Softmax.Scale = 1 / math.Sqrt(float64(c.Dim))
				for _, rig := range rigs {
					attentiontest.CheckWith(t, rig, c, tensor.BF16, flashSuite)
				}
			}
		})
	}
}

// attended are the results of an attention, as float32 on the host.
type attended struct{ out, lse, dq, dk, dv []float32 }

// attend runs a kernel forward and backward in one call over a whole sequence, with inputs
// rounded to dtype.
func (r *cudaRig) attend(k attention.Kernel, dtype tensor.DType, f attentiontest.Fixture) attended {
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
	tiles := partition.Plan(partition.Shape{SeqQ: n, SeqKV: m, Size: 1, Layout: partition.Contiguous{}, Mask: f.Mask}, 0, 0)
	for _, err := range []error{
		k.Reset(acc), k.Forward(acc, q, keys, v, tiles, f.Softmax), k.Finish(o, acc), k.Delta(delta, do, o), k.ResetGrads(g),
		k.Backward(g, do, q, keys, v, attention.Saved{O: o, LSE: acc.LSE, Delta: delta}, tiles, f.Softmax), k.FinishGrads(g),
	} {
		check(r.t, err)
	}
	return attended{r.values(o), r.values(acc.LSE), r.values(g.DQ), r.values(g.DK), r.values(g.DV)}
}

// TestFlashFixtures holds that the error against float64 of inputs that were never rounded is
// not much above that of exact arithmetic on the rounded ones.
func TestFlashFixtures(t *testing.T) {
	r := newCUDARig(t)
	flash, exact := r.newFlash(false), r.newDeviceReference()
	for _, f := range attentiontest.Fixtures(t) {
		for _, dtype := range []tensor.DType{tensor.BF16, tensor.F16} {
			t.Run(f.Name+"/"+dtype.String(), func(t *testing.T) {
				r := r.within(t)
				got, best := r.attend(flash, dtype, f), r.attend(exact, dtype, f)
				for _, c := range []struct {
					name      string
					got, best []float32
					want      View
				}{{"out", got.out, best.out, f.Out}, {"lse", got.lse, best.lse, f.LSE}, {"dq", got.dq, best.dq, f.DQ}, {"dk", got.dk, best.dk, f.DK}, {"dv", got.dv, best.dv, f.DV}} {
					e, least := farthest(c.got, c.want), farthest(c.best, c.want)
					t.Logf("%-3s error %.2e, the reference kernel's %.2e, ratio %.2f", c.name, e, least, e/least)
					if !(e <= 2*least+1e-5) {
						t.Errorf("%s: error %g, the reference kernel's is %g", c.name, e, least)
					}
				}
			})
		}
	}
}

// farthest is the largest distance of got from want, over the largest value.
func farthest(got []float32, want View) float64 {
	shape := want.Shape()
	dense := tensor.New(tensor.F32, shape[:]...)
	tensor.Copy(dense, want)
	largest, worst := 0.0, 0.0
	for i, w := range tensor.Data[float32](dense) {
		d := math.Abs(float64(got[i]) - float64(w))
		if got[i] == w { // infinities
			d = 0
		}
		if math.IsNaN(d) {
			return math.Inf(1)
		}
		worst = max(worst, d)
		if a := math.Abs(float64(w)); !math.IsInf(a, 1) {
			largest = max(largest, a)
		}
	}
	return worst / largest
}

// TestFlashIsDeterministic holds that gradients of the deterministic kernel repeat bit for bit,
// and results of the forward pass of either.
func TestFlashIsDeterministic(t *testing.T) {
	r := newCUDARig(t)
	const seq, heads, kvHeads, dim = 1500, 8, 2, 128
	draw := func(heads, dim int) View { return normal(r.rng, 1, seq, heads, dim) }
	causal, err := partition.NewMask(true, -1, seq, seq, nil)
	check(t, err)
	f := attentiontest.Fixture{
		Q: draw(heads, dim), K: draw(kvHeads, dim), V: draw(kvHeads, dim), DOut: draw(heads, dim), LSE: draw(heads, 1),
		Mask: causal, Softmax: attention.Softmax{Scale: 1 / math.Sqrt(dim)},
	}
	flash, fast := r.newFlash(true), r.newFlash(false)
	want := r.attend(flash, tensor.BF16, f)
	for range 5 {
		got := r.attend(flash, tensor.BF16, f)
		for name, same := range map[string]bool{
			"out": slices.Equal(got.out, want.out), "lse": slices.Equal(got.lse, want.lse),
			"dq": slices.Equal(got.dq, want.dq), "dk": slices.Equal(got.dk, want.dk), "dv": slices.Equal(got.dv, want.dv),
		} {
			if !same {
				t.Errorf("%s is not the same bits", name)
			}
		}
	}
	// The fast kernel adds to dQ in no certain order; all else is the same.
	got := r.attend(fast, tensor.BF16, f)
	if !slices.Equal(got.out, want.out) || !slices.Equal(got.dk, want.dk) || !slices.Equal(got.dv, want.dv) {
		t.Error("the fast kernel and the deterministic one differ in more than dq")
	}
}

// TestFlashRefuses holds that what it cannot do is an error that says what can.
func TestFlashRefuses(t *testing.T) {
	r := newCUDARig(t)
	f := r.newFlash(false)
	for _, c := range []struct {
		name  string
		dtype tensor.DType
		dim   int
	}{{"float32", tensor.F32, 64}, {"head dim 264", tensor.BF16, 264}} {
		q := r.like(c.dtype, tensor.New(tensor.F32, 1, 16, 1, c.dim))
		acc := attention.Partial{O: r.like(tensor.F32, q), LSE: r.like(tensor.F32, tensor.New(tensor.F32, 1, 16, 1, 1))}
		if err := f.Forward(acc, q, q, q, nil, attention.Softmax{Scale: 1}); err == nil {
			t.Errorf("%s: no error", c.name)
		}
	}
}
