package train

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/tensor"
)

// wireValues returns the gradients of a rank: random, of very different sizes, with values that are not finite and ties.
func wireValues(seed, rank, n int) []float32 {
	rng := rand.New(rand.NewPCG(uint64(seed), uint64(rank)))
	xs := make([]float32, n)
	for i := range xs {
		xs[i] = float32(rng.NormFloat64() * math.Exp(3*rng.NormFloat64()))
	}
	inf := float32(math.Inf(1))
	for i, x := range []float32{float32(math.NaN()), inf, -inf, 1 + 0x1p-8, 1 + 0x3p-8, math.MaxFloat32, 0} {
		if i*3+rank < n {
			xs[i*3+rank] = x
		}
	}
	return xs
}

// wireSum returns part own of the float32 sums, in rank order, of gradients rounded to bf16.
func wireSum(seed, ranks, own, n int) []float32 {
	out := make([]float32, n/ranks)
	for rank := range ranks {
		for i, x := range wireValues(seed, rank, n)[own*n/ranks:][:n/ranks] {
			if x = float32(near.Round(float64(x), tensor.BF16)); rank == 0 {
				out[i] = x
			} else {
				out[i] += x
			}
		}
	}
	return out
}

// The sums of bf16 gradients are those of float32 in rank order, bit for bit and each time. Calls share the memory to
// send from, results may lie in the source, and calls may be waited for late, in any order and twice.
func TestHalfWire(t *testing.T) {
	for ranks := 1; ranks <= 4; ranks++ {
		n := ranks * 8 * 3 * 5
		err := Locally(ranks, "flash", tensor.F32, 0, func(r int, dev *Device, world *comm.Group) error {
			w := wire{ops: dev.Ops, send: tensor.New(tensor.BF16, n+3)}
			var results []View
			var calls []comm.Pending
			for seed := range 3 {
				src := tensor.FromSlice(wireValues(seed, r, n), n)
				dst := state.Part(src, r*n/ranks, (r+1)*n/ranks)
				if seed == 1 {
					dst = tensor.New(tensor.F32, n/ranks)
				}
				p, err := w.reduceScatter(world, dst, src)
				if err != nil {
					return err
				}
				results, calls = append(results, dst), append(calls, p)
			}
			for _, i := range []int{2, 0, 1, 2} {
				calls[i].Wait()
			}
			if err := dev.Stream.Sync(context.Background()); err != nil {
				return err
			}
			for seed, got := range results {
				err := near.Within(tensor.Data[float32](got), wireSum(seed, ranks, r, n), near.NonFinite, 0)
				if err != nil {
					t.Errorf("rank %d of %d, call %d: %v", r, ranks, seed, err)
				}
			}
			return world.Barrier(context.Background())
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// Gradients that bf16 represents exactly lead to the same bits of weights and moments as on one rank, over several
// passes, with any sharding and groups of the buckets' own.
func TestHalfWireOfBuckets(t *testing.T) {
	flat := shareLayout()
	by := divisions(flat)
	want := reference(t, flat, by)
	for shard := state.ShardOptimizer; shard <= state.ShardParameters; shard++ {
		inWorld(t, func(dev *Device, world comm.Communicator) error {
			tr, err := grouped(context.Background(), dev, world, by, shard, true)
			if err != nil {
				return err
			}
			tr.share.wire.send = tensor.New(tensor.BF16, int(flat.Size()))
			if err := tr.setWeights(context.Background(), by); err != nil {
				return err
			}
			if err := tr.trainShared(); err != nil {
				return err
			}
			if tr.share.wire.last == nil {
				t.Error("no reduction in bf16")
			}
			tr.compare(t, fmt.Sprintf("shard %d, rank %d", shard, world.Rank()), by, want)
			return nil
		})
	}
}
