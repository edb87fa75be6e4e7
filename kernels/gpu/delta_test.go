//go:build cuda

package gpu

import (
	"context"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/attention/delta/deltatest"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/tensor"
)

func (r *cudaRig) newDelta() *Delta { return NewDelta(r.stream, r.loader) }

func TestDelta(t *testing.T) {
	newRig := func(t testing.TB) deltatest.Rig {
		r := newCUDARig(t)
		return deltatest.Rig{Kernel: r.newDelta(), Upload: r.upload, Download: r.download, Rounds: true}
	}
	deltatest.Test(t, newRig, tensor.F32, tensor.BF16, tensor.F16)
	rig := newRig(t)
	for _, dims := range [][2]int{{256, 256}, {192, 40}, {16, 144}, {5, 3}} {
		c := deltatest.Case{Name: "other dims", Batch: 1, KeyHeads: 1, Heads: 2, Dim: dims[0], DimV: dims[1],
			Segments: []delta.Segment{{Hi: 150}}, Decay: 0.1, Beta: 1, Gaps: true}
		for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16} {
			t.Run(fmt.Sprint(dims, dtype), func(t *testing.T) { deltatest.Check(t, rig, c, dtype) })
		}
	}
}

// TestDeltaRepeats checks that calls repeat their bits, also with little shared memory and workspace for few chunks, and
// that they free smaller workspace.
func TestDeltaRepeats(t *testing.T) {
	x := newDeltaBench(t, 2, 4, 128, delta.Segment{Hi: 400}, delta.Segment{Lo: 400, Hi: 1000})
	results := x.Views()[8:]
	run := func(most int64, shared int) (all [][]byte) {
		k := x.newDelta()
		k.most, k.shared = most, shared
		small, err := k.alloc(4 << 20)
		check(t, err)
		for _, f := range []func(delta.Args) error{k.Summarize, k.SummarizeBackward, k.Forward, k.Backward} {
			check(t, f(x.Args))
		}
		for _, v := range results {
			host, err := x.download(*v)
			check(t, err)
			all = append(all, tensor.Bytes(host))
			x.stream.Memset(v.Addr(), 0xff, int64(v.Size()*v.DType().Size()))
		}
		if base, _, ok := x.loader.Device().Allocation(small); ok && base != k.workspace.Addr() {
			t.Error("smaller workspace is not free")
		}
		return all
	}
	want := run(DeltaWorkspace, x.loader.Device().SharedPerBlock)
	for _, most := range []int64{DeltaWorkspace, 3 << 20, 1} {
		for i, got := range run(most, source.SmallShared) {
			if !slices.Equal(got, want[i]) {
				t.Errorf("%s differs with %d bytes of workspace", delta.Names[8+i], most)
			}
		}
	}
}

// BenchmarkDelta measures passes of one document of 32,768 tokens, of 16 key heads and 32 or 48 value heads of 128.
func BenchmarkDelta(b *testing.B) {
	for _, heads := range []int{32, 48} {
		x := newDeltaBench(b, 16, heads, 128, delta.Segment{Hi: 32768})
		k := x.newDelta()
		for _, c := range []struct {
			name  string
			calls []func(delta.Args) error
		}{
			{"forward", []func(delta.Args) error{k.Forward}},
			{"backward", []func(delta.Args) error{k.Backward}},
			{"both", []func(delta.Args) error{k.Forward, k.Backward}},
			{"summarize", []func(delta.Args) error{k.Summarize}},
			{"summarize backward", []func(delta.Args) error{k.SummarizeBackward}},
		} {
			b.Run(fmt.Sprintf("%s of %d", c.name, heads), func(b *testing.B) {
				queue := func() {
					for _, f := range c.calls {
						check(b, f(x.Args))
					}
				}
				queue()
				check(b, x.stream.Sync(context.Background()))
				b.ResetTimer()
				for range b.N {
					queue()
				}
				check(b, x.stream.Sync(context.Background()))
				b.ReportMetric(b.Elapsed().Seconds()*1e3/float64(b.N), "ms")
			})
		}
	}
}

type deltaBench struct {
	*cudaRig
	delta.Args
}

// newDeltaBench returns the tensors of segments in bfloat16, with random inputs.
func newDeltaBench(t testing.TB, keyHeads, heads, dim int, segments ...delta.Segment) *deltaBench {
	t.Helper()
	x := &deltaBench{newCUDARig(t), delta.Args{Scale: 1 / math.Sqrt(float64(dim)), Segments: segments}}
	n := len(segments)
	for i := range n {
		x.Entered, x.Followed = append(x.Entered, i), append(x.Followed, i)
	}
	seq := segments[n-1].Hi
	keys, wide, row := [4]int{1, seq, keyHeads, dim}, [4]int{1, seq, heads, dim}, [4]int{1, seq, heads, 1}
	state, maps := [4]int{n, heads, dim, dim}, [4]int{n, heads, dim, 2 * dim}
	for i, shape := range [][4]int{keys, keys, wide, row, row, wide, state, state, maps, maps, wide, keys, keys, wide, row,
		row} {
		of := tensor.F32
		if shape == keys || shape == wide {
			of = tensor.BF16
		}
		v := place(t, x.loader.Device(), of, shape)
		*x.Views()[i] = v
		if i >= 8 {
			continue
		}
		host := tensor.New(of, shape[:]...)
		some := tensor.New(of, 1, 1, 1, min(host.Size(), 1<<20-3)) // repeated
		xs := make([]float64, some.Size())
		for j := range xs {
			switch xs[j] = x.rng.NormFloat64(); delta.Names[i] {
			case "q", "k":
				xs[j] /= math.Sqrt(float64(dim))
			case "g":
				xs[j] = -0.05 * math.Log1p(math.Exp(xs[j]))
			case "beta":
				xs[j] = 1 / (1 + math.Exp(-xs[j]))
			}
		}
		near.Encode(some, xs)
		for to := tensor.Bytes(host); len(to) > 0; {
			to = to[copy(to, tensor.Bytes(some)):]
		}
		x.send(v, host)
	}
	return x
}
