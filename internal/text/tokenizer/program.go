package tokenizer

import (
	"errors"
	"fmt"
	"unicode/utf8"
)

// A program is a compiled pattern. Matching backtracks, as in the library, and takes exponential time on some texts. It
// counts its steps, so that such a text is an error.
type program struct {
	code    []instr
	pattern string
	classes map[string]*class // of the compiler, by their spans: patterns repeat them
}

// An instr is one instruction. next is the index of the following one.
type instr struct {
	op       op
	class    *class
	next     int
	other    int // opSplit: tried if next fails; opLook, opAtomic: first instruction of the part
	min, max int // opMany
	possess  bool
	negative bool
}

type op int

const (
	opMatch op = iota
	opOne      // a rune of class
	opMany     // min to max runes of class, as many as a match allows
	opSplit
	opLook
	opAtomic
	opLineStart
	opLineEnd
	opTextStart
	opTextEnd
)

// maxCode bounds the code of nested repeats.
const maxCode = 1 << 14

func compile(pattern string) (*program, error) {
	n, err := parsePattern(pattern)
	if err != nil {
		return nil, err
	}
	p := &program{pattern: pattern, classes: map[string]*class{}}
	end := p.add(instr{op: opMatch})
	start := p.compile(n, end)
	if len(p.code) > maxCode {
		return nil, fmt.Errorf("pattern %.200q: its repeats multiply to more than %d parts", pattern, maxCode)
	}
	p.code = append(p.code, p.code[start]) // matching begins at the last instruction
	p.classes = nil
	return p, nil
}

// class returns the class of a set, made once.
func (p *program) class(s set) *class {
	key := fmt.Sprint(s)
	if p.classes[key] == nil {
		p.classes[key] = newClass(s)
	}
	return p.classes[key]
}

func (p *program) add(i instr) int {
	if len(p.code) > maxCode { // compile returns the error
		return 0
	}
	p.code = append(p.code, i)
	return len(p.code) - 1
}

// compile adds a node that continues at next, and returns its first instruction.
func (p *program) compile(n *node, next int) int {
	switch n.kind {
	case nodeSet:
		return p.add(instr{op: opOne, class: p.class(n.set), next: next})
	case nodeSequence:
		for i := len(n.sub) - 1; i >= 0; i-- {
			next = p.compile(n.sub[i], next)
		}
		return next
	case nodeChoice:
		at := p.compile(n.sub[len(n.sub)-1], next)
		for i := len(n.sub) - 2; i >= 0; i-- {
			at = p.add(instr{op: opSplit, next: p.compile(n.sub[i], next), other: at})
		}
		return at
	case nodeRepeat:
		return p.repeat(n, next)
	case nodeLook, nodeAtomic:
		op := map[nodeKind]op{nodeLook: opLook, nodeAtomic: opAtomic}[n.kind]
		return p.add(instr{op: op, other: p.compile(n.sub[0], 0), next: next, negative: n.negative})
	}
	return p.add(instr{op: opLineStart + op(n.kind-nodeLineStart), next: next})
}

// repeat adds a repeat. A repeat of one rune is one instruction.
func (p *program) repeat(n *node, next int) int {
	sub := n.sub[0]
	if sub.kind == nodeSet && n.mode != 'l' {
		return p.add(instr{op: opMany, class: p.class(sub.set), min: n.min, max: n.max, possess: n.mode == 'p',
			next: next})
	}
	if n.mode == 'p' {
		greedy := *n
		greedy.mode = 'g'
		return p.compile(&node{kind: nodeAtomic, sub: []*node{&greedy}}, next)
	}
	split := func(in int) int {
		if n.mode == 'l' {
			return p.add(instr{op: opSplit, next: next, other: in})
		}
		return p.add(instr{op: opSplit, next: in, other: next})
	}
	at := next
	if n.max < 0 {
		at = split(0)
		in := p.compile(sub, at)
		if n.mode == 'l' {
			p.code[at].other = in
		} else {
			p.code[at].next = in
		}
	}
	for range max(n.max-n.min, 0) {
		at = split(p.compile(sub, at))
		if len(p.code) > maxCode {
			return at
		}
	}
	for range n.min {
		if len(p.code) > maxCode {
			return at
		}
		at = p.compile(sub, at)
	}
	return at
}

// errSteps reports a text with too many steps.
var errSteps = errors.New("the pattern tries too many ways on this text")

// A whole text may take many times the steps that the patterns of tokenizers take on ordinary text.
const (
	baseSteps = 1 << 22
	byteSteps = 1 << 13
)

// A frame is an untried alternative at pos and, if lo is lower, at each earlier rune down to lo.
type frame struct{ at, pos, lo int }

// A matcher runs programs. It is not for concurrent use.
type matcher struct {
	stack []frame
	steps int
}

// each calls f with the matches of a program in a text, in order, and with the text between them.
func (m *matcher) each(p *program, text string, f func(from, to int, match bool) error) error {
	defer func(outer int) { m.steps = outer }(m.steps) // f may also match
	m.steps = baseSteps + byteSteps*len(text)
	last, prev := -1, 0 // the end of the last match, and of the last call of f
	for at := 0; at <= len(text); {
		end := m.run(p, len(p.code)-1, text, at)
		if m.steps < 0 {
			return fmt.Errorf("pattern %.200q: %w", p.pattern, errSteps)
		}
		switch {
		case end < 0 || end == at && last == at: // no empty match right after a match
			_, n := utf8.DecodeRuneInString(text[at:])
			at += max(n, 1)
			continue
		case prev < at:
			if err := f(prev, at, false); err != nil {
				return err
			}
		}
		if err := f(at, end, true); err != nil {
			return err
		}
		prev, last, at = end, end, end
	}
	if prev < len(text) {
		return f(prev, len(text), false)
	}
	return nil
}

// run matches from an instruction. It leaves older entries of the stack alone.
func (m *matcher) run(p *program, at int, text string, pos int) int {
	base := len(m.stack)
	for {
		if m.steps--; m.steps < 0 {
			m.stack = m.stack[:base]
			return -1
		}
		i := &p.code[at]
		ok := true
		switch i.op {
		case opMatch:
			m.stack = m.stack[:base]
			return pos
		case opOne:
			r, n := runeAt(text, pos)
			if ok = n > 0 && i.class.has(r); ok {
				pos += n
			}
		case opMany:
			var least int
			if least, pos, ok = m.many(i, text, pos); ok && !i.possess && least < pos {
				m.stack = append(m.stack, frame{i.next, pos, least})
			}
		case opSplit:
			m.stack = append(m.stack, frame{i.other, pos, pos})
		case opLook:
			ok = m.run(p, i.other, text, pos) >= 0 != i.negative
		case opAtomic:
			end := m.run(p, i.other, text, pos)
			if ok = end >= 0; ok {
				pos = end
			}
		default:
			ok = i.atAnchor(text, pos)
		}
		if at = i.next; ok {
			continue
		}
		if len(m.stack) == base {
			return -1
		}
		at, pos = m.pop(text)
	}
}

// many takes as many runes of a class as possible, and returns the end of the shortest allowed match.
func (m *matcher) many(i *instr, text string, pos int) (least, most int, ok bool) {
	least, count := -1, 0
	for ; i.max < 0 || count < i.max; count++ {
		if count == i.min {
			least = pos
		}
		r, n := runeAt(text, pos)
		if n == 0 || !i.class.has(r) {
			break
		}
		pos += n
	}
	m.steps -= count
	if count == i.min {
		least = pos
	}
	return least, pos, count >= i.min
}

func (m *matcher) pop(text string) (at, pos int) {
	top := &m.stack[len(m.stack)-1]
	at = top.at
	if top.pos == top.lo { // a split
		pos = top.pos
		m.stack = m.stack[:len(m.stack)-1]
		return at, pos
	}
	_, n := utf8.DecodeLastRuneInString(text[:top.pos])
	top.pos -= n
	pos = top.pos
	if top.pos == top.lo {
		m.stack = m.stack[:len(m.stack)-1]
	}
	return at, pos
}

func (i *instr) atAnchor(text string, pos int) bool {
	switch i.op {
	case opLineStart:
		return pos == 0 || text[pos-1] == '\n' && pos < len(text)
	case opLineEnd:
		return pos == len(text) || text[pos] == '\n'
	case opTextStart:
		return pos == 0
	}
	return pos == len(text)
}

// runeAt decodes a rune; n is 0 at the end.
func runeAt(text string, pos int) (r rune, n int) {
	if pos >= len(text) {
		return 0, 0
	}
	if b := text[pos]; b < utf8.RuneSelf {
		return rune(b), 1
	}
	return utf8.DecodeRuneInString(text[pos:])
}
