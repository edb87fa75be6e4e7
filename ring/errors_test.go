package ring_test

import (
	"errors"
	"fmt"
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

// A failing kernel fails in the call that fail names.
type failing struct{ fail string }

func (f failing) at(call string) error {
	if call == f.fail {
		return errors.New("boom")
	}
	return nil
}

func (f failing) Forward(attention.View, attention.Partial, attention.View, attention.Softmax) (attention.ForwardPass,
	error) {
	return forwardPass{f}, f.at("forward")
}

func (f failing) Backward(_, _, _ attention.View, _ attention.Saved, _ attention.Softmax) (attention.BackwardPass,
	error) {
	return backwardPass{f}, f.at("backward")
}

type forwardPass struct{ f failing }

func (p forwardPass) Block(attention.Block) error { return p.f.at("forward block") }
func (p forwardPass) End() error                  { return p.f.at("forward end") }

type backwardPass struct{ f failing }

func (p backwardPass) Block(attention.GradBlock) error { return p.f.at("backward block") }
func (p backwardPass) End() error                      { return p.f.at("backward end") }
func (p backwardPass) Fold(attention.Fold) error       { return p.f.at("fold") }

// A broken communicator begins no exchange, and an idle one moves nothing.
type (
	broken struct{ comm.Communicator }
	idle   struct{ comm.Communicator }
	moved  struct{ comm.Pending }
)

func (broken) Exchange([]comm.Message, []comm.Message) (comm.Pending, error) {
	return nil, errors.New("boom")
}
func (idle) Exchange([]comm.Message, []comm.Message) (comm.Pending, error) { return moved{}, nil }
func (moved) Wait()                                                        {}

// A pass returns the error of its kernel call or exchange. What a caller has left out is an error that names it, and no
// other attention than was meant.
func TestErrorsReachTheCaller(t *testing.T) {
	const rows, heads, dim = 8, 2, 8
	stream := tensor.NewHostStream("compute")
	defer stream.Close()
	c := cpu.New(stream)
	view := func(dim int) tensor.View { return tensor.New(tensor.F32, 1, rows, heads, dim) }
	scaled := attention.Softmax{Scale: 1}
	with := func(s attention.Scores) attention.Softmax { return attention.Softmax{Scale: 1, Scores: &s} }
	groups := func(r *ring.Ring, s *ring.Spec) { r.Comm, s.GatherHeads = idle{}, 1 }
	for _, x := range []struct {
		name, algorithm   string
		ranks             int
		kernel            attention.Kernel
		p                 attention.Softmax
		change            func(*ring.Ring, *ring.Spec)
		forward, backward string // the errors; "": none
	}{
		{"no fault", "ring", 1, failing{}, scaled, nil, "", ""},
		{"begin", "ring", 1, failing{"forward"}, scaled, nil, "boom", ""},
		{"block", "ring", 1, failing{"forward block"}, scaled, nil, "boom", ""},
		{"end", "ring", 1, failing{"forward end"}, scaled, nil, "boom", ""},
		{"begin", "ring", 1, failing{"backward"}, scaled, nil, "", "boom"},
		{"block", "ring", 1, failing{"backward block"}, scaled, nil, "", "boom"},
		{"end", "ring", 1, failing{"backward end"}, scaled, nil, "", "boom"},
		{"exchange", "ring", 2, failing{}, scaled, nil, "boom", "boom"},
		{"exchange", "allgather", 2, failing{}, scaled, nil, "boom", "boom"},
		{"exchange", "ulysses", 2, failing{}, scaled, nil, "boom", "boom"},
		{"all is set", "ring", 1, c, scaled, nil, "", ""},
		{"a scale of zero", "ring", 1, c, attention.Softmax{Scale: math.Copysign(0, -1)}, nil, "", ""},
		{"no scale", "ring", 1, c, attention.Softmax{}, nil, "Softmax.Scale", "Softmax.Scale"},
		{"no positions", "ring", 1, c, with(attention.Scores{Slopes: view(1)}), nil, "Spec.Positions", "Spec.Positions"},
		{"no arena", "ring", 1, c, scaled, func(r *ring.Ring, _ *ring.Spec) { r.Arena = nil }, "Arena", "Arena"},
		{"groups of heads", "allgather", 2, failing{}, scaled, groups, "", ""},
		{"groups of heads, no mover", "allgather", 2, failing{}, scaled,
			func(r *ring.Ring, s *ring.Spec) { groups(r, s); r.Mover = nil }, "Mover", "Mover"},
		{"groups of heads cannot set results of all", "allgather", 2, failing{}, with(attention.Scores{Max: view(1)}),
			groups, "largest scores", "largest scores"},
	} {
		spec := ring.Spec{
			Shape: partition.Shape{SeqQ: rows * x.ranks, SeqKV: rows * x.ranks, Size: x.ranks,
				Layout: partition.Contiguous{}, Mask: partition.Mask{Band: partition.Causal()}},
			Heads: heads, KVHeads: heads, Inner: x.ranks,
		}
		r := &ring.Ring{Kernel: x.kernel, Comm: broken{}, Mover: c, Stream: stream, Arena: tensor.NewHostArena(0)}
		if x.change != nil {
			x.change(r, &spec)
		}
		s := ring.Must(ring.New(x.algorithm, spec, 0))
		out := attention.Partial{O: view(dim), LSE: view(1)}
		grads := attention.Grads{DQ: view(dim), DK: view(dim), DV: view(dim)}
		for _, pass := range []struct {
			err  error
			want string
		}{
			{r.Forward(out, view(dim), view(dim), view(dim), s, x.p), x.forward},
			{r.Backward(grads, view(dim), view(dim), view(dim), view(dim), out, s, x.p), x.backward},
		} {
			if got := fmt.Sprint(pass.err); (pass.err == nil) != (pass.want == "") || !strings.Contains(got, pass.want) {
				t.Errorf("%s, %s over %d: %v, want %q", x.name, x.algorithm, x.ranks, got, pass.want)
			}
		}
	}
}
