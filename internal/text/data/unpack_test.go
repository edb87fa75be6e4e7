package data

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/cprun/cprun/internal/base/must"
)

func gz(text string) string {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	w.Write([]byte(text))
	w.Close()
	return b.String()
}

func zst(text string) string {
	return string(must.Have(zstd.NewWriter(nil)).EncodeAll([]byte(text), nil))
}

// opened returns the tokens, labels and packed documents of one file.
func opened(t testing.TB, path string, tok *Tokenizer, eos, vocab int) (string, error) {
	d, err := Open(Source{Paths: []string{path}, Tokenizer: tok, EOS: eos, Vocab: vocab})
	if err != nil {
		return "", err
	}
	labels := make([]int32, d.Len())
	must.Do(t, d.readLabels(labels, 0))
	docs, _, err := d.documents()
	return fmt.Sprint(all(t, d), labels, docs), err
}

func TestCompressedFilesEqualPlainOnes(t *testing.T) {
	long := strings.Repeat("The Light is refracted.\n", 12_000) // longer than a buffer
	lines := `{"text":"one"}` + "\n\n" + `{"input_ids":[1,2],"labels":[-100,2]}` + "\n" + `{"text":"` +
		strings.Repeat("long ", 54_000) + `"}`
	half := len(long) / 2
	dir := put(t, map[string]string{"a.txt": long, "a.txt.gz": gz(long), "a.txt.zst": zst(long),
		"parts/a.txt.gz": gz(long[:half]) + gz(long[half:]), "parts/a.txt.zst": zst(long[:half]) + zst(long[half:]),
		"b.jsonl": lines, "b.jsonl.gz": gz(lines), "b.jsonl.zst": zst(lines),
		"none.txt": "", "none.txt.gz": gz(""), "none.txt.zst": zst("")})
	packed := map[string][]string{"a.txt": {"a.txt.gz", "a.txt.zst", "parts/a.txt.gz", "parts/a.txt.zst"},
		"b.jsonl": {"b.jsonl.gz", "b.jsonl.zst"}, "none.txt": {"none.txt.gz", "none.txt.zst"}}
	for tok, ends := range map[*Tokenizer][]int{
		asBytes:                   {-1, '\n', 602}, // '\n' also cuts raw bytes
		NewTokenizer(llama(t), 0): {602},
	} {
		for _, eos := range ends {
			for name, others := range packed {
				if name == "none.txt" && eos < 0 {
					continue // its documents have no end
				}
				want := must.Have(opened(t, filepath.Join(dir, name), tok, eos, llamaVocab))
				for _, other := range others {
					if got, err := opened(t, filepath.Join(dir, other), tok, eos, llamaVocab); err != nil || got != want {
						t.Errorf("%s, eos %d: %.200s, %v, want %.200s", other, eos, got, err, want)
					}
				}
			}
		}
	}
}

func TestDamagedCompressedFilesAreErrors(t *testing.T) {
	text := `{"text":"some words"}` + "\n" + `{"text":"other words"}` + "\n"
	for ext, whole := range map[string]string{".gz": gz(text), ".zst": zst(text)} {
		for _, name := range []string{"a.jsonl", "a.txt"} {
			path := filepath.Join(t.TempDir(), name+ext)
			write := func(content string) (string, error) {
				must.Do(t, os.WriteFile(path, []byte(content), 0o666))
				return opened(t, path, NewTokenizer(Bytes, 0), 256, 257)
			}
			want := must.Have(write(whole))
			for n := range len(whole) {
				if got, err := write(whole[:n]); err == nil || !strings.Contains(err.Error(), "cut short") ||
					strings.Count(err.Error(), path) != 1 {
					t.Errorf("%d bytes of %s: %s, %v", n, path, got, err)
				}
				flipped := []byte(whole)
				flipped[n] ^= 0x10
				if got, err := write(string(flipped)); err == nil && got != want {
					t.Errorf("byte %d of %s: %s, want an error or %s", n, path, got, want)
				}
			}
			if got, err := write(whole + "rubbish"); err == nil {
				t.Errorf("%s with rubbish behind it: %s", path, got)
			}
		}
	}
}

// The header of a zstd frame may ask for any window.
func TestWindowsOfZstdAreBounded(t *testing.T) {
	frame := func(exponent byte) string { // one raw block of 1 byte
		return "\x28\xb5\x2f\xfd\x00" + string([]byte{exponent << 3}) + "\x09\x00\x00a"
	}
	dir := put(t, map[string]string{"a.txt.zst": frame(17), "b.txt.zst": frame(18)})
	if got, err := opened(t, filepath.Join(dir, "a.txt.zst"), NewTokenizer(Bytes, 0), -1, 256); err != nil {
		t.Errorf("128 MiB: %s, %v", got, err)
	}
	_, err := opened(t, filepath.Join(dir, "b.txt.zst"), NewTokenizer(Bytes, 0), -1, 256)
	if err == nil || !strings.Contains(err.Error(), "window") {
		t.Errorf("256 MiB: %v", err)
	}
}

// A compressed file does not expand without bound, nor does it need to be read to its end.
func TestCompressedTextIsBounded(t *testing.T) {
	path := filepath.Join(put(t, map[string]string{"a.jsonl.zst": zst(strings.Repeat("\n", 140<<20))}), "a.jsonl.zst")
	if _, err := opened(t, path, NewTokenizer(Bytes, 0), -1, 256); err == nil ||
		!strings.Contains(err.Error(), "expands to more than 1,100 times its size") {
		t.Error(err)
	}
}

func TestProgressCountsTheBytesOfFiles(t *testing.T) {
	lines := strings.Repeat(`{"text":"some words of a line"}`+"\n", 20_000)
	dir := put(t, map[string]string{"a.jsonl": lines, "a.jsonl.gz": gz(lines), "a.jsonl.zst": zst(lines), "b.txt": lines,
		"b.txt.gz": gz(lines)})
	paths, _ := filepath.Glob(filepath.Join(dir, "*"))
	for _, path := range paths {
		var notes []int64
		e := Encoding{Tokenizer: NewTokenizer(Bytes, 0), EOS: -1, Read: func(n int64) { notes = append(notes, n) }}
		must.Do(t, e.Each(context.Background(), []string{path}, func(int, Document) error { return nil }))
		sum := int64(0)
		for _, n := range notes {
			sum += n
		}
		if st, err := os.Stat(path); err != nil || sum != st.Size() || slices.Min(notes) < 0 {
			t.Errorf("%s: %v of %d bytes, %v", path, notes, st.Size(), err)
		}
	}
}

// FuzzUnpack checks that a compressed file gives its text or an error.
func FuzzUnpack(f *testing.F) {
	f.Add([]byte(gz("text")), true)
	f.Add([]byte(zst("text")), false)
	f.Add([]byte(gz("")+gz("a")), true)
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, content []byte, gzip bool) {
		path := filepath.Join(dir, "a.txt.zst")
		if gzip {
			path = filepath.Join(dir, "a.txt.gz")
		}
		if len(content) > 1<<12 { // they may unpack to 4 MiB
			return
		}
		must.Do(t, os.WriteFile(path, content, 0o666))
		if got, err := opened(t, path, NewTokenizer(Bytes, 0), 256, 257); err == nil && got == "" {
			t.Fatal("neither tokens nor an error")
		}
	})
}
