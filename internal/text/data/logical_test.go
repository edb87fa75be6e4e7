package data

import (
	"encoding/json"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// values returns the rows of a file as values with all digits.
func values(t testing.TB, path string) (list []any) {
	t.Helper()
	f, size, err := openSized(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	records, free, err := recordsOf(f, path, size)
	if err != nil {
		t.Fatal(err)
	}
	defer free()
	for line, err := range records.each {
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		var v any
		d := json.NewDecoder(strings.NewReader(string(line)))
		d.UseNumber()
		if err := d.Decode(&v); err != nil {
			t.Fatalf("%s: %v: %s", path, err, line)
		}
		list = append(list, v)
	}
	return list
}

// Values of extension types are logical, also inside of lists and structs (scripts/oracle/logical.py).
func TestExtensionTypesAreLogical(t *testing.T) {
	want := values(t, "testdata/rows/logical.jsonl")
	for _, name := range []string{"logical.arrow", "logical-large.arrow", "logical.parquet", "logical-large.parquet"} {
		got := values(t, "testdata/rows/"+name)
		if name == "logical-large.parquet" || name == "logical.parquet" { // Parquet has no type for bool8
			for i := range got {
				kwargs := got[i].(map[string]any)["chat_template_kwargs"].(map[string]any)
				kwargs["b"] = kwargs["b"] == json.Number("1")
			}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s:\n%v, want\n%v", name, got, want)
		}
	}
	for _, ext := range []string{".arrow", ".parquet"} {
		path := "testdata/rows/bad-json" + ext
		_, err := openRows(t, path)
		if err == nil || !strings.Contains(err.Error(), "record 2: column tools: a value of type json is not JSON") {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestEmptyRowGroups(t *testing.T) {
	for name, want := range map[string]int{"first": 3, "middle": 3, "last": 3, "all": 0} {
		path := "testdata/rows/empty-" + name + ".parquet"
		if got := values(t, path); len(got) != want || want > 0 && got[2].(map[string]any)["text"] != "three" {
			t.Errorf("%s: %v, want %d rows", path, got, want)
		}
		kind, err := Kind(path, "")
		if err != nil || want > 0 && kind != FormatText || want == 0 && kind != "" {
			t.Errorf("%s: kind %q, %v", path, kind, err)
		}
	}
	d, err := Open(Source{Paths: []string{filepath.FromSlash("testdata/rows/empty-*.parquet")},
		Tokenizer: NewTokenizer(Bytes, 0), EOS: 256, Vocab: 257})
	if err != nil || d.Files() != 4 || d.Len() != 3*int64(len("onetwothree")+3) {
		t.Errorf("%v", err)
	}
}
