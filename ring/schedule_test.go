package ring

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/cprun/cprun/partition"
)

// sim runs the schedules of all ranks on integers in place of tensors: a row of keys is the
// global position of its key (or -1), a row of gradients counts the queries that added to it.
// It needs no kernel and no communicator, so it tests the schedules alone.
type sim struct {
	shape partition.Shape
	wires [][]chan []int // [from][to], in order
	mu    sync.Mutex
	seen  map[[2]int]int // visible pairs by global query and key
	fault string
}

func (s *sim) failf(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fault == "" {
		s.fault = fmt.Sprintf(format, args...)
	}
}

func runSim(t *testing.T, algorithm string, shape partition.Shape) *sim {
	t.Helper()
	s := &sim{shape: shape, seen: map[[2]int]int{}, wires: make([][]chan []int, shape.Size)}
	for i := range s.wires {
		s.wires[i] = make([]chan []int, shape.Size)
		for j := range s.wires[i] {
			s.wires[i][j] = make(chan []int, 64)
		}
	}
	own := make([][]int, shape.Size)
	var wg sync.WaitGroup
	for r := range shape.Size {
		sch, err := New(algorithm, shape, r)
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() { own[r] = s.rank(sch) })
	}
	wg.Wait()
	if s.fault != "" {
		t.Fatalf("%s of %+v: %s", algorithm, shape, s.fault)
	}
	for r, counts := range own {
		for i, key := range partition.Positions(shape.Layout.Spans(shape.SeqKV, shape.Size, r)) {
			want := 0
			for q := range shape.SeqQ {
				want += s.seen[[2]int{q, key}]
			}
			if counts[i] != want {
				t.Fatalf("%s of %+v: gradient of key %d on rank %d has %d parts, want %d", algorithm, shape, key, r, counts[i], want)
			}
		}
	}
	return s
}

func (s *sim) rank(sch *Schedule) (own []int) {
	q := partition.Positions(s.shape.Layout.Spans(s.shape.SeqQ, s.shape.Size, sch.Rank))
	keys := buffersOf(sch.KVRows)
	copy(keys[0], partition.Positions(s.shape.Layout.Spans(s.shape.SeqKV, s.shape.Size, sch.Rank)))
	grads := buffersOf(sch.GradRows)
	clear(grads[0])
	for _, h := range sch.Backward {
		s.send(sch.Rank, h.SendKV, keys)
		s.send(sch.Rank, h.SendGrad, grads)
		if len(h.Tiles) > 0 {
			if h.Grads.Buf != 0 {
				clear(grads[h.Grads.Buf][h.Grads.Lo:h.Grads.Hi])
			}
			s.compute(sch.Rank, h, q, keys[h.Keys.Buf][:h.Keys.Hi], grads[h.Grads.Buf][:h.Keys.Hi])
		}
		s.recv(sch.Rank, h.RecvKV, keys)
		s.recv(sch.Rank, h.RecvGrad, grads)
		for _, f := range h.Fold {
			for i := range f.Dst.Hi - f.Dst.Lo {
				grads[f.Dst.Buf][f.Dst.Lo+i] += grads[f.Src.Buf][f.Src.Lo+i]
			}
		}
	}
	return grads[0]
}

// unset stands in rows that were never written, so that using one is seen.
const unset = -1 << 30

func buffersOf(rows []int) [][]int {
	b := make([][]int, len(rows))
	for i, n := range rows {
		b[i] = make([]int, n)
		for j := range b[i] {
			b[i][j] = unset
		}
	}
	return b
}

func (s *sim) send(rank int, moves []Move, bufs [][]int) {
	for _, m := range moves {
		rows := bufs[m.Block.Buf][m.Block.Lo:m.Block.Hi]
		s.wires[rank][m.Peer] <- append([]int(nil), rows...)
	}
}

func (s *sim) recv(rank int, moves []Move, bufs [][]int) {
	for _, m := range moves {
		rows := <-s.wires[m.Peer][rank]
		if len(rows) != m.Block.Hi-m.Block.Lo {
			s.failf("rank %d got %d rows from %d, wants %d", rank, len(rows), m.Peer, m.Block.Hi-m.Block.Lo)
			return
		}
		copy(bufs[m.Block.Buf][m.Block.Lo:], rows)
	}
}

func (s *sim) compute(rank int, h Hop, q, keys, grads []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range h.Tiles {
		for i := t.Q.Lo; i < t.Q.Hi; i++ {
			for j := t.K.Lo; j < t.K.Hi; j++ {
				if t.Band.Sees(i, j) {
					s.seen[[2]int{q[i], keys[j]}]++
					grads[j]++
				}
			}
		}
	}
}

func randomShape(rng *rand.Rand) partition.Shape {
	s := partition.Shape{SeqQ: 1 + rng.IntN(40), Size: 1 + rng.IntN(8)}
	s.SeqKV = s.SeqQ
	var docs []int
	switch rng.IntN(3) {
	case 0:
		for n := s.SeqQ; n > 0; {
			d := 1 + rng.IntN(n)
			docs = append(docs, d)
			n -= d
		}
	case 1:
		s.SeqKV = 1 + rng.IntN(40)
	}
	s.Mask, _ = partition.NewMask(rng.IntN(3) > 0, rng.IntN(12)-4, s.SeqQ, s.SeqKV, docs)
	all := []partition.Layout{partition.Contiguous{}, partition.Zigzag{}, partition.Striped{}}
	if docs != nil {
		all = append(all, partition.Document{Docs: docs})
	}
	s.Layout = all[rng.IntN(len(all))]
	return s
}

// Every schedule, on every rank, must compute each visible pair once, with the right key in
// the right row, and bring every part of a key's gradient home.
func TestSchedulesComputeEveryPairOnce(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 600 {
		shape := randomShape(rng)
		for _, algorithm := range Algorithms {
			s := runSim(t, algorithm, shape)
			for q := range shape.SeqQ {
				for k := range shape.SeqKV {
					want := 0
					if visible(shape.Mask, q, k) {
						want = 1
					}
					if got := s.seen[[2]int{q, k}]; got != want {
						t.Fatalf("%s of %+v: pair (%d, %d) computed %d times, want %d", algorithm, shape, q, k, got, want)
					}
					delete(s.seen, [2]int{q, k})
				}
			}
			if len(s.seen) > 0 {
				t.Fatalf("%s of %+v: computed with rows that hold no key: %v", algorithm, shape, s.seen)
			}
		}
	}
}

// visible is the mask by its definition, without bands over local indices or tiles.
func visible(m partition.Mask, i, j int) bool {
	lo := 0
	for _, n := range m.Docs {
		if i >= lo && i < lo+n && (j < lo || j >= lo+n) {
			return false
		}
		lo += n
	}
	return m.Sees(i, j)
}

func causalShape(n, size int, l partition.Layout, window int) partition.Shape {
	m, _ := partition.NewMask(true, window, n, n, nil)
	return partition.Shape{SeqQ: n, SeqKV: n, Size: size, Layout: l, Mask: m}
}

func TestHopsWhereNothingIsVisibleAreSkipped(t *testing.T) {
	// A window of one block's length: a contiguous rank reads its own block and the one
	// before it, so the ring ends after one hop, whatever the number of ranks.
	for rank := range 8 {
		s, err := New("ring", causalShape(128, 8, partition.Contiguous{}, 16), rank)
		if err != nil {
			t.Fatal(err)
		}
		if len(s.Forward) > 2 {
			t.Errorf("rank %d runs %d forward hops, want at most 2: %+v", rank, len(s.Forward), s.Forward)
		}
	}
	// Causal and contiguous: rank 0 sees only its own keys, and still passes none on that
	// it does not own.
	s, err := New("ring", causalShape(128, 8, partition.Contiguous{}, -1), 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range s.Forward[1:] {
		if len(h.Tiles) > 0 || len(h.RecvKV) > 0 {
			t.Errorf("rank 0 of a causal contiguous ring has work in %q: %+v", h.Label, h)
		}
	}
}

func TestOnlyNeededRowsTravel(t *testing.T) {
	s, err := New("ring", causalShape(1024, 4, partition.Contiguous{}, 15), 1)
	if err != nil {
		t.Fatal(err)
	}
	if got := s.Forward[0].SendKV[0].Block; got.Hi-got.Lo != 15 {
		t.Errorf("a window of 15 keys sends rows %v, want the last 15", got)
	}
}

func TestZigzagRingKeepsTwoBuffers(t *testing.T) {
	for rank := range 8 {
		s, err := New("ring", causalShape(256, 8, partition.Zigzag{}, -1), rank)
		if err != nil {
			t.Fatal(err)
		}
		if len(s.KVRows) != 3 || len(s.Forward) != 8 {
			t.Errorf("rank %d: %d K/V buffers and %d hops, want 3 and 8", rank, len(s.KVRows), len(s.Forward))
		}
		for _, h := range s.Forward {
			if len(h.Tiles) != 1 {
				t.Errorf("rank %d %s: %d tiles, want one", rank, h.Label, len(h.Tiles))
			}
		}
	}
}

func TestAllIsEveryRanksSchedule(t *testing.T) {
	mask, err := partition.NewMask(true, 20, 61, 61, nil)
	if err != nil {
		t.Fatal(err)
	}
	layout, err := partition.New("zigzag", nil)
	if err != nil {
		t.Fatal(err)
	}
	shape := partition.Shape{SeqQ: 61, SeqKV: 61, Size: 5, Layout: layout, Mask: mask}
	for _, algorithm := range Algorithms {
		all, err := All(algorithm, shape)
		if err != nil || len(all) != shape.Size {
			t.Fatalf("All(%s) = %d schedules, %v", algorithm, len(all), err)
		}
		for r, got := range all {
			if want, err := New(algorithm, shape, r); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%s: schedule of rank %d is %+v, New makes %+v, %v", algorithm, r, got, want, err)
			}
		}
	}
	if _, err := All("spiral", shape); err == nil {
		t.Error("All of an unknown algorithm: no error")
	}
}

func TestUnknownAlgorithmIsRefused(t *testing.T) {
	_, err := New("spiral", causalShape(8, 2, partition.Zigzag{}, -1), 0)
	if err == nil || !strings.Contains(err.Error(), "allgather") {
		t.Errorf("New(spiral) = %v, want an error that lists the choices", err)
	}
}
