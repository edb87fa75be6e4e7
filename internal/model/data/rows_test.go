package data

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
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
		"ids.parquet": "ids", "large-ids.parquet": "ids",
		"fixed.parquet": "fixed", "both.parquet": "both",
		"many.parquet": "many",
	} {
		want, err := openRows(t, filepath.Join("testdata/rows", lines+".jsonl"))
		if err != nil {
			t.Fatal(err)
		}
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
		"chosen":   `record 1: key "chosen": preference pairs`,
		"messages": `record 1: "messages" is not in this build`,
		"mask":     `record 1: key "my_mask" is not read`,
		"outside":  `record 2: input_ids[0] is 1000; want an id below vocab_size 300`,
	} {
		path := filepath.Join("testdata/rows", "bad-"+name+".parquet")
		if _, err := openRows(t, path); err == nil || !strings.Contains(err.Error(), path+": "+want) {
			t.Errorf("%s: %v, want %s", path, err, want)
		}
	}
	_, err := openRows(t, "testdata/rows/bad-lz4.parquet")
	if err == nil || !strings.Contains(err.Error(), "column text is compressed by LZ4, which is not read") {
		t.Errorf("LZ4: %v", err)
	}
}

// eachDamage calls try with every beginning of a file, then with every byte of it changed.
func eachDamage(t *testing.T, from string, try func(what, path string, cut bool)) {
	whole, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), filepath.Base(from))
	write := func(content []byte) {
		if err := os.WriteFile(path, content, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	for n := range whole {
		write(whole[:n])
		try(fmt.Sprintf("%d bytes of %s", n, from), path, true)
		changed := append([]byte(nil), whole...)
		changed[n] ^= 0xff
		write(changed)
		try(fmt.Sprintf("byte %d of %s changed", n, from), path, false)
	}
}

// The formats have no checksums of all bytes, so a changed byte may go unnoticed.
func TestDamagedRowsAreErrors(t *testing.T) {
	for _, name := range []string{"text.parquet", "both.parquet"} {
		eachDamage(t, filepath.Join("testdata/rows", name), func(what, path string, cut bool) {
			if _, err := openRows(t, path); cut && err == nil || err != nil && !strings.Contains(err.Error(), path) {
				t.Errorf("%s: %v", what, err)
			}
		})
	}
}

// FuzzParquet checks that rows of any bytes are documents or an error.
func FuzzParquet(f *testing.F) {
	paths, err := filepath.Glob("testdata/rows/*.parquet")
	if err != nil || len(paths) == 0 {
		f.Fatal(err)
	}
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(content)
	}
	path := filepath.Join(f.TempDir(), "a.parquet")
	f.Fuzz(func(t *testing.T, content []byte) {
		if err := os.WriteFile(path, content, 0o666); err != nil {
			t.Fatal(err)
		}
		_, _ = openRows(t, path)
	})
}
