package hf

import "slices"

// A Layer describes a layer of a model. Layers with equal descriptions run the same operations on the same shapes.
type Layer struct {
	Mixer Mixer
	MLP   MLP
	Rope  int // the rotary table of its positions, which changes no shape; -1: none
}

// A Mixer describes the branch that mixes tokens: attention. A key of this type stands for all layers that share masks,
// schedules, kernels and costs.
type Mixer struct {
	Heads, KVHeads int
	Dim, DimV      int // of a head: of q and k, and of v
	Window         int // earlier keys that a query sees; -1: all
}

// An MLP describes the branch that treats each token alone.
type MLP struct {
	Width int // of gate and up
}

// Layer describes layer i.
func (c *Config) Layer(i int) Layer {
	l := Layer{
		Mixer: Mixer{Heads: c.NumAttentionHeads, KVHeads: c.NumKeyValueHeads, Dim: c.HeadDim, DimV: c.HeadDim, Window: -1},
		MLP:   MLP{Width: c.IntermediateSize},
	}
	if c.SlidingWindow > 0 && (len(c.LayerTypes) == 0 || c.LayerTypes[i] == SlidingAttention) {
		l.Mixer.Window = c.SlidingWindow - 1
	}
	switch {
	case len(c.NoRopeLayers) > 0 && c.NoRopeLayers[i] == 0:
		l.Rope = -1
	case c.Ropes() > 1 && l.Mixer.Window >= 0:
		l.Rope = 1
	}
	return l
}

// Layers describes all layers.
func (c *Config) Layers() []Layer {
	list := make([]Layer, c.NumHiddenLayers)
	for i := range list {
		list[i] = c.Layer(i)
	}
	return list
}

// Mixers lists the mixers of the layers, each once, in order.
func (c *Config) Mixers() (list []Mixer) {
	for _, l := range c.Layers() {
		if !slices.Contains(list, l.Mixer) {
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
