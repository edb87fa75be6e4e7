package experiment

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode"

	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/terminal"
)

// Skip is a condition on the values of a cell: comparisons of keys of the grid with values or with each
// other, joined by && and ||, of which && binds tighter, and parentheses.
type Skip struct {
	text string
	root node
}

// node is a part of a condition.
type node interface {
	holds(values map[string]any) bool
}

type both struct{ a, b node }
type either struct{ a, b node }

func (n both) holds(v map[string]any) bool   { return n.a.holds(v) && n.b.holds(v) }
func (n either) holds(v map[string]any) bool { return n.a.holds(v) || n.b.holds(v) }

// comparison is of two operands.
type comparison struct {
	op   string
	a, b operand
}

// operand is a key of the grid, or a value.
type operand struct {
	key   string
	value any // where key is ""
}

func (o operand) of(values map[string]any) any {
	if o.key != "" {
		return values[o.key]
	}
	return o.value
}

func (n comparison) holds(values map[string]any) bool {
	a, b := n.a.of(values), n.b.of(values)
	x, isNumber := number(a)
	y, too := number(b)
	if isNumber && too {
		return ordered(n.op, cmp.Compare(x, y))
	}
	if n.op != "==" && n.op != "!=" && (isNumber || too) {
		return false // a key of both kinds, such as auto and 8: neither is the larger
	}
	return ordered(n.op, strings.Compare(Text(a), Text(b)))
}

// ordered is whether two values that compare so are in the relation.
func ordered(op string, c int) bool {
	switch op {
	case "==":
		return c == 0
	case "!=":
		return c != 0
	case "<":
		return c < 0
	case "<=":
		return c <= 0
	case ">":
		return c > 0
	}
	return c >= 0
}

func number(value any) (float64, bool) {
	switch v := value.(type) {
	case int64:
		return float64(v), true
	case float64:
		return v, true
	}
	return 0, false
}

// Holds reports whether a cell of those values is left out.
func (s *Skip) Holds(values map[string]any) bool { return s.root.holds(values) }

// String returns the condition as it was written.
func (s *Skip) String() string { return s.text }

// maxSkip bounds the text of a condition, and so how deep it nests.
const maxSkip = 4096

// ParseSkip reads a condition over the axes of a grid. The error says what is wrong, and what to write
// instead.
func ParseSkip(text string, grid []Axis) (*Skip, error) {
	if len(text) > maxSkip {
		return nil, fmt.Errorf("the condition has %d bytes; the most is %d", len(text), maxSkip)
	}
	words, err := lex(text)
	if err != nil {
		return nil, err
	}
	p := &parser{words: words, grid: grid}
	root, err := p.any()
	if err == nil && p.at < len(p.words) {
		err = fmt.Errorf("%s stands where && or || or the end is wanted", quote(p.peek().text))
	}
	if err != nil {
		return nil, err
	}
	return &Skip{text: text, root: root}, nil
}

// word is a token: an operator, a parenthesis, or an operand.
type word struct {
	text   string
	symbol bool
	quoted bool
}

var symbols = []string{"&&", "||", "==", "!=", "<=", ">=", "<", ">", "(", ")"}

// lex cuts a condition into words.
func lex(text string) (words []word, err error) {
	for rest := strings.TrimSpace(text); rest != ""; rest = strings.TrimSpace(rest) {
		if i := slices.IndexFunc(symbols, func(s string) bool { return strings.HasPrefix(rest, s) }); i >= 0 {
			words, rest = append(words, word{text: symbols[i], symbol: true}), rest[len(symbols[i]):]
			continue
		}
		if q := rest[0]; q == '"' || q == '\'' {
			inner, after, closed := strings.Cut(rest[1:], string(q))
			if !closed {
				return nil, fmt.Errorf("the quote before %s is not closed", quote(inner))
			}
			words, rest = append(words, word{text: inner, quoted: true}), after
			continue
		}
		n := strings.IndexFunc(rest, func(r rune) bool { return unicode.IsSpace(r) || strings.ContainsRune(`&|=!<>()"'`, r) })
		if n < 0 {
			n = len(rest)
		}
		if n == 0 {
			return nil, fmt.Errorf("%s is no operator; those are %s", quote(rest[:1]), strings.Join(symbols[:8], " "))
		}
		words, rest = append(words, word{text: rest[:n]}), rest[n:]
	}
	return words, nil
}

// parser reads words from left to right.
type parser struct {
	words []word
	at    int
	grid  []Axis
}

// peek is the next word; at the end an empty one.
func (p *parser) peek() word {
	if p.at < len(p.words) {
		return p.words[p.at]
	}
	return word{}
}

// take goes past a symbol, if it is the next word.
func (p *parser) take(symbol string) bool {
	w := p.peek()
	if w.symbol && w.text == symbol {
		p.at++
		return true
	}
	return false
}

// any reads conditions joined by ||.
func (p *parser) any() (node, error) {
	n, err := p.all()
	for err == nil && p.take("||") {
		var b node
		b, err = p.all()
		n = either{n, b}
	}
	return n, err
}

// all reads conditions joined by &&.
func (p *parser) all() (node, error) {
	n, err := p.one()
	for err == nil && p.take("&&") {
		var b node
		b, err = p.one()
		n = both{n, b}
	}
	return n, err
}

// one reads a comparison, or a condition in parentheses.
func (p *parser) one() (node, error) {
	if p.take("(") {
		n, err := p.any()
		if err == nil && !p.take(")") {
			err = fmt.Errorf("a ( is not closed")
		}
		return n, err
	}
	a, err := p.operand()
	if err != nil {
		return nil, err
	}
	op := p.peek()
	if !op.symbol || !slices.Contains(symbols[2:8], op.text) {
		return nil, fmt.Errorf("after %s a comparison is wanted: one of %s", quote(p.words[p.at-1].text), strings.Join(symbols[2:8], " "))
	}
	p.at++
	b, err := p.operand()
	if err != nil {
		return nil, err
	}
	return comparison{op.text, a, b}, p.check(op.text, a, b)
}

// operand reads a key or a value.
func (p *parser) operand() (operand, error) {
	w := p.peek()
	switch {
	case p.at == len(p.words):
		return operand{}, fmt.Errorf("it ends where a key or a value is wanted")
	case w.symbol:
		return operand{}, fmt.Errorf("%s stands where a key or a value is wanted", quote(w.text))
	}
	p.at++
	if w.quoted {
		return operand{value: w.text}, nil
	}
	if axisOf(p.grid, w.text) != nil {
		return operand{key: w.text}, nil
	}
	if n, err := config.ParseSize(w.text); err == nil {
		return operand{value: n}, nil
	}
	if x, err := config.ParseFloat(w.text); err == nil {
		return operand{value: x}, nil
	}
	switch w.text {
	case "true", "false":
		return operand{value: w.text == "true"}, nil
	case "null":
		return operand{}, nil
	}
	if strings.Contains(w.text, ".") || slices.Contains(ownKeys, w.text) {
		return operand{}, fmt.Errorf("%s is no key of the grid; %s", quote(w.text), nearestOf(w.text, keysOf(p.grid)))
	}
	return operand{value: w.text}, nil
}

// check refuses a comparison that says nothing of a cell.
func (p *parser) check(op string, a, b operand) error {
	if a.key == "" {
		a, b = b, a
	}
	if a.key == "" {
		return fmt.Errorf("%s %s %s names no key of the grid; %s", Text(b.value), op, Text(a.value), nearestOf(Text(b.value), keysOf(p.grid)))
	}
	if b.key != "" {
		return nil
	}
	axis := axisOf(p.grid, a.key)
	var choices []string
	numbers := false
	for _, v := range axis.Values {
		_, isNumber := number(v)
		numbers = numbers || isNumber
		choices = append(choices, Text(v))
	}
	if _, isNumber := number(b.value); isNumber && numbers || slices.Contains(choices, Text(b.value)) {
		return nil
	}
	return fmt.Errorf("%s is never %s; %s", a.key, quote(Text(b.value)), nearestOf(Text(b.value), choices))
}

// nearestOf says what a word may have been meant to be.
func nearestOf(word string, choices []string) string {
	if meant := config.Nearest(word, choices); meant != "" {
		return "did you mean " + meant + "?"
	}
	return "there are " + strings.Join(choices, ", ")
}

func quote(s string) string { return `"` + terminal.Clip(terminal.Name(s), 60) + `"` }

func axisOf(grid []Axis, key string) *Axis {
	for i := range grid {
		if grid[i].Key == key {
			return &grid[i]
		}
	}
	return nil
}

func keysOf(grid []Axis) (keys []string) {
	for i := range grid {
		keys = append(keys, grid[i].Key)
	}
	return keys
}
