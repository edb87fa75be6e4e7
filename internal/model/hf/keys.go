package hf

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// A ConfigKey is a key of config.json with a field in Config. Reading, checks and exports follow the table of them, and
// in package config the keys of model in train.yaml and their reference. To add a key, add its field and its row.
type ConfigKey struct {
	Name string // the tag of its field; in rope_scaling with that prefix
	Doc  string // of train.yaml

	// Default is for train.yaml, as YAML: "null" is the zero of the field, and "" requires the key. config.json has the
	// defaults of the family, and requires the key if this has none.
	Default string
	Derived bool // other keys replace a zero; else a zero is none, or a default

	Min, Max int64    // of integers; Max 0: MaxInt32
	Within   string   // of numbers: an interval, such as (0, 1]
	Choices  []string // of texts

	Ropes string // of rope_scaling: the types with the key
	Needs string // the types that require it
	With  string // other keys of the same rules: their faults may cause one of this key

	also  []string             // other names in config.json
	ours  bool                 // of train.yaml alone: models are published with values that are not for training
	off   bool                 // null in config.json is the zero of the field, not the default of the family
	lacks string               // the fault of a family without the key, of the value and its name; "": all have it
	has   func(f *Family) bool // reports whether a family has the key; nil: Family.Keys lists it

	index []int // of the field
}

const (
	ropePrefix = "rope_scaling."
	trainedKey = "original_max_position_embeddings" // also outside of rope_scaling
	maxHeads   = 1 << 16
	maxLayers  = 1 << 10 // far above known models; plans and runs keep lists of layers
	maxTokens  = 1 << 30
)

// ConfigKeys is the table, in the order of train.yaml.
var ConfigKeys = []ConfigKey{
	{Name: "vocab_size", Min: 1, Doc: "rows of the embedding"},
	{Name: "hidden_size", Min: 1, Doc: "width of the residual stream"},
	{Name: "intermediate_size", Min: 1,
		Doc: "width of the gated MLP; not needed in qwen3_5_moe_text"},
	{Name: "num_hidden_layers", Min: 1, Max: maxLayers, Doc: "transformer layers"},
	{Name: "num_attention_heads", Min: 1, Max: maxHeads, With: "hidden_size head_dim", Doc: "query heads"},
	{Name: "num_key_value_heads", Default: "null", Derived: true, off: true, Min: 1, Max: maxHeads,
		With: "num_attention_heads",
		Doc:  "key and value heads; divides the query heads; null: as many"},
	{Name: "head_dim", Default: "null", Derived: true, Min: 2, Max: maxHeads,
		With: "hidden_size num_attention_heads",
		Doc:  "width of one head, even; null: hidden_size / num_attention_heads"},
	{Name: "rope_theta", Default: "10000.0", Within: "(1, inf)", Doc: "base of the rotary frequencies"},
	{Name: "rope_scaling.rope_type", Choices: []string{"linear", "llama3", "yarn", "longrope", "default"},
		Ropes: "linear llama3 yarn longrope", Needs: "linear llama3 yarn longrope",
		Doc: "yarn: arXiv:2309.00071; longrope: arXiv:2402.13753; default: no scaling"},
	{Name: "rope_scaling.factor", Derived: true, Within: "[1, inf)",
		Ropes: "linear llama3 yarn longrope", Needs: "linear llama3 yarn",
		With: "rope_scaling.rope_type " + ropePrefix + trainedKey,
		Doc:  "new length / trained length; longrope: from max_position_embeddings"},
	{Name: "rope_scaling.short_factor", Within: "(0, inf)", Ropes: "longrope", Needs: "longrope",
		With: "head_dim partial_rotary_factor",
		Doc:  "divides the frequency of each pair of dimensions, in documents up to the trained length"},
	{Name: "rope_scaling.long_factor", Within: "(0, inf)", Ropes: "longrope", Needs: "longrope",
		With: "head_dim partial_rotary_factor", Doc: "likewise in longer documents"},
	{Name: "rope_scaling.low_freq_factor", Within: "(0, inf)", Ropes: "llama3", Needs: "llama3",
		Doc: "wavelengths above trained length / this are stretched fully"},
	{Name: "rope_scaling.high_freq_factor", Within: "(0, inf)", Ropes: "llama3", Needs: "llama3",
		With: "rope_scaling.low_freq_factor",
		Doc:  "wavelengths below trained length / this stay; above low_freq_factor"},
	{Name: ropePrefix + trainedKey, Derived: true, Min: 1, Ropes: "llama3 yarn longrope",
		Needs: "llama3 longrope", With: "rope_scaling.rope_type",
		Doc: "trained length, tokens; yarn: max_position_embeddings"},
	{Name: "rope_scaling.beta_fast", Default: "32.0", Within: "(0, inf)", Ropes: "yarn", With: "rope_scaling.beta_slow",
		Doc: "frequencies with more turns than this over the trained length stay"},
	{Name: "rope_scaling.beta_slow", Default: "1.0", Within: "(0, inf)", Ropes: "yarn",
		Doc: "frequencies with fewer turns than this are stretched fully"},
	{Name: "rope_scaling.attention_factor", Default: "null", Within: "(0, inf)", Ropes: "yarn longrope",
		Doc: "null: yarn: from mscale, else 0.1 ln(factor) + 1; longrope: sqrt(1 + ln(factor) / ln(trained length))"},
	{Name: "rope_scaling.mscale", Default: "null", Within: "(0, inf)", Ropes: "yarn",
		Doc: "DeepSeek's form of attention_factor"},
	{Name: "rope_scaling.mscale_all_dim", Default: "null", Within: "(0, inf)", Ropes: "yarn",
		Doc: "DeepSeek's form of attention_factor"},
	{Name: "rope_scaling.truncate", Default: "null", Ropes: "yarn",
		Doc: "round the ramp's bounds to whole dimensions"},
	{Name: ropePrefix + betaKey, Default: "null", Within: "(0, inf)", Ropes: "yarn", lacks: ignored,
		Doc: "queries beyond each trained length grow by its logarithm; only ministral3"},
	{Name: "partial_rotary_factor", Default: "null", Within: "(0, 1]", With: "head_dim",
		has:   func(f *Family) bool { return f.Partial },
		lacks: "%v is not supported; %s rotates all dimensions of a head",
		Doc: "share of a head's dimensions that rotate, the first; null: all; below 1 only in glm4_moe, phi3, " +
			"qwen3_5_text, qwen3_5_moe_text, qwen3_next"},
	{Name: globalDimKey, Default: "null", Min: 2, Max: maxHeads, lacks: ignored,
		Doc: "head_dim of layers without a window; only gemma4_text, gemma4_unified_text, as the two following; null: " +
			"head_dim"},
	{Name: globalHeadsKey, Default: "null", Min: 1, Max: maxHeads, lacks: ignored,
		With: "num_attention_heads", Doc: "likewise num_key_value_heads"},
	{Name: keyValuesKey, Default: "false", lacks: ignored,
		Doc: "in these layers values are the projection of keys, before its norm"},
	{Name: "no_rope_layers", Default: "null", Max: 1, With: "num_hidden_layers",
		has:   func(f *Family) bool { return f.NoRope > 0 },
		lacks: "not supported: every layer of %[2]s rotates",
		Doc:   "for each layer 1 if it rotates, or 0; only in smollm3, where null is 0 for every fourth layer"},
	{Name: "attention_bias", Default: "false", has: func(f *Family) bool { return f.Tensors[Query.Bias()] != "" },
		lacks: "%v is not supported: %s has no bias in attention",
		Doc:   "biases of the projections of attention; qwen2 has those of queries, keys and values in any case"},
	{Name: "mlp_bias", Default: "false", has: func(f *Family) bool { return f.Tensors[Gate.Bias()] != "" },
		lacks: "%v is not supported: %s has no bias in the MLP", Doc: "biases of the projections of the MLP"},
	{Name: "num_experts", Default: "null", Min: 1, Max: maxExperts, also: expertCounts[1:],
		lacks: "mixtures of experts are not supported in %[2]s; set it to null", With: "num_experts_per_tok n_group",
		Doc: "experts of a layer, gated MLPs; only in families with them, which need it"},
	{Name: "num_experts_per_tok", Default: "null", Min: 1, Max: maxExperts, also: []string{"experts_per_token", topKey},
		lacks: ignored, With: "num_experts n_group topk_group", Doc: "experts that the router chooses for a token"},
	{Name: widthKey, Default: "null", Min: 1, lacks: ignored,
		Doc: "width of an expert; only glm4_moe, qwen3_5_moe_text, qwen3_moe, qwen3_next, which need it; in others it is " +
			"intermediate_size"},
	{Name: "n_shared_experts", Default: "0", Max: maxExperts, lacks: ignored,
		Doc: "width of an MLP for all tokens beside the experts, in multiples of theirs; only glm4_moe"},
	{Name: sharedKey, Default: "null", Min: 1, lacks: ignored,
		Doc: "width of an MLP for all tokens beside the experts, times a sigmoid of each; only qwen3_5_moe_text, " +
			"qwen3_next, which need it"},
	{Name: "first_k_dense_replace", Default: "0", Max: maxLayers, lacks: ignored,
		Doc: "first layers with an MLP in place of experts; only glm4_moe"},
	{Name: "mlp_only_layers", Default: "null", Max: maxLayers, lacks: ignored,
		Doc: "layers, from 0, with an MLP in place of experts; only qwen3_moe, qwen3_next; null: none"},
	{Name: "decoder_sparse_step", Default: "null", Min: 1, Max: maxLayers, lacks: ignored,
		Doc: "each layer of a number, from 1, that it divides has experts, the others an MLP; only qwen3_moe, " +
			"qwen3_next; null: 1"},
	{Name: "norm_topk_prob", Default: "false", lacks: ignored,
		Doc: "the weights of a token's experts are divided by their sum; only glm4_moe, qwen3_moe, qwen3_next"},
	{Name: "routed_scaling_factor", Default: "null", Within: "(0, inf)", lacks: ignored,
		Doc: "factor of the weights of experts; only glm4_moe; null: 1"},
	{Name: "n_group", Default: "null", Min: 1, Max: maxExperts, lacks: ignored, With: "num_experts",
		Doc: "groups of experts; only glm4_moe; null: 1"},
	{Name: "topk_group", Default: "null", Min: 1, Max: maxExperts, lacks: ignored, With: "n_group",
		Doc: "groups in which a token can choose experts; only glm4_moe; null: 1"},
	{Name: logitsKey, Default: "false", ours: true, has: (*Family).Balances, lacks: unbalanced,
		Doc: "add the loss of balance of the experts, as in transformers, over all tokens of a step; not in glm4_moe; " +
			"ignored in config.json"},
	{Name: coefKey, Default: "null", ours: true, has: (*Family).Balances, lacks: unbalanced, Within: "(0, inf)",
		With: logitsKey, Doc: "its factor; null: that of config.json, else 0.001"},
	{Name: qkNormKey, Default: "false", lacks: ignored,
		Doc: "an RMSNorm on each query and key head; only glm4_moe; qwen3 and others have it in any case"},
	{Name: localKey, Default: "null", off: true, Within: "(1, inf)", lacks: ignored,
		Doc: "rope_theta of layers with a window, never scaled; only gemma3_text, olmo3; null: rope_theta"},
	{Name: scalarKey, Default: "null", off: true, Within: "(0, inf)", lacks: ignored,
		Doc: "attention scores are divided by its root; only gemma2 and gemma3_text; null: head_dim"},
	{Name: scoreCapKey, Default: "null", off: true, Within: "(0, inf)", lacks: ignored,
		Doc: "limit of attention scores, by tanh; only gemma2; null: none"},
	{Name: logitCapKey, Default: "null", off: true, Within: "(0, inf)", lacks: ignored,
		Doc: "limit of logits, by tanh; only gemma2 and gemma3_text; null: none"},
	{Name: "attention_multiplier", Default: "null", off: true, Within: "(0, inf)", lacks: ignored,
		Doc: "factor of attention scores; only granite; null: 1 / sqrt(head_dim)"},
	{Name: "embedding_multiplier", Default: "null", off: true, Within: "(0, inf)", lacks: ignored,
		Doc: "factor of the embedding; only granite; null: 1"},
	{Name: "residual_multiplier", Default: "null", off: true, Within: "(0, inf)", lacks: ignored,
		Doc: "factor of the results of attention and MLP; only granite; null: 1"},
	{Name: "logits_scaling", Default: "null", off: true, Within: "(0, inf)", lacks: ignored,
		Doc: "divides the logits; only granite; null: 1"},
	{Name: "rms_norm_eps", Default: "1.0e-6", Within: "(0, inf)", Doc: "added to the mean square in RMSNorm"},
	{Name: "tie_word_embeddings", Default: "false", Doc: "the output matrix is the embedding"},
	{Name: "max_position_embeddings", Default: "null", Min: 1, Max: maxTokens,
		Doc: "longest trained length, tokens; a longer seq_len without rope_scaling gives a warning"},
	{Name: "initializer_range", Default: "0.02", Within: "[0, inf)", Doc: "standard deviation of random weights"},
	{Name: "sliding_window", Default: "null", off: true, Min: 1, Max: maxTokens, With: "layer_types",
		Doc: "a token sees itself and the sliding_window - 1 tokens before it"},
	{Name: "layer_types", Default: "null", Choices: []string{FullAttention, SlidingAttention, LinearAttention},
		With: "num_hidden_layers", Doc: "a value for each layer; null: all slide if sliding_window is set; in families " +
			"with linear_attention, each but every fourth has that"},
	{Name: "linear_conv_kernel_dim", Default: "null", Min: 2, Max: 8, lacks: ignored,
		Doc: "tokens of the causal convolution before linear attention; only qwen3_5_text, qwen3_5_moe_text, qwen3_next, " +
			"as the following; null: 4"},
	{Name: "linear_key_head_dim", Default: "null", Min: 1, Max: maxHeads, lacks: ignored,
		Doc: "width of a query and key head of linear attention; null: 128"},
	{Name: "linear_value_head_dim", Default: "null", Min: 1, Max: maxHeads, lacks: ignored,
		Doc: "width of a value head of linear attention; null: 128"},
	{Name: "linear_num_key_heads", Default: "null", Min: 1, Max: maxHeads, lacks: ignored,
		With: "linear_num_value_heads",
		Doc:  "query and key heads of linear attention; divides the value heads; null: 16"},
	{Name: "linear_num_value_heads", Default: "null", Min: 1, Max: maxHeads, lacks: ignored,
		Doc: "value heads of linear attention; null: 32"},
}

// These are the keys of Family.Keys.
const (
	localKey    = "rope_local_base_freq"
	scalarKey   = "query_pre_attn_scalar"
	scoreCapKey = "attn_logit_softcapping"
	logitCapKey = "final_logit_softcapping"
	widthKey    = "moe_intermediate_size"
	qkNormKey   = "use_qk_norm"
	logitsKey   = "output_router_logits"
	coefKey     = "router_aux_loss_coef"
	betaKey     = "llama_4_scaling_beta" // of rope_scaling
	// globalDimKey also selects the families with perLayerKey.
	globalDimKey = "global_head_dim"
)

const unbalanced = "%v is not supported: transformers has no loss of balance in %s; remove the key"

const ignored = "%v is not supported in %s: transformers ignores it there; set it to null"

func init() {
	for i := range ConfigKeys {
		k := &ConfigKeys[i]
		k.Max = cmp.Or(k.Max, math.MaxInt32)
		t := reflect.TypeFor[*Config]()
		for tag := range strings.SplitSeq(k.Name, ".") {
			for f := range t.Elem().Fields() {
				if f.Tag.Get("json") == tag {
					k.index, t = append(k.index, f.Index...), f.Type
					break
				}
			}
		}
	}
}

// Field returns a pointer to the field of a key. For a key of rope_scaling, that must exist.
func (k *ConfigKey) Field(c *Config) any {
	return reflect.ValueOf(c).Elem().FieldByIndex(k.index).Addr().Interface()
}

func isZero(field any) bool { return reflect.ValueOf(field).Elem().IsZero() }

// OfSome reports whether only some families have the key, with its meaning in transformers.
func (k *ConfigKey) OfSome() bool { return k.lacks != "" && !k.ours }

// OfRope reports whether a type of rope scaling has the key.
func (k *ConfigKey) OfRope(kind string) bool { return slices.Contains(strings.Fields(k.Ropes), kind) }

// NeededBy reports whether a type of rope scaling requires the key.
func (k *ConfigKey) NeededBy(kind string) bool { return slices.Contains(strings.Fields(k.Needs), kind) }

// in reports whether a family has the key.
func (k *ConfigKey) in(f *Family) bool {
	if k.has != nil {
		return k.has(f)
	}
	return k.lacks == "" || slices.Contains(f.Keys, strings.TrimPrefix(k.Name, ropePrefix))
}

// Needed reports whether train.yaml must have the key in a family: Derive has no value for it either.
func (k *ConfigKey) Needed(family string) bool {
	f := families[family]
	return k.Default == "" && (f == nil || f.Interval == 0 || isZero(k.Field(&f.Defaults)))
}

// zeroIsValid reports whether a model may have zero for the key: none, or a default.
func (k *ConfigKey) zeroIsValid() bool {
	return (k.Default == "null" || k.Ropes != "") && !k.Derived && k.Needs == ""
}

// check returns an error for a value outside the bounds.
func (k *ConfigKey) check(field any) error {
	switch v := field.(type) {
	case *int:
		return CheckInt(int64(*v), k.Min, k.Max)
	case *float64:
		return CheckNumber(*v, k.Within)
	case **float64:
		return CheckNumber(**v, k.Within)
	case *[]float64:
		for _, x := range *v {
			if err := CheckNumber(x, k.Within); err != nil {
				return err
			}
		}
	}
	return nil
}

// CheckInt returns an error for an integer outside its bounds.
func CheckInt(v, least, most int64) error {
	switch {
	case v < least:
		return fmt.Errorf("%d is too small; the least is %d", v, least)
	case v > most:
		return fmt.Errorf("%d is too large; the most is %d", v, most)
	}
	return nil
}

// CheckNumber returns an error for a number outside an interval, such as (0, 1].
func CheckNumber(v float64, within string) error {
	lo, hi, _ := strings.Cut(strings.Trim(within, "[()]"), ", ")
	low, err := strconv.ParseFloat(lo, 64)
	high, err2 := strconv.ParseFloat(hi, 64)
	if err != nil || err2 != nil {
		panic("hf: " + within + " is no interval")
	}
	inside := (v > low || v == low && within[0] == '[') && (v < high || v == high && strings.HasSuffix(within, "]"))
	if !inside || math.IsInf(v, 0) {
		return fmt.Errorf("%g is out of range; want a number in %s", v, within)
	}
	return nil
}

// nameIn returns the name of a key in an object.
func (k *ConfigKey) nameIn(o object) string {
	if i := slices.IndexFunc(k.also, o.has); i >= 0 {
		return k.also[i]
	}
	return strings.TrimPrefix(k.Name, ropePrefix)
}

// read sets the field of a key. It keeps the default of the family if the key is absent, or null without a meaning.
func (o object) read(k *ConfigKey, field any) {
	name := k.nameIn(o)
	if k.ours {
		return
	}
	if _, ok := o.keys[name]; ok && k.off && !o.has(name) {
		reflect.ValueOf(field).Elem().SetZero()
	}
	if !o.has(name) {
		return
	}
	o.get(name, wants[reflect.TypeOf(field)], field)
	// Check finds most faults. But it would take a zero for an absent key, and sizes are used before.
	_, isInt := field.(*int)
	if absent := isZero(field) && k.Ropes != "" && !k.zeroIsValid(); !isInt && !absent {
		return
	}
	if err := k.check(field); err != nil {
		o.fault(name, "%v", err)
		reflect.ValueOf(field).Elem().SetZero()
	}
}

// wants describes the JSON of a field's type.
var wants = map[reflect.Type]string{
	reflect.TypeFor[*int](): "an integer", reflect.TypeFor[*bool](): "true or false",
	reflect.TypeFor[*float64](): "a number", reflect.TypeFor[**float64](): "a number",
	reflect.TypeFor[**bool](): "true or false", reflect.TypeFor[*[]string](): "a list of strings",
	reflect.TypeFor[*[]int](): "a list of integers", reflect.TypeFor[*[]float64](): "a list of numbers",
}

// written returns the value of a field for config.json. Python shall read its numbers as floats.
func written(field any) any {
	switch v := field.(type) {
	case *float64:
		return number(*v)
	case **float64:
		return number(**v)
	}
	return field
}

// number returns a float that Python reads as a float, not an integer.
func number(x float64) json.RawMessage {
	b := strconv.AppendFloat(nil, x, 'g', -1, 64)
	if strings.ContainsAny(string(b), ".e") {
		return b
	}
	return append(b, '.', '0')
}
