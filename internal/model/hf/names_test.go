package hf

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/safetensors"
)

// The results are those of transformers 5.24, which loads each of these; scripts/oracle/weights.py tries it.
func TestWeightsUnderOtherNames(t *testing.T) {
	for _, tc := range []struct {
		name   string
		tied   bool
		rename func(string) string // "": the tensor is absent
		extra  string
		fault  string
	}{
		{"without prefix", false, func(n string) string { return strings.TrimPrefix(n, "model.") }, "", ""},
		{"prefix twice", false, func(n string) string { return "model." + n }, "", ""},
		{"one without", false, func(n string) string { return strings.Replace(n, "model.norm", "norm", 1) }, "", ""},
		{"tied, as head", true, func(n string) string { return strings.Replace(n, "model.embed_tokens", "lm_head", 1) },
			"", ""},
		{"tied, as model.lm_head", true, func(n string) string { return strings.Replace(n, "embed_tokens", "lm_head", 1) },
			"", ""},
		{"beside the model", false, strings.Clone, "mtp.fc.weight", ""},
		{"a layer too many", false, strings.Clone, "model.layers.2.mlp.up_proj.weight", ""},
		{"inside a layer", false, strings.Clone, "layers.0.self_attn.q_proj.bias",
			`"layers.0.self_attn.q_proj.bias" is not in`},
		{"beside a norm", false, strings.Clone, "model.norm.bias", `"model.norm.bias" is not in`},
		{"another prefix", false, func(n string) string { return "module." + n }, "", "are missing"},
		{"not tied", false, func(n string) string { return strings.TrimPrefix(n, "model.embed_tokens.weight") }, "",
			`"model.embed_tokens.weight" [256 64] is missing`},
		{"not tied, no head", false, func(n string) string { return strings.TrimPrefix(n, "lm_head.weight") }, "",
			"model.tie_word_embeddings"},
	} {
		m := model(t, "tiny-llama", safetensors.F32)
		m.Config.NumHiddenLayers, m.Config.TieWordEmbeddings = 2, tc.tied
		m.Tensors = tensors(m.Config)
		var entries []safetensors.Entry
		for _, x := range m.Tensors {
			if name := tc.rename(x.Name); name != "" {
				f := m.entry(filed{Tensor: x, parts: x.inFiles()})
				f.Name = name
				entries = append(entries, f)
			}
		}
		if tc.extra != "" {
			entries = append(entries, safetensors.Floats(tc.extra, safetensors.F32, []int{1}, []float32{1}))
		}
		w := weightsOf(t, entries...)
		err := w.Check(m.Tensors)
		if tc.fault != "" {
			if err == nil || !strings.Contains(err.Error(), tc.fault) {
				t.Errorf("%s: %v, want %q", tc.name, err, tc.fault)
			}
			continue
		}
		if err != nil || !strings.Contains(w.Note(), tc.extra) || tc.extra == "" && w.Note() != "" {
			t.Errorf("%s: %q, %v", tc.name, w.Note(), err)
		}
		for _, x := range m.Tensors {
			got, want := make([]float32, 5), make([]float32, 5)
			_ = fill(x, 2, want)
			if err := w.Read(x, got, 2); err != nil || !slices.Equal(got, want) {
				t.Errorf("%s: %s: %v, %v, want %v", tc.name, x.Name, got, err, want)
			}
		}
	}
}

// What an index lists too many, or for another file, does not matter. Of two files the later one counts.
func TestIndexOnlyNamesFiles(t *testing.T) {
	entry := func(name string, x float32) safetensors.Entry {
		return safetensors.Floats(name, safetensors.F32, []int{1}, []float32{x})
	}
	dir := t.TempDir()
	for file, list := range map[string][]safetensors.Entry{"a.safetensors": {entry("n.w", 1), entry("m.w", 2)},
		"b.safetensors": {entry("o.w", 3), entry("m.w", 4)}} {
		if err := safetensors.WriteFile(filepath.Join(dir, file), nil, list); err != nil {
			t.Fatal(err)
		}
	}
	index := indexOf(t, map[string]string{"n.w": "b.safetensors", "o.w": "a.safetensors", "mtp.w": "b.safetensors",
		"mtp.x": "gone.safetensors"})
	if err := os.WriteFile(filepath.Join(dir, indexFile), index, 0o600); err != nil {
		t.Fatal(err)
	}
	w := weightsIn(t, dir)
	var want []Tensor
	for i, name := range []string{"n.w", "m.w", "o.w"} {
		want = append(want, Tensor{Name: name, Shape: []int{1}})
		got := []float32{0}
		if err := w.Read(want[i], got, 0); err != nil || got[0] != []float32{1, 4, 3}[i] {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	if err := w.Check(want); err != nil || !strings.Contains(w.Note(), `"mtp.w"`) ||
		!strings.Contains(w.Note(), `"mtp.x"`) || strings.Contains(w.Note(), `"n.w"`) {
		t.Errorf("%q, %v", w.Note(), err)
	}
	err := w.Check(append(want, Tensor{Name: "mtp.x", Shape: []int{1}}))
	if err == nil || !strings.Contains(err.Error(), "mtp.x") || !strings.Contains(err.Error(), "gone.safetensors") {
		t.Errorf("a tensor that the model needs: %v", err)
	}
}

// The faults of an adapter name its file. An older form is named with its conversion.
func TestFaultsOfAnAdapterNameItsFile(t *testing.T) {
	dir := dirOf(t, map[string]string{"adapter_model.bin": ""})
	if _, err := OpenAdapter(dir); err == nil || !strings.Contains(err.Error(), "adapter_model.bin") ||
		!strings.Contains(err.Error(), "save_file") {
		t.Errorf("a pickle: %v", err)
	}
	if err := safetensors.WriteFile(filepath.Join(dir, adapterFile), nil, nil); err != nil {
		t.Fatal(err)
	}
	w, err := OpenAdapter(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	err = w.Check([]Tensor{{Name: "a.lora_A.weight", Shape: []int{1}}})
	for _, want := range []string{"a.lora_A.weight", adapterFile, adapterConfig} {
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), " config.json") {
			t.Errorf("%v does not name %s", err, want)
		}
	}
}

// transformers 5.24 takes the pairs of longrope from hidden_size and num_attention_heads.
func TestLongropeHasNoHeadDimOfItsOwn(t *testing.T) {
	c := &Config{Architecture: "phi3", VocabSize: 8, HiddenSize: 8, IntermediateSize: 8, NumHiddenLayers: 1,
		NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 4, RMSNormEps: 1, RopeTheta: 10, RopeScaling: &RopeScaling{
			Type: "longrope", Factor: 2, OriginalMax: 4, ShortFactor: []float64{1, 1}, LongFactor: []float64{1, 1}}}
	if faults := c.Check(); len(faults) > 0 {
		t.Fatal(faults)
	}
	c.HeadDim, c.RopeScaling.ShortFactor, c.RopeScaling.LongFactor = 2, []float64{1}, []float64{1}
	if faults := c.Check(); len(faults) != 1 || faults[0].Key != "head_dim" {
		t.Error(faults)
	}
}
