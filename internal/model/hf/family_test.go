package hf

import (
	"slices"
	"strings"
	"testing"
)

func TestFamiliesAreRegisteredOnceAndWhole(t *testing.T) {
	if got := Families(); !slices.Equal(got, []string{Gemma2, Gemma3, "gemma4_text", "gemma4_unified_text", "glm4_moe", "gpt_oss", "granite", Llama, "ministral3", "mistral", "mixtral",
		"olmo2", "olmo3", "phi3", "qwen2", Qwen3, "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next",
		"seed_oss", "smollm3"}) {
		t.Errorf("families are %v", got)
	}
	nameless := *families[Llama]
	nameless.Name, nameless.Tensors = "nameless", nameless.Tensors.with(Names{Down: ""})
	for what, f := range map[string]Family{"a family twice": *families[Llama], "a family without a tensor's name": nameless} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s was registered", what)
				}
			}()
			Register(f)
		}()
	}
}

const yarn = `"rope_parameters":{"rope_type":"yarn","factor":16,"original_max_position_embeddings":1024,` +
	`"rope_theta":1e6,"llama_4_scaling_beta":0.1}`

// Files as they are published, in both forms, have the values of transformers.
func TestFilesOfFamilies(t *testing.T) {
	wrapped := func(kind string) string {
		return `{"model_type":"mistral3","text_config":{"model_type":"` + kind + `",` + shape + `,` + yarn + `}}`
	}
	for text, want := range map[string]func(c *Config) bool{
		`{"model_type":"ministral3",` + shape + `,` + yarn + `}`: func(c *Config) bool {
			return len(c.RopePairs()) == 2 && c.Layer(0).Rope == Rope{0, 1} && c.RopeScaling.QueryBeta == 0.1 && c.HeadDim == 128 &&
				c.NumKeyValueHeads == 4 && c.Layer(0).Mixer.Window == -1
		},
		wrapped("ministral3"): func(c *Config) bool { return c.Architecture == "ministral3" && c.Wrapper == "mistral3" },
		`{"model_type":"mistral3","text_config":{` + shape + `}}`: func(c *Config) bool { return c.Architecture == "mistral" },
		`{"model_type":"seed_oss",` + shape + `,"attention_out_bias":false}`: func(c *Config) bool {
			return c.AttentionBias && c.HeadDim == 128 && len(c.Layer(0).Mixer.parts(32)) == 12
		},
		`{"model_type":"olmo3",` + shape + `,"rope_theta":1e6,"sliding_window":99}`: func(c *Config) bool {
			return c.RopeLocalBaseFreq == 5e5 && c.RopeTheta == 1e6 && c.Layer(2).Rope == Rope{1, 1} && c.Layer(2).Mixer.WideNorms &&
				c.Layer(2).Mixer.Window == 98
		},
		`{"model_type":"granite",` + shape + `,"residual_multiplier":0.22}`: func(c *Config) bool {
			return c.SoftmaxScale() == 1 && c.ResidualMultiplier == 0.22 && c.LogitsScaling == 0
		},
	} {
		text = strings.Replace(text, `"num_attention_heads":4`, `"num_attention_heads":4,"num_key_value_heads":4`, 1)
		if c, err := readText(t, text); err != nil || !want(c) {
			t.Errorf("%s: %+v, %v", text, c, err)
		}
	}
	for text, fault := range map[string]string{
		`"model_type":"ministral3",` + shape:                           "rope_parameters.llama_4_scaling_beta: missing",
		mistral + `,` + yarn:                                           "rope_parameters.llama_4_scaling_beta: 0.1 is not supported in mistral",
		`"model_type":"seed_oss","attention_out_bias":true,` + shape:   "attention_out_bias: true is not supported",
		`"model_type":"seed_oss","residual_dropout":0.1,` + shape:      "residual_dropout: 0.1 is not supported",
		`"model_type":"mistral3","text_config":{"model_type":"other"}`: `model_type: "mistral3" is not supported`,
		`"model_type":"llama","logits_scaling":2,` + shape:             "logits_scaling: 2 is not supported in llama",
		`"model_type":"qwen3_5_text",` + shape:                         "layer_types: all layers are linear_attention",
	} {
		if _, err := readText(t, "{"+text+"}"); err == nil || !strings.Contains(err.Error(), fault) {
			t.Errorf("%s: %v, want %q", text, err, fault)
		}
	}
}

func TestAnd(t *testing.T) {
	for want, words := range map[string][]string{"": nil, "a": {"a"}, "a and b": {"a", "b"}, "a, b and c": {"a", "b", "c"}} {
		if got := wordList(words...); got != want {
			t.Errorf("%v: %q, want %q", words, got, want)
		}
	}
}
