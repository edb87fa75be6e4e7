package tokenizer

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// A piece is a stretch of text between the steps.
type piece struct {
	text string
	// first: it begins at the start of the whole text. The library tracks the origin of each rune; ids depend on this
	// part of it alone.
	first bool
}

// A normalizer rewrites text before it is cut.
type normalizer interface {
	normalize(m *matcher, p piece) (piece, error)
}

// A rewrite is a normalizer that keeps the origin of the first rune.
type rewrite func(string) string

func (f rewrite) normalize(_ *matcher, p piece) (piece, error) {
	p.text = f(p.text)
	return p, nil
}

type filter func(r rune) bool

func (drop filter) normalize(_ *matcher, p piece) (piece, error) {
	r, _ := utf8.DecodeRuneInString(p.text)
	return piece{strings.Map(func(r rune) rune {
		if drop(r) {
			return -1
		}
		return r
	}, p.text), p.first && !drop(r)}, nil
}

// spaces replaces runes by spaces.
func spaces(is func(r rune) bool) rewrite {
	return func(s string) string {
		return strings.Map(func(r rune) rune {
			if is(r) {
				return ' '
			}
			return r
		}, s)
	}
}

type normalizers []normalizer

func (ns normalizers) normalize(m *matcher, p piece) (piece, error) {
	before := len(p.text)
	for _, n := range ns {
		var err error
		if p, err = n.normalize(m, p); err == nil {
			err = checkGrowth(before, len(p.text))
		}
		if err != nil {
			return p, err
		}
	}
	return p, nil
}

// A text may grow by more than the normal form of any letter, and a prefix.
const (
	growTimes = 32
	growBytes = 1 << 20
)

// checkGrowth returns an error before a normalizer fills the memory.
func checkGrowth(before, after int) error {
	if after > growTimes*before+growBytes {
		return fmt.Errorf("the normalizer makes %d bytes and more of %d", after, before)
	}
	return nil
}

type strip struct{ left, right bool }

func (s strip) normalize(_ *matcher, p piece) (piece, error) {
	if s.left {
		rest := strings.TrimLeftFunc(p.text, isSpace)
		p.first = p.first && len(rest) == len(p.text)
		p.text = rest
	}
	if s.right {
		p.text = strings.TrimRightFunc(p.text, isSpace)
	}
	return p, nil
}

type replace struct {
	pattern pattern
	content string
}

func newReplace(raw map[string]string, content *string) (replace, error) {
	p, err := newPattern(raw)
	if err == nil && content == nil {
		err = errors.New("no content")
	}
	return replace{p, or(content, "")}, err
}

func (r replace) normalize(m *matcher, p piece) (piece, error) {
	var b strings.Builder
	first, found := p.first, false
	err := r.pattern.each(m, p.text, func(from, to int, match bool) error {
		if !match {
			b.WriteString(p.text[from:to])
			return nil
		}
		found = true
		if from == 0 && to > 0 { // a replacement has the origin of the last rune of its stretch
			_, n := utf8.DecodeRuneInString(p.text)
			first = first && to == n && r.content != ""
		}
		b.WriteString(r.content)
		return checkGrowth(len(p.text), b.Len())
	})
	if err != nil || !found {
		return p, err
	}
	return piece{b.String(), first}, nil
}

// isSpace reports whether the library counts a rune as white space.
func isSpace(r rune) bool {
	switch {
	case r < 0x80:
		return r == ' ' || r >= 9 && r <= 13
	case r < 0x1680:
		return r == 0x85 || r == 0xa0
	}
	return r == 0x1680 || r >= 0x2000 && r <= 0x200a || r == 0x2028 || r == 0x2029 || r == 0x202f || r == 0x205f ||
		r == 0x3000
}

func lowercase(s string) string {
	lower := unicodeTables().lower
	var b strings.Builder
	b.Grow(len(s))
	for _, r := range s {
		switch {
		case r < 'A' || r > 'Z' && r < 0x80:
			b.WriteByte(byte(r))
		case r <= 'Z':
			b.WriteByte(byte(r) | 0x20)
		default:
			if to, ok := lower[r]; ok {
				b.WriteString(to)
			} else {
				b.WriteRune(r)
			}
		}
	}
	return b.String()
}

// nmt returns the cleanup of the old NMT scripts.
func nmt() normalizer {
	return normalizers{
		filter(func(r rune) bool {
			return r >= 1 && r <= 8 || r == 0xb || r >= 0xe && r <= 0x1f || r == 0x7f || r == 0x8f || r == 0x9f
		}),
		spaces(func(r rune) bool {
			return r >= 0x200b && r <= 0x200f || strings.ContainsRune("\t\n\f\r\u1680\u2028\u2029\u2581\ufeff\ufffd", r)
		}),
	}
}

func bert(clean, chinese, accents, lower bool) normalizer {
	var ns normalizers
	if clean {
		control := newClass(union(unicodeTables().sets["bert_control"], set{{0, 0}, {0xfffd, 0xfffd}}))
		ns = append(ns, filter(control.has), spaces(isSpace))
	}
	if chinese {
		ns = append(ns, rewrite(spaceChinese))
	}
	if accents {
		ns = append(ns, rewrite(forms["NFD"].normalizeText), filter(newClass(unicodeTables().sets["bert_accent"]).has))
	}
	if lower {
		ns = append(ns, rewrite(lowercase))
	}
	return ns
}

// chinese holds the runes that BERT separates one by one.
var chinese = set{{0x3400, 0x4dbf}, {0x4e00, 0x9fff}, {0xf900, 0xfaff}, {0x20000, 0x2a6df}, {0x2a700, 0x2b81f},
	{0x2b920, 0x2ceaf}, {0x2f800, 0x2fa1f}}

func spaceChinese(s string) string {
	var b strings.Builder
	for _, r := range s {
		if r >= 0x3400 && chinese.has(r) {
			b.WriteByte(' ')
			b.WriteRune(r)
			b.WriteByte(' ')
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

// A pattern is a literal text or a program.
type pattern struct {
	literal string
	program *program
}

// newPattern reads {"String": ...} or {"Regex": ...}.
func newPattern(raw map[string]string) (pattern, error) {
	if s, ok := raw["String"]; ok && len(raw) == 1 {
		if s == "" {
			return pattern{}, fmt.Errorf("an empty pattern")
		}
		return pattern{literal: s}, nil
	}
	if s, ok := raw["Regex"]; ok && len(raw) == 1 {
		p, err := compile(s)
		return pattern{program: p}, err
	}
	return pattern{}, fmt.Errorf(`a pattern that is neither {"String": …} nor {"Regex": …}`)
}

// each calls f with the matches and the non-empty text between them.
func (p pattern) each(m *matcher, text string, f func(from, to int, match bool) error) error {
	if p.program != nil {
		return m.each(p.program, text, f)
	}
	return eachMatch(text, func(at int) (from, to int) {
		if k := strings.Index(text[at:], p.literal); k >= 0 {
			return at + k, at + k + len(p.literal)
		}
		return -1, -1
	}, f)
}

// eachMatch calls f with the matches in a text and the non-empty text between them. find returns the first match from a
// place on, or -1.
func eachMatch(text string, find func(at int) (from, to int), f func(from, to int, match bool) error) error {
	at := 0
	for from, to := find(0); from >= 0; from, to = find(at) {
		if at < from {
			if err := f(at, from, false); err != nil {
				return err
			}
		}
		if err := f(from, to, true); err != nil {
			return err
		}
		at = to
	}
	if at < len(text) {
		return f(at, len(text), false)
	}
	return nil
}
