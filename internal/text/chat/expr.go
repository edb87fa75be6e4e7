package chat

import (
	"slices"
	"strings"
)

func constant(v Value) expr { return func(*run, *scope) Value { return v } }

// list parses expressions with commas between them, up to the end.
func (p *parser) list(end string, item func() expr) (list []expr) {
	for !p.skip(end) {
		list = append(list, item())
		if !p.is(end) {
			p.expect(",")
		}
	}
	return list
}

// expr parses an expression, also with if and else.
func (p *parser) expr() expr {
	defer p.enter()()
	value := p.binary(0)
	for p.skip("if") {
		yes, cond, no := value, p.binary(0), constant(undefined("the value of an if without else"))
		if p.skip("else") {
			no = p.expr()
		}
		value = func(r *run, s *scope) Value {
			if truthy(cond(r, s)) {
				return yes(r, s)
			}
			return no(r, s)
		}
	}
	return value
}

// levels lists the precedence of the operators. The sign not has notLevel, not in has compareLevel.
var levels = map[string]int{"or": 1, "and": 2, "==": 4, "!=": 4, "<": 4, ">": 4, "<=": 4, ">=": 4, "in": 4, "not": 4,
	"+": 5, "-": 5, "~": 6, "*": 7, "/": 7, "//": 7, "%": 7, "**": 8}

const (
	notLevel     = 3
	compareLevel = 4
)

// binary parses operators that bind more than a level.
func (p *parser) binary(above int) expr {
	var left expr
	if p.is("not") && above <= notLevel {
		p.take()
		x := p.binary(notLevel - 1)
		left = func(r *run, s *scope) Value { return !truthy(x(r, s)) }
	} else {
		left = p.unary(true)
	}
	for compared := false; p.toks[0].kind == 'n' || p.toks[0].kind == 'o'; {
		op := p.toks[0].text
		level := levels[op]
		if level <= above {
			break
		}
		if p.take(); op == "not" {
			p.expect("in")
			op = "not in"
		}
		if compared && level == compareLevel {
			fail("a chain of comparisons; write and between them")
		}
		compared = level == compareLevel
		left = operation(op, left, p.binary(level))
	}
	return left
}

func operation(op string, a, b expr) expr {
	return func(r *run, s *scope) Value {
		x := a(r, s)
		switch {
		case op != "and" && op != "or":
			return r.binary(op, x, b(r, s))
		case truthy(x) == (op == "or"):
			return x
		}
		return b(r, s)
	}
}

// unary parses a sign or a value with its attributes, calls, filters and tests. A sign binds before filters and tests.
func (p *parser) unary(filters bool) (x expr) {
	if p.is("-") || p.is("+") {
		x = operation(p.take(), constant(0), p.unary(false))
	} else {
		x = p.primary()
	}
	for x = p.postfix(x); filters; {
		switch {
		case p.skip("|"):
			x = p.filter(x)
		case p.skip("is"):
			x = p.test(x)
		default:
			return x
		}
	}
	return x
}

func (p *parser) primary() expr {
	switch {
	case p.toks[0].kind == 's':
		return constant(p.take())
	case p.toks[0].kind == '0':
		return constant(parseNumber(p.take()))
	case p.skip("("):
		return p.parentheses()
	case p.skip("["):
		return values(p.list("]", p.expr))
	case p.skip("{"):
		return p.dict()
	}
	literals := map[string]Value{"true": true, "True": true, "false": false, "False": false, "none": nil, "None": nil}
	if p.toks[0].kind == 'n' {
		if v, ok := literals[p.toks[0].text]; ok {
			p.take()
			return constant(v)
		}
	}
	name := p.target()
	if p.skip("[") {
		return p.index(func(_ *run, s *scope) Value { return s.get(name) })
	}
	return func(r *run, s *scope) Value {
		v := s.get(name)
		r.see(v, everything)
		if name == promptVar {
			r.seen = everything
		}
		return v
	}
}

// tail returns the expression of the tokens that x has parsed. A variable or its slice [N:] may be the last messages;
// their number is not seen.
func (p *parser) tail(toks []tok, x expr) expr {
	from, n := 0, len(toks)-len(p.toks)
	if n == 5 && toks[1].text == "[" && toks[2].kind == '0' && toks[3].text == ":" {
		from, _ = parseNumber(toks[2].text).(int)
	}
	if toks[0].kind != 'n' || n != 1 && from == 0 {
		return x
	}
	name := toks[0].text
	return func(r *run, s *scope) Value {
		if list, ok := s.get(name).([]Value); ok && from <= len(list) {
			r.see(list, from)
			return list[from:]
		}
		return x(r, s)
	}
}

// parentheses parses an expression or a tuple. Tuples become lists.
func (p *parser) parentheses() expr {
	if p.skip(")") {
		return values(nil)
	}
	x := p.expr()
	if p.skip(")") {
		return x
	}
	p.expect(",")
	return values(append([]expr{x}, p.list(")", p.expr)...))
}

func values(list []expr) expr {
	return func(r *run, s *scope) Value {
		all := make([]Value, len(list))
		for i, x := range list {
			all[i] = x(r, s)
		}
		return all
	}
}

func (p *parser) dict() expr {
	var keys []expr
	values := p.list("}", func() expr {
		keys = append(keys, p.expr())
		p.expect(":")
		return p.expr()
	})
	return func(r *run, s *scope) Value {
		d := NewDict()
		for i, key := range keys {
			name, ok := key(r, s).(string)
			if !ok {
				fail("a key of a map is not a text")
			}
			d.Set(name, values[i](r, s))
		}
		return d
	}
}

// postfix parses attributes, indices and calls of a value.
func (p *parser) postfix(x expr) expr {
	for {
		switch v := x; {
		case p.skip("("):
			args := p.arguments()
			x = func(r *run, s *scope) Value { return r.call(v(r, s), args(r, s)) }
		case p.skip("["):
			x = p.index(v)
		case p.skip("."):
			x = p.attribute(v)
		default:
			return x
		}
	}
}

func (p *parser) attribute(x expr) expr {
	if p.toks[0].kind == '0' {
		key := parseNumber(p.take())
		return func(r *run, s *scope) Value { return r.item(x(r, s), key, false) }
	}
	name := p.name()
	if strings.HasPrefix(name, "_") {
		fail("the attribute %q is not allowed", name)
	}
	key := Value(name)
	return func(r *run, s *scope) Value { return r.item(x(r, s), key, true) }
}

// index parses an index or a slice.
func (p *parser) index(x expr) expr {
	parts := []expr{nil}
	for !p.skip("]") {
		switch last := len(parts) - 1; {
		case last < 2 && p.skip(":"):
			parts = append(parts, nil)
		case parts[last] == nil:
			parts[last] = p.expr()
		default:
			p.wrong("]")
		}
	}
	if len(parts) == 1 && parts[0] == nil {
		fail("an index is missing")
	}
	return func(r *run, s *scope) Value {
		v := x(r, s)
		if len(parts) == 1 {
			return r.item(v, parts[0](r, s), false)
		}
		r.see(v, everything)
		bounds := make([]Value, 3)
		for i, part := range parts {
			if part != nil {
				bounds[i] = part(r, s)
			}
		}
		return r.slice(v, &call{args: bounds})
	}
}

// arguments parses the arguments of a call. The result evaluates them, with others before them.
func (p *parser) arguments() func(r *run, s *scope, before ...Value) *call {
	var names []string
	list := p.list(")", func() expr {
		name := ""
		if p.toks[0].kind == 'n' && p.toks[1].text == "=" {
			name = p.target()
			p.expect("=")
		}
		if after := len(names) > 0 && names[len(names)-1] != ""; after && (name == "" || slices.Contains(names, name)) {
			fail("an argument follows others with names, or has the name of another")
		}
		names = append(names, name)
		return p.expr()
	})
	return func(r *run, s *scope, before ...Value) *call {
		c := &call{args: slices.Grow(before, len(list))}
		for i, x := range list {
			if v := x(r, s); names[i] == "" {
				c.args = append(c.args, v)
			} else {
				c.kw = append(c.kw, keyword{names[i], v})
			}
		}
		return c
	}
}

func noArguments(_ *run, _ *scope, before ...Value) *call { return &call{args: before} }

func (p *parser) filter(x expr) expr {
	name := p.name()
	f, args := filters[name], noArguments
	if f == nil {
		fail("the filter %q is not read", name)
	}
	if p.skip("(") {
		args = p.arguments()
	}
	return func(r *run, s *scope) Value { return r.call(f, args(r, s, x(r, s))) }
}

// test parses the name of a test, and its argument.
func (p *parser) test(x expr) expr {
	negated, name := p.skip("not"), p.name()
	f, args := tests[name], noArguments
	if f == nil {
		fail("the test %q is not read", name)
	}
	switch {
	case p.skip("("):
		args = p.arguments()
	case p.toks[0].kind == 's' || p.toks[0].kind == '0' || p.is("[") || p.is("{") ||
		p.toks[0].kind == 'n' && !slices.Contains(words[:7], p.toks[0].text):
		arg := p.postfix(p.primary())
		args = func(r *run, s *scope, before ...Value) *call { return &call{args: append(before, arg(r, s))} }
	}
	return func(r *run, s *scope) Value { return truthy(r.call(f, args(r, s, x(r, s)))) != negated }
}
