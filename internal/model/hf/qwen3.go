package hf

// Qwen3 is the name of qwen3's family.
const Qwen3 = "qwen3"

func init() {
	names := llamaNames
	names[QueryNorm], names[KeyNorm] = "self_attn.q_norm.weight", "self_attn.k_norm.weight"
	Register(Family{
		Name: Qwen3, Class: "Qwen3ForCausalLM", About: "qwen3 is llama with an RMSNorm on each query and key " +
			"head", Tensors: names, Layer: llamaLayer,
		Defaults: Defaults{KVHeads: 32, HeadDim: 128, Positions: 32768},
		Windows:  Windows{Default: 4096, Asked: true, From: 28},
	})
}
