package chat

import (
	"cmp"
	"slices"
	"strings"
)

// An expr evaluates an expression.
type expr func(r *run, s *scope) Value

// A node runs a statement. It returns break or continue, or "".
type node func(r *run, s *scope) string

// A parser turns the segments of a lexer into functions that evaluate them.
type parser struct {
	lexer
	toks   []tok // the rest of the tag
	depth  int
	inLoop bool
	spans  bool
}

// maxNesting bounds blocks and brackets inside each other.
const maxNesting = 60

// enter counts blocks and brackets. The result leaves.
func (p *parser) enter() func() {
	if p.depth++; p.depth > maxNesting {
		fail("more than %d blocks or brackets inside each other", maxNesting)
	}
	return func() { p.depth-- }
}

// body parses a block up to a statement with one of the names, and returns that name.
func (p *parser) body(until ...string) (node, string) {
	defer p.enter()()
	var nodes []node
	var lines []int
	top := len(until) == 0
	all := func(r *run, s *scope) string {
		for i, node := range nodes {
			if top && i < r.start {
				continue
			}
			r.line, r.node = lines[i], choose(top, i, -1)
			r.spend(1)
			if jump := node(r, s); jump != "" {
				return jump
			}
		}
		return ""
	}
	for len(p.segs) > 0 {
		seg := p.segs[0]
		p.line, p.toks, p.segs = seg.line, seg.toks, p.segs[1:]
		node := func(r *run, s *scope) string { return r.print(seg.text) }
		switch seg.kind {
		case '{':
			value := p.expr()
			p.expect("")
			node = func(r *run, s *scope) string { return r.print(r.text(value(r, s))) }
		case '%':
			name := p.name()
			if slices.Contains(until, name) {
				if name != "elif" {
					p.expect("")
				}
				return all, name
			}
			node = p.statement(name)
		}
		nodes, lines = append(nodes, node), append(lines, seg.line)
	}
	if len(until) > 0 {
		fail("%s is missing", until[len(until)-1])
	}
	return all, ""
}

// inner parses the rest of a tag and the body of a statement that is no loop.
func (p *parser) inner(until string) node {
	p.expect("")
	outer := p.inLoop
	p.inLoop = false
	body, _ := p.body(until)
	p.inLoop = outer
	return body
}

func (p *parser) statement(name string) node {
	switch name {
	case "if":
		return p.ifBlock()
	case "for":
		return p.forBlock()
	case "set":
		return p.set()
	case "macro":
		name := p.target()
		p.expect("(")
		names, unset := p.parameters()
		macro := p.macro(names, unset, "endmacro")
		return func(r *run, s *scope) string { return s.set(name, macro(s)) }
	case "call":
		return p.call()
	case "generation":
		p.spans = true
		body := p.inner("endgeneration")
		return func(r *run, s *scope) string {
			r.trace.Owners = append(r.trace.Owners, r.message)
			r.print(mark)
			body(r, newScope(s))
			return r.print(endMark)
		}
	case "break", "continue":
		p.expect("")
		if !p.inLoop {
			fail("%s is not in a loop", name)
		}
		return func(*run, *scope) string { return name }
	}
	fail("the statement %q is not read", name)
	return nil
}

func (p *parser) ifBlock() node {
	var conds []expr
	var bodies []node
	stop := "elif"
	for stop == "elif" {
		conds = append(conds, p.expr())
		p.expect("")
		var body node
		body, stop = p.body("elif", "else", "endif")
		bodies = append(bodies, body)
	}
	if stop == "else" {
		body, _ := p.body("endif")
		bodies = append(bodies, body)
	}
	return func(r *run, s *scope) string {
		for i, body := range bodies {
			if i == len(conds) || truthy(conds[i](r, s)) {
				return body(r, s)
			}
		}
		return ""
	}
}

func (p *parser) forBlock() node {
	l := &forLoop{targets: p.targets()}
	p.expect("in")
	toks := p.toks
	l.items = p.tail(toks, p.binary(0))
	if p.skip("if") {
		l.filter = p.expr()
	}
	p.expect("")
	outer, stop := p.inLoop, ""
	p.inLoop = true
	l.body, stop = p.body("else", "endfor")
	if p.inLoop = outer; stop == "else" {
		l.other, _ = p.body("endfor")
	}
	return l.run
}

func (p *parser) set() node {
	targets := p.targets()
	member := ""
	if p.skip(".") {
		member = p.name()
	}
	if !p.skip("=") && member == "" {
		body := p.inner("endset")
		return func(r *run, s *scope) string { return s.unpack(targets, r.capture(body, newScope(s))) }
	}
	toks := p.toks
	value := p.expr()
	if len(targets) == 1 && member == "" {
		value = p.tail(toks, value)
	}
	p.expect("")
	return func(r *run, s *scope) string {
		v := value(r, s)
		if member == "" {
			return s.unpack(targets, v)
		}
		space, ok := s.get(targets[0]).(*namespace)
		if !ok {
			fail("set of an attribute of %s, which is not a namespace", kind(s.get(targets[0])))
		}
		space.Set(member, v)
		return ""
	}
}

// parameters parses the names after a bracket, with the default of each or nil.
func (p *parser) parameters() (names []string, unset []expr) {
	unset = p.list(")", func() expr {
		names = append(names, p.target())
		if p.skip("=") {
			return p.expr()
		}
		return nil
	})
	return names, unset
}

// macro parses the body of a macro. The result makes it a function of a scope.
func (p *parser) macro(names []string, unset []expr, until string) func(*scope) *function {
	body := p.inner(until)
	return func(s *scope) *function {
		return &function{do: func(r *run, c *call) Value {
			if r.depth++; r.depth > maxMacros {
				fail("more than %d macros inside each other", maxMacros)
			}
			inner := newScope(s)
			inner.set("caller", c.take("caller"))
			c.bind(names)
			for i, v := range c.args {
				if v == Value(absent) && unset[i] != nil {
					v = unset[i](r, inner)
				}
				inner.set(names[i], v)
			}
			text := r.capture(body, inner)
			r.depth--
			return text
		}}
	}
}

func (p *parser) call() node {
	var names []string
	var unset []expr
	if p.skip("(") {
		names, unset = p.parameters()
	}
	name := p.target()
	p.expect("(")
	args := p.arguments()
	body := p.macro(names, unset, "endcall")
	return func(r *run, s *scope) string {
		c := args(r, s)
		c.kw = append(c.kw, keyword{"caller", body(s)})
		return r.print(r.text(r.call(s.get(name), c)))
	}
}

// is reports the next token; "" is the end of the tag.
func (p *parser) is(text string) bool { return p.toks[0].text == text && p.toks[0].kind != 's' }

func (p *parser) take() string {
	text := p.toks[0].text
	p.toks = p.toks[1:]
	return text
}

func (p *parser) skip(text string) bool {
	is := p.is(text)
	if is {
		p.take()
	}
	return is
}

func (p *parser) expect(text string) {
	if !p.skip(text) {
		p.wrong(cmp.Or(text, "an operator or the end of the tag"))
	}
}

// wrong refuses the next token.
func (p *parser) wrong(want string) {
	fail("%.40q in place of %s", cmp.Or(p.toks[0].text, "the end of the tag"), want)
}

func (p *parser) name() string {
	if p.toks[0].kind != 'n' {
		p.wrong("a name")
	}
	return p.take()
}

// words lists the names that are operators or literals.
var words = strings.Fields("and or not in is if else true false none True False None")

// target reads the name of a variable.
func (p *parser) target() string {
	if p.toks[0].kind == 'n' && slices.Contains(words, p.toks[0].text) {
		p.wrong("a variable")
	}
	return p.name()
}

// targets reads names with commas between them.
func (p *parser) targets() []string {
	list := []string{p.target()}
	for p.skip(",") {
		list = append(list, p.target())
	}
	return list
}
