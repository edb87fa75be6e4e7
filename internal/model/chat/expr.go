package chat

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// words lists the names that are operators or literals.
var words = []string{"and", "or", "not", "in", "is", "if", "else", "true", "false", "none", "True", "False", "None",
	"null"}

// A binary is an operator with its level of precedence. It becomes a call with the left side before |.
type binary struct {
	level    int
	function string
}

var binaries = map[string]binary{
	"==": {1, "eq"}, "!=": {1, "ne"}, "<": {1, "lt"}, ">": {1, "gt"}, "<=": {1, "le"}, ">=": {1, "ge"}, "in": {1, "in"},
	"not in": {1, "not_in"}, "+": {2, "add"}, "-": {2, "sub"}, "~": {3, "concat"}, "*": {4, "mul"}, "/": {4, "div"},
	"//": {4, "floordiv"}, "%": {4, "mod"}, "**": {5, "pow"},
}

// signLevel is the level of a sign, which binds before binary operators, filters and tests.
const signLevel = 6

// literal returns a string in the engine's quotes.
func literal(s string) string {
	return "'" + strings.ReplaceAll(strings.ReplaceAll(s, `\`, `\\`), "'", `\'`) + "'"
}

// expr returns an expression without a comma outside brackets.
func (t *translator) expr(toks []tok) (string, error) {
	if len(toks) == 0 {
		return "", fmt.Errorf("an expression is missing")
	}
	if find(toks, ",") >= 0 {
		return "", fmt.Errorf("a tuple without parentheses")
	}
	return t.list(toks)
}

// list returns expressions with commas, colons or = between them.
func (t *translator) list(toks []tok) (string, error) {
	if t.depth++; t.depth > maxNesting {
		return "", fmt.Errorf("more than %d brackets inside each other", maxNesting)
	}
	defer func() { t.depth-- }()
	e := &expression{t: t, toks: toks}
	for e.at < len(toks) {
		if err := e.next(); err != nil {
			return "", err
		}
	}
	e.close(0)
	return e.out.String(), nil
}

// An expression is rewritten from left to right.
type expression struct {
	t       *translator
	toks    []tok
	at      int
	out     strings.Builder
	operand bool  // the last token ends an operand
	open    []int // levels of the operators whose call is open
}

// close ends the calls of operators of at least a level.
func (e *expression) close(level int) {
	for n := len(e.open); n > 0 && e.open[n-1] >= level; n-- {
		e.out.WriteByte(')')
		e.open = e.open[:n-1]
	}
}

func (e *expression) next() error {
	x := e.toks[e.at]
	e.at++
	switch {
	case x.kind == 's':
		return e.value(literal(x.text))
	case x.kind == '0':
		v, err := decodeNumber(x.text)
		if err == nil && v.IsFloat() {
			s := strconv.FormatFloat(v.AsFloat(), 'f', -1, 64)
			return e.value(choose(strings.Contains(s, "."), s, s+".0"))
		}
		return cmp.Or(err, e.value(x.text))
	case x.kind == 'n':
		return e.name(x.text)
	case x.is("("), x.is("["), x.is("{"):
		return e.bracket(x.text)
	case x.is("."):
		return e.attribute()
	case x.is("|"):
		e.close(signLevel)
		name, err := e.word("a filter")
		if err == nil && filters[name] == nil {
			err = fmt.Errorf("the filter %q is not read", name)
		}
		e.out.WriteString("|__filter_" + name)
		return err
	}
	return e.operator(x.text)
}

func (e *expression) value(text string) error {
	if e.operand {
		return fmt.Errorf("%.40s follows a value", text)
	}
	e.out.WriteString(text)
	e.operand = true
	return nil
}

// word reads a name after an operand.
func (e *expression) word(what string) (string, error) {
	if !e.operand || e.at == len(e.toks) || e.toks[e.at].kind != 'n' {
		return "", fmt.Errorf("%s is missing, or the value before it", what)
	}
	e.at++
	return e.toks[e.at-1].text, nil
}

func (e *expression) name(name string) error {
	switch name {
	case "is":
		return e.test()
	case "not":
		if e.operand { // not in
			if e.at == len(e.toks) || !e.toks[e.at].is("in") {
				return fmt.Errorf("not follows a value")
			}
			e.at++
			return e.operator("not in")
		}
		if len(e.open) > 0 {
			return fmt.Errorf("not inside an operator; write parentheses around it")
		}
		e.out.WriteString(" not ")
		return nil
	case "and", "or", "in", "if", "else":
		return e.operator(name)
	}
	if strings.HasPrefix(name, "__") || name == "null" {
		return fmt.Errorf("the name %q is not allowed", name)
	}
	return e.value(name)
}

// operator begins a call, or writes an operator of the engine.
func (e *expression) operator(op string) error {
	if !e.operand && (op == "-" || op == "+") {
		e.out.WriteString(choose(op == "-", "__negative(", "__positive("))
		e.open = append(e.open, signLevel)
		return nil
	}
	if !e.operand {
		return fmt.Errorf("%q has no value to its left", op)
	}
	e.operand = false
	b, ok := binaries[op]
	if b.level == 1 && slices.Contains(e.open, 1) {
		return fmt.Errorf("a chain of comparisons")
	}
	if e.close(b.level); ok {
		e.out.WriteString("|__" + b.function + "(")
		e.open = append(e.open, b.level)
		return nil
	}
	e.out.WriteString(" " + op + " ")
	return nil
}

// bracket reads a call, an index, a slice, or a list, tuple or map.
func (e *expression) bracket(open string) error {
	end := match(e.toks, e.at-1)
	if end < 0 {
		return fmt.Errorf("%q is not closed", open)
	}
	inner, after := e.toks[e.at:end], e.operand
	e.at, e.operand = end+1, true
	if after && open == "{" {
		return fmt.Errorf("{ follows a value")
	}
	if after && open == "[" {
		return e.index(inner)
	}
	text, err := e.t.list(inner)
	if err == nil && after {
		e.out.WriteString("(" + text + ")")
		return nil
	}
	// The space keeps two braces apart, which would end the tag.
	e.out.WriteString(open + text + map[string]string{"(": ")", "[": "]", "{": " }"}[open])
	return err
}

func (e *expression) index(inner []tok) error {
	first := find(inner, ":")
	if first < 0 {
		key, err := e.t.expr(inner)
		e.out.WriteString("|__item(" + key + ")")
		return err
	}
	e.out.WriteString("|__slice(")
	for i := range 3 {
		part, end := "none", find(inner, ":")
		if end < 0 {
			end = len(inner)
		}
		if end > 0 {
			var err error
			if part, err = e.t.expr(inner[:end]); err != nil {
				return err
			}
		}
		e.out.WriteString(part + ", "[2*(i/2):])
		inner = inner[min(end+1, len(inner)):]
	}
	e.out.WriteString(")")
	if len(inner) > 0 {
		return fmt.Errorf("a slice has at most three parts")
	}
	return nil
}

func (e *expression) attribute() error {
	if e.operand && e.at < len(e.toks) && e.toks[e.at].kind == '0' {
		e.out.WriteString("|__item(" + e.toks[e.at].text + ")")
		e.at++
		return nil
	}
	name, err := e.word("an attribute")
	if strings.HasPrefix(name, "_") {
		return fmt.Errorf("the attribute %q is not allowed", name)
	}
	if e.at < len(e.toks) && e.toks[e.at].is("(") {
		args := ""
		end := match(e.toks, e.at)
		if end < 0 {
			return fmt.Errorf("( is not closed")
		}
		if inner := e.toks[e.at+1 : end]; len(inner) > 0 {
			if args, err = e.t.list(inner); err != nil {
				return err
			}
			args = ", " + args
		}
		e.at = end + 1
		e.out.WriteString("|__method(" + literal(name) + args + ")")
		return err
	}
	e.out.WriteString("|__attr(" + literal(name) + ")")
	return err
}

// test reads the name of a test, and its argument.
func (e *expression) test() error {
	prefix := "|__is_"
	if e.at < len(e.toks) && e.toks[e.at].is("not") {
		e.at++
		prefix = "|__isnt_"
	}
	e.close(signLevel)
	name, err := e.word("a test")
	if err != nil {
		return err
	}
	if tests[name] == nil {
		return fmt.Errorf("the test %q is not read", name)
	}
	e.out.WriteString(prefix + name)
	if e.at == len(e.toks) {
		return nil
	}
	switch x := e.toks[e.at]; {
	case x.kind == 's' || x.kind == '0' || x.kind == 'n' && !slices.Contains(words[:7], x.text):
		arg, err := e.t.expr(e.toks[e.at : e.at+1])
		e.out.WriteString("(" + arg + ")")
		e.at++
		return err
	case x.is("["):
		end := match(e.toks, e.at)
		if end < 0 {
			return fmt.Errorf("[ is not closed")
		}
		arg, err := e.t.list(e.toks[e.at : end+1])
		e.out.WriteString("(" + arg + ")")
		e.at = end + 1
		return err
	}
	return nil
}
