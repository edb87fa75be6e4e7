package planner

import (
	"context"
	"math"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// clocks runs the ring with a goroutine for each rank, whose devices are a clock. It shares no code with the planner:
// messages go through channels, in order.
type clocks struct {
	costs Costs
	wires [][]chan endpoint // [from][to]: when a message was begun and carried, of the sender
	back  [][]chan endpoint // likewise, of the receiver
}

// A clock stands in for the devices of a rank.
type clock struct {
	*clocks
	rank     int
	now      float64
	free     [2]float64 // of the link, each way
	q        View
	backward bool
	begun    map[<-chan endpoint]int        // messages that came by, or are to come by
	came     map[<-chan endpoint][]endpoint // that came
}

func clocked(t testing.TB, algorithm string, spec ring.Spec, a Attention, backward bool, c Costs) float64 {
	t.Helper()
	all := schedules(t, algorithm, spec)
	w := &clocks{costs: c}
	for range all {
		var to, back []chan endpoint
		for range all {
			to, back = append(to, make(chan endpoint, 4096)), append(back, make(chan endpoint, 4096))
		}
		w.wires, w.back = append(w.wires, to), append(w.back, back)
	}
	ends := make([]float64, len(all))
	var wg sync.WaitGroup
	for i, s := range all {
		wg.Go(func() {
			r := &clock{clocks: w, rank: i, backward: backward, begun: map[<-chan endpoint]int{},
				came: map[<-chan endpoint][]endpoint{}}
			x := ring.Ring{Kernel: r, Comm: r, Mover: r, Stream: silent{}, Arena: tensor.NewMeter()}
			data, rows := tensor.NewMeter(), partition.Count(spec.Layout.Spans(spec.SeqQ, spec.Size, i))
			view := func(heads int) View { return data.Alloc(a.DType, a.Batch, rows, heads, a.Dim) }
			q, k := view(a.Heads), view(a.KVHeads)
			out := attention.Partial{O: view(a.Heads), LSE: data.Alloc(tensor.F32, a.Batch, rows, a.Heads, 1)}
			var err error
			if p := (attention.Softmax{Scale: 1}); !backward {
				err = x.Forward(out, q, k, k, s, p)
			} else {
				err = x.Backward(attention.Grads{DQ: q, DK: k, DV: k}, q, q, k, k, out, s, p)
			}
			if err != nil {
				t.Error(err)
			}
			ends[i] = r.now
		})
	}
	wg.Wait()
	most := 0.0
	for _, e := range ends {
		most = max(most, e)
	}
	return most
}

func size(vs ...View) (n int64) {
	for _, v := range vs {
		n += int64(v.Size() * v.DType().Size())
	}
	return n
}

func (r *clock) copied(vs ...View) {
	if n := size(vs...); n > 0 {
		r.now += r.costs.Copy(n)
	}
}

func (r *clock) Copy(dst, src View) { r.copied(dst, src) }
func (r *clock) Add(dst, src View)  { r.copied(dst, dst, src) }

func (r *clock) Forward(_ View, _ attention.Partial, q View, _ attention.Softmax) (attention.ForwardPass, error) {
	r.q = q
	return r, nil
}

func (r *clock) Backward(_, _, q View, _ attention.Saved, _ attention.Softmax) (attention.BackwardPass, error) {
	r.q = q
	return gradClock{r}, nil
}

func (r *clock) Block(b attention.Block) error {
	r.now += r.costs.Call(Call{
		Backward: r.backward, Batch: r.q.Len(tensor.Batch), Heads: r.q.Len(tensor.Heads),
		KVHeads: b.K.Len(tensor.Heads),
		Dim:     r.q.Len(tensor.Dim), DimV: b.V.Len(tensor.Dim), Tiles: b.Tiles, First: b.First, Last: b.Last,
	})
	return nil
}

func (r *clock) End() error { return nil }

type gradClock struct{ *clock }

func (r gradClock) Block(b attention.GradBlock) error {
	if len(b.Tiles) > 0 {
		return r.clock.Block(b.Block)
	}
	fresh := b.KeyGrads.Rows(b.Fresh.Lo, b.Fresh.Hi)
	r.copied(fresh.DK, fresh.DV)
	return nil
}

func (r gradClock) Fold(f attention.Fold) error {
	k, v := f.Src.DK, f.Src.DV
	r.copied(k, k, k, v, v, v)
	return nil
}

type silent struct{ tensor.Stream }

func (silent) Label(string) {}

type flying struct {
	sends    bool
	own      endpoint
	seconds  float64
	from     <-chan endpoint // the other end
	position int             // there
}

// Exchange begins one message with each peer and each way, of all that the exchange has there.
func (r *clock) Exchange(send, recv []comm.Message) (comm.Pending, error) {
	f := &flight{r: r}
	for side, list := range [][]comm.Message{send, recv} {
		var peers []int
		total, count := map[int]int64{}, map[int]int{}
		for _, m := range list {
			if count[m.Peer] == 0 {
				peers = append(peers, m.Peer)
			}
			count[m.Peer]++
			total[m.Peer] += size(m.View)
		}
		for _, p := range peers {
			x := flying{sends: side == 0}
			wire := r.back[p][r.rank]
			x.seconds = r.costs.Exchange(false, total[p], count[p])
			if x.from = r.wires[p][r.rank]; x.sends {
				wire, x.from = r.wires[r.rank][p], r.back[r.rank][p]
			}
			x.position = r.begun[x.from]
			r.begun[x.from]++
			r.free[side] = max(r.free[side], r.now) + x.seconds
			x.own = endpoint{r.now, r.free[side]}
			wire <- x.own
			f.all = append(f.all, x)
		}
	}
	return f, nil
}

type flight struct {
	r   *clock
	all []flying
}

func (f *flight) Sync(context.Context) error { return nil }

func (f *flight) Wait() {
	r := f.r
	for _, x := range f.all {
		for len(r.came[x.from]) <= x.position {
			r.came[x.from] = append(r.came[x.from], <-x.from)
		}
		other := r.came[x.from][x.position]
		r.now = max(r.now, x.own.end, other.end, max(x.own.begin, other.begin)+x.seconds)
	}
}

func TestPassIsWhatClocksShow(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 120 {
		name, algorithm, s, a, c := sampleOf(t, rng)
		c.queued = 0
		for _, backward := range []bool{false, true} {
			want, got := clocked(t, algorithm, s, a, backward, c), run(t, algorithm, s, a, backward, Topology{}, c).Seconds
			if math.Abs(want-got) > 1e-9*want {
				t.Fatalf("%s, backward %t: %g seconds, by clocks %g", name, backward, got, want)
			}
		}
	}
}
