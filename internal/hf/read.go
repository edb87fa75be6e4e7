package hf

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
)

// maxJSON bounds config.json and the weight index: the largest known are a few megabytes.
const maxJSON = 64 << 20

// ReadConfig reads config.json of a model directory. A file whose contents are wrong, or
// describe what cprun does not compute, gives a *ConfigError with every fault.
func ReadConfig(dir string) (*Config, error) {
	d, err := openDir(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	raw, err := d.readJSON("config.json")
	if err != nil {
		return nil, err
	}
	c, faults := parseConfig(raw)
	if len(faults) > 0 {
		return nil, &ConfigError{filepath.Join(dir, "config.json"), faults}
	}
	return c, nil
}

// readJSON is a whole small file.
func (d *dir) readJSON(name string) ([]byte, error) {
	f, err := d.open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxJSON+1))
	if err == nil && len(raw) > maxJSON {
		err = errors.New("longer than 64 MiB")
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(d.path, name), err)
	}
	return raw, nil
}

func parseConfig(raw []byte) (*Config, []Fault) {
	var faults faults
	o := object{faults: &faults}
	if err := json.Unmarshal(raw, &o.keys); err != nil {
		return nil, []Fault{{"", fmt.Sprintf("not a JSON object: %v", err)}}
	}
	c := &Config{Architecture: architecture(o)}
	if c.Architecture == "" {
		return nil, faults // every other rule depends on it
	}
	refuse(o)
	readShape(c, o)
	rope := readRope(c, o)
	readWindow(c, o)
	for _, key := range []string{"bos_token_id", "eos_token_id", "pad_token_id"} {
		if raw, ok := o.keys[key]; ok {
			if c.TokenIDs == nil {
				c.TokenIDs = map[string]json.RawMessage{}
			}
			c.TokenIDs[key] = raw
		}
	}
	for _, f := range c.Check() {
		if key, ok := strings.CutPrefix(f.Key, "rope_scaling."); ok {
			f.Key = rope + key // the form that this file has
		}
		faults.add(f.Key, "%s", f.Msg)
	}
	if len(faults) > 0 {
		return nil, faults
	}
	return c, nil
}

var classes = map[string]string{Llama: "LlamaForCausalLM", Qwen3: "Qwen3ForCausalLM"}

// architecture is "llama" or "qwen3"; a fault and "" for any other.
func architecture(o object) string {
	kind := o.text("model_type", "")
	var names []string
	o.get("architectures", "a list of strings", &names)
	if len(*o.faults) > 0 {
		return ""
	}
	if kind == "" {
		for k, class := range classes {
			if slices.Contains(names, class) {
				kind = k
			}
		}
	}
	class, ok := classes[kind]
	switch {
	case kind == "" && len(names) == 0:
		o.fault("model_type", "missing; llama and qwen3 are known")
	case kind == "":
		o.fault("architectures", "%q is not known; LlamaForCausalLM and Qwen3ForCausalLM are", names)
	case kind == "mistral":
		o.fault("model_type", "\"mistral\" is not known; llama and qwen3 are. Its tensors are named like llama's, but its "+
			"defaults differ (sliding_window 4096 on every layer where the key is absent). To train it, copy the "+
			"directory and set model_type llama, architectures [LlamaForCausalLM], and every key that it left out")
	case !ok:
		o.fault("model_type", "%q is not known; llama and qwen3 are", kind)
	case len(names) > 0 && !slices.Contains(names, class):
		o.fault("architectures", "%q has another head than the %s that cprun trains", names, class)
		return ""
	}
	if !ok {
		return ""
	}
	return kind
}

// refuse reports what changes the computation in a way that cprun does not follow.
func refuse(o object) {
	for _, key := range []string{"attention_bias", "mlp_bias"} {
		if o.boolean(key, false) {
			o.fault(key, "true is not computed: projections have no bias")
		}
	}
	if act := o.text("hidden_act", "silu"); act != "silu" {
		o.fault("hidden_act", "%q is not computed; silu is", act)
	}
	if p := o.number("attention_dropout", 0); p != 0 {
		o.fault("attention_dropout", "%v is not computed; set it to 0", p)
	}
	if p := o.number("partial_rotary_factor", 1); p != 1 {
		o.fault("partial_rotary_factor", "%v is not computed; all of a head's dimensions turn", p)
	}
	for _, key := range []string{"num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"} {
		if o.integer(key, 0) != 0 {
			o.fault(key, "mixtures of experts are not computed")
		}
	}
	for _, key := range []string{"attn_logit_softcapping", "final_logit_softcapping"} {
		if o.number(key, 0) != 0 {
			o.fault(key, "softcapping in a model is not computed")
		}
	}
	if o.has("quantization_config") {
		o.fault("quantization_config", "quantised weights are not read; convert them to bfloat16 first")
	}
}

// readShape reads the sizes, with the defaults that transformers gives each architecture.
func readShape(c *Config, o object) {
	for _, f := range []struct {
		key string
		to  *int
	}{
		{"vocab_size", &c.VocabSize}, {"hidden_size", &c.HiddenSize}, {"intermediate_size", &c.IntermediateSize},
		{"num_hidden_layers", &c.NumHiddenLayers}, {"num_attention_heads", &c.NumAttentionHeads},
	} {
		// transformers has defaults here too, those of one model of 2023. A file without
		// these keys is a mistake rather than that model.
		if !o.has(f.key) {
			o.fault(f.key, "missing")
		}
		*f.to = o.integer(f.key, 0)
	}
	c.NumKeyValueHeads = o.integer("num_key_value_heads", c.NumAttentionHeads)
	headDim, maxPositions := 0, 2048
	if c.NumAttentionHeads > 0 {
		headDim = c.HiddenSize / c.NumAttentionHeads
	}
	if c.Architecture == Qwen3 {
		headDim, maxPositions = 128, 32768
		if _, ok := o.keys["num_key_value_heads"]; !ok { // a null means as many as heads
			c.NumKeyValueHeads = 32
		}
	} else if !o.has("head_dim") && c.NumAttentionHeads > 0 && c.HiddenSize%c.NumAttentionHeads != 0 {
		o.fault("head_dim", "missing, and hidden_size %d is no multiple of num_attention_heads %d", c.HiddenSize, c.NumAttentionHeads)
	}
	c.HeadDim = o.integer("head_dim", headDim)
	c.RMSNormEps = o.number("rms_norm_eps", 1e-6)
	c.InitializerRange = o.number("initializer_range", 0.02)
	c.MaxPositionEmbedding = o.integer("max_position_embeddings", maxPositions)
	if c.MaxPositionEmbedding == 0 {
		o.fault("max_position_embeddings", "0 is not positive")
	}
	c.TieWordEmbeddings = o.boolean("tie_word_embeddings", false)
}

// readWindow resolves which layers slide. transformers' llama has no window and ignores the
// key; cprun obeys it in a llama too, as in train.yaml, and Caveat tells of the difference.
func readWindow(c *Config, o object) {
	window := o.integer("sliding_window", 0)
	if o.has("sliding_window") && window == 0 {
		o.fault("sliding_window", "0 hides every token from itself; null is no window")
	}
	o.get("layer_types", "a list of strings", &c.LayerTypes)
	use := o.boolean("use_sliding_window", c.Architecture == Llama)
	from := o.integer("max_window_layers", 28)
	if c.Architecture == Qwen3 {
		if _, ok := o.keys["sliding_window"]; !ok {
			window = 4096
		}
		if c.LayerTypes == nil && use && window > 0 && !o.faults.has("num_hidden_layers") {
			for i := range min(c.NumHiddenLayers, maxLayers) {
				kind := FullAttention
				if i >= from {
					kind = SlidingAttention
				}
				c.LayerTypes = append(c.LayerTypes, kind)
			}
		}
	}
	if use {
		c.SlidingWindow = window
	}
	if c.LayerTypes != nil && len(c.LayerTypes) == c.NumHiddenLayers && !slices.ContainsFunc(c.LayerTypes, func(t string) bool { return t != FullAttention }) {
		// Nothing slides: one way to say it, whichever way the file did.
		c.SlidingWindow, c.LayerTypes = 0, nil
	}
}
