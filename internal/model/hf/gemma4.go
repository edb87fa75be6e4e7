package hf

import (
	"cmp"
	"maps"
	"slices"
	"strconv"

	"github.com/cprun/cprun/kernels"
)

// These families have layers of other heads without a window, which rotate a part of their pairs. gemma4_text may have
// experts beside the MLP; gemma4_unified_text has none.
func init() {
	names := llamaNames.biases(Query, Key, Value, Output).with(headNorms).with(gemmaNorms).with(Names{
		LayerScale: "layer_scalar"})
	f := Family{
		Name: "gemma4_unified_text", Class: "Gemma4UnifiedForCausalLM", Tensors: names, Layer: llamaLayer,
		Partial: true, Proportional: true, Ropes: []string{}, ValueNorms: true, ScaledEmbedding: true,
		Whole: true, Nested: true,
		Defaults: Config{
			NumKeyValueHeads: 4, HeadDim: 256, GlobalHeadDim: 512, MaxPositionEmbedding: 256 << 10,
			TieWordEmbeddings: true, SlidingWindow: 1024, RopeTheta: 1e6, RopeLocalBaseFreq: 1e4, PartialRotaryFactor: 0.25,
		},
		Pad: 1, Windows: Windows{Slides: allBut(6, "")}, Wrapper: "gemma4_unified",
		Activation: kernels.GELU, ActivationKey: "hidden_activation",
		Keys:   []string{logitCapKey, localKey, globalDimKey, globalHeadsKey, keyValuesKey},
		Export: map[string]any{sharedLayersKey: 0, "use_double_wide_mlp": false},
	}
	Register(f)
	f.Name, f.Class, f.Wrapper = "gemma4_text", "Gemma4ForCausalLM", "gemma4"
	f.Defaults.MaxPositionEmbedding, f.Defaults.SlidingWindow = 128<<10, 512
	f.Tensors = names.with(Names{
		Router: "router.proj.weight", RouterNorm: "router.scale", ChoiceScale: "router.per_expert_scale",
		ExpertIn: "experts.gate_up_proj", ExpertDown: "experts.down_proj",
		ExpertNorm: "pre_feedforward_layernorm_2.weight", ExpertResult: "post_feedforward_layernorm_2.weight",
		SharedResult: "post_feedforward_layernorm_1.weight",
		SharedGate:   names[Gate], SharedUp: names[Up], SharedDown: names[Down],
	})
	f.Experts = &Mixture{Count: "num_experts", Apart: true, Router: kernels.Router{Normalize: true}}
	f.Keys = append([]string{"num_experts", "num_experts_per_tok", widthKey}, f.Keys...)
	f.Export = maps.Clone(f.Export)
	f.Export[perLayerInput] = 0
	Register(f)
}

// proportional is the kind of rotation of a Family.Proportional.
const proportional = "proportional"

// These keys have other forms or names in gemma4's config.json.
const (
	globalHeadsKey = "num_global_key_value_heads"
	keyValuesKey   = "attention_k_eq_v"
	perLayerKey    = "per_layer_config" // in place of the global keys: an object for each layer that differs
	topKey         = "top_k_experts"
	mixesKey       = "enable_moe_block"

	perLayerInput   = "hidden_size_per_layer_input"
	sharedLayersKey = "num_kv_shared_layers"
)

// readGlobal reads the heads of layers without a window, in either form, and refuses keys of the smallest models.
func readGlobal(c *Config, o object) {
	f := c.Family()
	if !slices.Contains(f.Keys, globalDimKey) {
		return
	}
	const small = "%v is not supported: cprun lacks %s of Gemma 4's E2B and E4B; it trains 12B, 26B-A4B and 31B"
	if n := o.integer(perLayerInput, 256); f.Experts != nil && n > 0 {
		o.fault(perLayerInput, small, n, "the embeddings of each layer")
	}
	if n := o.integer(sharedLayersKey, 0); n > 0 {
		o.fault(sharedLayersKey, small, n, "the layers with keys and values of others")
	}
	switch mixes := o.boolean(mixesKey, false); {
	case f.Experts != nil && !mixes: // the other keys have no effect
		c.NumExperts, c.NumExpertsPerTok, c.MoEIntermediateSize = 0, 0, 0
	case mixes && c.NumExperts == 0:
		o.fault("num_experts", "missing; %s needs it", mixesKey)
	}
	if n := len(c.LayerTypes); n > 0 {
		c.LayerTypes[n-1] = FullAttention // as in transformers
	}
	switch {
	case o.has(perLayerKey):
		c.keep(perLayerKey, o.keys[perLayerKey])
		c.readPerLayer(o.object(perLayerKey))
	case !c.AttentionKEqV:
		c.NumGlobalKeyValueHeads = 0
	}
}

// readPerLayer reads an object for each layer with other heads: all layers without a window, and no others.
func (c *Config) readPerLayer(o object) {
	n, base := c.NumHiddenLayers, [2]int{c.HeadDim, c.NumKeyValueHeads}
	if len(*o.faults) > 0 || n == 0 || len(c.LayerTypes) > 0 && len(c.LayerTypes) != n {
		return
	}
	heads := slices.Repeat([][2]int{base}, n)
	for _, key := range slices.Sorted(maps.Keys(o.keys)) {
		i, err := strconv.Atoi(key)
		if err != nil || i < 0 || i >= n {
			o.fault(key, "it is no layer; the model has layers 0 to %d", n-1)
			return
		}
		layer := o.object(key)
		for name := range layer.keys {
			if name != "head_dim" && name != "num_key_value_heads" {
				layer.fault(name, "not supported for a layer by itself")
			}
		}
		heads[i] = [2]int{layer.integer("head_dim", base[0]), layer.integer("num_key_value_heads", base[1])}
		if min(heads[i][0], heads[i][1]) == 0 {
			layer.fault("head_dim", "%d dimensions of %d heads of keys; both must be above 0", heads[i][0], heads[i][1])
		}
	}
	global := heads[n-1]
	for i, have := range heads {
		want := base
		if c.Layer(i).Mixer.Window < 0 {
			want = global
		}
		if have != want {
			o.faults.add(perLayerKey, "layer %d has %d heads of keys of dimension %d, and others of its kind %d of %d; cprun "+
				"needs equal ones", i, have[1], have[0], want[1], want[0])
			return
		}
	}
	c.GlobalHeadDim, c.NumGlobalKeyValueHeads = global[0], global[1]
}

// writeGlobal writes gemma4's keys in the form that was read.
func writeGlobal(m map[string]any, c *Config) {
	f := c.Family()
	if !slices.Contains(f.Keys, globalDimKey) {
		return
	}
	m[globalDimKey] = cmp.Or(c.GlobalHeadDim, c.HeadDim)
	if c.Unused[perLayerKey] != nil {
		delete(m, globalDimKey)
		delete(m, globalHeadsKey)
	}
	if f.Experts != nil {
		m[topKey], m[mixesKey] = m["num_experts_per_tok"], c.NumExperts > 0
		delete(m, "num_experts_per_tok")
	}
}
