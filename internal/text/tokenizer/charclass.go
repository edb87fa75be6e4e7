package tokenizer

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// escape reads the rest of an escape after its \: a class or a literal rune.
func (p *parser) escape() (s set, literal bool, err error) {
	if p.at == len(p.text) {
		return nil, false, errors.New(`a \ at the end`)
	}
	t := unicodeTables()
	switch r := p.rune(); r {
	case 's':
		return t.sets["space"], false, nil
	case 'S':
		return t.sets["space"].not(), false, nil
	case 'd':
		return t.sets["Nd"], false, nil
	case 'D':
		return t.sets["Nd"].not(), false, nil
	case 'w':
		return t.sets["word"], false, nil
	case 'W':
		return t.sets["word"].not(), false, nil
	case 'p', 'P':
		s, err = p.property(r == 'P')
		return s, false, err
	case 'x', 'u':
		r, err = p.number(r)
		return set{{r, r}}, true, err
	default:
		if k := strings.IndexRune("rntfvae", r); k >= 0 {
			r = rune("\r\n\t\f\v\a\x1b"[k])
		} else if r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' {
			return nil, false, fmt.Errorf(`\%c is not read here`, r)
		}
		return set{{r, r}}, true, nil
	}
}

// property reads {Name} or {^Name}.
func (p *parser) property(negative bool) (set, error) {
	name, _, ok := strings.Cut(strings.TrimPrefix(p.rest(), "{"), "}")
	if !ok || !strings.HasPrefix(p.rest(), "{") {
		return nil, errors.New(`\p without {}`)
	}
	p.at += len(name) + 2
	if rest, is := strings.CutPrefix(name, "^"); is {
		name, negative = rest, !negative
	}
	s, err := property(name)
	if negative && err == nil {
		s = s.not()
	}
	return s, err
}

func (p *parser) number(kind rune) (rune, error) {
	digits, raw := "", false // \x80 to \xff would be bytes, not characters
	if in, _, ok := strings.Cut(strings.TrimPrefix(p.rest(), "{"), "}"); kind == 'x' && ok &&
		strings.HasPrefix(p.rest(), "{") {
		digits = in
		p.at += len(in) + 2
	} else {
		n := map[rune]int{'x': 2, 'u': 4}[kind]
		digits = p.rest()[:min(n, len(p.rest()))]
		if len(digits) < n {
			return 0, fmt.Errorf(`\%c without its digits`, kind)
		}
		raw = kind == 'x'
		p.at += n
	}
	v, err := strconv.ParseUint(digits, 16, 32)
	if err != nil || v > maxRune || raw && v > 127 {
		return 0, fmt.Errorf(`\%c%.12s is no character`, kind, digits)
	}
	return rune(v), nil
}

// bracket reads the rest of a class after its [, with nested classes and &&.
func (p *parser) bracket() (set, error) {
	if p.depth++; p.depth > maxNesting {
		return nil, fmt.Errorf("classes nest deeper than %d", maxNesting)
	}
	defer func() { p.depth-- }()
	negative := p.take("^")
	var parts []set
	whole, both := set(nil), false
	join := func() {
		if s := union(parts...); both {
			whole = whole.and(s)
		} else {
			whole = s
		}
		parts, both = nil, true
	}
	if strings.HasPrefix(p.rest(), "]") {
		return nil, errors.New("the empty class []")
	}
	for !p.take("]") {
		switch {
		case p.at == len(p.text):
			return nil, errors.New("a [ that nothing closes")
		case strings.HasPrefix(p.rest(), "[:"):
			return nil, fmt.Errorf("the class %.12s is not read here; \\p{} is", p.rest())
		case p.take("["):
			s, err := p.bracket()
			if err != nil {
				return nil, err
			}
			parts = append(parts, s)
		case p.take("&&"):
			join()
		default:
			s, err := p.bracketRange()
			if err != nil {
				return nil, err
			}
			parts = append(parts, s)
		}
	}
	join()
	if negative {
		whole = whole.not()
	}
	return whole, nil
}

func (p *parser) bracketItem() (s set, literal bool, err error) {
	if p.take(`\`) {
		return p.escape()
	}
	r := p.rune()
	return set{{r, r}}, true, nil
}

// bracketRange reads an item, or a range of two items.
func (p *parser) bracketRange() (set, error) {
	s, literal, err := p.bracketItem()
	rest := p.rest()
	if err != nil || !literal || !strings.HasPrefix(rest, "-") || strings.HasPrefix(rest, "-]") || rest == "-" {
		return s, err
	}
	p.at++
	if strings.HasPrefix(p.rest(), "[") {
		return nil, errors.New("a range that ends in a class")
	}
	end, literal, err := p.bracketItem()
	if err != nil {
		return nil, err
	}
	if !literal || end[0].lo < s[0].lo {
		return nil, errors.New("a range that does not rise")
	}
	return set{{s[0].lo, end[0].lo}}, nil
}
