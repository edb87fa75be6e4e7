package scan_test

import (
	"context"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring/scan"
	"github.com/cprun/cprun/tensor"
)

const cols = 2

// runHalo returns the rows before all segments, [segments*batch, rows, 1, cols], given x of the whole sequence, and dx,
// the sum of mine and of the gradients dbefore of those rows.
func runHalo(t *testing.T, segs *partition.Segments, rows int, x, mine, dbefore tensor.View,
	late func(rank, transfer int) bool) (before, dx tensor.View) {
	t.Helper()
	zeros := func(like tensor.View) tensor.View {
		return tensor.New(like.DType(), like.Len(tensor.Batch), like.Len(tensor.Seq), 1, cols)
	}
	before, dx = zeros(dbefore), zeros(x)
	onRanks(t, len(segs.Own), late, func(rank int, s *scan.Scan) error {
		var at []int // the position of each row
		places := make([]int, len(segs.Own[rank]))
		for place, i := range segs.Own[rank] {
			places[place] = i
			for pos := range segs.All[i].Rows.Len() {
				at = append(at, segs.All[i].Start+pos)
			}
		}
		h := scan.NewHalo(segs, rank, rows)
		own := dbefore.Slice(tensor.Batch, 0, len(places)*batch)
		got, grads := zeros(own), zeros(own)
		for b := range tensor.Bytes(got) {
			tensor.Bytes(got)[b] = 0x55
		}
		for place, i := range places {
			tensor.Copy(of(grads, place), of(dbefore, i))
		}
		sum := tensor.Gather(mine, at)
		for range 2 { // the second call finds used workspace
			if err := s.Halo(got, tensor.Gather(x, at), h); err != nil {
				return err
			}
		}
		if err := s.HaloBackward(sum, grads, h); err != nil {
			return err
		}
		if err := s.Stream.Sync(context.Background()); err != nil {
			return err
		}
		for place, i := range places {
			tensor.Copy(of(before, i), of(got, place))
		}
		tensor.Scatter(dx, sum, at)
		return nil
	})
	return before, dx
}

// integers returns small integers, which sums of float64 are exact for.
func integers(rng *rand.Rand, shape ...int) tensor.View {
	v := tensor.New(tensor.F64, shape...)
	for i := range tensor.Data[float64](v) {
		tensor.Data[float64](v)[i] = float64(rng.IntN(2000) - 1000)
	}
	return v
}

// wantHalo visits the rows before each segment one by one.
func wantHalo(segs *partition.Segments, rows int, x tensor.View) tensor.View {
	before := tensor.New(x.DType(), len(segs.All)*batch, rows, 1, cols)
	for i, s := range segs.All {
		begin := segs.All[segs.Docs[s.Doc].Lo].Start
		for k := range rows {
			for b := range batch {
				if pos := s.Start - rows + k; pos >= begin {
					dst := before.Slice(tensor.Batch, i*batch+b, i*batch+b+1).Slice(tensor.Seq, k, k+1)
					tensor.Copy(dst, x.Slice(tensor.Batch, b, b+1).Slice(tensor.Seq, pos, pos+1))
				}
			}
		}
	}
	return before
}

func dot(a, b tensor.View) (sum float64) {
	for i, x := range tensor.Data[float64](a) {
		sum += x * tensor.Data[float64](b)[i]
	}
	return sum
}

func TestHalo(t *testing.T) {
	rng := rand.New(rand.NewPCG(81, 82))
	list := cases(t, 4)
	for range 60 {
		list = append(list, segmentsOf(t, randomCase(rng, 1+rng.IntN(33))))
	}
	reach := 0 // the most segments that the rows before one come from
	for _, segs := range list {
		rows, n := 3, 0
		for _, s := range segs.All {
			n += s.Rows.Len()
		}
		if rng.IntN(4) == 0 {
			rows = rng.IntN(8)
		}
		half := tensor.New(tensor.BF16, batch, n, 1, cols)
		none := tensor.New(tensor.BF16, len(segs.All)*batch, rows, 1, cols)
		for i := range tensor.Data[uint16](half) {
			tensor.Data[uint16](half)[i] = uint16(rng.Uint32()) // also such as are not numbers
		}
		before, _ := runHalo(t, segs, rows, half, tensor.New(tensor.BF16, batch, n, 1, cols), none, never)
		if want := wantHalo(segs, rows, half); !equal(before, want) {
			t.Fatalf("%+v: rows before the segments have other bits", segs)
		}
		x, dbefore := integers(rng, batch, n, 1, cols), integers(rng, len(segs.All)*batch, rows, 1, cols)
		before, dx := runHalo(t, segs, rows, x, tensor.New(tensor.F64, batch, n, 1, cols), dbefore, never)
		if want := wantHalo(segs, rows, x); !equal(before, want) {
			t.Fatalf("%+v: rows before the segments are %v, want %v", segs, tensor.Data[float64](before),
				tensor.Data[float64](want))
		}
		if forward, backward := dot(before, dbefore), dot(x, dx); forward != backward {
			t.Fatalf("%+v: <A x, y> = %v, <x, A^T y> = %v", segs, forward, backward)
		}
		for rank := range segs.Own {
			from := map[int]int{}
			for _, m := range scan.NewHalo(segs, rank, rows).Recv {
				from[m.Block.Buf]++
				reach = max(reach, from[m.Block.Buf])
			}
		}
	}
	if reach < 3 {
		t.Errorf("no segment has its rows before it from 3 ranks")
	}
}

// Gradients are added to those that are there, in an order that late transfers do not change; and rows travel as bits.
func TestLateHalo(t *testing.T) {
	rng := rand.New(rand.NewPCG(83, 84))
	for _, segs := range cases(t, 2) {
		n := 0
		for _, s := range segs.All {
			n += s.Rows.Len()
		}
		x, own := random(rng, 1, batch, n, 1, cols), random(rng, 1, batch, n, 1, cols)
		dbefore := random(rng, 1, len(segs.All)*batch, 3, 1, cols)
		before, dx := runHalo(t, segs, 3, x, own, dbefore, never)
		for late := range 3 {
			b, d := runHalo(t, segs, 3, x, own, dbefore, func(rank, transfer int) bool {
				return late == 0 || (rank+transfer)%2 == late-1
			})
			if !equal(b, before) || !equal(d, dx) {
				t.Fatalf("%+v: late transfers change the result", segs)
			}
		}
		_, alone := runHalo(t, segs, 3, x, tensor.New(tensor.F64, batch, n, 1, cols), dbefore, never)
		for i, got := range tensor.Data[float64](dx) {
			if want := tensor.Data[float64](own)[i] + tensor.Data[float64](alone)[i]; math.Abs(got-want) > 1e-12 {
				t.Fatalf("%+v: gradient %d is %v, want %v", segs, i, got, want)
			}
		}
	}
}
