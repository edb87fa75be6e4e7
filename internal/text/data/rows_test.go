package data

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

// rowsVocab bounds the ids of testdata/rows, which make.py writes.
const rowsVocab = 300

func openRows(t testing.TB, path string) (string, error) {
	return opened(t, path, NewTokenizer(Bytes, 0), 256, rowsVocab)
}

// pyarrow and datasets wrote the files.
func TestRowsEqualLines(t *testing.T) {
	for path, lines := range map[string]string{
		"text.parquet": "text", "large.parquet": "text", "dictionary.parquet": "text", "view.parquet": "text",
		"large.arrow": "text", "dictionary.arrow": "text", "text-dataset": "text",
		"text-dataset/*.arrow": "text",
		"ids.parquet":          "ids", "large-ids.parquet": "ids", "large-ids.arrow": "ids", "ids-dataset": "ids",
		"fixed.parquet": "fixed", "fixed.arrow": "fixed", "both.parquet": "both",
		"many.parquet": "many", "many.arrow": "many",
	} {
		want := must.Have(openRows(t, filepath.Join("testdata/rows", lines+".jsonl")))
		if got, err := openRows(t, filepath.Join("testdata/rows", path)); err != nil || got != want {
			t.Errorf("%s: %s, %v, want %s", path, got, err, want)
		}
	}
}

func TestWrongRowsAreExplained(t *testing.T) {
	for name, want := range map[string]string{
		"null-id":  `record 1: the value of "input_ids" is not a list of integers`,
		"float":    `record 1: the value of "input_ids" is not a list of integers`,
		"nested":   `record 1: the value of "input_ids" is not a list of integers`,
		"binary":   `record 1: the value of "text" is not a string`,
		"chosen":   `record 1: key "chosen" is not read: preference pairs`,
		"messages": `record 1: a conversation cannot be written`,
		"mask":     `record 1: key "my_mask" is not read`,
		"outside":  `record 2: input_ids[0] is 1000; want an id below vocab_size 300`,
	} {
		for _, ext := range []string{".parquet", ".arrow"} {
			path := filepath.Join("testdata/rows", "bad-"+name+ext)
			if _, err := openRows(t, path); err == nil || !strings.Contains(err.Error(), path+": "+want) {
				t.Errorf("%s: %v, want %s", path, err, want)
			}
		}
	}
	_, err := openRows(t, "testdata/rows/view.arrow")
	if err == nil || !strings.Contains(err.Error(), "a type of Arrow (number 24) that is not read, such as a view") {
		t.Errorf("a view: %v", err)
	}
	_, err = openRows(t, "testdata/rows/bad-lz4.parquet")
	if err == nil || !strings.Contains(err.Error(), "column text is compressed by LZ4, which is not read") {
		t.Errorf("LZ4: %v", err)
	}
}

// eachDamage calls try with every byte of a file changed, then with every beginning of it.
func eachDamage(t *testing.T, from string, try func(what, path string, cut bool)) {
	whole := must.Have(os.ReadFile(from))
	path := filepath.Join(t.TempDir(), filepath.Base(from))
	must.Do(t, os.WriteFile(path, whole, 0o666))
	f := must.Have(os.OpenFile(path, os.O_WRONLY, 0))
	defer f.Close()
	write := func(b byte, at int) {
		must.Have(f.WriteAt([]byte{b}, int64(at)))
	}
	for n, b := range whole {
		write(b^0xff, n)
		try(fmt.Sprintf("byte %d of %s changed", n, from), path, false)
		write(b, n)
	}
	for n := len(whole) - 1; n >= 0; n-- {
		must.Do(t, f.Truncate(int64(n)))
		try(fmt.Sprintf("%d bytes of %s", n, from), path, true)
	}
}

// The formats have no checksums of all bytes, so a changed byte may go unnoticed.
func TestDamagedRowsAreErrors(t *testing.T) {
	for _, name := range []string{"text.parquet", "both.parquet", "fixed.arrow", "dictionary.arrow", "large.arrow"} {
		eachDamage(t, filepath.Join("testdata/rows", name), func(what, path string, cut bool) {
			if _, err := openRows(t, path); cut && err == nil || err != nil && !strings.Contains(err.Error(), path) {
				t.Errorf("%s: %v", what, err)
			}
		})
	}
}

func TestNothingFollowsAStream(t *testing.T) {
	stream := must.Have(os.ReadFile("testdata/rows/fixed.arrow"))
	for content, want := range map[string]string{
		string(stream) + string(stream): fmt.Sprintf("the stream ends at byte %d of %d", len(stream), 2*len(stream)),
		"ARROW1\x00\x00":                "this is Arrow's file format (Feather)",
		"text":                          "no message of Arrow at byte 0",
	} {
		dir := put(t, map[string]string{"a.arrow": content})
		if _, err := openRows(t, filepath.Join(dir, "a.arrow")); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

func TestDatasetDirectories(t *testing.T) {
	stream := must.Have(os.ReadFile("testdata/rows/fixed.arrow"))
	for _, tc := range []struct {
		files map[string]string
		want  string
	}{
		{map[string]string{"state.json": `{"_data_files":[{"filename":"b.arrow"},{"filename":"a.arrow"}]}`}, ""},
		{map[string]string{"state.json": `{"_data_files":[{"filename":"c.arrow"}]}`}, "c.arrow: no such file"},
		{map[string]string{"state.json": `{"_data_files":[{"filename":"../a.arrow"}]}`}, `"../a.arrow" is not an .arrow`},
		{map[string]string{"state.json": `{"_data_files":[{"filename":"a.txt"}]}`}, `"a.txt" is not an .arrow`},
		{map[string]string{"state.json": `{"_data_files":[{"filename":"a.arrow"}],"_indices_files":[{"filename":"i"}]}`},
			"call flatten_indices()"},
		{map[string]string{"state.json": "{"}, "state.json: unexpected end of JSON"},
		{map[string]string{"dataset_dict.json": "{}"}, "several splits; name one, as in"},
		{map[string]string{}, "only directories"},
	} {
		tc.files["a.arrow"], tc.files["b.arrow"] = string(stream), string(stream)
		dir := put(t, tc.files)
		got, err := openRows(t, dir)
		if tc.want == "" {
			if err != nil || !strings.HasPrefix(got, "[1 2 3 4 5 6 1 2 3 4 5 6]") {
				t.Errorf("%s, %v", got, err)
			}
		} else if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%v: %v, want %s", tc.files["state.json"], err, tc.want)
		}
	}
	d, err := Open(Source{Paths: []string{"testdata/rows/ids-dataset"}, Tokenizer: NewTokenizer("", 0), EOS: -1, Vocab: 300})
	if err != nil || d.Files() != 2 {
		t.Errorf("%v; want 2 files", err)
	}
}

func fuzzRows(f *testing.F, ext string) {
	paths, err := filepath.Glob("testdata/rows/*" + ext)
	if err != nil || len(paths) == 0 {
		f.Fatal(err)
	}
	for _, path := range paths {
		content := must.Have(os.ReadFile(path))
		f.Add(content)
	}
	path := filepath.Join(f.TempDir(), "a"+ext)
	f.Fuzz(func(t *testing.T, content []byte) {
		must.Do(t, os.WriteFile(path, content, 0o666))
		_, _ = openRows(t, path)
	})
}

// FuzzParquet checks that rows of any bytes are documents or an error.
func FuzzParquet(f *testing.F) { fuzzRows(f, ".parquet") }

// FuzzArrow checks that rows of any bytes are documents or an error.
func FuzzArrow(f *testing.F) { fuzzRows(f, ".arrow") }
