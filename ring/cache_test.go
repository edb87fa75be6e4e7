package ring

import (
	"math/rand/v2"
	"reflect"
	"sync"
	"testing"

	"github.com/cprun/cprun/partition"
)

func TestCacheGivesWhatNewGives(t *testing.T) {
	rng := rand.New(rand.NewPCG(21, 22))
	c := NewCache(1 << 16)
	var shapes []partition.Shape
	for range 60 {
		shapes = append(shapes, randomShape(rng))
	}
	var wg sync.WaitGroup
	for i := range 600 {
		s, algorithm := shapes[rng.IntN(len(shapes))], Algorithms[i%len(Algorithms)]
		rank, spec := rng.IntN(s.Size), specOf(s)
		spec.Split = rng.IntN(2) == 0
		spec.Positions, spec.GatherHeads, spec.Gather = rng.IntN(2) == 0, rng.IntN(2), Gathers[rng.IntN(3)]
		wg.Go(func() {
			got, err := c.New(algorithm, spec, rank)
			want, _ := New(algorithm, spec, rank)
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%s of %+v, rank %d: %+v, %v, want %+v", algorithm, s, rank, got, err, want)
			}
		})
	}
	wg.Wait()
	size := int64(0)
	for e := c.order.Front(); e != nil; e = e.Next() {
		size += e.Value.(*cached).size
	}
	if size != c.size || size > c.limit || c.order.Len() != len(c.known) {
		t.Errorf("%d schedules, %d known, of %d bytes, counted as %d, at most %d", c.order.Len(), len(c.known), size,
			c.size, c.limit)
	}
}

func TestCacheKeepsTheLatest(t *testing.T) {
	docs := func(n ...int) partition.Shape {
		m := Must(partition.NewMask(true, -1, 16, 16, n))
		return partition.Shape{SeqQ: 16, SeqKV: 16, Size: 2, Layout: partition.Document{Docs: n}, Mask: m}
	}
	a, b := docs(16), docs(7, 9)
	c := NewCache(1) // room for one
	get := func(s partition.Shape) *Schedule {
		t.Helper()
		got, err := c.New("ring", specOf(s), 0)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	first := get(a)
	if get(a) != first {
		t.Error("the same shape gives another schedule")
	}
	if get(b) == first || get(a) == first || len(c.known) != 1 {
		t.Error("the cache keeps more than it has room for")
	}
	if _, err := c.New("spiral", specOf(a), 0); err == nil {
		t.Error("an unknown algorithm: no error")
	}
}

// The size of a schedule counts the boxes of an exchange of heads.
func TestCacheCountsExchanges(t *testing.T) {
	s := Must(New("ulysses", Spec{Shape: causalShape(64, 4, partition.Zigzag{}, -1), Heads: 8, KVHeads: 4}, 1))
	plain := *s
	plain.Q, plain.KV = nil, nil
	boxes := int64(len(s.Q.Send) + len(s.Q.Recv) + len(s.KV.Send) + len(s.KV.Recv))
	if more := s.bytes() - plain.bytes(); more < 8*boxes || boxes == 0 {
		t.Errorf("%d boxes count as %d bytes", boxes, more)
	}
}

// Boxes of one peer with neighbouring rows are copied at once.
func TestJoinedBoxes(t *testing.T) {
	box := func(peer, lo, hi, head int) headMove {
		return headMove{Peer: peer, Box: Box{partition.Range{Lo: lo, Hi: hi}, partition.Range{Lo: head, Hi: head + 1}}}
	}
	got := joined([]headMove{box(1, 0, 2, 0), box(1, 2, 5, 0), box(1, 5, 6, 1), box(1, 7, 8, 1), box(2, 8, 9, 1),
		box(0, 9, 10, 1), box(0, 10, 11, 1)}, 0)
	want := []headMove{box(1, 0, 5, 0), box(1, 5, 6, 1), box(1, 7, 8, 1), box(2, 8, 9, 1), box(0, 9, 10, 1), box(0, 10, 11, 1)}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("joined: %v, want %v", got, want)
	}
}

func BenchmarkCache(b *testing.B) {
	c, s := NewCache(CacheBytes), benchShape(b, "document", 64, 100)
	for b.Loop() {
		if _, err := c.New("ring", specOf(s), 3); err != nil {
			b.Fatal(err)
		}
	}
}
