package config

import (
	"path/filepath"
	"slices"
	"testing"
)

func TestDifferences(t *testing.T) {
	const text = `
model: {vocab_size: 256, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4}
data: {path: x, seq_len: 200}
`
	path := write(t, filepath.Join(t.TempDir(), "train.yaml"), text)
	read := func(set ...string) *Config {
		t.Helper()
		c, err := Load(path, Options{Set: append(set, "data.path=/x"), NoFiles: true})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	was := read()
	if d := read().Differences(was); len(d) > 0 {
		t.Errorf("a config differs from itself in %v", d)
	}
	is := read("data.seq_len=100", "model.rope_scaling={rope_type: linear, factor: 4.0}", "model.sliding_window=8",
		"optimizer.betas=[0.8, 0.9]", "model.num_key_value_heads=4")
	want := []Difference{
		{"model.rope_scaling.rope_type", "null", "linear"}, {"model.rope_scaling.factor", "null", "4.0"},
		{"model.sliding_window", "null", "8"},
		{"data.seq_len", "200", "100"}, {"optimizer.betas", "[0.9, 0.95]", "[0.8, 0.9]"},
	}
	if got := is.Differences(was); !slices.Equal(got, want) {
		t.Errorf("differences %v, want %v", got, want)
	}
}
