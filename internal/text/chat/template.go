// Package chat renders conversations by the chat templates of Hugging Face models, as transformers' apply_chat_template
// does: Jinja2 with trim_blocks, lstrip_blocks, loop controls and {% generation %}.
//
// Compile reads a template; Template.Render renders variables, whose maps keep the order of the file (Decode).
//
//	t, err := chat.Compile(source)
//	text, spans, err := t.Render(chat.Vars{"messages": messages, "add_generation_prompt": false})
//
// A lexer cuts the template into tags, a parser turns them into functions, and Render calls these. Compile and Render
// refuse unsupported constructs. A template is foreign input: its size, depth, steps and values are bounded.
package chat

import (
	"slices"
	"strings"
	"time"
)

// A Template is compiled. Its methods may be called concurrently.
type Template struct {
	body node
	// Now is the time of strftime_now; Compile sets its own.
	Now time.Time
	// Spans reports whether the template has {% generation %}.
	Spans  bool
	source string
}

// Names reports whether the template has a word, such as the key of a message.
func (t *Template) Names(word string) bool { return strings.Contains(t.source, word) }

// Vars are the variables of a template.
type Vars = map[string]Value

// A Span is the bytes [From, To) of a text.
type Span struct{ From, To int }

// Compile parses a template.
func Compile(source string) (t *Template, err error) {
	p := &parser{}
	defer caught(&err, &p.line)
	p.lex(source)
	body, _ := p.body()
	return &Template{body, time.Now(), p.spans, source}, nil
}

// A run is one rendering.
type run struct {
	steps   int // left
	limit   int // bytes of a value
	depth   int // of macros
	line    int
	now     time.Time
	out     *strings.Builder
	node    int // of the template; -1: inside one
	start   int // the first node
	resumed int // the first iteration of its loop
	trace   *Trace
	seen    int // a prefix of at least as many messages renders the same so far
	message int // the present one of the innermost loop over messages; -1: none
}

// These bounds of a rendering are its steps, the bytes of a value and the depth of macros. The first two grow with the
// variables.
const (
	baseSteps = 1 << 20
	baseLimit = 4 << 20
	maxMacros = 100
)

// These characters mark a generation block in the output. They are no characters of any text (Unicode noncharacters).
const (
	mark    = "\ufdd0"
	endMark = "\ufdd1"
)

// Render renders the template. spans lists the text of generation blocks.
func (t *Template) Render(vars Vars) (out string, spans []Span, err error) {
	c, err := t.Trace(vars)
	return c.Text, c.Spans, err
}

// Trace renders the template, also for prefixes of the messages.
func (t *Template) Trace(vars Vars) (c *Trace, err error) {
	c = &Trace{t: t, vars: vars, places: map[*Dict]int{}}
	r := &run{}
	defer caught(&err, &r.line)
	for name, v := range vars {
		c.size += t.size(name, v, 0)
	}
	*r = *t.newRun(c.size, c)
	c.messages, _ = vars[messagesVar].([]Value)
	for i, m := range c.messages {
		if d, ok := m.(*Dict); ok && t.Spans {
			c.places[d] = i
		}
	}
	c.root = newScope(&scope{vars, globals})
	t.body(r, c.root)
	if c.Text = r.out.String(); t.Spans {
		c.Text, c.Spans = cut(c.Text)
	}
	if len(c.Owners) != len(c.Spans) { // a block was printed never or twice
		c.Owners = slices.Repeat([]int{-1}, len(c.Spans))
	}
	return c, nil
}

// newRun bounds a rendering of variables of a size.
func (t *Template) newRun(size int, c *Trace) *run {
	return &run{steps: baseSteps + 16*size, limit: baseLimit + 8*size, now: t.Now, out: &strings.Builder{}, trace: c,
		message: -1}
}

// size returns about the bytes of a variable, and refuses marks.
func (t *Template) size(name string, v Value, depth int) int {
	n := 8
	switch v := v.(type) {
	case nil, bool, int, float64, notFinite:
	case bigInt:
		n += len(v)
	case string:
		if n += len(v); t.Spans && (strings.Contains(v, mark) || strings.Contains(v, endMark)) {
			fail("%s: the characters U+FDD0 and U+FDD1 are not allowed in a conversation", name)
		}
	case []Value:
		for _, x := range v {
			n += t.size(name, x, deeper(depth))
		}
	case *Dict:
		for k, x := range v.Data {
			n += t.size(name, k, depth) + t.size(name, x, deeper(depth))
		}
	default:
		fail("%s is %s", name, kind(v))
	}
	return n
}

// cut removes the marks of a text.
func cut(raw string) (string, []Span) {
	var b strings.Builder
	var spans []Span
	for i, part := range strings.Split(raw, mark) {
		body, rest, marked := strings.Cut(part, endMark)
		if marked != (i > 0) || strings.Contains(rest, endMark) {
			fail("generation blocks lie inside each other, or the template cuts the text of one")
		}
		from := b.Len()
		if b.WriteString(body); i > 0 {
			spans = append(spans, Span{from, b.Len()})
		}
		b.WriteString(rest)
	}
	return b.String(), spans
}

// spend counts steps.
func (r *run) spend(n int) {
	if r.steps -= n; r.steps < 0 {
		fail("the template takes too many steps")
	}
}

// fits refuses a value that is too large, and counts steps for making it.
func (r *run) fits(n int) {
	if n > r.limit {
		fail("the template makes a value of more than %d bytes", r.limit)
	}
	r.spend(1 + n/64)
}

// write appends to a text within the bounds.
func (r *run) write(b *strings.Builder, s string) {
	b.WriteString(s)
	if r.fits(len(s)); b.Len() > r.limit {
		r.fits(b.Len())
	}
}

func (r *run) print(s string) string {
	r.write(r.out, s)
	return ""
}

// capture returns the output of a body.
func (r *run) capture(body node, s *scope) string {
	outer := r.out
	r.out = &strings.Builder{}
	body(r, s)
	text := r.out.String()
	r.out = outer
	return text
}

// A scope holds variables. Bodies of loops, macros and blocks have their own.
type scope struct {
	vars   map[string]Value
	parent *scope
}

func newScope(parent *scope) *scope { return &scope{map[string]Value{}, parent} }

func (s *scope) get(name string) Value {
	for ; s != nil; s = s.parent {
		if v, ok := s.vars[name]; ok {
			return v
		}
	}
	return undefined(name)
}

func (s *scope) set(name string, v Value) string {
	s.vars[name] = v
	return ""
}

// unpack sets variables: one to the value, several to its items.
func (s *scope) unpack(names []string, v Value) string {
	if len(names) == 1 {
		return s.set(names[0], v)
	}
	list, ok := v.([]Value)
	if !ok || len(list) != len(names) {
		fail("%d variables, and %s is not a list of %[1]d", len(names), kind(v))
	}
	for i, name := range names {
		s.set(name, list[i])
	}
	return ""
}

type forLoop struct {
	targets       []string
	items, filter expr
	body, other   node
}

// A loop is the variable of that name.
type loop struct {
	items []Value
	at    int
}

func (l *forLoop) run(r *run, s *scope) string {
	list := r.items(l.items(r, s))
	inner := newScope(s)
	if l.filter != nil {
		r.see(list, everything)
		all := list
		list = nil
		for _, x := range all {
			if inner.unpack(l.targets, x); truthy(l.filter(r, inner)) {
				list = append(list, x)
			}
		}
	}
	if len(list) == 0 && l.other != nil {
		return l.other(r, newScope(s))
	}
	state := &loop{items: list}
	defer func(outer int) { r.message = outer }(r.message)
	for i := r.enter(list); i < len(list); i++ {
		if r.trace.ends(list) && r.seen < everything {
			r.trace.points = append(r.trace.points, point{r.out.Len(), r.seen})
		}
		state.at = i
		if d, ok := list[i].(*Dict); ok {
			if at, ok := r.trace.places[d]; ok {
				r.message = at
			}
		}
		clear(inner.vars)
		inner.set("loop", state)
		inner.unpack(l.targets, list[i])
		if l.body(r, inner) == "break" {
			break
		}
	}
	return ""
}

// loopAttributes lists the attributes of a loop by its place i and its length n.
var loopAttributes = map[string]func(l *loop, i, n int) Value{
	"index":     func(_ *loop, i, n int) Value { return i + 1 },
	"index0":    func(_ *loop, i, n int) Value { return i },
	"revindex":  func(_ *loop, i, n int) Value { return n - i },
	"revindex0": func(_ *loop, i, n int) Value { return n - i - 1 },
	"first":     func(_ *loop, i, n int) Value { return i == 0 },
	"last":      func(_ *loop, i, n int) Value { return i == n-1 },
	"length":    func(_ *loop, i, n int) Value { return n },
	"depth":     func(_ *loop, i, n int) Value { return 1 },
	"depth0":    func(_ *loop, i, n int) Value { return 0 },
	"previtem": func(l *loop, i, n int) Value {
		return choose[Value](i > 0, l.items[max(i-1, 0)], undefined("previtem"))
	},
	"nextitem": func(l *loop, i, n int) Value {
		return choose[Value](i < n-1, l.items[min(i+1, n-1)], undefined("nextitem"))
	},
	"cycle": func(l *loop, i, n int) Value {
		return &function{do: func(r *run, c *call) Value {
			if len(c.args) == 0 {
				fail("cycle takes values")
			}
			return c.args[i%len(c.args)]
		}}
	},
}
