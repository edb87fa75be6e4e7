package tokenizer

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/cprun/cprun/internal/base/must"
)

// found returns the matches of a pattern, in the form of Go's regexp.
func found(t testing.TB, pattern, text string) (out [][]int) {
	t.Helper()
	p := must.Have(compile(pattern))
	prev := 0
	must.Do(t, new(matcher).each(p, text, func(from, to int, match bool) error {
		if from != prev && from != to {
			t.Fatalf("%q: a stretch from %d, after one that ended at %d", pattern, from, prev)
		}
		prev = to
		if match {
			out = append(out, []int{from, to})
		}
		return nil
	}))
	if prev != len(text) {
		t.Fatalf("%q: the stretches end at %d of %d", pattern, prev, len(text))
	}
	return out
}

// For patterns that Go's regexp knows, the matches are equal.
func TestMatchesAreThoseOfGo(t *testing.T) {
	text := "It's 12345 o'clock,  isn't\n\nit? \t AB-ab_9 aaabbb éèÉ中文 [x]{2}{a} ~!\r\n"
	for _, p := range []string{
		`a`, `ab|a`, `a|ab`, `a+?b`, `a*?b+`, `(?:ab|a)+b?`, `[a-c]{2}`, `[a-c]{2,}`, `[a-z]{2,3}b?`, `[^a-z ]+`,
		`[\w-]+`, `.+`, `\d{1,3}`, `a?a?a?aab`, `(?:a|b|ab){2,4}`,
		`(?i:IT|IS|N'T)`, `(?i)[a-c]+`, `\x61|\x{e9}`, `[\]\[]`, `[-a]+`, `[a-]+`, `\p{Lu}\p{Ll}*`, `\P{L}+`, `\p{^L}+`,
		`{a}`, `x]`, `\A\p{L}+`, `\s\z`, `(?:a{2}){1,2}`, `[[:]`, `\n+`, `\t`, `a{,2}b`,
	} {
		goes := strings.NewReplacer(`\p{^L}`, `\P{L}`, `[[:]`, `[\[:]`, `{,2}`, `{0,2}`, `\d`, `\p{Nd}`, `\s`,
			`[\s\p{Z}]`, `[\w-]`, `[\pL\pN_-]`).Replace(p)
		if p == `[[:]` {
			continue // refused: it begins a class such as [:alpha:]
		}
		re, err := regexp.Compile(goes)
		if err != nil {
			t.Fatalf("%s: %v", goes, err)
		}
		if got, want := fmt.Sprint(found(t, p, text)), fmt.Sprint(re.FindAllStringIndex(text, -1)); got != want {
			t.Errorf("%s: %s, want %s", p, got, want)
		}
	}
}

// These matches of patterns that Go's regexp lacks were worked out by hand.
func TestMatchesThatGoDoesNotKnow(t *testing.T) {
	for _, tc := range []struct{ pattern, text, want string }{
		{`\s+(?!\S)`, "a   b  ", "[[1 3] [5 7]]"},
		{`a(?=b)`, "abaab", "[[0 1] [3 4]]"},
		{`a++b|a`, "aab a", "[[0 3] [4 5]]"},
		{`a++ab|b`, "aaab", "[[3 4]]"},
		{`(?>a+)ab|b`, "aaab", "[[3 4]]"},
		{`a{2}+`, "aaaaa", "[[0 4]]"},
		{`[\p{L}&&[^a-c]]+`, "abxcyz1", "[[2 3] [4 6]]"},
		{`\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))`, "1234567 89", "[[0 1] [1 4] [4 7] [8 10]]"},
		{`^b|a$`, "a\nb\nba", "[[0 1] [2 3] [4 5] [5 6]]"},
		{`(?i:'s)`, "'S'\u017f's", "[[0 2] [2 5] [5 7]]"},
		{`x*`, "axxb", "[[0 0] [1 3] [4 4]]"},
	} {
		if got := fmt.Sprint(found(t, tc.pattern, tc.text)); got != tc.want {
			t.Errorf("%s in %q: %s, want %s", tc.pattern, tc.text, got, tc.want)
		}
	}
}

// FuzzPattern checks that an accepted pattern cuts any text into stretches that add up to the text.
func FuzzPattern(f *testing.F) {
	f.Add(gpt2, "it's a  test\n")
	f.Add(`(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\s+(?!\S)|[a&&[^b]]{1,3}?|^x++$`, "A'S b")
	f.Fuzz(func(t *testing.T, pattern, text string) {
		p, err := compile(pattern)
		if err != nil || !utf8.ValidString(text) || len(text) > 200 {
			return
		}
		var out strings.Builder
		err = new(matcher).each(p, text, func(from, to int, _ bool) error {
			out.WriteString(text[from:to])
			return nil
		})
		if err == nil && out.String() != text {
			t.Fatalf("%q", out.String())
		}
	})
}
