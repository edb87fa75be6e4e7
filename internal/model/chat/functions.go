package chat

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"

	"github.com/ardanlabs/jinja"
)

// filters, tests and methods have the semantics of Jinja2 and Python. They are filled in init, since some call others.
var (
	filters, methods map[string]function
	tests            map[string]func(c *call) bool
)

func init() {
	filters = map[string]function{
		"string":     one(func(c *call, s string) value { return text(s) }),
		"trim":       printed(strip(true, true)),
		"upper":      one(func(c *call, s string) value { return text(strings.ToUpper(s)) }),
		"lower":      one(func(c *call, s string) value { return text(strings.ToLower(s)) }),
		"capitalize": one(func(c *call, s string) value { return text(capitalize(s)) }),
		"title":      one(func(c *call, s string) value { return text(title(s)) }),
		"safe":       func(r *run, c *call) (value, error) { return c.args[0], nil },
		"tojson":     toJSON, "default": byDefault, "d": byDefault, "length": length, "count": length, "items": items,
		"dictsort": dictSort, "join": join, "list": list, "first": edge(0), "last": edge(-1), "reverse": reverse,
		"int": toInt, "map": mapped, "sort": sorted,
		"select": selected(false, true), "reject": selected(false, false), "selectattr": selected(true, true),
		"rejectattr": selected(true, false),
		"replace":    printed(replace),
	}
	methods = map[string]function{
		"strip": strip(true, true), "lstrip": strip(true, false), "rstrip": strip(false, true), "split": split(false),
		"rsplit": split(true), "splitlines": splitLines, "replace": replace, "join": joinMethod,
		"upper": filters["upper"], "lower": filters["lower"], "title": filters["title"],
		"capitalize": filters["capitalize"], "startswith": affix(strings.HasPrefix),
		"endswith":     affix(strings.HasSuffix),
		"removeprefix": two(func(s, x string) value { return text(strings.TrimPrefix(s, x)) }),
		"removesuffix": two(func(s, x string) value { return text(strings.TrimSuffix(s, x)) }),
		"count":        two(func(s, x string) value { return whole(strings.Count(s, x)) }),
		"find":         two(func(s, x string) value { return whole(place(s, strings.Index(s, x))) }),
		"rfind":        two(func(s, x string) value { return whole(place(s, strings.LastIndex(s, x))) }),
	}
	tests = map[string]func(c *call) bool{
		"defined":   func(c *call) bool { return !c.args[0].IsUndefined() },
		"undefined": func(c *call) bool { return c.args[0].IsUndefined() },
		"none":      func(c *call) bool { return c.args[0].IsNone() },
		"boolean":   func(c *call) bool { return c.args[0].IsBool() },
		"true":      func(c *call) bool { return c.args[0].IsBool() && c.args[0].AsBool() },
		"false":     func(c *call) bool { return c.args[0].IsBool() && !c.args[0].AsBool() },
		"integer":   func(c *call) bool { return c.args[0].IsInt() },
		"float":     func(c *call) bool { return c.args[0].IsFloat() },
		"number":    func(c *call) bool { return c.args[0].IsNumber() || c.args[0].IsBool() },
		"string":    func(c *call) bool { return c.args[0].IsString() },
		"mapping":   func(c *call) bool { return c.args[0].IsDict() },
		"callable":  func(c *call) bool { return c.args[0].IsCallable() },
		"iterable":  isContainer, "sequence": isContainer,
		"eq": isEqual, "equalto": isEqual, "sameas": isEqual,
		"ne": func(c *call) bool { return !isEqual(c) },
		"in": func(c *call) bool {
			in, err := c.contains(c.args[0], append(c.args, jinja.Undefined())[1])
			if err != nil {
				c.fail("%w", err)
			}
			return in
		},
		"odd":         func(c *call) bool { return c.int(0, "", 0)%2 != 0 },
		"even":        func(c *call) bool { return c.int(0, "", 0)%2 == 0 },
		"divisibleby": func(c *call) bool { return c.int(0, "", 0)%max(1, c.int(1, "num", 1)) == 0 },
		"lower":       func(c *call) bool { return c.str(0) == strings.ToLower(c.str(0)) },
		"upper":       func(c *call) bool { return c.str(0) == strings.ToUpper(c.str(0)) },
	}
}

// printed makes a filter of a method: its value becomes a text first.
func printed(f function) function {
	return func(r *run, c *call) (value, error) {
		s, err := r.text(c.args[0])
		if err != nil {
			return none(), err
		}
		c.args[0] = text(s)
		return f(r, c)
	}
}

// one makes a function of a text alone.
func one(f func(c *call, s string) value) function {
	return func(r *run, c *call) (value, error) {
		c.only(1)
		s, err := r.text(c.args[0])
		if err != nil {
			return none(), err
		}
		return f(c, s), r.fits(len(s))
	}
}

// two makes a function of two texts.
func two(f func(s, x string) value) function {
	return func(r *run, c *call) (value, error) {
		c.only(2)
		if s, x := c.str(0), c.str(1); c.err == nil {
			return f(s, x), nil
		}
		return none(), c.err
	}
}

func isContainer(c *call) bool {
	v := c.args[0]
	return v.IsList() || v.IsDict() || v.IsString() || v.IsUndefined()
}

func isEqual(c *call) bool {
	if len(c.args) != 2 {
		c.fail("the test takes one argument")
		return false
	}
	return equal(c.args[0], c.args[1])
}

// place turns an index in bytes into one in characters.
func place(s string, at int) int {
	if at < 0 {
		return at
	}
	return len([]rune(s[:at]))
}

func capitalize(s string) string {
	for i := range s {
		if i > 0 {
			return strings.ToUpper(s[:i]) + strings.ToLower(s[i:])
		}
	}
	return strings.ToUpper(s)
}

func title(s string) string {
	inside := false
	return strings.Map(func(r rune) rune {
		before := inside
		if inside = unicode.IsLetter(r); !inside {
			return r
		}
		return choose(before, unicode.ToLower(r), unicode.ToTitle(r))
	}, s)
}

func strip(left, right bool) function {
	return func(r *run, c *call) (value, error) {
		c.only(2, "chars")
		s, cut := c.str(0), isSpace
		if v, ok := c.arg(1, "chars"); ok && !v.IsNone() {
			if !v.IsString() {
				c.fail("the characters to strip are %s", kind(v))
				return none(), c.err
			}
			cut = func(x rune) bool { return strings.ContainsRune(v.AsString(), x) }
		}
		if left {
			s = strings.TrimLeftFunc(s, cut)
		}
		if right {
			s = strings.TrimRightFunc(s, cut)
		}
		return text(s), c.err
	}
}

// split makes split(), or rsplit(), which counts from the end.
func split(last bool) function {
	return func(r *run, c *call) (value, error) {
		c.only(3, "sep", "maxsplit")
		s, n := c.str(0), c.int(2, "maxsplit", -1)
		sep, ok := c.arg(1, "sep")
		if ok && !sep.IsNone() && (!sep.IsString() || sep.AsString() == "") {
			c.fail("the separator of split is empty or %s", kind(sep))
		}
		if c.err != nil {
			return none(), c.err
		}
		if ok && !sep.IsNone() {
			parts := strings.Split(s, sep.AsString())
			if n >= 0 && len(parts) > n+1 {
				if last {
					k := len(parts) - n
					parts = append([]string{strings.Join(parts[:k], sep.AsString())}, parts[k:]...)
				} else {
					parts = append(parts[:n:n], strings.Join(parts[n:], sep.AsString()))
				}
			}
			return texts(parts), r.spend(len(parts))
		}
		if n >= 0 {
			return none(), fmt.Errorf("split with a limit takes a separator")
		}
		parts := strings.FieldsFunc(s, isSpace)
		return texts(parts), r.spend(len(parts))
	}
}

func splitLines(r *run, c *call) (value, error) {
	c.only(1)
	s := strings.ReplaceAll(strings.ReplaceAll(c.str(0), "\r\n", "\n"), "\r", "\n")
	if s = strings.TrimSuffix(s, "\n"); s == "" && c.str(0) == "" {
		return array(nil), c.err
	}
	parts := strings.Split(s, "\n")
	return texts(parts), r.spend(len(parts))
}

func replace(r *run, c *call) (value, error) {
	c.only(4, "count")
	s, old, by, n := c.str(0), c.str(1), c.str(2), c.int(3, "count", -1)
	if c.err == nil {
		times := strings.Count(s, old)
		if n >= 0 {
			times = min(times, n)
		}
		c.err = r.fits(len(s) + times*len(by))
	}
	if c.err != nil {
		return none(), c.err
	}
	return text(strings.Replace(s, old, by, n)), nil
}

func affix(has func(s, x string) bool) function {
	return func(r *run, c *call) (value, error) {
		c.only(2)
		if len(c.args) == 2 && c.args[1].IsList() {
			for _, x := range c.args[1].AsList().Items {
				if x.IsString() && has(c.str(0), x.AsString()) {
					return truth(true), c.err
				}
			}
			return truth(false), c.err
		}
		s, x := c.str(0), c.str(1)
		return truth(has(s, x)), c.err
	}
}

func toJSON(r *run, c *call) (value, error) {
	c.only(2, "ensure_ascii", "indent", "separators", "sort_keys")
	s := style{item: ", ", key: ": ", ascii: c.flag(1, "ensure_ascii"), order: c.flag(9, "sort_keys")}
	if v, ok := c.kw["indent"]; ok && v.IsString() {
		s.indent = v.AsString()
	} else if n := c.int(9, "indent", 0); n > 0 {
		s.indent = strings.Repeat(" ", min(n, 100))
	}
	if s.indent != "" {
		s.item = ","
	}
	if v, ok := c.kw["separators"]; ok && !v.IsNone() {
		if !v.IsList() || v.AsList().Len() != 2 || !v.AsList().Items[0].IsString() || !v.AsList().Items[1].IsString() {
			return none(), fmt.Errorf("separators are not two texts")
		}
		s.item, s.key = v.AsList().Items[0].AsString(), v.AsList().Items[1].AsString()
	}
	var b strings.Builder
	if c.err == nil {
		c.err = r.write(&b, c.args[0], s, 0)
	}
	return text(b.String()), c.err
}

func byDefault(r *run, c *call) (value, error) {
	c.only(3, "default_value", "boolean")
	if v := c.args[0]; !v.IsUndefined() && (v.IsTruthy() || !c.flag(2, "boolean")) {
		return v, c.err
	}
	if v, ok := c.arg(1, "default_value"); ok {
		return v, c.err
	}
	return text(""), c.err
}

func toInt(r *run, c *call) (value, error) {
	c.only(2, "default")
	switch v := c.args[0]; {
	case v.IsInt():
		return v, c.err
	case v.IsFloat() && v.AsFloat() > -1e18 && v.AsFloat() < 1e18:
		return jinja.NewInt(int64(v.AsFloat())), c.err
	case v.IsString():
		if n, err := strconv.ParseInt(strings.TrimFunc(v.AsString(), isSpace), 10, 64); err == nil {
			return jinja.NewInt(n), c.err
		}
		if f, err := strconv.ParseFloat(strings.TrimFunc(v.AsString(), isSpace), 64); err == nil && f > -1e18 && f < 1e18 {
			return jinja.NewInt(int64(f)), c.err
		}
	}
	return whole(c.int(1, "default", 0)), c.err
}

// global functions of a template.
var globals = map[string]function{
	"namespace": func(r *run, c *call) (value, error) {
		v, err := dict(r, c)
		if err == nil {
			r.spaces[v.AsDict()] = true
		}
		return v, err
	},
	"dict": dict,
	"range": func(r *run, c *call) (value, error) {
		c.only(3)
		from, to, step := 0, c.int(0, "", 0), c.int(2, "", 1)
		if len(c.args) > 1 {
			from, to = to, c.int(1, "", 0)
		}
		if len(c.args) == 0 || step == 0 {
			c.fail("range takes an end, and a step that is not 0")
		}
		var list []value
		for i := from; c.err == nil && (step > 0 && i < to || step < 0 && i > to); i += step {
			if list = append(list, whole(i)); len(list) > maxRange {
				c.fail("a range of more than %d", maxRange)
			}
		}
		return array(list), choose(c.err != nil, c.err, r.spend(len(list)))
	},
	"raise_exception": func(r *run, c *call) (value, error) {
		s, err := r.text(append(c.args, text(""))[0])
		return none(), choose(err != nil, err, fmt.Errorf("the template refuses: %s", s))
	},
	"strftime_now": func(r *run, c *call) (value, error) {
		s, err := strftime(r.now, c.str(0))
		return text(s), choose(c.err != nil, c.err, err)
	},
}

// maxRange bounds a range, as in Jinja2's sandbox.
const maxRange = 100_000
