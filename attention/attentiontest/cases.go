package attentiontest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Case is one problem of the suite.
type Case struct {
	Name           string
	Batch          int
	SeqQ, SeqK     int
	Heads, KVHeads int
	Dim, DimV      int
	Tiles          []partition.Tile
	Softmax        attention.Softmax
	Layout         Layout
	Spread         float64 // standard deviation of q and k; 0 means 1
	Level          float64 // added to every score, by the first elements of q and k
	Calls          int     // over how many blocks of keys the work is spread; 0 means 1
	Reversed       bool    // the blocks of keys come last to first
	Started        bool    // DK and DV hold something before the backward pass
	PartFresh      bool    // with Started: the middle third of their rows does not
	Scores         *Scores // nil: nothing is added to scores, and nothing kept of them
	Folded         bool    // gradients from elsewhere are folded into all of them except the first quarter
	GradsOnly      int     // the last keys of one call, which no query sees: it gets their gradients alone
}

// Layout is how the views of a case lie in memory.
type Layout int

// The layouts.
const (
	Dense       Layout = iota // [batch, seq, heads, dim], row-major
	HeadsFirst                // [batch, heads, seq, dim] in memory
	Padded                    // gaps between batches, positions and heads, in a larger buffer
	Interleaved               // q, k and v of a position side by side in one buffer
)

func (l Layout) String() string {
	return [...]string{"dense", "heads first", "padded", "interleaved"}[l]
}

func tile(q0, q1, k0, k1 int, b partition.Band) partition.Tile {
	return partition.Tile{Q: partition.Range{Lo: q0, Hi: q1}, K: partition.Range{Lo: k0, Hi: k1}, Band: b}
}

func causal(diagonal int) partition.Band {
	return partition.Band{Lo: -partition.Unbounded, Hi: diagonal}
}

// base returns the case that others vary; it has more than one block each way.
func base(name string) Case {
	return Case{
		Name: name, Batch: 1, SeqQ: 70, SeqK: 150, Heads: 2, KVHeads: 1, Dim: 8, DimV: 8,
		Tiles: []partition.Tile{tile(0, 70, 0, 150, causal(80))}, Softmax: attention.Softmax{Scale: 0.25},
	}
}

// Cases returns the suite. Every case has a name of its own, which seeds its numbers.
func Cases() []Case {
	return slices.Concat(headCases(), bandCases(), tileCases(), maskCases(), layoutCases(), valueCases(), levelCases(),
		foldCases(), emptyCases(), scoreCases())
}

func headCases() []Case {
	var cs []Case
	for _, d := range [][2]int{{1, 1}, {8, 8}, {16, 32}, {32, 16}, {32, 32}, {64, 64}, {80, 80}, {96, 96}, {128, 128},
		{192, 128}, {256, 256}, {512, 512}, {3, 5}} {
		c := base(fmt.Sprintf("head dims %d and %d", d[0], d[1]))
		c.Dim, c.DimV = d[0], d[1]
		if d[0] >= 64 {
			c.SeqQ, c.SeqK, c.Tiles = 12, 140, []partition.Tile{tile(0, 12, 0, 140, causal(132))}
		}
		c.Softmax.Scale = 1 / math.Sqrt(float64(d[0]))
		cs = append(cs, c)
	}
	for _, h := range [][2]int{{1, 1}, {2, 2}, {4, 1}, {8, 2}, {6, 3}, {9, 1}, {5, 5}} {
		c := base(fmt.Sprintf("heads %d over %d", h[0], h[1]))
		c.Heads, c.KVHeads, c.Batch, c.Dim, c.DimV = h[0], h[1], 2, 8, 8
		c.SeqK, c.Tiles = 40, []partition.Tile{tile(0, 70, 0, 40, causal(-10))}
		cs = append(cs, c)
	}
	for _, s := range [][2]int{{1, 1}, {1, 200}, {200, 1}, {64, 128}, {65, 129}, {128, 64}, {70, 260}} {
		c := base(fmt.Sprintf("%d queries and %d keys", s[0], s[1]))
		c.SeqQ, c.SeqK = s[0], s[1]
		c.Tiles = []partition.Tile{tile(0, s[0], 0, s[1], partition.Full())}
		cs = append(cs, c)
	}
	return cs
}

// bandCases moves a diagonal from hiding everything to showing everything, on a small and on a large rectangle, and
// covers windows of every kind.
func bandCases() []Case {
	var cs []Case
	add := func(name string, m, n int, b partition.Band) {
		c := base(name)
		c.SeqQ, c.SeqK, c.Heads, c.Dim, c.DimV = m, n, 1, 4, 4
		c.Tiles = []partition.Tile{tile(0, m, 0, n, b)}
		cs = append(cs, c)
	}
	for d := -6; d <= 7; d++ {
		add(fmt.Sprintf("5 by 7 up to diagonal %d", d), 5, 7, causal(d))
		add(fmt.Sprintf("5 by 7 from diagonal %d", d), 5, 7, partition.Band{Lo: d, Hi: partition.Unbounded})
	}
	for _, d := range []int{-200, -129, -65, -64, -63, -1, 0, 1, 64, 127, 128, 129, 250} {
		add(fmt.Sprintf("130 by 200 up to diagonal %d", d), 130, 200, causal(d))
	}
	for _, b := range []partition.Band{{Lo: 0, Hi: 0}, {Lo: -3, Hi: 0}, {Lo: -48, Hi: 0}, {Lo: 10, Hi: 20},
		{Lo: -100, Hi: -90}, {Lo: 5, Hi: 4}, {Lo: -70, Hi: 130}, {Lo: -150, Hi: 3}} {
		add(fmt.Sprintf("window %d to %d", b.Lo, b.Hi), 130, 200, b)
	}
	return cs
}

// tileCases have several tiles; some leave rows and keys alone.
func tileCases() []Case {
	zigzag := base("zigzag pair")
	zigzag.Tiles = []partition.Tile{tile(0, 35, 0, 75, causal(0)), tile(35, 70, 0, 75, partition.Full()),
		tile(35, 70, 75, 150, causal(40))}

	rest := base("tiles that leave rows and keys alone")
	rest.Tiles = []partition.Tile{tile(3, 20, 10, 40, partition.Full()), tile(40, 41, 149, 150, partition.Full()),
		tile(66, 70, 60, 140, causal(10))}

	docs := base("documents")
	docs.SeqQ, docs.SeqK, docs.Tiles = 150, 150, nil
	at := 0
	for _, n := range []int{1, 37, 2, 1, 64, 30, 15} {
		docs.Tiles = append(docs.Tiles, tile(at, at+n, at, at+n, causal(0)))
		at += n
	}
	window := docs
	window.Name, window.Tiles = "documents with a window", slices.Clone(docs.Tiles)
	for i := range window.Tiles {
		window.Tiles[i].Band.Lo = -9
	}
	checker := base("squares like a chessboard")
	checker.Tiles = nil
	for i := range 7 {
		for j := i % 2; j < 15; j += 2 {
			checker.Tiles = append(checker.Tiles, tile(i*10, i*10+10, j*10, j*10+10, partition.Full()))
		}
	}
	backward := base("tiles in no order")
	backward.Tiles = slices.Clone(zigzag.Tiles)
	slices.Reverse(backward.Tiles)
	cs := []Case{zigzag, rest, docs, window, checker, backward}
	for _, l := range []partition.Layout{partition.Zigzag{}, partition.Striped{}} {
		mask, _ := partition.NewMask(true, 100, 301, 301, nil)
		for _, owner := range []int{0, 1} {
			c := base(fmt.Sprintf("%s rank 1 of 3 against %d", l.Name(), owner))
			s := partition.Shape{SeqQ: 301, SeqKV: 301, Size: 3, Layout: l, Mask: mask}
			c.Tiles = partition.Plan(s, 1, owner)
			c.SeqQ, c.SeqK = partition.Count(l.Spans(301, 3, 1)), partition.Count(l.Spans(301, 3, owner))
			cs = append(cs, c)
		}
	}
	return cs
}

func layoutCases() []Case {
	var cs []Case
	for _, l := range []Layout{HeadsFirst, Padded, Interleaved} {
		for _, heads := range [][2]int{{4, 2}, {3, 3}} {
			c := base(fmt.Sprintf("%v, heads %d over %d", l, heads[0], heads[1]))
			c.Layout, c.Batch, c.Heads, c.KVHeads, c.DimV = l, 2, heads[0], heads[1], 12
			c.SeqK, c.Started = 70, true
			c.Tiles = []partition.Tile{tile(2, 70, 0, 66, causal(-1))}
			cs = append(cs, c)
		}
	}
	return cs
}

// valueCases vary the numbers: large scores, soft caps, scales.
func valueCases() []Case {
	var cs []Case
	for _, spread := range []float64{1e-3, 10, 100, 1e3} { // scores up to some 4e6
		c := base(fmt.Sprintf("inputs of size %g", spread))
		c.Spread = spread
		cs = append(cs, c)
	}
	for _, softcap := range []float64{0.5, 20, 50} {
		c := base(fmt.Sprintf("soft cap %g", softcap))
		c.Softmax.Softcap, c.Spread = softcap, 4
		cs = append(cs, c)
	}
	capped := base("soft cap that is reached")
	capped.Softmax.Softcap, capped.Spread, capped.Started = 30, 50, true
	flat := base("scale 0")
	flat.Softmax.Scale = math.Copysign(0, -1)
	negative := base("negative scale")
	negative.Softmax.Scale = -0.25
	return append(cs, capped, flat, negative)
}

// levelCases have an LSE below -88.7, where exp(-LSE) overflows in float32. A kernel that scores the padding of its
// last tile of keys 0 then multiplies an infinity by 0: cuDNN did for 64 keys modulo 128 (pytorch#196678) and for one
// query (cudnn-frontend#1072).
func levelCases() []Case {
	var cs []Case
	add := func(mask string, m, n, calls int, tiles ...partition.Tile) {
		c := base(fmt.Sprintf("scores about -120, %d queries, %d keys, %d calls, %s", m, n, calls, mask))
		c.SeqQ, c.SeqK, c.Dim, c.DimV, c.Calls, c.Tiles, c.Level = m, n, 64, 64, calls, tiles, -120
		c.Softmax.Scale = 0.125
		cs = append(cs, c)
	}
	const m, n = 5, 64
	for _, n := range []int{n, 100, 2 * n, 3 * n, 5 * n} {
		add("full", m, n, 1, tile(0, m, 0, n, partition.Full()))
	}
	for _, n := range []int{n, 3 * n} {
		add("one query", 1, 2*n, 1, tile(0, 1, 0, 2*n, partition.Full()))
		add("full", m, 3*n, 3, tile(0, m, 0, 3*n, partition.Full())) // each call has n keys
		add("half of the keys", m, 2*n, 1, tile(0, m, 0, n, partition.Full()))
	}
	add("causal", n, n, 1, tile(0, n, 0, n, causal(0)))
	add("window", n, n, 1, tile(0, n, 0, n, partition.Band{Lo: -50}))
	add("window without a diagonal", n, n, 1, tile(0, n, 0, n, partition.Band{Lo: -50, Hi: partition.Unbounded}))
	add("taller than wide", 2*n, n, 1, tile(0, 2*n, 0, n, causal(0)))
	add("documents", n, n, 1, tile(0, n-40, 0, n-40, causal(0)), tile(n-40, n, n-40, n, causal(0)))
	return cs
}

// foldCases spread one problem over several calls.
func foldCases() []Case {
	var cs []Case
	for _, n := range []int{2, 3, 8} {
		for _, reversed := range []bool{false, true} {
			for _, spread := range []float64{1, 30} {
				c := base(fmt.Sprintf("%d calls, reversed %t, inputs of size %g", n, reversed, spread))
				c.Calls, c.Reversed, c.Spread = n, reversed, spread
				cs = append(cs, c)
			}
		}
	}
	started := base("gradients that hold something")
	started.Started, started.Calls, started.Batch = true, 2, 2
	part := base("gradients that hold something in part")
	part.Started, part.PartFresh, part.Calls, part.Batch = true, true, 2, 2
	for _, n := range []int{1, 3} {
		for _, s := range []bool{false, true} {
			c := base(fmt.Sprintf("folds, %d calls, started %t", n, s))
			c.Folded, c.Calls, c.Started, c.Batch = true, n, s, 2
			cs = append(cs, c)
		}
	}
	foldedPart := part
	foldedPart.Name, foldedPart.Folded, foldedPart.Layout,
		foldedPart.SeqK = "folds into gradients that hold something in part", true, Padded, 140
	foldedPart.Tiles = []partition.Tile{tile(0, 70, 50, 139, causal(60))}
	more := base("more gradients than keys")
	more.SeqK, more.GradsOnly, more.Batch = 450, 389, 2
	more.Tiles = []partition.Tile{tile(0, 70, 0, 61, causal(10))}
	few := more
	few.Name, few.SeqK, few.GradsOnly = "a few more gradients than keys", 70, 9
	moreFolded := more
	moreFolded.Name, moreFolded.Folded = "folds into more gradients than keys", true
	moreStarted := more
	moreStarted.Name, moreStarted.Started, moreStarted.PartFresh = "more gradients than keys, in part fresh", true, true
	capped := base("calls with a soft cap")
	capped.Softmax.Softcap, capped.Calls, capped.Layout = 10, 3, Padded
	return append(cs, started, part, foldedPart, more, few, moreFolded, moreStarted, capped)
}

func emptyCases() []Case {
	none := base("no tile")
	none.Tiles, none.Started = nil, true
	unset := base("no tile, and gradients that hold nothing")
	unset.Tiles = nil
	noQueries := base("no query")
	noQueries.SeqQ, noQueries.Tiles = 0, []partition.Tile{tile(0, 0, 0, 150, partition.Full())}
	noKeys := base("no key")
	noKeys.SeqK, noKeys.Tiles, noKeys.Started = 0, []partition.Tile{tile(0, 70, 0, 0, partition.Full())}, true
	hidden := base("everything hidden")
	hidden.Tiles = []partition.Tile{tile(0, 70, 0, 150, causal(-70))}
	some := base("first rows see nothing")
	some.Tiles = []partition.Tile{tile(0, 70, 0, 150, causal(-20))}
	one := base("one query and one key")
	one.SeqQ, one.SeqK, one.Tiles = 1, 1, []partition.Tile{tile(0, 1, 0, 1, causal(0))}
	return []Case{none, unset, noQueries, noKeys, hidden, some, one}
}

// A call is one block of keys [lo, sent) and its tiles, in indices of the block. It adds to gradients of keys [lo, hi).
type call struct {
	lo, hi  int
	sent    int
	tiles   []partition.Tile
	columns []int
}

func (c call) block(s *set, calls []call, i int) attention.Block {
	tiles := func(calls []call) bool {
		return slices.ContainsFunc(calls, func(c call) bool { return len(c.tiles) > 0 })
	}
	return attention.Block{
		K: s.k.Slice(tensor.Seq, c.lo, c.sent), V: s.v.Slice(tensor.Seq, c.lo, c.sent), Tiles: c.tiles, Columns: c.columns,
		First: len(c.tiles) > 0 && !tiles(calls[:i]), Last: len(c.tiles) > 0 && !tiles(calls[i+1:]),
	}
}

// part returns rows of all keys, in indices of the call.
func (c call) part(r partition.Range) partition.Range {
	lo, hi := max(r.Lo, c.lo), min(r.Hi, c.hi)
	return partition.Range{Lo: lo - c.lo, Hi: max(lo, hi) - c.lo}
}

// fresh returns the keys without gradients before the backward pass.
func (c Case) fresh() partition.Range {
	switch {
	case c.PartFresh:
		return partition.Range{Lo: c.SeqK / 3, Hi: 2 * c.SeqK / 3}
	case c.Started:
		return partition.Range{}
	}
	return partition.Range{Hi: c.SeqK}
}

func (c Case) folded() partition.Range {
	if !c.Folded {
		return partition.Range{}
	}
	return partition.Range{Lo: c.SeqK / 4, Hi: c.SeqK}
}

func (c call) of(v tensor.View) tensor.View { return v.Slice(tensor.Seq, c.lo, c.hi) }

func (c Case) calls() []call {
	n := max(c.Calls, 1)
	var calls []call
	for i := range n {
		b := call{lo: i * c.SeqK / n, hi: (i + 1) * c.SeqK / n}
		b.sent = b.hi - c.GradsOnly
		if c.Scores != nil {
			b.columns = positions(c.SeqK, c.column)[b.lo:b.sent]
		}
		for _, t := range c.Tiles {
			lo, hi := max(t.K.Lo, b.lo), min(t.K.Hi, b.hi)
			if lo < hi || n == 1 {
				t.K = partition.Range{Lo: lo - b.lo, Hi: hi - b.lo}
				t.Band.Lo -= b.lo
				t.Band.Hi -= b.lo
				b.tiles = append(b.tiles, t)
			}
		}
		calls = append(calls, b)
	}
	if c.Reversed {
		slices.Reverse(calls)
	}
	return calls
}

// touched returns the queries that are in a visible pair, and the keys that are in one or get gradients folded.
func (c Case) touched() (queries, keys []bool) {
	queries, keys = make([]bool, c.SeqQ), make([]bool, c.SeqK)
	for j := c.folded().Lo; j < c.folded().Hi; j++ {
		keys[j] = true
	}
	for _, t := range c.Tiles {
		for i := t.Q.Lo; i < t.Q.Hi; i++ {
			for j := t.K.Lo; j < t.K.Hi; j++ {
				if t.Band.Sees(i, j) {
					queries[i], keys[j] = true, true
				}
			}
		}
	}
	return queries, keys
}

// RandomCase returns one hop of a random layout under a random mask: any seed is a valid case.
func RandomCase(seed uint64) Case {
	rng := rand.New(rand.NewPCG(seed, 7))
	seq, size := 1+rng.IntN(400), 1+rng.IntN(4)
	docs := []int{}
	for left := seq; left > 0; {
		n := 1 + rng.IntN(left)
		docs = append(docs, n)
		left -= n
	}
	layout := []partition.Layout{partition.Contiguous{}, partition.Zigzag{}, partition.Striped{},
		partition.Document{Docs: docs}, partition.DocumentZigzag{Docs: docs}}[rng.IntN(5)]
	mask := partition.Mask{Band: partition.Full()}
	if rng.IntN(3) > 0 {
		mask.Hi = rng.IntN(21) - 10
	}
	if rng.IntN(3) == 0 {
		mask.Lo = min(mask.Hi, 0) - rng.IntN(seq)
	}
	if rng.IntN(2) == 0 {
		mask.Docs = docs
	}
	rank, owner, group := rng.IntN(size), rng.IntN(size), 1+rng.IntN(5)
	c := Case{
		Name: fmt.Sprintf("seed %d", seed), Batch: 1 + rng.IntN(2), KVHeads: 1 + rng.IntN(2),
		Dim: 1 + rng.IntN(24), DimV: 1 + rng.IntN(24), Layout: Layout(rng.IntN(4)),
		Spread: math.Exp(2 * rng.NormFloat64()), Calls: 1 + rng.IntN(3), Reversed: rng.IntN(2) == 0,
		Started: rng.IntN(2) == 0, Folded: rng.IntN(2) == 0,
		SeqQ: partition.Count(layout.Spans(seq, size, rank)),
		SeqK: partition.Count(layout.Spans(seq, size, owner)),
		Tiles: partition.Plan(partition.Shape{SeqQ: seq, SeqKV: seq, Size: size, Layout: layout, Mask: mask}, rank,
			owner),
	}
	c.PartFresh = c.Started && rng.IntN(2) == 0
	c.Heads = group * c.KVHeads
	c.Softmax = attention.Softmax{Scale: 1 / math.Sqrt(float64(c.Dim))}
	if rng.IntN(3) == 0 {
		c.Softmax.Softcap = 1 + 40*rng.Float64()
	}
	if c.Calls == 1 {
		reach := 0
		for _, t := range c.Tiles {
			reach = max(reach, t.K.Hi)
		}
		c.GradsOnly = rng.IntN(c.SeqK - reach + 1)
	}
	return c
}
