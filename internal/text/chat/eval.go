package chat

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"strings"
)

// call calls a value within the bounds.
func (r *run) call(v Value, c *call) Value {
	f, ok := v.(*function)
	if name, is := v.(undefined); is {
		fail("%s is not defined, so it cannot be called", string(name))
	} else if !ok {
		fail("%s cannot be called", kind(v))
	}
	n := 1
	for _, x := range c.args {
		if s, ok := x.(string); ok {
			n += len(s) / 64
		}
	}
	if r.spend(n); f.params != nil {
		c.bind(f.params)
	}
	return r.made(f.do(r, c))
}

// made counts steps for a new value.
func (r *run) made(v Value) Value {
	switch v := v.(type) {
	case string:
		r.fits(len(v))
	case []Value:
		r.spend(len(v))
	case *iterator:
		r.spend(len(v.items))
	}
	return v
}

// items returns the values of a list, the keys of a map or the characters of a text.
func (r *run) items(v Value) (list []Value) {
	switch v := v.(type) {
	case []Value:
		list = v
	case *Dict:
		list = texts(v.Keys)
	case string:
		r.spend(len(v))
		list = texts(strings.Split(v, ""))
	case *iterator:
		if v.used && v.once {
			fail("the result of map, select, reverse or items is read twice; add | list to it")
		}
		list, v.used = v.items, true
	case undefined:
	default:
		fail("%s has no items", kind(v))
	}
	r.spend(len(list))
	return list
}

// item returns v[key], or v.key if dotted.
func (r *run) item(v, key Value, dotted bool) Value {
	name, named := key.(string)
	if dotted {
		if m := method(v, name); m != nil {
			return m
		}
	}
	switch v := v.(type) {
	case undefined:
		fail("%s is not defined, so it has no %s", string(v), r.text(key))
	case *Dict:
		if named && v.Has(name) {
			return v.Data[name]
		}
	case *namespace:
		if named && v.Has(name) {
			return v.Data[name]
		}
	case *loop:
		if f := loopAttributes[name]; f != nil {
			if name == "last" || name == "nextitem" {
				r.see(v.items, v.at+2)
			} else if name == "length" || strings.HasPrefix(name, "rev") {
				r.see(v.items, everything)
			}
			return f(v, v.at, len(v.items))
		}
	case string:
		list := []rune(v)
		r.spend(len(v) / 64)
		if i, ok := index(key, len(list)); ok {
			return string(list[i])
		}
	case []Value:
		if i, ok := index(key, len(v)); ok { // else a shorter list has none either
			r.see(v, choose(key.(int) < 0, everything, i+1))
			return v[i]
		}
	}
	if m := method(v, name); m != nil {
		return m
	}
	return undefined(r.text(key))
}

// index returns a place in a list of length n, from its end if negative, and whether there is one.
func index(key Value, n int) (int, bool) {
	i, ok := key.(int)
	if i < 0 {
		i += n
	}
	return i, ok && i >= 0 && i < n
}

// slice returns v[from:to:step].
func (r *run) slice(v Value, c *call) Value {
	list, ok := v.([]Value)
	if isString(v) {
		list = r.items(v)
	} else if !ok {
		fail("a slice of %s", kind(v))
	}
	n := len(list)
	step := c.int(2, 1)
	if step == 0 {
		fail("a slice of step 0")
	}
	bound := func(i, unset int) int {
		at := c.int(i, unset)
		if at < 0 && c.args[i] != nil {
			at += n
		}
		return min(max(at, choose(step < 0, -1, 0)), choose(step < 0, n-1, n))
	}
	from, to := bound(0, choose(step < 0, n-1, 0)), bound(1, choose(step < 0, -1, n))
	part := []Value{}
	for i := from; step > 0 && i < to || step < 0 && i > to; i += step {
		part = append(part, list[i])
	}
	if isString(v) {
		return r.join(part, "")
	}
	return r.made(part)
}

// join joins the texts of values.
func (r *run) join(list []Value, sep string) string {
	var b strings.Builder
	for i, x := range list {
		r.write(&b, choose(i > 0, sep, ""))
		r.write(&b, r.text(x))
	}
	return b.String()
}

// number returns a number; a bool counts as 0 or 1.
func number(v Value) (f float64, ok bool) {
	switch v := v.(type) {
	case int:
		return float64(v), true
	case bool:
		return choose(v, 1.0, 0), true
	case float64:
		return v, true
	case bigInt:
		f, _ = strconv.ParseFloat(string(v), 64)
		return f, true
	}
	return 0, false
}

// equal compares as Python does.
func (r *run) equal(a, b Value, depth int) bool {
	r.spend(1)
	x, ok := number(a)
	if y, ok2 := number(b); x != y || ok != ok2 {
		return false
	}
	switch a := a.(type) {
	case int:
		n, whole := b.(int)
		_, long := b.(bigInt)
		return !long && (!whole || n == a) // as floats they are equal
	case bigInt:
		_, whole := b.(int)
		n, long := b.(bigInt)
		return !whole && (!long || n == a)
	case bool, float64:
		return true
	case []Value:
		b, ok := b.([]Value)
		return ok && slices.EqualFunc(a, b, func(x, y Value) bool { return r.equal(x, y, deeper(depth)) })
	case *Dict:
		b, ok := b.(*Dict)
		return ok && len(a.Keys) == len(b.Keys) && !slices.ContainsFunc(a.Keys, func(key string) bool {
			return !b.Has(key) || !r.equal(a.Data[key], b.Data[key], deeper(depth))
		})
	case string:
		if s, ok := b.(string); ok {
			r.spend(min(len(a), len(s)) / 64)
		}
	case undefined:
		_, ok := b.(undefined)
		return ok
	}
	return a == b
}

// contains reports whether a value is in another.
func (r *run) contains(x, in Value) bool {
	switch in := in.(type) {
	case string:
		s, ok := x.(string)
		if !ok {
			fail("%s in a text", kind(x))
		}
		r.spend(len(in) / 64)
		return strings.Contains(in, s)
	case *Dict:
		s, ok := x.(string)
		return ok && in.Has(s)
	}
	return slices.ContainsFunc(r.items(in), func(y Value) bool { return r.equal(x, y, 0) })
}

// compare orders numbers and texts.
func (r *run) compare(a, b Value) int {
	if x, y, ok := both[string](a, b); ok {
		r.spend(min(len(x), len(y)) / 64)
		return strings.Compare(x, y)
	}
	if x, y, ok := both[int](a, b); ok {
		return cmp.Compare(x, y)
	}
	x, ok := number(a)
	y, ok2 := number(b)
	if !ok || !ok2 {
		fail("%s and %s have no order", kind(a), kind(b))
	}
	return choose(x < y, -1, choose(x > y, 1, 0))
}

// binary applies an operator to two values.
func (r *run) binary(op string, a, b Value) (v Value) {
	r.spend(1)
	switch op {
	case "==":
		return r.equal(a, b, 0)
	case "!=":
		return !r.equal(a, b, 0)
	case "<", ">", "<=", ">=":
		n := r.compare(a, b)
		return n == 0 && len(op) == 2 || n != 0 && (n < 0) == (op[0] == '<')
	case "in":
		return r.contains(a, b)
	case "not in":
		return !r.contains(a, b)
	case "~":
		return r.made(r.text(a) + r.text(b))
	case "*":
		if v = r.repeat(a, b); v == nil {
			v = r.repeat(b, a)
		}
	case "+":
		v = add(a, b)
	}
	if v == nil {
		return arithmetic(op, a, b)
	}
	return r.made(v)
}

// add joins two texts or lists; nil: of other values.
func add(a, b Value) Value {
	if x, y, ok := both[string](a, b); ok {
		return x + y
	}
	if x, y, ok := both[[]Value](a, b); ok {
		return slices.Concat(x, y)
	}
	return nil
}

func both[T any](a, b Value) (x, y T, ok bool) {
	x, ok = a.(T)
	y, ok2 := b.(T)
	return x, y, ok && ok2
}

// repeat returns copies of a text or list; nil: of other values.
func (r *run) repeat(v, times Value) Value {
	n, ok := times.(int)
	s, isText := v.(string)
	list, isList := v.([]Value)
	if !ok || !isText && !isList {
		return nil
	}
	n = min(max(n, 0), r.limit+1)
	if r.fits(n * (len(s) + 64*len(list))); isText {
		return strings.Repeat(s, n)
	}
	return slices.Repeat(list, n)
}

var operators = map[string]func(x, y float64) float64{
	"+":  func(x, y float64) float64 { return x + y },
	"-":  func(x, y float64) float64 { return x - y },
	"*":  func(x, y float64) float64 { return x * y },
	"/":  func(x, y float64) float64 { return x / y },
	"%":  modulo,
	"//": func(x, y float64) float64 { return math.Round((x - modulo(x, y)) / y) },
	"**": math.Pow,
}

// modulo returns the remainder with the sign of y.
func modulo(x, y float64) float64 {
	rest := math.Mod(x, y)
	return choose(rest != 0 && (rest < 0) != (y < 0), rest+y, rest)
}

// arithmetic computes as Python does, with integers up to 2^53.
func arithmetic(op string, a, b Value) Value {
	x, ok := number(a)
	y, ok2 := number(b)
	if !ok || !ok2 {
		fail("%s of %s and %s", op, kind(a), kind(b))
	}
	if y == 0 && strings.Contains("// %", op) {
		fail("a division by 0")
	}
	f := operators[op](x, y)
	_, float := a.(float64)
	_, float2 := b.(float64)
	if float = float || float2; op == "**" && (float || y < 0) {
		fail("a power of a float, or with a negative exponent, is not read")
	}
	if float || op == "/" {
		return f
	}
	if max(math.Abs(f), math.Abs(x), math.Abs(y)) > 1<<53 {
		fail("%s of integers above 2^53", op)
	}
	return int(f)
}
