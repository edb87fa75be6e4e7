package ring_test

import (
	"math"
	"strings"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// What a caller has left out is an error that names it, and no other attention than was meant.
func TestUnsetFieldsAreErrors(t *testing.T) {
	const seq, dim = 6, 4
	shape := func(m partition.Mask) partition.Shape {
		return partition.Shape{SeqQ: seq, SeqKV: seq, Size: 1, Layout: partition.Contiguous{}, Mask: m}
	}
	for _, m := range []partition.Mask{{}, {Docs: []int{2, 4}}} {
		if _, err := ring.New("ring", ring.Spec{Shape: shape(m)}, 0); err == nil || !strings.Contains(err.Error(), "Mask.Band") {
			t.Errorf("a mask without a band, documents %v: %v", m.Docs, err)
		}
	}
	var alone *ring.Schedule // each query sees its own position alone, as asked for
	for _, docs := range [][]int{nil, {2, 4}} {
		m, err := partition.NewMask(true, 0, seq, seq, docs)
		if err != nil {
			t.Fatal(err)
		}
		if alone, err = ring.New("ring", ring.Spec{Shape: shape(m)}, 0); err != nil {
			t.Errorf("a window of no key before the own one, documents %v: %v", docs, err)
		}
	}
	stream := tensor.NewHostStream("compute")
	defer stream.Close()
	group := comm.NewLocal(1, []tensor.Stream{stream}, comm.Options{})[0]
	defer group.Close()
	x := tensor.New(tensor.F64, 1, seq, 1, dim)
	out := attention.Partial{O: tensor.New(tensor.F64, 1, seq, 1, dim), LSE: tensor.New(tensor.F64, 1, seq, 1, 1)}
	grads := attention.Grads{DQ: tensor.New(tensor.F64, 1, seq, 1, dim), DK: tensor.New(tensor.F64, 1, seq, 1, dim), DV: tensor.New(tensor.F64, 1, seq, 1, dim)}
	for _, c := range []struct {
		name  string
		arena *tensor.Arena
		p     attention.Softmax
		want  string // of the error; "": none
	}{
		{"all is set", tensor.NewHostArena(0), attention.Softmax{Scale: 1}, ""},
		{"a scale of zero", tensor.NewHostArena(0), attention.Softmax{Scale: math.Copysign(0, -1)}, ""},
		{"no arena", nil, attention.Softmax{Scale: 1}, "Arena"},
		{"no scale", tensor.NewHostArena(0), attention.Softmax{}, "Softmax.Scale"},
	} {
		loop := ring.Ring{Kernel: cpu.New(stream), Comm: group, Stream: stream, Arena: c.arena}
		for pass, err := range map[string]error{
			"forward":  loop.Forward(out, x, x, x, alone, c.p),
			"backward": loop.Backward(grads, x, x, x, x, out, alone, c.p),
		} {
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s, %s: %v", c.name, pass, err)
			}
		}
	}
}
