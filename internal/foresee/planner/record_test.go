package planner

import (
	"reflect"
	"strings"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// record runs one pass of a rank.
func record(t testing.TB, r *Recorder, algorithm string, s ring.Spec, a Attention, rank int, backward bool) *Recorder {
	t.Helper()
	x, err := ring.New(algorithm, s, rank)
	if err == nil {
		err = r.Run(x, a, partition.Count(s.Layout.Spans(s.SeqKV, s.Size, rank)), backward)
	}
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// Two ranks of 8 rows exchange 2 of 4 query heads and one of two key heads, in bfloat16; LSE and gradients are float32.
// Key heads have 2 elements, value heads 3.
func TestBytesOfExchangedHeads(t *testing.T) {
	s := specOf(t, true, -1, 16, 2, partition.Contiguous{})
	s.Heads, s.KVHeads = 4, 2
	a := Attention{DType: tensor.BF16, Batch: 1, Mixer: hf.Mixer{Heads: 4, KVHeads: 2, Dim: 2, DimV: 3}}
	const q, kv = 8 * 2, 8 * 1 // rows and heads
	const queries, keys, out, lse = q * 2 * 2, kv * (2 + 3) * 2, q * 3 * 2, q * 4
	if got := record(t, &Recorder{}, "ulysses", s, a, 0, false).Sent; got != queries+keys+out+lse {
		t.Errorf("forward sends %d bytes, want %d", got, queries+keys+out+lse)
	}
	const before, after = queries + 2*out + lse + keys, q*2*4 + kv*(2+3)*4
	if got := record(t, &Recorder{}, "ulysses", s, a, 0, true).Sent; got != before+after {
		t.Errorf("backward sends %d bytes, want %d", got, before+after)
	}
}

// Exchanges of heads reuse lists: the host must not spend its time on garbage while the device waits for work.
func TestUlyssesAllocatesLittle(t *testing.T) {
	s := specOf(t, true, -1, 64, 8, partition.Zigzag{})
	s.Heads, s.KVHeads = 8, 8
	a := Attention{DType: tensor.BF16, Batch: 1, Mixer: mixer(8, 8, 16, -1)}
	schedule, err := ring.New("ulysses", s, 0)
	if err != nil {
		t.Fatal(err)
	}
	n := testing.AllocsPerRun(10, func() {
		r := Recorder{}
		for _, backward := range []bool{false, true} {
			if err := r.Run(schedule, a, 8, backward); err != nil {
				t.Fatal(err)
			}
		}
	})
	if n > 300 {
		t.Errorf("a forward and a backward pass allocate %v times", n)
	}
}

func TestHopsOfARing(t *testing.T) {
	s := specOf(t, true, -1, 6, 3, partition.Contiguous{})
	none := []int{}
	want := []Hop{
		{Label: "hop 0 owner 1", Tiles: 1, Pairs: 3, SendTo: []int{2}, RecvFrom: []int{0}, SendBytes: 16},
		{Label: "hop 1 owner 0", Tiles: 1, Pairs: 4, SendTo: []int{2}, RecvFrom: none, SendBytes: 16},
	}
	if got := record(t, &Recorder{}, "ring", s, one, 1, false); !reflect.DeepEqual(got.Hops, want) || got.Sent != 32 {
		t.Errorf("%d bytes in %+v, want %+v", got.Sent, got.Hops, want)
	}
}

// Groups of heads are passes of the kernel by themselves, and each has its hops.
func TestGroupsOfHeads(t *testing.T) {
	s := specOf(t, false, -1, 8, 2, partition.Contiguous{})
	s.Heads, s.KVHeads, s.GatherHeads = 12, 3, 2
	a := one
	a.Heads, a.KVHeads = 12, 3
	r := record(t, &Recorder{}, "allgather", s, a, 0, false)
	if want := []Work{{8, 2, 1, 1, 2, 4, 4}, {4, 1, 1, 1, 2, 4, 4}}; !reflect.DeepEqual(r.Works, want) {
		t.Errorf("passes %+v, want %+v", r.Works, want)
	}
	groups := map[string]int{}
	for _, h := range r.Hops {
		group, _, _ := strings.Cut(h.Label, "/")
		groups[group] += h.Pairs
	}
	if len(groups) != 2 || groups["KV heads 0 to 1"] != 32 || groups["KV head 2"] != 32 || r.Sent != 4*3*2*4 {
		t.Errorf("%v, %d bytes", groups, r.Sent)
	}
}

// A Recorder has a kernel of the caller's run the calls, with the scale of the head dim.
func TestRecorderRunsAKernel(t *testing.T) {
	k := &scales{}
	a := one
	a.Dim, a.DimV = 16, 16
	r := Recorder{Kernel: k}
	for _, backward := range []bool{false, true} {
		record(t, &r, "ring", specOf(t, true, -1, 8, 2, partition.Zigzag{}), a, 1, backward)
	}
	if want := []float64{0.25, 0.25}; !reflect.DeepEqual(k.seen, want) || r.Buffers() == 0 {
		t.Errorf("scales %v, want %v; %d bytes of buffers", k.seen, want, r.Buffers())
	}
}

type scales struct {
	attention.Idle
	seen []float64
}

func (s *scales) Forward(o View, acc attention.Partial, q View, p attention.Softmax) (attention.ForwardPass, error) {
	s.seen = append(s.seen, p.Scale)
	return s.Idle.Forward(o, acc, q, p)
}

func (s *scales) Backward(dq, do, q View, saved attention.Saved, p attention.Softmax) (attention.BackwardPass, error) {
	s.seen = append(s.seen, p.Scale)
	return s.Idle.Backward(dq, do, q, saved, p)
}
