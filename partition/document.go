package partition

import (
	"cmp"
	"math"
	"slices"
)

// Document deals packed documents out by the work in them. It cuts each into chunks, which stay
// whole if a document is shorter, and gives the chunk with most visible pairs first to the rank
// that it makes least busy. Every rank holds as many positions as the others, to within one, since
// the rest of a model costs the same for each of them; documents may have any length.
//
// A rank is as busy as
//
//	its visible pairs / the mean of all ranks  +  the rows of keys that it newly needs / all rows,
//
// both without a unit; if it is better in the end, the first counts for less on the way. The first is the quantity that
// MagiAttention's dispatch balances by a heap (SandAI, magi_attention/meta/solver/dispatch_solver.py;
// arXiv:2505.13211); the second keeps the chunks of a document together as far as balance allows, so that fewer keys
// travel. Chunks of a document that a rank has already fetched the keys of cost nothing more.
type Document struct {
	Docs []int // lengths in tokens, which sum to the sequence length
	// Bands are the masks of the layers to balance, each once; none: a causal one.
	Bands []Band
}

const (
	// ChunkRows is the most positions of a chunk, unless a sequence or a document would have too many chunks.
	ChunkRows = 512
	// chunksPerRank bounds from below the chunks of a rank of a sequence of one document, so that
	// the last ones even out the first ones.
	chunksPerRank = 16
	// pairChunks bounds the chunks of a rank of one document, in the mean: two ranks with that many
	// have tiles for the square of them.
	pairChunks = 128
	// dealings bounds chunks times ranks, the cost of dealing, for very long sequences.
	dealings = 1 << 20
)

// Name returns "document".
func (Document) Name() string { return "document" }

// Spans returns the chunks of one rank, with neighbours joined. A caller that wants several ranks asks
// AllSpans.
func (d Document) Spans(seqLen, size, rank int) []Span { return d.AllSpans(seqLen, size)[rank] }

// AllSpans returns the Spans of every rank.
func (d Document) AllSpans(seqLen, size int) [][]Span {
	if err := fits(d.Docs, seqLen); err != nil {
		panic("partition: " + err.Error())
	}
	ranks, all := d.deal(seqLen, size), make([][]Span, size)
	for r := range ranks {
		all[r] = ranks[r].spans()
	}
	return all
}

// AllSpans returns the spans of every rank, at once if a layout can.
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

// A chunk has neighbouring positions of a document, the work of their queries, and the keys that these
// see.
type chunk struct {
	at   Range
	doc  int
	work float64 // visible pairs; exact up to 2^53
	keys Range
	// of: the document, for a chunk that is cut
	of *document
}

// A document determines the work of its chunks.
type document struct {
	Range
	bands []Band
}

// chunkRows returns the length of chunks. Sequences of few positions have shorter ones, so that each rank
// has some; very long ones have longer chunks.
func chunkRows(seqLen, size int) int {
	most := max(chunksPerRank*size, dealings/size)
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

// A deal hands chunks out.
type deal struct {
	rows, mean float64 // all positions; the mean work of a rank
	patience   float64 // divides the work of ranks when weighed against keys
	ranks      []hand
	place      []int // of each rank, 1 + its place among the holders of the present chunk's document
}

// A hand holds the chunks of a rank.
type hand struct {
	work float64
	room int // positions that it has still to get
	got  []piled
}

// A piled is a chunk that a rank has got.
type piled struct {
	Range
	work float64
	doc  int
	keys Range // that it needs, and its own rows
}

// patiences divide the work of ranks, in turn: with more, a rank takes more of the
// neighbouring chunks of a document before another has any, which a window rewards.
var patiences = []float64{1, 4, 16}

const (
	// several bounds chunks times ranks for trying all patiences.
	several = 1 << 18
	// uneven bounds the additional work of a rank for fewer keys, as a share of the mean.
	uneven = 0.01
)

// deal gives chunks, by descending work, to ranks: in the way in which the most work of a
// rank and the mean of the keys that ranks need are least together.
func (d Document) deal(seqLen, size int) []hand {
	chunks := d.chunks(seqLen, size)
	var first, best *deal
	for _, patience := range patiences {
		t := d.dealt(slices.Clone(chunks), seqLen, size, patience)
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

func (d Document) dealt(all []chunk, seqLen, size int, patience float64) *deal {
	t := &deal{rows: float64(seqLen), patience: patience, ranks: make([]hand, size), place: make([]int, size)}
	for i := range all {
		t.mean += all[i].work / float64(size)
	}
	for r := range t.ranks {
		t.ranks[r].room = share(seqLen, r+1, size) - share(seqLen, r, size)
	}
	holders := make([][]holder, len(d.Docs))
	for i := range all {
		t.give(&all[i], &holders[all[i].doc])
	}
	t.even()
	return t
}

// over returns the work of the rank with most, above the mean.
func (t *deal) over() float64 {
	most := 0.0
	for r := range t.ranks {
		most = max(most, t.ranks[r].work-t.mean)
	}
	return most
}

// cost returns the work of the rank with most over the mean, and the keys of the mean rank over all rows.
func (t *deal) cost() float64 {
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

// fetches returns the rows of keys that a rank needs and has not got: of each document those between the
// first and the last that it needs.
func (h *hand) fetches() int {
	slices.SortFunc(h.got, func(a, b piled) int { return a.Lo - b.Lo })
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

// A holder is a rank that has chunks of a document, and the hull of the keys that it has or needs of it.
type holder struct {
	rank int
	keys Range
}

// give deals one chunk out. Where no rank has room for it, the one that would be the best gets as
// much as fits, and the rest is dealt out in turn: that happens at the end, to chunks of little
// work, and less than once for each rank.
func (t *deal) give(c *chunk, holders *[]holder) {
	for i := range *holders {
		t.place[(*holders)[i].rank] = i + 1
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
		to.got = append(to.got, piled{part.at, part.work, part.doc, whole})
		if t.place[r] > 0 {
			keys := &(*holders)[t.place[r]-1].keys
			*keys = keys.Hull(whole)
		} else {
			*holders = append(*holders, holder{r, whole})
			t.place[r] = len(*holders)
		}
		if fits {
			break
		}
	}
	for _, h := range *holders {
		t.place[h.rank] = 0
	}
}

// best returns the rank that a chunk costs least, the first of several; among ranks with room for it,
// if any has. Only quotients are added here, so that no machine rounds otherwise by multiplying
// and adding in one.
func (t *deal) best(c *chunk, holders []holder) (rank int, fits bool) {
	rank, least := -1, 0.0
	own := float64(c.keys.Hull(c.at).Len()-c.at.Len()) / t.rows
	for r := range t.ranks {
		to := &t.ranks[r]
		fit := to.room >= c.at.Len()
		if to.room == 0 || fits && !fit {
			continue
		}
		cost := own
		if i := t.place[r]; i > 0 {
			cost = float64(grown(holders[i-1].keys, c)) / t.rows
		}
		if t.mean > 0 {
			cost += (to.work + c.work) / t.mean / t.patience
		}
		if rank < 0 || fit && !fits || cost < least {
			rank, least, fits = r, cost, fit
		}
	}
	return rank, fits
}

// grown returns the rows that a chunk adds to keys of its document, without its own.
func grown(keys Range, c *chunk) int {
	whole := c.keys.Hull(c.at)
	return min(keys.Hull(whole).Len()-keys.Len(), whole.Len()-c.at.Len())
}

const (
	// evenEnough bounds the work above the mean of a rank, as a share, without a swap: a swap
	// makes more keys travel.
	evenEnough = 0.01
	// swaps bounds the swaps for each rank, swapped the chunks that are looked at.
	swaps, swapped = 8, 64
)

// even swaps chunks of one length between the rank with most work and the one with least. Where all
// documents are long, ranks that have their positions early leave the rest to the others.
func (t *deal) even() {
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

// swap swaps the two chunks that leave the least between the work of both.
func (h *hand) swap(with *hand) bool {
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

// spans returns the positions that a rank has got, in order, with neighbours joined.
func (h *hand) spans() []Span {
	slices.SortFunc(h.got, func(a, b piled) int { return a.Lo - b.Lo })
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

// Ready returns a layout that answers like l, at once for sequences of that length over that many
// ranks: it has dealt the documents out.
func Ready(l Layout, seqLen, size int) Layout {
	if _, ok := l.(Document); !ok {
		return l // the others answer from the numbers alone
	}
	return ready{Layout: l, seqLen: seqLen, size: size, all: AllSpans(l, seqLen, size)}
}

// A ready is a layout with its answers.
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
