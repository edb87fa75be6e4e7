package hf

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Family is a kind of model, as data: how config.json and the files of weights speak of it, and
// which blocks its layers have. One that differs from others in this alone is a Family more, in a
// file of its own that registers it; nothing else knows its name.
type Family struct {
	Name  string // model_type of config.json, and model.architecture of train.yaml
	Class string // in architectures of config.json
	About string // what it is, for the reference of train.yaml; may be empty

	Tensors  Names
	Defaults Defaults
	Windows  Windows
	// Ropes are the kinds of rope scaling that its models may have; nil: all that are computed.
	Ropes []string
	// Export is keys of config.json that an export has beside those of all families.
	Export map[string]any
}

// Names are the tensors of a family, as its files of weights name them. Behind each is its shape.
type Names struct {
	Embedding string // [vocab, hidden]
	Head      string // [vocab, hidden]; not there where it is tied to the embedding
	Norm      string // [hidden]: before the head
	Layer     string // what stands before the following names; %d is the layer's number, from 0

	InputNorm, PostNorm string // [hidden]: before attention, and before the MLP
	Query               string // [heads * head dim, hidden]
	Key, Value          string // [key and value heads * head dim, hidden]
	Output              string // [hidden, heads * head dim]
	QueryNorm, KeyNorm  string // [head dim]: of RMSNorms over each head, before it turns; empty: there are none
	Gate, Up            string // [intermediate, hidden]
	Down                string // [hidden, intermediate]
}

// Defaults are what transformers takes where config.json does not have a key.
type Defaults struct {
	KVHeads           int // num_key_value_heads; 0: as many as heads
	HeadDim           int // 0: hidden_size / num_attention_heads
	Positions         int // max_position_embeddings
	TieWordEmbeddings bool
}

// Windows says how config.json speaks of sliding windows.
type Windows struct {
	Default int  // sliding_window where the key is absent; 0: none
	Asked   bool // layers slide only if use_sliding_window is true, not unless it is false
	// From is the default of max_window_layers: layers before it see everything, where
	// layer_types does not say. 0: the key means nothing.
	From int
	// Foreign says that transformers has no window in this family, and ignores the keys.
	Foreign bool
}

var families = map[string]*Family{}

// Register makes a family known. It is called while the program starts. It panics if there is one
// of that name, or if a name is missing.
func Register(f Family) {
	t := &f.Tensors
	for _, s := range []string{
		f.Name, f.Class, t.Embedding, t.Head, t.Norm, t.Layer, t.InputNorm, t.PostNorm, t.Query, t.Key, t.Value, t.Output, t.Gate, t.Up, t.Down,
	} {
		if s == "" {
			panic(fmt.Sprintf("hf: family %q lacks a name", f.Name))
		}
	}
	if families[f.Name] != nil {
		panic(fmt.Sprintf("hf: family %q is registered twice", f.Name))
	}
	families[f.Name] = &f
}

// Families returns the names of all families, sorted.
func Families() []string { return slices.Sorted(maps.Keys(families)) }

// About says what the families are, as far as their names do not.
func About() string {
	var out []string
	for _, name := range Families() {
		if about := families[name].About; about != "" {
			out = append(out, about)
		}
	}
	return strings.Join(out, "; ")
}

// Family returns that of a valid config.
func (c *Config) Family() *Family {
	f := families[c.Architecture]
	if f == nil {
		panic(fmt.Sprintf("hf: architecture %q in a config that was checked", c.Architecture))
	}
	return f
}

// HasHeadNorms reports whether the heads of queries and keys are normalised.
func (f *Family) HasHeadNorms() bool { return f.Tensors.QueryNorm != "" }

// InLayer returns the name of a layer's tensor, given that of the Names.
func (n *Names) InLayer(layer int, name string) string { return fmt.Sprintf(n.Layer, layer) + name }

// ropes are the kinds of rope scaling that are computed, in the order in which errors name them.
var ropes = []string{"linear", "llama3", "yarn"}

// ropes are those that a family has; of an unknown one all.
func (f *Family) ropes() []string {
	if f == nil || f.Ropes == nil {
		return ropes
	}
	return f.Ropes
}

// classes are those of all families, sorted by the families' names.
func classes() (out []string) {
	for _, name := range Families() {
		out = append(out, families[name].Class)
	}
	return out
}

// and writes words as a sentence has them: "a, b and c".
func and(words ...string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " and " + words[last]
}

// strangers are what to say of families that are not registered and whose models can be trained
// under the name of another.
var strangers = map[string]string{
	"mistral": "Its tensors are named like llama's, but its " +
		"defaults differ (sliding_window 4096 on every layer where the key is absent). To train it, copy the " +
		"directory and set model_type llama, architectures [LlamaForCausalLM], and every key that it left out",
}
