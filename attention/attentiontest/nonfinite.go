package attentiontest

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// TestNonFinite puts one NaN or infinity into q, k, v or do and holds a kernel from newRig to the contract of
// attention.Kernel:
//
//   - An output element that the float64 reference makes NaN or infinite is NaN or infinite.
//   - Further such elements are in rows of a tile that has a visible pair with such a query or key. (A tile is one of
//     attention.Block: a product of matrices may multiply the weight 0 of a hidden pair by NaN.) See also
//     Options.Block.
//   - No LSE is -Inf unless its row sees no key.
//   - All other elements are at most twice as far off as TestKernel allows.
func TestNonFinite(t *testing.T, newRig func(testing.TB) Rig, opts Options) {
	rig := newRig(t)
	for _, dtype := range opts.DTypes {
		t.Run(dtype.String(), func(t *testing.T) {
			for n, c := range nonFiniteCases() {
				if opts.takes(c) && (opts.Block > 0 || c.SeqQ <= 150) { // longer ones are for blocks
					t.Run(c.Name, func(t *testing.T) {
						var list []poison
						for i, p := range c.poisons() {
							if (n+i)%max(opts.Sample, 1) == 0 {
								list = append(list, p)
							}
						}
						c.prepare(t, dtype, list)
						for _, p := range list {
							if f := c.poisoned(t, rig, dtype, p, opts); len(f.missed)+len(f.strayed) > 0 ||
								f.wrong != nil {
								t.Errorf("%v: %v", p, f)
							}
						}
					})
				}
			}
		})
	}
}

// NonFiniteReach lists, for NaN, +Inf and -Inf in q, k, v and do, the outputs that should have become NaN or infinite
// and did not: a row of "input value: outputs" for each that a kernel drops. It is for libraries, which have their own
// rules.
func NonFiniteReach(t *testing.T, rig Rig, c Case, dtype tensor.DType) (dropped []string) {
	t.Helper()
	list := c.poisons()
	c.prepare(t, dtype, list)
	for _, p := range list {
		if f := c.poisoned(t, rig, dtype, p, Options{NoDelta: true}); len(f.missed) > 0 {
			row := fmt.Sprintf("%s %v: %s", p.input, p.value, strings.Join(f.outputs(), " "))
			if !slices.Contains(dropped, row) {
				dropped = append(dropped, row)
			}
		}
	}
	return dropped
}

// NonFiniteCase returns a causal case for NonFiniteReach, of that head dim, over that many blocks of keys.
func NonFiniteCase(dim, calls int) Case {
	c := nonFiniteCases()[0]
	c.Dim, c.DimV, c.Calls, c.Softmax.Scale = dim, dim, calls, 1/math.Sqrt(float64(dim))
	return c
}

// nonFiniteCases have three hops: keys at the beginning, in the middle and at the end are in one each.
func nonFiniteCases() []Case {
	var cs []Case
	add := func(name string, change func(*Case)) {
		c := base("not finite: " + name)
		c.Heads, c.KVHeads, c.Dim, c.DimV, c.Calls = 4, 2, 16, 16, 3
		change(&c)
		cs = append(cs, c)
	}
	mask := func(seq int, causal bool, window int, docs []int) func(*Case) {
		return func(c *Case) {
			m, err := partition.NewMask(causal, window, seq, seq, docs)
			if err != nil {
				panic(err)
			}
			c.SeqQ, c.SeqK = seq, seq
			s := partition.Shape{SeqQ: seq, SeqKV: seq, Size: 1, Layout: partition.Contiguous{}, Mask: m}
			c.Tiles = partition.Plan(s, 0, 0)
		}
	}
	docs := []int{1, 37, 2, 1, 64, 30, 15}
	add("causal", func(*Case) {})
	add("full", func(c *Case) { c.Tiles = []partition.Tile{tile(0, 70, 0, 150, partition.Full())} })
	add("tiny", func(c *Case) { c.SeqQ, c.SeqK, c.Tiles = 5, 7, []partition.Tile{tile(0, 5, 0, 7, causal(2))} })
	add("rows with few keys", mask(70, true, -1, nil))
	add("window", mask(150, true, 20, nil))
	add("documents", mask(150, true, -1, docs))
	add("documents, in one call", func(c *Case) { mask(150, true, -1, docs)(c); c.Calls = 1 })
	add("documents that see both ways", mask(150, false, -1, docs))
	add("documents with a window", mask(150, true, 9, docs))
	add("zigzag", func(c *Case) {
		c.Tiles = []partition.Tile{
			tile(0, 35, 0, 75, causal(0)), tile(35, 70, 0, 75, partition.Full()), tile(35, 70, 75, 150, causal(40)),
		}
		c.Batch = 2
	})
	add("soft cap", func(c *Case) { c.Softmax.Softcap = 5 })
	add("folds, hops reversed", func(c *Case) {
		c.Folded, c.Started, c.Reversed, c.Heads, c.KVHeads = true, true, true, 3, 3
	})
	add("head dim 64", func(c *Case) { c.Dim, c.DimV, c.Softmax.Scale = 64, 64, 0.125 })
	add("head dim 128, documents", func(c *Case) {
		mask(150, true, -1, docs)(c)
		c.Dim, c.DimV, c.Heads, c.KVHeads, c.Softmax.Scale = 128, 128, 1, 1, 0.088
	})
	add("long documents", func(c *Case) {
		mask(640, true, -1, []int{200, 1, 250, 189})(c)
		c.Heads, c.KVHeads = 1, 1
	})
	add("slopes and largest score", func(c *Case) { c.Scores = &Scores{ALiBi: true, Max: true} })
	return cs
}

// A poison is one element of an input that is not finite.
type poison struct {
	input            string
	value            float64
	batch, row, head int
	dim              int
}

func (p poison) String() string {
	return fmt.Sprintf("%s[batch %d, seq %d, head %d, dim %d] = %v", p.input, p.batch, p.row, p.head, p.dim, p.value)
}

// poisons lists every input and value, in queries or keys of several hops.
func (c Case) poisons() (list []poison) {
	for _, input := range []string{"q", "k", "v", "do"} {
		rows, heads, dim := c.SeqQ, c.Heads, c.Dim
		switch input {
		case "k":
			rows, heads = c.SeqK, c.KVHeads
		case "v":
			rows, heads, dim = c.SeqK, c.KVHeads, c.DimV
		case "do":
			dim = c.DimV
		}
		at := []int{0, rows / 2, rows - 1}
		for _, x := range []struct {
			value float64
			hops  []int
		}{{math.NaN(), []int{0, 1, 2}}, {math.Inf(1), []int{0, 1}}, {math.Inf(-1), []int{0, 2}}} {
			for n, i := range x.hops {
				list = append(list, poison{input, x.value, i % c.Batch, at[i], (i + n) % heads, i * (dim - 1) / 2})
			}
		}
	}
	return list
}

func (p poison) in(c Case, x inputs) inputs {
	put := func(xs []float64, heads, rows, dim int) []float64 {
		xs = slices.Clone(xs)
		xs[((p.batch*rows+p.row)*heads+p.head)*dim+p.dim] = p.value
		return xs
	}
	switch p.input {
	case "q":
		x.q = put(x.q, c.Heads, c.SeqQ, c.Dim)
	case "k":
		x.k = put(x.k, c.KVHeads, c.SeqK, c.Dim)
	case "v":
		x.v = put(x.v, c.KVHeads, c.SeqK, c.DimV)
	case "do":
		x.do = put(x.do, c.Heads, c.SeqQ, c.DimV)
	}
	return x
}

// prepare computes what poisoned expects, in parallel.
func (c Case) prepare(t *testing.T, dtype tensor.DType, list []poison) {
	t.Helper()
	in := c.clean(t, dtype).in
	must(t, parallel(len(list), func(i int) error {
		_, err := c.poisonedAnswer(dtype, list[i], list[i].in(c, in))
		return err
	}))
}

// poisonedAnswer returns the results in float64 with the poison, computed once.
func (c Case) poisonedAnswer(dtype tensor.DType, p poison, in inputs) (*set, error) {
	key := fmt.Sprint(c.Name, c.Dim, dtype, p)
	if exact, ok := poisonedAnswers.Load(key); ok {
		return exact.(*set), nil
	}
	exact, err := c.exact(in)
	if err == nil {
		poisonedAnswers.Store(key, exact)
	}
	return exact, err
}

// A findings lists the elements that break the contract.
type findings struct {
	missed, strayed []string // finite but should not be, and the other way round
	wrong           error
}

func (f findings) Error() string {
	var parts []string
	for _, x := range []struct {
		list []string
		what string
	}{{f.missed, "should not be finite"}, {f.strayed, "should be finite"}} {
		if len(x.list) > 0 {
			last := x.list[len(x.list)-1]
			parts = append(parts, fmt.Sprintf("%d elements %s: %s, …, %s", len(x.list), x.what, x.list[0], last))
		}
	}
	if f.wrong != nil {
		parts = append(parts, f.wrong.Error())
	}
	return strings.Join(parts, "; ")
}

// outputs returns the names of outputs with elements that should not be finite.
func (f findings) outputs() (names []string) {
	for _, x := range f.missed {
		if name, _, _ := strings.Cut(x, "["); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// A cleanAnswer holds the results without a poison, and the share of the largest value that each may be off by.
type cleanAnswer struct {
	answer
	scale, allowed []float64
}

// cleanAnswers and poisonedAnswers hold results by case and type, and by poison: the suite runs again with other
// kernels.
var cleanAnswers, poisonedAnswers sync.Map

func (c Case) clean(t *testing.T, dtype tensor.DType) cleanAnswer {
	t.Helper()
	key := fmt.Sprint(c.Name, c.Dim, dtype)
	if a, ok := cleanAnswers.Load(key); ok {
		return a.(cleanAnswer)
	}
	of, err := answerOf(c, dtype)
	must(t, err)
	a := cleanAnswer{answer: of}
	for n, r := range a.oracle.results() {
		want := read(r.view)
		d, err := near.Of(read(a.plain.results()[n].view), want, near.Infinities)
		must(t, err)
		scale := max(largest(want), a.size[r.name])
		a.scale = append(a.scale, scale)
		a.allowed = append(a.allowed, 2*(2*d.Abs/scale+c.floor(a.in, dtype)))
	}
	cleanAnswers.Store(key, a)
	return a
}

func (c Case) poisoned(t *testing.T, rig Rig, dtype tensor.DType, p poison, opts Options) (f findings) {
	t.Helper()
	clean := c.clean(t, dtype)
	in := p.in(c, clean.in)
	exact, err := c.poisonedAnswer(dtype, p, in)
	must(t, err)
	want := exact.results()
	tested, err := c.computed(rig, c.Layout, dtype, in)
	must(t, err)

	forward, backward := c.tainted(p, tested, max(opts.Block-1, 0))
	for n, r := range tested.results() {
		tainted := forward
		switch r.name {
		case "delta":
			if opts.NoDelta {
				continue
			}
		case "dq", "dk", "dv":
			tainted = backward
		}
		values := read(want[n].view) // a soft cap of an infinity is finite, and the values that it leaves are larger
		f.compare(r, values, tainted, clean.allowed[n]*max(clean.scale[n], largest(values)))
	}
	tested.checkSentinels(t)
	return f
}

func (f *findings) compare(r result, want []float64, tainted map[place]bool, allowed float64) {
	got, i := read(r.view), -1
	each(r.view, func(_ int64, at [4]int) {
		i++
		g, w := got[i], want[i]
		text := func() string {
			return fmt.Sprintf("%s[batch %d, seq %d, head %d, dim %d] = %v, want %v", r.name, at[0], at[1], at[2],
				at[3], g, w)
		}
		empty := math.IsInf(w, -1) && (r.name == "lse" || r.name == "max") // the row sees no key
		switch {
		case empty && g == w:
		case !finite(w) && !empty:
			if finite(g) || r.name == "lse" && math.IsInf(g, -1) {
				f.missed = append(f.missed, text())
			}
		case !finite(g):
			where := place{r.name == "dk" || r.name == "dv", at[0], at[1], at[2]}
			if !tainted[where] || math.IsInf(g, -1) && r.name == "lse" {
				f.strayed = append(f.strayed, text())
			}
		case !(near.Gap(g, w, near.Finite) <= allowed) && f.wrong == nil:
			f.wrong = fmt.Errorf("%s: off by more than %.3g", text(), allowed)
		}
	})
}

func finite(x float64) bool { return x-x == 0 }

// A place is a row of queries or of keys in one head.
type place struct {
	key              bool
	batch, row, head int
}

// tainted returns the rows that need not be finite after the forward pass, and after a backward pass from its results.
func (c Case) tainted(p poison, tested *set, beyond int) (forward, backward map[place]bool) {
	at, bad := place{p.input == "k" || p.input == "v", p.batch, p.row, p.head}, map[place]bool{}
	if p.input != "do" {
		bad[at] = true
	}
	forward = c.spread(bad, beyond)
	if p.input == "do" {
		bad[at], forward[at] = true, true // its delta
	}
	for _, v := range []tensor.View{tested.out, tested.acc.LSE} {
		xs, i := read(v), -1
		each(v, func(_ int64, at [4]int) {
			if i++; !finite(xs[i]) && !math.IsInf(xs[i], -1) {
				bad[place{false, at[0], at[1], at[2]}] = true
			}
		})
	}
	return forward, c.spread(bad, beyond)
}

// spread returns the rows of all tiles that have a visible pair with a bad row, and rows beyond them, head by head.
func (c Case) spread(bad map[place]bool, beyond int) map[place]bool {
	out, group := map[place]bool{}, c.Heads/c.KVHeads
	done := map[[3]int]bool{} // tile, batch and head
	for x := range bad {
		for n, t := range c.Tiles {
			first, last := x.row-beyond, x.row+beyond // a product of blocks takes them together with x
			own, others := t.Q, partition.Range{Lo: max(t.K.Lo, first+t.Band.Lo), Hi: min(t.K.Hi, last+t.Band.Hi+1)}
			heads := partition.Range{Lo: x.head, Hi: x.head + 1}
			if x.key {
				own, others = t.K, partition.Range{Lo: max(t.Q.Lo, first-t.Band.Hi), Hi: min(t.Q.Hi, last-t.Band.Lo+1)}
				heads = partition.Range{Lo: x.head * group, Hi: (x.head + 1) * group}
			}
			if x.row < own.Lo || x.row >= own.Hi || others.Lo >= others.Hi {
				continue
			}
			for h := heads.Lo; h < heads.Hi; h++ {
				at := [3]int{n, x.batch, h}
				if done[at] {
					continue
				}
				done[at] = true
				for i := t.Q.Lo - beyond; i < t.Q.Hi+beyond; i++ {
					out[place{false, x.batch, i, h}] = true
				}
				for j := t.K.Lo - beyond; j < t.K.Hi+beyond; j++ {
					out[place{true, x.batch, j, h / group}] = true
				}
			}
		}
	}
	return out
}
