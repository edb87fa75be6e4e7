package ring

import (
	"errors"
	"fmt"
	"path"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Mover queues copies and sums of views of one shape and one element type, strided in any way, on a device's stream.
// The operations of kernels/cpu and internal/gpu implement it.
type Mover interface {
	// Copy copies src to dst.
	Copy(dst, src View)
	// Add adds src to dst.
	Add(dst, src View)
}

var (
	errNoArena = errors.New("ring: Ring.Arena is nil; set it to tensor.NewHostArena(0), or to an arena of the device")
	errNoMover = errors.New("ring: the schedule copies rows or heads; set Ring.Mover")
)

// The labels of the exchanges of heads, before and after the hops of a pass.
const (
	labelThere = "heads for rows"
	labelBack  = "rows for heads"
)

// plain reports whether the hops run on the rank's own tensors, with no positions to fill in.
func (r *Ring) plain(s *Schedule, p attention.Softmax) bool {
	return r.Arena != nil && s.Q == nil && (!p.Scores.Positions() || p.Scores.Rows != nil)
}

// positioned returns p with the positions of the queries that the hops work on.
func (r *Ring) positioned(s *Schedule, p attention.Softmax) (attention.Softmax, error) {
	switch {
	case r.Arena == nil:
		return p, errNoArena
	case !p.Scores.Positions():
		return p, nil
	case s.Rows == nil:
		return p, fmt.Errorf("schedule %s of rank %d has no positions for slopes or a bias; set Spec.Positions", s.Algorithm, s.Rank)
	}
	scores := *p.Scores
	scores.Rows, p.Scores = s.Rows, &scores
	return p, nil
}

// forwardAdapted is Forward with positions, and with heads exchanged for rows.
func (r *Ring) forwardAdapted(out attention.Partial, q, k, v View, s *Schedule, p attention.Softmax) error {
	p, err := r.positioned(s, p)
	if err != nil {
		return err
	}
	if s.Q == nil {
		return r.Forward(out, q, k, v, s, p)
	}
	defer r.Arena.Release(r.Arena.Mark())
	tq, tk, tv := r.trade(s.Q, q), r.trade(s.KV, k), r.trade(s.KV, v)
	o, lse := r.trade(s.Q, out.O), r.trade(s.Q, out.LSE)
	p, bias, _, largest := r.tradeScores(s, p, false)
	err = r.exchangeHeads(s, labelThere, tq, tk, tv, bias)
	if err == nil && s.Q.Heads > 0 { // with more ranks than heads some have none
		err = r.Forward(attention.Partial{O: o.all, LSE: lse.all}, tq.all, tk.all, tv.all, s.gathered(), p)
	}
	if err != nil {
		return err
	}
	return r.exchangeHeads(s, labelBack, o, lse, largest)
}

// backwardAdapted is the same for Backward. It gathers q, K, V, dO, O and LSE again: to keep them takes memory for
// each layer.
func (r *Ring) backwardAdapted(
	g attention.Grads, do, q, k, v View, out attention.Partial, s *Schedule, p attention.Softmax,
) error {
	p, err := r.positioned(s, p)
	if err != nil {
		return err
	}
	if s.Q == nil {
		return r.Backward(g, do, q, k, v, out, s, p)
	}
	defer r.Arena.Release(r.Arena.Mark())
	tq, tdo, o, lse := r.trade(s.Q, q), r.trade(s.Q, do), r.trade(s.Q, out.O), r.trade(s.Q, out.LSE)
	tk, tv := r.trade(s.KV, k), r.trade(s.KV, v)
	dq, dk, dv := r.trade(s.Q, g.DQ), r.trade(s.KV, g.DK), r.trade(s.KV, g.DV)
	p, bias, dbias, _ := r.tradeScores(s, p, true)
	err = r.exchangeHeads(s, labelThere, tq, tdo, o, lse, tk, tv, bias)
	if err == nil && s.Q.Heads > 0 {
		err = r.Backward(attention.Grads{DQ: dq.all, DK: dk.all, DV: dv.all}, tdo.all, tq.all, tk.all, tv.all,
			attention.Partial{O: o.all, LSE: lse.all}, s.gathered(), p)
	}
	if err != nil {
		return err
	}
	return r.exchangeHeads(s, labelBack, dq, dk, dv, dbias)
}

// gathered returns the schedule of the hops alone.
func (s *Schedule) gathered() *Schedule {
	g := *s
	g.Q, g.KV = nil, nil
	return &g
}

// tradeScores returns p for the heads that the rank computes, and what it trades of p: the bias, and the gradient of that
// in a backward pass or the largest scores in a forward pass.
func (r *Ring) tradeScores(s *Schedule, p attention.Softmax, backward bool) (_ attention.Softmax, bias, dbias, largest trade) {
	if p.Scores == nil {
		return p, bias, dbias, largest
	}
	x := *p.Scores
	if backward {
		x.Max = View{}
	} else {
		x.DBias = View{}
	}
	if !x.Slopes.IsZero() {
		x.Slopes = x.Slopes.Slice(tensor.Heads, s.Q.First, s.Q.First+s.Q.Heads)
	}
	of := func(v *View) (t trade) {
		if !v.IsZero() {
			t = r.trade(s.Q.like(v.Len(tensor.Heads)), *v)
			*v = t.all
		}
		return t
	}
	bias, dbias, largest = of(&x.Bias), of(&x.DBias), of(&x.Max)
	p.Scores = &x
	return p, bias, dbias, largest
}

// A trade is a tensor before and after an exchange of heads: [batch, own rows, all heads, dim] and
// [batch, x.Rows, x.Heads, dim].
type trade struct {
	x        *Exchange // nil: no tensor
	own, all View
}

func (r *Ring) trade(x *Exchange, v View) trade {
	return trade{x, v, r.Arena.Alloc(v.DType(), v.Len(tensor.Batch), x.Rows, x.Heads, v.Len(tensor.Dim))}
}

// exchangeHeads sets all of each tensor, or own with labelBack: it packs what is sent, exchanges it, and puts what came in
// its place. When it releases its scratch, the stream waits for the transfers.
func (r *Ring) exchangeHeads(s *Schedule, label string, list ...trade) error {
	if r.Mover == nil {
		return errNoMover
	}
	defer r.Arena.Release(r.Arena.Mark())
	r.Stream.Label(path.Join(r.Label, label))
	defer r.Stream.Label(r.Label)
	var send, recv []comm.Message
	type unpacking struct {
		dst, src View
		adds     bool
	}
	var came []unpacking
	for _, t := range list {
		if t.x == nil {
			continue
		}
		from, to, back := side{t.own, joined(t.x.Send, s.Rank)}, side{t.all, joined(t.x.Recv, s.Rank)}, label == labelBack
		if back {
			from, to = to, from
		}
		out, places := r.parcels(from, s.Rank, false)
		in, sources := r.parcels(to, s.Rank, back)
		for i, v := range places {
			if !v.IsZero() {
				r.Mover.Copy(v, from.box(i))
			}
		}
		own := 0 // boxes of the rank itself: the first comes from the first of the other side
		for i, m := range to.boxes {
			src := sources[i]
			if m.Peer == s.Rank {
				for from.boxes[own].Peer != s.Rank {
					own++
				}
				src = from.box(own)
				own++
			}
			if !src.IsZero() { // else it arrives in its place
				came = append(came, unpacking{to.box(i), src, back && m.Adds})
			}
		}
		send, recv = append(send, out...), append(recv, in...)
	}
	if len(send)+len(recv) > 0 {
		moving, err := r.Comm.Exchange(send, recv)
		if err != nil {
			return fmt.Errorf("%s: %w", label, err)
		}
		moving.Wait()
	}
	for _, x := range came {
		if x.adds {
			r.Mover.Add(x.dst, x.src)
		} else {
			r.Mover.Copy(x.dst, x.src)
		}
	}
	return nil
}

// side is one end of an exchange: a tensor, and boxes of it.
type side struct {
	view  View
	boxes []HeadMove
}

// joined joins boxes with neighbouring rows, which saves copies. Those of the rank itself stay: they come in pairs.
func joined(moves []HeadMove, rank int) (out []HeadMove) {
	for _, m := range moves {
		if k := len(out) - 1; k >= 0 && m.Peer != rank {
			next := out[k]
			next.Box.Rows = partition.Range{Lo: next.Box.Rows.Hi, Hi: m.Box.Rows.Hi}
			if next == m {
				out[k].Box.Rows.Hi = m.Box.Rows.Hi
				continue
			}
		}
		out = append(out, m)
	}
	return out
}

func (s side) box(i int) View {
	b := s.boxes[i].Box
	return s.view.Slice(tensor.Seq, b.Rows.Lo, b.Rows.Hi).Slice(tensor.Heads, b.Heads.Lo, b.Heads.Hi)
}

// parcels returns one message for each peer: for each batch element the peer's boxes in order, each dense. That does not
// depend on where boxes are cut, so both sides may join different ones. places are where boxes lie in scratch. A box
// that is all of its message, dense and not added, travels from or to the tensor itself and has none.
func (r *Ring) parcels(s side, rank int, adds bool) (messages []comm.Message, places []View) {
	places = make([]View, len(s.boxes))
	known := map[int]bool{rank: true}
	for i, m := range s.boxes {
		if known[m.Peer] {
			continue
		}
		known[m.Peer] = true
		var list []int // the peer's boxes
		n := 0         // elements of them
		for j := i; j < len(s.boxes); j++ {
			if b := s.boxes[j]; b.Peer == m.Peer {
				list, n = append(list, j), n+b.Box.Rows.Len()*b.Box.Heads.Len()*s.view.Len(tensor.Dim)
			}
		}
		view := s.box(i)
		if len(list) > 1 || adds && m.Adds || !view.IsDense() {
			view = r.Arena.Alloc(s.view.DType(), s.view.Len(tensor.Batch), 1, 1, n)
			at := view.Offset()
			for _, j := range list {
				shape := s.box(j).Shape()
				row := int64(shape[tensor.Heads] * shape[tensor.Dim])
				places[j] = tensor.NewView(view.Memory(), view.DType(), at, shape,
					[4]int64{int64(n), row, int64(shape[tensor.Dim]), 1})
				at += int64(shape[tensor.Seq]) * row
			}
		}
		messages = append(messages, comm.Message{Peer: m.Peer, View: view})
	}
	return messages, places
}
