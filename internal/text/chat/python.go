package chat

import (
	"cmp"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf16"
)

// text returns str() of a value.
func (r *run) text(v Value) string {
	switch v := v.(type) {
	case string:
		return v
	case undefined:
		return ""
	}
	return r.written(v, style{item: ", ", key: ": ", python: true})
}

// A style selects repr() or json.dumps().
type style struct {
	python       bool
	lines        bool // a line for each item, with an indent
	indent       string
	item, key    string // separators
	ascii, order bool
}

// maxIndent bounds the bytes of an indent.
const maxIndent = 100

// written returns repr() or the JSON of a value.
func (r *run) written(v Value, s style) string {
	var b strings.Builder
	r.format(&b, v, s, 0)
	return b.String()
}

func (r *run) format(b *strings.Builder, v Value, s style, depth int) {
	r.write(b, "")
	depth = deeper(depth)
	switch v := v.(type) {
	case nil:
		b.WriteString(choose(s.python, "None", "null"))
	case bool:
		b.WriteString(choose(s.python, choose(v, "True", "False"), choose(v, "true", "false")))
	case int:
		b.WriteString(strconv.Itoa(v))
	case bigInt:
		b.WriteString(string(v))
	case float64:
		b.WriteString(float(v, s.python))
	case string:
		s.quote(b, v)
	case []Value:
		r.formatItems(b, "[]", len(v), s, depth, func(i int) { r.format(b, v[i], s, depth) })
	case *Dict:
		keys := v.Keys
		if s.order {
			keys = slices.Sorted(slices.Values(keys))
		}
		r.formatItems(b, "{}", len(keys), s, depth, func(i int) {
			s.quote(b, keys[i])
			b.WriteString(s.key)
			r.format(b, v.Data[keys[i]], s, depth)
		})
	case undefined:
		if !s.python {
			fail("%s is not defined, so it has no JSON", string(v))
		}
		b.WriteString("Undefined")
	default:
		fail("%s cannot be printed", kind(v))
	}
}

// formatItems appends items with separators between them.
func (r *run) formatItems(b *strings.Builder, ends string, n int, s style, depth int, item func(i int)) {
	line := func(depth int) {
		if s.lines && n > 0 {
			b.WriteString("\n" + strings.Repeat(s.indent, depth))
		}
	}
	b.WriteString(ends[:1])
	for i := range n {
		b.WriteString(choose(i > 0, s.item, ""))
		line(depth)
		item(i)
	}
	line(depth - 1)
	b.WriteString(ends[1:])
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

// quote appends a string as Python prints it inside a list, or as json.dumps writes it.
func (x style) quote(b *strings.Builder, s string) {
	mark, short := '"', "\n\r\t\b\f"
	if x.python {
		mark, short = choose(strings.Contains(s, "'") && !strings.Contains(s, `"`), '"', '\''), "\n\r\t"
	}
	b.WriteRune(mark)
	for _, c := range s {
		k := strings.IndexRune(short, c)
		switch {
		case c == '\\' || c == mark:
			b.WriteString("\\" + string(c))
		case k >= 0:
			b.WriteString(`\` + "nrtbf"[k:k+1])
		case x.python && (c == ' ' || unicode.IsPrint(c)), !x.python && c >= ' ' && (c < 0x7f || !x.ascii):
			b.WriteRune(c)
		case x.python && c < 0x100:
			fmt.Fprintf(b, `\x%02x`, c)
		case c < 0x10000:
			fmt.Fprintf(b, `\u%04x`, c)
		case x.python:
			fmt.Fprintf(b, `\U%08x`, c)
		default:
			high, low := utf16.EncodeRune(c)
			fmt.Fprintf(b, `\u%04x\u%04x`, high, low)
		}
	}
	b.WriteRune(mark)
}

var (
	directive = regexp.MustCompile(`(?s)%-?.?`)
	layouts   = map[byte]string{
		'Y': "2006", 'm': "01", 'd': "02", 'H': "15", 'M': "04", 'S': "05", 'B': "January", 'b': "Jan", 'A': "Monday",
		'a': "Mon", 'p': "PM", 'I': "03", 'y': "06", 'F': "2006-01-02", 'T': "15:04:05", 'j': "002", 'e': "_2",
		'D': "01/02/06", 'R': "15:04", 'Z': "", 'z': "", '%': "%",
	}
)

// strftime formats a time as Python does.
func strftime(now time.Time, format string) string {
	return directive.ReplaceAllStringFunc(format, func(d string) string {
		layout, ok := layouts[d[len(d)-1]]
		if !ok {
			fail("strftime_now: the format %q is not read", d)
		}
		text := now.Format(layout)
		if d[1:2] == "-" {
			text = cmp.Or(strings.TrimLeft(text, "0"), "0")
		}
		return text
	})
}
