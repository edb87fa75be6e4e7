// Package rehearse runs the loops of attention without data: as a run does, but over views that
// have no memory and with transfers that move nothing. A plan counts with it what they take of the
// ring's arena, and a run has its kernel make ready what the steps will ask of it.
package rehearse

import (
	"context"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/hf"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// Layer runs the attention of a layer on a kernel, forward and backward, by a rank's schedule: for
// batch samples, of which the rank has so many tokens, or as many as the schedule speaks of where
// these are more. It returns the bytes that the ring takes of its arena at most.
func Layer(kernel attention.Kernel, m *hf.Config, s *ring.Schedule, batch, tokens int, dtype tensor.DType) (int64, error) {
	meter, data := tensor.NewMeter(), tensor.NewMeter()
	r := ring.Ring{Kernel: kernel, Comm: noTransfer{}, Mover: noMover{}, Stream: noStream{}, Arena: meter}
	tokens = max(tokens, s.Keys())
	q := data.Alloc(dtype, batch, tokens, m.NumAttentionHeads, m.HeadDim)
	k := data.Alloc(dtype, batch, tokens, m.NumKeyValueHeads, m.HeadDim)
	out := attention.Partial{O: q, LSE: data.Alloc(tensor.F32, batch, tokens, m.NumAttentionHeads, 1)}
	dq := data.Alloc(tensor.F32, batch, tokens, m.NumAttentionHeads, m.HeadDim)
	dk := data.Alloc(tensor.F32, batch, tokens, m.NumKeyValueHeads, m.HeadDim)
	p := attention.Softmax{Scale: m.SoftmaxScale()}
	if err := r.Forward(out, q, k, k, s, p); err != nil {
		return 0, err
	}
	err := r.Backward(attention.Grads{DQ: dq, DK: dk, DV: dk}, q, q, k, k, out, s, p)
	return meter.Peak(), err
}

// noStream, noTransfer and noMover do nothing.
type (
	noStream   struct{}
	noTransfer struct{}
	noMover    struct{}
)

func (noMover) Copy(_, _ tensor.View) {}
func (noMover) Add(_, _ tensor.View)  {}

func (noStream) Record() tensor.Event       { return nil }
func (noStream) Wait(tensor.Event)          {}
func (noStream) Label(string)               {}
func (noStream) Sync(context.Context) error { return nil }

func (noTransfer) Exchange(_, _ []comm.Message) (comm.Pending, error) { return noTransfer{}, nil }
func (noTransfer) Wait()                                              {}
func (noTransfer) Sync(context.Context) error                         { return nil }
