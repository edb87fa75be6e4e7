package partition

import (
	"cmp"
	"math"
	"slices"
)

// Document distributes packed documents by work. It cuts each into chunks; a document shorter than a chunk stays whole.
// It gives the chunk with most visible pairs first to the rank that is then least busy. Ranks hold equal numbers of
// positions, to within one, since the rest of a model costs the same for each position. Documents may have any length.
//
// A rank is as busy as
//
//	its visible pairs / the mean of all ranks  +  the rows of keys that it newly needs / all rows,
//
// both without a unit; if the result is better, the first term has less weight during the distribution. The first term
// is the quantity that MagiAttention's dispatch balances by a heap (SandAI,
// magi_attention/meta/solver/dispatch_solver.py; arXiv:2505.13211). The second keeps the chunks of a document together
// as far as balance allows, so that fewer keys travel: further chunks of a document whose keys a rank already fetches
// cost nothing more.
type Document struct {
	Docs []int // lengths in tokens, which sum to the sequence length
	// Bands are the masks of the layers to balance, each once; none: a causal one.
	Bands []Band
}

const (
	// ChunkRows is the most positions of a chunk, unless a sequence or a document would have too many chunks.
	ChunkRows = 512
	// chunksPerRank is the least number of chunks of a rank for a sequence of one document, so that the last chunks
	// even out the first ones.
	chunksPerRank = 16
	// pairChunks bounds the mean number of a rank's chunks of one document: two ranks have tiles for the square of it.
	pairChunks = 128
	// balanceTrials bounds chunks times ranks, the cost of distribution, for very long sequences.
	balanceTrials = 1 << 20
)

// Name returns "document".
func (Document) Name() string { return "document" }

// Spans returns the chunks of one rank, with neighbours joined. Callers that need several ranks use AllSpans.
func (d Document) Spans(seqLen, size, rank int) []Span { return d.AllSpans(seqLen, size)[rank] }

// AllSpans returns the Spans of every rank.
func (d Document) AllSpans(seqLen, size int) [][]Span {
	if err := fits(d.Docs, seqLen); err != nil {
		panic("partition: " + err.Error())
	}
	ranks, all := d.balance(seqLen, size), make([][]Span, size)
	for r := range ranks {
		all[r] = ranks[r].spans()
	}
	return all
}

// AllSpans returns the spans of every rank, together if the layout has such a method.
func AllSpans(l Layout, seqLen, size int) [][]Span {
	if a, ok := l.(interface {
		AllSpans(seqLen, size int) [][]Span
	}); ok {
		return a.AllSpans(seqLen, size)
	}
	all := make([][]Span, size)
	for r := range all {
		all[r] = l.Spans(seqLen, size, r)
	}
	return all
}

// A chunk has neighbouring positions of a document, the work of their queries, and the keys that these see.
type chunk struct {
	at   Range
	doc  int
	work float64 // visible pairs; exact up to 2^53
	keys Range
	// of is the document, to cut a chunk.
	of *document
}

// A document determines the work of its chunks.
type document struct {
	Range
	bands []Band
}

// chunkRows returns the length of chunks. Short sequences have shorter ones, so that each rank has some; very long ones
// have longer chunks.
func chunkRows(seqLen, size int) int {
	most := max(chunksPerRank*size, balanceTrials/size)
	return max(min(ChunkRows, ceilDiv(seqLen, chunksPerRank*size)), ceilDiv(seqLen, most), 1)
}

// chunks lists the chunks of all documents, by descending work.
func (d Document) chunks(seqLen, size int) []chunk {
	rows, bands := chunkRows(seqLen, size), d.Bands
	if len(bands) == 0 {
		bands = []Band{Causal()}
	}
	all := make([]chunk, 0, len(d.Docs)+seqLen/rows)
	of := make([]document, len(d.Docs))
	at := 0
	for i, n := range d.Docs {
		of[i] = document{Range{at, at + n}, bands}
		rows := max(rows, ceilDiv(n, pairChunks*size))
		for left := n; left > 0; left = of[i].Hi - at {
			stop := at + min(left, rows)
			all = append(all, of[i].chunk(i, Range{at, stop}))
			at = stop
		}
	}
	slices.SortFunc(all, func(a, b chunk) int {
		return cmp.Or(cmp.Compare(b.work, a.work), cmp.Compare(a.at.Lo, b.at.Lo))
	})
	return all
}

func (d *document) chunk(i int, at Range) chunk {
	c := chunk{at: at, doc: i, of: d}
	work := count{}
	for _, b := range d.bands {
		work = work.plus(strip{first: at.Lo - d.Lo, stride: 1, m: at.Len(), n: d.Len()}.pairs(b))
		if b.Lo <= b.Hi {
			c.keys = c.keys.Hull(Range{max(d.Lo, at.Lo+b.Lo), min(d.Hi, at.Hi+b.Hi)})
		}
	}
	c.work = work.float()
	return c
}

// A balancer distributes chunks over ranks.
type balancer struct {
	rows, mean float64 // all positions; the mean work of a rank
	weight     float64 // divides the work of ranks when weighed against keys
	ranks      []assignment
	holding    []int // of each rank, 1 + its place among the holders of the present chunk's document
}

// An assignment holds the chunks of a rank.
type assignment struct {
	work float64
	room int // for further positions
	got  []assigned
}

// An assigned value is a chunk of a rank.
type assigned struct {
	Range
	work float64
	doc  int
	keys Range // needed, with its own rows
}

// greedyWeights divide the work of ranks, in turn. With a larger one, a rank takes more neighbouring chunks of a
// document before another gets any, which is better under a window.
var greedyWeights = []float64{1, 4, 16}

const (
	// several bounds chunks times ranks for trying all greedyWeights.
	several = 1 << 18
	// uneven bounds the additional work of a rank for fewer keys, as a share of the mean.
	uneven = 0.01
)

// balance distributes chunks by descending work, with the weight for which the largest work of a rank plus the mean of
// the needed keys is least.
func (d Document) balance(seqLen, size int) []assignment {
	chunks := d.chunks(seqLen, size)
	var first, best *balancer
	for _, weight := range greedyWeights {
		t := d.assign(slices.Clone(chunks), seqLen, size, weight)
		if first == nil {
			first, best = t, t
		} else if t.over()-first.over() <= uneven*t.mean && t.cost() < best.cost() {
			best = t
		}
		if len(chunks)*size > several {
			break
		}
	}
	return best.ranks
}

func (d Document) assign(all []chunk, seqLen, size int, weight float64) *balancer {
	t := &balancer{rows: float64(seqLen), weight: weight, ranks: make([]assignment, size), holding: make([]int, size)}
	for i := range all {
		t.mean += all[i].work / float64(size)
	}
	for r := range t.ranks {
		t.ranks[r].room = share(seqLen, r+1, size) - share(seqLen, r, size)
	}
	holders := make([][]holder, len(d.Docs))
	for i := range all {
		t.place(&all[i], &holders[all[i].doc])
	}
	t.even()
	return t
}

// over returns the work of the rank with most, above the mean.
func (t *balancer) over() float64 {
	most := 0.0
	for r := range t.ranks {
		most = max(most, t.ranks[r].work-t.mean)
	}
	return most
}

// cost returns the work of the rank with most over the mean, and the keys of the mean rank over all rows.
func (t *balancer) cost() float64 {
	keys := 0
	for r := range t.ranks {
		keys += t.ranks[r].fetches()
	}
	cost := float64(keys) / t.rows / float64(len(t.ranks))
	if t.mean > 0 {
		cost += t.over() / t.mean
	}
	return cost
}

// fetches returns the rows of keys that a rank needs of others: of each document from the first to the last needed one,
// without its own.
func (h *assignment) fetches() int {
	slices.SortFunc(h.got, func(a, b assigned) int { return a.Lo - b.Lo })
	rows, doc, whole := 0, -1, Range{}
	for i := range h.got {
		x := &h.got[i]
		if x.doc != doc {
			rows += whole.Len()
			doc, whole = x.doc, Range{}
		}
		whole = whole.Hull(x.keys)
		rows -= x.Len()
	}
	return rows + whole.Len()
}

// A holder is a rank with chunks of a document, and the hull of its own and its needed keys there.
type holder struct {
	rank int
	keys Range
}

// place assigns one chunk. If no rank has room for it, the best rank gets as much as fits, and the remainder goes on in
// turn. That happens at the end, to chunks of little work, less than once for each rank.
func (t *balancer) place(c *chunk, holders *[]holder) {
	for i := range *holders {
		t.holding[(*holders)[i].rank] = i + 1
	}
	for {
		r, fits := t.best(c, *holders)
		part := *c
		if !fits {
			part = c.of.chunk(c.doc, Range{c.at.Lo, c.at.Lo + t.ranks[r].room})
			*c = c.of.chunk(c.doc, Range{part.at.Hi, c.at.Hi})
		}
		to := &t.ranks[r]
		to.work += part.work
		to.room -= part.at.Len()
		whole := part.keys.Hull(part.at)
		to.got = append(to.got, assigned{part.at, part.work, part.doc, whole})
		if t.holding[r] > 0 {
			keys := &(*holders)[t.holding[r]-1].keys
			*keys = keys.Hull(whole)
		} else {
			*holders = append(*holders, holder{r, whole})
			t.holding[r] = len(*holders)
		}
		if fits {
			break
		}
	}
	for _, h := range *holders {
		t.holding[h.rank] = 0
	}
}

// best returns the rank with the least cost for a chunk, the first of several, and only ranks with room for it if there
// are any. It only adds quotients, so that a fused multiply-add cannot round differently on another machine.
func (t *balancer) best(c *chunk, holders []holder) (rank int, fits bool) {
	rank, least := -1, 0.0
	own := float64(c.keys.Hull(c.at).Len()-c.at.Len()) / t.rows
	for r := range t.ranks {
		to := &t.ranks[r]
		fit := to.room >= c.at.Len()
		if to.room == 0 || fits && !fit {
			continue
		}
		cost := own
		if i := t.holding[r]; i > 0 {
			cost = float64(grown(holders[i-1].keys, c)) / t.rows
		}
		if t.mean > 0 {
			cost += (to.work + c.work) / t.mean / t.weight
		}
		if rank < 0 || fit && !fits || cost < least {
			rank, least, fits = r, cost, fit
		}
	}
	return rank, fits
}

// grown returns the rows that a chunk adds to the keys of its document, without its own.
func grown(keys Range, c *chunk) int {
	whole := c.keys.Hull(c.at)
	return min(keys.Hull(whole).Len()-keys.Len(), whole.Len()-c.at.Len())
}

const (
	// evenEnough is the work above the mean of a rank, as a share, that needs no swap: a swap makes more keys travel.
	evenEnough = 0.01
	// swaps bounds the swaps for each rank, swapped the chunks considered for one.
	swaps, swapped = 8, 64
)

// even swaps chunks of equal length between the ranks with most and with least work. With long documents only, ranks
// that have all their positions early leave the remainder to the others.
func (t *balancer) even() {
	for range swaps * len(t.ranks) {
		most, least := &t.ranks[0], &t.ranks[0]
		for r := range t.ranks {
			if h := &t.ranks[r]; h.work > most.work {
				most = h
			} else if h.work < least.work {
				least = h
			}
		}
		if most.work-t.mean <= evenEnough*t.mean || !most.swap(least) {
			return
		}
	}
}

// swap swaps the two chunks that leave the least difference of work.
func (h *assignment) swap(with *assignment) bool {
	gap := h.work - with.work
	a, b, left := -1, -1, gap/2
	for i := range h.got[:min(len(h.got), swapped)] {
		for j := range with.got[:min(len(with.got), swapped)] {
			x, y := &h.got[i], &with.got[j]
			if d := math.Abs(gap/2 - (x.work - y.work)); x.Len() == y.Len() && d < left {
				a, b, left = i, j, d
			}
		}
	}
	if a < 0 {
		return false
	}
	d := h.got[a].work - with.got[b].work
	h.work, with.work = h.work-d, with.work+d
	h.got[a], with.got[b] = with.got[b], h.got[a]
	return true
}

// spans returns the positions of a rank, in order, with neighbours joined.
func (h *assignment) spans() []Span {
	slices.SortFunc(h.got, func(a, b assigned) int { return a.Lo - b.Lo })
	var s []Span
	for _, r := range h.got {
		if k := len(s) - 1; k >= 0 && s[k].Start+s[k].Len == r.Lo {
			s[k].Len += r.Len()
			continue
		}
		s = append(s, Span{Start: r.Lo, Len: r.Len(), Stride: 1})
	}
	return s
}

// Ready returns a layout equal to l that has already distributed the documents of sequences of that length over that
// many ranks.
func Ready(l Layout, seqLen, size int) Layout {
	if _, ok := l.(Document); !ok {
		return l // the others compute spans from the numbers alone
	}
	return ready{Layout: l, seqLen: seqLen, size: size, all: AllSpans(l, seqLen, size)}
}

// A ready is a layout with its results.
type ready struct {
	Layout
	seqLen, size int
	all          [][]Span
}

// Spans returns one rank's spans.
func (d ready) Spans(seqLen, size, rank int) []Span { return d.AllSpans(seqLen, size)[rank] }

// AllSpans returns the spans of every rank.
func (d ready) AllSpans(seqLen, size int) [][]Span {
	if seqLen == d.seqLen && size == d.size {
		return d.all
	}
	return AllSpans(d.Layout, seqLen, size)
}
