package hf

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cprun/cprun/kernels"
)

// Family describes one kind of model: its config.json, the names of its weights and the blocks of its layers. To add a
// similar model, register another Family; no other code names it.
type Family struct {
	Name  string // model_type of config.json, and model.architecture of train.yaml
	Class string // in architectures of config.json

	Tensors  Names
	Layer    string // prefix of a layer's tensors; %d is its number, from 0
	Defaults Config // of config.json: the values of transformers for absent keys, where they are not zero
	Windows  Windows
	// Biased: the biases of attention in Tensors always exist; else they follow attention_bias.
	Biased bool
	// Fused lists the parameters of a layer that files hold in one tensor.
	Fused []Fused
	// NoRope is the default of no_rope_layer_interval: each layer of a number that it divides, counted from 1, does not
	// rotate. 0: every layer rotates.
	NoRope int
	// Partial: partial_rotary_factor may be below 1. Proportional: it is the rotated part of the pairs of a whole head, in
	// layers without a window, and their frequencies are those of the head.
	Partial, Proportional bool
	// Ropes lists the supported kinds of rope scaling; nil: all. RopeNames maps earlier names of kinds.
	Ropes     []string
	RopeNames map[string]string
	Trained   int // original_max_position_embeddings, a key outside rope_scaling; 0: it is inside
	Pad       int // pad_token_id plus one; 0: null
	// Activation of the MLP; "": SiLU. ActivationKey is its key in config.json; "": hidden_act.
	Activation    kernels.Activation
	ActivationKey string
	Experts       *Mixture // nil: none
	// Gated: the result of attention is multiplied by the sigmoid of a second half of the query's projection.
	Gated bool
	// Interval: without layer_types, layers of a number that it divides have attention, the others a delta rule. 0: none
	// has.
	Interval int
	// WideNorms of queries and keys are over all heads.
	WideNorms bool
	// ValueNorms: each value head has a norm without weight, and scores have no factor.
	ValueNorms bool
	// ZeroCentred norms multiply by 1 + weight.
	ZeroCentred bool
	// ScaledEmbedding is multiplied by the root of hidden_size, rounded to the type of activations.
	ScaledEmbedding bool
	// Wrapper is the model_type of a larger model with this one, described under text_config; "" for none. Several
	// families may have the same.
	Wrapper string
	// Nested: transformers loads Wrapper itself as a causal language model, so adapters of PEFT have its names.
	Nested bool
	// Whole: an export has the names and other keys of model.from, and its tensors beside the language model.
	Whole bool
	// Keys lists supported keys of config.json that not all families have.
	Keys []string
	// Export holds keys of config.json for an export, added to the common ones.
	Export map[string]any
}

// A Role is the use of a parameter in a model or a layer, and the key of its name in a Family.
type Role string

// These are the parameters outside the layers.
const (
	Embedding Role = "embedding" // [vocab, hidden]
	Head      Role = "head"      // [vocab, hidden]; absent if tied to the embedding
	Norm      Role = "norm"      // [hidden]: before the head
)

// Names are a family's tensor names in files, in layers without the prefix Family.Layer. A family may lack optional
// parts.
type Names map[Role]string

// with returns the names with others added or in place of some.
func (n Names) with(others Names) Names {
	all := maps.Clone(n)
	maps.Copy(all, others)
	return all
}

// biases returns the names with the biases of some projections.
func (n Names) biases(roles ...Role) Names {
	all := maps.Clone(n)
	for _, r := range roles {
		all[r.Bias()] = strings.TrimSuffix(n[r], "weight") + "bias"
	}
	return all
}

// Fused is a tensor in files with the rows of several parameters, one after the other.
type Fused struct {
	Name  string // without the prefix of the layer
	Roles []Role // in the order of their rows
	// ByKeyHead: the tensor has the rows of all roles for the first key head of a delta rule, then for the next.
	ByKeyHead bool
}

// Tensor is a parameter of a model. Layer is -1 outside the layers.
type Tensor struct {
	Name  string // in files, unless these hold it in Blocks
	Shape []int  // [out, in] of a matrix, [n] of a vector
	Role  Role
	Kind  Kind
	Layer int

	Blocks  []Block // its places in files, one after the other, for each expert in turn; nil: the tensor of its name
	Experts int     // 0: none
	First   int     // the first row, with the rows of all roles of a Fused one after the other

	FileRows int // the rows in the files of a resized model, if fewer: the others begin as their mean; 0: all
}

// Size returns the number of elements.
func (t Tensor) Size() int {
	n := 1
	for _, s := range t.Shape {
		n *= s
	}
	return n
}

// Tensors lists the parameters of a model: the embedding, the matrices of each layer, the head, then all vectors. The
// order is that of checkpoints.
func (c *Config) Tensors() []Tensor {
	f, layers := c.Family(), c.Layers()
	var list []Tensor
	add := func(layer int, kind Kind, parts ...Part) {
		for _, p := range parts {
			name := c.name(p.Role)
			if name == "" || p.Kind != kind {
				continue
			}
			t := Tensor{Name: name, Shape: p.Shape, Role: p.Role, Kind: p.Kind, Layer: layer}
			switch {
			case layer >= 0:
				t.Name = fmt.Sprintf(f.Layer, layer) + name
				c.fuse(&t, layers[layer].Mixer.Delta, parts)
				c.stack(&t, layers[layer].MLP.Experts)
			case kind == Product:
				t.FileRows = c.FileVocab
			}
			list = append(list, t)
		}
	}
	rows := []int{c.VocabSize, c.HiddenSize}
	parts := make([][]Part, len(layers))
	for i, l := range layers {
		parts[i] = l.Parts(c.HiddenSize)
	}
	add(-1, Product, Part{Embedding, Product, rows, false})
	for i := range layers {
		add(i, Product, parts[i]...)
	}
	if !c.TieWordEmbeddings {
		add(-1, Product, Part{Head, Product, rows, false})
	}
	for i := range layers {
		add(i, Scale, parts[i]...)
		add(i, Bias, parts[i]...)
		add(i, Fixed, parts[i]...)
		add(i, Filter, parts[i]...)
	}
	add(-1, Scale, Part{Norm, Scale, []int{c.HiddenSize}, false})
	return list
}

// name returns the name of a part in files; "" if the model lacks it.
func (c *Config) name(r Role) string {
	f := c.Family()
	if (r == QueryNorm || r == KeyNorm) && !c.UseQKNorm && slices.Contains(f.Keys, qkNormKey) {
		return ""
	}
	return f.Tensors[r]
}

// fuse finds the place of t in a fused tensor, or of a filter.
func (c *Config) fuse(t *Tensor, d Delta, parts []Part) {
	f := c.Family()
	if t.Kind == Filter {
		t.Blocks = []Block{{Name: t.Name, Shape: []int{t.Shape[0] / d.Conv, 1, d.Conv}, Rows: t.Shape[0]}}
	}
	for _, fused := range f.Fused {
		if !slices.Contains(fused.Roles, t.Role) {
			continue
		}
		heads, before, all, own := 1, 0, 0, []int(nil) // before and all are rows of a head
		for _, r := range fused.Roles {
			rows := []int{parts[slices.IndexFunc(parts, func(p Part) bool { return p.Role == r })].Shape[0]}
			if fused.ByKeyHead {
				heads, rows = d.KeyHeads, d.ofKeyHead(r)
			}
			if r == t.Role {
				before, own = all, rows
			}
			for _, n := range rows {
				all += n
			}
		}
		t.First = heads * before
		for _, n := range own {
			for h := range heads {
				t.Blocks = append(t.Blocks, Block{Name: fmt.Sprintf(f.Layer, t.Layer) + fused.Name,
					Shape: []int{heads * all, t.Shape[1]}, Rows: n, Before: (h*all + before) * t.Shape[1]})
			}
			before += n
		}
	}
}

// Windows describes the keys of config.json for sliding windows, beside sliding_window.
type Windows struct {
	Use *bool // the default of use_sliding_window; nil: the key is ignored
	// Slides returns a function that reports whether a layer slides, for a file without layer_types; nil: all layers
	// slide.
	Slides func(c *Config, o object) func(layer int) bool
	// Uniform: all layers slide or none; sliding_window is the only key.
	Uniform bool
	// Foreign: transformers has no window in this family, and ignores the keys.
	Foreign bool
}

// lateLayers slide: those from max_window_layers.
func lateLayers(_ *Config, o object) func(int) bool {
	from := o.integer("max_window_layers", 28)
	return func(layer int) bool { return layer >= from }
}

// unrotated layers slide.
func unrotated(c *Config, _ object) func(int) bool {
	return func(layer int) bool { return layer < len(c.NoRopeLayers) && c.NoRopeLayers[layer] == 0 }
}

// allBut returns that all layers slide except each n-th. A key of config.json may replace n; "": none.
func allBut(n int, key string) func(*Config, object) func(int) bool {
	return func(_ *Config, o object) func(int) bool {
		each := n
		if key != "" {
			each = o.integer(key, n)
		}
		if each == 0 {
			o.fault(key, "0 is not positive")
		}
		return func(layer int) bool { return (layer+1)%each > 0 }
	}
}

var families = map[string]*Family{}

// Register adds a family at program start. It panics for a second family of that name, or if a name is missing.
func Register(f Family) {
	missing := f.Name == "" || f.Class == "" || f.Layer == ""
	layer := Layer{MLP: MLP{Width: 1}}
	if f.Experts != nil {
		layer.MLP = MLP{Experts: Experts{Count: 1}}
	}
	parts := layer.Parts(0)
	if f.Interval > 0 {
		parts = append(parts, Delta{}.parts(0)...)
	}
	for _, p := range append(parts, Part{Role: Embedding}, Part{Role: Head}, Part{Role: Norm}) {
		missing = missing || f.Tensors[p.Role] == "" && !p.Optional
	}
	if missing {
		panic(fmt.Sprintf("hf: family %q lacks a name", f.Name))
	}
	if families[f.Name] != nil {
		panic(fmt.Sprintf("hf: family %q is registered twice", f.Name))
	}
	d := &f.Defaults
	d.RopeTheta, d.RMSNormEps = cmp.Or(d.RopeTheta, 10000), cmp.Or(d.RMSNormEps, 1e-6)
	d.InitializerRange = cmp.Or(d.InitializerRange, 0.02)
	families[f.Name] = &f
}

// activation returns the key in config.json of the MLP's activation, and its value.
func (f *Family) activation() (key string, act kernels.Activation) {
	if act = cmp.Or(f.Activation, kernels.SiLU); act == kernels.ClampedSiLU {
		act = kernels.SiLU // as transformers says
	}
	return cmp.Or(f.ActivationKey, "hidden_act"), act
}

// Families returns the names of all families, sorted.
func Families() []string { return slices.Sorted(maps.Keys(families)) }

// Family returns the family of a valid config.
func (c *Config) Family() *Family {
	f := families[c.Architecture]
	if f == nil {
		panic(fmt.Sprintf("hf: architecture %q in a config that was checked", c.Architecture))
	}
	return f
}

// ropes lists the supported kinds of rope scaling, in the order of errors.
var ropes = []string{"linear", "llama3", "longrope", "yarn"}

// ropes returns the kinds of a family; of an unknown one all.
func (f *Family) ropes() []string {
	if f == nil || f.Ropes == nil {
		return ropes
	}
	return f.Ropes
}

// wordList joins words as in a sentence: "a, b and c".
func wordList(words ...string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " and " + words[last]
}

// Llama is the name of llama's family.
const Llama = "llama"

// llamaNames maps the tensors of llama, and of most later families.
var llamaNames = Names{
	Embedding: "model.embed_tokens.weight", Head: "lm_head.weight", Norm: "model.norm.weight",
	InputNorm: "input_layernorm.weight", PostNorm: "post_attention_layernorm.weight",
	Query: "self_attn.q_proj.weight", Key: "self_attn.k_proj.weight", Value: "self_attn.v_proj.weight",
	Output: "self_attn.o_proj.weight",
	Gate:   "mlp.gate_proj.weight", Up: "mlp.up_proj.weight", Down: "mlp.down_proj.weight",
}

// headNorms names the norms of heads.
var headNorms = Names{QueryNorm: "self_attn.q_norm.weight", KeyNorm: "self_attn.k_norm.weight"}

// llamaLayer prefixes a layer's tensors in llama.
const llamaLayer = "model.layers.%d."

func init() {
	Register(Family{
		Name: Llama, Class: "LlamaForCausalLM", Layer: llamaLayer,
		Tensors:  llamaNames.biases(Query, Key, Value, Output, Gate, Up, Down),
		Defaults: Config{MaxPositionEmbedding: 2048},
		Windows:  Windows{Use: new(true), Foreign: true},
	})
}

// Qwen3 is the name of qwen3's family.
const Qwen3 = "qwen3"

func init() {
	names := llamaNames.biases(Query, Key, Value, Output).with(headNorms)
	windows := Windows{Use: new(false), Slides: lateLayers}
	Register(Family{
		Name: Qwen3, Class: "Qwen3ForCausalLM", Tensors: names, Layer: llamaLayer,
		Defaults: Config{NumKeyValueHeads: 32, HeadDim: 128, MaxPositionEmbedding: 32768, SlidingWindow: 4096},
		Windows:  windows,
	})
	Register(Family{
		Name: "qwen2", Class: "Qwen2ForCausalLM",
		Tensors: llamaNames.biases(Query, Key, Value), Layer: llamaLayer, Biased: true,
		Defaults: Config{NumKeyValueHeads: 32, MaxPositionEmbedding: 32768, SlidingWindow: 4096},
		Windows:  windows,
	})
}

func init() {
	Register(Family{
		Name: "mistral", Class: "MistralForCausalLM", Tensors: llamaNames, Layer: llamaLayer,
		Defaults: Config{NumKeyValueHeads: 8, MaxPositionEmbedding: 128 << 10, SlidingWindow: 4096},
		Windows:  Windows{Uniform: true}, Wrapper: "mistral3",
	})
	Register(Family{
		Name: "ministral3", Class: "Ministral3ForCausalLM", Tensors: llamaNames, Layer: llamaLayer,
		Ropes:    []string{"yarn"},
		Defaults: Config{NumKeyValueHeads: 8, HeadDim: 128, MaxPositionEmbedding: 256 << 10, RMSNormEps: 1e-5},
		Pad:      12, Windows: Windows{Uniform: true}, Wrapper: "mistral3", Keys: []string{betaKey},
	})
	Register(Family{
		Name: "seed_oss", Class: "SeedOssForCausalLM", Tensors: llamaNames.biases(Query, Key, Value, Gate, Up, Down),
		Layer:    llamaLayer,
		Defaults: Config{NumKeyValueHeads: 8, HeadDim: 128, MaxPositionEmbedding: 512 << 10, AttentionBias: true},
		Pad:      2, Windows: Windows{Foreign: true},
		Export: map[string]any{"attention_out_bias": false, "residual_dropout": number(0)},
	})
	Register(Family{
		Name: "granite", Class: "GraniteForCausalLM",
		Tensors: llamaNames.biases(Query, Key, Value, Output, Gate, Up, Down), Layer: llamaLayer,
		Defaults: Config{MaxPositionEmbedding: 2048, AttentionMultiplier: 1},
		Windows:  Windows{Foreign: true},
		Keys:     []string{"attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"},
	})
	Register(Family{
		Name: "smollm3", Class: "SmolLM3ForCausalLM",
		Tensors: llamaNames.biases(Query, Key, Value, Output, Gate, Up, Down), Layer: llamaLayer, NoRope: 4,
		Defaults: Config{NumKeyValueHeads: 4, MaxPositionEmbedding: 32768, RopeTheta: 2e6, TieWordEmbeddings: true},
		Pad:      128005, Windows: Windows{Use: new(false), Slides: unrotated},
	})
	Register(Family{
		Name: "phi3", Class: "Phi3ForCausalLM", Tensors: llamaNames, Layer: llamaLayer,
		Fused: []Fused{
			{Name: "self_attn.qkv_proj.weight", Roles: []Role{Query, Key, Value}},
			{Name: "mlp.gate_up_proj.weight", Roles: []Role{Gate, Up}},
		},
		Partial: true, Ropes: []string{"longrope"}, RopeNames: map[string]string{"su": "longrope", "yarn": "longrope"},
		Defaults: Config{MaxPositionEmbedding: 4096, RMSNormEps: 1e-5}, Trained: 4096, Pad: 32001,
		Windows: Windows{Uniform: true},
		Export:  map[string]any{"resid_pdrop": number(0), "embd_pdrop": number(0)},
	})
}
