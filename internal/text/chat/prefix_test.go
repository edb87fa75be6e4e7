package chat

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

// traced holds templates, and whether prefixes go on in the loop over the messages.
var traced = []struct {
	source string
	resume bool
}{
	{"A{% for m in messages %}[{{ m.role }}{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}", true},
	{"{% for m in messages %}{{ loop.index }}{{ loop.first }}{{ (loop.previtem or {}).role }}{% endfor %}" +
		"{{ messages | length }}", true},
	{"{% for m in messages %}{{ m.role }}{% if loop.last %}.{% endif %}{% endfor %}", true},
	{"{% for m in messages %}{{ m.role }}{{ (loop.nextitem or {}).role }}{% endfor %}", true},
	{"{% for m in messages %}{{ m.role }}{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}.{% endif %}" +
		"{% endfor %}{{ messages[-1].role }}", true},
	{"{% for m in messages %}{{ m.role }}{{ (messages[loop.index] or {}).role }}{% endfor %}", true},
	{"{% for m in messages %}{{ m.role }}{{ messages[loop.index0 - 1].role }}{% endfor %}", false},
	{"{% for m in messages %}{{ loop.revindex }}{% endfor %}", false},
	{"{% for m in messages %}{{ loop.length }}{% endfor %}", false},
	{"{% for m in messages %}{{ messages | length }}{% endfor %}", false},
	{"{% for m in messages %}{{ m.role }}{{ messages[1:] | length }}{% endfor %}", false},
	{"{% for m in messages %}{{ m.role }}{{ messages[2].role }}{% endfor %}", true},
	{"{% for m in messages %}{{ m.role }}{{ m is sameas messages.1 }}{% endfor %}", false},
	{"{% for m in messages %}{{ m.role }}{{ add_generation_prompt }}{% endfor %}", false},
	{"{{ add_generation_prompt }}{% for m in messages %}{{ m.role }}{% endfor %}", false},
	{"{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set rest = messages[1:] %}{% else %}" +
		"{% set rest = messages %}{% endif %}{% for m in rest %}{{ m.content }}{{ loop.last }}" +
		"{{ (rest[loop.index] or {}).role }}{% endfor %}{{ rest | length }}{% for m in rest %}" +
		"{{ m.role }}{% endfor %}", true},
	{"{% set messages = messages[3:] %}{% for m in messages %}{{ m.content }}{{ loop.last }}{% else %}none{% endfor %}",
		true},
	{"{% for m in messages[1:] %}{{ m.content }}{% endfor %}{{ messages | length }}", true},
	{"{% for m in messages[:3] %}{{ m.content }}{% endfor %}", false},
	{"{% for m in messages[1:] if m.role != 'user' %}{{ m.content }}{% endfor %}", false},
	{"{% for m in messages if m.role != 'user' %}{{ m.content }}{{ loop.index }}{% endfor %}", false},
	{"{% set ns = namespace(n=0, all='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.all = m.role %}" +
		"{{ ns.n }}{% endfor %}{{ ns.n }}{{ ns.all }}{% set ns.n = 7 %}", false},
	{"{% set ns = namespace(all=[]) %}{% for m in messages %}{% set ns.all = ns.all + [m.role] %}{% endfor %}{{ ns.all }}",
		false},
	{"{% set ns = namespace(all=[]) %}{% set ns.all = messages %}{% for m in messages %}{{ ns.all | length }}{% endfor %}",
		false},
	{"{% for m in messages %}{% set ns = namespace() %}{% set ns.m = messages %}{{ ns.m | length }}{% endfor %}", false},
	{"{% set ns = [namespace(n=0)] %}{% for m in messages %}{% set x = ns[0] %}{% set x.n = x.n + 1 %}{{ x.n }}" +
		"{% endfor %}", false},
	{"{% set it = ['a', 'b'] | map('upper') %}{% for m in messages %}{% if loop.first %}{{ it | list }}{% endif %}" +
		"{% endfor %}", false},
	{"{% macro f(m) %}{{ messages | length }}{{ m.role }}{% endmacro %}{% for m in messages %}" +
		"{{ f(m) }}{% endfor %}", false},
	{"{% macro f(m) %}{{ m.role }}{{ messages[0].role }}{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}" +
		"{% macro g() %}{{ messages | length }}{{ add_generation_prompt }}{% endmacro %}{{ g() }}", true},
	{"{% set x = messages | length %}{% for m in messages %}{{ x }}{% endfor %}", false},
	{"{% set x = messages %}{% for m in messages %}{{ x | length }}{% endfor %}", false},
	{"{% set x = messages if messages[0] else [] %}{% for m in messages %}{{ x | length }}{% endfor %}", false},
	{"{% if true %}{% for m in messages %}{{ m.role }}{% endfor %}{% endif %}", false},
	{"{% for m in messages %}{{ m.role }}{% for o in messages %}{{ o.content }}{% endfor %}{% endfor %}", false},
	{"{% for a in [1, 2] %}{% for m in messages %}{{ m.role }}{% endfor %}{% endfor %}", false},
	{"{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}{{ m.content }}{% endfor %}{{ messages[-1] }}",
		true},
	{"{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}", true},
	{"{% for m in messages %}{% if (messages[loop.index] or {}).role == 'tool' %}{{ raise_exception('twice') }}" +
		"{% endif %}{{ m.content }}{% endfor %}{% if messages | length > 5 %}{{ raise_exception('long') }}{% endif %}", true},
	{"{% for m in messages %}{{ m.role }}{% endfor %}{% set messages = [] %}{% set n = 1 %}", true},
	{"{% set n = 0 %}{% for m in messages %}{{ m.role }}{% endfor %}{{ n }}{% set n = n + 1 %}{{ n }}", true},
	{"{% set ns = namespace() %}{% for m in messages %}{% if loop.first %}{% set ns.it = ['a'] | map('upper') %}" +
		"{% endif %}{% if loop.index == 3 or loop.last %}{{ ns.it | list }}{% set ns.it = [1] %}{% endif %}" +
		"{% endfor %}", false},
	{"{% set ns = namespace(n=0) %}{% for m in messages if m.role %}{% set ns.n = ns.n + 1 %}{% endfor %}" +
		"{% for m in messages %}{{ ns.n }}{% endfor %}", false},
	{"{% set rest = messages[3:] %}{% for m in messages %}{{ m.role }}{% endfor %}{{ rest | length }}", true},
	{"{% set a, b = messages %}{% for m in messages %}{{ a.role }}{% endfor %}", false},
	{"{% for r in messages %}{% generation %}{{ r.role }}{% endgeneration %}{% endfor %}", false},
}

// A prefix of a traced rendering equals a rendering of these messages alone, and the templates of models go on in it.
func TestPrefixesEqualRenderings(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	roles := strings.Fields("system user assistant tool")
	for _, name := range []string{"plain.jinja", "constructs.jinja", "space.jinja"} {
		traced = append(traced, struct {
			source string
			resume bool
		}{string(read(t, name)), name == "plain.jinja"})
	}
	for _, tc := range traced {
		tpl, err := Compile(tc.source)
		if err != nil {
			t.Fatal(tc.source, err)
		}
		resumed := false
		for range 20 {
			var list []Value
			for i := range 1 + rng.IntN(8) {
				m := NewDict()
				m.Set("role", roles[rng.IntN(len(roles))])
				m.Set("content", fmt.Sprint("c", i))
				list = append(list, m)
			}
			whole, err := tpl.Trace(Vars{"messages": list, "add_generation_prompt": false})
			if err != nil {
				continue
			}
			for range 3 * len(list) {
				n, prompt := rng.IntN(len(list)+1), rng.IntN(2) == 0
				want, _, wrong := tpl.Render(Vars{"messages": list[:n], "add_generation_prompt": prompt})
				same, rest, err := whole.Prefix(n, prompt)
				if got := whole.Text[:same] + rest; fmt.Sprint(err) != fmt.Sprint(wrong) || err == nil && got != want {
					t.Fatalf("%s: %d of %d messages, prompt %v:\n%s, %v, want\n%s, %v", tc.source, n, len(list), prompt, got,
						err, want, wrong)
				}
				resumed = resumed || same > 0 && n > 1
			}
		}
		if resumed != tc.resume {
			t.Errorf("%s: a prefix goes on in the loop: %v", tc.source, resumed)
		}
	}
}
