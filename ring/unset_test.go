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
	var alone *ring.Schedule // each query sees its own position alone, as asked for
	for _, docs := range [][]int{nil, {2, 4}} {
		m, err := partition.NewMask(true, 0, seq, seq, docs)
		if err != nil {
			t.Fatal(err)
		}
		shape := partition.Shape{SeqQ: seq, SeqKV: seq, Size: 1, Layout: partition.Contiguous{}, Mask: m}
		if alone, err = ring.New("ring", ring.Spec{Shape: shape}, 0); err != nil {
			t.Errorf("a window of no key before the own one, documents %v: %v", docs, err)
		}
	}
	stream := tensor.NewHostStream("compute")
	defer stream.Close()
	group := comm.NewLocal(1, []tensor.Stream{stream}, comm.Options{})[0]
	defer group.Close()
	x := tensor.New(tensor.F64, 1, seq, 1, dim)
	out := attention.Partial{O: tensor.New(tensor.F64, 1, seq, 1, dim), LSE: tensor.New(tensor.F64, 1, seq, 1, 1)}
	grads := attention.Grads{DQ: tensor.New(tensor.F64, 1, seq, 1, dim), DK: tensor.New(tensor.F64, 1, seq, 1, dim),
		DV: tensor.New(tensor.F64, 1, seq, 1, dim)}
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
		{"no positions", tensor.NewHostArena(0), attention.Softmax{Scale: 1, Scores: &attention.Scores{Slopes: x}},
			"Spec.Positions"},
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

// An idle communicator moves nothing.
type idle struct{ comm.Communicator }

func (idle) Exchange([]comm.Message, []comm.Message) (comm.Pending, error) { return moved{}, nil }

type moved struct{ comm.Pending }

func (moved) Wait() {}

// Groups of heads need a Mover, and cannot set results of all heads.
func TestGroupsOfHeadsNeedTheirFields(t *testing.T) {
	const seq, heads, dim = 6, 2, 4
	mask := partition.Mask{Band: partition.Causal()}
	shape := partition.Shape{SeqQ: 2 * seq, SeqKV: 2 * seq, Size: 2, Layout: partition.Contiguous{}, Mask: mask}
	s, err := ring.New("allgather", ring.Spec{Shape: shape, Heads: heads, KVHeads: heads, GatherHeads: 1}, 0)
	if err != nil {
		t.Fatal(err)
	}
	stream := tensor.NewHostStream("compute")
	defer stream.Close()
	view := func(dim int) tensor.View { return tensor.New(tensor.F32, 1, seq, heads, dim) }
	x, out := view(dim), attention.Partial{O: view(dim), LSE: view(1)}
	grads := attention.Grads{DQ: view(dim), DK: view(dim), DV: view(dim)}
	for _, c := range []struct {
		mover  ring.Mover
		scores *attention.Scores
		want   string // of the error
	}{
		{nil, nil, "Mover"},
		{cpu.New(stream), &attention.Scores{Max: view(1)}, "largest scores"},
	} {
		loop := ring.Ring{Kernel: failing{}, Comm: idle{}, Mover: c.mover, Stream: stream,
			Arena: tensor.NewHostArena(0)}
		p := attention.Softmax{Scale: 1, Scores: c.scores}
		for pass, err := range map[string]error{
			"forward":  loop.Forward(out, x, x, x, s, p),
			"backward": loop.Backward(grads, x, x, x, x, out, s, p),
		} {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s, want %s: %v", pass, c.want, err)
			}
		}
	}
}
