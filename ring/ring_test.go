package ring_test

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A problem is one attention over a whole sequence, in global order.
type problem struct {
	q, k, v, do tensor.View
	shape       partition.Shape
	inner       int // ranks of a group that trades heads; 0: what partition.Inner says
	gather      int // heads of keys at a time; 0: all
	softmax     attention.Softmax
}

func (p *problem) spec() ring.Spec {
	h, kv := p.q.Len(tensor.Heads), p.k.Len(tensor.Heads)
	return ring.Spec{Shape: p.shape, Heads: h, KVHeads: kv,
		Inner: cmp.Or(p.inner, partition.Inner(p.shape.Size, p.shape.Size, h, kv)), GatherHeads: p.gather,
		Split: p.gather%2 == 0, Positions: p.softmax.Scores.Positions()}
}

// A result holds out, lse, dq, dk, dv in global order.
type result [5]tensor.View

var resultNames = [5]string{"out", "lse", "dq", "dk", "dv"}

// engine makes the kernel of one rank.
type engine func(*tensor.HostStream) attention.Kernel

func onCPU(s *tensor.HostStream) attention.Kernel { return cpu.New(s) }

func reference(s *tensor.HostStream) attention.Kernel {
	return attention.NewReference[float64](s.Do)
}

func like(v tensor.View, seq, heads, dim int) tensor.View {
	return tensor.New(v.DType(), v.Len(0), seq, heads, dim)
}

// run computes the problem over shape.Size ranks, twice on the same workspace so that what
// the first pass left in the buffers is noticed.
func run(t *testing.T, p problem, algorithm string, e engine) result {
	t.Helper()
	return runWith(t, p, algorithm, e, func(int, *ring.Ring) {})
}

// runWith runs p on rings modified by change.
func runWith(t *testing.T, p problem, algorithm string, e engine, change func(rank int, r *ring.Ring)) result {
	t.Helper()
	n := p.shape.Size
	p.shape.Layout = partition.Ready(p.shape.Layout, p.shape.SeqQ, n)
	streams := make([]*tensor.HostStream, n)
	compute := make([]tensor.Stream, n)
	for r := range n {
		streams[r] = tensor.NewHostStream("compute")
		compute[r] = streams[r]
	}
	world := comm.NewLocal(n, compute, comm.Options{})
	h, dv := p.q.Len(tensor.Heads), p.v.Len(tensor.Dim)
	out := result{
		like(p.q, p.shape.SeqQ, h, dv), like(p.q, p.shape.SeqQ, h, 1),
		like(p.q, p.shape.SeqQ, h, p.q.Len(tensor.Dim)),
		like(p.k, p.shape.SeqKV, p.k.Len(tensor.Heads), p.k.Len(tensor.Dim)),
		like(p.v, p.shape.SeqKV, p.v.Len(tensor.Heads), dv),
	}
	var g errgroup.Group
	for r := range n {
		g.Go(func() error {
			defer streams[r].Close()
			qs := partition.Positions(p.shape.Layout.Spans(p.shape.SeqQ, n, r))
			ks := partition.Positions(p.shape.Layout.Spans(p.shape.SeqKV, n, r))
			q, k, v, do := tensor.Gather(p.q, qs), tensor.Gather(p.k, ks), tensor.Gather(p.v, ks),
				tensor.Gather(p.do, qs)
			rows := q.Len(tensor.Seq)
			acc := attention.Partial{O: like(q, rows, h, dv), LSE: like(q, rows, h, 1)}
			grads := attention.Grads{DQ: like(q, rows, h, q.Len(3)), DK: like(k, k.Len(1), k.Len(2), k.Len(3)),
				DV: like(v, v.Len(1), v.Len(2), dv)}
			s, err := ring.Make(algorithm, p.spec(), r)
			if err != nil {
				return err
			}
			rg := &ring.Ring{Kernel: e(streams[r]), Comm: world[r], Mover: cpu.New(streams[r]), Stream: streams[r],
				Arena: tensor.NewHostArena(0)}
			change(r, rg)
			for range 2 {
				if err := rg.Forward(acc, q, k, v, s, p.softmax); err != nil {
					return err
				}
				if err := rg.Backward(grads, do, q, k, v, acc, s, p.softmax); err != nil {
					return err
				}
			}
			if err := streams[r].Sync(context.Background()); err != nil {
				return err
			}
			for i, part := range []tensor.View{acc.O, acc.LSE, grads.DQ, grads.DK, grads.DV} {
				rows := qs
				if i >= 3 {
					rows = ks
				}
				tensor.Scatter(out[i], part, rows)
			}
			return world[r].Close()
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatalf("%s of %+v: %v", algorithm, p.shape, err)
	}
	return out
}

// seen holds the largest relative difference that compare has found, by result.
var seen [5]float64

// compare reports a difference larger than tol times the largest value. Rows without a key have an LSE of -Inf.
func compare(t *testing.T, what string, got, want result, tol float64) {
	t.Helper()
	for i := range got {
		g, w := values(got[i]), values(want[i])
		d, err := near.Of(g, w, near.Infinities)
		seen[i] = max(seen[i], d.Relative())
		if err == nil {
			err = near.Within(g, w, near.Infinities, tol)
		}
		if err != nil {
			t.Errorf("%s: %s of shape %v: %v", what, resultNames[i], want[i].Shape(), err)
		}
	}
}

func values(v tensor.View) []float64 {
	if v.DType() == tensor.F64 {
		return tensor.Data[float64](v)
	}
	out := make([]float64, v.Size())
	for i, x := range tensor.Data[float32](v) {
		out[i] = float64(x)
	}
	return out
}

func whole(p problem) result {
	acc, g := attention.Whole[float64](p.q, p.k, p.v, p.do, p.shape.Mask, p.softmax)
	return result{acc.O, acc.LSE, g.DQ, g.DK, g.DV}
}

func random(rng *rand.Rand, dtype tensor.DType, shape ...int) tensor.View {
	v := tensor.New(dtype, shape...)
	if dtype == tensor.F64 {
		for i := range v.Size() {
			tensor.Data[float64](v)[i] = rng.NormFloat64()
		}
		return v
	}
	for i := range v.Size() {
		tensor.Data[float32](v)[i] = float32(rng.NormFloat64())
	}
	return v
}

// A maskCase is a mask and the lengths to test.
type maskCase struct {
	name    string
	causal  bool
	window  int
	sq, skv int
	docs    []int
}

var masks = []maskCase{
	{"full", false, -1, 48, 48, nil},
	{"causal", true, -1, 48, 48, nil},
	{"causal uneven", true, -1, 53, 53, nil},
	{"fewer tokens than chunks", true, -1, 5, 5, nil},
	{"window", true, 9, 50, 50, nil},
	{"window without causal", false, 7, 41, 41, nil},
	{"bottom right", true, -1, 30, 52, nil},
	{"more queries than keys", true, -1, 40, 25, nil},
	{"documents", true, -1, 48, 48, []int{7, 20, 1, 20}},
	{"documents with a window", true, 5, 48, 48, []int{30, 2, 16}},
	{"full documents", false, -1, 48, 48, []int{11, 37}},
}

func (m maskCase) shapes(t *testing.T, size int) []partition.Shape {
	t.Helper()
	mask := ring.Must(partition.NewMask(m.causal, m.window, m.sq, m.skv, m.docs))
	var shapes []partition.Shape
	for _, l := range ring.Layouts(m.docs) {
		shapes = append(shapes, partition.Shape{SeqQ: m.sq, SeqKV: m.skv, Size: size, Layout: l, Mask: mask})
	}
	return shapes
}

// conformance lists heads of q and of k and v, and numbers of ranks.
var (
	conformanceHeads = [][2]int{{2, 1}, {4, 4}, {4, 2}, {6, 3}, {5, 1}, {3, 3}, {8, 2}, {12, 4}}
	conformanceRanks = []int{1, 2, 3, 4, 6, 8}
)

// In float64 the ring must equal one device up to the order of sums. Each algorithm runs each mask in each layout, with
// random ranks, heads, groups and head dims.
func TestRingEqualsOneDevice(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	eachMask(func(m maskCase, algorithm string, layouts []int) {
		if *ring.Full {
			m.allEqualOneDevice(t, rng, algorithm)
			return
		}
		p := m.problem(t, rng, conformanceHeads[rng.IntN(len(conformanceHeads))])
		want := whole(p)
		for _, layout := range layouts {
			size := conformanceRanks[rng.IntN(len(conformanceRanks))]
			p.shape, p.inner = m.shapes(t, size)[layout], 1+rng.IntN(size)
			for size%p.inner != 0 {
				p.inner = 1 + rng.IntN(size)
			}
			p.equalsOneDevice(t, m.name, algorithm, want)
		}
	})
}

// allEqualOneDevice runs the mask with an algorithm in each layout with all ranks, groups and heads.
func (m maskCase) allEqualOneDevice(t *testing.T, rng *rand.Rand, algorithm string) {
	t.Helper()
	for _, heads := range conformanceHeads {
		p := m.problem(t, rng, heads)
		want := whole(p)
		for _, size := range conformanceRanks {
			for _, p.shape = range m.shapes(t, size) {
				for p.inner = 1; p.inner <= size; p.inner++ {
					if p.inner == size || algorithm == "hierarchical" && size%p.inner == 0 {
						p.equalsOneDevice(t, m.name, algorithm, want)
					}
				}
			}
		}
	}
}

// problem returns a problem of the mask, with those heads of queries and of keys.
func (m maskCase) problem(t *testing.T, rng *rand.Rand, heads [2]int) problem {
	t.Helper()
	dim, dimV := 1+rng.IntN(12), 1+rng.IntN(12)
	batch := 1 + rng.IntN(2) // rows of a batch of one are dense, and travel without a copy
	p := newProblem(rng, tensor.F64, batch, m.shapes(t, 1)[0], heads, dim, dimV)
	p.gather, p.softmax.Softcap = rng.IntN(heads[1]+1), float64(rng.IntN(2))*2
	return p
}

// newProblem returns a problem of random numbers, with those heads of queries and of keys.
func newProblem(rng *rand.Rand, t tensor.DType, batch int, s partition.Shape, heads [2]int, dim, dimV int) problem {
	return problem{
		q: random(rng, t, batch, s.SeqQ, heads[0], dim), k: random(rng, t, batch, s.SeqKV, heads[1], dim),
		v: random(rng, t, batch, s.SeqKV, heads[1], dimV), do: random(rng, t, batch, s.SeqQ, heads[0], dimV),
		shape: s, softmax: attention.Softmax{Scale: 0.4},
	}
}

func (p problem) equalsOneDevice(t *testing.T, mask, algorithm string, want result) {
	t.Helper()
	what := fmt.Sprintf("%s, %s, %s, %d ranks in groups of %d, %d heads, %d of keys, dims %d and %d, batch %d, %d heads at a time",
		mask, algorithm, p.shape.Layout.Name(), p.shape.Size, p.inner, p.q.Len(tensor.Heads), p.k.Len(tensor.Heads),
		p.q.Len(tensor.Dim), p.v.Len(tensor.Dim), p.q.Len(tensor.Batch), p.gather)
	compare(t, what, run(t, p, algorithm, reference), want, 1e-11)
}

// eachMask calls f for each mask and algorithm, with the layouts to test, as indices of shapes: all, or with -short one,
// so that each layout still meets each mask and each algorithm.
func eachMask(f func(m maskCase, algorithm string, layouts []int)) {
	for i, m := range masks {
		for k, algorithm := range ring.Variants {
			var layouts []int
			for l, n := 0, len(ring.Layouts(m.docs)); l < n; l++ {
				if !testing.Short() || l == (i+k)%n {
					layouts = append(layouts, l)
				}
			}
			f(m, algorithm, layouts)
		}
	}
}

// eachStrategy calls f for eachMask, over 3 and 4 ranks in turn, of which 3 divides no number of heads; and for each
// algorithm over one rank, which has all rows in any layout.
func eachStrategy(t *testing.T, f func(m maskCase, shape partition.Shape, algorithm string)) {
	t.Helper()
	n := 0
	eachMask(func(m maskCase, algorithm string, layouts []int) {
		for _, layout := range layouts {
			n++
			f(m, m.shapes(t, 3+n/2%2)[layout], algorithm)
		}
		if !testing.Short() || m.name == masks[0].name {
			f(m, m.shapes(t, 1)[0], algorithm)
		}
	})
}

// The same with the kernel that trains, in float32.
func TestRingWithTheCPUKernel(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	eachStrategy(t, func(m maskCase, shape partition.Shape, algorithm string) {
		p := newProblem(rng, tensor.F32, 1, shape, [2]int{4, 2}, 16, 24)
		what := fmt.Sprintf("%s, %s, %s, %d ranks", m.name, algorithm, shape.Layout.Name(), shape.Size)
		compare(t, what, run(t, p, algorithm, onCPU), whole(p), 1e-5)
	})
}

// Keys of other ranks keep their positions: ALiBi on ranks equals ALiBi on one device.
func TestSlopesEqualOneDevice(t *testing.T) {
	rng := rand.New(rand.NewPCG(15, 16))
	eachMask(func(m maskCase, algorithm string, layouts []int) {
		p := m.problem(t, rng, [2]int{4, 2})
		slopes := tensor.New(tensor.F64, 1, 1, 4, 1)
		copy(tensor.Data[float64](slopes), []float64{0.5, 0.25, 0.125, 0.0625})
		p.gather, p.softmax.Scores = 0, &attention.Scores{Slopes: slopes}
		if p.inner = 2; algorithm == "ulysses" {
			p.inner = 4
		}
		want := whole(p)
		for _, layout := range layouts {
			p.shape = m.shapes(t, 4)[layout]
			p.equalsOneDevice(t, "slopes, "+m.name, algorithm, want)
		}
	})
}

// precise notes the type of the O that a forward pass accumulates into.
type precise struct {
	attention.Kernel
	seen *tensor.DType
}

func (p precise) Forward(o tensor.View, acc attention.Partial, q tensor.View, s attention.Softmax) (
	attention.ForwardPass, error) {
	*p.seen = acc.O.DType()
	return p.Kernel.Forward(o, acc, q, s)
}

// Hops accumulate an O of 16 bits in the type of the LSE: rounding at each hop would add up.
func TestHopsAccumulateInTheTypeOfTheLSE(t *testing.T) {
	stream := tensor.NewHostStream("compute")
	defer stream.Close()
	s := ring.Must(ring.Make("ring", ring.Spec{Shape: masks[1].shapes(t, 1)[0]}, 0))
	var seen tensor.DType
	r := &ring.Ring{
		Kernel: precise{failing{}, &seen},
		Mover:  cpu.New(stream), Stream: stream, Arena: tensor.NewHostArena(0),
	}
	x := tensor.New(tensor.BF16, 1, 48, 2, 8)
	out := attention.Partial{O: tensor.New(tensor.BF16, 1, 48, 2, 8), LSE: tensor.New(tensor.F32, 1, 48, 2, 1)}
	if err := r.Forward(out, x, x, x, s, attention.Softmax{Scale: 1}); err != nil || seen != tensor.F32 {
		t.Errorf("%v; O accumulates in %v, want %v", err, seen, tensor.F32)
	}
}

// The same ranks, the same bits.
func TestRingRepeatsBitForBit(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	m := maskCase{"", true, -1, 61, 61, nil}
	for _, shape := range m.shapes(t, 4) {
		for _, algorithm := range ring.Variants {
			p := newProblem(rng, tensor.F32, 1, shape, [2]int{6, 2}, 16, 16) // gradients of keys are the sums of three ranks
			p.gather = 1
			compare(t, algorithm+" repeated", run(t, p, algorithm, onCPU), run(t, p, algorithm, onCPU), 0)
		}
	}
}

// The fixtures were computed in float64 by somebody else's code. Four ranks try every algorithm in every layout; other numbers
// of ranks every algorithm in zigzag, and a ring in every layout.
func TestFixtures(t *testing.T) {
	seen = [5]float64{}
	defer func() { t.Logf("largest relative differences of %v: %.2g", resultNames, seen) }()
	files := attentiontest.Fixtures(t)
	if len(files) != 5 {
		t.Fatalf("%d fixtures, want 5", len(files))
	}
	sizes := []int{1, 2, 3, 4, 8}
	if testing.Short() {
		sizes = []int{4}
	}
	for i, f := range files {
		p := problem{q: f.Q, k: f.K, v: f.V, do: f.DOut, softmax: f.Softmax}
		p.shape = partition.Shape{SeqQ: f.Q.Len(tensor.Seq), SeqKV: f.K.Len(tensor.Seq), Mask: f.Mask}
		lse := like(f.Out, p.shape.SeqQ, f.Q.Len(tensor.Heads), 1)
		tensor.Copy(lse, f.LSE) // the ring compares dense tensors
		want := result{f.Out, lse, f.DQ, f.DK, f.DV}
		for _, size := range sizes {
			for k, layout := range partition.Names {
				docs := p.shape.Mask.Docs
				if len(docs) == 0 {
					docs = []int{p.shape.SeqQ}
				}
				p.shape.Layout, p.shape.Size = partition.LayoutName(layout).Layout(docs, p.shape.Mask.Band), size
				for n, algorithm := range ring.Variants {
					if testing.Short() && (i+k+n)%len(files) != 0 { // each with one file
						continue
					}
					if trades := algorithm == "ulysses" || algorithm == "hierarchical"; trades && layout != "zigzag" {
						continue // the layouts are tried above
					}
					if size != 4 && layout != "zigzag" && algorithm != "ring" {
						continue
					}
					what := fmt.Sprintf("%s, %s, %s, %d ranks", f.Name, algorithm, layout, size)
					compare(t, what, run(t, p, algorithm, onCPU), want, 3e-6) // three times the largest error measured
				}
			}
		}
	}
}

// The ring is meant to be read whole.
func TestTheLoopsStayOnOnePage(t *testing.T) {
	src, err := os.ReadFile("ring.go")
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(src), "\n"); n > 130 {
		t.Errorf("ring.go has %d lines; both loops with their helpers fit in 130", n)
	}
}
