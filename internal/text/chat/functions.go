package chat

import (
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// def makes a function with the names of its parameters.
func def(params string, do func(r *run, c *call) Value) *function {
	return &function{strings.Fields(params), do}
}

// printed makes a function of one text. Other values are printed first.
func printed[T any](f func(string) T) *function {
	return def("s", func(r *run, c *call) Value { return f(r.text(c.args[0])) })
}

// two makes a function of two texts.
func two[T any](f func(s, x string) T) *function {
	return def("s x", func(r *run, c *call) Value { return f(c.str(0), c.str(1)) })
}

// each makes a function of the items of a value.
func each(f func([]Value) Value) *function {
	return def("value", func(r *run, c *call) Value { return f(r.items(c.args[0])) })
}

// is makes a test of a value.
func is(test func(Value) bool) *function {
	return def("value", func(r *run, c *call) Value { return test(c.args[0]) })
}

// holds makes a test of a type.
func holds[T any]() *function {
	return is(func(v Value) bool {
		_, ok := v.(T)
		return ok
	})
}

// filters, tests and methods have the semantics of Jinja2 and Python. init fills them, since some call others.
var filters, tests, textMethods map[string]*function

func init() {
	lower, upper, capital := printed(strings.ToLower), printed(strings.ToUpper), printed(capitalize)
	filters = map[string]*function{
		"string": printed(strings.Clone), "safe": printed(strings.Clone),
		"upper": upper, "lower": lower, "capitalize": capital,
		"title": printed(func(s string) string {
			return title(s, func(c rune) bool { return isSpace(c) || strings.ContainsRune("-({[<", c) })
		}),
		"trim":   strip(strings.TrimFunc),
		"tojson": def("x ensure_ascii indent separators sort_keys", toJSON), "int": def("value default", toInt),
		"default": def("value default_value boolean", byDefault), "d": def("value default_value boolean", byDefault),
		"length": def("value", length), "count": def("value", length),
		"items": def("value", func(r *run, c *call) Value {
			if _, unset := c.args[0].(undefined); unset {
				return &iterator{once: true}
			}
			return &iterator{items: pairs(c.args[0]), once: true}
		}),
		"dictsort": def("value case_sensitive by reverse", dictSort), "join": def("value d attribute", join),
		"list":  each(func(list []Value) Value { return slices.Clone(list) }),
		"first": each(func(list []Value) Value { return edge(list, 0) }),
		"last":  each(func(list []Value) Value { return edge(list, -1) }),
		"sort": def("value reverse case_sensitive attribute", func(r *run, c *call) Value {
			return r.sorted(r.items(c.args[0]), c.args[1], c.args[2], c.args[3])
		}),
		"reverse": def("value", reverse),
		"replace": def("s old new count", replace), "map": {do: mapped},
		"select": selected(false, true), "selectattr": selected(true, true),
		"reject": selected(false, false), "rejectattr": selected(true, false),
	}
	textMethods = map[string]*function{
		"upper": upper, "lower": lower, "capitalize": capital,
		"title": printed(func(s string) string { return title(s, func(c rune) bool { return !unicode.IsLetter(c) }) }),
		"strip": strip(strings.TrimFunc), "lstrip": strip(strings.TrimLeftFunc), "rstrip": strip(strings.TrimRightFunc),
		"split": def("s sep maxsplit", split(false)), "rsplit": def("s sep maxsplit", split(true)),
		"splitlines": printed(splitLines), "replace": def("s old new count", replace), "join": def("d list", joinMethod),
		"startswith": affix(strings.HasPrefix), "endswith": affix(strings.HasSuffix),
		"removeprefix": two(strings.TrimPrefix), "removesuffix": two(strings.TrimSuffix), "count": two(strings.Count),
		"find":  two(func(s, x string) int { return place(s, strings.Index(s, x)) }),
		"rfind": two(func(s, x string) int { return place(s, strings.LastIndex(s, x)) }),
	}
	tests = map[string]*function{
		"undefined": holds[undefined](), "boolean": holds[bool](), "integer": is(func(v Value) bool {
			_, short := v.(int)
			_, long := v.(bigInt)
			return short || long
		}), "float": holds[float64](),
		"string": holds[string](), "mapping": holds[*Dict](),
		"callable": is(func(v Value) bool { return kind(v) == "a function" || kind(v) == "an undefined value" }),
		"defined":  is(func(v Value) bool { _, not := v.(undefined); return !not }),
		"none":     is(func(v Value) bool { return v == nil }),
		"true":     is(func(v Value) bool { return v == Value(true) }),
		"false":    is(func(v Value) bool { return v == Value(false) }),
		"number":   is(func(v Value) bool { _, ok := number(v); return ok }), "sequence": is(isSequence),
		"iterable": is(func(v Value) bool { return isSequence(v) || kind(v) == "a iterator" }),
		"odd":      is(func(v Value) bool { return small(v)%2 != 0 }),
		"even":     is(func(v Value) bool { return small(v)%2 == 0 }),
		"sameas": def("value other", func(r *run, c *call) Value {
			return reflect.TypeOf(c.args[0]) == reflect.TypeOf(c.args[1]) && r.equal(c.args[0], c.args[1], 0)
		}),
		"divisibleby": def("value num", func(r *run, c *call) Value {
			return r.equal(arithmetic("%", c.args[0], c.args[1]), 0, 0)
		}),
		"lower": printed(func(s string) bool { return s == strings.ToLower(s) && s != strings.ToUpper(s) }),
		"upper": printed(func(s string) bool { return s == strings.ToUpper(s) && s != strings.ToLower(s) }),
	}
	names := map[string]string{"==": "eq equalto", "!=": "ne", "<": "lt lessthan", "<=": "le",
		">": "gt greaterthan", ">=": "ge", "in": "in"}
	for op, words := range names {
		for _, name := range append(strings.Fields(words), op) {
			tests[name] = def("value other", func(r *run, c *call) Value { return r.binary(op, c.args[0], c.args[1]) })
		}
	}
}

var mapMethods = map[string]*function{
	"keys":  def("d", func(r *run, c *call) Value { return &iterator{items: r.items(c.args[0])} }),
	"items": def("d", func(r *run, c *call) Value { return &iterator{items: pairs(c.args[0])} }),
	"values": def("d", func(r *run, c *call) Value {
		list := pairs(c.args[0])
		for i, pair := range list {
			list[i] = pair.([]Value)[1]
		}
		return &iterator{items: list}
	}),
	"get": def("d key default", func(r *run, c *call) Value {
		if key, d := c.args[1], c.args[0].(*Dict); isString(key) && d.Has(key.(string)) {
			return d.Data[key.(string)]
		}
		return c.or(2, nil)
	}),
}

// method returns a method of a text or map; nil: none.
func method(v Value, name string) Value {
	var f *function
	switch v.(type) {
	case string:
		f = textMethods[name]
	case *Dict:
		f = mapMethods[name]
	}
	if f == nil {
		return nil
	}
	return &function{do: func(r *run, c *call) Value {
		return r.call(f, &call{append([]Value{v}, c.args...), c.kw})
	}}
}

func isSequence(v Value) bool {
	_, not := v.(*iterator)
	return size(v) >= 0 && !not
}

// place turns an index in bytes into one in characters.
func place(s string, at int) int {
	if at < 0 {
		return at
	}
	return utf8.RuneCountInString(s[:at])
}

func capitalize(s string) string {
	_, n := utf8.DecodeRuneInString(s)
	return strings.ToUpper(s[:n]) + strings.ToLower(s[n:])
}

// title writes a capital after each character that begins reports, and small letters elsewhere.
func title(s string, begins func(rune) bool) string {
	begin := true
	return strings.Map(func(c rune) rune {
		now := begin
		begin = begins(c)
		return choose(now, unicode.ToTitle(c), unicode.ToLower(c))
	}, s)
}

func strip(trim func(string, func(rune) bool) string) *function {
	return def("s chars", func(r *run, c *call) Value {
		cut := isSpace
		if c.given(1) {
			chars := c.str(1)
			cut = func(x rune) bool { return strings.ContainsRune(chars, x) }
		}
		return trim(r.text(c.args[0]), cut)
	})
}

// split makes split(), or rsplit(), which counts from the end.
func split(last bool) func(r *run, c *call) Value {
	return func(r *run, c *call) Value {
		s, n := c.str(0), c.int(2, -1)
		if !c.given(1) {
			if n >= 0 {
				fail("split with a limit takes a separator")
			}
			return texts(strings.FieldsFunc(s, isSpace))
		}
		sep := c.str(1)
		if sep == "" {
			fail("the separator of split is empty")
		}
		parts := strings.Split(s, sep)
		if k := len(parts) - n; n >= 0 && k > 1 && last {
			parts = append([]string{strings.Join(parts[:k], sep)}, parts[k:]...)
		} else if n >= 0 && k > 1 {
			parts = strings.SplitN(s, sep, n+1)
		}
		return texts(parts)
	}
}

// lineEnd matches the ends of lines in Python.
var lineEnd = regexp.MustCompile(`\r\n|[\n\r\v\f\x1c-\x1e\x{85}\x{2028}\x{2029}]`)

func splitLines(s string) Value {
	parts := lineEnd.Split(s, -1)
	if last := len(parts) - 1; parts[last] == "" {
		parts = parts[:last]
	}
	return texts(parts)
}

func replace(r *run, c *call) Value {
	s, old, by, n := r.text(c.args[0]), r.text(c.args[1]), r.text(c.args[2]), c.int(3, -1)
	times := strings.Count(s, old)
	if n >= 0 {
		times = min(times, n)
	}
	r.fits(len(s) + times*len(by))
	return strings.Replace(s, old, by, n)
}

func affix(has func(s, x string) bool) *function {
	return def("s x", func(r *run, c *call) Value {
		if list, ok := c.args[1].([]Value); ok {
			return slices.ContainsFunc(list, func(x Value) bool { return isString(x) && has(c.str(0), x.(string)) })
		}
		return has(c.str(0), c.str(1))
	})
}

func toJSON(r *run, c *call) Value {
	s := style{item: ", ", key: ": ", ascii: c.given(1) && truthy(c.args[1]), order: truthy(c.args[4])}
	if c.given(2) {
		s.lines, s.item = true, ","
		if text, ok := c.args[2].(string); ok {
			s.indent = text
		} else {
			s.indent = strings.Repeat(" ", min(max(c.int(2, 0), 0), maxIndent+1))
		}
		if len(s.indent) > maxIndent {
			fail("an indent of more than %d", maxIndent)
		}
	}
	if c.given(3) {
		list, _ := c.args[3].([]Value)
		if len(list) != 2 {
			fail("separators are not two texts")
		}
		two := &call{args: list}
		s.item, s.key = two.str(0), two.str(1)
	}
	return r.written(c.args[0], s)
}

func byDefault(r *run, c *call) Value {
	_, unset := c.args[0].(undefined)
	if !unset && (truthy(c.args[0]) || !truthy(c.args[2])) {
		return c.args[0]
	}
	return c.or(1, "")
}

func toInt(r *run, c *call) Value {
	switch v := c.args[0].(type) {
	case undefined:
		fail("int of %s, which is not defined", string(v))
	case int, bigInt:
		return v
	case bool:
		return small(v)
	case float64:
		if v > -1e18 && v < 1e18 {
			return int(v)
		}
	case string:
		s := strings.TrimFunc(v, isSpace)
		if n, err := strconv.Atoi(s); err == nil {
			return n
		}
		if f, err := strconv.ParseFloat(s, 64); err == nil && f > -1e18 && f < 1e18 {
			return int(f)
		}
	}
	return c.or(1, 0)
}
