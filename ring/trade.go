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
	return r.trade(s, p, func(t *headExchange) {
		q, k, v := t.input(t.Q, q), t.input(t.KV, k), t.input(t.KV, v)
		out := attention.Partial{O: t.output(t.Q, out.O), LSE: t.output(t.Q, out.LSE)}
		p := t.scores(p, false)
		t.pass = func(hops *Schedule) error { return r.Forward(out, q, k, v, hops, p) }
	})
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
	return r.trade(s, p, func(t *headExchange) {
		q, do := t.input(t.Q, q), t.input(t.Q, do)
		out := attention.Partial{O: t.input(t.Q, out.O), LSE: t.input(t.Q, out.LSE)}
		k, v := t.input(t.KV, k), t.input(t.KV, v)
		g := attention.Grads{DQ: t.output(t.Q, g.DQ), DK: t.output(t.KV, g.DK), DV: t.output(t.KV, g.DV)}
		p := t.scores(p, true)
		t.pass = func(hops *Schedule) error { return r.Backward(g, do, q, k, v, out, hops, p) }
	})
}

// trade runs a pass for one group of heads after another. While kernels compute with a group, the heads of the next
// come and the results of the one before leave. bind sets the pass of a group. With more ranks than heads some ranks
// have none.
func (r *Ring) trade(s *Schedule, p attention.Softmax, bind func(*headExchange)) error {
	if r.Mover == nil {
		return errNoMover
	}
	defer r.Arena.Release(r.Arena.Mark())
	groups := s.Trades
	if x := p.Scores; x != nil && !x.Bias.IsZero() && x.Bias.Len(tensor.Heads) == 1 {
		groups = []Trade{s.whole()} // all heads add to the gradient of the bias that they share
	}
	var sets [2]scratch // of groups with even and odd numbers
	scatter := func(g int) (*headExchange, error) {
		set := &sets[g%2]
		set.used = 0
		t := &headExchange{Ring: r, Trade: &groups[g], scratch: set, rank: s.Rank}
		bind(t)
		return t, t.begin(labelScatterHeads, t.scatter)
	}
	var before *headExchange
	next, err := scatter(0)
	for g := 0; g < len(groups) && err == nil; g++ {
		t := next
		t.end()
		if g+1 < len(groups) {
			next, err = scatter(g + 1)
		}
		if err == nil && t.Q.Heads > 0 {
			hops := *s
			hops.Q, hops.KV, hops.Forward, hops.Backward = nil, nil, t.Trade.Forward, t.Trade.Backward
			err = t.pass(&hops)
		}
		if before != nil {
			before.end()
		}
		if err == nil {
			err = t.begin(labelGatherHeads, t.gather)
		}
		before = t
	}
	if err == nil {
		before.end()
	}
	return err
}

// A headExchange holds the tensors of a pass whose heads the ranks scatter before it, and gather after it.
type headExchange struct {
	*Ring
	*Trade
	*scratch
	rank            int
	scatter, gather []headTensor
	pass            func(*Schedule) error

	// Of the exchange on its way.
	name   string
	moving comm.Pending
	came   []unpacking
}

// A headTensor is a tensor [batch, own rows, all heads, dim], and its exchanged form [batch, x.Rows, x.Heads, dim].
type headTensor struct {
	x        *Exchange
	own, all View
}

// An unpacking moves what came to its place.
type unpacking struct {
	dst, src View
	adds     bool
}

// scratch is memory that groups use in turns. They ask for the same views in the same order.
type scratch struct {
	views []View
	used  int
}

func (t *headExchange) alloc(dtype tensor.DType, batch, rows, heads, dim int) View {
	if t.used == len(t.views) {
		t.views = append(t.views, t.Arena.Alloc(dtype, batch, rows, heads, dim))
	}
	t.used++
	return t.views[t.used-1]
}

func (t *headExchange) exchanged(x *Exchange, v View) headTensor {
	return headTensor{x, v, t.alloc(v.DType(), v.Len(tensor.Batch), x.Rows, x.Heads, v.Len(tensor.Dim))}
}

// input returns the exchanged form of v, which the pass reads.
func (t *headExchange) input(x *Exchange, v View) View {
	t.scatter = append(t.scatter, t.exchanged(x, v))
	return t.scatter[len(t.scatter)-1].all
}

// output returns the exchanged form of v, which the pass sets.
func (t *headExchange) output(x *Exchange, v View) View {
	t.gather = append(t.gather, t.exchanged(x, v))
	return t.gather[len(t.gather)-1].all
}

func (t *headExchange) scores(p attention.Softmax, backward bool) attention.Softmax {
	if p.Scores == nil {
		return p
	}
	x, q := *p.Scores, t.Q
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

// begin packs the messages and begins to exchange them.
func (t *headExchange) begin(label string, list []headTensor) error {
	t.name = path.Join(t.Ring.Label, t.Trade.Label, label)
	t.Stream.Label(t.name)
	var send, recv []comm.Message
	t.moving, t.came = nothing{}, t.came[:0]
	for _, v := range list {
		from, to := side{v.own, joined(v.x.Send, t.rank)}, side{v.all, joined(v.x.Recv, t.rank)}
		back := label == labelGatherHeads
		if back {
			from, to = to, from
		}
		var places, sources []View
		send, places = t.parcels(send, from, false)
		recv, sources = t.parcels(recv, to, back)
		for i, v := range places {
			if !v.IsZero() {
				t.Mover.Copy(v, from.box(i))
			}
		}
		own := 0 // index of the rank's own boxes, which match in order
		for i, m := range to.boxes {
			src := sources[i]
			if m.Peer == t.rank {
				for from.boxes[own].Peer != t.rank {
					own++
				}
				src = from.box(own)
				own++
			}
			if !src.IsZero() { // else it arrives in place
				t.came = append(t.came, unpacking{to.box(i), src, back && m.Adds})
			}
		}
	}
	if len(send)+len(recv) == 0 {
		return nil
	}
	var err error
	if t.moving, err = t.Comm.Exchange(send, recv); err != nil {
		return fmt.Errorf("%s: %w", label, err)
	}
	return nil
}

// end waits for the messages on the stream, and unpacks them.
func (t *headExchange) end() {
	if t.Trade.Label != "" { // there was a pass since they began
		t.Stream.Label(t.name + " arrive")
	}
	t.moving.Wait()
	for _, x := range t.came {
		if x.adds {
			t.Mover.Add(x.dst, x.src)
		} else {
			t.Mover.Copy(x.dst, x.src)
		}
	}
	t.Stream.Label(t.Ring.Label)
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
func (t *headExchange) parcels(list []comm.Message, s side, adds bool) (messages []comm.Message, places []View) {
	places = make([]View, len(s.boxes))
	for i, m := range s.boxes {
		ofPeer := func(b headMove) bool { return b.Peer == m.Peer }
		if m.Peer == t.rank || slices.ContainsFunc(s.boxes[:i], ofPeer) {
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
			view = t.alloc(s.view.DType(), s.view.Len(tensor.Batch), 1, 1, n)
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
