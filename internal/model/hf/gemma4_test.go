package hf

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/safetensors"
)

// The shapes of published models: numbers of parameters, and heads of both kinds of layers.
func TestPublishedGemma4(t *testing.T) {
	for name, want := range map[string]struct {
		parameters    int
		local, global Mixer
		mlp           MLP
	}{
		"gemma-4-31b": {30_697_345_340,
			Mixer{Heads: 32, KVHeads: 16, Dim: 256, DimV: 256, Window: 1023, ValueNorms: true},
			Mixer{Heads: 32, KVHeads: 4, Dim: 512, DimV: 512, Window: -1, ValueNorms: true, KeyValues: true},
			MLP{Width: 21504}},
		"gemma-4-26b-a4b": {25_233_141_790,
			Mixer{Heads: 16, KVHeads: 8, Dim: 256, DimV: 256, Window: 1023, ValueNorms: true},
			Mixer{Heads: 16, KVHeads: 2, Dim: 512, DimV: 512, Window: -1, ValueNorms: true, KeyValues: true},
			MLP{Width: 2112, Apart: true, Experts: Experts{Count: 128, Chosen: 8, Width: 704}}},
	} {
		c, err := ReadConfig("testdata/" + name)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, tensor := range c.Tensors() {
			n += tensor.Size()
		}
		l, g := c.Layer(0), c.Layer(5)
		want.mlp.Experts.Router.Normalize = want.mlp.Apart
		if n != want.parameters || l.Mixer != want.local || g.Mixer != want.global || g.MLP != want.mlp {
			t.Errorf("%s: %d parameters, %+v, %+v, %+v", name, n, l.Mixer, g.Mixer, g.MLP)
		}
		if l.Rope != (Rope{1, 1}) || g.Rope != (Rope{0, 0}) || !reflect.DeepEqual(c.RopePairs(), []int{256, 128}) ||
			c.RotatingPairs() != 64 || c.SoftmaxScale() != 1 || c.Wrapper != "gemma4" || c.PaddingRow() != 0 {
			t.Errorf("%s: %+v", name, c)
		}
	}
}

const gemma4 = `"model_type":"gemma4_text","hidden_size":64,"intermediate_size":96,"vocab_size":32,"num_hidden_layers":12,` +
	`"num_attention_heads":8,"hidden_size_per_layer_input":0`

// per_layer_config replaces the global keys, which count for heads only if values are keys; each form is written again.
func TestFormsOfGemma4(t *testing.T) {
	const perLayer = `,"per_layer_config":{"05":{"head_dim":128,"num_key_value_heads":2},"11":{"num_key_value_heads":2,"head_dim":128}}`
	for text, want := range map[string][3]int{
		``:                                {256, 512, 4},
		`,"global_head_dim":128`:          {256, 128, 4},
		`,"per_layer_config":{}`:          {256, 256, 4},
		`,"per_layer_config":null`:        {256, 512, 4},
		`,"num_global_key_value_heads":2`: {256, 512, 4},
		`,"num_global_key_value_heads":2,"attention_k_eq_v":true`:   {256, 512, 2},
		`,"global_head_dim":64` + perLayer:                          {256, 128, 2},
		`,"head_dim":16,"num_key_value_heads":8` + perLayer:         {16, 128, 2},
		`,"head_dim":16,"use_bidirectional_attention":"vision"`:     {16, 512, 4},
		`,"head_dim":16,"rope_parameters":null,"num_experts":null`:  {16, 512, 4},
		`,"head_dim":16,"num_experts":8,"moe_intermediate_size":16`: {16, 512, 4}, // without enable_moe_block
	} {
		c, err := readText(t, "{"+gemma4+text+"}")
		if err != nil {
			t.Fatal(err)
		}
		l, g := c.Layer(10).Mixer, c.Layer(11).Mixer
		if got := [3]int{l.Dim, g.Dim, g.KVHeads}; got != want || l.Window != 511 || c.HasExperts() || l.KeyValues {
			t.Errorf("%s: %v, want %v, %+v, %+v", text, got, want, l, g)
		}
		out := t.TempDir()
		if err := WriteConfig(opened(t, out), c, safetensors.BF16); err != nil {
			t.Fatal(err)
		}
		raw, err := os.ReadFile(filepath.Join(out, "config.json"))
		var keys map[string]any
		if err != nil || json.Unmarshal(raw, &keys) != nil {
			t.Fatal(err)
		}
		_, global := keys["global_head_dim"]
		if _, apart := keys["per_layer_config"]; global == apart || apart != (c.Unused["per_layer_config"] != nil) {
			t.Errorf("%s: written with %v", text, keys)
		}
		if _, ok := keys["rope_scaling"]; ok { // transformers would take it in place of rope_parameters
			t.Errorf("%s: written with rope_scaling", text)
		}
		if again, err := ReadConfig(out); err != nil || !reflect.DeepEqual(again.tokenless(), c.tokenless()) {
			t.Errorf("%s: written and read: %v\n%+v\nwant\n%+v", text, err, again, c)
		}
	}
}

// As in transformers, the last layer has no window.
func TestTheLastLayerOfGemma4(t *testing.T) {
	for _, text := range []string{``, `,"layer_types":["full_attention","sliding_attention","sliding_attention"]`} {
		c, err := readText(t, "{"+strings.Replace(gemma4, ":12,", ":3,", 1)+text+"}")
		if err != nil || c.Layer(2).Mixer.Window != -1 || c.Layer(1).Mixer.Window != 511 {
			t.Errorf("%s: %+v, %v", text, c, err)
		}
	}
}

func TestWrongConfigsOfGemma4AreRefused(t *testing.T) {
	for text, fault := range map[string]string{
		`"hidden_size_per_layer_input":256`: "hidden_size_per_layer_input: 256 is not supported: cprun lacks the embeddings of " +
			"each layer of Gemma 4's E2B and E4B",
		`"hidden_size_per_layer_input":null`:                     "hidden_size_per_layer_input: 256 is not supported",
		`"num_kv_shared_layers":4`:                               "num_kv_shared_layers: 4 is not supported",
		`"use_bidirectional_attention":"all"`:                    `use_bidirectional_attention: "all" is not supported`,
		`"per_layer_config":{"12":{"head_dim":32}}`:              "per_layer_config.12: it is no layer; the model has layers 0 to 11",
		`"per_layer_config":{"5x":{"head_dim":32}}`:              "per_layer_config.5x: it is no layer",
		`"per_layer_config":{"11":{"sliding_window":32}}`:        "per_layer_config.11.sliding_window: not supported for a layer",
		`"per_layer_config":{"11":{"head_dim":0}}`:               "per_layer_config.11.head_dim: 0 dimensions of 4 heads",
		`"per_layer_config":{"11":{"head_dim":32}}`:              "per_layer_config: layer 5 has 4 heads of keys of dimension 256, and others of its kind 4 of 32",
		`"per_layer_config":{"0":{"head_dim":32}}`:               "per_layer_config: layer 0 has 4 heads of keys of dimension 32",
		`"per_layer_config":[]`:                                  "per_layer_config: [] where an object belongs",
		`"global_head_dim":33`:                                   "global_head_dim: 33 is odd",
		`"num_global_key_value_heads":3,"attention_k_eq_v":true`: "num_global_key_value_heads: 3 does not divide num_attention_heads 8",
		`"rope_parameters":{"full_attention":{"rope_type":"default"}}`: `rope_parameters.full_attention.rope_type: "default" is ` +
			`not supported; cprun has proportional`,
		`"rope_parameters":{"full_attention":{"rope_type":"proportional","factor":8}}`: "rope_parameters.full_attention.factor: 8 is not supported",
		`"enable_moe_block":true`:                               "num_experts: missing; enable_moe_block needs it",
		`"enable_moe_block":true,"num_experts":8`:               "num_experts_per_tok: missing; gemma4_text needs it",
		`"use_double_wide_mlp":true,"hidden_activation":"silu"`: `hidden_activation: "silu" is not supported`,
	} {
		if _, err := readText(t, "{"+gemma4+","+text+"}"); err == nil || !strings.Contains(err.Error(), fault) {
			t.Errorf("%s: %v, want %q", text, err, fault)
		}
	}
	const unified = `{"model_type":"gemma4_unified_text",`
	text := unified + strings.TrimPrefix(gemma4, `"model_type":"gemma4_text",`)
	if c, err := readText(t, text+`,"hidden_size_per_layer_input":256}`); err != nil || c.SlidingWindow != 1024 {
		t.Errorf("a key that transformers ignores: %+v, %v", c, err)
	}
	c := &Config{Architecture: "gemma4_text", VocabSize: 8, HiddenSize: 8, IntermediateSize: 8, NumHiddenLayers: 2,
		NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 4, RopeTheta: 100, RMSNormEps: 1e-6, SlidingWindow: 4}
	if f := c.Check(); len(f) != 1 || f[0].Key != "layer_types" {
		t.Errorf("a last layer with a window: %v", f)
	}
	c.LayerTypes, c.OutputRouterLogits = []string{SlidingAttention, FullAttention}, true
	if f := c.Check(); len(f) != 1 || f[0].Key != logitsKey {
		t.Errorf("a loss of balance: %v", f)
	}
}

// Parts of images and sound are copied by their prefix, though their names may end like those of text.
func TestPartsBesideGemma4(t *testing.T) {
	inner := func(name string) string { return strings.Replace(name, "model.", "model.language_model.", 1) }
	dir := whole(t, "gemma4_text", map[string]any{"model_type": "gemma4"}, inner)
	f, err := safetensors.Open(filepath.Join(dir, singleFile))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var entries []safetensors.Entry
	for _, name := range f.Names() {
		entries = append(entries, filed{Tensor: Tensor{Name: name}, from: f}.copied())
	}
	more := map[string]bool{"model.visual.steps": true, "mtp.fc.weight": true}
	for _, name := range []string{"vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight", "embed_audio.norm.weight",
		"audio_tower.layers.0.norm.weight", "vision_embedder.pos_norm.weight", "embed_vision.norm.weight"} {
		entries = append(entries, safetensors.Floats("model."+name, safetensors.F32, []int{1}, []float32{3}))
		more["model."+name] = true
	}
	to := t.TempDir()
	raw, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil || os.WriteFile(filepath.Join(to, "config.json"), raw, 0o600) != nil {
		t.Fatal(err)
	}
	if err := safetensors.WriteFile(filepath.Join(to, singleFile), nil, entries); err != nil {
		t.Fatal(err)
	}
	c, err := ReadConfig(to)
	if err != nil {
		t.Fatal(err)
	}
	w := weightsIn(t, to)
	if err := w.Check(c.Tensors()); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "out")
	copied, err := Export(out, Model{Config: c, DType: safetensors.BF16, Tensors: c.Tensors(), From: to, EOS: -1,
		Read: func(t Tensor, off int64, dst []float32) error { return w.Read(t, dst, off) }}, ShardLimit)
	got := map[string]bool{}
	for _, name := range copied {
		got[name] = true
	}
	if err != nil || !maps.Equal(got, more) {
		t.Errorf("copied %v, %v", copied, err)
	}
	sameKeys(t, to, out)
	sameTensorBytes(t, to, out)
}

// An adapter of a model with images has PEFT's names of its language model alone, and is read under them.
func TestAdapterOfGemma4WithImages(t *testing.T) {
	dir := whole(t, "gemma4_text", map[string]any{"model_type": "gemma4"},
		func(name string) string { return strings.Replace(name, "model.", "model.language_model.", 1) })
	c, err := ReadConfig(dir)
	if err != nil {
		t.Fatal(err)
	}
	c.Tuning.LoRA = &LoRA{R: 2, Alpha: 4, TargetParameters: []string{"experts.down_proj"}}
	m := Model{Config: c, DType: safetensors.F32, Tensors: c.Adapters(), From: dir, Read: fill}
	out := filepath.Join(t.TempDir(), "adapter")
	if err := ExportAdapter(out, m); err != nil {
		t.Fatal(err)
	}
	f, err := safetensors.Open(filepath.Join(out, adapterFile))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, name := range f.Names() {
		if !strings.HasPrefix(name, "base_model.model.model.language_model.layers.") {
			t.Errorf("an adapter of %s", name)
		}
	}
	l, err := ReadAdapter(out)
	if err != nil || len(l.Targets.Names) != 2*8+7 || !l.targets("model.layers.2.self_attn.k_proj", 2) ||
		l.targets("model.layers.2.self_attn.v_proj", 2) || l.targets("model.vision_tower.layers.0.self_attn.q_proj", 0) {
		t.Errorf("read %+v, %v", l, err)
	}
	c.Tuning.LoRA = l
	w, err := OpenAdapter(out)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := w.CheckAdapter(c); err != nil || w.Note() != "" {
		t.Errorf("%v, %s", err, w.Note())
	}
	text := `{"peft_type":"LORA","r":2,"lora_alpha":4,"target_modules":".*language_model\\..*\\.(q_proj|v_proj)"}`
	if err := os.WriteFile(filepath.Join(out, adapterConfig), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if l, err := ReadAdapter(out); err != nil || !l.targets("model.layers.1.self_attn.q_proj", 1) {
		t.Errorf("the expression of PEFT: %+v, %v", l, err)
	}
}
