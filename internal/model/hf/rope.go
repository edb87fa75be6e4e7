package hf

import (
	"cmp"
	"math"
)

// readRope reads the rotary settings in either form. Where a file has both, rope_scaling
// wins, and a rope_theta inside wins over one outside, as in transformers. It returns the
// prefix of the keys of the form that the file has.
func readRope(c *Config, o object) string {
	r := o.object("rope_scaling")
	if len(r.keys) == 0 {
		r = o.object("rope_parameters")
	}
	for _, kind := range []string{FullAttention, SlidingAttention} {
		if r.has(kind) {
			r.fault(kind, "rotary settings that differ by layer are not supported")
			return r.prefix
		}
	}
	c.RopeTheta = r.number("rope_theta", o.number("rope_theta", 10000))
	if p := r.number("partial_rotary_factor", 1); p != 1 {
		r.fault("partial_rotary_factor", "%v is not supported; cprun rotates all dimensions of a head", p)
	}
	if r.has("mrope_section") {
		r.fault("mrope_section", "rotation by image coordinates is not supported")
	}
	s := &RopeScaling{Type: r.text("rope_type", r.text("type", "default"))}
	trained := o.integer("original_max_position_embeddings", r.integer("original_max_position_embeddings",
		c.MaxPositionEmbedding))
	switch s.Type {
	case "default":
		return r.prefix
	case "linear":
		s.Factor = r.required("factor")
	case "llama3":
		s.Factor = r.required("factor")
		s.LowFreqFactor, s.HighFreqFactor = r.required("low_freq_factor"), r.required("high_freq_factor")
		s.OriginalMax = trained
	case "yarn":
		readYarn(c, s, r, trained)
	default:
		key := "rope_type"
		if !r.has(key) {
			key = "type"
		}
		r.fault(key, "%.64q is not supported; cprun has %s", s.Type, and(append([]string{"default"},
			c.Family().ropes()...)...))
		return r.prefix
	}
	c.RopeScaling = s
	return r.prefix
}

func readYarn(c *Config, s *RopeScaling, r object, trained int) {
	s.OriginalMax = trained
	s.Factor = r.number("factor", 0)
	if !r.has("factor") && trained > 0 { // DeepSeek's form: the ratio of the lengths
		s.Factor = float64(c.MaxPositionEmbedding) / float64(trained)
	}
	// as in transformers, 0 is the default
	s.BetaFast, s.BetaSlow = cmp.Or(r.number("beta_fast", 0), 32), cmp.Or(r.number("beta_slow", 0), 1)
	if r.has("attention_factor") {
		f := r.number("attention_factor", 0)
		s.AttentionFactor = &f
	}
	s.MScale, s.MScaleAllDim = r.number("mscale", 0), r.number("mscale_all_dim", 0)
	if r.has("truncate") {
		t := r.boolean("truncate", true)
		s.Truncate = &t
	}
}

func (o object) required(key string) float64 {
	if !o.has(key) {
		o.fault(key, "missing")
	}
	return o.number(key, 0)
}

// Positions returns max_position_embeddings of a model that does not say it and was trained on samples
// of that length: what its rotary settings reach, and no less than the samples. For yarn it is the
// first alone, since transformers takes the factor to be its ratio to the trained length.
func (c *Config) Positions(seqLen int) int {
	reach := 0
	if s := c.RopeScaling; s != nil {
		reach = int(min(math.Round(float64(s.OriginalMax)*s.Factor), maxInt))
		if s.Type == "yarn" {
			return max(reach, 1)
		}
	}
	return min(max(reach, seqLen), maxInt)
}
