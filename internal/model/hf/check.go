package hf

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
)

// Check returns the faults of a config, by the keys of config.json. Without faults the model can be built.
func (c *Config) Check() []Fault {
	var f faults
	family := families[c.Architecture]
	if family == nil {
		f.add("architecture", "%.64q is not supported; cprun trains %s", c.Architecture, wordList(Families()...))
	}
	for i := range ConfigKeys {
		c.checkKey(&ConfigKeys[i], family, &f)
	}
	heads := c.NumAttentionHeads
	for i, n := range []int{c.NumKeyValueHeads, c.NumGlobalKeyValueHeads} {
		if heads > 0 && n > 0 && heads%n != 0 {
			f.add([]string{"num_key_value_heads", globalHeadsKey}[i], "%d does not divide num_attention_heads %d; take one "+
				"of its divisors", n, heads)
		}
	}
	for i, n := range []int{c.HeadDim, c.GlobalHeadDim} {
		if key := []string{"head_dim", globalDimKey}[i]; n%2 != 0 {
			f.add(key, "%d is odd; rotary embeddings rotate pairs of dimensions: set an even %s", n, key)
		}
	}
	if family != nil {
		c.checkRotation(&f)
	}
	c.checkExperts(&f)
	c.checkHybrid(&f)
	c.checkBalance(&f)
	c.checkRope(&f)
	c.checkWindow(&f)
	return f
}

// checkKey checks a value by the table. family is nil if unknown.
func (c *Config) checkKey(k *ConfigKey, family *Family, f *faults) {
	if k.Ropes != "" && (c.RopeScaling == nil || !k.OfRope(c.RopeScaling.Type)) {
		return
	}
	field := k.Field(c)
	zero := isZero(field)
	switch {
	case !zero && family != nil && !k.in(family):
		f.add(k.Name, k.lacks, reflect.ValueOf(field).Elem(), family.Name)
	case zero && k.zeroIsValid():
	case zero && k.Name == "head_dim" && c.NumAttentionHeads > 0 && c.HiddenSize%c.NumAttentionHeads != 0:
		f.add("num_attention_heads", "%d heads do not divide hidden_size %d; set head_dim, or another number of heads",
			c.NumAttentionHeads, c.HiddenSize)
	case zero && k.Ropes != "" && k.NeededBy(c.RopeScaling.Type):
		f.add(k.Name, "missing; rope_type %s needs it", c.RopeScaling.Type)
	case zero && k.Ropes != "":
		f.add(k.Name, "missing; rope_type %s needs it, or max_position_embeddings", c.RopeScaling.Type)
	default:
		if err := k.check(field); err != nil {
			f.add(k.Name, "%v", err)
		}
	}
}

// checkRotation checks which layers and dimensions rotate.
func (c *Config) checkRotation(f *faults) {
	switch other := func(v int) bool { return v != 0 && v != 1 }; {
	case len(c.NoRopeLayers) == 0:
	case len(c.NoRopeLayers) != c.NumHiddenLayers:
		f.add("no_rope_layers", "length %d differs from num_hidden_layers %d; write one entry for each layer",
			len(c.NoRopeLayers), c.NumHiddenLayers)
	case slices.ContainsFunc(c.NoRopeLayers, other):
		f.add("no_rope_layers", "%d is neither 1 (the layer rotates) nor 0", c.NoRopeLayers[slices.IndexFunc(
			c.NoRopeLayers, other)])
	}
	if p := c.PartialRotaryFactor; p != 0 && (c.RotaryDim() < 2 || c.RotaryDim()%2 != 0) {
		f.add("partial_rotary_factor", "%v of head_dim %d are %d dimensions; they rotate in pairs", p, c.HeadDim,
			c.RotaryDim())
	}
}

func (c *Config) checkRope(f *faults) {
	s, family := c.RopeScaling, families[c.Architecture]
	if family != nil && slices.Contains(family.Keys, betaKey) && !c.scalesQueries() {
		f.add(ropePrefix+betaKey, "missing; %s needs it, with rope_type yarn", family.Name)
	}
	if s == nil {
		return
	}
	add := func(key, format string, args ...any) { f.add(ropePrefix+key, format, args...) }
	kinds := family.ropes()
	if !slices.Contains(kinds, s.Type) {
		add("rope_type", "%.64q is not supported; cprun has %s", s.Type,
			wordList(append([]string{"default"}, kinds...)...))
	}
	switch s.Type {
	case "llama3":
		if !(s.HighFreqFactor > s.LowFreqFactor) {
			add("high_freq_factor", "%v is not above low_freq_factor %v; raise it", s.HighFreqFactor, s.LowFreqFactor)
		}
	case "longrope":
		if c.HeadDim > 0 && c.NumAttentionHeads > 0 && c.HeadDim != c.HiddenSize/c.NumAttentionHeads {
			f.add("head_dim", "%d differs from hidden_size / num_attention_heads %d: transformers refuses longrope then; set "+
				"head_dim to it, or take another rope_type", c.HeadDim, c.HiddenSize/c.NumAttentionHeads)
		}
		for i, list := range [][]float64{s.ShortFactor, s.LongFactor} {
			if want := c.RotaryDim() / 2; len(list) != want {
				add([]string{"short_factor", "long_factor"}[i],
					"%d numbers, but %d pairs of dimensions rotate; write one for each", len(list), want)
			}
		}
	case "yarn":
		if fast, slow := cmp.Or(s.BetaFast, 32), cmp.Or(s.BetaSlow, 1); fast < slow {
			add("beta_fast", "%v must be at least beta_slow %v, and both above 0", fast, slow)
		}
	}
}

func (c *Config) checkWindow(f *faults) {
	if len(c.LayerTypes) > 0 && len(c.LayerTypes) != c.NumHiddenLayers {
		f.add("layer_types", "length %d differs from num_hidden_layers %d; write one entry for each layer",
			len(c.LayerTypes), c.NumHiddenLayers)
	}
	family := families[c.Architecture]
	if family != nil && family.Windows.Uniform && slices.Contains(c.LayerTypes, FullAttention) {
		f.add("layer_types", "all layers of %s slide or none; remove it", family.Name)
	}
	if family != nil && family.Interval > 0 && c.SlidingWindow > 0 {
		f.add("sliding_window", ignored, c.SlidingWindow, family.Name)
	}
	if len(c.LayerTypes) > 0 && !slices.ContainsFunc(c.LayerTypes, func(t string) bool { return t != LinearAttention }) {
		f.add("layer_types", "all layers are linear_attention; cprun needs one of full_attention")
	}
	if n := c.NumHiddenLayers; family != nil && family.Proportional && 0 < n && n <= maxLayers && c.SlidingWindow > 0 &&
		(len(c.LayerTypes) == 0 || len(c.LayerTypes) == n && c.LayerTypes[n-1] != FullAttention) {
		f.add("layer_types", "the last layer of %s is full_attention; write a list that ends with it", family.Name)
	}
	for i, t := range c.LayerTypes {
		if f.has("layer_types") {
			break // one fault is enough
		}
		other := SlidingAttention
		if family != nil && family.Interval > 0 {
			other = LinearAttention
		}
		switch {
		case t != FullAttention && t != other:
			f.add("layer_types", "entry %d is %.64q; write full_attention or %s", i, t, other)
		case t == SlidingAttention && c.SlidingWindow == 0:
			f.add("sliding_window", "missing, but layer_types[%d] is sliding_attention; write a number of tokens", i)
		}
	}
}

// Caveat returns a key, and how an export of this config differs for transformers from the model that cprun reads; ""
// if it does not.
func (c *Config) Caveat() Fault {
	if c.Wrapper != "" && c.Family().Whole {
		return Fault{"from", fmt.Sprintf("the language model of a %s: cprun trains it alone, and an export copies the other "+
			"tensors, such as those of images, unchanged", c.Wrapper)}
	}
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
