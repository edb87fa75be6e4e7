package partition

import (
	"math/bits"
	"sync"
)

// Need is rows of keys that one rank needs of another.
type Need struct {
	Peer int   // the other
	Rows Range // the smallest that holds all
}

// A pairs value has the Needs of all pairs of ranks that are not empty.
type pairs struct {
	of [][]Need // of each rank, by owner
	by [][]Need // of each owner, by rank
}

// Prepare finds the Needs of all pairs of ranks at once, for a caller that asks for most of them, before it shares x.
// Ranks that have no document in common cost nothing then, which are most pairs of packed documents.
func (x *Index) Prepare() {
	if x.all != nil {
		return
	}
	x.hold()
	ranks := len(x.q)
	s := preparing.Get().(*row)
	defer preparing.Put(s)
	s.clear(ranks)
	ends := make([]int, ranks) // of the needs of each rank
	for r := range ranks {
		x.meet(r, s)
		s.take()
		ends[r] = len(s.needs)
	}
	x.all = newPairs(s.needs, ends)
}

// newPairs returns the pairs of needs by rank; the needs of each rank have an end.
func newPairs(needs []Need, ends []int) *pairs {
	ranks := len(ends)
	p := &pairs{of: make([][]Need, ranks), by: make([][]Need, ranks)}
	buf := make([]Need, 2*len(needs))
	at := copy(buf, needs)
	count := make([]int, ranks) // of the readers of each owner
	for i := range needs {
		count[needs[i].Peer]++
	}
	for owner, n := range count {
		p.by[owner] = buf[at : at : at+n]
		at += n
	}
	from := 0
	for r, end := range ends {
		p.of[r] = buf[from:end:end]
		from = end
		for _, n := range p.of[r] {
			p.by[n.Peer] = append(p.by[n.Peer], Need{r, n.Rows})
		}
	}
	return p
}

// preparing pools memory for finding needs.
var preparing = sync.Pool{New: func() any { return &row{} }}

// A row holds the needs of one rank by owner, and a bit for each owner with needs.
type row struct {
	rows  []Range
	bits  []uint64
	needs []Need // of this rank and those before it
}

// clear makes s a row of that many owners, without needs.
func (s *row) clear(owners int) {
	s.needs = s.needs[:0]
	if len(s.rows) != owners {
		s.rows, s.bits = make([]Range, owners), make([]uint64, (owners+63)/64)
	}
}

func (s *row) add(owner int, r Range) {
	word, bit := &s.bits[owner/64], uint64(1)<<(owner%64)
	if *word&bit != 0 {
		r = r.Hull(s.rows[owner])
	}
	*word |= bit
	s.rows[owner] = r
}

// take appends the needs in the order of owners, and forgets them.
func (s *row) take() {
	for i, word := range s.bits {
		for ; word != 0; word &= word - 1 {
			owner := 64*i + bits.TrailingZeros64(word)
			s.needs = append(s.needs, Need{owner, s.rows[owner]})
		}
		s.bits[i] = 0
	}
}

// meet adds the needs of a rank, document by document.
func (x *Index) meet(rank int, s *row) {
	list := x.q[rank].list
	for i := 0; i < len(list); {
		end, doc := run(list, i), list[i].doc
		if doc < len(x.held) {
			band, queries := x.bands.of(doc), extent(list[i:end])
			for j := range x.held[doc] {
				h := &x.held[doc][j]
				if last := queries.Hi - 1; band.Lo <= h.extent.Lo-last && h.extent.Hi-1-last <= band.Hi {
					s.add(h.rank, h.rows) // the last query sees all
				} else if band.meets(queries, h.extent) {
					if u := within(band, list[i:end], h.list); u.Len() > 0 {
						s.add(h.rank, u)
					}
				}
			}
		}
		i = end
	}
}

// extent returns the smallest range with the positions of some pieces.
func extent(list []piece) Range {
	e := Range{list[0].Start, list[0].end()}
	for i := range list[1:] {
		p := &list[1+i]
		e = Range{min(e.Lo, p.Start), max(e.Hi, p.end())}
	}
	return e
}

// Meetings returns how many pairs of ranks Prepare looks at, of each document anew.
func (x *Index) Meetings() (n int) {
	x.hold()
	for r := range x.q {
		list := x.q[r].list
		for i := 0; i < len(list); i = run(list, i) {
			if doc := list[i].doc; doc < len(x.held) {
				n += len(x.held[doc])
			}
		}
	}
	return n
}

func (x *Index) hold() {
	if x.held == nil {
		x.held = holders(x.k)
	}
}

// Owners returns the Needs of rank that are not empty, its own among them, by owner. ok is false without a call of
// Prepare.
func (x *Index) Owners(rank int) (list []Need, ok bool) {
	if x.all == nil {
		return nil, false
	}
	return x.all.of[rank], true
}

// Readers returns the needs of ranks of owner, itself among them, as Owners does, by rank.
func (x *Index) Readers(owner int) (list []Need, ok bool) {
	if x.all == nil {
		return nil, false
	}
	return x.all.by[owner], true
}

// Within returns the index of the same positions under another window: keys from lo before a query to hi after it. It
// shares the documents of x.
func (x *Index) Within(b Band) *Index {
	y := *x
	y.bands, y.all = bands{b}, nil
	y.windowed = b.windowed(x.seqQ, x.seqKV)
	return &y
}

// windowed reports whether a band hides keys on both sides of a query.
func (b Band) windowed(seqQ, seqKV int) bool { return b.Lo > 1-seqQ && b.Hi < seqKV-1 }

// A held is a rank's keys of a document.
type held struct {
	rank   int
	list   []piece
	extent Range // of their positions
	rows   Range // the smallest that holds them
}

func holders(ranks []pieces) [][]held {
	counts := []int{}
	each := func(f func(rank, doc int, list []piece)) {
		for r := range ranks {
			list := ranks[r].list
			for i := 0; i < len(list); {
				end := run(list, i)
				f(r, list[i].doc, list[i:end])
				i = end
			}
		}
	}
	total := 0
	each(func(_, doc int, _ []piece) {
		for doc >= len(counts) {
			counts = append(counts, 0)
		}
		counts[doc]++
		total++
	})
	buf, docs := make([]held, total), make([][]held, len(counts))
	for d, n := range counts {
		docs[d], buf = buf[:0:n], buf[n:]
	}
	each(func(rank, doc int, list []piece) {
		last := &list[len(list)-1]
		docs[doc] = append(docs[doc], held{rank, list, extent(list), Range{list[0].at, last.at + last.Len}})
	})
	return docs
}

// Work implements the function Work.
func (x *Index) Work() []int {
	w := make([]int, len(x.q))
	for r := range x.q {
		total := count{}
		for _, p := range x.q[r].list {
			lo, hi := x.byK.bounds(p.doc, x.seqKV)
			total = total.plus(strip{first: p.Start - lo, stride: p.Stride, m: p.Len,
				n: hi - lo}.pairs(x.bands.of(p.doc)))
		}
		w[r] = total.int()
	}
	return w
}
