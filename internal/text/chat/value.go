package chat

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// A Value is nil (None), a bool, int, float64, string, []Value or *Dict. Templates also make undefined values,
// iterators, namespaces, loops and functions. Values do not change, except iterators, namespaces and loops.
type Value = any

// A Dict is a map that keeps the order of its keys.
type Dict struct {
	// Keys lists the keys of Data in order.
	Keys []string
	// Data has the values.
	Data map[string]Value
}

// NewDict returns an empty map.
func NewDict() *Dict { return &Dict{Data: map[string]Value{}} }

// Set sets the value of a key. A new key becomes the last.
func (d *Dict) Set(key string, v Value) {
	if !d.Has(key) {
		d.Keys = append(d.Keys, key)
	}
	d.Data[key] = v
}

// Has reports whether a key is present.
func (d *Dict) Has(key string) bool {
	_, ok := d.Data[key]
	return ok
}

type (
	// An undefined value holds its name.
	undefined string
	// An iterator holds the keys, values or items of a map, or the result of a filter, which is read once.
	iterator struct {
		items      []Value
		once, used bool
	}
	namespace struct{ *Dict }
	// A bigInt has the digits of an integer beyond an int. It computes as a float.
	bigInt string
	// A notFinite is a NaN, an infinity or a number beyond a float64. It passes if no template uses it.
	notFinite string
	// A function takes the value before | or . as its first argument.
	function struct {
		params []string // nil: any arguments
		do     func(r *run, c *call) Value
	}
)

// absent stands for an argument that is not given.
const absent = undefined("an argument")

// kind names the type of a value.
func kind(v Value) string {
	name := fmt.Sprintf("%T", v)
	known := map[string]string{"<nil>": "None", "string": "a text", "[]interface {}": "a list", "*chat.Dict": "a map",
		"bool": "a number", "int": "a number", "float64": "a number", "chat.bigInt": "a number",
		"chat.notFinite": "a number that is NaN, infinite or too large for a float",
		"chat.undefined": "an undefined value"}[name]
	return choose(known != "", known, "a "+strings.TrimPrefix(name, "*chat."))
}

// size returns len() of a value; -1: it has none.
func size(v Value) int {
	switch v := v.(type) {
	case string:
		return utf8.RuneCountInString(v)
	case []Value:
		return len(v)
	case *Dict:
		return len(v.Keys)
	case *iterator:
		return choose(v.once, -1, len(v.items))
	case undefined:
		return 0
	}
	return -1
}

func truthy(v Value) bool {
	f, ok := number(v)
	return ok && f != 0 || !ok && v != nil && v != Value("") && (isString(v) || size(v) != 0)
}

func isString(v Value) bool {
	_, ok := v.(string)
	return ok
}

func texts(list []string) []Value {
	items := make([]Value, len(list))
	for i, s := range list {
		items[i] = s
	}
	return items
}

func choose[T any](first bool, a, b T) T {
	if first {
		return a
	}
	return b
}

// A fault ends a rendering or a compilation.
type fault struct{ error }

func fail(format string, args ...any) { panic(fault{fmt.Errorf(format, args...)}) }

// caught turns a panic into an error. The fuzzer looks for panics that are no fault.
func caught(err *error, line *int) {
	p := recover()
	if p == nil {
		return
	}
	cause, ok := p.(fault)
	if !ok {
		cause.error = fmt.Errorf("internal error: %v", p)
	}
	if *err = cause.error; *line > 0 {
		*err = fmt.Errorf("line %d: %w", *line, cause.error)
	}
}

// maxDepth bounds values inside each other.
const maxDepth = 200

func deeper(depth int) int {
	if depth > maxDepth {
		fail("values are more than %d deep inside each other", maxDepth)
	}
	return depth + 1
}

// Decode parses JSON. Maps keep the order of their keys.
func Decode(raw []byte) (v Value, err error) {
	defer caught(&err, new(int))
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	v = decode(d, 0)
	if _, err = d.Token(); err != io.EOF {
		return nil, errors.New("more than one value")
	}
	return v, nil
}

func decode(d *json.Decoder, depth int) Value {
	depth = deeper(depth)
	token := func() json.Token {
		x, err := d.Token()
		if err == io.EOF {
			err = errors.New("the JSON is cut short")
		}
		if err != nil {
			fail("%w", err)
		}
		return x
	}
	switch x := token(); x {
	case json.Delim('['):
		list := []Value{}
		for d.More() {
			list = append(list, decode(d, depth))
		}
		token()
		return list
	case json.Delim('{'):
		v := NewDict()
		for d.More() {
			v.Set(token().(string), decode(d, depth))
		}
		token()
		return v
	default:
		if n, ok := x.(json.Number); ok {
			return parseNumber(n.String())
		}
		return x // a text, bool or nil
	}
}

func parseNumber(s string) Value {
	if n, err := strconv.Atoi(s); err == nil {
		return n
	}
	if !strings.ContainsAny(s, ".eE") {
		return bigInt(s)
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return notFinite(s)
	}
	return f
}

// A call holds the arguments of a function.
type call struct {
	args []Value
	kw   []keyword
}

type keyword struct {
	name  string
	value Value
}

// take removes and returns an argument by name.
func (c *call) take(name string) Value {
	i := slices.IndexFunc(c.kw, func(k keyword) bool { return k.name == name })
	if i < 0 {
		return absent
	}
	v := c.kw[i].value
	c.kw = slices.Delete(slices.Clone(c.kw), i, i+1)
	return v
}

// bind puts the arguments in the order of the parameters, and refuses others.
func (c *call) bind(params []string) {
	if len(c.args) > len(params) {
		fail("%d arguments too many", len(c.args)-len(params))
	}
	c.args = slices.Clip(c.args)
	for _, name := range params[len(c.args):] {
		c.args = append(c.args, c.take(name))
	}
	c.named(0)
}

// named refuses more than n arguments by name.
func (c *call) named(n int) {
	if len(c.kw) > n {
		fail("the argument %q is not read", c.kw[0].name)
	}
}

// given reports an argument that is neither absent nor None.
func (c *call) given(i int) bool { return c.args[i] != nil && c.args[i] != Value(absent) }

func (c *call) or(i int, unset Value) Value {
	return choose(c.args[i] == Value(absent), unset, c.args[i])
}

func (c *call) str(i int) string {
	s, ok := c.args[i].(string)
	if !ok {
		fail("argument %d is not a text but %s", i, kind(c.args[i]))
	}
	return s
}

func (c *call) int(i int, unset int) int {
	if !c.given(i) {
		return unset
	}
	return small(c.args[i])
}

// small returns an integer, so small that a few cannot overflow.
func small(v Value) int {
	f, ok := number(v)
	if _, float := v.(float64); !ok || float || max(f, -f) >= 1<<31 {
		fail("%s is not a small integer", kind(v))
	}
	return int(f)
}
