package ring_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

var errBoom = errors.New("boom")

// failing is a kernel whose calls succeed, except the one that fail names.
type failing struct{ fail string }

func (f failing) at(call string) error {
	if call == f.fail {
		return errBoom
	}
	return nil
}

func (f failing) Forward(attention.View, attention.Partial, attention.View, attention.Softmax) (attention.ForwardPass, error) {
	return forwardPass{f}, f.at("forward")
}

func (f failing) Backward(_, _, _ attention.View, _ attention.Saved, _ attention.Softmax) (attention.BackwardPass, error) {
	return backwardPass{f}, f.at("backward")
}

type forwardPass struct{ f failing }

func (p forwardPass) Block(attention.Block) error { return p.f.at("forward block") }
func (p forwardPass) End() error                  { return p.f.at("forward end") }

type backwardPass struct{ f failing }

func (p backwardPass) Block(attention.GradBlock) error { return p.f.at("backward block") }
func (p backwardPass) End() error                      { return p.f.at("backward end") }
func (p backwardPass) Fold(attention.Fold) error       { return p.f.at("fold") }

// broken is a communicator that begins no exchange.
type broken struct{ comm.Communicator }

func (broken) Exchange([]comm.Message, []comm.Message) (comm.Pending, error) { return nil, errBoom }

// idle is a communicator whose exchanges move nothing.
type idle struct{ comm.Communicator }

func (idle) Exchange([]comm.Message, []comm.Message) (comm.Pending, error) { return moved{}, nil }

type moved struct{ comm.Pending }

func (moved) Wait() {}

// failsAt fails the call with this number of each pass, from 1.
type failsAt struct{ call int }

func (f failsAt) Forward(
	attention.View, attention.Partial, attention.View, attention.Softmax,
) (attention.ForwardPass, error) {
	return &countedForward{calls{f.call}}, nil
}

func (f failsAt) Backward(
	_, _, _ attention.View, _ attention.Saved, _ attention.Softmax,
) (attention.BackwardPass, error) {
	return &countedBackward{calls{f.call}}, nil
}

type calls struct{ left int }

func (c *calls) next() error {
	if c.left--; c.left == 0 {
		return errBoom
	}
	return nil
}

type countedForward struct{ calls }

func (p *countedForward) Block(attention.Block) error { return p.next() }
func (p *countedForward) End() error                  { return nil }

type countedBackward struct{ calls }

func (p *countedBackward) Block(attention.GradBlock) error { return p.next() }
func (p *countedBackward) End() error                      { return nil }
func (p *countedBackward) Fold(attention.Fold) error       { return nil }

// An error of any call of a hop ends the pass, also one of a call that is not the hop's last.
func TestErrorsOfLaterCallsReachTheCaller(t *testing.T) {
	const ranks, rows, heads, dim = 3, 8, 2, 8
	shape := partition.Shape{
		SeqQ: rows * ranks, SeqKV: rows * ranks, Size: ranks,
		Layout: partition.Contiguous{}, Mask: partition.Mask{Band: partition.Causal()},
	}
	s, err := ring.Make("gated", ring.Spec{Shape: shape, Heads: heads, KVHeads: heads}, ranks-1)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(slices.Collect(s.Forward[0].Calls)); n != ranks {
		t.Fatalf("the first hop has %d calls, want %d", n, ranks)
	}
	stream := tensor.NewHostStream("compute")
	defer stream.Close()
	view := func(dim int) tensor.View { return tensor.New(tensor.F32, 1, rows, heads, dim) }
	out := attention.Partial{O: view(dim), LSE: view(1)}
	grads := attention.Grads{DQ: view(dim), DK: view(dim), DV: view(dim)}
	for call := 1; call <= ranks+1; call++ {
		r := &ring.Ring{
			Kernel: failsAt{call}, Comm: idle{}, Mover: cpu.New(stream), Stream: stream, Arena: tensor.NewHostArena(0),
		}
		do, p := view(dim), attention.Softmax{Scale: 1}
		for pass, err := range map[string]error{
			"forward":  r.Forward(out, view(dim), view(dim), view(dim), s, p),
			"backward": r.Backward(grads, do, view(dim), view(dim), view(dim), out, s, p),
		} {
			if errors.Is(err, errBoom) != (call <= ranks) {
				t.Errorf("%s, call %d of %d fails: %v", pass, call, ranks, err)
			}
		}
	}
}

// The error of a call of the kernel or of an exchange is that of the pass.
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
			Shape: partition.Shape{SeqQ: rows * c.ranks, SeqKV: rows * c.ranks, Size: c.ranks, Layout: partition.Contiguous{}, Mask: partition.Mask{Band: partition.Causal()}},
			Heads: heads, KVHeads: heads, Inner: c.ranks,
		}
		s, err := ring.Make(c.algorithm, spec, 0)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		stream := tensor.NewHostStream("compute")
		r := &ring.Ring{Kernel: failing{c.fail}, Comm: broken{}, Mover: cpu.New(stream), Stream: stream, Arena: tensor.NewHostArena(0)}
		view := func(dim int) tensor.View { return tensor.New(tensor.F32, 1, rows, heads, dim) }
		out := attention.Partial{O: view(dim), LSE: view(1)}
		grads := attention.Grads{DQ: view(dim), DK: view(dim), DV: view(dim)}
		if err := r.Forward(out, view(dim), view(dim), view(dim), s, attention.Softmax{Scale: 1}); errors.Is(err, errBoom) != c.forward {
			t.Errorf("%s: forward %v", name, err)
		}
		if err := r.Backward(grads, view(dim), view(dim), view(dim), view(dim), out, s, attention.Softmax{Scale: 1}); errors.Is(err, errBoom) != c.backward {
			t.Errorf("%s: backward %v", name, err)
		}
		stream.Close()
	}
}

// A schedule that trades heads labels its trades, around its hops. Groups of one rank trade nothing.
func TestLabels(t *testing.T) {
	for _, c := range []struct {
		algorithm string
		inner     int
		trades    bool
	}{{"ring", 2, false}, {"ulysses", 2, true}, {"hierarchical", 2, true}, {"hierarchical", 1, false}} {
		spec := ring.Spec{Shape: partition.Shape{SeqQ: 16, SeqKV: 16, Size: 2, Layout: partition.Contiguous{}, Mask: partition.Mask{Band: partition.Causal()}}, Heads: 2, KVHeads: 2, Inner: c.inner}
		s, err := ring.Make(c.algorithm, spec, 0)
		if err != nil {
			t.Fatal(err)
		}
		labels := s.Labels(s.Forward, 1)
		if len(labels) < 1 || slices.Contains(labels, ring.LabelThere) != c.trades || (labels[0] == ring.LabelThere) != c.trades || (labels[len(labels)-1] == ring.LabelBack) != c.trades {
			t.Errorf("%s in groups of %d: labels %q", c.algorithm, c.inner, labels)
		}
	}
}
