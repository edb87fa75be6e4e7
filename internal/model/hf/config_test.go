package hf

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/safetensors"
)

// readText reads a config with this text.
func readText(t testing.TB, text string) (*Config, error) {
	return ReadConfig(dirOf(t, map[string]string{"config.json": text}))
}

const llama = `"model_type":"llama","vocab_size":64,"hidden_size":32,"intermediate_size":48,"num_hidden_layers":3,"num_attention_heads":4`

const qwen3 = `"model_type":"qwen3","vocab_size":64,"hidden_size":32,"intermediate_size":48,"num_hidden_layers":3,"num_attention_heads":4,"num_key_value_heads":2`

const (
	shape   = `"vocab_size":64,"hidden_size":32,"intermediate_size":48,"num_hidden_layers":3,"num_attention_heads":4`
	mistral = `"model_type":"mistral",` + shape
	phi3    = `"model_type":"phi3",` + shape
	smollm3 = `"model_type":"smollm3",` + shape
)

// longrope returns the end of a phi3 with stretched rotations.
func longrope(short, long string) string {
	return `,"original_max_position_embeddings":1024,"rope_scaling":{"type":"su","short_factor":` + short +
		`,"long_factor":` + long + `}`
}

// base returns the config of llama without further keys.
func base() Config {
	return Config{Architecture: Llama, VocabSize: 64, HiddenSize: 32, IntermediateSize: 48, NumHiddenLayers: 3,
		NumAttentionHeads: 4,
		NumKeyValueHeads:  4, HeadDim: 8, RopeTheta: 10000, RMSNormEps: 1e-6, MaxPositionEmbedding: 2048,
		InitializerRange: 0.02}
}

func TestConfigResolvesAsTransformersDoes(t *testing.T) {
	f, no := 1.25, false
	const sliding, full = SlidingAttention, FullAttention
	same := func(*Config) {}
	theta := func(theta float64) func(*Config) { return func(c *Config) { c.RopeTheta = theta } }
	scaled := func(s RopeScaling) func(*Config) { return func(c *Config) { c.RopeScaling = &s } }
	window := func(n int, types ...string) func(*Config) {
		return func(c *Config) { c.SlidingWindow, c.LayerTypes = n, types }
	}
	of := func(family string, kv, positions int, more ...func(*Config)) func(*Config) {
		return func(c *Config) {
			c.Architecture, c.NumKeyValueHeads, c.MaxPositionEmbedding = family, kv, positions
			for _, set := range more {
				set(c)
			}
		}
	}
	smol := func(rotate ...int) func(*Config) {
		return func(c *Config) { c.RopeTheta, c.TieWordEmbeddings, c.NoRopeLayers = 2e6, true, rotate }
	}
	phi := func(c *Config) { c.RMSNormEps = 1e-5 }
	for _, tc := range []struct {
		name, text string // without the braces
		want       func(*Config)
	}{
		{"defaults", llama, same},
		{"architecture by class", llama[len(`"model_type":"llama",`):] + `,"architectures":["LlamaForCausalLM"]`, same},
		{"null heads", llama + `,"num_key_value_heads":null,"head_dim":null,"partial_rotary_factor":1`, same},
		{"given", llama + `,"num_key_value_heads":2,"head_dim":16,"rms_norm_eps":1e-5,"tie_word_embeddings":true,` +
			`"initializer_range":0.01,"max_position_embeddings":1073741824`, of(Llama, 2, maxTokens, func(c *Config) {
			c.HeadDim, c.RMSNormEps, c.TieWordEmbeddings, c.InitializerRange = 16, 1e-5, true, 0.01
		})},
		{"token ids", llama + `,"bos_token_id":1,"eos_token_id":[2,3]`, func(c *Config) {
			c.TokenIDs = map[string]json.RawMessage{"bos_token_id": []byte("1"), "eos_token_id": []byte("[2,3]")}
		}},
		{"v4 theta", llama + `,"rope_theta":500000,"rope_scaling":null`, theta(500000)},
		{"v5 theta", llama + `,"rope_parameters":{"rope_type":"default","rope_theta":500000.0}`, theta(500000)},
		{"inner theta wins", llama + `,"rope_theta":7,"rope_parameters":{"rope_theta":9}`, theta(9)},
		{"rope_scaling wins", llama + `,"rope_scaling":{"type":"linear","factor":2},` +
			`"rope_parameters":{"rope_type":"linear","factor":3,"rope_theta":9}`, scaled(RopeScaling{Type: "linear", Factor: 2})},
		{"rope_type wins over type", llama + `,"rope_scaling":{"type":"x","rope_type":"linear","factor":2}`,
			scaled(RopeScaling{Type: "linear", Factor: 2})},
		{"llama3", llama + `,"rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":1,"high_freq_factor":4,` +
			`"original_max_position_embeddings":8192}`,
			scaled(RopeScaling{Type: "llama3", Factor: 8, LowFreqFactor: 1, HighFreqFactor: 4, OriginalMax: 8192})},
		{"llama3 trained length",
			llama + `,"rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":1,"high_freq_factor":4}`,
			scaled(RopeScaling{Type: "llama3", Factor: 8, LowFreqFactor: 1, HighFreqFactor: 4, OriginalMax: 2048})},
		{"yarn", llama + `,"rope_scaling":{"type":"yarn","factor":4,"original_max_position_embeddings":512,` +
			`"attention_factor":1.25,"truncate":false,"mscale":0.7,"mscale_all_dim":0.5,"beta_fast":16}`,
			scaled(RopeScaling{Type: "yarn", Factor: 4, OriginalMax: 512, BetaFast: 16, BetaSlow: 1, AttentionFactor: &f,
				Truncate: &no, MScale: 0.7, MScaleAllDim: 0.5})},
		{"yarn factor from lengths", llama + `,"rope_scaling":{"type":"yarn","original_max_position_embeddings":512}`,
			scaled(RopeScaling{Type: "yarn", Factor: 4, OriginalMax: 512, BetaFast: 32, BetaSlow: 1})},
		{"llama window", llama + `,"sliding_window":8`, window(8)},
		{"llama window of layers",
			llama + `,"sliding_window":8,"layer_types":["full_attention","sliding_attention","full_attention"]`,
			window(8, full, sliding, full)},
		{"llama window off", llama + `,"sliding_window":8,"use_sliding_window":false`, same},
		{"qwen3", qwen3, of(Qwen3, 2, 32768, func(c *Config) { c.HeadDim = 128 })},
		{"qwen3 window unused", qwen3 + `,"sliding_window":8,"max_window_layers":1,"head_dim":8`, of(Qwen3, 2, 32768)},
		{"qwen3 window beyond the layers", qwen3 + `,"use_sliding_window":true,"head_dim":8`, of(Qwen3, 2, 32768)},
		{"qwen3 window", qwen3 + `,"use_sliding_window":true,"max_window_layers":1,"head_dim":8`,
			of(Qwen3, 2, 32768, window(4096, full, sliding, sliding))},
		{"qwen2", `"model_type":"qwen2","attention_bias":false,` + shape + `,"num_key_value_heads":2`, of("qwen2", 2, 32768)},
		{"biases", llama + `,"attention_bias":true,"mlp_bias":true`,
			func(c *Config) { c.AttentionBias, c.MLPBias = true, true }},
		{"mistral", mistral + `,"num_key_value_heads":2`, of("mistral", 2, 131072, window(4096))},
		{"mistral without a window", mistral + `,"num_key_value_heads":2,"sliding_window":null`, of("mistral", 2, 131072)},
		{"smollm3", smollm3, of("smollm3", 4, 32768, smol(1, 1, 1))},
		{"smollm3 window", smollm3 + `,"no_rope_layer_interval":2,"use_sliding_window":true,"sliding_window":8`,
			of("smollm3", 4, 32768, smol(1, 0, 1), window(8, full, sliding, full))},
		{"smollm3 list", smollm3 + `,"no_rope_layers":[0,1,1,0]`, of("smollm3", 4, 32768, smol(0, 1, 1))},
		{"phi3", phi3 + `,"use_sliding_window":false,"sliding_window":9`, of("phi3", 4, 4096, phi, window(9))},
		{"longrope", phi3 + `,"partial_rotary_factor":0.5` + longrope(`[1,2]`, `[3,4]`), of("phi3", 4, 4096, phi,
			scaled(RopeScaling{Type: "longrope", Factor: 4, OriginalMax: 1024, ShortFactor: []float64{1, 2},
				LongFactor: []float64{3, 4}}), func(c *Config) { c.PartialRotaryFactor = 0.5 })},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := readText(t, "{"+tc.text+"}")
			if err != nil {
				t.Fatal(err)
			}
			want := base()
			tc.want(&want)
			if !reflect.DeepEqual(*got, want) {
				t.Errorf("got\n%+v\nwant\n%+v", *got, want)
			}
		})
	}
}

// The files under testdata were written by transformers 5.23 from the settings named here.
func TestConfigsOfTransformers(t *testing.T) {
	for dir, check := range map[string]func(c *Config) bool{
		"tiny-llama": func(c *Config) bool { return c.HeadDim == 16 && c.RopeTheta == 10000 && c.RopeScaling == nil },
		"qwen3":      func(c *Config) bool { return c.HeadDim == 16 && c.SlidingWindow == 0 && c.Layer(2).Mixer.Window == -1 },
		"qwen3-window": func(c *Config) bool {
			return c.TieWordEmbeddings && c.Layer(0).Mixer.Window == -1 && c.Layer(1).Mixer.Window == 7 && c.Layer(2).Mixer.Window == 7
		},
		"llama3-rope": func(c *Config) bool {
			return c.RopeTheta == 500000 && reflect.DeepEqual(*c.RopeScaling, RopeScaling{Type: "llama3", Factor: 8,
				LowFreqFactor: 1, HighFreqFactor: 4, OriginalMax: 8192})
		},
		"llama-yarn": func(c *Config) bool {
			s := c.RopeScaling
			return s.Factor == 4 && s.OriginalMax == 2048 && s.BetaFast == 16 && !*s.Truncate
		},
	} {
		c, err := ReadConfig(filepath.Join("testdata", dir))
		if err != nil {
			t.Errorf("%s: %v", dir, err)
			continue
		}
		if !check(c) {
			t.Errorf("%s: got %+v", dir, c)
		}
		out := t.TempDir()
		if err := WriteConfig(opened(t, out), c, safetensors.BF16); err != nil {
			t.Fatal(err)
		}
		if again, err := ReadConfig(out); err != nil || !reflect.DeepEqual(again.tokenless(), c.tokenless()) {
			t.Errorf("%s written and read: %v\n%+v\nwant\n%+v", dir, err, again, c)
		}
	}
}

// tokenless returns c without the fields that WriteConfig fills with null.
func (c *Config) tokenless() Config {
	d := *c
	d.TokenIDs, d.DType = nil, "" // the writer sets the type
	return d
}

func TestWrongConfigsAreRefused(t *testing.T) {
	for _, tc := range []struct {
		name, text string
		want       []string
	}{
		{"not JSON", `{`, []string{"not a JSON object"}},
		{"not object", `[]`, []string{"not a JSON object"}},
		{"no model", `{}`, []string{"model_type: missing"}},
		{"other model", `{"model_type":"gpt2"}`, []string{`model_type: "gpt2" is not supported`}},
		{"other head", `{` + llama + `,"architectures":["LlamaForSequenceClassification"]}`,
			[]string{"architectures: ", "cprun trains the language model"}},
		{"unknown class", `{"architectures":["X"]}`, []string{"architectures: "}},
		{"missing keys", `{"model_type":"llama"}`, []string{"vocab_size: missing", "hidden_size: missing",
			"intermediate_size: missing", "num_hidden_layers: missing", "num_attention_heads: missing"}},
		{"many at once", `{` + llama +
			`,"lm_head_bias":true,"resid_pdrop":0.2,"hidden_act":"gelu","num_local_experts":8,"quantization_config":{"bits":4},"attention_dropout":0.1}`,
			[]string{"lm_head_bias: true", "resid_pdrop: 0.2", `hidden_act: "gelu"`, "num_local_experts: mixtures",
				"quantization_config: ", "attention_dropout: 0.1"}},
		{"no biases", `{` + phi3 + `,"attention_bias":true,"mlp_bias":true}`,
			[]string{"attention_bias: true is not supported: phi3", "mlp_bias: true is not supported: phi3"}},
		{"no layer without rotation", `{` + llama + `,"no_rope_layers":[1,0,1]}`,
			[]string{"no_rope_layers: not supported: every layer of llama rotates"}},
		{"few rotations", `{` + smollm3 + `,"no_rope_layers":[1,0]}`, []string{"no_rope_layers: length 2 differs"}},
		{"odd rotations", `{` + smollm3 + `,"no_rope_layers":[1,0,2]}`, []string{"no_rope_layers: 2 is neither"}},
		{"interval", `{` + smollm3 + `,"no_rope_layer_interval":0}`, []string{"no_rope_layer_interval: 0 is not"}},
		{"part", `{` + phi3 + `,"partial_rotary_factor":1.5}`, []string{"partial_rotary_factor: 1.5 is out of range; want a number in (0, 1]"}},
		{"odd part", `{` + phi3 + `,"partial_rotary_factor":0.4}`,
			[]string{"partial_rotary_factor: 0.4 of head_dim 8 are 3 dimensions"}},
		{"longrope of another length", `{` + phi3 + longrope(`[1,1]`, `[1,0,1,1]`) + `}`,
			[]string{"rope_scaling.short_factor: 2 numbers, but 4 pairs", "rope_scaling.long_factor: 0 is out of range; want a number in (0, inf)"}},
		{"linear phi3", `{` + phi3 + `,"rope_scaling":{"type":"linear","factor":2}}`,
			[]string{`rope_scaling.rope_type: "linear" is not supported; cprun has default and longrope`}},
		{"few rotations with a window", `{` + smollm3 +
			`,"no_rope_layers":[1,0],"use_sliding_window":true,"sliding_window":8}`, []string{"no_rope_layers: length 2"}},
		{"windows by layer", `{` + mistral + `,"layer_types":["full_attention","sliding_attention","full_attention"]}`,
			[]string{"layer_types: all layers of mistral slide or none"}},
		{"softcap", `{` + llama + `,"attn_logit_softcapping":30.0}`, []string{"attn_logit_softcapping: "}},
		{"partial rotary", `{` + llama + `,"partial_rotary_factor":0.5}`, []string{"partial_rotary_factor: 0.5"}},
		{"wrong types", `{` + llama +
			`,"num_key_value_heads":"2","rms_norm_eps":[],"tie_word_embeddings":1,"head_dim":8.5}`,
			[]string{`num_key_value_heads: "2" where an integer`, "rms_norm_eps: [] where a number",
				"tie_word_embeddings: 1 where true", "head_dim: 8.5 where an integer"}},
		{"negative", `{` + llama + `,"head_dim":-8}`, []string{"head_dim: -8 is too small; the least is 2"}},
		{"zeros", `{` + llama + `,"num_key_value_heads":0,"head_dim":0,"max_position_embeddings":0,` +
			`"rope_scaling":{"type":"yarn","factor":0}}`, []string{"num_key_value_heads: 0 is too small", "head_dim: 0 is",
			"max_position_embeddings: 0 is", "rope_scaling.factor: 0 is out of range"}},
		{"negative layers", `{` + strings.Replace(smollm3, `_layers":3`, `_layers":-3`, 1) + `}`,
			[]string{"num_hidden_layers: -3 is too small"}},
		{"too many layers", `{` + strings.Replace(smollm3, `_layers":3`, `_layers":1025`, 1) + `}`,
			[]string{"num_hidden_layers: 1025 is too large"}},
		{"huge", `{` + llama + `,"head_dim":1e30}`, []string{"head_dim: 1e30 where an integer"}},
		{"odd head", `{` + llama + `,"head_dim":7}`, []string{"head_dim: 7 is odd"}},
		{"head from uneven", `{` + strings.Replace(llama, "32", "30", 1) + `}`, []string{"num_attention_heads: 4 heads do not divide hidden_size 30; set head_dim"}},
		{"kv heads", `{` + llama + `,"num_key_value_heads":3}`, []string{"num_key_value_heads: 3 does not divide"}},
		{"eps", `{` + llama + `,"rms_norm_eps":0}`, []string{"rms_norm_eps: 0 is out of range"}},
		{"theta", `{` + llama + `,"rope_theta":0}`, []string{"rope_theta: 0 is out of range; want a number in (1, inf)"}},
		{"dynamic", `{` + llama + `,"rope_scaling":{"type":"dynamic","factor":2}}`,
			[]string{`rope_scaling.type: "dynamic" is not supported`}},
		{"longrope", `{` + llama + `,"rope_parameters":{"rope_type":"longrope","rope_theta":1e4}}`,
			[]string{"rope_parameters.short_factor: missing; rope_type longrope", "rope_parameters.long_factor: missing"}},
		{"no factor", `{` + llama + `,"rope_parameters":{"rope_type":"linear"}}`,
			[]string{"rope_parameters.factor: missing; rope_type linear needs it"}},
		{"llama3 order", `{` + llama +
			`,"rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":4,"high_freq_factor":4}}`,
			[]string{"rope_scaling.high_freq_factor: 4 is not above"}},
		{"yarn order", `{` + llama + `,"rope_scaling":{"type":"yarn","factor":2,"beta_fast":1,"beta_slow":2}}`,
			[]string{"rope_scaling.beta_fast: 1 must be at least beta_slow 2"}},
		{"rope by layer", `{` + llama +
			`,"rope_parameters":{"full_attention":{"rope_theta":1e6},"sliding_attention":{"rope_theta":1e4}}}`,
			[]string{"rope_parameters.full_attention: ", "differ by layer"}},
		{"rope text", `{` + llama + `,"rope_scaling":"linear"}`, []string{`rope_scaling: "linear" where an object`}},
		{"layer count", `{` + llama + `,"sliding_window":8,"layer_types":["sliding_attention"]}`,
			[]string{"layer_types: length 1 "}},
		{"layer kind", `{` + llama + `,"layer_types":["full_attention","linear_attention","full_attention"]}`,
			[]string{`layer_types: entry 1 is "linear_attention"`}},
		{"window off but asked for",
			`{` + qwen3 + `,"layer_types":["full_attention","sliding_attention","full_attention"]}`,
			[]string{"sliding_window: "}},
		{"window 0", `{` + llama + `,"sliding_window":0}`, []string{"sliding_window: 0 hides"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := readText(t, tc.text)
			var ce *ConfigError
			if !errors.As(err, &ce) {
				t.Fatalf("got %v, want a ConfigError", err)
			}
			if len(strings.Split(err.Error(), "\n")) != len(ce.Faults) || !strings.HasSuffix(ce.Path, "config.json") {
				t.Errorf("got %v", err)
			}
			for _, w := range tc.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("no %q in\n%v", w, err)
				}
			}
		})
	}
	if _, err := ReadConfig(t.TempDir()); !errors.Is(err, os.ErrNotExist) ||
		!strings.Contains(err.Error(), "config.json") {
		t.Errorf("no file: %v", err)
	}
	if err := WriteConfig(opened(t, t.TempDir()), &Config{}, safetensors.F32); err == nil {
		t.Error("an empty config was written")
	}
}

func TestCaveatOfAWindowThatTransformersIgnores(t *testing.T) {
	c := base()
	if c.Caveat().Msg != "" {
		t.Error("caveat of a plain llama")
	}
	c.SlidingWindow = 8
	if c.Caveat().Msg == "" {
		t.Error("no caveat of a llama with a window")
	}
}

func TestPositionsOfATrainedModel(t *testing.T) {
	for _, tc := range []struct {
		rope *RopeScaling
		seq  int
		want int
	}{
		{nil, 128 << 10, 128 << 10},
		{&RopeScaling{Type: "linear", Factor: 4}, 4096, 4096},
		{&RopeScaling{Type: "llama3", Factor: 8, OriginalMax: 8192}, 4096, 64 << 10},
		{&RopeScaling{Type: "llama3", Factor: 8, OriginalMax: 8192}, 128 << 10, 128 << 10},
		{&RopeScaling{Type: "yarn", Factor: 2.5, OriginalMax: 32}, 100, 80},
		{nil, 1 << 40, maxInt},
		{&RopeScaling{Type: "yarn", Factor: 1e300, OriginalMax: 32}, 100, maxInt},
	} {
		c := Config{RopeScaling: tc.rope}
		if got := c.Positions(tc.seq); got != tc.want {
			t.Errorf("%+v, samples of %d: %d positions, want %d", tc.rope, tc.seq, got, tc.want)
		}
	}
}

// opened opens a directory until the end of the test.
func opened(t *testing.T, dir string) *os.Root {
	t.Helper()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root
}

// FuzzReadConfig checks that an accepted config can be built, written, and read back as the same.
func FuzzReadConfig(f *testing.F) {
	f.Add(`{` + llama + `}`)
	f.Add(`{` + qwen3 + `,"use_sliding_window":true,"max_window_layers":1}`)
	f.Add(`{` + llama + `,"rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":1,"high_freq_factor":4}}`)
	f.Add(`{` + llama + `,"rope_parameters":{"rope_type":"yarn","factor":2.5,"truncate":false,"rope_theta":1e4}}`)
	f.Add(`{"model_type":"mistral"}`)
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, text string) {
		c, faults := parseConfig([]byte(text))
		if (c == nil) == (len(faults) == 0) {
			t.Fatalf("config %v with faults %v", c, faults)
		}
		if c == nil {
			return
		}
		for i := range min(c.NumHiddenLayers, 100) {
			c.Layer(i)
		}
		if c.NumHiddenLayers > 1000 {
			return
		}
		if err := WriteConfig(opened(t, dir), c, safetensors.F32); err != nil {
			t.Fatal(err)
		}
		again, err := ReadConfig(dir)
		if err != nil {
			t.Fatal(err)
		}
		a, b := again.normal(), c.normal()
		if !reflect.DeepEqual(a, b) {
			t.Fatalf("read again\n%+v\nwas\n%+v", a, b)
		}
	})
}

// normal returns c in the canonical form of WriteConfig.
func (c *Config) normal() Config {
	d := c.tokenless()
	if d.SlidingWindow > 0 {
		var types []string
		for i := range d.NumHiddenLayers {
			types = append(types, map[bool]string{true: SlidingAttention, false: FullAttention}[c.Layer(i).Mixer.Window >= 0])
		}
		d.LayerTypes = types
	}
	return d
}
