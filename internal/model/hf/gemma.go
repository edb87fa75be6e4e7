package hf

import "github.com/cprun/cprun/kernels"

// Gemma2 and Gemma3 are the names of gemma2's and gemma3's families.
const (
	Gemma2 = "gemma2"
	Gemma3 = "gemma3_text"
)

func init() {
	names := llamaNames.with(Names{
		AttentionNorm: "post_attention_layernorm.weight",
		PostNorm:      "pre_feedforward_layernorm.weight", MLPNorm: "post_feedforward_layernorm.weight",
	})
	f := Family{
		Name: Gemma2, Class: "Gemma2ForCausalLM", About: "gemma2 adds norms of the results of attention and MLP, " +
			"soft caps, GELU and a scaled embedding", Tensors: names, Layer: llamaLayer,
		Defaults: Defaults{
			KVHeads: 4, HeadDim: 256, Positions: 8192, TieWordEmbeddings: true,
			QueryPreAttnScalar: 256, AttnSoftcap: 50, FinalSoftcap: 30, Pad: 1,
		},
		Windows:    Windows{Default: 4096, Every: 2},
		Activation: kernels.GELU, ActivationKey: "hidden_activation", ZeroCentred: true, ScaledEmbedding: true,
		Keys: []string{"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"},
	}
	Register(f)
	f.Name, f.Class = Gemma3, "Gemma3ForCausalLM"
	f.About = "gemma3_text has head norms in place of the soft cap of scores, and rotates layers with a window by a " +
		"base of their own"
	f.Tensors = names.with(headNorms)
	f.Defaults = Defaults{
		Vocab: 262208, Heads: 8, KVHeads: 4, HeadDim: 256, Positions: 131072, TieWordEmbeddings: true,
		QueryPreAttnScalar: 256, RopeTheta: 1e6, RopeLocal: 1e4, Pad: 1,
	}
	f.Windows.Every, f.Wrapper = 6, "gemma3"
	f.Keys = []string{"query_pre_attn_scalar", "final_logit_softcapping", "rope_local_base_freq", patternKey}
	Register(f)
}
