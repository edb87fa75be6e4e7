package tokenizer

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/text/unicode/norm"
)

// with returns a small tokenizer.json with further entries.
func with(entries string) string {
	return `{"version":"1.0","model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":[["a","b"]]}` + entries + `}`
}

func TestWhatIsNotKnownIsRefusedByName(t *testing.T) {
	model := func(m string) string { return `{"model":` + m + `}` }
	norm := func(n string) string { return with(`,"normalizer":` + n) }
	pre := func(p string) string { return with(`,"pre_tokenizer":` + p) }
	post := func(p string) string { return with(`,"post_processor":` + p) }
	long := strings.Repeat("a", 2000)
	regex := func(r string) string {
		return pre(`{"type":"Split","behavior":"Isolated","pattern":{"Regex":` + r + `}}`)
	}
	for _, tc := range []struct{ raw, want string }{
		{`x`, "not a tokenizer.json"},
		{`{}`, "model: it is missing"},
		{with(`,"version":"2.0"`), `version "2.0"`},
		{model(`{"type":"Neural","vocab":{}}`), `the type "Neural" is not known; BPE, Unigram`},
		{model(`{"vocab":{"a":0}}`), "it has no type"},
		{model(`{"type":"BPE","vocab":{"a":0},"merges":[],"dropout":0.1}`),
			"dropout 0.1: ids would be drawn at random"},
		{model(`{"type":"BPE","vocab":{"a":0,"b":0},"merges":[]}`), `"a" and "b" have the same id 0`},
		{model(`{"type":"BPE","vocab":{"a":-1},"merges":[]}`), "has the id -1"},
		{model(`{"type":"BPE","vocab":{"a":0}}`), "merges are missing"},
		{model(`{"type":"BPE","merges":[]}`), "vocab is missing"},
		{model(`{"type":"BPE","vocab":{"a":0},"merges":["a b c"]}`), `merge 0: "a b c" is not two tokens`},
		{model(`{"type":"BPE","vocab":{"a":0},"merges":[["a","c"]]}`), "one of them is no token"},
		{model(`{"type":"BPE","vocab":{"a":0},"merges":[["a","a"]]}`), `merge 0: "aa" is no token`},
		{model(`{"type":"Unigram","vocab":[["a",0]],"unk_id":1}`), "unk_id 1 of 1 tokens"},
		{model(`{"type":"Unigram","vocab":[["a",0]],"unk_id":0,"alpha":0.1}`), "alpha 0.1"},
		{norm(`{"type":"Shout"}`), `normalizer: the type "Shout" is not known`},
		{norm(`{"type":"Sequence","normalizers":[{"type":"Shout"}]}`), `normalizer: the type "Shout" is not known`},
		{norm(`{"type":"Precompiled","precompiled_charsmap":"!"}`), "not base64"},
		{norm(`{"type":"Precompiled","precompiled_charsmap":"/////w=="}`), "a trie of"},
		{norm(`{"type":"Replace","pattern":{"Regex":"a"}}`), "Replace: no content"},
		{norm(`{"type":"Replace","pattern":{"Glob":"a"},"content":""}`), "neither"},
		{norm(strings.Repeat(`{"type":"Sequence","normalizers":[`, 20) + strings.Repeat(`]}`, 20)), "more than 8 deep"},
		{pre(`{"type":"UnicodeScripts"}`), `pre_tokenizer: the type "UnicodeScripts" is not known`},
		{pre(`{"type":"Split","behavior":"Odd","pattern":{"String":"a"}}`), `the behavior "Odd" is not known`},
		{pre(`{"type":"Metaspace","replacement":"ab"}`), `"ab" is not one character`},
		{pre(`{"type":"Metaspace","replacement":"_","prepend_scheme":"last"}`), `prepend_scheme "last"`},
		{pre(`{"type":"Metaspace","replacement":"_","add_prefix_space":false}`), "without prepend_scheme never"},
		{pre(`{"type":"FixedLength","length":0}`), "the length 0"},
		{regex(`"(?<=a)b"`), "lookbehind is not read here"},
		{regex(`"(a"`), "a ( that nothing closes"},
		{regex(`"a)"`), "a ) that closes nothing"},
		{regex(`"[a"`), "a [ that nothing closes"},
		{regex(`"(a*)*"`), "a repeat of what can be empty"},
		{regex(`"a{2000}"`), "at most {1000} is read"},
		{regex(`"(?:(?:(?:a{999}){999}){999}){999}"`), "multiply to more than"},
		{regex(`"\\p{Klingon}"`), `\p{Klingon} is not known`},
		{regex(`"\\1"`), `\1 is not read here`},
		{regex(`"\\bx"`), `\b is not read here`},
		{regex(`"[[:alpha:]]"`), `the class [:alpha:]] is not read here`},
		{regex(`"(?i:stra\u00dfe)"`), "where case is ignored"},
		{regex(`"(?i:ss)"`), `"ss" where case is ignored`},
		{with(`,"added_tokens":[{"content":"` + long + `","id":3}]`), "has 2000 bytes; at most 1024"},
		{model(`{"type":"Unigram","vocab":[["` + long + `",0]]}`), "has 2000 bytes; at most 1024"},
		{model(`{"type":"WordPiece","vocab":{"` + long + `":0}}`), "has 2000 bytes; at most 1024"},
		{norm(`{"type":"Precompiled","precompiled_charsmap":"` +
			base64.StdEncoding.EncodeToString([]byte("\x04\x00\x00\x00\x00\x00\x00\x00"+long)) + `"}`),
			"a text of 2000 bytes replaces one"},
		{regex(`"` + strings.Repeat("a", 5000) + `"`), "the pattern has 5000 bytes"},
		{post(`{"type":"Polish"}`), `post_processor: the type "Polish" is not known`},
		{post(`{"type":"TemplateProcessing","single":[]}`), "single has no text in it"},
		{post(`{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"x"}},{"Sequence":{"id":"A"}}]}`),
			`special_tokens has no "x"`},
		{post(`{"type":"BertProcessing","cls":["a",0]}`), "cls or sep is missing"},
		{with(`,"added_tokens":[{"content":"c","id":9}]`),
			`the token "c" has the id 9, and 3 by the order of the file`},
		{with(`,"normalizer":{"type":"Lowercase"},"added_tokens":[{"content":"C","id":3,"normalized":true},{"content":"c","id":4,"normalized":true}]`), "looked for as the same text"},
	} {
		if _, err := Parse([]byte(tc.raw)); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%.120s: got %v, want %q", tc.raw, err, tc.want)
		}
	}
}

// A normalizer must not turn a short text into a very long one.
func TestNormalizersDoNotFillTheMemory(t *testing.T) {
	double := strings.Repeat(`{"type":"Replace","pattern":{"String":"a"},"content":"aaaa"},`, 40)
	for _, n := range []string{
		`{"type":"Replace","pattern":{"String":"a"},"content":"` + strings.Repeat("b", 1<<20) + `"}`,
		`{"type":"Sequence","normalizers":[` + strings.TrimSuffix(double, ",") + `]}`,
	} {
		tok := parse(t, []byte(with(`,"normalizer":`+n)))
		if _, err := tok.NewEncoder().Append(nil, strings.Repeat("a", 10)); err == nil ||
			!strings.Contains(err.Error(), "the normalizer makes") {
			t.Errorf("%.60s: %v", n, err)
		}
	}
}

// In older files the model has no type, and merges are lines.
func TestOlderFilesAreRead(t *testing.T) {
	for _, m := range []string{
		`{"vocab":{"a":0,"b":1,"ab":2},"merges":["#version: 0.2","a b"]}`,
		`{"vocab":[["a",-1],["b",-1],["ab",-1]],"unk_id":0}`,
	} {
		if got := fmt.Sprint(encode(t, parse(t, []byte(`{"model":`+m+`}`)), "abb")); got != "[2 1]" {
			t.Errorf("%s: %s", m, got)
		}
	}
}

// Added tokens strip the spaces beside them as the file requires. Of two tokens with spaces between, the first strips
// these.
func TestAddedTokensStripSpaces(t *testing.T) {
	tok := parse(t, []byte(`{"model":{"type":"BPE","vocab":{"a":0," ":1},"merges":[]},"added_tokens":[`+
		`{"id":2,"content":"<l>","single_word":false,"lstrip":true,"rstrip":false,"normalized":false,"special":true},`+
		`{"id":3,"content":"<r>","single_word":false,"lstrip":false,"rstrip":true,"normalized":false,"special":true},`+
		`{"id":4,"content":"<n>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},`+
		`{"id":5,"content":"\t","single_word":false,"lstrip":true,"rstrip":true,"normalized":false,"special":true}]}`))
	for text, want := range map[string]string{
		"a\t \ta": "[0 5 0]", "a \t\t": "[0 5]",
		"a  <l>  a": "[0 2 1 1 0]", "a  <r>  a": "[0 1 1 3 0]", "a  <n>  a": "[0 1 1 4 1 1 0]",
		"<r>  <l>a": "[3 2 0]", "<l>  <r>  ": "[2 1 1 3]", "  <l>": "[2]", "<r>  ": "[3]", "<n>  <l>  <l>": "[4 2 2]",
	} {
		if got := fmt.Sprint(encode(t, tok, text)); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

// Among paths with equal scores to a place, the library keeps the one with the earliest last piece.
func TestTiesOfUnigrams(t *testing.T) {
	for vocab, want := range map[string]string{
		`["a",-1],["b",-1],["ab",-2]`:                     "[2]",
		`["a",-1],["b",-1],["ab",-2.5]`:                   "[0 1]",
		`["a",-1],["b",-1],["c",-1],["ab",-2],["bc",-2]`:  "[0 4]",
		`["a",-1],["b",-1],["c",-1],["bc",-2],["ab",-3]`:  "[0 3]",
		`["a",-1],["b",-1],["c",-1],["ab",-2],["abc",-3]`: "[4]",
	} {
		text := "ab"
		if strings.Contains(vocab, `"c"`) {
			text = "abc"
		}
		if got := fmt.Sprint(encode(t, parse(t, []byte(`{"model":{"vocab":[`+vocab+`],"unk_id":0}}`)),
			text)); got != want {
			t.Errorf("%s: %s, want %s", vocab, got, want)
		}
	}
}

func TestTruncationAndPaddingAreNotApplied(t *testing.T) {
	tok := parse(t, []byte(
		with(`,"truncation":{"max_length":1,"strategy":"LongestFirst","stride":0},"padding":{"strategy":{"Fixed":9},"pad_id":0}`)))
	if got := fmt.Sprint(encode(t, tok, "aba")); got != "[2 0]" {
		t.Error(got)
	}
}

// Any number of marks is put in order. The limit of 30 marks of x/text does not show.
func TestFormsHaveNoLimitOfMarks(t *testing.T) {
	nfc, nfd, nfkc, nfkd := forms["NFC"], forms["NFD"], forms["NFKC"], forms["NFKD"]
	for n := range 100 {
		s := "e" + strings.Repeat("\u0301\u0323", n) + "x"
		for f, want := range map[form]string{
			nfd: "e" + strings.Repeat("\u0323", n) + strings.Repeat("\u0301", n) + "x",
		} {
			if got := f.normalizeText(s); got != want {
				t.Fatalf("%d marks: %q", 2*n, got)
			}
		}
	}
	for _, s := range []string{"", "abc", "e\u0301", "\u1100\u1161\u11a8", "\u212b\ufb01\u1e9b\u0323",
		"a\u0300\u0345\u0301b"} {
		for _, f := range []form{nfc, nfd, nfkc, nfkd} {
			if got, want := f.normalizeText(s), f.form.String(s); got != want {
				t.Errorf("%q: %q, want %q", s, got, want)
			}
			if got, want := f.stretch(s, true), f.form.String(s); got != want {
				t.Errorf("%q without x/text's help: %q, want %q", s, got, want)
			}
		}
	}
	// U+1DFA came with Unicode 14. The library uses an older version and does not move it.
	if s := "a\u0301\u1dfa"; nfd.normalizeText(s) != s || norm.NFD.String(s) == s {
		t.Errorf("%q", nfd.normalizeText(s))
	}
}

func TestSets(t *testing.T) {
	a := union(set{{5, 9}}, set{{1, 2}, {3, 3}}, set{{20, maxRune}})
	if fmt.Sprint(a, a.not(), a.and(set{{8, 21}}), a.not().not()) != fmt.Sprint(set{{1, 3}, {5, 9}, {20, maxRune}},
		set{{0, 0}, {4, 4}, {10, 19}}, set{{8, 9}, {20, 21}}, a) {
		t.Error(a, a.not(), a.and(set{{8, 21}}))
	}
	c := newClass(a)
	for r := rune(0); r < 2000; r++ {
		if c.has(r) != a.has(r) {
			t.Fatalf("%d", r)
		}
	}
}
