// Package opstest has the common tests of model.Ops and optim.Device, run by TestOps and TestOptim on every device.
// They compare each operation with a plain float64 reference. The package's own tests check the backward references
// against finite differences of the forward ones. The CPU compares AdamW itself with PyTorch, and other devices compare
// it with the CPU.
package opstest

import (
	"crypto/sha256"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/optim"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto device memory; see package tensor.
type View = tensor.View

// Device is a device under test.
type Device struct {
	Ops   model.Ops
	Optim optim.Device
	// Upload returns a copy on the device of a dense host view; it may be the view itself.
	Upload func(host View) View
	// Download returns a dense host copy of a dense device view after all queued work, or the error of the stream.
	Download func(device View) (View, error)
}

// TestOps runs the tests for activations of each type. Updated parameters, their gradients, weights of norms, inv, cos
// and sin are float32, or float64 with float64 activations.
func TestOps(t *testing.T, newDevice func(t *testing.T) Device, activations ...tensor.DType) {
	tests := []struct {
		name string
		run  func(*rig)
	}{
		{"Linear", testLinear},
		{"Quantize", testQuantize},
		{"ScaledLinear", testScaledLinear},
		{"ScaledTranspose", testTranspose},
		{"GroupQuantize", testGroupQuantize},
		{"GroupScaledLinear", testGroupScaledLinear},
		{"Bias", testBias},
		{"RMSNorm", testNorm},
		{"Rope", testRope},
		{"NormRope", testNormRope},
		{"RopeConvention", testRopeConvention},
		{"RopeTranspose", testRopeTranspose},
		{"GLU", testGLU},
		{"Gate", testGate},
		{"Maps", testMaps},
		{"Dropout", testDropout},
		{"Embed", testEmbed},
		{"CrossEntropy", testCrossEntropy},
		{"CrossEntropyIgnored", testCrossEntropyIgnored},
		{"CrossEntropyExtreme", testCrossEntropyExtreme},
		{"AddZero", testAddZero},
		{"Wide", testWide},
		{"Route", testRoute},
		{"RouteExtreme", testRouteExtreme},
		{"ScaleChoices", testScaleChoices},
		{"Count", testCount},
		{"Sort", testSort},
		{"GroupLinear", testGroupLinear},
		{"GroupBias", testGroupBias},
		{"GroupGLU", testGroupGLU},
		{"FusedExperts", testFusedExperts},
		{"Clamped", testClamped},
		{"Combine", testCombine},
		{"GroupNaN", testGroupNaN},
		{"Conv", testConv},
		{"ConvNaN", testConvNaN},
		{"Gates", testGates},
	}
	for _, dtype := range activations {
		t.Run(dtype.String(), func(t *testing.T) {
			for _, test := range tests {
				t.Run(test.name, func(t *testing.T) { test.run(newRig(t, newDevice(t), dtype)) })
			}
			t.Run("Repeat", func(t *testing.T) {
				if a, b := Digest(t, newDevice(t), dtype), Digest(t, newDevice(t), dtype); a != b {
					t.Errorf("two runs of the same operations gave other bits: digest %x and %x", a, b)
				}
			})
		})
	}
	t.Run("Copy", func(t *testing.T) { testCopy(newRig(t, newDevice(t), tensor.F32)) })
}

// A rig is a device with a source of random views and their values.
type rig struct {
	t   *testing.T
	dev Device
	ops model.Ops
	act tensor.DType // of activations
	par tensor.DType // of parameters
	rng *rand.Rand
}

func newRig(t *testing.T, dev Device, act tensor.DType) *rig {
	par := tensor.F32
	if act == tensor.F64 {
		par = tensor.F64
	}
	return &rig{t: t, dev: dev, ops: dev.Ops, act: act, par: par, rng: rand.New(rand.NewPCG(1, 2))}
}

// random returns a device view of normal values, and the values rounded to dtype.
func (r *rig) random(dtype tensor.DType, shape ...int) (View, []float64) {
	xs := make([]float64, shape[0]*shape[1]*shape[2]*shape[3])
	for i := range xs {
		xs[i] = r.rng.NormFloat64()
	}
	return r.put(dtype, xs, shape...)
}

// put returns a device view of xs, and xs rounded to dtype.
func (r *rig) put(dtype tensor.DType, xs []float64, shape ...int) (View, []float64) {
	host := tensor.New(dtype, shape...)
	near.Encode(host, xs)
	return r.dev.Upload(host), near.Decode(host)
}

// garbage returns a device view of NaN, for results that must not depend on old values.
func (r *rig) garbage(dtype tensor.DType, shape ...int) View {
	host := tensor.New(dtype, shape...)
	xs := make([]float64, host.Size())
	for i := range xs {
		xs[i] = math.NaN()
	}
	near.Encode(host, xs)
	return r.dev.Upload(host)
}

func (r *rig) ints(xs []int32, shape ...int) View {
	return r.dev.Upload(tensor.FromSlice(xs, shape...))
}

func (r *rig) read(v View) []float64 {
	r.t.Helper()
	host, err := r.dev.Download(v)
	if err != nil {
		r.t.Fatalf("stream: %v", err)
	}
	return near.Decode(host)
}

// close fails the test unless v holds want within the rounding of its type and of a sum in float32 (float64 for float64
// activations) of the size of the largest element.
func (r *rig) close(what string, v View, want []float64) {
	r.t.Helper()
	r.agree(what, v, want, near.Finite, nil)
}

// same does what close does, and NaN agrees with NaN, and an infinity with an equal one.
func (r *rig) same(what string, v View, want []float64) {
	r.t.Helper()
	r.agree(what, v, want, near.NonFinite, nil)
}

// agree allows two roundings of v's type, and one of rounded, which v includes, unless it is nil.
func (r *rig) agree(what string, v View, want []float64, contract near.Contract, rounded []float64) {
	r.t.Helper()
	got := r.read(v)
	if v.Size() == 0 && len(want) == 0 {
		return
	}
	d, err := near.Of(got, want, contract)
	if err == nil {
		top := max(1, d.Largest)
		err = near.Each(got, want, contract, func(i int) float64 {
			if want[i]-want[i] != 0 { // the contract alone decides
				return 0
			}
			bound := 2*max(epsilon(v.DType()), epsilon(r.par))*math.Abs(want[i]) + 32*epsilon(r.par)*top
			if v.DType() != r.par && v.DType() != tensor.F64 {
				bound += epsilon(v.DType()) * 0.01 * top // cancellation among rounded inputs
			}
			if rounded != nil {
				bound += epsilon(v.DType()) * math.Abs(rounded[i])
			}
			return bound
		})
	}
	if err != nil {
		r.t.Fatalf("%s of %v: %v", what, v.Shape(), err)
	}
}

// equal fails the test unless v holds exactly want; NaN equals NaN.
func (r *rig) equal(what string, v View, want []float64) {
	r.t.Helper()
	for i, got := range r.read(v) {
		same := got == want[i] && math.Signbit(got) == math.Signbit(want[i])
		if !same && !(math.IsNaN(got) && math.IsNaN(want[i])) {
			r.t.Fatalf("%s: element %d of %v is %g, want exactly %g", what, i, v.Shape(), got, want[i])
		}
	}
}

func each[S any](r *rig, shapes []S, f func(r *rig, s S)) {
	for _, s := range shapes {
		r.t.Run(fmt.Sprint(s), func(t *testing.T) {
			sub := *r
			sub.t = t
			f(&sub, s)
		})
	}
}

func zeros(n int) []float64 { return make([]float64, n) }

func clone(xs []float64) []float64 { return append([]float64(nil), xs...) }

// testCopy copies between all float types: values at the edges of each type, where rounding and ranges matter, and
// random ones.
func testCopy(r *rig) {
	nan, inf := math.NaN(), math.Inf(1)
	edges := []float64{0, math.Copysign(0, -1), 1, -1, inf, -inf, nan,
		65504, 65519, 65520, -65520, 65536, 1e5, // the largest float16 and around
		0x1p-14, 0x1.ffep-15, 0x1.ffcp-15, 0x1p-24, 0x1p-25, 0x1.8p-25, -0x1.8p-24, 0x1p-26, // its subnormals
		1 + 0x1p-11, 1 + 0x3p-11, 1 + 0x1p-8, 1 + 0x3p-8, 1 + 0x1.8p-8, 2 - 0x1p-12, 2 - 0x1p-9, // ties
		3.3895313892515355e38, 3.4e38, 1e-40, -1e-45, 1e-30, 0x1p-126, 0x1.fp-127}
	for range 64 - len(edges) {
		edges = append(edges, r.rng.NormFloat64())
	}
	floats := []tensor.DType{tensor.F64, tensor.F32, tensor.F16, tensor.BF16}
	for _, from := range floats {
		src, values := r.put(from, edges, 2, 4, 2, 4)
		for _, to := range floats {
			dst := r.garbage(to, 2, 4, 2, 4)
			r.ops.Copy(dst, src)
			want := tensor.New(to, 2, 4, 2, 4)
			near.Encode(want, values)
			r.equal(from.String()+" to "+to.String(), dst, near.Decode(want))
		}
	}
	empty := r.garbage(tensor.F32, 1, 0, 1, 3)
	r.ops.Copy(r.garbage(tensor.BF16, 1, 0, 1, 3), empty)
	r.equal("nothing", empty, nil)
}

// Digest returns a hash of the bits of every operation on fixed inputs that are large enough to be split. It is the
// same for every run on a device, and on the CPU for every number of goroutines.
func Digest(t *testing.T, dev Device, activations tensor.DType) [sha256.Size]byte {
	t.Helper()
	r := newRig(t, dev, activations)
	const seq, hidden, inner, vocab = 333, 130, 200, 71
	targets := make([]int32, seq)
	for i := range targets {
		targets[i] = int32(i*i%(vocab+1)) - 1
	}
	ids := make([]int32, seq)
	for i := range ids {
		ids[i] = max(0, targets[i])
	}
	at := r.ints(ids, 1, seq, 1, 1)
	random := func(dtype tensor.DType, shape ...int) View { v, _ := r.random(dtype, shape...); return v }
	table, dtable := random(r.act, 1, vocab, 1, hidden), random(r.par, 1, vocab, 1, hidden)
	w, dw := random(r.act, 1, inner, 1, hidden), random(r.par, 1, inner, 1, hidden)
	norm, dnorm := random(r.par, 1, 1, 1, hidden), random(r.par, 1, 1, 1, hidden)
	x, y, dx := random(r.act, 1, seq, 1, hidden), random(r.act, 1, seq, 1, hidden), random(r.act, 1, seq, 1, hidden)
	inv := r.garbage(r.par, 1, seq, 1, 1)
	gate, up, dy := random(r.act, 1, seq, 1, inner), random(r.act, 1, seq, 1, inner), random(r.act, 1, seq, 1, inner)
	cos, sin := random(r.par, 1, seq, 1, 5), random(r.par, 1, seq, 1, 5)
	logits, loss := random(r.act, 1, seq, 1, vocab), random(tensor.F64, 1, 1, 1, 1)

	r.ops.Embed(x, table, at)
	r.ops.AddRMSNorm(y, inv, x, x, dx, norm, 1e-6)
	heads := y.Reshape([4]int{1, seq, 13, 10})
	r.ops.NormRope(heads, View{}, heads, View{}, cos, sin, 0)
	r.ops.Linear(gate, y, w, View{})
	r.ops.GLU(dy, gate, up, kernels.SiLU)
	r.ops.GLUBackward(gate, up, dy, gate, up, kernels.SiLU)
	one := random(r.act, 1, seq, 1, 1)
	r.ops.Gate(dy, dy, gate)
	r.ops.Gate(dy, dy, one)
	r.ops.GateBackward(dy, gate, dy, up, gate)
	r.ops.GateBackward(dy, one, dy, up, one)
	r.ops.LinearDX(dx, up, w, true)
	r.ops.LinearDW(dw, up, x, true)
	r.ops.SumRows(dnorm, x)
	r.ops.RMSNormBackward(y, dnorm, dx, x, inv, norm, true)
	r.ops.EmbedBackward(dtable, dx, at)
	r.ops.Linear(logits, y, table, View{})
	r.ops.CrossEntropy(loss, logits, r.ints(targets, 1, seq, 1, 1), 0.5, 0, true)

	results := []View{x, y, inv, gate, one, up, dy, dx, dw, dnorm, dtable, logits, loss}
	results = append(append(append(results, r.scaledResults()...), r.expertResults()...), r.recurrentResults()...)
	h := sha256.New()
	for _, v := range results {
		host, err := dev.Download(v)
		if err != nil {
			t.Fatalf("stream: %v", err)
		}
		h.Write(tensor.Bytes(host))
	}
	return [sha256.Size]byte(h.Sum(nil))
}

// expertResults runs every operation of experts on fixed inputs that are large enough to be split.
func (r *rig) expertResults() []View {
	const seq, hidden, inner, experts, chosen = 333, 70, 33, 16, 3
	random := func(dtype tensor.DType, shape ...int) View { v, _ := r.random(dtype, shape...); return v }
	ints := func(shape ...int) View { return r.ints(make([]int32, shape[1]*shape[2]), shape...) }
	router := kernels.Router{Sigmoid: true, Normalize: true, Groups: 4, Kept: 2}
	logits, load, share := random(r.par, 1, seq, 1, experts), random(tensor.F64, 1, 1, 1, experts),
		random(tensor.F64, 1, 1, 1, experts)
	weight, choice := random(r.par, 1, seq, chosen, 1), ints(1, seq, chosen, 1)
	p := kernels.Pairs{Tokens: ints(1, seq*chosen, 1, 1), Places: ints(1, seq, chosen, 1),
		Starts: ints(1, experts+1, 1, 1)}
	x, w, down := random(r.act, 1, seq, 1, hidden), random(r.act, 1, experts*2*inner, 1, hidden),
		random(r.act, 1, experts*hidden, 1, inner)
	in, act := random(r.act, 1, seq*chosen, 1, 2*inner), random(r.act, 1, seq*chosen, 1, inner)
	y, out := random(r.act, 1, seq*chosen, 1, hidden), random(r.act, 1, seq, 1, hidden)
	bias, dbias := random(r.par, 1, 1, 1, experts*hidden), random(r.par, 1, 1, 1, experts*hidden)
	dweight, dlogits := random(r.par, 1, seq, chosen, 1), random(r.act, 1, seq, 1, experts)
	dw, ddown := random(r.par, 1, experts*2*inner, 1, hidden), random(r.par, 1, experts*hidden, 1, inner)
	byToken, dout := kernels.Operand{View: x, ByToken: true}, kernels.Operand{View: out, ByToken: true}

	r.ops.Route(weight, choice, logits, View{}, router)
	r.ops.Count(load, share, choice, logits, View{})
	r.ops.Sort(p, choice)
	r.ops.GroupLinear(in, byToken, w, p, false)
	r.ops.GroupGLU(act, in, kernels.ClampedSiLU)
	r.ops.GroupLinear(y, kernels.Operand{View: act}, down, p, false)
	r.ops.GroupAdd(y, bias, p)
	r.ops.Combine(out, x, y, weight, p)
	da := random(r.act, 1, seq*chosen, 1, inner)
	r.ops.GroupLinearDX(da, dout, down, p, false)
	r.ops.GroupGLUBackward(in, da, dweight, da, in, weight, p, kernels.SiLU)
	r.ops.GroupDot(dweight, dout, bias, p)
	r.ops.GroupSum(dbias, dout, weight, p)
	r.ops.GroupLinearDW(ddown, dout, kernels.Operand{View: da}, p, true)
	r.ops.GroupLinearDW(dw, kernels.Operand{View: in}, byToken, p, false)
	r.ops.RouteBackward(dlogits, dweight, choice, logits, random(r.par, 1, 1, 1, experts), View{}, router)
	return []View{weight, choice, load, share, p.Tokens, p.Places, p.Starts, in, act, y, out, da, dweight, dbias, ddown,
		dw, dlogits}
}

// epsilon returns the largest relative error of rounding to dtype.
func epsilon(dtype tensor.DType) float64 {
	switch dtype {
	case tensor.F64:
		return 0x1p-53
	case tensor.F32:
		return 0x1p-24
	case tensor.F16:
		return 0x1p-11
	case tensor.BF16:
		return 0x1p-8
	}
	panic(fmt.Sprintf("opstest: epsilon of %v", dtype))
}
