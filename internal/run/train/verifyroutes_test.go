package train

import (
	"errors"
	"math"
	"testing"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// A router chooses the first two experts for every token.
type router struct{ model.Ops }

func (router) Route(_, choice, _, _ View, _ kernels.Router) {
	copy(tensor.Data[int32](choice), []int32{0, 1, 0, 1, 0, 1})
}

// The choices of the other side replace those of this one, with the weights of the given logits. Nearly equal scores
// are ties.
func TestRoutesOfTheOtherSide(t *testing.T) {
	for name, r := range map[string]struct {
		kernels.Router
		weight func(x float64) float64
		sum    bool // weights are divided by the sum of those chosen
	}{
		"chosen":  {kernels.Router{Normalize: true}, math.Exp, true},
		"all":     {kernels.Router{}, func(x float64) float64 { return math.Exp(x) / all4 }, false},
		"sigmoid": {kernels.Router{Sigmoid: true, Scale: 2.5}, func(x float64) float64 { return 2.5 / (1 + math.Exp(-x)) }, false},
	} {
		stream := tensor.NewHostStream("compute")
		dev := device.CPU(stream, "flash", tensor.F32)
		p := &replay{Ops: router{}, ctx: t.Context(), dev: &dev, tolerance: 1e-5,
			other: map[route][]int32{{3, 10, 0}: {1, 0}, {3, 11, 0}: {0, 2}, {3, 12, 0}: {3, 0}}}
		p.begin(4)
		p.add(3, 1, []int{10, 11, 12}, 13)
		p.at = 1
		logits := make([]float32, 0, 12)
		for range 3 {
			logits = append(logits, row4...)
		}
		weight, choice := tensor.New(tensor.F32, 1, 3, 2, 1), tensor.New(tensor.I32, 1, 3, 2, 1)
		p.Route(weight, choice, tensor.FromSlice(logits, 1, 3, 1, 4), View{}, r.Router)
		if p.err != nil || p.routed.Choices != 3 || p.routed.Ties != 1 || p.routed.Wrong != 1 || p.routed.First == "" {
			t.Errorf("%s: %+v, %v", name, p.routed, p.err)
		}
		got, w := tensor.Data[int32](choice), tensor.Data[float32](weight)
		for i, want := range []int32{0, 1, 0, 2, 3, 0} {
			if got[i] != want {
				t.Errorf("%s: choices %v", name, got)
			}
			if i < 2 {
				continue // of this side
			}
			x, other := float64(row4[want]), float64(row4[got[i^1]])
			value := r.weight(x)
			if r.sum {
				value /= value + r.weight(other)
			}
			if math.Abs(float64(w[i])-value) > 1e-6 {
				t.Errorf("%s: weight %d is %v, want %v", name, i, w[i], value)
			}
		}
		if err := errors.Join(dev.Close(), stream.Close()); err != nil {
			t.Error(err)
		}
		if p.layer != 1 || p.at != 0 {
			t.Errorf("%s: the pass is in layer %d at token %d", name, p.layer, p.at)
		}
	}
}

var row4 = []float32{1, 0.5, 0.5000001, -3}

var all4 = math.E + 2*math.Exp(0.5) + math.Exp(-3)
