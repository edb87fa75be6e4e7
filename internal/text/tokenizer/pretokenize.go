package tokenizer

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// A preTokenizer cuts a piece of text into non-empty smaller ones. yield must not keep them.
type preTokenizer interface {
	cut(m *matcher, p piece, yield func(piece) error) error
}

// preTokenizers cut in turn, each the pieces of the previous one.
type preTokenizers []preTokenizer

func (cs preTokenizers) cut(m *matcher, p piece, yield func(piece) error) error {
	if len(cs) == 0 {
		return yield(p)
	}
	if len(cs) == 1 {
		return cs[0].cut(m, p, yield)
	}
	return cs[0].cut(m, p, func(p piece) error { return cs[1:].cut(m, p, yield) })
}

// delimiters find the cuts of a text: matches, and the text between them.
type delimiters interface {
	each(m *matcher, text string, f func(from, to int, match bool) error) error
}

// runes finds delimiters of one rune each.
type runes func(rune) bool

func (is runes) each(_ *matcher, text string, f func(from, to int, match bool) error) error {
	return eachMatch(text, func(at int) (from, to int) {
		for at < len(text) {
			r, n := runeAt(text, at)
			if is(r) {
				return at, at + n
			}
			at += n
		}
		return -1, -1
	}, f)
}

type split struct {
	at       delimiters
	invert   bool // the text between matches is the delimiter
	behavior behavior
}

type behavior int

const (
	removed behavior = iota
	isolated
	mergedWithPrevious
	mergedWithNext
	contiguous
)

var behaviors = map[string]behavior{
	"Removed": removed, "Isolated": isolated, "MergedWithPrevious": mergedWithPrevious,
	"MergedWithNext": mergedWithNext,
	"Contiguous":     contiguous,
}

func (s *split) cut(m *matcher, p piece, yield func(piece) error) error {
	give := func(from, to int) error {
		if from == to {
			return nil
		}
		return yield(piece{p.text[from:to], p.first && from == 0})
	}
	if s.behavior == removed || s.behavior == isolated {
		return s.at.each(m, p.text, func(from, to int, match bool) error {
			if s.behavior == removed && match != s.invert {
				return nil
			}
			return give(from, to)
		})
	}
	// The other behaviors may join a stretch to the previous one, so each stretch waits for the next.
	start, end, before, waits := 0, 0, false, false
	err := s.at.each(m, p.text, func(from, to int, match bool) error {
		match = match != s.invert
		join := waits && s.joins(before, match)
		before = match
		if !join && waits {
			if err := give(start, end); err != nil {
				return err
			}
		}
		if !join {
			start = from
		}
		end, waits = to, true
		return nil
	})
	if err != nil || !waits {
		return err
	}
	return give(start, end)
}

func (s *split) joins(before, match bool) bool {
	switch s.behavior {
	case mergedWithPrevious:
		return match && !before
	case mergedWithNext:
		return before && !match
	}
	return before == match
}

// words is the pre-tokenizer Whitespace: runs of word characters, and runs of other characters except spaces.
type words struct{}

var wordClass = newClassOnce("rust_word")

func (words) cut(_ *matcher, p piece, yield func(piece) error) error {
	word := wordClass()
	kind := func(r rune) int {
		switch {
		case word.has(r):
			return 1
		case isSpace(r):
			return 0
		}
		return 2
	}
	for at := 0; at < len(p.text); {
		r, n := runeAt(p.text, at)
		k, start := kind(r), at
		for at += n; at < len(p.text); at += n {
			if r, n = runeAt(p.text, at); kind(r) != k {
				break
			}
		}
		if k != 0 {
			if err := yield(piece{p.text[start:at], p.first && start == 0}); err != nil {
				return err
			}
		}
	}
	return nil
}

// metaspace replaces spaces by a mark, and puts a mark in front.
type metaspace struct {
	mark   string
	scheme string // first, always, never
	split  *split // before each mark; nil: no cuts
}

func (s *metaspace) cut(m *matcher, p piece, yield func(piece) error) error {
	p.text = strings.ReplaceAll(p.text, " ", s.mark)
	if !strings.HasPrefix(p.text, s.mark) && (s.scheme == "always" || s.scheme == "first" && p.first) {
		p.text = s.mark + p.text
	}
	if s.split == nil {
		return yield(p)
	}
	return s.split.cut(m, p, yield)
}

type fixed int

func (n fixed) cut(_ *matcher, p piece, yield func(piece) error) error {
	start, count := 0, 0
	for at := range p.text {
		if count == int(n) {
			if err := yield(piece{p.text[start:at], p.first && start == 0}); err != nil {
				return err
			}
			start, count = at, 0
		}
		count++
	}
	return yield(piece{p.text[start:], p.first && start == 0})
}

const gpt2 = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`

// byteLevel puts a space before each piece without one, cuts by GPT-2's pattern, and maps each byte to a visible
// character.
type byteLevel struct {
	prefix bool
	split  *split // nil: no cuts
	hidden bool   // keep the bytes
}

func (b *byteLevel) cut(m *matcher, p piece, yield func(piece) error) error {
	if b.prefix && !strings.HasPrefix(p.text, " ") {
		p.text = " " + p.text
	}
	emit := yield
	if !b.hidden {
		emit = func(p piece) error {
			p.text = visible(p.text)
			return yield(p)
		}
	}
	if b.split == nil {
		return emit(p)
	}
	return b.split.cut(m, p, emit)
}

// ByteRunes maps each byte to a rune: itself if visible, else one above U+00FF.
var ByteRunes = func() (t [256]rune) {
	next := rune(256)
	for b := range t {
		if t[b] = rune(b); !(b >= '!' && b <= '~' || b >= 0xa1 && b <= 0xac || b >= 0xae) {
			t[b] = next
			next++
		}
	}
	return t
}()

var byteTexts = func() (t [256]string) {
	for b, r := range ByteRunes {
		t[b] = string(r)
	}
	return t
}()

// visible maps each byte to its rune.
func visible(s string) string {
	k := 0
	for k < len(s) && s[k] >= '!' && s[k] <= '~' {
		k++
	}
	if k == len(s) {
		return s
	}
	var b strings.Builder
	b.Grow(len(s) + 8)
	for i := range len(s) {
		b.WriteString(byteTexts[s[i]])
	}
	return b.String()
}

func newByteLevel(prefix, cuts bool) (*byteLevel, error) {
	b := &byteLevel{prefix: prefix}
	if !cuts {
		return b, nil
	}
	p, err := compile(gpt2)
	b.split = &split{at: pattern{program: p}, behavior: isolated}
	return b, err
}

func oneRune(s string) (rune, error) {
	r, n := utf8.DecodeRuneInString(s)
	if n != len(s) || n == 0 {
		return 0, fmt.Errorf("%.20q is not one character", s)
	}
	return r, nil
}
