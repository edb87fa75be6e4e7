package partition

// Prepare finds the Needs of all pairs of ranks at once, for a caller that asks for most of them, before it shares x.
// Ranks that have no document in common cost nothing then, which are most pairs of packed documents. There are as many answers
// as pairs of ranks.
func (x *Index) Prepare() {
	if x.all != nil {
		return
	}
	ranks := len(x.q)
	all := make([]Range, ranks*ranks)
	if x.held == nil {
		x.held = [][][]held{holders(x.q)}
		if &x.k[0] != &x.q[0] {
			x.held = append(x.held, holders(x.k))
		}
	}
	q, k := x.held[0], x.held[len(x.held)-1]
	for doc := range min(len(q), len(k)) {
		band := x.bands.of(doc)
		for _, a := range q[doc] {
			for _, b := range k[doc] {
				if u := within(band, a.list, b.list); u.Len() > 0 {
					all[a.rank*ranks+b.rank] = all[a.rank*ranks+b.rank].Hull(u)
				}
			}
		}
	}
	x.all = all
}

// Within returns the index of the same positions under another window: keys from lo before a query to hi behind it. It shares
// what x knows of documents.
func (x *Index) Within(b Band) *Index {
	y := *x
	y.bands, y.all = bands{b}, nil
	y.windowed = b.windowed(x.seqQ, x.seqKV)
	return &y
}

// windowed reports whether a band hides keys on both sides of a query.
func (b Band) windowed(seqQ, seqKV int) bool { return b.Lo > 1-seqQ && b.Hi < seqKV-1 }

// held is what a rank has of a document.
type held struct {
	rank int
	list []piece
}

// holders is the ranks that have part of each document.
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
	room, docs := make([]held, total), make([][]held, len(counts))
	for d, n := range counts {
		docs[d], room = room[:0:n], room[n:]
	}
	each(func(rank, doc int, list []piece) { docs[doc] = append(docs[doc], held{rank, list}) })
	return docs
}

// Work returns what the function Work returns.
func (x *Index) Work() []int {
	w := make([]int, len(x.q))
	for r := range x.q {
		total := count{}
		for _, p := range x.q[r].list {
			lo, hi := x.byK.bounds(p.doc, x.seqKV)
			total = total.plus(strip{first: p.Start - lo, stride: p.Stride, m: p.Len, n: hi - lo}.pairs(x.bands.of(p.doc)))
		}
		w[r] = total.int()
	}
	return w
}
