package chat

import (
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"

	"github.com/ardanlabs/jinja"
)

func length(r *run, c *call) (value, error) {
	switch v := c.args[0]; {
	case v.IsString():
		return whole(len([]rune(v.AsString()))), nil
	case v.IsList():
		return whole(v.AsList().Len()), nil
	case v.IsDict():
		return whole(v.AsDict().Len()), nil
	case v.IsUndefined():
		return whole(0), nil
	default:
		return none(), fmt.Errorf("%s has no length", kind(v))
	}
}

func items(r *run, c *call) (value, error) {
	if c.args[0].IsUndefined() {
		return array(nil), nil
	}
	if !c.args[0].IsDict() {
		return none(), fmt.Errorf("%s has no items()", kind(c.args[0]))
	}
	d := c.args[0].AsDict()
	return pairs(d, d.Keys), nil
}

func pairs(d *jinja.Dict, keys []string) value {
	list := make([]value, len(keys))
	for i, k := range keys {
		list[i] = array([]value{text(k), d.Data[k]})
	}
	return array(list)
}

func dictSort(r *run, c *call) (value, error) {
	c.only(2, "case_sensitive", "reverse")
	if !c.args[0].IsDict() {
		return none(), fmt.Errorf("dictsort of %s", kind(c.args[0]))
	}
	d := c.args[0].AsDict()
	keys := slices.Clone(d.Keys)
	fold := choose(c.flag(1, "case_sensitive"), func(s string) string { return s }, strings.ToLower)
	slices.SortStableFunc(keys, func(a, b string) int {
		return choose(c.flag(9, "reverse"), -1, 1) * strings.Compare(fold(a), fold(b))
	})
	return pairs(d, keys), c.err
}

func join(r *run, c *call) (value, error) {
	c.only(2, "d", "attribute")
	sep := ""
	if v, ok := c.arg(1, "d"); ok {
		if sep = v.String(); v.IsString() {
			sep = v.AsString()
		}
	}
	var b strings.Builder
	for i, x := range c.items(c.args[0]) {
		if name, ok := c.kw["attribute"]; ok {
			x = c.get(x, name)
		}
		s, err := r.text(x)
		if err == nil {
			err = r.fits(b.Len() + len(sep) + len(s))
		}
		if err != nil {
			return none(), err
		}
		b.WriteString(choose(i > 0, sep, "") + s)
	}
	return text(b.String()), c.err
}

func joinMethod(r *run, c *call) (value, error) {
	c.only(2)
	if len(c.args) != 2 {
		return none(), fmt.Errorf("join takes a list")
	}
	for _, x := range c.items(c.args[1]) {
		if !x.IsString() {
			c.fail("join of %s", kind(x))
		}
	}
	c.args[0], c.args[1] = c.args[1], c.args[0]
	return join(r, c)
}

func list(r *run, c *call) (value, error) { return array(c.items(c.args[0])), c.err }

func edge(at int) function {
	return func(r *run, c *call) (value, error) {
		all := c.items(c.args[0])
		if len(all) == 0 {
			return jinja.Undefined(), c.err
		}
		return all[(len(all)+at)%len(all)], c.err
	}
}

func reverse(r *run, c *call) (value, error) {
	all := slices.Clone(c.items(c.args[0]))
	slices.Reverse(all)
	if c.args[0].IsString() {
		c.args[0] = array(all)
		return join(r, c)
	}
	return array(all), c.err
}

func mapped(r *run, c *call) (value, error) {
	list := slices.Clone(c.items(c.args[0]))
	if name, ok := c.kw["attribute"]; ok {
		c.only(1, "attribute", "default")
		for i, x := range list {
			list[i] = c.get(x, name)
			if v, ok := c.kw["default"]; ok && list[i].IsUndefined() {
				list[i] = v
			}
		}
		return array(list), c.err
	}
	f := filters[c.str(1)]
	if f == nil || c.err != nil {
		return none(), fmt.Errorf("map takes a filter's name, or attribute=")
	}
	for i, x := range list {
		var err error
		if list[i], err = r.call(f, &call{args: append([]value{x}, c.args[2:]...), kw: c.kw}); err != nil {
			return none(), err
		}
	}
	return array(list), nil
}

// selected makes select and its relatives. attr: they test an attribute; keep: they keep what passes.
func selected(attr, keep bool) function {
	return func(r *run, c *call) (value, error) {
		args := slices.Clone(c.args[1:])
		name := text("")
		if attr && len(args) > 0 {
			name, args = args[0], args[1:]
		}
		test := func(c *call) bool { return c.args[0].IsTruthy() }
		if len(args) > 0 {
			if test = nil; args[0].IsString() {
				test = tests[args[0].AsString()]
			}
			args = args[1:]
		}
		if test == nil {
			return none(), fmt.Errorf("the test is not read")
		}
		var list []value
		for _, x := range c.items(c.args[0]) {
			v := x
			if attr {
				v = c.get(x, name)
			}
			inner := &call{run: r, args: append([]value{v}, args...)}
			if test(inner) == keep {
				list = append(list, x)
			}
			if inner.err != nil {
				return none(), inner.err
			}
		}
		return array(list), c.err
	}
}

func sorted(r *run, c *call) (value, error) {
	c.only(1, "reverse", "case_sensitive", "attribute")
	list := slices.Clone(c.items(c.args[0]))
	key := func(v value) value { return v }
	if name, ok := c.kw["attribute"]; ok {
		key = func(v value) value { return c.get(v, name) }
	}
	sort.SliceStable(list, func(i, k int) bool {
		n := c.compare(key(list[i]), key(list[k]))
		return choose(c.flag(9, "reverse"), n > 0, n < 0)
	})
	return array(list), c.err
}

func dict(r *run, c *call) (value, error) {
	c.only(1, slices.Collect(maps.Keys(c.kw))...)
	v := jinja.NewDict()
	d := v.AsDict()
	if len(c.args) > 0 {
		if !c.args[0].IsDict() {
			return none(), fmt.Errorf("a map of %s", kind(c.args[0]))
		}
		for _, k := range c.args[0].AsDict().Keys {
			d.Set(k, c.args[0].AsDict().Data[k])
		}
	}
	for _, k := range slices.Sorted(maps.Keys(c.kw)) { // the engine has lost their order
		d.Set(k, c.kw[k])
	}
	return v, c.err
}

// get returns an attribute by its name, with dots for inner ones.
func (c *call) get(v value, name value) value {
	if !name.IsString() {
		c.fail("an attribute is named by %s", kind(name))
		return none()
	}
	for part := range strings.SplitSeq(name.AsString(), ".") {
		if !v.IsDict() {
			return jinja.Undefined()
		}
		v, _ = v.AsDict().Get(part) // undefined if absent
	}
	return v
}

// compare orders numbers, and texts without regard to case unless the arguments ask for it.
func (c *call) compare(a, b value) int {
	if a.IsString() && b.IsString() && !c.flag(9, "case_sensitive") {
		a, b = text(strings.ToLower(a.AsString())), text(strings.ToLower(b.AsString()))
	}
	n, err := compare(a, b)
	if err != nil {
		c.fail("%w", err)
	}
	return n
}
