package hf

// Llama is the name of llama's family.
const Llama = "llama"

// llamaNames are the tensors of llama, and of most families that came after it.
var llamaNames = Names{
	Embedding: "model.embed_tokens.weight", Head: "lm_head.weight", Norm: "model.norm.weight",
	InputNorm: "input_layernorm.weight", PostNorm: "post_attention_layernorm.weight",
	Query: "self_attn.q_proj.weight", Key: "self_attn.k_proj.weight", Value: "self_attn.v_proj.weight",
	Output: "self_attn.o_proj.weight",
	Gate:   "mlp.gate_proj.weight", Up: "mlp.up_proj.weight", Down: "mlp.down_proj.weight",
}

// llamaLayer is the prefix of a layer's tensors there.
const llamaLayer = "model.layers.%d."

func init() {
	Register(Family{
		Name: Llama, Class: "LlamaForCausalLM", Tensors: llamaNames, Layer: llamaLayer,
		Defaults: Defaults{Positions: 2048},
		Windows:  Windows{Foreign: true},
		Export:   map[string]any{"mlp_bias": false},
	})
}
