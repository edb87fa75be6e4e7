package planner

import (
	"math"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// clocks runs schedules as package ring does, a goroutine for each rank, with clocks in place of tensors. It
// shares no code with the planner: what goes from rank to rank goes through channels, where the n-th that is
// sent is the n-th that is received. Schedules that trade heads are not for it.
type clocks struct {
	a     Attention
	costs Costs
	wires [][]chan half // [from][to]: when a message was begun and carried, of each end
	back  [][]chan half
}

type flying struct {
	peer    int
	sends   bool
	own     half
	seconds float64
}

func clocked(s List, a Attention, backward bool, c Costs) float64 {
	w := &clocks{a: a, costs: c}
	for range s {
		var to, back []chan half
		for range s {
			to, back = append(to, make(chan half, 4096)), append(back, make(chan half, 4096))
		}
		w.wires, w.back = append(w.wires, to), append(w.back, back)
	}
	ends := make([]float64, len(s))
	var wg sync.WaitGroup
	for i := range s {
		wg.Go(func() { ends[i] = w.rank(s[i], backward) })
	}
	wg.Wait()
	most := 0.0
	for _, e := range ends {
		most = max(most, e)
	}
	return most
}

// begin is the messages of one exchange: with each peer all that goes to it, and all that comes from it.
func (w *clocks) begin(rank int, now float64, free *[2]float64, lists ...[]ring.Move) (all []flying) {
	for side := range 2 {
		var peers []int
		bytes, count := map[int]int64{}, map[int]int{}
		for i, moves := range lists {
			if i%2 != side {
				continue
			}
			size := int64(w.a.DType.Size())
			if i >= 2 {
				size = 4
			}
			for _, m := range moves {
				if count[m.Peer] == 0 {
					peers = append(peers, m.Peer)
				}
				count[m.Peer] += 2 * w.a.Batch
				bytes[m.Peer] += int64((m.Block.Hi-m.Block.Lo)*w.a.KVHeads*w.a.Batch*(w.a.Dim+w.a.DimV)) * size
			}
		}
		for _, p := range peers {
			f := flying{peer: p, sends: side == 0}
			wire := w.back[p][rank]
			if f.sends {
				f.seconds = w.costs.Exchange(rank, p, bytes[p], count[p])
				wire = w.wires[rank][p]
			} else {
				f.seconds = w.costs.Exchange(p, rank, bytes[p], count[p])
			}
			free[side] = max(free[side], now) + f.seconds
			f.own = half{now, free[side]}
			wire <- f.own
			all = append(all, f)
		}
	}
	return all
}

func (w *clocks) end(rank int, now float64, all []flying) float64 {
	for _, f := range all {
		other := half{}
		if f.sends {
			other = <-w.back[rank][f.peer]
		} else {
			other = <-w.wires[f.peer][rank]
		}
		now = max(now, f.own.end, other.end, max(f.own.begin, other.begin)+f.seconds)
	}
	return now
}

func (w *clocks) rank(s *ring.Schedule, backward bool) float64 {
	hops, now, free := s.Forward, 0.0, [2]float64{}
	if backward {
		hops = s.Backward
	}
	call := func(tiles []partition.Tile, first, last bool, grads ring.Block) {
		if len(tiles) > 0 {
			now += w.costs.Call(Call{Backward: backward, Batch: w.a.Batch, Heads: w.a.Heads, KVHeads: w.a.KVHeads, Dim: w.a.Dim, DimV: w.a.DimV, Tiles: tiles, First: first, Last: last})
		} else if backward {
			now += w.costs.Copy(int64((grads.Hi-grads.Lo)*w.a.KVHeads*w.a.Batch*(w.a.Dim+w.a.DimV)) * 4)
		}
	}
	for i := range hops {
		h := &hops[i]
		var gates [][]flying
		for j := range h.Then {
			gates = append(gates, w.begin(s.Rank, now, &free, h.Then[j].SendKV, h.Then[j].RecvKV))
		}
		lists := [][]ring.Move{h.SendKV, h.RecvKV}
		if backward {
			lists = append(lists, h.SendGrad, h.RecvGrad)
		}
		rest := w.begin(s.Rank, now, &free, lists...)
		call(h.Tiles, h.First, h.Last, h.Grads)
		for j := range h.Then {
			now = w.end(s.Rank, now, gates[j])
			call(h.Then[j].Tiles, h.Then[j].First, h.Then[j].Last, h.Then[j].Grads)
		}
		now = w.end(s.Rank, now, rest)
		for _, f := range h.Fold {
			now += w.costs.Copy(int64((f.Src.Hi-f.Src.Lo)*w.a.KVHeads*w.a.Batch*(w.a.Dim+w.a.DimV)) * 4 * 3)
		}
	}
	return now
}

func TestPassIsWhatClocksShow(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for n := 0; n < 120; {
		name, s, a, c := sampleOf(t, rng)
		if s[0].Q != nil || s[0].GatherHeads > 0 {
			continue
		}
		n++
		c.queued = 0
		for _, backward := range []bool{false, true} {
			want, got := clocked(s, a, backward, c), run(t, s, a, backward, c).Seconds
			if math.Abs(want-got) > 1e-9*want {
				t.Fatalf("%s, backward %t: %g seconds, by clocks %g", name, backward, got, want)
			}
		}
	}
}
