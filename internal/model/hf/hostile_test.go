package hf

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/safetensors"
)

// shardOf returns a file with these tensors of one element each.
func shardOf(t testing.TB, names ...string) []byte {
	t.Helper()
	var entries []safetensors.Entry
	for _, name := range names {
		entries = append(entries, safetensors.Floats(name, safetensors.F32, []int{1}, []float32{1}))
	}
	var b bytes.Buffer
	if err := safetensors.Write(&b, nil, entries); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// indexOf returns an index that assigns tensors to files.
func indexOf(t testing.TB, where map[string]string) []byte {
	t.Helper()
	text, err := json.Marshal(map[string]any{"weight_map": where})
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// FuzzOpenWeights checks that, for any index and shards, opened tensors exist and faults take a few lines.
func FuzzOpenWeights(f *testing.F) {
	f.Add(indexOf(f, map[string]string{"a": "x.safetensors", "b": "y.safetensors"}), shardOf(f, "a"), shardOf(f, "b"))
	f.Add(indexOf(f, map[string]string{"a": "x.safetensors", "b": "../y.safetensors"}), shardOf(f, "a", "c"),
		[]byte("{}"))
	f.Add([]byte(`{"weight_map":{"a":"x.safetensors","a":"\u001b[31m"}}`), shardOf(f), []byte{})
	f.Add([]byte(`{"weight_map":[]}`), []byte{255, 255, 255, 255, 255, 255, 255, 255}, []byte{8, 0, 0, 0, 0, 0, 0, 0})
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, index, x, y []byte) {
		for name, data := range map[string][]byte{indexFile: index, "x.safetensors": x, "y.safetensors": y} {
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		w, err := OpenWeights(dir)
		if err != nil {
			if text := err.Error(); strings.Count(text, "\n") > 25 || len(text) > 64<<10 ||
				!strings.Contains(text, dir) {
				t.Errorf("an error of %d lines and %d bytes: %.500s", strings.Count(text, "\n")+1, len(text), text)
			}
			return
		}
		defer w.Close()
		for _, name := range w.names {
			i, ok := w.where[name].Info(name)
			if !ok {
				t.Fatalf("tensor %q is in no file", name)
			}
			want := Tensor{Name: name, Shape: i.Shape}
			if n := i.Elements(); n <= 1<<20 {
				if _, err := w.check(want); err != nil {
					continue
				}
				if err := w.Read(want, make([]float32, n), 0); err != nil && !strings.Contains(err.Error(), "spoilt") {
					t.Errorf("tensor %q: %v", name, err)
				}
			}
		}
	})
}

// A directory that is cheap to make must be cheap to refuse.
func TestHugeIndexIsRefusedInAFewLines(t *testing.T) {
	missing, many := map[string]string{}, map[string]string{}
	for i := range 1000 {
		missing[fmt.Sprintf("tensor %d", i)] = fmt.Sprintf("gone-%d.safetensors", i)
	}
	for i := range maxShards + 1 {
		many[fmt.Sprint(i)] = fmt.Sprintf("%d.safetensors", i)
	}
	var crowd []string
	for i := range 1000 {
		crowd = append(crowd, fmt.Sprintf("tensor %d", i))
	}
	for name, c := range map[string]struct {
		index []byte
		want  []string
	}{
		"missing shards": {indexOf(t, missing), []string{"none of its files exists", "gone-0.safetensors"}},
		"many shards":    {indexOf(t, many), []string{"it names 2049 files; at most 2048"}},
		"many values": {[]byte(`{"weight_map":{},"x":[` + strings.Repeat("0,", maxIndexValues) + `0]}`),
			[]string{"values; at most"}},
		"a long number": {[]byte(`{"weight_map":` + strings.Repeat("9", 1<<20) + `}`), []string{"cannot unmarshal"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, indexFile), c.index, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "x.safetensors"), shardOf(t, crowd...), 0o600); err != nil {
				t.Fatal(err)
			}
			w, err := OpenWeights(dir)
			if err == nil {
				w.Close()
				t.Fatal("it was opened")
			}
			if lines := strings.Count(err.Error(), "\n"); lines > 22 {
				t.Errorf("%d lines", lines)
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("no %q in %.600s", want, err)
				}
			}
		})
	}
}

// Many links to one file are as many headers in memory.
func TestLinksToOneLargeHeader(t *testing.T) {
	dir := t.TempDir()
	header := []byte(`{"__metadata__":{"a":"` + strings.Repeat("x", 30<<20) + `"}}`)
	size := make([]byte, 8)
	size[0], size[1], size[2], size[3] = byte(len(header)), byte(len(header)>>8), byte(len(header)>>16),
		byte(len(header)>>24)
	if err := os.WriteFile(filepath.Join(dir, "0.safetensors"), append(size, header...), 0o600); err != nil {
		t.Fatal(err)
	}
	where := map[string]string{}
	for i := range 10 {
		name := fmt.Sprintf("%d.safetensors", i)
		if i > 0 {
			if err := os.Link(filepath.Join(dir, "0.safetensors"), filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		where[fmt.Sprint(i)] = name
	}
	if err := os.WriteFile(filepath.Join(dir, indexFile), indexOf(t, where), 0o600); err != nil {
		t.Fatal(err)
	}
	if w, err := OpenWeights(dir); err == nil || !strings.Contains(err.Error(), "the headers up to") {
		t.Errorf("%v, %v", w, err)
	}
}

func TestPipesInAModelDirectory(t *testing.T) {
	for _, name := range []string{"config.json", singleFile, indexFile, "tokenizer.json"} {
		dir := t.TempDir()
		if err := unix.Mkfifo(filepath.Join(dir, name), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := ReadConfig(dir)
		if name != "config.json" {
			_, err = OpenWeights(dir)
		}
		if name == "tokenizer.json" {
			_, err = Sources{Tokenizer: filepath.Join(dir, name)}.Companions()
		}
		if err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "not a regular file") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
