package ring

import (
	"fmt"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// heads is heads of keys that are computed together, with the heads of queries that read them.
type heads struct{ q, kv partition.Range }

// groups are the groups of heads of a pass: one, unless the schedule says how many heads of keys are
// gathered at a time.
func (s *Schedule) groups(qHeads, kvHeads int) []heads {
	n := s.GatherHeads
	if n <= 0 || n >= kvHeads {
		return []heads{{partition.Range{Hi: qHeads}, partition.Range{Hi: kvHeads}}}
	}
	var list []heads
	for lo := 0; lo < kvHeads; lo += n {
		hi, each := min(lo+n, kvHeads), qHeads/kvHeads
		list = append(list, heads{partition.Range{Lo: lo * each, Hi: hi * each}, partition.Range{Lo: lo, Hi: hi}})
	}
	return list
}

// Labels returns the labels of a pass in order: of its trades of heads, and of its hops, for each group of
// heads. kvHeads is how many heads of keys the rank itself has.
func (s *Schedule) Labels(hops []Hop, kvHeads int) (list []string) {
	if s.Q != nil {
		list = append(list, LabelThere)
	}
	for _, label := range labels(s.groups(kvHeads, kvHeads)) {
		for i := range hops {
			list = append(list, label+hops[i].Label)
		}
	}
	if s.Q != nil {
		list = append(list, LabelBack)
	}
	return list
}

// labels is what the labels of each group's hops begin with.
func labels(groups []heads) []string {
	list := make([]string, len(groups))
	for g, h := range groups {
		switch {
		case len(groups) == 1:
		case h.kv.Len() == 1:
			list[g] = fmt.Sprintf("KV head %d/", h.kv.Lo)
		default:
			list[g] = fmt.Sprintf("KV heads %d to %d/", h.kv.Lo, h.kv.Hi-1)
		}
	}
	return list
}

// of is some heads of a tensor.
func of(v View, h partition.Range) View { return v.Slice(tensor.Heads, h.Lo, h.Hi) }

func (h heads) partial(p attention.Partial) attention.Partial {
	return attention.Partial{O: of(p.O, h.q), LSE: of(p.LSE, h.q)}
}

func (h heads) grads(g attention.Grads) attention.Grads {
	return attention.Grads{DQ: of(g.DQ, h.q), DK: of(g.DK, h.kv), DV: of(g.DV, h.kv)}
}

// keys is the keys and values of a pass, group by group. Two sets of buffers take turns, so that the
// transfers of a group's first hop run beside the calls of the group before.
type keys struct {
	ring   *Ring
	rank   int
	hops   []Hop
	own    kv
	groups []heads
	labels []string
	at     *positions // of the rows of blocks
	sets   [][]kv
	next   flight // of the first hop of the group that comes next

	late  comm.Pending     // what the hop before has left on its way; nil: nothing
	gates []attention.Gate // of its rows
}

// keys makes room, and begins the transfers of the first group's first hop.
func (r *Ring) keys(s *Schedule, hops []Hop, q, k, v View, at *positions) (*keys, error) {
	m := &keys{ring: r, rank: s.Rank, hops: hops, own: kv{k, v}, at: at, groups: s.groups(q.Len(tensor.Heads), k.Len(tensor.Heads))}
	m.labels = labels(m.groups)
	if len(m.groups) > 1 && r.Mover == nil {
		return m, errNoMover
	}
	if len(m.groups) == 1 {
		m.sets = [][]kv{r.buffers(m.own, s.KVRows)}
	} else {
		for range 2 {
			first := m.groups[0].kv // the largest
			own := kv{r.like(of(k, first), k.Len(tensor.Seq)), r.like(of(v, first), v.Len(tensor.Seq))}
			m.sets = append(m.sets, r.buffers(own, s.KVRows))
		}
	}
	return m, m.prefetch(0)
}

// prefetch begins the transfers of a group's first hop. Some heads of the own rows do not lie densely,
// and are copied for them.
func (m *keys) prefetch(g int) (err error) {
	if g == len(m.groups) || len(m.hops) == 0 {
		return nil
	}
	bufs := m.bufs(g)
	if len(m.groups) > 1 && m.own.k.Len(tensor.Seq) > 0 {
		m.ring.Mover.Copy(bufs[0].k, of(m.own.k, m.groups[g].kv))
		m.ring.Mover.Copy(bufs[0].v, of(m.own.v, m.groups[g].kv))
	}
	m.next, err = m.transfers(&m.hops[0], bufs, nil)
	return err
}

// bufs is a group's buffers.
func (m *keys) bufs(g int) []kv {
	set, n := m.sets[g%len(m.sets)], m.groups[g].kv.Len()
	out := make([]kv, len(set))
	for i, b := range set {
		out[i] = kv{narrow(b.k, n), narrow(b.v, n)}
	}
	return out
}

// narrow is dense workspace with fewer heads.
func narrow(v View, heads int) View {
	shape := v.Shape()
	if shape[tensor.Heads] == heads {
		return v
	}
	shape[tensor.Heads] = heads
	return tensor.Dense(v.Memory(), v.DType(), v.Offset(), shape)
}

// begin begins the transfers of hop i of a group, or takes those that have begun. A group's first hop
// moves keys and values alone.
func (m *keys) begin(i int, bufs, grads []kv) (flight, error) {
	if i == 0 {
		return m.next, nil
	}
	return m.transfers(&m.hops[i], bufs, grads)
}

// flight is the transfers of a hop that have begun.
type flight struct {
	gates []comm.Pending // of its further calls
	rest  comm.Pending
}

// transfers begins those of a hop: of its further calls in order, then its own, and copies beside them.
func (m *keys) transfers(hop *Hop, bufs, grads []kv) (f flight, err error) {
	r := m.ring
	f.gates = make([]comm.Pending, len(hop.Then))
	for i := range hop.Then {
		if f.gates[i], err = r.exchange(m.messages(nil, hop.Then[i].SendKV, bufs), m.messages(nil, hop.Then[i].RecvKV, bufs)); err != nil {
			return f, err
		}
	}
	f.rest, err = r.exchange(m.messages(m.messages(nil, hop.SendKV, bufs), hop.SendGrad, grads),
		m.messages(m.messages(nil, hop.RecvKV, bufs), hop.RecvGrad, grads))
	if err == nil {
		err = m.copies(hop.SendKV, hop.RecvKV, bufs)
	}
	if err == nil {
		err = m.copies(hop.SendGrad, hop.RecvGrad, grads)
	}
	return f, err
}

// copies makes the moves of the rank to itself: the first that it sends is the first that it receives.
func (m *keys) copies(send, recv []Move, bufs []kv) error {
	j := 0
	for i := range send {
		if send[i].Peer != m.rank {
			continue
		}
		for recv[j].Peer != m.rank {
			j++
		}
		if m.ring.Mover == nil {
			return errNoMover
		}
		src, dst := send[i].Block.of(bufs), recv[j].Block.of(bufs)
		m.ring.Mover.Copy(dst.k, src.k)
		m.ring.Mover.Copy(dst.v, src.v)
		j++
	}
	return nil
}
