package tokenizer

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// bpe merges neighbouring tokens, in the order of the learned merges.
type bpe struct {
	vocabulary
	merges                map[uint64]merge
	unk                   *string
	prefix, suffix        string
	fuseUnk, ignoreMerges bool
	fallback              bool
	bytes                 [256]int32
	runes                 map[rune]int32 // tokens of one rune; nil with a prefix or suffix
	// joins holds the pairs of neighbouring runes inside tokens that merges make. Long words are cut between all other
	// pairs, since no merge crosses such a place.
	joins map[uint64]struct{} // nil: words are not cut
}

type merge struct {
	rank uint32
	id   int32
}

// A symbol is a token of a word during merging.
type symbol struct {
	id         int32
	prev, next int32
	gone       bool
}

// A candidate is a possible merge.
type candidate struct {
	rank    uint32
	pos, id int32
}

func (a candidate) before(b candidate) bool {
	return a.rank < b.rank || a.rank == b.rank && a.pos < b.pos
}

func pair(a, b int32) uint64 { return uint64(uint32(a))<<32 | uint64(uint32(b)) }

func (b *bpe) init(pairs [][2]string) error {
	b.merges = make(map[uint64]merge, len(pairs))
	ids, all := b.byteTokens()
	b.bytes = ids
	cuts := b.prefix == "" && b.suffix == "" && (!b.fallback || all)
	b.joins = map[uint64]struct{}{}
	for rank, p := range pairs {
		left, ok := b.vocabulary[p[0]]
		right, ok2 := b.vocabulary[p[1]]
		if !ok || !ok2 {
			return fmt.Errorf("merge %d, %.40q and %.40q: one of them is no token", rank, p[0], p[1])
		}
		if len(p[1]) < len(b.prefix) {
			return fmt.Errorf("merge %d: %.40q is shorter than continuing_subword_prefix", rank, p[1])
		}
		whole := p[0] + p[1][len(b.prefix):]
		id, ok := b.vocabulary[whole]
		if !ok {
			return fmt.Errorf("merge %d: %.40q is no token", rank, whole)
		}
		b.merges[pair(left, right)] = merge{uint32(rank), id}
		if cuts {
			cuts = b.join(p, whole)
		}
	}
	if !cuts {
		b.joins = nil
	}
	if b.prefix == "" && b.suffix == "" {
		b.runes = map[rune]int32{}
		for token, id := range b.vocabulary {
			if r, n := utf8.DecodeRuneInString(token); n == len(token) && n > 0 {
				b.runes[r] = id
			}
		}
	}
	return nil
}

// join records the neighbouring runes in the result of a merge. It returns false for byte tokens, which do not show
// their runes.
func (b *bpe) join(p [2]string, whole string) bool {
	for _, side := range p {
		if b.fallback && len(side) == 6 && strings.HasPrefix(side, "<0x") {
			return false
		}
	}
	last := rune(-1)
	for _, r := range whole {
		if last >= 0 {
			b.joins[pair(last, r)] = struct{}{}
		}
		last = r
	}
	return true
}

// longWord is the length in bytes above which words are cut before merging.
const longWord = 32

func (b *bpe) encode(w *work, dst []int32, word string) ([]int32, error) {
	if b.whole(word) {
		return append(dst, b.vocabulary[word]), nil
	}
	return b.merge(w, dst, word)
}

// whole reports whether a word is a token that needs no merges.
func (b *bpe) whole(word string) bool {
	_, ok := b.vocabulary[word]
	return ok && b.ignoreMerges
}

func (b *bpe) merge(w *work, dst []int32, word string) ([]int32, error) {
	if err := b.begin(w, word); err != nil {
		return dst, err
	}
	b.mergeAll(w)
	for _, s := range w.symbols {
		if !s.gone {
			dst = append(dst, s.id)
		}
	}
	return dst, nil
}

// parts calls f with the parts of a long word. No merge crosses their borders.
func (b *bpe) parts(word string, f func(part string) error) error {
	start, last, known := 0, rune(-1), false
	for at, r := range word {
		_, is := b.runes[r]
		is = is || b.fallback // init checked that each byte has a token
		if known && is {
			if _, joins := b.joins[pair(last, r)]; !joins {
				if err := f(word[start:at]); err != nil {
					return err
				}
				start = at
			}
		}
		last, known = r, is
	}
	return f(word[start:])
}

// begin sets the initial symbols: the tokens of the runes.
func (b *bpe) begin(w *work, word string) error {
	w.symbols = w.symbols[:0]
	unknown := false // the last rune has no token, and the unknown token is still to add
	for at := 0; at < len(word); {
		r, n := runeAt(word, at)
		id, ok := b.rune(word, at, n, r)
		if ok {
			if err := b.unknown(w, &unknown); err != nil {
				return err
			}
			w.add(id)
		} else if ok = b.fallback && b.appendBytes(w, b.withAffixes(word, at, n)); !ok && b.unk != nil {
			if unknown && !b.fuseUnk {
				if err := b.unknown(w, &unknown); err != nil {
					return err
				}
			}
			unknown = true
		}
		at += n
	}
	return b.unknown(w, &unknown)
}

func (b *bpe) rune(word string, at, n int, r rune) (int32, bool) {
	if b.runes != nil {
		id, ok := b.runes[r]
		return id, ok
	}
	id, ok := b.vocabulary[b.withAffixes(word, at, n)]
	return id, ok
}

// withAffixes returns a rune with the prefix inside a word, and the suffix at its end.
func (b *bpe) withAffixes(word string, at, n int) string {
	s := word[at : at+n]
	if at > 0 {
		s = b.prefix + s
	}
	if at+n == len(word) {
		s += b.suffix
	}
	return s
}

// appendBytes adds the tokens of the bytes, if all exist.
func (b *bpe) appendBytes(w *work, text string) (ok bool) {
	if w.ids, ok = appendBytes(w.ids[:0], &b.bytes, text); ok {
		for _, id := range w.ids {
			w.add(id)
		}
	}
	return ok
}

// unknown adds the unknown token if due.
func (b *bpe) unknown(w *work, due *bool) error {
	if !*due {
		return nil
	}
	id, ok := b.vocabulary[*b.unk]
	if !ok {
		return fmt.Errorf("unk_token %.40q is no token", *b.unk)
	}
	w.add(id)
	*due = false
	return nil
}

func (w *work) add(id int32) {
	n := int32(len(w.symbols))
	w.symbols = append(w.symbols, symbol{id: id, prev: n - 1, next: n + 1})
}

// mergeAll merges until no pair of neighbours has a merge. Like the library, it applies an outdated candidate if its
// place would merge to the same token.
func (b *bpe) mergeAll(w *work) {
	s := w.symbols
	w.queue = w.queue[:0]
	for i := 0; i+1 < len(s); i++ {
		b.propose(w, int32(i), s[i].id, s[i+1].id)
	}
	for len(w.queue) > 0 {
		top := w.pop()
		at := &s[top.pos]
		if at.gone || int(at.next) >= len(s) {
			continue
		}
		right := &s[at.next]
		if m, ok := b.merges[pair(at.id, right.id)]; !ok || m.id != top.id {
			continue
		}
		at.id, at.next, right.gone = top.id, right.next, true
		if int(at.next) < len(s) {
			s[at.next].prev = top.pos
		}
		if at.prev >= 0 {
			b.propose(w, at.prev, s[at.prev].id, at.id)
		}
		if int(at.next) < len(s) {
			b.propose(w, top.pos, at.id, s[at.next].id)
		}
	}
}

// propose queues the merge of two neighbours, if one exists.
func (b *bpe) propose(w *work, pos, left, right int32) {
	if m, ok := b.merges[pair(left, right)]; ok {
		w.push(candidate{m.rank, pos, m.id})
	}
}

func (w *work) push(c candidate) {
	w.queue = append(w.queue, c)
	q, i := w.queue, len(w.queue)-1
	for i > 0 && c.before(q[(i-1)/2]) {
		q[i] = q[(i-1)/2]
		i = (i - 1) / 2
	}
	q[i] = c
}

func (w *work) pop() candidate {
	q := w.queue
	top, last := q[0], q[len(q)-1]
	q = q[:len(q)-1]
	w.queue = q
	for i := 0; len(q) > 0; {
		k := 2*i + 1
		if k+1 < len(q) && q[k+1].before(q[k]) {
			k++
		}
		if k >= len(q) || !q[k].before(last) {
			q[i] = last
			break
		}
		q[i] = q[k]
		i = k
	}
	return top
}
