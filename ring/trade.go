package ring

import (
	"errors"
	"fmt"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// Mover queues copies and sums of views of one shape and one element type, strided in any way, on a
// device's stream. The operations of kernels/cpu and internal/gpu are one.
type Mover interface {
	// Copy copies src to dst.
	Copy(dst, src View)
	// Add adds src to dst.
	Add(dst, src View)
}

var errNoMover = errors.New("ring: a schedule moves some heads of a tensor, and there is no Mover")

// traded is a tensor and what an exchange makes of it. Without an exchange both are the same.
type traded struct {
	x        *Exchange
	own, all View // [batch, own rows, all heads, dim] and [batch, x.Rows, x.Heads, dim]
}

// traded is v with room for what x makes of it.
func (r *Ring) traded(x *Exchange, v View) traded {
	if x == nil {
		return traded{own: v, all: v}
	}
	return traded{x, v, r.Arena.Alloc(v.DType(), v.Len(tensor.Batch), x.Rows, x.Heads, v.Len(tensor.Dim))}
}

// The labels of the trades of a pass, before its hops and behind them.
const (
	LabelThere = "heads for rows"
	LabelBack  = "rows for heads"
)

// there fills what is gathered of each tensor, in one exchange.
func (r *Ring) there(s *Schedule, list ...traded) error {
	return r.trade(s, LabelThere, list, func(t *traded) (from, to side) {
		return side{t.own, joined(t.x.Send, s.Rank)}, side{t.all, joined(t.x.Recv, s.Rank)}
	}, false)
}

// back is there in reverse. Boxes that add are added, in the order of the list.
func (r *Ring) back(s *Schedule, list ...traded) error {
	return r.trade(s, LabelBack, list, func(t *traded) (from, to side) {
		return side{t.all, joined(t.x.Recv, s.Rank)}, side{t.own, joined(t.x.Send, s.Rank)}
	}, true)
}

// side is one end of a trade: a tensor, and boxes of it.
type side struct {
	view  View
	boxes []HeadMove
}

// joined is boxes with neighbours made one, which saves copies. Those of the rank itself stay, since they are
// paired one by one.
func joined(moves []HeadMove, rank int) (out []HeadMove) {
	for _, m := range moves {
		if k := len(out) - 1; k >= 0 && m.Peer != rank && out[k].continues(m) {
			out[k].Box.Rows.Hi = m.Box.Rows.Hi
		} else {
			out = append(out, m)
		}
	}
	return out
}

// continues reports whether b is the rows behind those of m, and alike in all else.
func (m HeadMove) continues(b HeadMove) bool {
	return m.Peer == b.Peer && m.Adds == b.Adds && m.Box.Heads == b.Box.Heads && m.Box.Rows.Hi == b.Box.Rows.Lo
}

func (s *side) box(i int) View {
	b := s.boxes[i].Box
	return s.view.Slice(tensor.Seq, b.Rows.Lo, b.Rows.Hi).Slice(tensor.Heads, b.Heads.Lo, b.Heads.Hi)
}

// trade packs what is sent, exchanges it, and puts what comes in its place. Scratch is given back:
// by then the stream waits for the transfers.
func (r *Ring) trade(s *Schedule, label string, list []traded, sides func(*traded) (from, to side), add bool) error {
	if s.Q == nil && s.KV == nil {
		return nil
	}
	mark := r.Arena.Mark()
	defer r.Arena.Release(mark)
	r.Stream.Label(r.part(label))
	defer r.Stream.Label(r.Label)
	var send, recv []comm.Message
	var placed []func()
	for i := range list {
		if list[i].x == nil {
			continue
		}
		if r.Mover == nil {
			return errNoMover
		}
		from, to := sides(&list[i])
		out, in := r.parcels(&from, s.Rank, false), r.parcels(&to, s.Rank, add)
		for j, v := range out.boxes {
			if v != (View{}) {
				r.Mover.Copy(v, from.box(j))
			}
		}
		send, recv = append(send, out.messages...), append(recv, in.messages...)
		placed = append(placed, func() { r.place(&from, &to, in.boxes, s.Rank, add) })
	}
	pending, err := r.exchange(send, recv)
	if err != nil {
		return fmt.Errorf("%s: %w", label, err)
	}
	pending.Wait()
	for _, f := range placed {
		f()
	}
	return nil
}

// place puts boxes that have come where they belong, in the order of the list. A rank's own are copied
// from its other side, the first to the first.
func (r *Ring) place(from, to *side, came []View, rank int, add bool) {
	own := 0
	for i, m := range to.boxes {
		src := came[i]
		if m.Peer == rank {
			for from.boxes[own].Peer != rank {
				own++
			}
			src = from.box(own)
			own++
		}
		switch {
		case src == View{}: // received in its place
		case add && m.Adds:
			r.Mover.Add(to.box(i), src)
		default:
			r.Mover.Copy(to.box(i), src)
		}
	}
}

// parcels is the messages of one side, one a peer, and where each box lies in them. A box without a
// place of its own travels from or to the tensor itself.
type parcels struct {
	messages []comm.Message
	boxes    []View
}

// parcels makes room for what does not lie as it travels. A message is, for each batch element, the
// peer's boxes in the order of the list, each dense. It does not depend on where they are cut, so the
// two sides may join different ones.
func (r *Ring) parcels(s *side, rank int, add bool) parcels {
	p := parcels{boxes: make([]View, len(s.boxes))}
	seen := map[int]bool{rank: true}
	for i := range s.boxes {
		peer := s.boxes[i].Peer
		if seen[peer] {
			continue
		}
		seen[peer] = true
		view := s.box(i)
		if !s.whole(i, add) {
			view = r.pack(s, i, peer, p.boxes)
		}
		p.messages = append(p.messages, comm.Message{Peer: peer, View: view})
	}
	return p
}

// whole reports whether box i is all that travels with its peer, and lies as it travels.
func (s *side) whole(i int, add bool) bool {
	m := s.boxes[i]
	for _, b := range s.boxes[i+1:] {
		if b.Peer == m.Peer {
			return false
		}
	}
	return !(add && m.Adds) && s.box(i).IsDense()
}

// pack is scratch for a peer's boxes, from box i on; boxes gets the place of each in it.
func (r *Ring) pack(s *side, i, peer int, boxes []View) View {
	n := 0
	for _, m := range s.boxes[i:] {
		if m.Peer == peer {
			n += m.Box.Rows.Len() * m.Box.Heads.Len() * s.view.Len(tensor.Dim)
		}
	}
	all := r.Arena.Alloc(s.view.DType(), s.view.Len(tensor.Batch), 1, 1, n)
	at := all.Offset()
	for j := i; j < len(s.boxes); j++ {
		if s.boxes[j].Peer != peer {
			continue
		}
		shape := s.box(j).Shape()
		dim := int64(shape[tensor.Dim])
		row := int64(shape[tensor.Heads]) * dim
		boxes[j] = tensor.NewView(all.Memory(), all.DType(), at, shape, [4]int64{int64(n), row, dim, 1})
		at += int64(shape[tensor.Seq]) * row
	}
	return all
}
