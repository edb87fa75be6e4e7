package chat

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/ardanlabs/jinja"
)

// text returns str() of a value.
func (r *run) text(v value) (string, error) {
	switch {
	case v.IsString():
		return v.AsString(), nil
	case v.IsUndefined():
		return "", nil
	case v.IsCallable():
		return "", fmt.Errorf("a function is printed")
	}
	var b strings.Builder
	err := r.write(&b, v, style{item: ", ", key: ": ", python: true}, 0)
	return b.String(), err
}

// A style selects repr() or json.dumps().
type style struct {
	python       bool
	indent       string // "": none
	item, key    string // separators
	ascii, order bool
}

// maxDepth bounds values inside each other.
const maxDepth = 200

// write appends repr() or the JSON of a value.
func (r *run) write(b *strings.Builder, v value, s style, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("values are more than %d deep inside each other", maxDepth)
	}
	if err := r.spend(1); err != nil {
		return err
	}
	if err := r.fits(b.Len()); err != nil {
		return err
	}
	line := func() {
		if s.indent != "" {
			b.WriteString("\n" + strings.Repeat(s.indent, depth+1))
		}
	}
	switch {
	case v.IsUndefined() || v.IsCallable():
		return fmt.Errorf("a value that is not defined cannot be written as JSON")
	case v.IsNone():
		b.WriteString(choose(s.python, "None", "null"))
	case v.IsBool():
		b.WriteString(choose(s.python, choose(v.AsBool(), "True", "False"), choose(v.AsBool(), "true", "false")))
	case v.IsInt():
		b.WriteString(strconv.FormatInt(v.AsInt(), 10))
	case v.IsFloat():
		b.WriteString(float(v.AsFloat(), s.python))
	case v.IsString() && s.python:
		repr(b, v.AsString())
	case v.IsString():
		quote(b, v.AsString(), s.ascii)
	case v.IsList():
		items := v.AsList().Items
		b.WriteByte('[')
		for i, x := range items {
			b.WriteString(choose(i > 0, s.item, ""))
			line()
			if err := r.write(b, x, s, depth+1); err != nil {
				return err
			}
		}
		closeLine(b, s, depth, len(items))
		b.WriteByte(']')
	case v.IsDict():
		d := v.AsDict()
		keys := d.Keys
		if s.order {
			keys = slices.Sorted(slices.Values(keys))
		}
		b.WriteByte('{')
		for i, k := range keys {
			b.WriteString(choose(i > 0, s.item, ""))
			line()
			if s.python {
				repr(b, k)
			} else {
				quote(b, k, s.ascii)
			}
			b.WriteString(s.key)
			if err := r.write(b, d.Data[k], s, depth+1); err != nil {
				return err
			}
		}
		closeLine(b, s, depth, len(keys))
		b.WriteByte('}')
	}
	return nil
}

func closeLine(b *strings.Builder, s style, depth, n int) {
	if s.indent != "" && n > 0 {
		b.WriteString("\n" + strings.Repeat(s.indent, depth))
	}
}

func choose[T any](first bool, a, b T) T {
	if first {
		return a
	}
	return b
}

// float returns repr() of a float.
func float(f float64, python bool) string {
	switch {
	case math.IsNaN(f):
		return choose(python, "nan", "NaN")
	case math.IsInf(f, 0):
		return choose(f < 0, "-", "") + choose(python, "inf", "Infinity")
	}
	if a := math.Abs(f); f != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.FormatFloat(f, 'e', -1, 64)
	}
	s := strconv.FormatFloat(f, 'f', -1, 64)
	return choose(strings.Contains(s, "."), s, s+".0")
}

// repr appends a string as Python prints it inside a list.
func repr(b *strings.Builder, s string) {
	mark := choose(strings.Contains(s, "'") && !strings.Contains(s, `"`), `"`, "'")
	b.WriteString(mark)
	for _, c := range s {
		switch {
		case c == '\\' || string(c) == mark:
			b.WriteByte('\\')
			b.WriteRune(c)
		case strings.ContainsRune("\n\r\t", c):
			b.WriteString(map[rune]string{'\n': `\n`, '\r': `\r`, '\t': `\t`}[c])
		case c == ' ' || unicode.IsPrint(c):
			b.WriteRune(c)
		default:
			b.WriteString(hex(c, choose(c < 0x100, `\x%02x`, choose(c < 0x10000, `\u%04x`, `\U%08x`))))
		}
	}
	b.WriteString(mark)
}

func hex(c rune, format string) string { return fmt.Sprintf(format, c) }

// quote appends a JSON string as json.dumps writes it.
func quote(b *strings.Builder, s string, ascii bool) {
	b.WriteByte('"')
	for _, c := range s {
		switch {
		case c == '"' || c == '\\':
			b.WriteByte('\\')
			b.WriteRune(c)
		case strings.ContainsRune("\n\r\t\b\f", c):
			b.WriteString(map[rune]string{'\n': `\n`, '\r': `\r`, '\t': `\t`, '\b': `\b`, '\f': `\f`}[c])
		case c >= 0x10000 && ascii:
			b.WriteString(hex(0xd800+(c-0x10000)>>10, `\u%04x`) + hex(0xdc00+(c-0x10000)&0x3ff, `\u%04x`))
		case c < ' ' || c >= 0x7f && ascii:
			b.WriteString(hex(c, `\u%04x`))
		default:
			b.WriteRune(c)
		}
	}
	b.WriteByte('"')
}

// strftime formats a time as Python does.
func strftime(now time.Time, format string) (string, error) {
	layouts := map[byte]string{
		'Y': "2006", 'm': "01", 'd': "02", 'H': "15", 'M': "04", 'S': "05", 'B': "January", 'b': "Jan", 'A': "Monday",
		'a': "Mon", 'p': "PM", 'I': "03", 'y': "06", 'F': "2006-01-02", 'T': "15:04:05", 'j': "002", 'e': "_2",
		'D': "01/02/06", 'R': "15:04", 'Z': "", 'z': "",
	}
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' {
			b.WriteByte(format[i])
			continue
		}
		i++
		layout, ok := "", false
		unpadded := i+1 < len(format) && format[i] == '-'
		if unpadded {
			i++
		}
		if i < len(format) {
			layout, ok = layouts[format[i]]
		}
		switch {
		case i < len(format) && format[i] == '%':
			b.WriteByte('%')
		case !ok:
			return "", fmt.Errorf("strftime_now: the format %q is not read", format)
		case unpadded:
			b.WriteString(strings.TrimLeft(now.Format(layout), "0"))
		case layout != "":
			b.WriteString(now.Format(layout))
		}
	}
	return b.String(), nil
}

// A value is a value of the engine.
type value = jinja.Value

var (
	text  = jinja.NewString
	none  = jinja.None
	truth = jinja.NewBool
	whole = func(n int) value { return jinja.NewInt(int64(n)) }
	array = jinja.NewList
)

func texts(list []string) value {
	items := make([]value, len(list))
	for i, s := range list {
		items[i] = text(s)
	}
	return array(items)
}

// A function takes the value before | or . as its first argument.
type function func(r *run, c *call) (value, error)

// A call holds the arguments of a function. The first fault is kept.
type call struct {
	run  *run
	args []value
	kw   map[string]value
	err  error
}

func (c *call) fail(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf(format, args...)
	}
}

// arg returns an argument by place or name.
func (c *call) arg(i int, name string) (value, bool) {
	if i < len(c.args) {
		return c.args[i], true
	}
	v, ok := c.kw[name]
	return v, ok
}

// only refuses other arguments: at most n by place, and the names.
func (c *call) only(n int, names ...string) {
	if len(c.args) > n {
		c.fail("%d arguments too many", len(c.args)-n)
	}
	for _, name := range slices.Sorted(maps.Keys(c.kw)) {
		if !slices.Contains(names, name) {
			c.fail("the argument %q is not read", name)
		}
	}
}

func (c *call) str(i int) string {
	if i < len(c.args) && c.args[i].IsString() {
		return c.args[i].AsString()
	}
	c.fail("argument %d is not a text", i)
	return ""
}

func (c *call) int(i int, name string, absent int) int {
	v, ok := c.arg(i, name)
	switch {
	case !ok || v.IsNone():
		return absent
	case v.IsInt() && v.AsInt() >= math.MinInt32 && v.AsInt() <= math.MaxInt32:
		return int(v.AsInt())
	case v.IsBool():
		return choose(v.AsBool(), 1, 0)
	}
	c.fail("argument %d is not a small integer", i)
	return absent
}

func (c *call) flag(i int, name string) bool {
	v, ok := c.arg(i, name)
	return ok && v.IsTruthy()
}

// items returns the values of a list, the keys of a map or the characters of a text.
func (c *call) items(v value) []value {
	switch {
	case v.IsList():
		return v.AsList().Items
	case v.IsDict():
		return texts(v.AsDict().Keys).AsList().Items
	case v.IsString():
		if err := c.run.spend(len(v.AsString())); err != nil {
			c.fail("%w", err)
			return nil
		}
		return texts(strings.Split(v.AsString(), "")).AsList().Items
	case !v.IsUndefined():
		c.fail("%s has no items", kind(v))
	}
	return nil
}

// kind names the type of a value.
func kind(v value) string {
	switch {
	case v.IsUndefined():
		return "an undefined value"
	case v.IsNone():
		return "None"
	case v.IsString():
		return "a text"
	case v.IsList():
		return "a list"
	case v.IsDict():
		return "a map"
	case v.IsCallable():
		return "a function"
	}
	return "a number"
}
