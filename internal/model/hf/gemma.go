package hf

import "github.com/cprun/cprun/kernels"

// Gemma2 and Gemma3 are the names of gemma2's and gemma3's families.
const (
	Gemma2 = "gemma2"
	Gemma3 = "gemma3_text"
)

// gemmaNorms names the norms before and after attention and MLP.
var gemmaNorms = Names{
	AttentionNorm: "post_attention_layernorm.weight",
	PostNorm:      "pre_feedforward_layernorm.weight", MLPNorm: "post_feedforward_layernorm.weight",
}

func init() {
	names := llamaNames.with(gemmaNorms)
	f := Family{
		Name: Gemma2, Class: "Gemma2ForCausalLM", Tensors: names, Layer: llamaLayer,
		Defaults: Config{
			NumKeyValueHeads: 4, HeadDim: 256, MaxPositionEmbedding: 8192, TieWordEmbeddings: true, SlidingWindow: 4096,
			QueryPreAttnScalar: 256, AttnLogitSoftcapping: 50, FinalLogitSoftcapping: 30,
		},
		Pad: 1, Windows: Windows{Slides: allBut(2, "")},
		Activation: kernels.GELU, ActivationKey: "hidden_activation", ZeroCentred: true, ScaledEmbedding: true,
		Keys: []string{scalarKey, scoreCapKey, logitCapKey},
	}
	Register(f)
	f.Name, f.Class = Gemma3, "Gemma3ForCausalLM"
	f.Tensors = names.with(headNorms)
	f.Defaults = Config{
		VocabSize: 262208, NumAttentionHeads: 8, NumKeyValueHeads: 4, HeadDim: 256, MaxPositionEmbedding: 131072,
		TieWordEmbeddings: true, SlidingWindow: 4096, QueryPreAttnScalar: 256, RopeTheta: 1e6, RopeLocalBaseFreq: 1e4,
	}
	f.Windows.Slides, f.Wrapper = allBut(6, "sliding_window_pattern"), "gemma3"
	f.Keys = []string{scalarKey, logitCapKey, localKey}
	Register(f)
}
