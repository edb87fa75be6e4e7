package config

import (
	"path/filepath"
	"testing"
)

// TestQuotedWords checks that quotes do not matter for words: programs that write JSON put "auto" and "4K" in quotes.
func TestQuotedWords(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "text.txt"), "text")
	load := func(name, rest string) *Config {
		t.Helper()
		c, err := Load(write(t, filepath.Join(dir, name), leastModel+rest), Options{})
		if err != nil {
			t.Fatalf("%s: %v", rest, err)
		}
		return c
	}
	bare := load("bare.yaml",
		"data: {path: text.txt, seq_len: 4K}\nparallel: {context: auto, data: auto, layout: zigzag}\nmemory: {loss_chunk: auto}\n")
	quoted := load("quoted.yaml", `"data": {"path": "text.txt", "seq_len": "4K"}
"parallel": {"context": "auto", "data": 'auto', "layout": "zigzag"}
"memory": {"loss_chunk": "auto"}
`)
	if string(quoted.YAML()) != string(bare.YAML()) {
		t.Errorf("with quotes:\n%s\nwithout:\n%s", quoted.YAML(), bare.YAML())
	}
}
