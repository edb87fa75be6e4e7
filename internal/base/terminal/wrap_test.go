package terminal

import (
	"strings"
	"testing"
)

func TestWrap(t *testing.T) {
	for _, c := range [][2]string{
		{"short\n", "short\n"},
		{"label   one two three four five\n", "label   one two\n        three four\n        five\n"},
		{"label   one, two a four\n", "label   one, two a\n        four\n"},
		{"label   oneone, a four\n", "label   oneone,\n        a four\n"}, // after the comma, not later
		{"        one two three four\n", "        one two\n          three\n          four\n"},
		{"label   one two 12 GiB four\n", "label   one two\n        12 GiB four\n"},
		{"label   " + strings.Repeat("x", 30) + " end\n", "label   " + strings.Repeat("x", 30) + "\n        end\n"},
		{strings.Repeat("y", 40) + "\nnext", strings.Repeat("y", 40) + "\nnext"},
		{"label   ééééééé ééé\n", "label   ééééééé ééé\n"}, // letters, not bytes
		{"", ""},
	} {
		if got := Wrap(c[0], 19, 8); got != c[1] {
			t.Errorf("%q is\n%q, want\n%q", c[0], got, c[1])
		}
	}
}
