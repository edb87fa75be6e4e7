// Package hf reads and writes Hugging Face model directories: config.json, and safetensors files with their index.
//
// ReadConfig returns a Config, OpenWeights the tensors, and Export writes a directory that transformers loads. A Family
// describes one kind of model, such as llama.
//
// A config is resolved as in transformers, with its defaults, in the form of version 4 (rope_theta and rope_scaling)
// and of version 5 (rope_parameters). A key that cprun would compute differently is refused by name, never ignored.
package hf

import (
	"cmp"
	"encoding/json"
	"math"
	"slices"
)

// Config is the shape of a model, under the names of config.json. ConfigKeys has a row for each key.
type Config struct {
	Architecture      string       // the name of a Family
	VocabSize         int          `json:"vocab_size"`
	FileVocab         int          // rows of the embedding in files, if fewer than VocabSize; else 0
	HiddenSize        int          `json:"hidden_size"`
	IntermediateSize  int          `json:"intermediate_size"`
	NumHiddenLayers   int          `json:"num_hidden_layers"`
	NumAttentionHeads int          `json:"num_attention_heads"`
	NumKeyValueHeads  int          `json:"num_key_value_heads"`
	HeadDim           int          `json:"head_dim"`
	RopeTheta         float64      `json:"rope_theta"`
	RopeScaling       *RopeScaling `json:"rope_scaling"`
	// RopeLocalBaseFreq is RopeTheta of layers with a window, unscaled; 0: RopeTheta.
	RopeLocalBaseFreq  float64 `json:"rope_local_base_freq"`
	QueryPreAttnScalar float64 `json:"query_pre_attn_scalar"` // scores are divided by its root; 0: HeadDim
	// AttentionMultiplier multiplies scores in place of that; EmbeddingMultiplier the embedding; ResidualMultiplier the
	// results of attention and MLP. Logits are divided by LogitsScaling. 0: none.
	AttentionMultiplier float64 `json:"attention_multiplier"`
	EmbeddingMultiplier float64 `json:"embedding_multiplier"`
	ResidualMultiplier  float64 `json:"residual_multiplier"`
	LogitsScaling       float64 `json:"logits_scaling"`
	// AttnLogitSoftcapping limits scores to +-this by tanh; 0: no limit.
	AttnLogitSoftcapping float64 `json:"attn_logit_softcapping"`
	// FinalLogitSoftcapping limits logits in the same way.
	FinalLogitSoftcapping float64 `json:"final_logit_softcapping"`
	RMSNormEps            float64 `json:"rms_norm_eps"`
	TieWordEmbeddings     bool    `json:"tie_word_embeddings"`
	MaxPositionEmbedding  int     `json:"max_position_embeddings"` // 0: unknown
	InitializerRange      float64 `json:"initializer_range"`       // standard deviation of random weights

	// Experts are MLPs of which a router chooses some for each token, in all layers except the first ones,
	// those of a list, and those of a number, from 1, that DecoderSparseStep does not divide; 0: 1.
	NumExperts         int   `json:"num_experts"`
	NumExpertsPerTok   int   `json:"num_experts_per_tok"`
	FirstKDenseReplace int   `json:"first_k_dense_replace"`
	MLPOnlyLayers      []int `json:"mlp_only_layers"`
	DecoderSparseStep  int   `json:"decoder_sparse_step"`
	// MoEIntermediateSize is the width of an expert; 0: IntermediateSize. NSharedExperts times that is the width of an MLP
	// for all tokens.
	MoEIntermediateSize int `json:"moe_intermediate_size"`
	NSharedExperts      int `json:"n_shared_experts"`
	// SharedExpertIntermediateSize is that width in other families, which scale the MLP by a sigmoid for each token.
	SharedExpertIntermediateSize int `json:"shared_expert_intermediate_size"`
	// These are Normalize, Scale, Groups and Kept of a kernels.Router.
	NormTopkProb        bool    `json:"norm_topk_prob"`
	RoutedScalingFactor float64 `json:"routed_scaling_factor"`
	NGroup              int     `json:"n_group"`
	TopkGroup           int     `json:"topk_group"`
	// OutputRouterLogits adds the loss of balance to the loss; RouterAuxLossCoef is its factor, 0: that of Unused.
	OutputRouterLogits bool    `json:"output_router_logits"`
	RouterAuxLossCoef  float64 `json:"router_aux_loss_coef"`
	// FusedExperts: files have all experts of a layer in one tensor, where the family has two forms.
	FusedExperts bool

	// These are the fields of Delta.
	LinearConvKernelDim int `json:"linear_conv_kernel_dim"`
	LinearKeyHeadDim    int `json:"linear_key_head_dim"`
	LinearValueHeadDim  int `json:"linear_value_head_dim"`
	LinearNumKeyHeads   int `json:"linear_num_key_heads"`
	LinearNumValueHeads int `json:"linear_num_value_heads"`

	UseQKNorm bool `json:"use_qk_norm"` // queries and keys have norms, in families with the key

	AttentionBias bool `json:"attention_bias"` // the projections of attention have biases
	MLPBias       bool `json:"mlp_bias"`       // likewise of the MLP

	// NoRopeLayers has 1 for each layer that rotates and 0 for the others; empty: all rotate.
	NoRopeLayers []int `json:"no_rope_layers"`
	// PartialRotaryFactor is the rotated part of a head; 0: all of it.
	PartialRotaryFactor float64 `json:"partial_rotary_factor"`

	// GlobalHeadDim and NumGlobalKeyValueHeads replace HeadDim and NumKeyValueHeads in layers without a window; 0: not.
	GlobalHeadDim          int `json:"global_head_dim"`
	NumGlobalKeyValueHeads int `json:"num_global_key_value_heads"`
	// AttentionKEqV: in these layers values are the projection of keys.
	AttentionKEqV bool `json:"attention_k_eq_v"`

	// SlidingWindow is the tokens that a token sees, itself included; 0 for all of them.
	SlidingWindow int `json:"sliding_window"`
	// LayerTypes has "full_attention", "sliding_attention" or "linear_attention" for each layer; empty: every layer slides
	// if SlidingWindow is set. Families with linear layers always have it.
	LayerTypes []string `json:"layer_types"`

	// TokenIDs are bos_token_id, eos_token_id and pad_token_id as written in config.json. Training takes PaddingRow from
	// them; an export repeats them.
	TokenIDs map[string]json.RawMessage

	// Unused are further keys as written in config.json. Training ignores them; an export repeats them.
	Unused map[string]json.RawMessage

	// Tuning selects the parameters to train; not in config.json.
	Tuning Tuning

	// Wrapper is the model_type of config.json if that describes a larger model around this one; else "".
	Wrapper string

	// DType is the element type of the weights in config.json, such as "bfloat16"; "" if absent. Training ignores it;
	// an export uses it.
	DType string
}

// These are the values of Config.LayerTypes.
const (
	FullAttention    = "full_attention"
	SlidingAttention = "sliding_attention"
	LinearAttention  = "linear_attention"
)

// RopeScaling stretches rotary frequencies beyond the trained length.
type RopeScaling struct {
	Type   string  `json:"rope_type"` // "linear", "llama3", "yarn" or "longrope"
	Factor float64 `json:"factor"`

	LowFreqFactor  float64 `json:"low_freq_factor"`  // llama3
	HighFreqFactor float64 `json:"high_freq_factor"` // llama3
	// OriginalMax is the trained length: llama3, yarn and longrope.
	OriginalMax int `json:"original_max_position_embeddings"`

	BetaFast        float64  `json:"beta_fast"`        // yarn, 32
	BetaSlow        float64  `json:"beta_slow"`        // yarn, 1
	AttentionFactor *float64 `json:"attention_factor"` // yarn and longrope; nil: from factor
	MScale          float64  `json:"mscale"`           // yarn, DeepSeek's form; 0: absent
	MScaleAllDim    float64  `json:"mscale_all_dim"`   // yarn, likewise
	Truncate        *bool    `json:"truncate"`         // yarn; nil: true
	// QueryBeta, of yarn, multiplies the query at position i by 1 + QueryBeta ln(1 + floor(i / OriginalMax)); 0: by 1.
	QueryBeta float64 `json:"llama_4_scaling_beta"`

	// ShortFactor and LongFactor, of longrope, divide the frequencies: of each pair that rotates, in documents up to
	// OriginalMax tokens and in longer ones.
	ShortFactor []float64 `json:"short_factor"`
	LongFactor  []float64 `json:"long_factor"`
}

// RotaryDim returns the elements of a head that rotate, the first of it; of layers without a window, if the others
// differ. In a Proportional family it is the head, of which some pairs rotate by 0.
func (c *Config) RotaryDim() int {
	dim, f := cmp.Or(c.GlobalHeadDim, c.HeadDim), families[c.Architecture]
	if c.PartialRotaryFactor == 0 || f != nil && f.Proportional {
		return dim
	}
	return int(float64(dim) * c.PartialRotaryFactor)
}

const padKey = "pad_token_id"

// PaddingRow returns the row of the embedding that a lookup gives no gradient: as in transformers, that of
// pad_token_id; a negative one counts from the end. -1: none. The head's gradient of a tied row remains.
func (c *Config) PaddingRow() int {
	id := 0
	if raw := c.TokenIDs[padKey]; len(raw) == 0 || string(raw) == "null" || json.Unmarshal(raw, &id) != nil {
		return -1
	}
	if id < 0 {
		id += c.VocabSize
	}
	if id < 0 || id >= c.VocabSize { // transformers refuses it
		return -1
	}
	return id
}

// SoftmaxScale returns the factor of scores before the soft cap and the softmax.
func (c *Config) SoftmaxScale() float64 {
	switch {
	case c.AttentionMultiplier > 0:
		return c.AttentionMultiplier
	case c.Family().ValueNorms:
		return 1
	}
	return 1 / math.Sqrt(cmp.Or(c.QueryPreAttnScalar, float64(c.HeadDim)))
}

// RopePairs returns the pairs of each rotary table: two tables if layers with a window have their own, or queries.
func (c *Config) RopePairs() []int {
	n := c.RotaryDim() / 2
	switch {
	case c.localRope():
		return []int{n, c.HeadDim / 2}
	case c.scalesQueries():
		return []int{n, n}
	}
	return []int{n}
}

// RotatingPairs returns the pairs of the first rotary table that rotate, the first of it.
func (c *Config) RotatingPairs() int {
	n, f := c.RopePairs()[0], families[c.Architecture]
	if f != nil && f.Proportional && c.PartialRotaryFactor > 0 {
		return int(float64(n) * c.PartialRotaryFactor)
	}
	return n
}

// AllPairs returns the pairs of all rotary tables together.
func (c *Config) AllPairs() (n int) {
	for _, pairs := range c.RopePairs() {
		n += pairs
	}
	return n
}

// localRope reports whether layers with a window have a rotary table of their own.
func (c *Config) localRope() bool {
	f := families[c.Architecture]
	return f != nil && slices.Contains(f.Keys, localKey)
}

// scalesQueries reports whether the queries have a rotary table of their own.
func (c *Config) scalesQueries() bool { return c.RopeScaling != nil && c.RopeScaling.QueryBeta > 0 }
