package data

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"testing"
)

// read1 returns the documents and notes of one file by its bytes.
func read1(t testing.TB, name, content string) (texts []string, notes []string, err error) {
	t.Helper()
	dir := put(t, map[string]string{name: content})
	var keys Keys
	e := Encoding{Tokenizer: NewTokenizer(Bytes, 0), EOS: -1, Notes: &keys}
	err = e.Each(context.Background(), []string{filepath.Join(dir, name)}, func(_ int, d Document) error {
		var b []byte
		for _, id := range d.IDs {
			b = append(b, byte(id))
		}
		texts = append(texts, string(b))
		return nil
	})
	return texts, keys.Sorted(), err
}

func TestKindsOfFiles(t *testing.T) {
	const lines = `{"text":"a"}` + "\n" + `{"text":"b","n":NaN}` + "\n"
	const array = "[\n" + `{"text":"a"}, {"text":"b","x":[{"}":"]"},"\"}"]}` + "\n]\n"
	for _, tc := range []struct{ name, content, docs, note string }{
		{"a.jsonl", lines, "a,b", ""}, {"a.JSONL", lines, "a,b", ""}, {"a.ndjson", lines, "a,b", ""},
		{"a.jsonlines", lines, "a,b", ""}, {"a.NDJSON.gz", gz(lines), "a,b", ""}, {"a.jsonl.ZST", zst(lines), "a,b", ""},
		{"a.json", lines, "a,b", ""}, {"a.json", array, "a,b", ""}, {"a.JSON.GZ", gz(array), "a,b", ""},
		{"a.json", "{\n \"text\":\n\"a\"}", "a", ""}, {"a.json", "[]", "", ""}, {"a.json", " ", "", ""},
		{"a.json", `{"text":"a"}{"text":"b"}`, "a,b", ""}, {"a.json", "\ufeff" + array, "a,b", ""},
		{"a.jsonl", "\ufeff" + lines + "\r\n \t\r\n\ufeff" + lines, "a,b,a,b", ""}, {"a.jsonl", "\ufeff\n", "", ""},
		{"a.data", lines, "a,b", "files that end in .data are read as JSON records, since they begin with one"},
		{"a", "\ufeff" + lines, "a,b", "files without an extension are read as JSON records"},
		{"a.x.gz", gz(array), "a,b", "files that end in .x are read as JSON records"},
		{"a.py", "print()", "print()", "files that end in .py are read as text"},
		{"a.ipynb", `{"cells":[]}`, `{"cells":[]}`, "files that end in .ipynb are read as text"},
		{"a.data", `{"text":`, `{"text":`, "files that end in .data are read as text"},
		{"a.txt", lines, lines, "name them .jsonl to read records"}, {"a.txt", "\ufeffa", "\ufeffa", ""},
		{"a.md", "# a", "# a", ""},
	} {
		docs, notes, err := read1(t, tc.name, tc.content)
		said := strings.Join(notes, ",")
		if got := strings.Join(docs, ","); err != nil || got != tc.docs || (said == "") != (tc.note == "") ||
			!strings.Contains(said, tc.note) {
			t.Errorf("%s, %q: %q, %q, %v, want %q, %q", tc.name, tc.content, got, said, err, tc.docs, tc.note)
		}
	}
}

func TestWrongJSONFilesAreExplained(t *testing.T) {
	for content, want := range map[string]string{
		`[{"text":"a"}`:               "record 2: the array is cut short",
		`[`:                           "the array is cut short",
		`[{"text":"a"} {"text":"b"}]`: "no comma or ] after a value",
		`[{"text":"a"},]`:             "record 2: not a JSON object, but ']'",
		`[{"text":"a"}]x`:             "something follows the array",
		`[1]`:                         "record 1: not a JSON object, but '1'",
		`{"text":"a"`:                 "record 1: unexpected EOF",
		`{"text":"a"},`:               "record 2: not a JSON object, but ','",
		`[{"text":1}]`:                `record 1: the value of "text" is not a string`,
		`[{"text":"a"},{"text":}]`:    "record 2: not a JSON object: invalid",
		`{"data":[{"text":"a"}]}`:     `record 1: no key "text"`,
		"[{\"text\":\"\xff\"}]":       "record 1: not UTF-8",
	} {
		if docs, _, err := read1(t, "a.json", content); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %q, %v, want %s", content, docs, err, want)
		}
	}
}

// A file of blank lines is read by buffers, and their numbers count.
func TestBlankLinesAreCheap(t *testing.T) {
	blank := strings.Repeat("\n", 2<<20) + strings.Repeat(" \r\n", 1<<20)
	docs, _, err := read1(t, "a.jsonl.gz", gz(blank+`{"text":"a"}`+"\n\n"+`{"text":1}`))
	if want := fmt.Sprintf("line %d: ", 3<<20+3); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%q, %v, want %s", docs, err, want)
	}
}

// letters is a stream without an end.
type letters struct{}

func (letters) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'a'
	}
	return len(p), nil
}

func TestLongRecordsAreExplained(t *testing.T) {
	r := &recordFile{in: bufio.NewReader(io.MultiReader(strings.NewReader(`{"text":"`), letters{}))}
	for line, err := range r.lines {
		if err == nil || !strings.Contains(err.Error(), "split it, or write it as a text file") {
			t.Errorf("%d bytes, %v", len(line), err)
		}
	}
	if _, err := r.value(); err == nil {
		t.Error("a value of letters")
	}
}

// FuzzValues checks that a file of JSON gives its records as they are, or an error.
func FuzzValues(f *testing.F) {
	f.Add([]byte(`[{"text":"a"}, {"text":"b"}]`))
	f.Add([]byte("\ufeff{\"text\":\"}\"}\n{}"))
	f.Add([]byte(`[{"a":["\\\"}"]}`))
	f.Fuzz(func(t *testing.T, content []byte) {
		r := &recordFile{in: bufio.NewReader(bytes.NewReader(content))}
		for value, err := range r.values {
			if err == nil && (len(value) < 2 || !bytes.Contains(content, value)) {
				t.Fatalf("%q of %q", value, content)
			}
		}
	})
}
