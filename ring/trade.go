package ring

import (
	"errors"
	"fmt"
	"path"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Mover queues copies and sums of views of one shape and one element type, strided in any way, on a device's stream.
// The operations of kernels/cpu and kernels/gpu implement it.
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

// The labels of the exchanges before and after the hops of a pass.
const (
	labelScatterHeads = "heads for rows"
	labelGatherHeads  = "rows for heads"
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
		return p, fmt.Errorf("schedule %s of rank %d has no positions for slopes or a bias; set Spec.Positions",
			s.Algorithm, s.Rank)
	}
	scores := *p.Scores
	scores.Rows, p.Scores = s.Rows, &scores
	return p, nil
}

// forwardAdapted runs Forward with positions, and with heads exchanged for rows.
func (r *Ring) forwardAdapted(out attention.Partial, q, k, v View, s *Schedule, p attention.Softmax) error {
	p, err := r.positioned(s, p)
	if err != nil {
		return err
	}
	if s.Q == nil {
		return r.Forward(out, q, k, v, s, p)
	}
	defer r.Arena.Release(r.Arena.Mark())
	t := &headExchange{Ring: r, s: s}
	q, k, v = t.input(s.Q, q), t.input(s.KV, k), t.input(s.KV, v)
	out = attention.Partial{O: t.output(s.Q, out.O), LSE: t.output(s.Q, out.LSE)}
	p = t.scores(p, false)
	return t.run(func(s *Schedule) error { return r.Forward(out, q, k, v, s, p) })
}

// backwardAdapted does the same for Backward. It gathers q, K, V, dO, O and LSE again, since keeping them would take
// memory for each layer.
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
	t := &headExchange{Ring: r, s: s}
	q, do = t.input(s.Q, q), t.input(s.Q, do)
	out = attention.Partial{O: t.input(s.Q, out.O), LSE: t.input(s.Q, out.LSE)}
	k, v = t.input(s.KV, k), t.input(s.KV, v)
	g = attention.Grads{DQ: t.output(s.Q, g.DQ), DK: t.output(s.KV, g.DK), DV: t.output(s.KV, g.DV)}
	p = t.scores(p, true)
	return t.run(func(s *Schedule) error { return r.Backward(g, do, q, k, v, out, s, p) })
}

// A headExchange holds the tensors of a pass that the ranks scatter the heads of before it, and gather after it.
type headExchange struct {
	*Ring
	s               *Schedule
	scatter, gather []headTensor
}

// A headTensor is a tensor [batch, own rows, all heads, dim], and its exchanged form [batch, x.Rows, x.Heads, dim].
type headTensor struct {
	x        *Exchange
	own, all View
}

func (t *headExchange) alloc(x *Exchange, v View) headTensor {
	return headTensor{x, v, t.Arena.Alloc(v.DType(), v.Len(tensor.Batch), x.Rows, x.Heads, v.Len(tensor.Dim))}
}

// input returns the exchanged form of v, which the pass reads.
func (t *headExchange) input(x *Exchange, v View) View {
	t.scatter = append(t.scatter, t.alloc(x, v))
	return t.scatter[len(t.scatter)-1].all
}

// output returns the exchanged form of v, which the pass sets.
func (t *headExchange) output(x *Exchange, v View) View {
	t.gather = append(t.gather, t.alloc(x, v))
	return t.gather[len(t.gather)-1].all
}

func (t *headExchange) scores(p attention.Softmax, backward bool) attention.Softmax {
	if p.Scores == nil {
		return p
	}
	x, q := *p.Scores, t.s.Q
	if !x.Slopes.IsZero() {
		x.Slopes = x.Slopes.Slice(tensor.Heads, q.First, q.First+q.Heads)
	}
	if !x.Bias.IsZero() {
		x.Bias = t.input(q.like(x.Bias.Len(tensor.Heads)), x.Bias)
	}
	result, other := &x.Max, &x.DBias
	if backward {
		result, other = other, result
	}
	if *other = (View{}); !result.IsZero() {
		*result = t.output(q.like(result.Len(tensor.Heads)), *result)
	}
	p.Scores = &x
	return p
}

// run runs a pass between the exchanges of heads. With more ranks than heads some have none.
func (t *headExchange) run(pass func(*Schedule) error) error {
	hops := *t.s
	hops.Q, hops.KV = nil, nil
	err := t.exchange(labelScatterHeads, t.scatter)
	if err == nil && t.s.Q.Heads > 0 {
		err = pass(&hops)
	}
	if err != nil {
		return err
	}
	return t.exchange(labelGatherHeads, t.gather)
}

// exchange packs the messages, exchanges them, and unpacks the received ones. When it releases its scratch, the stream
// waits for the transfers.
func (t *headExchange) exchange(label string, list []headTensor) error {
	if t.Mover == nil {
		return errNoMover
	}
	defer t.Arena.Release(t.Arena.Mark())
	t.Stream.Label(path.Join(t.Label, label))
	defer t.Stream.Label(t.Label)
	rank := t.s.Rank
	var send, recv []comm.Message
	type unpacking struct {
		dst, src View
		adds     bool
	}
	var came []unpacking
	for _, v := range list {
		from, to, back := side{v.own, joined(v.x.Send, rank)}, side{v.all, joined(v.x.Recv, rank)}, label == labelGatherHeads
		if back {
			from, to = to, from
		}
		var places, sources []View
		send, places = t.parcels(send, from, rank, false)
		recv, sources = t.parcels(recv, to, rank, back)
		for i, v := range places {
			if !v.IsZero() {
				t.Mover.Copy(v, from.box(i))
			}
		}
		own := 0 // index of the rank's own boxes, which match in order
		for i, m := range to.boxes {
			src := sources[i]
			if m.Peer == rank {
				for from.boxes[own].Peer != rank {
					own++
				}
				src = from.box(own)
				own++
			}
			if !src.IsZero() { // else it arrives in place
				came = append(came, unpacking{to.box(i), src, back && m.Adds})
			}
		}
	}
	if len(send)+len(recv) > 0 {
		moving, err := t.Comm.Exchange(send, recv)
		if err != nil {
			return fmt.Errorf("%s: %w", label, err)
		}
		moving.Wait()
	}
	for _, x := range came {
		if x.adds {
			t.Mover.Add(x.dst, x.src)
		} else {
			t.Mover.Copy(x.dst, x.src)
		}
	}
	return nil
}

// A side of an exchange has a tensor, and boxes of it.
type side struct {
	view  View
	boxes []headMove
}

// joined joins boxes with neighbouring rows, which saves copies. Boxes of the rank itself come in pairs and stay.
func joined(moves []headMove, rank int) []headMove {
	out := make([]headMove, 0, len(moves))
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

// parcels appends one message for each peer: for each batch element the peer's boxes in order, each dense. The cuts
// between boxes do not matter, so both sides may join different ones. places has the place of each box in scratch. A
// dense box that is a whole message and not added has none: it travels from or to the tensor itself.
func (r *Ring) parcels(list []comm.Message, s side, rank int, adds bool) (messages []comm.Message, places []View) {
	places = make([]View, len(s.boxes))
	for i, m := range s.boxes {
		ofPeer := func(b headMove) bool { return b.Peer == m.Peer }
		if m.Peer == rank || slices.ContainsFunc(s.boxes[:i], ofPeer) {
			continue
		}
		boxes, n := 0, 0 // of the peer, and elements of them
		for _, b := range s.boxes[i:] {
			if ofPeer(b) {
				boxes, n = boxes+1, n+b.Box.Rows.Len()*b.Box.Heads.Len()*s.view.Len(tensor.Dim)
			}
		}
		view := s.box(i)
		if boxes > 1 || adds && m.Adds || !view.IsDense() {
			view = r.Arena.Alloc(s.view.DType(), s.view.Len(tensor.Batch), 1, 1, n)
			at := view.Offset()
			for j := i; j < len(s.boxes); j++ {
				if !ofPeer(s.boxes[j]) {
					continue
				}
				shape := s.box(j).Shape()
				row := int64(shape[tensor.Heads] * shape[tensor.Dim])
				places[j] = tensor.NewView(view.Memory(), view.DType(), at, shape,
					[4]int64{int64(n), row, int64(shape[tensor.Dim]), 1})
				at += int64(shape[tensor.Seq]) * row
			}
		}
		list = append(list, comm.Message{Peer: m.Peer, View: view})
	}
	return list, places
}
