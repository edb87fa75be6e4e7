package source

// ops are the operations of the model and the optimizer, but for matrix products and attention.
var ops = []Program{
	{Name: "ops_copy", File: "ops_copy.cu"},
	{Name: "ops_embed", File: "ops_embed.cu"},
	{Name: "ops_loss", File: "ops_loss.cu"},
	{Name: "ops_norm", File: "ops_norm.cu"},
	{Name: "ops_optim", File: "ops_optim.cu"},
	{Name: "ops_rope", File: "ops_rope.cu"},
	{Name: "ops_swiglu", File: "ops_swiglu.cu"},
}
