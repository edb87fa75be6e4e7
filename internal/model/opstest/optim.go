package opstest

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/model/optim"
	"github.com/cprun/cprun/tensor"
)

// TestOptim runs the tests of the optimizer: gradient scales, and norms that are not finite. Vectors are aligned and
// unaligned, shorter than a block and longer than several, with a copy of the weights in each type and without.
func TestOptim(t *testing.T, newDevice func(t *testing.T) Device) {
	for _, test := range []struct {
		name string
		run  func(*optimRig)
	}{
		{"Scale", testScale},
		{"Overflow", testOverflow},
		{"LargeNorm", testLargeNorm},
		{"NotANumber", testNotANumber},
	} {
		for _, n := range []int{1, 5003} {
			for lo := range 2 {
				for _, copied := range []tensor.DType{tensor.Invalid, tensor.F32, tensor.F16, tensor.BF16} {
					t.Run(fmt.Sprintf("%s/%d+%d/%v", test.name, lo, n, copied), func(t *testing.T) {
						test.run(&optimRig{t: t, dev: newDevice(t), n: n, lo: lo, copied: copied})
					})
				}
			}
		}
	}
}

// An optimRig is a device and the test vectors: n elements starting at lo.
type optimRig struct {
	t      *testing.T
	dev    Device
	n, lo  int
	copied tensor.DType // Invalid: no copy
}

// A state is p, m, v and, if any, the copy: the views that a step changes.
type state []View

func (r *optimRig) vector(value func(rng *rand.Rand) float64, seed uint64) View {
	host, rng := tensor.New(tensor.F32, r.lo+r.n), rand.New(rand.NewPCG(seed, 0))
	for i := range tensor.Data[float32](host) {
		tensor.Data[float32](host)[i] = float32(value(rng))
	}
	return r.dev.Upload(host)
}

func normal(rng *rand.Rand) float64 { return rng.NormFloat64() }

// state returns the same values each time. The copy holds p, as before any step.
func (r *optimRig) state() state {
	positive := func(rng *rand.Rand) float64 { return rng.Float64() }
	s := state{r.vector(normal, 1), r.vector(normal, 2), r.vector(positive, 3)}
	if r.copied != tensor.Invalid {
		s = append(s, r.dev.Upload(tensor.New(r.copied, r.lo+r.n)))
		zero := func() View { return r.vector(func(*rand.Rand) float64 { return 0 }, 0) }
		r.step(state{s[0], zero(), zero(), s[3]}, zero(), View{}, optim.AdamStep{Eps: 1}) // sets only the copy
	}
	return s
}

func (r *optimRig) gradient(scale float64) View {
	return r.vector(func(rng *rand.Rand) float64 { return scale * rng.NormFloat64() }, 4)
}

func (r *optimRig) part(v View) View { return v.Slice(tensor.Dim, r.lo, r.lo+r.n) }

func (r *optimRig) step(s state, g, sum View, h optim.AdamStep) {
	c := View{}
	if len(s) > 3 {
		c = r.part(s[3])
	}
	r.dev.Optim.AdamW(r.part(s[0]), c, r.part(g), r.part(s[1]), r.part(s[2]), sum, h)
}

func (r *optimRig) sum(x float64) View { return r.dev.Upload(tensor.FromSlice([]float64{x}, 1)) }

func (r *optimRig) bits(s state) (all [][]byte) {
	r.t.Helper()
	for _, v := range s {
		host, err := r.dev.Download(v)
		if err != nil {
			r.t.Fatalf("stream: %v", err)
		}
		all = append(all, bytes.Clone(tensor.Bytes(host)))
	}
	return all
}

func (r *optimRig) same(what string, got, want [][]byte) {
	r.t.Helper()
	for i, name := range []string{"p", "m", "v", "copy"}[:len(want)] {
		if !bytes.Equal(got[i], want[i]) {
			r.t.Errorf("%s: %s has other bits", what, name)
		}
	}
}

// numbers returns the numbers of the second step.
func numbers(maxNorm, scale float64) optim.AdamStep {
	return optim.AdamStep{LR: 1e-2, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, MaxNorm: maxNorm, Step: 1,
		Scale: scale}
}

// testScale: a gradient scaled by a power of two gives the same step to the bit, clipped or not.
func testScale(r *optimRig) {
	for _, maxNorm := range []float64{0, 0.5, 1e9} {
		step := func(scale float64) [][]byte {
			s, factor, sum := r.state(), max(scale, 1), r.sum(0)
			g := r.gradient(factor)
			r.dev.Optim.SumSquares(sum, r.part(g))
			r.step(s, g, sum, numbers(maxNorm, scale))
			return r.bits(s)
		}
		before, want := r.bits(r.state()), step(0)
		if slices.EqualFunc(before, want, bytes.Equal) {
			r.t.Fatalf("MaxNorm %g: the step changes nothing", maxNorm)
		}
		for _, scale := range []float64{1, 1 << 16, 1 << 24} {
			r.same(fmt.Sprintf("MaxNorm %g, scale %g", maxNorm, scale), step(scale), want)
		}
	}
}

// testOverflow: with a scale, a norm that is not finite changes nothing.
func testOverflow(r *optimRig) {
	want := r.bits(r.state())
	for _, x := range []float64{math.NaN(), math.Inf(1)} {
		for _, maxNorm := range []float64{0, 0.5} {
			for _, scale := range []float64{1, 1 << 16} {
				s := r.state()
				r.step(s, r.gradient(x), r.sum(x), numbers(maxNorm, scale))
				r.same(fmt.Sprintf("MaxNorm %g, scale %g, norm %g", maxNorm, scale, x), r.bits(s), want)
			}
		}
	}
}

// testLargeNorm: any finite norm, however large, makes the step.
func testLargeNorm(r *optimRig) {
	before, s := r.bits(r.state()), r.state()
	r.step(s, r.gradient(1<<16), r.sum(math.MaxFloat64), numbers(0.5, 1<<16))
	if slices.EqualFunc(before, r.bits(s), bytes.Equal) {
		r.t.Error("the step changes nothing")
	}
}

// testNotANumber: without a scale a NaN gradient must reach the parameters, as in PyTorch, and not be clipped away.
func testNotANumber(r *optimRig) {
	s := r.state()
	r.step(s, r.gradient(1), r.sum(math.NaN()), numbers(0.5, 0))
	host, err := r.dev.Download(s[0])
	if err != nil {
		r.t.Fatalf("stream: %v", err)
	}
	for i, x := range tensor.Data[float32](host)[r.lo:] {
		if x == x {
			r.t.Fatalf("parameter %d is %g after a step with a NaN gradient norm", i, x)
		}
	}
}
