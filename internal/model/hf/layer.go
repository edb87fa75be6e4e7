package hf

import (
	"cmp"
	"slices"

	"github.com/cprun/cprun/kernels"
)

// A Layer describes a layer of a model. Layers with equal descriptions run the same operations on the same shapes.
type Layer struct {
	Mixer Mixer
	MLP   MLP
	Rope  Rope // changes no shape
}

// A Rope has the rotary tables of a layer. -1: none.
type Rope struct {
	Key, Query int // the tables of its keys and of its queries
}

// A Mixer describes the branch that mixes tokens: attention, or a delta rule. A key of this type stands for all layers
// that share masks, schedules, kernels and costs.
type Mixer struct {
	Heads, KVHeads int
	Dim, DimV      int // of a head: of q and k, and of v
	Window         int // earlier keys that a query sees; -1: all
	Bias           bool
	WideNorms      bool // the norms of queries and keys are over all heads
	Sinks          bool // see attention.Sinks
	Gated          bool // each query head has as many rows more, a gate of its result
	ValueNorms     bool // each value head has a norm without weight
	KeyValues      bool // values are the projection of keys, before its norm

	Delta Delta // in place of attention, if not zero
}

// An MLP describes the branch that treats each token alone: a gated MLP, a mixture of experts, or the sum of both.
type MLP struct {
	Width   int // of gate and up; 0: experts alone
	Bias    bool
	Scaled  bool    // beside experts, by a sigmoid of each token
	Apart   bool    // beside experts, which have inputs of their own; both results have norms before the sum
	Experts Experts // zero: none
}

// Experts are gated MLPs, of which a router chooses some for each token.
type Experts struct {
	Count, Chosen int // E, and k of a token
	Width         int // I, of an expert's gate and up
	Bias          bool
	Router        kernels.Router
}

// A Part is a parameter of a branch, or of the model outside the layers.
type Part struct {
	Role     Role
	Kind     Kind
	Shape    []int // [out, in] of a Product, else [n]
	Optional bool  // families may lack it
}

// Kind says what the operations do with a part.
type Kind int

// The kinds of parts. All but products are vectors.
const (
	Product Kind = iota // a matrix
	Scale               // of a norm
	Bias                // added to a product
	Fixed               // a vector that training leaves as it is
	Filter              // of a convolution, channel by channel
)

// These are the parts of attention. The biases follow attention_bias.
const (
	InputNorm     Role = "input norm"
	QueryNorm     Role = "query norm" // of each head or of all, before rotation
	KeyNorm       Role = "key norm"
	AttentionNorm Role = "attention norm" // of the result, before the sum
	Query         Role = "query"          // with gates, for each head its rows and then its gate's
	Key           Role = "key"
	Value         Role = "value"
	Output        Role = "output"
	Sinks         Role = "sinks" // [heads]
)

// These are the parts of a delta rule. Its norm has a plain weight in all families.
const (
	DeltaQKV    Role = "delta qkv"    // before the convolution
	DeltaZ      Role = "delta z"      // of the gate of the result
	DeltaB      Role = "delta b"      // [heads, hidden]: beta = sigmoid(b)
	DeltaA      Role = "delta a"      // likewise: g = -exp(log) softplus(a + time)
	DeltaConv   Role = "delta conv"   // [channels of qkv * rows], in files [channels, 1, rows]
	DeltaLog    Role = "delta log"    // [heads]
	DeltaTime   Role = "delta time"   // [heads]
	DeltaNorm   Role = "delta norm"   // [dimV], of the result
	DeltaOutput Role = "delta output" // [hidden, heads*dimV]
)

// These are the parts of a gated MLP. The biases follow mlp_bias.
const (
	PostNorm Role = "post norm" // before the MLP
	MLPNorm  Role = "mlp norm"  // of the result, before the sum
	Gate     Role = "gate"
	Up       Role = "up"
	Down     Role = "down"
)

// These are the parts of a mixture of experts. A matrix holds all experts, one expert's rows after the other's. In a
// layer with experts, the MLP for all tokens has roles of its own, since files name it otherwise.
const (
	Router     Role = "router"            // [E, hidden]
	Correction Role = "router correction" // [E], added to the scores for the choice alone
	ExpertIn   Role = "expert in"         // [E*2*I, hidden], of each expert the rows of gate, then those of up
	ExpertDown Role = "expert down"       // [E*hidden, I]
	SharedGate Role = "shared gate"
	SharedUp   Role = "shared up"
	SharedDown Role = "shared down"
	// SharedScale, [1, hidden], is the factor of that MLP, through a sigmoid.
	SharedScale Role = "shared scale"
)

// These are the parts of experts with inputs of their own, which are norms of the residual. The router's is divided by
// the root of the hidden size.
const (
	RouterNorm   Role = "router norm"
	ChoiceScale  Role = "choice scale" // [E], the factor of an expert's weights
	ExpertNorm   Role = "expert norm"
	SharedResult Role = "shared result norm" // of the MLP for all tokens
	ExpertResult Role = "expert result norm"
)

// LayerScale, [1], is the factor of a layer's output. It is not trained.
const LayerScale Role = "layer scale"

// Scaled are the matrices of a layer that can be turned to E4M3. Routers and gates of a token are small, and the model
// depends on them.
var Scaled = []Role{Query, Key, Value, Output, DeltaQKV, DeltaZ, DeltaOutput, Gate, Up, Down, ExpertIn, ExpertDown,
	SharedGate, SharedUp, SharedDown}

// Scaled returns whether a tensor is one of these.
func (t Tensor) Scaled() bool { return t.Kind == Product && slices.Contains(Scaled, t.Role) }

// Bias returns the role of a projection's bias.
func (r Role) Bias() Role { return r + " bias" }

// Parts lists the parameters of a layer, those of the mixer first. Files, buckets, adapters, exports and plans follow
// from the list.
func (l Layer) Parts(hidden int) []Part {
	return append(append(l.Mixer.parts(hidden), l.MLP.parts(hidden)...), Part{LayerScale, Fixed, []int{1}, true})
}

func (m Mixer) parts(hidden int) []Part {
	if m.Recurs() {
		return m.Delta.parts(hidden)
	}
	q, k, v, o := m.Heads*m.Dim, m.KVHeads*m.Dim, m.KVHeads*m.DimV, m.Heads*m.DimV
	qNorm, kNorm := m.Dim, m.Dim
	if m.WideNorms {
		qNorm, kNorm = q, k
	}
	rows := q
	if m.Gated {
		rows = 2 * q
	}
	list := []Part{
		{InputNorm, Scale, []int{hidden}, true},
		{QueryNorm, Scale, []int{qNorm}, true},
		{KeyNorm, Scale, []int{kNorm}, true},
		{AttentionNorm, Scale, []int{hidden}, true},
		{Query, Product, []int{rows, hidden}, false},
		{Key, Product, []int{k, hidden}, false},
		{Value, Product, []int{v, hidden}, false},
		{Output, Product, []int{hidden, o}, false},
	}
	if m.KeyValues {
		list = slices.DeleteFunc(list, func(p Part) bool { return p.Role == Value })
	}
	if m.Sinks {
		list = append(list, Part{Sinks, Bias, []int{m.Heads}, true})
	}
	return biased(list, m.Bias)
}

func (m MLP) parts(hidden int) []Part {
	list := []Part{
		{PostNorm, Scale, []int{hidden}, true},
		{MLPNorm, Scale, []int{hidden}, true},
	}
	e, gate, up, down := m.Experts, Gate, Up, Down
	if e.Count > 0 {
		gate, up, down = SharedGate, SharedUp, SharedDown
		list = append(list, biased([]Part{
			{Router, Product, []int{e.Count, hidden}, false},
			{ExpertIn, Product, []int{e.Count * 2 * e.Width, hidden}, false},
			{ExpertDown, Product, []int{e.Count * hidden, e.Width}, false},
		}, e.Bias)...)
		list = append(list, Part{Correction, Fixed, []int{e.Count}, true})
		if m.Apart {
			list = append(list, Part{RouterNorm, Scale, []int{hidden}, false}, Part{ChoiceScale, Scale, []int{e.Count}, false})
			for _, norm := range []Role{ExpertNorm, SharedResult, ExpertResult} {
				list = append(list, Part{norm, Scale, []int{hidden}, false})
			}
		}
		if m.Scaled {
			list = append(list, Part{SharedScale, Product, []int{1, hidden}, false})
		}
	}
	if m.Width == 0 {
		return list
	}
	return append(list, biased([]Part{
		{gate, Product, []int{m.Width, hidden}, false},
		{up, Product, []int{m.Width, hidden}, false},
		{down, Product, []int{hidden, m.Width}, false},
	}, m.Bias)...)
}

// biased adds the biases of the products, which families may lack.
func biased(list []Part, biases bool) []Part {
	for _, p := range list {
		if biases && p.Kind == Product {
			list = append(list, Part{p.Role.Bias(), Bias, p.Shape[:1], true})
		}
	}
	return list
}

// Layer describes layer i.
func (c *Config) Layer(i int) Layer {
	f := families[c.Architecture] // nil in a config with faults
	l := Layer{
		Mixer: Mixer{Heads: c.NumAttentionHeads, KVHeads: c.NumKeyValueHeads, Dim: c.HeadDim, DimV: c.HeadDim, Window: -1,
			Bias: c.AttentionBias || f != nil && f.Biased},
		MLP: MLP{Width: c.IntermediateSize, Bias: c.MLPBias},
	}
	if f != nil {
		l.Mixer.WideNorms, l.Mixer.Sinks, l.Mixer.Gated = f.WideNorms, f.Tensors[Sinks] != "", f.Gated
		l.Mixer.ValueNorms = f.ValueNorms
	}
	if c.mixes(i) {
		l.MLP = c.mixture()
	}
	if i < len(c.LayerTypes) && c.LayerTypes[i] == LinearAttention {
		l.Mixer, l.Rope = Mixer{Delta: c.delta(), Window: -1}, Rope{-1, -1}
		return l
	}
	if c.SlidingWindow > 0 && (len(c.LayerTypes) == 0 || c.LayerTypes[i] == SlidingAttention) {
		l.Mixer.Window = c.SlidingWindow - 1
	} else {
		l.Mixer.KVHeads = cmp.Or(c.NumGlobalKeyValueHeads, l.Mixer.KVHeads)
		l.Mixer.Dim = cmp.Or(c.GlobalHeadDim, l.Mixer.Dim)
		l.Mixer.DimV, l.Mixer.KeyValues = l.Mixer.Dim, c.AttentionKEqV
	}
	switch {
	case len(c.NoRopeLayers) > 0 && c.NoRopeLayers[i] == 0:
		l.Rope = Rope{-1, -1}
	case c.scalesQueries():
		l.Rope.Query = 1
	case c.localRope() && l.Mixer.Window >= 0:
		l.Rope = Rope{1, 1}
	}
	return l
}

// Centred reports whether a parameter is a norm that multiplies by 1 + weight.
func (c *Config) Centred(t Tensor) bool {
	return c.Family().ZeroCentred && t.Kind == Scale && t.Role != DeltaNorm
}

// Layers describes all layers.
func (c *Config) Layers() []Layer {
	list := make([]Layer, c.NumHiddenLayers)
	for i := range list {
		list[i] = c.Layer(i)
	}
	return list
}

// Mixers lists the mixers of layers with attention, each once, in order.
func (c *Config) Mixers() (list []Mixer) {
	for _, l := range c.Layers() {
		if !l.Mixer.Recurs() && !slices.Contains(list, l.Mixer) {
			list = append(list, l.Mixer)
		}
	}
	return list
}

// Windows lists the windows of the mixers, each once, in order.
func (c *Config) Windows() (list []int) {
	for _, m := range c.Mixers() {
		if !slices.Contains(list, m.Window) {
			list = append(list, m.Window)
		}
	}
	return list
}

// Recurs reports whether the mixer is a delta rule, which has a state in place of keys and values.
func (m Mixer) Recurs() bool { return m.Delta != (Delta{}) }

// Recurs reports whether a layer has a recurrent mixer.
func (c *Config) Recurs() bool {
	return slices.ContainsFunc(c.Layers(), func(l Layer) bool { return l.Mixer.Recurs() })
}

// HasExperts reports whether a layer has experts.
func (c *Config) HasExperts() bool {
	return slices.ContainsFunc(c.Layers(), func(l Layer) bool { return l.MLP.Experts.Count > 0 })
}
