package tokenizer

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// The patterns of tokenizer.json are Oniguruma's, with features that Go's regexp lacks on purpose: lookahead and
// possessive repeats. This parser supports the part of the language that tokenizers use, and refuses the rest by name.
// unicode.txt defines its classes.

const (
	maxPattern = 1 << 12 // bytes
	maxRepeat  = 1000    // of {n,m}
	maxNesting = 50
)

type node struct {
	kind     nodeKind
	set      set     // nodeSet
	literal  bool    // nodeSet: written as one character
	sub      []*node // all others
	min, max int     // nodeRepeat; max -1: no bound
	mode     byte    // nodeRepeat: 'g'reedy, 'l'azy, 'p'ossessive
	negative bool    // nodeLook
}

type nodeKind int

const (
	nodeSet       nodeKind = iota // one rune
	nodeSequence                  // all, one after the other
	nodeChoice                    // the first that leads to a match
	nodeRepeat                    // sub[0]
	nodeLook                      // sub[0] matches here, or does not
	nodeAtomic                    // sub[0], once
	nodeLineStart                 // ^
	nodeLineEnd                   // $
	nodeTextStart                 // \A
	nodeTextEnd                   // \z
)

func (n *node) nullable() bool {
	switch n.kind {
	case nodeSet:
		return false
	case nodeRepeat:
		return n.min == 0 || n.sub[0].nullable()
	case nodeAtomic:
		return n.sub[0].nullable()
	case nodeChoice:
		return slices.ContainsFunc(n.sub, (*node).nullable)
	case nodeSequence:
		return !slices.ContainsFunc(n.sub, func(s *node) bool { return !s.nullable() })
	}
	return true
}

type parser struct {
	text  string
	at    int
	depth int
	fold  bool // (?i)
}

func parsePattern(pattern string) (*node, error) {
	if len(pattern) > maxPattern {
		return nil, fmt.Errorf("the pattern has %d bytes; at most %d are read", len(pattern), maxPattern)
	}
	if !utf8.ValidString(pattern) {
		return nil, errors.New("the pattern is not UTF-8")
	}
	p := &parser{text: pattern}
	n, err := p.choice()
	if err == nil && p.at < len(p.text) {
		err = errors.New("a ) that closes nothing")
	}
	if err != nil {
		return nil, fmt.Errorf("pattern %.200q, byte %d: %w", pattern, p.at, err)
	}
	return n, nil
}

func (p *parser) rest() string { return p.text[p.at:] }

func (p *parser) take(word string) bool {
	if strings.HasPrefix(p.rest(), word) {
		p.at += len(word)
		return true
	}
	return false
}

// rune reads a rune. The caller has checked that one remains.
func (p *parser) rune() rune {
	r, n := utf8.DecodeRuneInString(p.rest())
	p.at += n
	return r
}

// choice reads alternatives up to a ) or the end.
func (p *parser) choice() (*node, error) {
	if p.depth++; p.depth > maxNesting {
		return nil, fmt.Errorf("groups nest deeper than %d", maxNesting)
	}
	defer func() { p.depth-- }()
	c := &node{kind: nodeChoice}
	for {
		s, err := p.sequence()
		if err != nil {
			return nil, err
		}
		c.sub = append(c.sub, s)
		if !p.take("|") {
			break
		}
	}
	if len(c.sub) == 1 {
		return c.sub[0], nil
	}
	return c, nil
}

func (p *parser) sequence() (*node, error) {
	s := &node{kind: nodeSequence}
	for p.at < len(p.text) && p.text[p.at] != '|' && p.text[p.at] != ')' {
		if p.take("(?i)") { // to the end of the group
			fold := p.fold
			p.fold = true
			rest, err := p.choice()
			p.fold = fold
			s.sub = append(s.sub, rest)
			return s, err
		}
		a, err := p.atom()
		if err != nil {
			return nil, err
		}
		if a, err = p.repeats(a); err != nil {
			return nil, err
		}
		s.sub = append(s.sub, a)
	}
	if p.fold {
		return s, s.folds()
	}
	return s, nil
}

// manyFolds lists strings that equal a single letter if case is ignored, such as ss and ß.
var manyFolds = []string{"ss", "ff", "fi", "fl", "st"}

// folds refuses strings with a case folding of their own.
func (n *node) folds() error {
	var b strings.Builder
	for _, s := range n.sub {
		if s.kind == nodeSet && s.literal {
			b.WriteRune(unicode.ToLower(s.set[0].lo))
		} else {
			b.WriteByte(0)
		}
	}
	for _, f := range manyFolds {
		if strings.Contains(b.String(), f) {
			return fmt.Errorf("%q where case is ignored", f)
		}
	}
	return nil
}

func (p *parser) atom() (*node, error) {
	switch {
	case p.take("("):
		return p.group()
	case p.take("["):
		s, err := p.bracket()
		return p.class(s), err
	case p.take("."):
		return &node{set: set{{'\n', '\n'}}.not()}, nil
	case p.take("^"):
		return &node{kind: nodeLineStart}, nil
	case p.take("$"):
		return &node{kind: nodeLineEnd}, nil
	case p.take(`\A`):
		return &node{kind: nodeTextStart}, nil
	case p.take(`\z`):
		return &node{kind: nodeTextEnd}, nil
	case p.take(`\`):
		s, literal, err := p.escape()
		if err != nil {
			return nil, err
		}
		if literal {
			return p.letter(s[0].lo)
		}
		return p.class(s), nil
	case strings.ContainsRune("*+?", rune(p.text[p.at])):
		return nil, errors.New("a repeat of nothing")
	}
	return p.letter(p.rune())
}

func (p *parser) class(s set) *node {
	if p.fold {
		s = foldSet(s)
	}
	return &node{set: s}
}

func (p *parser) letter(r rune) (*node, error) {
	if p.fold && r >= 128 {
		return nil, fmt.Errorf("%q where case is ignored", r)
	}
	n := p.class(set{{r, r}})
	n.literal = true
	return n, nil
}

// cased lists the runes with other cases.
var cased = sync.OnceValue(func() (all []rune) {
	for r := range rune(0x1ffff) {
		if unicode.SimpleFold(r) != r {
			all = append(all, r)
		}
	}
	return all
})

func foldSet(s set) set {
	var more set
	for _, r := range cased() {
		if !s.has(r) {
			continue
		}
		for o := unicode.SimpleFold(r); o != r; o = unicode.SimpleFold(o) {
			more = append(more, span{o, o})
		}
	}
	return union(s, more)
}

// group reads the rest of a group after its (.
func (p *parser) group() (*node, error) {
	kind, negative, fold := nodeSequence, false, p.fold
	switch {
	case p.take("?:"):
	case p.take("?="):
		kind = nodeLook
	case p.take("?!"):
		kind, negative = nodeLook, true
	case p.take("?>"):
		kind = nodeAtomic
	case p.take("?i:"):
		p.fold = true
	case p.take("?<="), p.take("?<!"):
		return nil, errors.New("lookbehind is not read here")
	case p.take("?"):
		return nil, fmt.Errorf("the group (?%.4s is not read here", p.rest())
	}
	n, err := p.choice()
	p.fold = fold
	if err != nil {
		return nil, err
	}
	if !p.take(")") {
		return nil, errors.New("a ( that nothing closes")
	}
	if kind == nodeSequence {
		return n, nil
	}
	return &node{kind: kind, sub: []*node{n}, negative: negative}, nil
}

func (p *parser) repeats(a *node) (*node, error) {
	for range maxNesting {
		n := &node{kind: nodeRepeat, sub: []*node{a}, max: -1, mode: 'g'}
		counted := false
		switch {
		case p.take("*"):
		case p.take("+"):
			n.min = 1
		case p.take("?"):
			n.max = 1
		default:
			var err error
			if counted, err = p.interval(n); err != nil || !counted {
				return a, err
			}
		}
		switch {
		case counted: // {n}+ is a repeat of a repeat, and {n}? a separate operator
			if strings.HasPrefix(p.rest(), "?") {
				return nil, errors.New("{}? is not read here")
			}
		case p.take("+"):
			n.mode = 'p'
		case p.take("?"):
			n.mode = 'l'
		}
		if a.kind >= nodeLook && a.kind != nodeAtomic || a.nullable() && n.max != 1 {
			return nil, errors.New("a repeat of what can be empty")
		}
		a = n
	}
	return nil, errors.New("repeats of repeats")
}

// interval reads {n}, {n,}, {n,m} or {,m}. Other braces are literals.
func (p *parser) interval(n *node) (bool, error) {
	body, _, closed := strings.Cut(strings.TrimPrefix(p.rest(), "{"), "}")
	lo, hi, two := strings.Cut(body, ",")
	if !strings.HasPrefix(p.rest(), "{") || !closed || lo == "" && hi == "" || strings.Trim(lo+hi, "0123456789") != "" {
		return false, nil
	}
	if !two {
		hi = lo
	}
	var err [2]error
	if n.min = 0; lo != "" {
		n.min, err[0] = strconv.Atoi(lo)
	}
	if n.max = -1; hi != "" {
		n.max, err[1] = strconv.Atoi(hi)
	}
	if errors.Join(err[:]...) != nil || max(n.min, n.max) > maxRepeat || n.max >= 0 && n.max < n.min {
		return false, fmt.Errorf("the repeat {%.20s}; at most {%d} is read", body, maxRepeat)
	}
	p.at += len(body) + 2
	return true, nil
}
