package hf

import (
	"cmp"

	"github.com/cprun/cprun/kernels"
)

// These families have layers of linear attention, a gated delta rule, between layers of softmax attention with a gate.
func init() {
	names := llamaNames.biases(Query, Key, Value, Output).with(headNorms).with(Names{
		DeltaQKV: "linear_attn.in_proj_qkv.weight", DeltaZ: "linear_attn.in_proj_z.weight",
		DeltaB: "linear_attn.in_proj_b.weight", DeltaA: "linear_attn.in_proj_a.weight",
		DeltaConv: "linear_attn.conv1d.weight", DeltaLog: "linear_attn.A_log", DeltaTime: "linear_attn.dt_bias",
		DeltaNorm: "linear_attn.norm.weight", DeltaOutput: "linear_attn.out_proj.weight",
	})
	mixture := fusedExperts.with(Names{SharedGate: "mlp.shared_expert.gate_proj.weight",
		SharedUp: "mlp.shared_expert.up_proj.weight", SharedDown: "mlp.shared_expert.down_proj.weight",
		SharedScale: "mlp.shared_expert_gate.weight"})
	f := Family{
		Name: "qwen3_5_text", Class: "Qwen3_5ForCausalLM",
		Tensors: names, Layer: llamaLayer, Partial: true, Gated: true, Interval: 4, ZeroCentred: true, Whole: true,
		Defaults: Config{NumKeyValueHeads: 4, HeadDim: 256, MaxPositionEmbedding: 32768, PartialRotaryFactor: 0.25,
			LinearConvKernelDim: 4, LinearKeyHeadDim: 128, LinearValueHeadDim: 128, LinearNumKeyHeads: 16,
			LinearNumValueHeads: 32},
		Windows: Windows{Use: new(false)}, Wrapper: "qwen3_5", Keys: deltaKeys,
		Export: map[string]any{"attn_output_gate": true},
	}
	Register(f)

	f.Name, f.Class, f.Wrapper = "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", "qwen3_5_moe"
	f.Tensors = names.with(mixture).with(Names{Gate: "", Up: "", Down: ""})
	f.Defaults.NumKeyValueHeads, f.Defaults.IntermediateSize, f.Defaults.SharedExpertIntermediateSize = 2, 512, 512
	f.Experts = &Mixture{Count: "num_experts", Each: eachExpert, Router: kernels.Router{Normalize: true}}
	f.Keys = append([]string{"num_experts", "num_experts_per_tok", widthKey, sharedKey}, deltaKeys...)
	Register(f)

	f.Name, f.Class, f.Wrapper = "qwen3_next", "Qwen3NextForCausalLM", ""
	f.Tensors = names.with(mixture)
	f.Fused = []Fused{
		{Name: "linear_attn.in_proj_qkvz.weight", Roles: []Role{DeltaQKV, DeltaZ}, ByKeyHead: true},
		{Name: "linear_attn.in_proj_ba.weight", Roles: []Role{DeltaB, DeltaA}, ByKeyHead: true},
	}
	f.Defaults.IntermediateSize, f.Defaults.NormTopkProb = 0, true
	f.Experts = &Mixture{Count: "num_experts", Each: eachExpert, Linear: true}
	f.Keys = append([]string{"norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"}, f.Keys...)
	Register(f)
}

// sharedKey and deltaKeys are keys of Family.Keys.
const sharedKey = "shared_expert_intermediate_size"

var deltaKeys = []string{"linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
	"linear_num_key_heads", "linear_num_value_heads"}

// mropeKeys of rope_parameters divide the rotation between the coordinates of an image. Those of text are equal, so it
// rotates as without them.
var mropeKeys = []string{"mrope_section", "mrope_interleaved"}

// Delta describes linear attention: a gated delta rule (arXiv:2412.06464). The zero value is none.
//
// Rows of DeltaQKV are those of all query heads, then of keys, then of values.
type Delta struct {
	KeyHeads, Heads int // of q and k, and of v; KeyHeads divides Heads
	Dim, DimV       int // of a head: of q and k, and of v
	Conv            int // rows of the causal convolution
}

// StateBytes returns the memory of a layer's state in float32, with the rows that its convolution reads.
func (d Delta) StateBytes() int64 {
	return 4 * int64(d.Heads*d.Dim*d.DimV+max(d.Conv-1, 0)*d.Channels())
}

// Channels returns the rows of DeltaQKV.
func (d Delta) Channels() int { return 2*d.KeyHeads*d.Dim + d.Heads*d.DimV }

func (d Delta) parts(hidden int) []Part {
	v := d.Heads * d.DimV
	return []Part{
		{InputNorm, Scale, []int{hidden}, true},
		{AttentionNorm, Scale, []int{hidden}, true},
		{DeltaQKV, Product, []int{d.Channels(), hidden}, false},
		{DeltaZ, Product, []int{v, hidden}, false},
		{DeltaB, Product, []int{d.Heads, hidden}, false},
		{DeltaA, Product, []int{d.Heads, hidden}, false},
		{DeltaOutput, Product, []int{hidden, v}, false},
		{DeltaConv, Filter, []int{d.Channels() * d.Conv}, false},
		{DeltaLog, Bias, []int{d.Heads}, false},
		{DeltaTime, Bias, []int{d.Heads}, false},
		{DeltaNorm, Scale, []int{d.DimV}, false},
	}
}

// ofKeyHead returns the rows of a part for a key head, in files that have the rows of a key head together: of q, k and
// v, or those alone.
func (d Delta) ofKeyHead(r Role) []int {
	each := d.Heads / max(d.KeyHeads, 1)
	switch r {
	case DeltaQKV:
		return []int{d.Dim, d.Dim, each * d.DimV}
	case DeltaZ:
		return []int{each * d.DimV}
	}
	return []int{each}
}

// delta describes the linear layers of a config.
func (c *Config) delta() Delta {
	return Delta{KeyHeads: c.LinearNumKeyHeads, Heads: c.LinearNumValueHeads, Dim: c.LinearKeyHeadDim,
		DimV: c.LinearValueHeadDim, Conv: c.LinearConvKernelDim}
}

// attentionEach returns layer types with attention in each layer of a number that interval divides, from 1.
func attentionEach(layers, interval int) []string {
	list := make([]string, min(layers, maxLayers))
	for i := range list {
		if list[i] = LinearAttention; (i+1)%interval == 0 {
			list[i] = FullAttention
		}
	}
	return list
}

// readHybrid finds the linear layers, and refuses forms of gates that these families do not have.
func readHybrid(c *Config, o object) {
	f := c.Family()
	if f.Interval == 0 {
		return
	}
	if !o.boolean("attn_output_gate", true) {
		o.fault("attn_output_gate", "false is not supported; attention has gates in %s", f.Name)
	}
	if kind := o.text("output_gate_type", "swish"); kind != "swish" {
		o.fault("output_gate_type", "%.64q is not supported; cprun has swish", kind)
	}
	if n := o.integer("full_attention_interval", f.Interval); n == 0 {
		o.fault("full_attention_interval", "0 is not positive")
	} else if c.LayerTypes == nil {
		c.LayerTypes = attentionEach(c.NumHiddenLayers, n)
	}
}

// deriveHybrid sets absent keys of hybrids to those of transformers.
func (c *Config) deriveHybrid(f *Family) {
	if len(c.LayerTypes) == 0 {
		c.LayerTypes = attentionEach(c.NumHiddenLayers, f.Interval)
	}
	d := f.Defaults
	c.IntermediateSize = cmp.Or(c.IntermediateSize, d.IntermediateSize)
	c.LinearConvKernelDim = cmp.Or(c.LinearConvKernelDim, d.LinearConvKernelDim)
	c.LinearKeyHeadDim = cmp.Or(c.LinearKeyHeadDim, d.LinearKeyHeadDim)
	c.LinearValueHeadDim = cmp.Or(c.LinearValueHeadDim, d.LinearValueHeadDim)
	c.LinearNumKeyHeads = cmp.Or(c.LinearNumKeyHeads, d.LinearNumKeyHeads)
	c.LinearNumValueHeads = cmp.Or(c.LinearNumValueHeads, d.LinearNumValueHeads)
}

// checkHybrid checks the heads of linear layers.
func (c *Config) checkHybrid(f *faults) {
	if k, v := c.LinearNumKeyHeads, c.LinearNumValueHeads; k > 0 && v%k != 0 {
		f.add("linear_num_key_heads", "%d does not divide linear_num_value_heads %d; take one of its divisors", k, v)
	}
}
