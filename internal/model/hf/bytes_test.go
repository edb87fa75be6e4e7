package hf

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// The tokenizer of bytes has each byte under its value, as GPT-2 writes it, and a token that ends documents if there is
// one. Tests of cmd/cprun compare it with transformers; docs/log.md has the results.
func TestTokenizerOfBytes(t *testing.T) {
	for _, eos := range []int{-1, 10, 256} {
		dir := t.TempDir()
		if err := writeBytes(opened(t, dir), eos); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(dir, "tokenizer.json"))
		if err != nil {
			t.Fatal(err)
		}
		var f struct {
			Added []struct{ ID int } `json:"added_tokens"`
			Model struct{ Vocab map[string]int }
		}
		if err := json.Unmarshal(text, &f); err != nil {
			t.Fatal(err)
		}
		for word, id := range map[string]int{"!": 33, "Ġ": 32, "Ċ": 10, "a": 97, "Ā": 0, "ÿ": 255, "Ń": 0xad} {
			if got, ok := f.Model.Vocab[word]; !ok || got != id {
				t.Errorf("%q has the id %d, %t, want %d", word, got, ok, id)
			}
		}
		ids := map[int]bool{}
		for _, id := range f.Model.Vocab {
			ids[id] = true
		}
		want := 256
		if eos == 256 {
			want++
		}
		if len(ids) != want || len(f.Model.Vocab) != want || len(f.Added) != want-256 {
			t.Errorf("eos %d: %d ids of %d words, %d added; want %d", eos, len(ids), len(f.Model.Vocab), len(f.Added),
				want)
		}
	}
}
