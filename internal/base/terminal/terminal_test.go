package terminal

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

// cases maps lines to their safe form.
var cases = map[string]string{
	"plain":                        "plain",
	"tab\tstays":                   "tab\tstays",
	"bell\a nul\x00 del\x7f cr\r":  "bell nul del cr",
	"\x1b[31;1mred\x1b[0m":         "red",
	"\x1b]0;title\x07after":        "after",
	"\x1b]8;;http://x\x1b\\link":   "link",
	"\x1bPq data\x1b\\after":       "after",
	"\x1b(Bcharset":                "charset",
	"\x1bcreset":                   "reset",
	"\x1b":                         "",
	"end\x1b[":                     "end",
	"end\x1b[12":                   "end",
	"\x1b[\x01after":               "after",
	"c1 \u009b31mred":              "c1 31mred",
	"bad \xff\xfe utf8":            "bad \ufffd\ufffd utf8",
	"user\u202egnp.exe":            "usergnp.exe",
	"two\u2028lines":               "twolines",
	"Größe 中文 🙂":                   "Größe 中文 🙂",
	"\x1b\xc3\xa9":                 "é",
	"\x1b[2K\x1b[1A\rcprun: done!": "cprun: done!",
}

func TestLine(t *testing.T) {
	for in, want := range cases {
		if got := Line(in); got != want {
			t.Errorf("Line(%q) = %q, want %q", in, got, want)
		}
		if got := Text(in); got != want {
			t.Errorf("Text(%q) = %q, want %q", in, got, want)
		}
	}
	if got := Text("one\ntwo \x1b]0;never ends\nthree\x1b(\n"); got != "one\ntwo \nthree\n" {
		t.Errorf("lines became %q", got)
	}
}

// fit fails if text still has control sequences.
func fit(t *testing.T, in any, out string, breaks bool) {
	t.Helper()
	for _, r := range out {
		if r != '\t' && !(breaks && r == '\n') && unsafe(r) {
			t.Fatalf("%q keeps %q", in, r)
		}
	}
}

func FuzzClean(f *testing.F) {
	for in := range cases {
		f.Add([]byte(in), 3)
	}
	f.Add([]byte("\x1b\x1b\x1b[[m"), 1)
	f.Fuzz(func(t *testing.T, line []byte, cut int) {
		fit(t, line, Line(string(line)), false)
		fit(t, line, Name(string(line)), false)
		whole := Text(string(line))
		fit(t, line, whole, true)
		var b bytes.Buffer
		w := NewWriter(&b)
		cut = min(max(cut, 0), len(line))
		w.Write(line[:cut])
		w.Write(line[cut:])
		if err := w.Flush(); err != nil || b.String() != whole && len(line) < maxHeld {
			t.Errorf("in two pieces, %d and the rest, %q is %q, whole %q; %v", cut, line, b.String(), whole, err)
		}
		quoted := must.Have(json.Marshal(string(line)))
		b.Reset()
		JSON(&b).Write(quoted)
		fit(t, line, b.String(), false)
		var a, c string
		if json.Unmarshal(quoted, &a) != nil || json.Unmarshal(b.Bytes(), &c) != nil || a != c {
			t.Errorf("%s became %s", quoted, b.String())
		}
	})
}

func TestName(t *testing.T) {
	long := strings.Repeat("x", 10000)
	for in, want := range map[string]string{
		"/data/Größe.txt": "/data/Größe.txt",
		"a\nb":            `"a\nb"`,
		"a\x1b[31m":       `"a\x1b[31m"`,
		"a\u202eb":        `"a\u202eb"`,
		"a\xff":           `"a\xff"`,
		long:              long[:253] + "......" + long[:256],
	} {
		if got := Name(in); in != long && got != want || len(got) > 2*maxName {
			t.Errorf("Name(%.40q) = %q, want %q", in, got, want)
		}
	}
}

func TestMessageIsBounded(t *testing.T) {
	if got := Message(errors.New("one \x1b[31mred")); got != "one red" {
		t.Errorf("%q", got)
	}
	var lines []string
	for i := range 1000 {
		lines = append(lines, fmt.Sprint(i, strings.Repeat("x", 10000)))
	}
	got := strings.Split(Message(errors.New(strings.Join(lines, "\n"))), "\n")
	if len(got) != maxLines+1 || got[maxLines] != "(880 lines more)" || len(got[0]) != maxWide {
		t.Errorf("%d lines, the first of %d bytes, the last %q", len(got), len(got[0]), got[len(got)-1])
	}
}

func TestFaults(t *testing.T) {
	var f Faults
	if f.Add(nil); f.Err() != nil {
		t.Errorf("no fault is %v", f.Err())
	}
	for i := range 30 {
		f.Addf("fault %d", i)
	}
	lines := strings.Split(f.Err().Error(), "\n")
	if len(lines) != MaxFaults+1 || lines[MaxFaults] != "and 10 faults more of these kinds" {
		t.Errorf("%q", lines)
	}
}
