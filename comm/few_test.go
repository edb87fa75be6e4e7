package comm_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// TestFewSumsAreDirectSums reduces numbers, with sums that depend on the order, over few neighbours and over all pairs.
// All types, reductions and sizes give the same bits. The worlds have the smallest sizes, powers of two and others. From
// 6 ranks on some pairs are not connected.
func TestFewSumsAreDirectSums(t *testing.T) {
	ranks := []int{2, 3, 4, 5, 6, 8, 9, 17}
	if testing.Short() {
		ranks = []int{2, 3, 6, 8, 17}
	}
	for _, n := range ranks {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			direct, few := comm.NewLocal(n, nil, comm.Options{}), comm.NewLocalFew(n, 1, nil, comm.Options{})
			defer closeAll(direct)
			defer closeAll(few)
			for _, d := range []tensor.DType{tensor.F32, tensor.F64, tensor.I32, tensor.I64} {
				// Sizes: nothing, less than an element each, gathered vectors, the smallest in pieces, and many pieces
				// with a short last one.
				for _, size := range []int{0, 1, n - 1, 1000, (1<<20)/n/d.Size() + 1, 50_001 + 400_000/n} {
					in := make([]tensor.View, n)
					for r := range in {
						in[r] = numbers(d, size, r)
					}
					for _, op := range []comm.Op{comm.Sum, comm.Max, comm.Min} {
						like := d != tensor.F32 && op != comm.Sum ||
							testing.Short() && (d != tensor.F32 || op != comm.Sum)
						if large := size > 1000; large && like {
							continue // the same pieces over the same streams, added up as the small ones are
						}
						one, other := reduceBoth(t, direct, in, op), reduceBoth(t, few, in, op)
						for r := range one {
							if !bytes.Equal(one[r], other[r]) {
								t.Errorf("%s of %d %s: rank %d has other bits over few neighbours", op, size, d, r)
							}
						}
					}
				}
			}
		})
	}
}

// reduceBoth reduces in by AllReduce and by ReduceScatter, and returns the bytes of each rank's results.
func reduceBoth(t *testing.T, groups []*comm.Group, in []tensor.View, op comm.Op) [][]byte {
	t.Helper()
	n, got := len(groups), make([][]byte, len(groups))
	everyone(t, groups, func(g *comm.Group) error {
		own := in[g.Rank()]
		d, part := own.DType(), own.Size()/n
		all, parts, dst := tensor.New(d, own.Size()), tensor.New(d, n*part), tensor.New(d, part)
		copy(tensor.Bytes(all), tensor.Bytes(own))
		copy(tensor.Bytes(parts), tensor.Bytes(own))
		if op == comm.Max { // the own part of src is allowed as dst
			dst = parts.Slice(tensor.Dim, g.Rank()*part, (g.Rank()+1)*part)
		}
		finish := comm.Finish(t.Context())
		if err := errors.Join(finish(g.AllReduce(all, op)), finish(g.ReduceScatter(dst, parts, op))); err != nil {
			return err
		}
		got[g.Rank()] = slices.Concat(tensor.Bytes(all), tensor.Bytes(dst))
		return nil
	})
	return got
}

// numbers returns n numbers of very different sizes, with NaN of different bits in floating-point types.
func numbers(d tensor.DType, n, rank int) tensor.View {
	v, rng := tensor.New(d, n), rand.New(rand.NewPCG(uint64(rank), uint64(n)))
	float := func() float64 { return (rng.Float64() - 0.5) * float64(uint64(1)<<rng.IntN(40)) }
	for i := range n {
		switch d {
		case tensor.F32:
			if tensor.Data[float32](v)[i] = float32(float()); i%97 == rank {
				tensor.Data[float32](v)[i] = math.Float32frombits(0x7fc00000 + uint32(rank))
			}
		case tensor.F64:
			if tensor.Data[float64](v)[i] = float(); i%97 < 2 {
				tensor.Data[float64](v)[i] = math.Float64frombits(0x7ff8000000000000 + uint64(rank))
			}
		case tensor.I32:
			tensor.Data[int32](v)[i] = int32(rng.Uint32())
		case tensor.I64:
			tensor.Data[int64](v)[i] = int64(rng.Uint64())
		}
	}
	return v
}
