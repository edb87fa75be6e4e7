// Package chat renders conversations by the chat templates of Hugging Face models, as transformers' apply_chat_template
// does: Jinja2 with trim_blocks, lstrip_blocks, loop controls and {% generation %}.
//
// Compile reads a template; Template.Render renders variables, whose maps keep the order of the file (Decode).
//
//	t, err := chat.Compile(source)
//	text, spans, err := t.Render(chat.Vars{"messages": messages, "add_generation_prompt": jinja.NewBool(false)})
//
// The engine, github.com/ardanlabs/jinja, evaluates many constructs differently without an error. So a template is
// rewritten first (translate.go). It is foreign input: its size, depth, steps and the size of its values are bounded.
package chat

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/ardanlabs/jinja"
)

// A Template is compiled. Its methods may be called concurrently.
type Template struct {
	engine *jinja.Template
	// Now is the time of strftime_now: that of Compile.
	Now time.Time
	// Spans reports whether the template has {% generation %}.
	Spans bool
}

// Vars are the variables of a template.
type Vars = map[string]jinja.Value

// A Span is the bytes [From, To) of a text.
type Span struct{ From, To int }

// Compile parses a template.
func Compile(source string) (t *Template, err error) {
	defer caught(&err)
	out, spans, err := translate(source)
	if err != nil {
		return nil, err
	}
	engine, err := jinja.Compile(out)
	if err != nil {
		return nil, err
	}
	return &Template{engine, time.Now(), spans}, nil
}

// caught turns a panic of the engine into an error.
func caught(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("the template cannot be evaluated: %v", p)
	}
}

// A run is one rendering.
type run struct {
	steps int // left
	limit int // bytes of a value
	depth int // of macros
	input bool
	now   time.Time

	spaces map[*jinja.Dict]bool // namespaces
}

// These bounds of a rendering are its steps, the bytes of a value and the depth of macros. The first two grow with the
// variables.
const (
	baseSteps = 1 << 20
	baseLimit = 4 << 20
	maxMacros = 100
)

// These characters mark a generation block in the engine's output. They are no characters of any text (Unicode
// noncharacters).
const (
	mark    = "\ufdd0"
	endMark = "\ufdd1"
)

// Render renders the template. spans lists the text of generation blocks.
func (t *Template) Render(vars Vars) (out string, spans []Span, err error) {
	defer caught(&err)
	r := &run{now: t.Now, spaces: map[*jinja.Dict]bool{}, input: true, steps: 1 << 40, limit: 1 << 40}
	all, size := make(Vars, len(vars)+100), 0
	for name, v := range vars {
		n, err := r.size(v, 0)
		if err != nil {
			return "", nil, fmt.Errorf("%s: %w", name, err)
		}
		size += n
		all[name] = v
	}
	r.input, r.steps, r.limit = false, baseSteps+16*size, baseLimit+8*size
	r.functions(all)
	raw, err := t.engine.RenderValues(all)
	if err != nil {
		return "", nil, err
	}
	return cut(raw)
}

// cut removes the marks of a text.
func cut(raw string) (string, []Span, error) {
	var b strings.Builder
	var spans []Span
	open := -1
	for raw != "" {
		at := strings.IndexAny(raw, mark+endMark)
		if at < 0 {
			break
		}
		b.WriteString(raw[:at])
		begins := strings.HasPrefix(raw[at:], mark)
		if begins == (open >= 0) {
			return "", nil, fmt.Errorf("generation blocks lie inside each other")
		}
		if raw = raw[at+len(mark):]; begins {
			open = b.Len()
			continue
		}
		spans, open = append(spans, Span{open, b.Len()}), -1
	}
	if open >= 0 {
		return "", nil, fmt.Errorf("the template cuts the text of a generation block")
	}
	b.WriteString(raw)
	return b.String(), spans, nil
}

// spend counts steps.
func (r *run) spend(n int) error {
	if r.steps -= n + 1; r.steps < 0 {
		return fmt.Errorf("the template takes too many steps")
	}
	return nil
}

// fits refuses a value that is too large.
func (r *run) fits(n int) error {
	if n > r.limit {
		return fmt.Errorf("the template makes a value of more than %d bytes", r.limit)
	}
	return r.spend(n / 64)
}

// size returns about the bytes of a value, and checks them.
func (r *run) size(v value, depth int) (n int, err error) {
	if depth > maxDepth {
		return 0, fmt.Errorf("values are more than %d deep inside each other", maxDepth)
	}
	n = 8
	add := func(v value) {
		m := 0
		if err == nil {
			m, err = r.size(v, depth+1)
		}
		if n += m; err == nil && n > r.limit {
			err = r.fits(n)
		}
	}
	switch {
	case v.IsString():
		if n += len(v.AsString()); strings.ContainsAny(v.AsString(), mark+endMark) && r.input {
			err = fmt.Errorf("the characters U+FDD0 and U+FDD1 are not allowed in a conversation")
		}
	case v.IsList():
		for _, x := range v.AsList().Items {
			add(x)
		}
	case v.IsDict():
		for k, x := range v.AsDict().Data {
			n += len(k)
			add(x)
		}
	}
	if err == nil {
		err = r.fits(n)
	}
	return n, err
}

// call calls a function within the bounds.
func (r *run) call(f function, c *call) (value, error) {
	c.run = r
	n := 0
	for _, v := range c.args {
		if v.IsString() {
			n += len(v.AsString())
		}
	}
	if err := r.spend(n / 64); err != nil {
		return none(), err
	}
	v, err := f(r, c)
	if err == nil {
		err = c.err
	}
	return v, err
}

// functions adds all functions to the variables of a template.
func (r *run) functions(vars Vars) {
	add := func(name string, f function) {
		vars[name] = jinja.NewCallable(name, func(args []value, kw Vars) (value, error) {
			return r.call(f, &call{args: slices.Clone(args), kw: kw})
		})
	}
	for name, f := range globals {
		add(name, f)
	}
	for name, f := range core {
		add(name, f)
	}
	for _, b := range binaries {
		add("__"+b.function, func(_ *run, c *call) (value, error) { return c.binary(b) })
	}
	for name, f := range filters {
		add("__filter_"+name, f)
	}
	for name, test := range tests {
		add("__is_"+name, func(_ *run, c *call) (value, error) { return truth(test(c)), nil })
		add("__isnt_"+name, func(_ *run, c *call) (value, error) { return truth(!test(c)), nil })
	}
}

// core holds the functions that translate puts into a template.
var core map[string]function

func init() {
	core = map[string]function{
		"__out": one(func(c *call, s string) value { return text(s) }),
		"__keep": func(r *run, c *call) (value, error) {
			_, err := r.size(c.args[0], 0)
			return c.args[0], err
		},
		"__member": member, "__each": each, "__attr": dotted, "__item": attribute, "__slice": slice,
		"__method":   method,
		"__negative": func(r *run, c *call) (value, error) { return c.arithmetic("sub", whole(0), c.args[0]) },
		"__positive": func(r *run, c *call) (value, error) { return c.arithmetic("add", whole(0), c.args[0]) },
		"__enter": func(r *run, c *call) (value, error) {
			if r.depth++; r.depth > maxMacros {
				return none(), fmt.Errorf("more than %d macros inside each other", maxMacros)
			}
			return text(""), nil
		},
		"__leave": func(r *run, c *call) (value, error) {
			r.depth--
			return text(""), nil
		},
		"__generation": func(r *run, c *call) (value, error) {
			caller := c.kw["caller"]
			body, err := caller.AsCallable().Fn(nil, nil)
			if err != nil {
				return none(), err
			}
			return text(mark + body.AsString() + endMark), nil
		},
	}
}

// member checks a value that becomes a member of a namespace. A namespace in it could contain itself.
func member(r *run, c *call) (value, error) {
	if !c.args[1].IsDict() || !r.spaces[c.args[1].AsDict()] {
		return none(), fmt.Errorf("set of an attribute of %s, which is not a namespace", kind(c.args[1]))
	}
	if r.holdsSpace(c.args[0]) {
		return none(), fmt.Errorf("a namespace inside a namespace is not read")
	}
	_, err := r.size(c.args[0], 0)
	return c.args[0], err
}

// holdsSpace reports a namespace in a value without cycles, or a function: a loop has one, and a later pass may put a
// namespace into it.
func (r *run) holdsSpace(v value) bool {
	switch {
	case v.IsList():
		return slices.ContainsFunc(v.AsList().Items, r.holdsSpace)
	case v.IsDict():
		return r.spaces[v.AsDict()] || slices.ContainsFunc(slices.Collect(maps.Values(v.AsDict().Data)), r.holdsSpace)
	}
	return v.IsCallable()
}

// each returns the items of a loop over n variables.
func each(r *run, c *call) (value, error) {
	list := c.items(c.args[0])
	if n := c.args[1].AsInt(); n > 1 {
		for _, x := range list {
			if !x.IsList() || int64(x.AsList().Len()) != n {
				c.fail("a loop over %d variables, and an item is not a list of %[1]d", n)
			}
		}
	}
	return array(list), choose(c.err != nil, c.err, r.spend(len(list)))
}

// mapMethods lists names that Python finds on a map before its keys.
var mapMethods = []string{"clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault", "update",
	"values"}

// dotted returns v.name.
func dotted(r *run, c *call) (value, error) {
	if v := c.args[0]; v.IsDict() && !r.spaces[v.AsDict()] && slices.Contains(mapMethods, c.str(1)) {
		return jinja.NewCallable(c.str(1), func([]value, Vars) (value, error) {
			return none(), fmt.Errorf("a method of a map that is kept in a variable is not read")
		}), nil
	}
	return attribute(r, c)
}

// attribute returns v[key].
func attribute(r *run, c *call) (value, error) {
	v, key := c.args[0], c.args[1]
	switch {
	case v.IsUndefined():
		return none(), fmt.Errorf("the value before .%s is not defined", strings.Trim(key.String(), "'"))
	case v.IsDict() && key.IsString():
		if x, ok := v.AsDict().Get(key.AsString()); ok {
			return x, nil
		}
	case v.IsList() && (key.IsInt() || key.IsBool()):
		list := v.AsList().Items
		if i := c.int(1, "", 0); i >= -len(list) && i < len(list) {
			return list[(i+len(list))%len(list)], c.err
		}
	case v.IsString() && key.IsInt():
		list := []rune(v.AsString())
		if i := c.int(1, "", 0); i >= -len(list) && i < len(list) {
			return text(string(list[(i+len(list))%len(list)])), c.err
		}
	}
	return jinja.Undefined(), c.err
}

// slice returns v[from:to:step].
func slice(r *run, c *call) (value, error) {
	v := c.args[0]
	if v.IsUndefined() || v.IsDict() || v.IsNumber() {
		return none(), fmt.Errorf("a slice of %s", kind(v))
	}
	if v.IsNone() {
		return jinja.Undefined(), nil
	}
	list := c.items(v)
	step := c.int(3, "", 1)
	if step == 0 {
		c.fail("a slice of step 0")
	}
	n := len(list)
	bound := func(i, absent int) int {
		at := c.int(i, "", absent)
		if at < 0 && (i >= len(c.args) || !c.args[i].IsNone()) {
			at += n
		}
		return min(max(at, choose(step < 0, -1, 0)), choose(step < 0, n-1, n))
	}
	from, to := bound(1, choose(step < 0, n-1, 0)), bound(2, choose(step < 0, -1, n))
	var part []value
	for i := from; c.err == nil && (step > 0 && i < to || step < 0 && i > to); i += step {
		part = append(part, list[i])
	}
	if v.IsString() {
		return join(r, &call{run: r, args: []value{array(part)}, err: c.err})
	}
	return array(part), c.err
}

// method calls a method: of a text, of a map, or a function that is a member of a map, such as loop.cycle.
func method(r *run, c *call) (value, error) {
	v, name := c.args[0], c.args[1].AsString()
	inner := &call{args: append([]value{v}, c.args[2:]...), kw: c.kw}
	switch {
	case v.IsUndefined():
		return none(), fmt.Errorf("the value before .%s() is not defined", name)
	case v.IsString() && methods[name] != nil:
		return r.call(methods[name], inner)
	case v.IsDict() && !r.spaces[v.AsDict()] && slices.Contains(mapMethods, name):
		return r.call(mapMethod(name), inner)
	case v.IsDict():
		if f, ok := v.AsDict().Get(name); ok && f.IsCallable() {
			return f.AsCallable().Fn(c.args[2:], c.kw)
		}
	}
	return none(), fmt.Errorf("%s has no method %s that is read", kind(v), name)
}

func mapMethod(name string) function {
	return func(r *run, c *call) (value, error) {
		d := c.args[0].AsDict()
		switch name {
		case "items":
			c.only(1)
			return pairs(d, d.Keys), nil
		case "keys":
			c.only(1)
			return texts(d.Keys), nil
		case "values":
			c.only(1)
			var list []value
			for _, k := range d.Keys {
				list = append(list, d.Data[k])
			}
			return array(list), nil
		case "get":
			c.only(3)
			if len(c.args) > 1 && c.args[1].IsString() {
				if x, ok := d.Get(c.args[1].AsString()); ok {
					return x, nil
				}
			}
			return append(c.args, none(), none())[2], nil
		}
		return none(), fmt.Errorf("a template cannot change a map by %s", name)
	}
}
