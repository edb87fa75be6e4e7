package hf

import (
	"slices"

	"github.com/cprun/cprun/kernels"
)

// eachExpert names the matrices of an expert in most families, and fusedExperts those of all.
var (
	eachExpert = []string{"mlp.experts.%d.gate_proj.weight", "mlp.experts.%d.up_proj.weight",
		"mlp.experts.%d.down_proj.weight"}
	fusedExperts = Names{Router: "mlp.gate.weight", ExpertIn: "mlp.experts.gate_up_proj",
		ExpertDown: "mlp.experts.down_proj"}
)

// These are keys of kernels.ClampedSiLU.
const (
	limitKey, gateLimit = "swiglu_limit", 7
	alphaKey, gateAlpha = "swiglu_alpha", 1.702
)

func init() {
	keys := []string{"num_experts", "num_experts_per_tok"}
	ofWidth := append(slices.Clip(keys), widthKey, "norm_topk_prob")
	Register(Family{
		Name: "qwen3_moe", Class: "Qwen3MoeForCausalLM",
		Tensors: llamaNames.biases(Query, Key, Value, Output).with(headNorms).with(fusedExperts), Layer: llamaLayer,
		Experts:  &Mixture{Count: "num_local_experts", Each: eachExpert, Linear: true},
		Defaults: Config{NumKeyValueHeads: 4, MaxPositionEmbedding: 32768, SlidingWindow: 4096},
		Windows:  Windows{Use: new(false)},
		Keys:     append(slices.Clip(ofWidth), "decoder_sparse_step", "mlp_only_layers"),
	})
	Register(Family{
		Name: "mixtral", Class: "MixtralForCausalLM",
		Tensors: llamaNames.with(Names{Gate: "", Up: "", Down: "", Router: "block_sparse_moe.gate.weight",
			ExpertIn: "block_sparse_moe.experts.gate_up_proj", ExpertDown: "block_sparse_moe.experts.down_proj"}),
		Layer: llamaLayer,
		Experts: &Mixture{Count: "num_local_experts", Linear: true, Router: kernels.Router{Normalize: true}, Each: []string{
			"block_sparse_moe.experts.%d.w1.weight", "block_sparse_moe.experts.%d.w3.weight",
			"block_sparse_moe.experts.%d.w2.weight"}},
		Defaults: Config{NumKeyValueHeads: 8, MaxPositionEmbedding: 128 << 10, RopeTheta: 1e6, RMSNormEps: 1e-5},
		Windows:  Windows{Uniform: true}, Keys: keys,
		Export: map[string]any{"router_jitter_noise": number(0)},
	})
	Register(Family{
		Name: "glm4_moe", Class: "Glm4MoeForCausalLM",
		Tensors: llamaNames.biases(Query, Key, Value).with(headNorms).with(fusedExperts).with(Names{
			Correction: "mlp.gate.e_score_correction_bias", SharedGate: "mlp.shared_experts.gate_proj.weight",
			SharedUp: "mlp.shared_experts.up_proj.weight", SharedDown: "mlp.shared_experts.down_proj.weight"}),
		Layer: llamaLayer, Partial: true,
		Experts: &Mixture{Count: "n_routed_experts", Router: kernels.Router{Sigmoid: true}, Each: eachExpert, Linear: true},
		Defaults: Config{NumKeyValueHeads: 8, MaxPositionEmbedding: 128 << 10, RMSNormEps: 1e-5, PartialRotaryFactor: 0.5,
			NSharedExperts: 1, FirstKDenseReplace: 1, NormTopkProb: true},
		Windows: Windows{Foreign: true},
		Keys: append(slices.Clip(ofWidth), "n_shared_experts", "first_k_dense_replace", "routed_scaling_factor", "n_group",
			"topk_group", qkNormKey),
	})
	Register(Family{
		Name: "gpt_oss", Class: "GptOssForCausalLM",
		Tensors: llamaNames.biases(Query, Key, Value, Output).with(fusedExperts).with(Names{
			Gate: "", Up: "", Down: "", Sinks: "self_attn.sinks",
			Router: "mlp.router.weight", Router.Bias(): "mlp.router.bias",
			ExpertIn.Bias(): "mlp.experts.gate_up_proj_bias", ExpertDown.Bias(): "mlp.experts.down_proj_bias"}),
		Layer:   llamaLayer,
		Experts: &Mixture{Count: "num_local_experts", Router: kernels.Router{Normalize: true}, InputFirst: true},
		Defaults: Config{NumKeyValueHeads: 8, HeadDim: 64, MaxPositionEmbedding: 128 << 10, RMSNormEps: 1e-5,
			RopeTheta: 150000, SlidingWindow: 128, AttentionBias: true, RopeScaling: &RopeScaling{Type: "yarn", Factor: 32,
				OriginalMax: 4096, BetaFast: 32, BetaSlow: 1, Truncate: new(false)}},
		Windows: Windows{Slides: allBut(2, "")}, Activation: kernels.ClampedSiLU, Keys: keys,
		Export: map[string]any{limitKey: number(gateLimit), alphaKey: number(gateAlpha)},
	})
}
