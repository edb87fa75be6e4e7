//go:build cuda

package gpu

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// A farRig runs operations on tensors of 8 GiB or more. All elements are 0, except in the last rows, which lie beyond
// the reach of a 32-bit index. The results must equal those for tensors that have only the last rows.
type farRig struct {
	*cudaRig
	arena *tensor.Arena
	last  int // the number of last rows
	skew  int // elements before each tensor, which select the kernels for unaligned ones
	draw  func(rng *rand.Rand) float64
	ran   *int // cases that fit the memory
}

// A tooLarge is the panic of an arena that is too small for a case, with the bytes that do not fit.
type tooLarge int64

// farResults are the results of an operation: tensors that must be equal in their last rows, and sums over all rows,
// whose order differs.
type farResults struct{ rows, sums []View }

// A farCase computes on tensors of that many rows.
type farCase struct {
	name string
	n    int  // elements of a row of its largest tensors
	half bool // beyond 2^31 elements, not 2^32, since there are too many tensors
	draw func(rng *rand.Rand) float64
	run  func(r *farRig, rows int) farResults
}

const (
	farRows  = 128 // the last rows in attention, a multiple of all blocks
	farArena = 41 << 30
	farOther = 21 << 30 // for the workspace of cuDNN and everything else
)

// TestBeyondInt32 runs every operation on tensors with more than 2^31 or 2^32 elements. All cases need 62 GiB; with less
// free memory, it runs those that fit.
func TestBeyondInt32(t *testing.T) {
	r := newFarRig(t)
	for _, c := range farOps {
		beyond := 1 << 32
		if c.half {
			beyond = 1 << 31
		}
		for _, skew := range []int{0, 1} {
			t.Run(c.name+[]string{"", ", unaligned"}[skew], func(t *testing.T) {
				sub := r.with(t, 8, skew, c.draw)
				sub.compare(c.run, (beyond+c.n-1)/c.n+sub.last, 0)
			})
		}
	}
	r.testAttention(t)
	t.Logf("%d cases ran", *r.ran)
	if *r.ran == 0 {
		t.Error("no case fits the memory")
	}
}

func newFarRig(t *testing.T) *farRig {
	r := newCUDARig(t)
	free, _, err := r.loader.Device().MemInfo()
	check(t, err)
	size := min(farArena, free-farOther)
	if size <= 0 {
		t.Fatalf("%d bytes are free; more than %d are needed", free, farOther)
	}
	var first tensor.Memory
	return &farRig{cudaRig: r, ran: new(int), arena: tensor.NewArena(size, func(n int64) tensor.Memory {
		if first != nil {
			panic(tooLarge(n))
		}
		first, err = r.loader.Device().Alloc(n)
		check(t, err)
		return first
	})}
}

// with returns the rig for a subtest. draw nil: normal values.
func (r *farRig) with(t *testing.T, last, skew int, draw func(rng *rand.Rand) float64) *farRig {
	if draw == nil {
		draw = (*rand.Rand).NormFloat64
	}
	return &farRig{cudaRig: r.within(t), arena: r.arena, last: last, skew: skew, draw: draw, ran: r.ran}
}

// compare compares the results for all rows with those for the last. Rows may differ by a share of the largest element.
func (r *farRig) compare(run func(*farRig, int) farResults, rows int, share float64) {
	r.t.Helper()
	r.compareRuns(func() farResults { return run(r, r.last) }, func() farResults { return run(r, rows) }, share)
}

// compareRuns compares the results of two computations, in their last rows.
func (r *farRig) compareRuns(expected, tested func() farResults, share float64) {
	r.t.Helper()
	start := r.arena.Mark()
	defer func() {
		e := recover()
		if n, ok := e.(tooLarge); ok {
			r.t.Logf("not run: %d bytes more do not fit the memory", n)
			r.arena.Release(start)
		} else if e != nil {
			panic(e)
		}
	}()
	read := func(vs []View) (all [][]float32) {
		for _, v := range vs {
			all = append(all, r.values(r.tail(v)))
		}
		return all
	}
	results := func(run func() farResults) (exact, sums [][]float32) {
		r.rng = rand.New(rand.NewPCG(1, 2))
		mark := r.arena.Mark()
		x := run()
		exact, sums = read(x.rows), read(x.sums)
		r.arena.Release(mark)
		return exact, sums
	}
	want, wantSums := results(expected)
	got, sums := results(tested)
	*r.ran++
	for i := range got {
		if err := near.Within(got[i], want[i], near.NonFinite, share); err != nil {
			r.t.Errorf("result %d: %v", i, err)
		}
	}
	for i := range wantSums {
		if err := near.Within(sums[i], wantSums[i], near.Finite, 0x1p-18); err != nil {
			r.t.Errorf("sum %d: %v", i, err)
		}
	}
}

// tail returns the last rows.
func (r *farRig) tail(v View) View {
	n := v.Len(tensor.Seq)
	return v.Slice(tensor.Seq, max(n-r.last, 0), n)
}

// tensor returns a dense tensor with random values in the last rows and zeros elsewhere.
func (r *farRig) tensor(dtype tensor.DType, rows, heads, n int) View {
	r.t.Helper()
	const period = 4093 // of the values; a prime, so that rows differ
	size := rows * heads * n
	v := r.arena.Alloc(dtype, size+r.skew).Slice(tensor.Dim, r.skew, r.skew+size).Reshape([4]int{1, rows, heads, n})
	r.Zero(v)
	host := tensor.New(dtype, r.tail(v).Size())
	xs := make([]float64, min(host.Size(), period))
	for i := range xs {
		xs[i] = near.Round(r.draw(r.rng), dtype)
	}
	near.Encode(host.Slice(tensor.Dim, 0, len(xs)), xs)
	bytes := tensor.Bytes(host)
	for at := len(xs) * dtype.Size(); at < len(bytes); {
		at += copy(bytes[at:], bytes[:at])
	}
	r.send(r.tail(v), host)
	return v
}

// indices returns an index for each row: from lo to hi in the last rows, else first.
func (r *farRig) indices(rows, lo, hi int, first int32) View {
	r.t.Helper()
	host := tensor.New(tensor.I32, 1, rows, 1, 1)
	ids := tensor.Data[int32](host)
	for i := range ids {
		if ids[i] = first; i >= rows-r.last {
			ids[i] = int32(lo + r.rng.IntN(hi-lo))
		}
	}
	v := r.arena.Alloc(tensor.I32, 1, rows, 1, 1)
	r.send(v, host)
	return v
}

const bf16, f32 = tensor.BF16, tensor.F32

// ternary returns -1, 0 or 1. Sums of products are then exact in any order.
func ternary(rng *rand.Rand) float64 { return float64(rng.IntN(3) - 1) }

var farOps = []farCase{
	{"rmsnorm", 4096, false, nil, func(r *farRig, rows int) farResults {
		x, y, inv, w := r.tensor(bf16, rows, 1, 4096), r.tensor(bf16, rows, 1, 4096), r.tensor(f32, rows, 1, 1),
			r.tensor(f32, 1, 1, 4096)
		r.RMSNorm(y, inv, x, w, 1e-5)
		return farResults{rows: []View{y, inv}}
	}},
	{"add rmsnorm", 4096, false, nil, func(r *farRig, rows int) farResults {
		a, b, y := r.tensor(bf16, rows, 1, 4096), r.tensor(bf16, rows, 1, 4096), r.tensor(bf16, rows, 1, 4096)
		sum, inv, w := r.tensor(bf16, rows, 1, 4096), r.tensor(f32, rows, 1, 1), r.tensor(f32, 1, 1, 4096)
		r.AddRMSNorm(y, inv, sum, a, b, w, 1e-5)
		return farResults{rows: []View{y, sum, inv}}
	}},
	{"rmsnorm backward", 4096, false, nil, func(r *farRig, rows int) farResults {
		x, dy, dx := r.tensor(bf16, rows, 1, 4096), r.tensor(bf16, rows, 1, 4096), r.tensor(bf16, rows, 1, 4096)
		inv, w, dw := r.tensor(f32, rows, 1, 1), r.tensor(f32, 1, 1, 4096), r.tensor(f32, 1, 1, 4096)
		r.RMSNormBackward(dx, dw, dy, x, inv, w, true)
		return farResults{rows: []View{dx}, sums: []View{dw}}
	}},
	{"rope", 4096, false, nil, func(r *farRig, rows int) farResults {
		x, y := r.tensor(bf16, rows, 32, 128), r.tensor(bf16, rows, 32, 128)
		cos, sin := r.tensor(f32, rows, 1, 64), r.tensor(f32, rows, 1, 64)
		r.NormRope(y, View{}, x, View{}, cos, sin, 0)
		r.NormRopeBackward(x, View{}, y, View{}, View{}, View{}, cos, sin)
		return farResults{rows: []View{x, y}}
	}},
	{"norm and rope", 4096, false, nil, func(r *farRig, rows int) farResults {
		x, y, w := r.tensor(bf16, rows, 32, 128), r.tensor(bf16, rows, 32, 128), r.tensor(f32, 1, 1, 128)
		cos, sin, inv := r.tensor(f32, rows, 1, 64), r.tensor(f32, rows, 1, 64), r.tensor(f32, rows, 32, 1)
		r.NormRope(y, inv, x, w, cos, sin, 1e-5)
		return farResults{rows: []View{y, inv}}
	}},
	{"norm and rope backward", 4096, false, nil, func(r *farRig, rows int) farResults {
		x, dx, dy := r.tensor(bf16, rows, 32, 128), r.tensor(bf16, rows, 32, 128), r.tensor(f32, rows, 32, 128)
		cos, sin, inv := r.tensor(f32, rows, 1, 64), r.tensor(f32, rows, 1, 64), r.tensor(f32, rows, 32, 1)
		w, dw := r.tensor(f32, 1, 1, 128), r.tensor(f32, 1, 1, 128)
		r.NormRopeBackward(dx, dw, dy, x, inv, w, cos, sin)
		return farResults{rows: []View{dx}, sums: []View{dw}}
	}},
	{"swiglu", 14336, false, nil, func(r *farRig, rows int) farResults {
		gate, up, y := r.tensor(bf16, rows, 1, 14336), r.tensor(bf16, rows, 1, 14336), r.tensor(bf16, rows, 1, 14336)
		r.GLU(y, gate, up, kernels.SiLU)
		r.GLUBackward(gate, up, y, gate, up, kernels.SiLU)
		return farResults{rows: []View{y, gate, up}}
	}},
	{"copy", 4096, false, nil, func(r *farRig, rows int) farResults {
		x, y, z := r.tensor(bf16, rows, 32, 128), r.tensor(f32, rows, 32, 128), r.tensor(bf16, rows, 32, 128)
		r.Copy(y, x)
		r.Copy(upper(z), lower(x))
		r.Copy(x, y)
		r.Copy(upper(y), lower(z))
		r.Copy(lower(x), upper(y))
		return farResults{rows: []View{x, y, z}}
	}},
	{"copy of a type", 4096, false, nil, func(r *farRig, rows int) farResults {
		x, y := r.tensor(f32, rows, 32, 128), r.tensor(f32, rows, 32, 128)
		r.Copy(y, x)
		r.Zero(upper(x))
		return farResults{rows: []View{x, y}}
	}},
	{"add", 4096, false, nil, func(r *farRig, rows int) farResults {
		x, y, z := r.tensor(bf16, rows, 32, 128), r.tensor(f32, rows, 32, 128), r.tensor(bf16, rows, 32, 128)
		r.Add(x, z)
		r.Add(y, x)
		r.Add(upper(z), lower(x))
		r.Add(upper(y), lower(x))
		return farResults{rows: []View{x, y, z}}
	}},
	{"embed", 4096, false, nil, func(r *farRig, rows int) farResults {
		table, y, ids := r.tensor(bf16, r.last, 1, 4096), r.tensor(bf16, rows, 1, 4096), r.indices(rows, 0, r.last, 0)
		r.Embed(y, table, ids)
		dtable := r.tensor(f32, r.last, 1, 4096)
		r.EmbedBackward(dtable, r.tensor(bf16, rows, 1, 4096), ids)
		return farResults{rows: []View{y}, sums: []View{dtable}}
	}},
	{"embedding table", 4096, true, nil, func(r *farRig, rows int) farResults {
		table, dtable := r.tensor(bf16, rows, 1, 4096), r.tensor(f32, rows, 1, 4096)
		y, ids := r.tensor(bf16, r.last, 1, 4096), r.indices(r.last, rows-r.last, rows, 0)
		r.Embed(y, table, ids)
		r.EmbedBackward(dtable, y, ids)
		return farResults{rows: []View{y}, sums: []View{dtable}}
	}},
	{"cross entropy", 128256, false, nil, func(r *farRig, rows int) farResults {
		logits, targets := r.tensor(bf16, rows, 1, 128256), r.indices(rows, 0, 128256, -1)
		loss := r.arena.Alloc(tensor.F64, 1)
		r.Zero(loss)
		r.CrossEntropy(loss, logits, targets, 1, 0, false)
		r.CrossEntropy(loss, logits, targets, 0.5, 0, true)
		return farResults{rows: []View{logits}, sums: []View{loss}}
	}},
	{"adamw", 4096, true, (*rand.Rand).ExpFloat64, func(r *farRig, rows int) farResults {
		p, g, m, v := r.tensor(f32, rows, 1, 4096), r.tensor(f32, rows, 1, 4096), r.tensor(f32, rows, 1, 4096),
			r.tensor(f32, rows, 1, 4096)
		copied := r.tensor(bf16, rows, 1, 4096)
		sum := r.arena.Alloc(tensor.F64, 1)
		r.Zero(sum)
		r.SumSquares(sum, g)
		r.AdamW(p, copied, g, m, v, View{}, kernels.AdamStep{LR: 0.1, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1})
		return farResults{rows: []View{p, m, v, copied}, sums: []View{sum}}
	}},
	{"linear", 14336, false, ternary, func(r *farRig, rows int) farResults {
		x, w := r.tensor(bf16, rows, 1, 64), r.tensor(bf16, 14336, 1, 64)
		y, add := r.tensor(bf16, rows, 1, 14336), r.tensor(bf16, rows, 1, 14336)
		r.Linear(y, x, w, add)
		dx, dw := r.tensor(bf16, rows, 1, 64), r.tensor(f32, 14336, 1, 64)
		r.LinearDX(dx, y, w, false)
		r.LinearDW(dw, add, x, true)
		return farResults{rows: []View{y, dx}, sums: []View{dw.Reshape([4]int{1, 1, 14336, 64})}}
	}},
	{"linear dx", 14336, false, ternary, func(r *farRig, rows int) farResults {
		dx, dy, w := r.tensor(bf16, rows, 1, 14336), r.tensor(bf16, rows, 1, 64), r.tensor(bf16, 64, 1, 14336)
		r.LinearDX(dx, dy, w, true)
		dw := r.tensor(f32, 64, 1, 14336)
		r.LinearDW(dw, dy, dx, false)
		return farResults{rows: []View{dx}, sums: []View{dw}}
	}},
	{"simple products", 14336, false, ternary, func(r *farRig, rows int) farResults {
		x, w, y := r.tensor(bf16, rows, 1, 8), r.tensor(bf16, 14336, 1, 8), r.tensor(bf16, rows, 1, 14336)
		check(r.t, r.simple(linearProblem(y, x, w, View{})))
		dx, dw := r.tensor(bf16, rows, 1, 8), r.tensor(f32, 14336, 1, 8)
		check(r.t, r.simple(linearDXProblem(dx, y, w, false)))
		check(r.t, r.simple(linearDWProblem(dw, y, x, true)))
		return farResults{rows: []View{y, dx}, sums: []View{dw.Reshape([4]int{1, 1, 14336, 8})}}
	}},
	{"sinks", 4096, true, nil, func(r *farRig, rows int) farResults {
		o, do, lse := r.tensor(bf16, rows, 32, 128), r.tensor(bf16, rows, 32, 128), r.tensor(f32, rows, 32, 1)
		sink, dsink := r.tensor(f32, 1, 32, 1), r.tensor(f32, 1, 32, 1)
		check(r.t, r.FoldSink(o, lse, sink))
		check(r.t, r.SinkGrad(dsink, do, o, lse, sink))
		return farResults{rows: []View{o, lse}, sums: []View{dsink}}
	}},
}

// lower and upper return 31 of 32 heads: strided views.
func lower(v View) View { return v.Slice(tensor.Heads, 0, 31) }
func upper(v View) View { return v.Slice(tensor.Heads, 1, 32) }

// A farBlock is a block of keys: rows of K and V, and its tiles.
type farBlock struct {
	keys  partition.Range
	tiles []partition.Tile
}

func farTile(q, k partition.Range) []partition.Tile {
	return []partition.Tile{{Q: q, K: k, Band: partition.Full()}}
}

// attended returns the results of a training step of attention with a fold after each block. Fused must refuse the
// gradients of 2^31 elements of q or more; the results are then those of the forward pass.
func (r *farRig) attended(k attention.Kernel, queries, keys int, blocks ...farBlock) farResults {
	const heads, kvHeads, dim = 32, 8, 128
	q, do, out := r.tensor(bf16, queries, heads, dim), r.tensor(bf16, queries, heads, dim),
		r.tensor(bf16, queries, heads, dim)
	ks, vs := r.tensor(bf16, keys, kvHeads, dim), r.tensor(bf16, keys, kvHeads, dim)
	lse, p := r.tensor(f32, queries, heads, 1), attention.Softmax{Scale: 0.0884}
	mark := r.arena.Mark()
	forward, err := k.Forward(out, attention.Partial{O: r.tensor(f32, queries, heads, dim), LSE: lse}, q, p)
	check(r.t, err)
	block := func(i int) attention.Block {
		b := blocks[i]
		return attention.Block{K: seqRows(ks, b.keys), V: seqRows(vs, b.keys), Tiles: b.tiles, First: i == 0,
			Last: i == len(blocks)-1}
	}
	for i := range blocks {
		check(r.t, forward.Block(block(i)))
	}
	check(r.t, forward.End())
	r.arena.Release(mark) // the stream runs in order
	dq, delta := r.tensor(f32, queries, heads, dim), r.tensor(f32, queries, heads, 1)
	dk, dv, other := r.tensor(f32, keys, kvHeads, dim), r.tensor(f32, keys, kvHeads, dim),
		r.tensor(f32, keys, kvHeads, dim)
	backward, err := k.Backward(dq, do, q, attention.Saved{O: out, LSE: lse, Delta: delta}, p)
	if _, fused := k.(*Fused); fused && q.Size() > math.MaxInt32 {
		if err == nil || !strings.Contains(err.Error(), "2^31 elements") {
			r.t.Errorf("the gradients of %d elements: %v", q.Size(), err)
		}
		return farResults{rows: []View{out, lse}}
	}
	check(r.t, err)
	for i, b := range blocks {
		grads := attention.KeyGrads{DK: seqRows(dk, b.keys), DV: seqRows(dv, b.keys)}
		check(r.t, backward.Block(attention.GradBlock{Block: block(i), KeyGrads: grads, Fresh: span(0, b.keys.Len()),
			FoldNext: true}))
		if i == len(blocks)-1 {
			check(r.t, backward.End())
		}
		src := seqRows(other, b.keys)
		check(r.t, backward.Fold(attention.Fold{Dst: grads, Src: attention.KeyGrads{DK: src, DV: src}}))
	}
	return farResults{rows: []View{out, lse, dq, dk, dv}}
}

// manyQueries attends to few keys, in two blocks.
func manyQueries(k attention.Kernel) func(r *farRig, rows int) farResults {
	return func(r *farRig, rows int) farResults {
		tiles := farTile(span(0, rows), span(0, farRows))
		return r.attended(k, rows, 2*farRows, farBlock{span(0, farRows), tiles},
			farBlock{span(farRows, 2*farRows), tiles})
	}
}

// lastQueries puts only the last queries into a tile, for slow kernels.
func lastQueries(k attention.Kernel) func(r *farRig, rows int) farResults {
	return func(r *farRig, rows int) farResults {
		tiles := farTile(span(rows-farRows, rows), span(0, farRows))
		return r.attended(k, rows, farRows, farBlock{span(0, farRows), tiles})
	}
}

// manyKeys shows the last keys to few queries.
func manyKeys(k attention.Kernel) func(r *farRig, rows int) farResults {
	return func(r *farRig, rows int) farResults {
		return r.attended(k, farRows, rows,
			farBlock{span(0, rows), farTile(span(0, farRows), span(rows-farRows, rows))})
	}
}

// allKeys shows all keys to few queries.
func allKeys(k attention.Kernel) func(r *farRig, rows int) farResults {
	return func(r *farRig, rows int) farResults {
		return r.attended(k, farRows, rows,
			farBlock{span(0, rows), farTile(span(0, farRows), span(0, rows))})
	}
}

// twoDocuments packs a short document after a long one, each with its own keys.
func twoDocuments(k attention.Kernel) func(r *farRig, rows int) farResults {
	return func(r *farRig, rows int) farResults {
		tiles := farTile(span(rows-farRows, rows), span(farRows, 2*farRows))
		if rows > farRows {
			tiles = append(farTile(span(0, rows-farRows), span(0, farRows)), tiles...)
		}
		return r.attended(k, rows, 2*farRows, farBlock{span(0, 2*farRows), tiles})
	}
}

// testAttention runs all attention kernels. cuDNN may choose other kernels for more rows, which round differently.
func (r *farRig) testAttention(t *testing.T) {
	const most, queries, keys = 1<<31/4096 - farRows, 1<<31/4096 + farRows, 1<<31/1024 + farRows
	reference, err := NewReference(r.stream, r.loader)
	check(t, err)
	k := r.flashVariants(t, usualDims)
	fast, ordered, older, olderOrdered := k.fast, k.ordered, k.older, k.olderOrdered
	fused, err := NewFused(r.stream, r.loader, FusedOptions{Workspace: FusedWorkspace(FusedShape{Batch: 1,
		SeqQ: most, SeqK: 2 * farRows, Heads: 32, KVHeads: 8, Dim: 128, DimV: 128, Calls: 2, Training: true,
		Packed: true})})
	check(t, err)
	t.Cleanup(func() { check(t, fused.Close()) })
	for _, c := range []struct {
		name  string
		run   func(*farRig, int) farResults
		rows  int
		share float64 // by which results may differ
	}{
		{"flash, queries", manyQueries(fast), queries, 0}, {"flash, keys", manyKeys(fast), keys, 0},
		{"ordered, queries", manyQueries(ordered), queries, 0}, {"ordered, keys", manyKeys(ordered), keys, 0},
		{"older, queries", manyQueries(older), queries, 0}, {"older, keys", manyKeys(older), keys, 0},
		{"older ordered, queries", manyQueries(olderOrdered), queries, 0},
		{"older ordered, keys", manyKeys(olderOrdered), keys, 0},
		{"reference, queries", lastQueries(reference), queries, 0}, {"reference, keys", manyKeys(reference), keys, 0},
		{"fused, queries", manyQueries(fused), queries, 0x1p-6}, {"fused, keys", manyKeys(fused), keys, 0x1p-6},
		{"fused, most queries", manyQueries(fused), most, 0x1p-6},
		{"fused packed", twoDocuments(fused), queries, 0x1p-6},
		{"fused packed, most queries", twoDocuments(fused), most, 0x1p-6},
	} {
		t.Run(c.name, func(t *testing.T) {
			fused.options.Packed = strings.HasPrefix(c.name, "fused packed")
			r.with(t, farRows, 0, nil).compare(c.run, c.rows, c.share)
		})
	}
	t.Run("fused and flash, all keys", func(t *testing.T) {
		fused.options.Packed = false
		sub := r.with(t, farRows, 0, nil)
		sub.compareRuns(func() farResults { return allKeys(fast)(sub, keys) },
			func() farResults { return allKeys(fused)(sub, keys) }, 0x1p-6)
	})
}
