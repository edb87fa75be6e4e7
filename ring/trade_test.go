package ring_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// A diary lists the exchanges and passes of rank 0, in the order in which its loop queues them.
type diary struct {
	comm.Exchanger
	attention.Kernel
	mu   sync.Mutex
	list []string
}

func (d *diary) write(s string) {
	d.mu.Lock()
	d.list = append(d.list, s)
	d.mu.Unlock()
}

func (d *diary) Exchange(send, recv []comm.Message) (comm.Pending, error) {
	d.write("exchange")
	p, err := d.Exchanger.Exchange(send, recv)
	return written{p, d}, err
}

func (d *diary) Forward(o attention.View, acc attention.Partial, q attention.View, p attention.Softmax) (
	attention.ForwardPass, error,
) {
	d.write("pass")
	return d.Kernel.Forward(o, acc, q, p)
}

func (d *diary) Backward(dq, do, q attention.View, s attention.Saved, p attention.Softmax) (attention.BackwardPass,
	error,
) {
	d.write("pass")
	return d.Kernel.Backward(dq, do, q, s, p)
}

type written struct {
	comm.Pending
	d *diary
}

func (w written) Wait() {
	w.d.write("wait")
	w.Pending.Wait()
}

// Heads travel in groups: the next group's come beside the pass of one, and its results leave beside the next pass. The
// bits do not depend on the groups, and two sets of tensors take turns.
func TestHeadsAreTradedInGroups(t *testing.T) {
	rng := rand.New(rand.NewPCG(31, 32))
	const seq, heads, kv, dim = 64, 16, 8, 4
	mask, err := partition.NewMask(true, -1, seq, seq, nil)
	if err != nil {
		t.Fatal(err)
	}
	p := problem{
		q: random(rng, tensor.F32, 2, seq, heads, dim), k: random(rng, tensor.F32, 2, seq, kv, dim),
		v: random(rng, tensor.F32, 2, seq, kv, dim), do: random(rng, tensor.F32, 2, seq, heads, dim),
		shape:   partition.Shape{SeqQ: seq, SeqKV: seq, Size: 2, Layout: partition.Zigzag{}, Mask: mask},
		softmax: attention.Softmax{Scale: 0.5},
	}
	const one = "exchange wait pass exchange wait " // of a group alone
	const two = "exchange wait exchange pass exchange wait pass wait exchange wait "
	order := map[int]string{0: one, 8: one, 4: one, 3: two, 2: two} // groups are equal parts of four heads
	peak := map[int]int64{}
	var first result
	for _, p.gather = range []int{0, 8, 4, 3, 2, 1} {
		var d *diary
		var arena *tensor.Arena
		got := runWith(t, p, "ulysses", onCPU, func(rank int, r *ring.Ring) {
			if rank == 0 {
				d, arena = &diary{Exchanger: r.Comm, Kernel: r.Kernel}, r.Arena
				r.Comm, r.Kernel = d, d
			}
		})
		if first[0].IsZero() {
			first = got
		}
		for i := range got {
			if !slices.Equal(tensor.Data[float32](got[i]), tensor.Data[float32](first[i])) {
				t.Errorf("%d heads at a time: %s has other bits", p.gather, resultNames[i])
			}
		}
		if want := order[p.gather]; want != "" && strings.Join(d.list, " ")+" " != strings.Repeat(want, 4) {
			t.Errorf("%d heads at a time: %v", p.gather, d.list)
		}
		s, err := ring.New("ulysses", p.spec(), 0)
		if err != nil {
			t.Fatal(err)
		}
		peak[len(s.Trades)] = arena.Peak()
	}
	if len(peak) != 3 || peak[4] >= peak[1] {
		t.Errorf("memory by groups: %v, want less with 4 than with 1", peak)
	}
}
