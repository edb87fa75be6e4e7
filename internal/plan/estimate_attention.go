package plan

import (
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/planner"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// charged is attention as the model calls it: it adds up what the passes of a layer take.
type charged struct {
	layers           []layerTimes // of each layer
	compute, exposed float64
	calls            int
}

// layerTimes are those of the attention of a layer.
type layerTimes struct{ forward, backward passTime }

// passTime is the seconds of one pass of attention on the rank that takes longest: of its kernels, and of the transfers
// that they do not hide.
type passTime struct {
	compute, exposed float64
	calls            int
}

func (c *charged) add(p passTime) error {
	c.compute, c.exposed, c.calls = c.compute+p.compute, c.exposed+p.exposed, c.calls+p.calls
	return nil
}

// Forward implements model.Attention.
func (c *charged) Forward(layer int, _ attention.Partial, _, _, _ tensor.View) error {
	return c.add(c.layers[layer].forward)
}

// Backward implements model.Attention.
func (c *charged) Backward(layer int, _ attention.Grads, _, _, _, _ tensor.View, _ attention.Partial) error {
	return c.add(c.layers[layer].backward)
}

// sampledRanks is how many ranks' schedules are looked at: of more, as many that lie evenly among them. The ranks of a
// layout differ little, and the first and the last are among them.
const sampledRanks = 16

// attention finds the times of the passes of every layer.
func (s *step) attention() (*charged, error) {
	cfg := s.cfg
	byWindow := map[int]layerTimes{}
	for _, w := range windowsOf(cfg) {
		shape, err := s.shape(w.window)
		if err != nil {
			return nil, err
		}
		schedules, err := s.schedules(shape)
		if err != nil {
			return nil, err
		}
		byWindow[w.window] = layerTimes{s.slowest(schedules, false), s.slowest(schedules, true)}
	}
	c := &charged{}
	for l := range cfg.Model.NumHiddenLayers {
		c.layers = append(c.layers, byWindow[cfg.Model.Window(l)])
	}
	return c, nil
}

// shape is that of a sample, with its documents where they are known.
func (s *step) shape(window int) (partition.Shape, error) {
	if len(s.docs) == 0 {
		return shapeOf(s.cfg, window)
	}
	return packedShape(s.cfg, s.docs, window)
}

// schedules are those of the ranks that are looked at.
func (s *step) schedules(shape partition.Shape) ([]*ring.Schedule, error) {
	n := min(shape.Size, sampledRanks)
	schedule, err := schedulesOf(s.cfg, shape, n == shape.Size)
	if err != nil {
		return nil, err
	}
	all := make([]*ring.Schedule, n)
	for i, rank := range evenly(shape.Size, n) {
		if all[i], err = schedule(rank); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// slowest is the pass of the rank that takes longest. Where ranks share cores, those that have less leave theirs to
// the others, so that it is the mean.
func (s *step) slowest(schedules []*ring.Schedule, backward bool) passTime {
	var list []passTime
	mean := passTime{}
	for _, x := range schedules {
		p := s.pass(x, backward)
		list = append(list, p)
		mean.compute, mean.exposed, mean.calls = mean.compute+p.compute, mean.exposed+p.exposed, max(mean.calls, p.calls)
	}
	if n := float64(len(list)); s.shared {
		return passTime{mean.compute / n, mean.exposed / n, mean.calls}
	}
	return slices.MaxFunc(list, func(a, b passTime) int {
		if a.compute+a.exposed < b.compute+b.exposed {
			return -1
		}
		return 1
	})
}

// pass adds up the hops of a rank: each takes as long as its kernel calls, or as its transfers where those are longer.
func (s *step) pass(x *ring.Schedule, backward bool) (p passTime) {
	hops := x.Forward
	if backward {
		hops = x.Backward
	}
	cfg, bytes := s.cfg, wire(s.cfg)
	heads, kv := cfg.Model.NumAttentionHeads, cfg.Model.NumKeyValueHeads
	if x.Q != nil {
		heads = x.Q.Heads
	}
	if x.KV != nil {
		kv = x.KV.Heads
	}
	for i := range hops {
		h := &hops[i]
		compute, transfer := 0.0, 0.0
		for c := range h.Calls {
			compute += s.costs.Call(planner.Call{
				Backend: s.kernel, DType: backend.DType(cfg), Backward: backward, Deterministic: backward && cfg.Train.Deterministic,
				Batch: sequences(cfg), Heads: heads, KVHeads: kv, Dim: cfg.Model.HeadDim, DimV: cfg.Model.HeadDim,
				Tiles: c.Tiles, First: c.First, Last: c.Last,
			})
			p.calls++
		}
		transfer += s.moves(x.Rank, h.SendKV, bytes.KV*int64(kv)) + s.moves(x.Rank, h.SendGrad, bytes.DKV*int64(kv))
		for j := range h.Then {
			transfer += s.moves(x.Rank, h.Then[j].SendKV, bytes.KV*int64(kv))
		}
		for _, f := range h.Fold {
			compute += s.costs.Copy(3 * int64(f.Src.Hi-f.Src.Lo) * bytes.DKV * int64(kv))
			p.calls++
		}
		p.calls += len(h.SendKV) + len(h.SendGrad)
		p.compute += compute
		if s.shared {
			p.exposed += transfer
		} else {
			p.exposed += max(0, transfer-compute)
		}
	}
	p.exposed += s.trades(x, bytes, backward)
	return p
}

// moves is the time of the transfers of a hop, which go at once.
func (s *step) moves(rank int, list []ring.Move, row int64) float64 {
	t := 0.0
	for _, m := range list {
		if m.Peer == rank {
			continue // a copy, beside the others
		}
		t += s.costs.Exchange(rank, m.Peer, int64(m.Block.Hi-m.Block.Lo)*row, 1) // they share the rank's links
	}
	return t
}

// trades is the time in which heads go for rows and back, which nothing hides.
func (s *step) trades(x *ring.Schedule, bytes ring.HeadBytes, backward bool) float64 {
	if x.Q == nil {
		return 0
	}
	// There: q, k, v, or what has come back of them; back: the results.
	q, kv, back, grads := bytes.Q, bytes.KV, bytes.O+bytes.LSE, int64(0)
	if backward {
		q, kv, back, grads = bytes.Q+bytes.Q+bytes.O+bytes.LSE, bytes.KV, bytes.DQ, bytes.DKV
	}
	return s.boxes(x, x.Q.Send, q) + s.boxes(x, x.KV.Send, kv) + s.boxes(x, x.Q.Recv, back) + s.boxes(x, x.KV.Recv, grads)
}

// boxes is the time of an exchange of heads: as much goes to each host as its peers there are sent.
func (s *step) boxes(x *ring.Schedule, list []ring.HeadMove, row int64) float64 {
	if row == 0 {
		return 0
	}
	to, total, messages := -1, int64(0), 0
	for _, m := range list {
		if m.Peer == x.Rank {
			continue
		}
		if to < 0 || s.costs.Exchange(x.Rank, m.Peer, 1, 1) > s.costs.Exchange(x.Rank, to, 1, 1) {
			to = m.Peer
		}
		total += int64(m.Box.Rows.Len()) * int64(m.Box.Heads.Len()) * row
		messages++
	}
	if to < 0 {
		return 0
	}
	return s.costs.Exchange(x.Rank, to, total, messages)
}
