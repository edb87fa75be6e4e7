package chat

import (
	"slices"
	"strconv"
	"strings"
)

func length(r *run, c *call) Value {
	n := size(c.args[0])
	if n < 0 {
		fail("%s has no length", kind(c.args[0]))
	}
	return n
}

// pairs returns the keys of a map with their values.
func pairs(v Value) []Value {
	d, ok := v.(*Dict)
	if !ok {
		fail("%s has no items", kind(v))
	}
	list := make([]Value, len(d.Keys))
	for i, k := range d.Keys {
		list[i] = []Value{k, d.Data[k]}
	}
	return list
}

func dictSort(r *run, c *call) Value {
	if by := c.args[2]; c.given(2) && by != Value("key") && by != Value("value") {
		fail("dictsort sorts by key or by value")
	}
	path := Value(choose(c.args[2] == Value("value"), 1, 0))
	return r.sorted(pairs(c.args[0]), c.args[3], c.args[1], path)
}

// sorted sorts by an attribute. Texts are compared without regard to case unless it matters.
func (r *run) sorted(list []Value, reverse, matters, path Value) Value {
	key := func(v Value) Value {
		v = r.attribute(v, path, absent)
		if s, ok := v.(string); ok && !truthy(matters) {
			return strings.ToLower(s)
		}
		return v
	}
	list = slices.Clone(list)
	slices.SortStableFunc(list, func(a, b Value) int {
		return choose(truthy(reverse), -1, 1) * r.compare(key(a), key(b))
	})
	return list
}

// attribute returns an attribute by a path such as "function.name"; v itself without a path. unset replaces undefined
// values.
func (r *run) attribute(v, path, unset Value) Value {
	if path == nil || path == Value(absent) {
		return v
	}
	for part := range strings.SplitSeq(r.text(path), ".") {
		key := Value(part)
		if n, err := strconv.Atoi(part); err == nil {
			key = n
		}
		v = r.item(v, key, false)
		if _, ok := v.(undefined); ok && unset != Value(absent) {
			v = unset
		}
	}
	return v
}

func join(r *run, c *call) Value {
	list := slices.Clone(r.items(c.args[0]))
	for i, x := range list {
		list[i] = r.attribute(x, c.args[2], absent)
	}
	return r.join(list, r.text(c.or(1, "")))
}

func joinMethod(r *run, c *call) Value {
	list := r.items(c.args[1])
	for _, x := range list {
		if _, ok := x.(string); !ok {
			fail("join of %s", kind(x))
		}
	}
	return r.join(list, c.str(0))
}

// edge returns the first or last value, at 0 or -1.
func edge(list []Value, at int) Value {
	if len(list) == 0 {
		return undefined("the first or last value of nothing")
	}
	return list[(len(list)+at)%len(list)]
}

func reverse(r *run, c *call) Value {
	list := slices.Clone(r.items(c.args[0]))
	slices.Reverse(list)
	if _, ok := c.args[0].(string); ok {
		return r.join(list, "")
	}
	return &iterator{items: list, once: true}
}

func mapped(r *run, c *call) Value {
	list := slices.Clone(r.items(c.args[0]))
	if path := c.take("attribute"); path != Value(absent) && len(c.args) == 1 {
		unset := c.take("default")
		c.named(0)
		for i, x := range list {
			list[i] = r.attribute(x, path, unset)
		}
		return &iterator{items: list, once: true}
	}
	var f *function
	if len(c.args) > 1 {
		f = filters[c.str(1)]
	}
	if f == nil {
		fail("map takes the name of a filter, or attribute=")
	}
	for i, x := range list {
		list[i] = r.call(f, &call{append([]Value{x}, c.args[2:]...), c.kw})
	}
	return &iterator{items: list, once: true}
}

// selected makes select and its relatives. attr: they test an attribute; keep: they keep what passes.
func selected(attr, keep bool) *function {
	return &function{do: func(r *run, c *call) Value {
		c.named(0)
		args, path := c.args[1:], Value(absent)
		if attr && len(args) > 0 {
			path, args = args[0], args[1:]
		}
		test := is(truthy)
		if len(args) > 0 {
			name := r.text(args[0])
			if test = tests[name]; test == nil {
				fail("the test %q is not read", name)
			}
			args = args[1:]
		}
		var list []Value
		for _, x := range r.items(c.args[0]) {
			v := r.attribute(x, path, absent)
			if truthy(r.call(test, &call{args: append([]Value{v}, args...)})) == keep {
				list = append(list, x)
			}
		}
		return &iterator{items: list, once: true}
	}}
}

// globals lists the functions of a template.
var globals = &scope{vars: map[string]Value{
	"dict":      &function{do: func(r *run, c *call) Value { return dict(c) }},
	"namespace": &function{do: func(r *run, c *call) Value { return &namespace{dict(c)} }},
	"range":     def("a b step", numbers),
	"raise_exception": def("message", func(r *run, c *call) Value {
		fail("the template refuses: %s", r.text(c.args[0]))
		return nil
	}),
	"strftime_now": def("format", func(r *run, c *call) Value { return strftime(r.now, c.str(0)) }),
}}

func dict(c *call) *Dict {
	d := NewDict()
	if len(c.args) > 1 {
		fail("a map of %d values", len(c.args))
	}
	for _, v := range c.args {
		for _, pair := range pairs(v) {
			d.Set(pair.([]Value)[0].(string), pair.([]Value)[1])
		}
	}
	for _, k := range c.kw {
		d.Set(k.name, k.value)
	}
	return d
}

// maxRange bounds a range, as in Jinja2's sandbox.
const maxRange = 100_000

func numbers(r *run, c *call) Value {
	from, to, step := 0, small(c.args[0]), c.int(2, 1)
	if c.given(1) {
		from, to = to, small(c.args[1])
	}
	if step == 0 {
		fail("a range of step 0")
	}
	list := []Value{}
	for i := from; step > 0 && i < to || step < 0 && i > to; i += step {
		if list = append(list, i); len(list) > maxRange {
			fail("a range of more than %d", maxRange)
		}
	}
	return list
}
