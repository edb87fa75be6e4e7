package chat

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/base/must"
)

// The expected texts have this time.
var now = time.Date(2026, 7, 4, 5, 6, 7, 0, time.UTC)

func read(t testing.TB, name string) []byte {
	return must.Have(os.ReadFile(filepath.Join("testdata", name)))
}

func decoded(t testing.TB, raw string) Vars {
	v := must.Have(Decode([]byte(raw)))
	return v.(*Dict).Data
}

func rendered(t testing.TB, source string, vars Vars) (string, []Span, error) {
	c, err := Compile(source)
	if err != nil {
		return "", nil, err
	}
	c.Now = now
	return c.Render(vars)
}

// transformers rendered the same templates and conversations (scripts/oracle/chat.py).
func TestRendersEqualTransformers(t *testing.T) {
	var file struct {
		Cases   map[string]json.RawMessage
		Renders []struct {
			Template, Case, Text, Refused string
			Spans                         []Span
		}
	}
	must.Do(t, json.Unmarshal(read(t, "renders.json"), &file))
	if len(file.Renders) < 80 {
		t.Fatalf("only %d renders", len(file.Renders))
	}
	for _, r := range file.Renders {
		text, spans, err := rendered(t, string(read(t, r.Template)), decoded(t, string(file.Cases[r.Case])))
		switch {
		case r.Refused != "" && err == nil:
			t.Errorf("%s, %s: %q; transformers refuses it: %s", r.Template, r.Case, text, r.Refused)
		case r.Refused == "" && (err != nil || text != r.Text || !slices.Equal(spans, r.Spans)):
			t.Errorf("%s, %s: %v\n%q %v, want\n%q %v", r.Template, r.Case, err, text, spans, r.Text, r.Spans)
		}
	}
}

func TestKeysKeepTheirOrder(t *testing.T) {
	raw := `{"z": 1, "a": {"y": [1.0, 2e3, null], "b": "<ü>"}, "m": 9007199254740993}`
	text, _, err := rendered(t, "{{ x | tojson }}", Vars{"x": decoded(t, `{"x": `+raw+`}`)["x"]})
	if want := strings.Replace(raw, "2e3", "2000.0", 1); err != nil || text != want {
		t.Errorf("%s, %v, want %s", text, err, want)
	}
}

func TestWrongTemplatesAreExplained(t *testing.T) {
	for source, want := range map[string]string{
		"{% if x %}":            "line 1: endif is missing",
		"\n{{ x | nosuch }}":    `line 2: the filter "nosuch" is not read`,
		"{{ x is nosuch }}":     `the test "nosuch" is not read`,
		"{% include 'a' %}":     `the statement "include" is not read`,
		"{{ x ":                 "the tag has no end",
		"{{ 'x }}":              "a string in it",
		"{{ a b }}":             `"b" in place of an operator`,
		"{{ 1 < 2 < 3 }}":       "a chain of comparisons",
		"{{ x.__class__ }}":     `the attribute "__class__" is not allowed`,
		"{{ '\\x4' }}":          `the escape \x is not read`,
		"{{ x[] }}":             "an index is missing",
		"{{ f(a=1, 2) }}":       "an argument follows",
		"{{ {1: 2} }}":          "a key of a map is not a text",
		"{% set true = 1 %}":    `"true" in place of a variable`,
		"{% set a, b = 1, 2 %}": `"," in place of`,
		"{% set a, b = [1] %}":  "2 variables, and a list",
		"{% macro f(x) %}{% endmacro %}{{ f(1, 2) }}": "1 arguments too many",
		"{% break %}":                         "break is not in a loop",
		"{{ '\ufdd0' }}":                      "U+FDD0",
		strings.Repeat("(", 100):              "",
		"{{ " + strings.Repeat("(", 99) + "1": "the tag has no end",
		"{{ " + strings.Repeat("[", 99) + strings.Repeat("]", 99) + " }}":              "inside each other",
		strings.Repeat("{% if x %}", 99) + strings.Repeat("{% endif %}", 99):           "inside each other",
		"{{ 1" + strings.Repeat(" + 1", maxTokens) + " }}":                             "a tag with more than",
		strings.Repeat("x", MaxTemplate+1):                                             "bytes",
		"{% for x in [1] %}{% generation %}{% break %}{% endgeneration %}{% endfor %}": "break is not in a loop",
		"{% generation %}{% generation %}x{% endgeneration %}{% endgeneration %}":      "inside each other",
		"{% set x %}{% generation %}ab{% endgeneration %}{% endset %}{{ x[:2] }}":      "cuts the text",
		"{% set x = namespace() %}{% set x.y = x %}{{ x }}":                            "a namespace cannot be printed",
		"{% set d = {} %}{% set d.y = 1 %}":                                            "not a namespace",
		"{{ {}.update({}) }}":                                                          "update is not defined",
		"{{ [].append(1) }}":                                                           "append is not defined",
		"{{ none + 'a' }}":                                                             "+ of None and a text",
		"{{ 'a' + ['b'] }}":                                                            "+ of a text and a list",
		"{{ '%s' % 'a' }}":                                                             "% of a text",
		"{{ nosuch.a }}":                                                               "is not defined",
		"{{ nosuch() }}":                                                               "nosuch is not defined",
		"{{ 1 // 0 }}":                                                                 "a division by 0",
		"{{ raise_exception('no ' ~ 2) }}":                                             "the template refuses: no 2",
		"{{ strftime_now('%Q') }}":                                                     `"%Q" is not read`,
		"{% for k, v in ['ab'] %}{% endfor %}":                                         "not a list of 2",
		"{{ range(100001) }}":                                                          "a range of more than",
		"{{ 'a' * 99999999999999 }}":                                                   "a value of more than",
		"{{ ('a' * 4000000) * 4000000 }}":                                              "a value of more than",
		"{{ ('a' * 4000000).replace('a', 'bcd') }}":                                    "a value of more than",
		"{{ 'x'.split('x', nosuch=1) }}":                                               `the argument "nosuch" is not read`,
		"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}":                              "macros inside each other",
		"{% macro f(x) %}{{ f(x + x) }}{% endmacro %}{{ f('abcdefgh') }}":              "a value of more than",
		"{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}":               "a value of more than",
		"{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}":      "too many steps",
		"{% set n = namespace(x=[1]) %}{% for i in range(999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x == n.x }}":   "deep inside each other",
		"{% set n = namespace(x=1) %}{% for i in range(99999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x | tojson }}": "deep inside each other",
		"{% set x = [1, 2] | select %}{{ x | list }}{{ x | list }}":                                                  "is read twice",
		"{{ [1] | tojson(indent='x' * 101) }}":                                                                       "an indent of more than",
		"{{ 'ab'[::0] }}":                                                                                            "a slice of step 0",
		"{{ none[1:] }}":                                                                                             "a slice of None",
		"{{ range(1, 2, 0) }}":                                                                                       "a range of step 0",
		"{{ range(99999999999) }}":                                                                                   "not a small integer",
		"{{ 'a'.split('') }}":                                                                                        "the separator of split is empty",
		"{{ 'a b'.split(none, 1) }}":                                                                                 "takes a separator",
		"{{ [1] | tojson(separators=',') }}":                                                                         "separators are not two texts",
		"{{ nosuch | tojson }}":                                                                                      "nosuch is not defined",
		"{{ {} | dictsort(by='size') }}":                                                                             "by key or by value",
		"{{ ','.join([1]) }}":                                                                                        "join of a number",
		"{{ [1] | select('nosuch') | list }}":                                                                        `the test "nosuch" is not read`,
		"{{ [1] | map('nosuch') }}":                                                                                  "the name of a filter",
		"{{ [1] | map(attribute='a', b=1) }}":                                                                        `the argument "b" is not read`,
		"{% for x in [1] %}{{ loop.cycle() }}{% endfor %}":                                                           "cycle takes values",
		"{{ 'a'.b() }}":                                                                                              "b is not defined",
		"{{ 1() }}":                                                                                                  "a number cannot be called",
		"{{ 1 | length }}":                                                                                           "a number has no length",
		"{{ 1 | list }}":                                                                                             "a number has no items",
		"{{ 1 | items }}":                                                                                            "a number has no items",
		"{{ 1 < 'a' }}":                                                                                              "have no order",
		"{{ 1 in 'a' }}":                                                                                             "a number in a text",
		"{{ 2 ** -1 }}":                                                                                              "a negative exponent",
		"{{ 9007199254740993 * 3 }}":                                                                                 "above 2^53",
		"{{ 1.5 is odd }}":                                                                                           "not a small integer",
		"{{ dict(1, 2) }}":                                                                                           "a map of 2 values",
		"{{ nosuch | int }}":                                                                                         "nosuch, which is not defined",
		"{{ 'a'.upper(1) }}":                                                                                         "1 arguments too many",
		"{{ 'a'.startswith(1) }}":                                                                                    "argument 1 is not a text but a number",
		"{{ dict }}":                                                                                                 "a function cannot be printed",
		"{{ 'a'[1:2:3:4] }}":                                                                                         "in place of ]",
		"{{ \xff }}":                                                                                                 "not UTF-8",
		"{# x":                                                                                                       "the comment has no end",
		"{% raw %}":                                                                                                  "the raw block has no end",
		"{% 1 %}":                                                                                                    "in place of a name",
		"{% if x %}{% endif x %}":                                                                                    `"x" in place of`,
		"{{ (['a' * 4000000] * 9) | join }}":                                                                         "a value of more than",
		"{{ ['a' * 4000000, 'b' * 4000000] }}":                                                                       "a value of more than",
		"{% for x in [1, 2] %}{{ 'a' * 4000000 }}{% endfor %}":                                                       "a value of more than",
		"{% for x in range(99999) %}{% set y = range(99999) | list %}{% endfor %}":                           "too many steps",
		"{% set y = 'a' * 4000000 %}{% for x in range(99999) %}{% set z = 'b' in y %}{% endfor %}":           "too many steps",
		"{% set y = 'a' * 4000000 %}{% for x in range(99999) %}{% set z = y == y ~ '' %}{% endfor %}":        "too many steps",
		"{% set y = 'a' * 4000000 %}{% for x in range(99999) %}{% set z = y[0] %}{% endfor %}":               "too many steps",
		"{% set y = 'a' * 4000000 %}{% for x in range(99999) %}{% set z = y.strip() | length %}{% endfor %}": "too many steps",
		"{{ [1] | map('string') }}":      "cannot be printed",
		"{{ ([1] * 5000000) | length }}": "a value of more than",
		"{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}": "too many steps",
	} {
		if want == "" {
			continue
		}
		text, _, err := rendered(t, source, nil)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80s: %.80q, %v, want %s", source, text, err, want)
		}
	}
	_, _, err := rendered(t, "{% generation %}{{ x }}{% endgeneration %}", Vars{"x": "a\ufdd1"})
	if err == nil || !strings.Contains(err.Error(), "x: the characters U+FDD0") {
		t.Errorf("a mark in a value: %v", err)
	}
	deep := strings.Repeat("[", 300) + strings.Repeat("]", 300)
	for _, raw := range []string{deep, "1 2", "{", `{"a" 1}`, ""} {
		if v, err := Decode([]byte(raw)); err == nil {
			t.Errorf("%.20s: %v", raw, v)
		}
	}
}

// A rendering ends within its bounds, whatever the template and the values.
func FuzzTemplate(f *testing.F) {
	for _, name := range []string{"constructs.jinja", "space.jinja", "numbers.jinja", "plain.jinja"} {
		f.Add(string(read(f, name)), `[{"role":"user","content":"a"},{"role":"assistant","content":null}]`)
	}
	f.Add("{% set n = namespace(a=[1]) %}{% for x in range(9) %}{% set n.a = n.a + n.a %}{% endfor %}{{ n.a }}", `{"a":1}`)
	f.Fuzz(func(t *testing.T, source, messages string) {
		v, err := Decode([]byte(messages))
		if err != nil {
			return
		}
		text, spans, err := rendered(t, source, Vars{"messages": v, "tools": nil})
		if err != nil && strings.Contains(err.Error(), "internal error") {
			t.Fatal(err)
		}
		if err != nil {
			return
		}
		end := 0
		for _, s := range spans {
			if s.From < end || s.To < s.From || s.To > len(text) {
				t.Fatal(fmt.Sprint(spans, len(text)))
			}
			end = s.To
		}
	})
}

// Integers of any length keep their digits, as in Python.
func TestLongIntegers(t *testing.T) {
	v := must.Have(Decode([]byte(`{"a":9223372036854775807,"b":9223372036854775808,"c":-99999999999999999999}`)))
	for source, want := range map[string]string{
		"{{ x | tojson }}":     `{"a": 9223372036854775807, "b": 9223372036854775808, "c": -99999999999999999999}`,
		"{{ x.b }} {{ x }}":    "9223372036854775808 {'a': 9223372036854775807, 'b': 9223372036854775808, 'c': -99999999999999999999}",
		"{{ x.b == x.a }}":     "False",
		"{{ x.a == x.b }}":     "False",
		"{{ x.b == x.b }}":     "True",
		"{{ x.b > 1 }}":        "True",
		"{{ x.c | int }}":      "-99999999999999999999",
		"{{ x.b is number }}":  "True",
		"{{ x.b is integer }}": "True",
	} {
		if got, _, err := rendered(t, source, Vars{"x": v}); err != nil || got != want {
			t.Errorf("%s: %s, %v, want %s", source, got, err, want)
		}
	}
}
