package config

import (
	"fmt"
	"strings"
	"testing"
)

// A seq_len beyond the positions that rope_scaling covers gives a warning with a sufficient factor. A shorter one gives
// none.
func TestReachOfRopeScaling(t *testing.T) {
	const bare = "model: {vocab_size: 256, hidden_size: 64, intermediate_size: 160, num_hidden_layers: 1, num_attention_heads: 4"
	const llama3 = "{rope_type: llama3, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 1024, factor: 4}"
	for _, c := range []struct {
		model  string
		reach  int
		factor string // that covers one token more
	}{
		{bare + ", rope_scaling: " + llama3 + "}", 4096, "5"},
		{bare + ", rope_scaling: {rope_type: yarn, original_max_position_embeddings: 512, factor: 4}}", 2048, "5"},
		{bare + ", max_position_embeddings: 1000, rope_scaling: {rope_type: yarn, factor: 2.5}}", 2500, "3"},
		{bare + ", max_position_embeddings: 1000, rope_scaling: {rope_type: linear, factor: 2}}", 2000, "3"},
		{bare + ", max_position_embeddings: 8192, rope_scaling: " + llama3 + "}", 8192, "5"},
		{bare + ", max_position_embeddings: 2048, rope_scaling: " + llama3 + "}", 2048, "5"},
		// llama3, 128 x 8, and 1024 positions
		{"model: {from: testdata/hf-long}", 1024, "9"},
		// of a model that states less
		{"model: {from: testdata/hf-long, max_position_embeddings: 100K}", 1024, "9"},
		// of the model's own 1024
		{"model: {from: testdata/hf-long, rope_scaling: {rope_type: linear, factor: 2}}", 2048, "3"},
		// twice the model's factor, for twice its positions
		{"model: {from: testdata/hf-long, max_position_embeddings: 2K, rope_scaling: {factor: 16}}", 2048, "17"},
		// the model's 1024 were another scaling's
		{"model: {from: testdata/hf-long, rope_scaling: " + strings.Replace(llama3, "1024", "16", 1) + "}", 64, "5"},
		// no scaling
		{"model: {from: testdata/hf}", 1024, "rope_scaling"},
		// it learns its positions in this run
		{bare + ", max_position_embeddings: 8}", maxLen, ""},
		// of an unknown length
		{bare + ", rope_scaling: {rope_type: linear, factor: 2}}", maxLen, ""},
	} {
		warned := func(seqLen int) string {
			cfg, err := load("t.yaml", []byte(c.model+fmt.Sprintf("\ndata: {path: a.bin, seq_len: %d}\n", seqLen)),
				Options{NoFiles: true}, osDisk)
			if err != nil {
				t.Fatalf("%s: %v", c.model, err)
			}
			for _, w := range cfg.Warnings {
				if w.Key == "data.seq_len" {
					return w.Msg
				}
			}
			return ""
		}
		if w := warned(c.reach); w != "" {
			t.Errorf("%s: %d tokens: %s", c.model, c.reach, w)
		}
		if c.reach == maxLen {
			continue
		}
		w := warned(c.reach + 1)
		if !strings.Contains(w, fmt.Sprint(c.reach)) || !strings.HasSuffix(w, "to "+c.factor) &&
			!strings.Contains(w, "model."+c.factor) {
			t.Errorf("%s: %d tokens: %q, want the reach and the factor %s", c.model, c.reach+1, w, c.factor)
		}
	}
}

// The seeds 1, 2 and 3 give three orders of the data, unless data.seed is set.
func TestSeedOfTheData(t *testing.T) {
	for set, want := range map[string]int64{"train.seed=2": 2, "train.seed=3": 3, "data.seed=0": 0,
		"data.seed=null": 1} {
		cfg, err := load("t.yaml", []byte("model: {from: testdata/hf}\ndata: {path: a.bin}\n"),
			Options{NoFiles: true, Set: []string{set}}, osDisk)
		if err != nil {
			t.Fatal(err)
		}
		if cfg.Data.Seed != want || cfg.Given("data.seed") != (set == "data.seed=0") {
			t.Errorf("%s: data.seed %d, given %v", set, cfg.Data.Seed, cfg.Given("data.seed"))
		}
	}
}
