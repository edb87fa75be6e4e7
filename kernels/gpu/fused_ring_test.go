//go:build cuda

package gpu

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/base/cuda/dnn"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// A fusedCase is one attention over several ranks, which all run on one GPU.
type fusedCase struct {
	ranks, seq, heads, kvHeads, dim int
	layout                          partition.Layout
	mask                            partition.Mask
	gathered                        bool // forward in one block of all keys of a rank
	bad                             int  // the position of a NaN key; 0: none
}

// rankTensors holds the tensors of one rank, on the device.
type rankTensors struct {
	q, k, v, do, o View
	acc            attention.Partial
	grads          attention.Grads
}

// put copies rows [from] of a host tensor to the device.
func (r fusedRig) put(t testing.TB, all []uint16, from []int, heads, dim int) View {
	t.Helper()
	h := tensor.New(tensor.BF16, 1, len(from), heads, dim)
	dst, n := tensor.Data[uint16](h), heads*dim
	for i, row := range from {
		copy(dst[i*n:(i+1)*n], all[row*n:(row+1)*n])
	}
	mem, err := r.transfers.uploadAll([]*tensor.Host{h.Memory().(*tensor.Host)})
	check(t, err)
	return tensor.Dense(mem[0], tensor.BF16, 0, h.Shape())
}

// empty returns uninitialised device memory, of whole words, as get copies it.
func (r fusedRig) empty(t testing.TB, dtype tensor.DType, seq, heads, dim int) View {
	t.Helper()
	mem, err := r.dev.Alloc(int64(seq*heads*dim*dtype.Size()+7) / 8 * 8)
	check(t, err)
	return tensor.Dense(mem, dtype, 0, [4]int{1, seq, heads, dim})
}

// get copies rows of a device tensor to a host tensor.
func (r fusedRig) get(t testing.TB, v View, all []float64, to []int) {
	t.Helper()
	h := tensor.NewHost(v.Memory().Bytes())
	check(t, r.transfers.downloadAll([]*tensor.Host{h}, []tensor.Memory{v.Memory()}))
	n := v.Len(tensor.Heads) * v.Len(tensor.Dim)
	here := near.Decode(tensor.Dense(h, v.DType(), 0, v.Shape()))
	for i, row := range to {
		for j := range n {
			all[row*n+j] += here[i*n+j]
		}
	}
}

func (c fusedCase) positions(rank int) []int {
	return partition.Positions(c.layout.Spans(c.seq, c.ranks, rank))
}

// whole returns the case on one rank.
func (c fusedCase) whole() fusedCase {
	c.ranks, c.layout = 1, partition.Contiguous{}
	return c
}

// results holds the complete tensors, assembled from all ranks.
type results struct{ o, lse, dq, dk, dv []float64 }

// run runs every rank forward and backward with the keys of every owner, in the order of a ring. It calls after after
// each kernel call, unless it is nil.
func (c fusedCase) run(t testing.TB, r fusedRig, after func()) results {
	if after == nil {
		after = func() {}
	}
	t.Helper()
	rng := rand.New(rand.NewPCG(5, 6))
	draw := func(heads int) []uint16 {
		xs := make([]uint16, c.seq*heads*c.dim)
		for i := range xs {
			xs[i] = uint16(math.Float32bits(float32(rng.NormFloat64())) >> 16)
		}
		return xs
	}
	q, k, v, do := draw(c.heads), draw(c.kvHeads), draw(c.kvHeads), draw(c.heads)
	if c.bad > 0 {
		for i := range c.kvHeads * c.dim {
			k[c.bad*c.kvHeads*c.dim+i] = 0x7fc0
		}
	}
	n, kn := c.seq*c.heads*c.dim, c.seq*c.kvHeads*c.dim
	out := results{make([]float64, n), make([]float64, c.seq*c.heads), make([]float64, n), make([]float64, kn),
		make([]float64, kn)}
	shape := partition.Shape{SeqQ: c.seq, SeqKV: c.seq, Size: c.ranks, Layout: c.layout, Mask: c.mask}
	p := attention.Softmax{Scale: 1 / math.Sqrt(float64(c.dim))}
	for rank := range c.ranks {
		mine := c.positions(rank)
		float := func(heads, dim int) View { return r.empty(t, tensor.F32, len(mine), heads, dim) }
		x := rankTensors{
			q: r.put(t, q, mine, c.heads, c.dim), do: r.put(t, do, mine, c.heads, c.dim),
			o:   r.empty(t, tensor.BF16, len(mine), c.heads, c.dim),
			acc: attention.Partial{O: float(c.heads, c.dim), LSE: float(c.heads, 1)},
		}
		dq := float(c.heads, c.dim)
		forward, err := r.Forward(x.o, x.acc, x.q, p)
		check(t, err)
		blockOf := func(theirs []int, tiles []partition.Tile) attention.Block {
			return attention.Block{K: r.put(t, k, theirs, c.kvHeads, c.dim), V: r.put(t, v, theirs, c.kvHeads, c.dim),
				Tiles: tiles}
		}
		block := func(owner int) attention.Block {
			return blockOf(c.positions(owner), partition.Plan(shape, rank, owner))
		}
		if c.gathered {
			g := partition.NewIndex(shape).Gather(rank)
			var theirs []int
			for _, run := range g.Runs {
				theirs = append(theirs, c.positions(run.Owner)[run.Rows.Lo:run.Rows.Hi]...)
			}
			check(t, forward.Block(blockOf(theirs, g.Tiles)))
		}
		for hop := range c.ranks {
			if !c.gathered {
				check(t, forward.Block(block((rank-hop+c.ranks)%c.ranks)))
				after()
			}
		}
		check(t, forward.End())
		saved := attention.Saved{O: x.o, LSE: x.acc.LSE, Delta: float(c.heads, 1)}
		backward, err := r.Backward(dq, x.do, x.q, saved, p)
		check(t, err)
		for hop := range c.ranks {
			owner := (rank - hop + c.ranks) % c.ranks
			theirs := c.positions(owner)
			grad := func() View { return r.empty(t, tensor.F32, len(theirs), c.kvHeads, c.dim) }
			g := attention.KeyGrads{DK: grad(), DV: grad()}
			check(t, backward.Block(attention.GradBlock{Block: block(owner), KeyGrads: g, Fresh: span(0, len(theirs))}))
			after()
			r.get(t, g.DK, out.dk, theirs)
			r.get(t, g.DV, out.dv, theirs)
		}
		check(t, backward.End())
		r.get(t, x.o, out.o, mine)
		r.get(t, x.acc.LSE, out.lse, mine)
		r.get(t, dq, out.dq, mine)
	}
	check(t, r.stream.Sync(context.Background()))
	return out
}

// from measures the distance of each result from the wanted one.
func (got results) from(t *testing.T, want results) map[string]near.Distance {
	t.Helper()
	all := map[string]near.Distance{}
	for name, pair := range map[string][2][]float64{
		"o": {got.o, want.o}, "lse": {got.lse, want.lse}, "dq": {got.dq, want.dq}, "dk": {got.dk, want.dk},
		"dv": {got.dv, want.dv},
	} {
		d, err := near.Of(pair[0], pair[1], near.Finite)
		check(t, err)
		all[name] = d
	}
	return all
}

// near fails if results differ by more than a few roundings of the largest to bfloat16.
func (got results) near(t *testing.T, want results, roundings float64) {
	t.Helper()
	for name, d := range got.from(t, want) {
		if !(d.Relative() <= roundings/256) {
			t.Errorf("%s differs by %g, the largest value is %g", name, d.Abs, d.Largest)
		}
	}
}

func fusedCases(t testing.TB) map[string]fusedCase {
	causal, err := partition.NewMask(true, -1, 1024, 1024, nil)
	check(t, err)
	window, err := partition.NewMask(true, 300, 1024, 1024, nil)
	check(t, err)
	docs, err := partition.NewMask(true, -1, 1024, 1024, []int{100, 1, 400, 23, 500})
	check(t, err)
	cases := map[string]fusedCase{}
	for name, mask := range map[string]partition.Mask{"causal": causal, "window": window, "documents": docs} {
		for _, ranks := range []int{2, 4, 8} { // with 8, the pass folds results in between
			cases[fmt.Sprintf("%s, %d ranks", name, ranks)] = fusedCase{ranks: ranks, seq: 1024, heads: 4, kvHeads: 2,
				dim: 64, layout: partition.Zigzag{}, mask: mask}
		}
	}
	return cases
}

// TestFusedRing checks that a ring returns the results of one call, for any number of folds.
func TestFusedRing(t *testing.T) {
	for name, c := range fusedCases(t) {
		t.Run(name, func(t *testing.T) {
			r := newFused(t, FusedOptions{Packed: len(c.mask.Docs) > 0})
			want := c.whole().run(t, r, nil)
			c.whole().run(t, r, nil).near(t, want, 0)
			lazy := c.run(t, r, nil)
			lazy.near(t, want, 4)
			built := r.Plans()
			c.run(t, r, nil).near(t, lazy, 0.01)
			atOnce := c.run(t, r, func() { r.stream.Do("fold", func() error { r.fold(); return nil }) })
			atOnce.near(t, lazy, 1)
			if n := r.Plans() - built; n > 0 {
				t.Errorf("the same run again built %d plans", n)
			}
		})
	}
}

// TestFusedRingKeepsNaN checks that a NaN in one rank's keys reaches all rows that see it, in any hop, and no other
// rank.
func TestFusedRingKeepsNaN(t *testing.T) {
	for name, c := range fusedCases(t) {
		if len(c.mask.Docs) > 0 {
			continue
		}
		t.Run(name, func(t *testing.T) {
			c.bad, c.layout = 700, partition.Contiguous{}
			got := c.run(t, newFused(t, FusedOptions{}), nil)
			for row := range c.seq {
				sees := c.mask.Sees(row, c.bad)
				for i := range c.heads {
					if lse := got.lse[row*c.heads+i]; sees && !math.IsNaN(lse) || row < c.seq/2 && math.IsNaN(lse) {
						t.Fatalf("row %d sees the key: %t; its LSE is %g", row, sees, lse)
					}
				}
				for i := range c.heads * c.dim {
					if o := got.o[row*c.heads*c.dim+i]; sees && !math.IsNaN(o) || row < c.seq/2 && math.IsNaN(o) {
						t.Fatalf("row %d sees the key: %t; an element of O is %g", row, sees, o)
					}
				}
			}
		})
	}
}

// TestFusedGathered checks that a forward pass over all keys of a rank, gathered, returns the results of one call.
// Chunks of one document see the same keys, so pieces of a packed call overlap.
func TestFusedGathered(t *testing.T) {
	plain, packed := newFused(t, FusedOptions{}), newFused(t, FusedOptions{Packed: true}) // they keep their plans
	for name, c := range fusedCases(t) {
		layouts := []partition.Layout{c.layout, partition.Contiguous{}}
		if docs := c.mask.Docs; len(docs) > 0 {
			layouts = append(layouts, partition.Document{Docs: docs}, partition.DocumentZigzag{Docs: docs})
		}
		for _, c.layout = range layouts {
			t.Run(name+", "+c.layout.Name(), func(t *testing.T) {
				r := plain
				if len(c.mask.Docs) > 0 {
					r = packed
				}
				want := c.whole().run(t, r, nil)
				c.gathered = true
				c.run(t, r, nil).near(t, want, 4)
			})
		}
	}
}

// keepsMatrix reports whether a deterministic backward pass keeps its matrix on this machine.
func keepsMatrix(t *testing.T) bool {
	t.Helper()
	gpus, err := cuda.Probe()
	check(t, err)
	version, err := dnn.Version()
	check(t, err)
	return backends.KeepsMatrix(gpus[0].Arch, backends.Version(version))
}

// TestFusedWorkspaceIsEnough checks that Fused allocates no more than FusedWorkspace.
func TestFusedWorkspaceIsEnough(t *testing.T) {
	const seq, heads, kvHeads = 8192, 4, 2
	docs := append([]int{seq / 2}, slices.Repeat([]int{64}, seq/2/64)...) // many documents, and one that is much longer
	for _, c := range []struct {
		ranks, dim    int
		docs          []int
		deterministic bool
	}{
		{4, 128, nil, false}, {1, 128, docs, false}, {1, 120, docs, false}, {1, 256, docs, false},
		{1, 64, nil, true}, {1, 128, nil, true}, {1, 256, nil, true},
	} {
		of := fmt.Sprintf("%d ranks, head dim %d, %d documents, deterministic %t", c.ranks, c.dim, len(c.docs),
			c.deterministic)
		t.Run(of, func(t *testing.T) {
			mask, err := partition.NewMask(true, -1, seq, seq, c.docs)
			check(t, err)
			rows, packed := seq/c.ranks, len(c.docs) > 0
			s := trainingShape(rows, heads, kvHeads, c.dim, c.dim)
			s.Calls, s.Packed, s.Deterministic = c.ranks, packed, c.deterministic && keepsMatrix(t)
			n := FusedWorkspace(s)
			r := newFused(t, FusedOptions{Workspace: n, Packed: packed, Deterministic: c.deterministic})
			fusedCase{ranks: c.ranks, seq: seq, heads: heads, kvHeads: kvHeads, dim: c.dim, layout: partition.Zigzag{},
				mask: mask}.run(t, r, nil)
			if got := r.scratch.size(); got != n {
				t.Errorf("the workspace is %d bytes, FusedWorkspace says %d", got, n)
			}
			for d, bytes := range r.dnn.Workspaces() {
				t.Logf("%d bytes for %v", bytes, d)
			}
		})
	}
}
