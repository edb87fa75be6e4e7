package tokenizer

import (
	"slices"
	"sort"
)

// A span is the runes lo to hi, inclusive.
type span struct{ lo, hi rune }

// A set holds runes as ascending, separate spans.
type set []span

const maxRune = 0x10ffff

func (s set) has(r rune) bool {
	k := sort.Search(len(s), func(k int) bool { return s[k].hi >= r })
	return k < len(s) && s[k].lo <= r
}

func union(sets ...set) set {
	var all []span
	for _, s := range sets {
		all = append(all, s...)
	}
	slices.SortFunc(all, func(a, b span) int { return int(a.lo - b.lo) })
	var out set
	for _, s := range all {
		if n := len(out); n > 0 && s.lo <= out[n-1].hi+1 {
			out[n-1].hi = max(out[n-1].hi, s.hi)
		} else {
			out = append(out, s)
		}
	}
	return out
}

func (s set) not() set {
	var out set
	at := rune(0)
	for _, x := range s {
		if x.lo > at {
			out = append(out, span{at, x.lo - 1})
		}
		at = x.hi + 1
	}
	if at <= maxRune {
		out = append(out, span{at, maxRune})
	}
	return out
}

func (s set) and(o set) set { return union(s.not(), o.not()).not() }

// A class is a set with fast lookup: a bit for each byte of ASCII, then pages of 256 runes. Full and empty pages are
// shared. A set of few spans has no pages.
type class struct {
	ascii [4]uint32
	pages []*[8]uint32 // nil: few is used
	few   set
}

// fewSpans bounds the spans that are searched one by one.
const fewSpans = 4

var fullPage, emptyPage = &[8]uint32{^uint32(0), ^uint32(0), ^uint32(0), ^uint32(0), ^uint32(0), ^uint32(0), ^uint32(0),
	^uint32(0)}, &[8]uint32{}

func newClass(s set) *class {
	c := &class{few: s}
	if len(s) <= fewSpans {
		for r := range rune(128) {
			if s.has(r) {
				c.ascii[r/32] |= 1 << (r & 31)
			}
		}
		return c
	}
	c.pages, c.few = make([]*[8]uint32, (maxRune+1)/256), nil
	for i := range c.pages {
		c.pages[i] = emptyPage
	}
	for _, x := range s {
		for at := x.lo; at <= x.hi; {
			page, end := at/256, min(x.hi, at|255)
			if at&255 == 0 && end&255 == 255 {
				c.pages[page] = fullPage
			} else {
				if c.pages[page] == emptyPage {
					c.pages[page] = new([8]uint32)
				}
				for r := at; r <= end; r++ {
					c.pages[page][r&255/32] |= 1 << (r & 31)
				}
			}
			at = end + 1
		}
	}
	copy(c.ascii[:], c.pages[0][:4])
	return c
}

func (c *class) has(r rune) bool {
	if r < 128 {
		return c.ascii[r/32]>>(r&31)&1 != 0
	}
	if c.pages != nil {
		return c.pages[r>>8][r&255/32]>>(r&31)&1 != 0
	}
	for _, s := range c.few {
		if r <= s.hi {
			return r >= s.lo
		}
	}
	return false
}

// A trie finds texts by their bytes. Node 0 is the root. The zero value is empty.
type trie struct {
	next map[uint64]int32 // by parent node and byte
	ends []int32          // value of each node, set by the caller; -1: no text ends there
}

// node returns the node of a text, and adds it if absent.
func (t *trie) node(text string) int32 {
	if t.next == nil {
		t.next, t.ends = map[uint64]int32{}, []int32{-1}
	}
	at := int32(0)
	for i := range len(text) {
		key := pair(at, int32(text[i]))
		to, ok := t.next[key]
		if !ok {
			to = int32(len(t.ends))
			t.next[key] = to
			t.ends = append(t.ends, -1)
		}
		at = to
	}
	return at
}
