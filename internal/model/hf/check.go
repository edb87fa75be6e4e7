package hf

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// maxLayers bounds the claim of a config before any weight is read.
const maxLayers = 1 << 16

// Check returns the faults of a config, by the keys of config.json. Without faults the model can be built.
func (c *Config) Check() []Fault {
	var f faults
	if families[c.Architecture] == nil {
		f.add("architecture", "%.64q is not supported; cprun trains %s", c.Architecture, wordList(Families()...))
	}
	for _, p := range []struct {
		key   string
		value int
		most  int
	}{
		{"vocab_size", c.VocabSize, maxInt}, {"hidden_size", c.HiddenSize, maxInt},
		{"intermediate_size", c.IntermediateSize, maxInt}, {"num_hidden_layers", c.NumHiddenLayers, maxLayers},
		{"num_attention_heads", c.NumAttentionHeads, 1 << 16},
		{"num_key_value_heads", c.NumKeyValueHeads, 1 << 16}, {"head_dim", c.HeadDim, 1 << 16},
	} {
		if p.value < 1 || p.value > p.most {
			f.add(p.key, "%d is not from 1 to %d", p.value, p.most)
		}
	}
	if c.NumAttentionHeads > 0 && c.NumKeyValueHeads > 0 && c.NumAttentionHeads%c.NumKeyValueHeads != 0 {
		f.add("num_key_value_heads", "%d does not divide num_attention_heads %d; take one of its divisors",
			c.NumKeyValueHeads, c.NumAttentionHeads)
	}
	if c.HeadDim%2 != 0 {
		f.add("head_dim", "%d is odd; rotary embeddings rotate pairs of dimensions: set an even head_dim", c.HeadDim)
	}
	if !(c.RMSNormEps > 0) || math.IsInf(c.RMSNormEps, 0) {
		f.add("rms_norm_eps", "%v is not above 0", c.RMSNormEps)
	}
	if !(c.InitializerRange >= 0) || math.IsInf(c.InitializerRange, 0) {
		f.add("initializer_range", "%v is not a standard deviation", c.InitializerRange)
	}
	if c.MaxPositionEmbedding < 0 {
		f.add("max_position_embeddings", "%d is negative", c.MaxPositionEmbedding)
	}
	if !(c.RopeTheta > 1) || math.IsInf(c.RopeTheta, 0) {
		f.add("rope_theta", "%v is not above 1", c.RopeTheta)
	}
	c.checkFamily(&f)
	c.checkRope(&f)
	c.checkWindow(&f)
	return f
}

// checkFamily finds keys that the family does not have.
func (c *Config) checkFamily(f *faults) {
	c.checkFamilyKeys(f)
	family := families[c.Architecture]
	if family == nil {
		return
	}
	if c.AttentionBias && family.Tensors[Query.Bias()] == "" {
		f.add("attention_bias", "true is not supported: %s has no bias in attention", family.Name)
	}
	if c.MLPBias && family.Tensors[Gate.Bias()] == "" {
		f.add("mlp_bias", "true is not supported: %s has no bias in the MLP", family.Name)
	}
	switch other := func(v int) bool { return v != 0 && v != 1 }; {
	case len(c.NoRopeLayers) == 0:
	case family.NoRope == 0:
		f.add("no_rope_layers", "not supported: every layer of %s rotates", family.Name)
	case len(c.NoRopeLayers) != c.NumHiddenLayers:
		f.add("no_rope_layers", "length %d differs from num_hidden_layers %d; write one entry for each layer",
			len(c.NoRopeLayers), c.NumHiddenLayers)
	case slices.ContainsFunc(c.NoRopeLayers, other):
		f.add("no_rope_layers", "%d is neither 1 (the layer rotates) nor 0", c.NoRopeLayers[slices.IndexFunc(
			c.NoRopeLayers, other)])
	}
	switch p := c.PartialRotaryFactor; {
	case p == 0:
	case !family.Partial:
		f.add("partial_rotary_factor", "%v is not supported; %s rotates all dimensions of a head", p, family.Name)
	case !(p > 0 && p <= 1):
		f.add("partial_rotary_factor", "%v is not above 0 and at most 1", p)
	case c.RotaryDim() < 2 || c.RotaryDim()%2 != 0:
		f.add("partial_rotary_factor", "%v of head_dim %d are %d dimensions; they rotate in pairs", p, c.HeadDim,
			c.RotaryDim())
	}
}

// A familyKey is a key of config.json that not all families have: its value, and its default in the family.
type familyKey struct {
	value   *float64
	missing float64
}

func (c *Config) familyKeys() map[string]familyKey {
	var missing Defaults
	if f := families[c.Architecture]; f != nil {
		missing = f.Defaults
	}
	return map[string]familyKey{
		"query_pre_attn_scalar":   {&c.QueryPreAttnScalar, missing.QueryPreAttnScalar},
		"attn_logit_softcapping":  {&c.AttnLogitSoftcapping, missing.AttnSoftcap},
		"final_logit_softcapping": {&c.FinalLogitSoftcapping, missing.FinalSoftcap},
		localKey:                  {&c.RopeLocalBaseFreq, missing.RopeLocal},
	}
}

func (c *Config) checkFamilyKeys(f *faults) {
	for key, x := range c.familyKeys() {
		family := families[c.Architecture]
		switch {
		case *x.value == 0 || family == nil:
		case !slices.Contains(family.Keys, key):
			f.add(key, "%v is not supported in %s: transformers ignores it there; set it to null", *x.value, family.Name)
		case !(*x.value > 0) || math.IsInf(*x.value, 0):
			f.add(key, "%v is not positive", *x.value)
		case key == localKey && *x.value <= 1:
			f.add(key, "%v is not above 1", *x.value)
		}
	}
}

func (c *Config) checkRope(f *faults) {
	s := c.RopeScaling
	if s == nil {
		return
	}
	add := func(key, format string, args ...any) { f.add("rope_scaling."+key, format, args...) }
	if !(s.Factor > 0) || math.IsInf(s.Factor, 0) {
		add("factor", "%v is not positive", s.Factor)
	}
	if s.Type != "linear" && s.OriginalMax < 1 {
		add("original_max_position_embeddings", "%d is not positive", s.OriginalMax)
	}
	kinds := families[c.Architecture].ropes()
	if !slices.Contains(kinds, s.Type) {
		add("rope_type", "%.64q is not supported; cprun has %s", s.Type,
			wordList(append([]string{"default"}, kinds...)...))
	}
	if s.AttentionFactor != nil && !(*s.AttentionFactor > 0) {
		add("attention_factor", "%v is not positive", *s.AttentionFactor)
	}
	switch s.Type {
	case "llama3":
		if !(s.LowFreqFactor > 0) {
			add("low_freq_factor", "%v is not positive", s.LowFreqFactor)
		}
		if !(s.HighFreqFactor > s.LowFreqFactor) || math.IsInf(s.HighFreqFactor, 0) {
			add("high_freq_factor", "%v is not above low_freq_factor %v; raise it", s.HighFreqFactor, s.LowFreqFactor)
		}
	case "longrope":
		if c.NumAttentionHeads > 0 && c.HeadDim != c.HiddenSize/c.NumAttentionHeads {
			f.add("head_dim", "%d differs from hidden_size / num_attention_heads %d: transformers refuses longrope then; set "+
				"head_dim to it, or take another rope_type", c.HeadDim, c.HiddenSize/c.NumAttentionHeads)
		}
		for i, list := range [][]float64{s.ShortFactor, s.LongFactor} {
			key := []string{"short_factor", "long_factor"}[i]
			if want := c.RotaryDim() / 2; len(list) != want {
				add(key, "%d numbers, but %d pairs of dimensions rotate; write one for each", len(list), want)
			}
			for _, x := range list {
				if !(x > 0) || math.IsInf(x, 0) {
					add(key, "%v is not positive", x)
				}
			}
		}
	case "yarn":
		fast, slow := cmp.Or(s.BetaFast, 32), cmp.Or(s.BetaSlow, 1)
		if !(slow > 0 && fast >= slow) || math.IsInf(fast, 0) {
			add("beta_fast", "%v must be at least beta_slow %v, and both above 0", fast, slow)
		}
	}
}

func (c *Config) checkWindow(f *faults) {
	if c.SlidingWindow < 0 {
		f.add("sliding_window", "%d is negative", c.SlidingWindow)
	}
	if len(c.LayerTypes) > 0 && len(c.LayerTypes) != c.NumHiddenLayers {
		f.add("layer_types", "length %d differs from num_hidden_layers %d; write one entry for each layer",
			len(c.LayerTypes), c.NumHiddenLayers)
	}
	family := families[c.Architecture]
	if family != nil && family.Windows.Uniform && slices.Contains(c.LayerTypes, FullAttention) {
		f.add("layer_types", "all layers of %s slide or none; remove it", family.Name)
	}
	for i, t := range c.LayerTypes {
		if f.has("layer_types") {
			break // one fault is enough
		}
		switch {
		case t != FullAttention && t != SlidingAttention:
			f.add("layer_types", "entry %d is %.64q; write full_attention or sliding_attention", i, t)
		case t == SlidingAttention && c.SlidingWindow == 0:
			f.add("sliding_window", "missing, but layer_types[%d] is sliding_attention; write a number of tokens", i)
		}
	}
}

// Caveat returns a key, and how an export of this config differs for transformers from the model that cprun reads; ""
// if it does not.
func (c *Config) Caveat() Fault {
	if c.Wrapper != "" {
		return Fault{"from", fmt.Sprintf("the language model of a %s: cprun skips its other tensors, such as those of "+
			"images, and exports a %s", c.Wrapper, c.Architecture)}
	}
	if f := c.Family(); f.Windows.Foreign && c.SlidingWindow > 0 {
		return Fault{"sliding_window", fmt.Sprintf("transformers has no sliding window in its %s and will ignore "+
			"sliding_window %d; cprun reads it", f.Name, c.SlidingWindow)}
	}
	return Fault{}
}
