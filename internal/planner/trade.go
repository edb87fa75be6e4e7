package planner

import (
	"github.com/cprun/cprun/ring"
)

// tensorOf is a tensor whose heads travel: the bytes of a row of one head of one sample, and its heads where all
// are.
type tensorOf struct {
	row   int64
	heads int
	x     *ring.Exchange
}

// q is a tensor that is traded as q is, of so many elements a row.
func (k *compiler) q(s *ring.Schedule, dim int, size int64) tensorOf {
	return tensorOf{int64(dim) * size, k.a.Heads, s.Q}
}

// kv is one that is traded as k and v are.
func (k *compiler) kv(s *ring.Schedule, dim int, size int64) tensorOf {
	return tensorOf{int64(dim) * size, k.a.KVHeads, s.KV}
}

// there queues the trade before the hops.
func (k *compiler) there(s *ring.Schedule) {
	in, sum := int64(k.a.DType.Size()), k.a.sum()
	list := []tensorOf{k.q(s, k.a.Dim, in)}
	if k.backward {
		list = append(list, k.q(s, k.a.DimV, in), k.q(s, k.a.DimV, in), k.q(s, 1, sum)) // dO, O, LSE
	}
	k.trade(s, ring.LabelThere, append(list, k.kv(s, k.a.Dim, in), k.kv(s, k.a.DimV, in)), false)
}

// back queues the one behind them.
func (k *compiler) back(s *ring.Schedule) {
	in, sum := int64(k.a.DType.Size()), k.a.sum()
	list := []tensorOf{k.q(s, k.a.DimV, in), k.q(s, 1, sum)} // O, LSE
	if k.backward {
		list = []tensorOf{k.q(s, k.a.Dim, sum), k.kv(s, k.a.Dim, sum), k.kv(s, k.a.DimV, sum)}
	}
	k.trade(s, ring.LabelBack, list, true)
}

// trade packs what is sent, exchanges it, and puts what comes in its place, as Ring.trade does.
func (k *compiler) trade(s *ring.Schedule, label string, list []tensorOf, back bool) {
	k.enter(label)
	messages := k.list()
	var placed []int64
	for _, t := range list {
		send, recv, sends, recvs := t.x.Send, t.x.Recv, t.heads, t.x.Heads
		if back {
			send, recv, sends, recvs = recv, send, recvs, sends
		}
		sent, received := map[int]int64{}, map[int]int64{}
		for i := range send {
			m := &send[i]
			if m.Peer == s.Rank {
				continue
			}
			bytes := k.box(m, t.row)
			if sent[m.Peer] += bytes; !k.whole(send, i, sends) {
				k.copy(2 * bytes)
			}
		}
		for i := range recv {
			m := &recv[i]
			bytes := k.box(m, t.row)
			if m.Peer != s.Rank {
				received[m.Peer] += bytes
			}
			switch {
			case back && m.Adds:
				placed = append(placed, 3*bytes)
			case m.Peer == s.Rank || !k.whole(recv, i, recvs):
				placed = append(placed, 2*bytes)
			}
		}
		messages = k.peers(messages, send, s.Rank, true, sent)
		messages = k.peers(messages, recv, s.Rank, false, received)
	}
	k.wait(k.exchange(messages))
	for _, bytes := range placed {
		k.copy(bytes)
	}
	k.leave()
}

// peers adds one message for each peer, in the order of the boxes.
func (k *compiler) peers(list []message, boxes []ring.HeadMove, rank int, sends bool, bytes map[int]int64) []message {
	for i := range boxes {
		peer := boxes[i].Peer
		if n, ok := bytes[peer]; ok && peer != rank {
			list = k.toward(list, peer, sends, n, 1)
			delete(bytes, peer)
		}
	}
	return list
}

func (k *compiler) box(m *ring.HeadMove, row int64) int64 {
	return int64(m.Box.Rows.Len()) * int64(m.Box.Heads.Len()) * int64(k.a.Batch) * row
}

// whole reports whether box i is all that travels with its peer, and lies as it travels: all heads of rows
// one behind another. Boxes that follow each other in rows count as one.
func (k *compiler) whole(boxes []ring.HeadMove, i, heads int) bool {
	m := &boxes[i]
	if m.Box.Heads.Len() != heads || k.a.Batch > 1 {
		return false
	}
	for j := range boxes {
		if j != i && boxes[j].Peer == m.Peer {
			return false
		}
	}
	return true
}
