package hf

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/safetensors"
)

// These are shortened copies of published files of transformers 4.
const (
	gemma2File = `{"model_type":"gemma2","architectures":["Gemma2ForCausalLM"],"attention_bias":false,` +
		`"attn_logit_softcapping":50.0,"final_logit_softcapping":30.0,"head_dim":256,"hidden_act":"gelu_pytorch_tanh",` +
		`"hidden_activation":"gelu_pytorch_tanh","hidden_size":4608,"intermediate_size":36864,"num_attention_heads":32,` +
		`"num_hidden_layers":3,"num_key_value_heads":16,"query_pre_attn_scalar":144,"rope_theta":10000.0,` +
		`"sliding_window":4096,"vocab_size":256000}`
	gemma3Text = `{"model_type":"gemma3_text","attn_logit_softcapping":null,"final_logit_softcapping":null,` +
		`"hidden_activation":"gelu_pytorch_tanh","hidden_size":1152,"intermediate_size":6912,"num_attention_heads":4,` +
		`"num_hidden_layers":7,"num_key_value_heads":1,"head_dim":256,"query_pre_attn_scalar":256,` +
		`"rope_local_base_freq":10000,"rope_scaling":null,"rope_theta":1000000,"sliding_window":512,` +
		`"sliding_window_pattern":3,"vocab_size":262144}`
	gemma3File = `{"model_type":"gemma3","architectures":["Gemma3ForConditionalGeneration"],"eos_token_id":[1,106],` +
		`"image_token_index":262144,"text_config":{"hidden_size":2560,"intermediate_size":10240,` +
		`"model_type":"gemma3_text","num_hidden_layers":7,"rope_scaling":{"factor":8.0,"rope_type":"linear"},` +
		`"sliding_window":1024},"torch_dtype":"bfloat16","vision_config":{"hidden_size":1152}}`
)

func TestConfigsOfGemma(t *testing.T) {
	for _, tc := range []struct {
		text string
		want func(c *Config) bool
	}{
		{gemma2File, func(c *Config) bool {
			return c.SoftmaxScale() == 1.0/12 && c.AttnLogitSoftcapping == 50 && c.FinalLogitSoftcapping == 30 &&
				c.Layer(0).Mixer.Window == 4095 && c.Layer(1).Mixer.Window == -1 && c.Layer(2).Mixer.Window == 4095 && len(c.RopePairs()) == 1 && c.TieWordEmbeddings
		}},
		{strings.Replace(gemma2File, `"attn_logit_softcapping":50.0`, `"attn_logit_softcapping":null`, 1),
			func(c *Config) bool { return c.AttnLogitSoftcapping == 0 }},
		{strings.Replace(gemma2File, `"attn_logit_softcapping":50.0,`, ``, 1),
			func(c *Config) bool { return c.AttnLogitSoftcapping == 50 }},
		// transformers ignores both keys in gemma2
		{strings.Replace(gemma2File, "{", `{"use_sliding_window":false,"sliding_window_pattern":3,`, 1),
			func(c *Config) bool {
				return c.Layer(0).Mixer.Window == 4095 && c.Layer(1).Mixer.Window == -1 && c.Layer(2).Mixer.Window == 4095
			}},
		{gemma3Text, func(c *Config) bool {
			return c.RopeTheta == 1e6 && c.RopeLocalBaseFreq == 1e4 && len(c.RopePairs()) == 2 && c.Layer(0).Rope == Rope{1, 1} && c.Layer(2).Rope == Rope{} &&
				c.Layer(1).Mixer.Window == 511 && c.Layer(2).Mixer.Window == -1 && c.Layer(5).Mixer.Window == -1 && c.FinalLogitSoftcapping == 0
		}},
		{gemma3File, func(c *Config) bool {
			return c.Architecture == Gemma3 && c.VocabSize == 262208 && c.NumAttentionHeads == 8 && c.HeadDim == 256 &&
				c.RopeScaling.Factor == 8 && c.RopeTheta == 1e6 && c.RopeLocalBaseFreq == 1e4 && c.Layer(5).Mixer.Window == -1 &&
				c.Layer(6).Mixer.Window == 1023 && string(c.TokenIDs["eos_token_id"]) == "[1,106]" && c.DType == "bfloat16" &&
				strings.Contains(c.Caveat().Msg, "exports a gemma3_text")
		}},
	} {
		c, err := readText(t, tc.text)
		if err != nil {
			t.Errorf("%.30s: %v", tc.text, err)
			continue
		}
		if !tc.want(c) {
			t.Errorf("%s: got %+v", tc.text, c)
		}
		out := t.TempDir()
		if err := WriteConfig(opened(t, out), c, safetensors.BF16); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(out, "config.json"))
		if scalar := fmt.Sprintf(`"query_pre_attn_scalar": %v,`, c.QueryPreAttnScalar); err != nil ||
			!strings.Contains(string(text), scalar) {
			t.Errorf("%s, %v: want the integer of %s", text, err, scalar) // transformers refuses 144.0
		}
		c.Wrapper = "" // of the file, not of the model
		if again, err := ReadConfig(out); err != nil || !reflect.DeepEqual(again.tokenless(), c.tokenless()) {
			t.Errorf("written and read: %v\n%+v\nwant\n%+v", err, again, c)
		}
	}
}

func TestWrongConfigsOfGemmaAreRefused(t *testing.T) {
	for _, tc := range []struct{ file, key, fault string }{
		{gemma2File, `"use_bidirectional_attention":true`, "use_bidirectional_attention: true is not supported"},
		{gemma2File, `"attention_bias":true`, "attention_bias: true is not supported"},
		{gemma2File, `"hidden_activation":"gelu"`, `hidden_activation: "gelu" is not supported`},
		{gemma2File, `"query_pre_attn_scalar":-3`, "query_pre_attn_scalar: -3 is out of range"},
		{gemma2File, `"rope_local_base_freq":100`, "rope_local_base_freq: 100 is not supported in gemma2"},
		{gemma3Text, `"attn_logit_softcapping":50`, "attn_logit_softcapping: 50 is not supported in gemma3_text"},
		{gemma3Text, `"sliding_window_pattern":0`, "sliding_window_pattern: 0 is not positive"},
		{gemma3Text, `"rope_local_base_freq":0.5`, "rope_local_base_freq: 0.5 is out of range; want a number in (1, inf)"},
		{gemma3Text, `"rope_parameters":{"rope_theta":5}`, "rope_parameters.full_attention: missing"},
		{gemma3Text, `"rope_parameters":{"sliding_attention":{"rope_type":"linear","factor":2}}`,
			`rope_parameters.sliding_attention.rope_type: "linear" is not supported`},
		{gemma3File, `"quantization_config":{"bits":4}`, "quantization_config: "},
		{`{` + llama + `}`, `"final_logit_softcapping":30`, "final_logit_softcapping: 30 is not supported in llama"},
	} {
		// The last of two equal keys counts.
		_, err := readText(t, strings.TrimSuffix(tc.file, "}")+","+tc.key+"}")
		if err == nil || !strings.Contains(err.Error(), tc.fault) {
			t.Errorf("%s: %v, want %q", tc.key, err, tc.fault)
		}
	}
}

// The text model is found in the files of both versions of transformers, and the tensors of images are skipped.
func TestLanguageModelOfALargerModel(t *testing.T) {
	c := &Config{Architecture: Gemma3, VocabSize: 3, HiddenSize: 2, IntermediateSize: 2, NumHiddenLayers: 1,
		NumAttentionHeads: 1, NumKeyValueHeads: 1, HeadDim: 2, TieWordEmbeddings: true}
	for _, rename := range []func(string) string{
		func(name string) string { return "language_model." + name },
		func(name string) string { return strings.Replace(name, "model.", "model.language_model.", 1) },
	} {
		for _, tower := range []string{"vision_tower.patch", "model.multi_modal_projector.norm", "sound_tower.patch"} {
			var entries []safetensors.Entry
			for i, tensor := range c.Tensors() {
				data := slices.Repeat([]float32{float32(i)}, tensor.Size())
				entries = append(entries, safetensors.Floats(rename(tensor.Name), safetensors.F32, tensor.Shape, data))
			}
			entries = append(entries, safetensors.Floats(tower, safetensors.F32, []int{1}, []float32{-1}))
			w := weightsOf(t, entries...)
			err := w.Check(c.Tensors())
			if note := w.Note(); err != nil || (note != "") != strings.HasPrefix(tower, "sound") {
				t.Errorf("%s: %q, %v", tower, note, err)
			}
			for i, tensor := range c.Tensors() {
				got := make([]float32, 2)
				if err := w.Read(tensor, got, 0); err != nil || got[0] != float32(i) || got[1] != float32(i) {
					t.Errorf("%s: %v, %v, want %d", tensor.Name, got, err, i)
				}
			}
		}
	}
}
