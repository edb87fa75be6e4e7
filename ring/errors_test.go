package ring_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

var errBoom = errors.New("boom")

// A failing kernel fails in the call that fail names.
type failing struct{ fail string }

func (f failing) at(call string) error {
	if call == f.fail {
		return errBoom
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

// A broken communicator begins no exchange.
type broken struct{ comm.Communicator }

func (broken) Exchange([]comm.Message, []comm.Message) (comm.Pending, error) { return nil, errBoom }

// A pass returns the error of its kernel call or exchange.
func TestErrorsReachTheCaller(t *testing.T) {
	for _, c := range []struct {
		fail, algorithm   string
		ranks             int
		forward, backward bool // which pass fails
	}{
		{"", "ring", 1, false, false},
		{"forward", "ring", 1, true, false},
		{"forward block", "ring", 1, true, false},
		{"forward end", "ring", 1, true, false},
		{"backward", "ring", 1, false, true},
		{"backward block", "ring", 1, false, true},
		{"backward end", "ring", 1, false, true},
		{"exchange", "ring", 2, true, true},
		{"exchange", "allgather", 2, true, true},
		{"exchange", "ulysses", 2, true, true},
	} {
		name := fmt.Sprintf("%s, %s over %d", c.fail, c.algorithm, c.ranks)
		const rows, heads, dim = 8, 2, 8
		spec := ring.Spec{
			Shape: partition.Shape{SeqQ: rows * c.ranks, SeqKV: rows * c.ranks, Size: c.ranks,
				Layout: partition.Contiguous{}, Mask: partition.Mask{Band: partition.Causal()}},
			Heads: heads, KVHeads: heads, Inner: c.ranks,
		}
		s, err := ring.Make(c.algorithm, spec, 0)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		stream := tensor.NewHostStream("compute")
		r := &ring.Ring{Kernel: failing{c.fail}, Comm: broken{}, Mover: cpu.New(stream), Stream: stream,
			Arena: tensor.NewHostArena(0)}
		view := func(dim int) tensor.View { return tensor.New(tensor.F32, 1, rows, heads, dim) }
		out := attention.Partial{O: view(dim), LSE: view(1)}
		grads := attention.Grads{DQ: view(dim), DK: view(dim), DV: view(dim)}
		if err := r.Forward(out, view(dim), view(dim), view(dim), s, attention.Softmax{Scale: 1}); errors.Is(err,
			errBoom) != c.forward {
			t.Errorf("%s: forward %v", name, err)
		}
		if err := r.Backward(grads, view(dim), view(dim), view(dim), view(dim), out, s,
			attention.Softmax{Scale: 1}); errors.Is(err, errBoom) != c.backward {
			t.Errorf("%s: backward %v", name, err)
		}
		stream.Close()
	}
}
