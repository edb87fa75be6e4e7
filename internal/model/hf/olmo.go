package hf

// Olmo2 and olmo3 have norms of the results of attention and MLP only, and norms of queries and keys over all heads.
func init() {
	names := llamaNames.biases(Query, Key, Value, Output).with(headNorms).with(Names{
		InputNorm: "", PostNorm: "",
		AttentionNorm: "post_attention_layernorm.weight", MLPNorm: "post_feedforward_layernorm.weight",
	})
	f := Family{
		Name: "olmo2", Class: "Olmo2ForCausalLM", Tensors: names, Layer: llamaLayer, WideNorms: true,
		Defaults: Config{MaxPositionEmbedding: 2048, RMSNormEps: 1e-5},
		Pad:      2, Windows: Windows{Foreign: true},
	}
	Register(f)
	f.Name, f.Class = "olmo3", "Olmo3ForCausalLM"
	f.Defaults.SlidingWindow, f.Defaults.RopeTheta, f.Defaults.RopeLocalBaseFreq = 4096, 5e5, 5e5
	f.Windows, f.Keys = Windows{Slides: allBut(4, "")}, []string{localKey}
	Register(f)
}
