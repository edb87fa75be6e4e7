package scan

import (
	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/tensor"
)

// Forward sets a.State, the states before the segments that x.Forward.States lists, and a.O. beside, unless nil, queues
// work that does not touch a: it runs while states travel.
func (s *Scan) Forward(a delta.Args, x *States, beside func()) error {
	err := s.hand(a, &x.Forward, a.State, beside, func(some delta.Args, maps View) error {
		some.Maps = maps
		return s.rule(s.Kernel.Summarize, some)
	})
	if err != nil {
		return err
	}
	a.Entered = x.Forward.States
	return s.rule(s.Kernel.Forward, a)
}

// Backward sets the gradients of the inputs, given a.State and a.DO.
func (s *Scan) Backward(a delta.Args, x *States, beside func()) error {
	defer s.Arena.Release(s.Arena.Mark())
	d := a.State.Shape()
	a.DState = s.Arena.Alloc(a.State.DType(), len(x.Backward.States)*a.Q.Len(tensor.Batch), d[1], d[2], d[3])
	err := s.hand(a, &x.Backward, a.DState, beside, func(some delta.Args, maps View) error {
		some.DMaps = maps
		return s.rule(s.Kernel.SummarizeBackward, some)
	})
	if err != nil {
		return err
	}
	a.Entered, a.Followed = x.Forward.States, x.Backward.States
	return s.rule(s.Kernel.Backward, a)
}

// rule calls the kernel. Traces show its work apart from the exchange of states.
func (s *Scan) rule(call func(delta.Args) error, a delta.Args) error {
	defer s.label("delta rule")()
	return call(a)
}

// hand sets states, given a function that computes the maps of some segments.
func (s *Scan) hand(a delta.Args, p *Pass, states View, beside func(),
	maps func(some delta.Args, maps View) error) error {
	defer s.Arena.Release(s.Arena.Mark())
	shape := states.Shape()
	own := s.Arena.Alloc(states.DType(), len(p.Maps)*a.Q.Len(tensor.Batch), shape[1], shape[2], shape[2]+shape[3])
	if len(p.Maps) > 0 {
		some := a
		some.Segments = make([]delta.Segment, len(p.Maps))
		for i, at := range p.Maps {
			some.Segments[i] = a.Segments[at]
		}
		if err := maps(some, own); err != nil {
			return err
		}
	}
	moving, err := s.Begin(states, own, p)
	if err != nil {
		return err
	}
	if beside != nil {
		beside()
	}
	return moving.Finish()
}
