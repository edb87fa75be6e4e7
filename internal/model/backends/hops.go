package backends

import (
	"fmt"
	"strings"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// MaskKind is a mask under its name in library kernels.
type MaskKind uint8

// Left and Right of a Call narrow these masks.
const (
	FullMask        MaskKind = iota
	CausalMask               // query i sees keys up to i
	BottomRightMask          // query i sees keys up to i + SeqKV - SeqQ, which is more than i
	BandMask                 // query i sees keys i-Left to i+Right, -1: all
)

func (m MaskKind) String() string {
	return [...]string{"full", "causal", "bottom-right causal", "band"}[m]
}

// Call is one kernel call of one hop. Its lengths and heads, in Params, are those of the call.
type Call struct {
	Params
	// Hop is "whole", "diagonal", "half keys", "half queries", "full", "off-diagonal band", "documents" or "gathered".
	Hop         string
	Rank, Owner int // an example: these queries, those keys
	// RankQueries is the number of queries of a rank while kernels run; the call may have only some of them.
	RankQueries int
	// QAt and KAt are the first rows of the call, in the blocks of the rank and of the owner.
	QAt, KAt int
	Mask     MaskKind
	// Left and Right are the window: the visible keys before and after the key that the mask aligns with a query. -1:
	// all; Right is 0 under a causal mask.
	Left, Right int
	// Rects is the number of such rectangles in the hop. Our kernels take all of them in one call.
	Rects int
	// MixedBands: documents of one hop have different bands.
	MixedBands bool
	// ZeroedWorkspace is set by a remedy: the workspace is cleared before each call.
	ZeroedWorkspace bool
	// GrantedWorkspace is set by a remedy: the workspace may have any size.
	GrantedWorkspace bool
}

// Windowed reports whether a bound other than the causal one hides keys.
func (c *Call) Windowed() bool {
	return c.Left >= 0 || c.Mask == BandMask
}

func (c *Call) String() string {
	mask := c.Mask.String()
	if c.Windowed() {
		mask += fmt.Sprintf(" window (%d, %d)", c.Left, c.Right)
	}
	if c.Documents {
		mask += ", by document"
	}
	s := fmt.Sprintf("%d queries by %d keys, %s", c.SeqQ, c.SeqKV, mask)
	switch {
	case strings.HasSuffix(c.Hop, "gathered"):
		s = fmt.Sprintf("rank %d with all keys that it reads: %s", c.Rank, s)
	case c.ContextSize > 1:
		s = fmt.Sprintf("rank %d with the keys of rank %d: %s", c.Rank, c.Owner, s)
	}
	return s
}

// hopsOf returns the distinct kernel calls of a run over all ranks, each with an example.
func hopsOf(p Params) []Call {
	ranks, inner := p.rankGroups()
	rects := 1
	base := Call{Params: p, RankQueries: roundUp(p.SeqQ, ranks) / ranks}
	if p.Layout == "striped" && inner > 1 {
		// A group holds the stripes of its members side by side, so a hop has the rectangles of each pair of members.
		ranks, rects = p.ContextSize, inner*inner
	}
	w := walker{base: base, shape: p.shape(ranks), ranks: ranks, rects: rects, seen: map[rankPair]bool{},
		calls: map[Call]bool{}}
	w.walkAll()
	return p.perHeadCount(inner, w.out)
}

// perHeadCount returns the calls for each number of heads that a rank of a group may have: one set if the heads divide
// evenly. A rank without heads makes no calls.
func (p Params) perHeadCount(inner int, calls []Call) []Call {
	var out []Call
	seen := map[[2]int]bool{}
	for i := range inner {
		mine := partition.Heads(p.Heads, inner, i)
		n := [2]int{mine.Len(), len(partition.KeyHeads(mine, p.Heads, p.KVHeads))}
		if n[0] == 0 || seen[n] {
			continue
		}
		seen[n] = true
		for _, c := range calls {
			c.Heads, c.KVHeads = n[0], n[1]
			out = append(out, c)
		}
	}
	return out
}

// rankGroups returns the number of ranks with separate parts of a sequence while kernels run, and of those that share
// its heads.
func (p Params) rankGroups() (ranks, heads int) {
	heads = ring.UlyssesDegree(p.Algorithm, p.ContextSize, p.InnerSize)
	return max(1, p.ContextSize/heads), heads
}

// shape returns the partition of one sequence. Lengths of documents and slices are unknown here, so one sequence
// represents the longest document and the widest slice. A zigzag represents the layouts by document: they have more
// such rectangles, but none wider.
func (p Params) shape(ranks int) partition.Shape {
	// Mask returns no error without documents.
	mask, _ := partition.Diagonal{TopLeft: p.TopLeft, Left: p.WindowLeft, Right: p.WindowRight}.Mask(p.SeqQ, p.SeqKV,
		nil, nil)
	layout := partition.Layout(partition.Zigzag{})
	if !p.Layout.ByDocument() {
		layout = p.Layout.Layout(nil, mask.Band)
	}
	return partition.Shape{SeqQ: p.SeqQ, SeqKV: p.SeqKV, Size: ranks, Layout: layout, Mask: mask}
}

// A walker visits every pair of a rank and an owner, and collects the distinct calls.
type walker struct {
	base  Call
	shape partition.Shape
	ranks int
	rects int // rectangles of a hop for each one found here
	seen  map[rankPair]bool
	calls map[Call]bool // without an example
	out   []Call

	gathered bool // the keys of a call are all keys that the rank reads
}

// rankPair determines the tiles of a rank and an owner: the lengths of their spans and the relevant distances. Equal
// pairs have equal tiles, so that many ranks need few plans.
type rankPair struct {
	own  bool
	q, k [3]int // no layout here has more spans
	far  [3][3]int
}

func (w *walker) walk() {
	q, k := w.spans(w.shape.SeqQ), w.spans(w.shape.SeqKV)
	for owner := range w.ranks {
		for rank := range w.ranks {
			key := rankPair{own: rank == owner}
			for i, s := range q[rank] {
				key.q[i] = s.Len
				for j, t := range k[owner] {
					key.k[j] = t.Len
					key.far[i][j] = distance(w.shape.Mask.Band, s, t)
				}
			}
			if !w.seen[key] {
				w.seen[key] = true
				w.block(rank, owner, partition.Plan(w.shape, rank, owner))
			}
		}
	}
}

func (w *walker) spans(n int) [][]partition.Span {
	out := make([][]partition.Span, w.ranks)
	for r := range out {
		out[r] = w.shape.Layout.Spans(n, w.ranks, r)
	}
	return out
}

// distance returns the distance from span s of queries to span t of keys. One value represents all distances with
// everything visible, and another all with nothing visible.
func distance(b partition.Band, s, t partition.Span) int {
	const all, none = 1 << 62, 1<<62 + 1
	least := t.Start - s.Start - (s.Len-1)*s.Stride
	most := t.Start - s.Start + (t.Len-1)*t.Stride
	switch {
	case b.Lo <= least && most <= b.Hi:
		return all
	case least > b.Hi || most < b.Lo:
		return none
	}
	return t.Start - s.Start
}

// walkAll visits pairs of ranks. If a rank gathers all its keys before its only call, in both passes or in the forward
// pass alone, walkAll visits ranks. Package ring decides the same way.
func (w *walker) walkAll() {
	index := partition.NewIndex(w.shape)
	once := w.ranks > 1 && (w.base.Algorithm == "allgather" || index.Halo())
	switch {
	case once && w.base.Gather == "before":
		w.gather(index)
		return
	case once && w.base.Gather == "auto" && w.base.Documents:
		training := w.base.Training
		w.base.Training = false
		w.gather(index)
		w.base.Training, w.gathered = training, false
	}
	w.walk()
}

// gather visits every rank, with all keys that it reads. Of very many ranks it visits those at both ends, since the
// others resemble their neighbours.
func (w *walker) gather(x *partition.Index) {
	const ends = 64
	w.gathered = true
	for rank := range w.ranks {
		if rank < ends || rank >= w.ranks-ends {
			w.block(rank, rank, x.Gather(rank).Tiles)
		}
	}
}

func (w *walker) block(rank, owner int, tiles []partition.Tile) {
	for _, t := range tiles {
		c := w.base
		c.Rank, c.Owner, c.Rects = rank, owner, len(tiles)*w.rects
		c.QAt, c.KAt, c.SeqQ, c.SeqKV = t.Q.Lo, t.K.Lo, t.Q.Len(), t.K.Len()
		if c.Documents { // documents of a hop go into one call with their lengths
			c.Rects = 1
		}
		c.setMask(t.Band.Lo-t.K.Lo+t.Q.Lo, t.Band.Hi-t.K.Lo+t.Q.Lo)
		c.MixedBands = c.Documents && (c.Windowed() || len(tiles) > 1 && !w.gathered)
		if w.ranks == 1 {
			c.MixedBands = false
		}
		if c.DocumentKeys && (c.WindowLeft >= 0 || c.WindowRight >= 0) { // 0 under a causal mask
			c.MixedBands = true
		}
		c.Hop = w.name(&c)
		key := c
		key.Rank, key.Owner, key.QAt, key.KAt = 0, 0, 0, 0
		if !w.calls[key] {
			w.calls[key] = true
			w.out = append(w.out, c)
		}
	}
}

// setMask sets the mask to keys lo <= j-i <= hi, indices from the call's first query and key.
// The band is trimmed: lo <= 0 <= hi, and a bound that hides nothing is at a corner.
func (c *Call) setMask(lo, hi int) {
	c.Left, c.Right = -lo, hi
	if lo <= -(c.SeqQ - 1) {
		c.Left = -1
	}
	if hi >= c.SeqKV-1 {
		c.Right = -1
	}
	switch shift := c.SeqKV - c.SeqQ; {
	case c.Right < 0 && c.Left < 0:
		c.Mask = FullMask
	case c.Right == 0:
		c.Mask = CausalMask
	case c.Right > 0 && c.Right == shift:
		c.Mask, c.Right = BottomRightMask, 0
		if c.Left >= 0 {
			c.Left += shift
		}
	default:
		c.Mask = BandMask
	}
}

// name returns the readable name of a call: its place in the square of ranks, and its shape.
func (w *walker) name(c *Call) string {
	ownQ := partition.Count(w.shape.Layout.Spans(w.shape.SeqQ, w.ranks, c.Rank))
	ownK := partition.Count(w.shape.Layout.Spans(w.shape.SeqKV, w.ranks, c.Owner))
	switch {
	case w.gathered && c.Documents:
		return "documents gathered"
	case w.gathered:
		return "gathered"
	case c.Documents && c.Rank == c.Owner:
		return "documents"
	case c.Documents:
		return "documents off the diagonal"
	case w.ranks == 1:
		return "whole"
	case c.Mask != FullMask && c.Rank != c.Owner:
		return "off-diagonal band"
	case c.Rank == c.Owner && (c.Mask != FullMask || c.SeqQ == ownQ && c.SeqKV == ownK):
		return "diagonal"
	case c.SeqKV < ownK && c.SeqQ == ownQ:
		return "half keys"
	case c.SeqQ < ownQ && c.SeqKV == ownK:
		return "half queries"
	case c.SeqQ == ownQ && c.SeqKV == ownK:
		return "full"
	}
	return "block"
}
