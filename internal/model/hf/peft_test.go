package hf

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const peftDir = "../testdata/lora"

// An adapter_config.json of PEFT gives its values.
func TestReadAdapter(t *testing.T) {
	l, err := ReadAdapter(filepath.Join(peftDir, "subset"))
	if err != nil {
		t.Fatal(err)
	}
	if l.R != 3 || l.Alpha != 5 || !l.RSLoRA || fmt.Sprint(l.Targets) != "[layers.1.mlp.down_proj v_proj]" {
		t.Errorf("read %+v", l)
	}
	if s := l.Scale(); s < 2.886 || s > 2.887 {
		t.Errorf("scale %v, want 5/sqrt(3)", s)
	}
}

// Every key with an effect that cprun lacks is refused by its name. Keys without an effect are not.
func TestAdaptersThatAreRefused(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(peftDir, "all", adapterConfig))
	if err != nil {
		t.Fatal(err)
	}
	read := func(key, value string) error {
		t.Helper()
		var keys map[string]json.RawMessage
		if err := json.Unmarshal(text, &keys); err != nil {
			t.Fatal(err)
		}
		more := maps.Clone(keys)
		if more[key] = json.RawMessage(value); value == "" {
			delete(more, key)
		}
		raw, err := json.Marshal(more)
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, adapterConfig), raw, 0o600); err != nil {
			t.Fatal(err)
		}
		_, err = ReadAdapter(dir)
		return err
	}
	for _, c := range [][2]string{{"rank_pattern", `{"q_proj": 8}`}, {"alpha_pattern", `{"q_proj": 8}`}, {"use_dora", "true"},
		{"modules_to_save", `["lm_head"]`}, {"bias", `"all"`}, {"fan_in_fan_out", "true"}, {"lora_bias", "true"},
		{"init_lora_weights", `"pissa"`}, {"layers_to_transform", "[1]"}, {"exclude_modules", `["q_proj"]`},
		{"target_modules", `".*_proj"`}, {"target_modules", "[]"}, {"peft_type", `"LOHA"`}, {"peft_type", ""}, {"r", "0"},
		{"r", ""}, {"lora_alpha", "-1"}, {"lora_dropout", "1"}, {"a_key_of_the_future", "1"}} {
		if err := read(c[0], c[1]); err == nil || !strings.Contains(err.Error(), c[0]) {
			t.Errorf("%s %s: %v", c[0], c[1], err)
		}
	}
	for _, c := range [][2]string{{"target_modules", `"all-linear"`}, {"revision", `"main"`}, {"use_dora", ""},
		{"rank_pattern", "{ }"}, {"init_lora_weights", `"gaussian"`}, {"a_key_of_the_future", "null"}} {
		if err := read(c[0], c[1]); err != nil {
			t.Errorf("%s %s: %v", c[0], c[1], err)
		}
	}
}

// Targets name modules by their last parts, as in PEFT.
func TestTargets(t *testing.T) {
	c := &Config{Architecture: Llama, VocabSize: 8, HiddenSize: 4, IntermediateSize: 6, NumHiddenLayers: 2,
		NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 2}
	for _, row := range []struct {
		targets []string
		want    int // adapters
	}{{nil, 14}, {[]string{"q_proj"}, 2}, {[]string{"proj"}, 0}, {[]string{"self_attn.q_proj", "q_proj"}, 2},
		{[]string{"layers.1.mlp.up_proj", "v_proj"}, 3}, {[]string{"model.layers.0.mlp.gate_proj"}, 1}} {
		c.Tuning.LoRA = &LoRA{R: 2, Alpha: 4, Targets: row.targets}
		list := c.Adapters()
		if len(list) != 2*row.want {
			t.Errorf("%v: %d tensors, want %d pairs", row.targets, len(list), row.want)
		}
		for i := 0; i < len(list); i += 2 {
			a, b := list[i], list[i+1]
			matrix, isB, ok := Adapted(a.Name)
			other, isBToo, okToo := Adapted(b.Name)
			if !ok || !okToo || isB || !isBToo || matrix != other || a.Shape[0] != 2 || b.Shape[1] != 2 {
				t.Errorf("%v: A is %+v, B is %+v", row.targets, a, b)
			}
		}
	}
	if _, _, ok := Adapted("model.layers.0.self_attn.q_proj.weight"); ok {
		t.Error("a matrix is an adapter")
	}
}
