package backend

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// Request is one attention of a run, as training, `cprun attention` and `cprun bench` alike ask for
// it. Its q, k and v are three dense tensors [batch, seq, heads, head dim] on the device.
type Request struct {
	ring.Strategy        // a Backend of "auto" or "" is open
	Of            string // names it among several: "layers without a window"
	Layers        int    // that run it; 0: one
	DType         tensor.DType

	Batch, SeqQ, SeqKV int // global tokens
	Heads, KVHeads     int
	HeadDim, HeadDimV  int
	Causal             bool
	TopLeft            bool // the mask's alignment, where SeqQ is not SeqKV
	Window             int  // keys before a query's own; -1: all
	Ahead              int  // keys after it, if BoundedAhead; else all
	BoundedAhead       bool
	Softcap            bool
	ScaleNotAbove0     bool
	Documents          bool
	DocumentKeys       bool // documents have lengths in keys of their own
	Slices             bool // in place of all other masks
	Sink               bool
	Bias               bool // or ALiBi
	MaxLogit           bool

	Training, Deterministic bool

	Ranks int // that share the sequence
}

// Plain reports whether r is causal self-attention of a training run, which cost tables are of.
func (r *Request) Plain() bool {
	mask := r.TopLeft || r.DocumentKeys || r.Slices
	scores := r.Softcap || r.ScaleNotAbove0 || r.Sink || r.Bias || r.MaxLogit
	return r.Training && r.Causal && r.SeqQ == r.SeqKV && !mask && !scores
}

// params returns the parameters of r on a machine. No other code fills them for a run.
func (r *Request) params(m machine.Machine, disabled uint8) (backends.Params, error) {
	want := backends.Auto
	if r.Backend != "" {
		var err error
		if want, err = backends.ParseBackend(r.Backend); err != nil {
			return backends.Params{}, err
		}
	}
	right := -1
	if r.BoundedAhead {
		right = r.Ahead
	}
	if r.Causal {
		right = 0
	}
	inner := 0
	if r.Algorithm == "hierarchical" {
		inner = r.Inner
	}
	return On(backends.Params{
		Want: want, DType: r.DType,
		Batch: r.Batch, SeqQ: r.SeqQ, SeqKV: r.SeqKV, Heads: r.Heads, KVHeads: r.KVHeads,
		HeadDim: r.HeadDim, HeadDimV: r.HeadDimV, Causal: r.Causal, TopLeft: r.TopLeft,
		WindowLeft: r.Window, WindowRight: right, Softcap: r.Softcap, ScaleNotAbove0: r.ScaleNotAbove0,
		Sink: r.Sink, Bias: r.Bias, MaxLogit: r.MaxLogit, Training: r.Training, Deterministic: r.Deterministic,
		Documents: r.Documents, DocumentKeys: r.DocumentKeys, Slices: r.Slices,
		ContextSize: r.Ranks, InnerSize: inner, Algorithm: r.Algorithm, Gather: r.Gather, Layout: r.Layout,
	}, m, disabled), nil
}

// On returns p on a machine, with the backends of disabled (see Disabled) switched off.
func On(p backends.Params, m machine.Machine, disabled uint8) backends.Params {
	p.Arch, p.CUDNN, p.Flash, p.Memory, p.Disabled = m.Arch, m.CUDNN, m.Flash, m.Memory, disabled
	return p
}

var computeTypes = map[string]tensor.DType{"bf16": tensor.BF16, "fp16": tensor.F16, "fp32": tensor.F32}

// DType returns the type that a resolved config computes in.
func DType(cfg *config.Config) tensor.DType {
	t, ok := computeTypes[cfg.Precision.Compute]
	if !ok {
		panic(fmt.Sprintf("backend: precision.compute is %q, in a resolved config", cfg.Precision.Compute))
	}
	return t
}

// Requests returns the attentions of a resolved config, one for each distinct window of its layers, the
// widest first.
func Requests(cfg *config.Config) (list []Request) {
	layers := map[int]int{} // by window
	for l := range cfg.Model.NumHiddenLayers {
		layers[cfg.Model.Window(l)]++
	}
	widest := func(a, b int) int { return cmp.Compare(uint(b), uint(a)) } // -1 is all keys
	for _, w := range slices.SortedFunc(maps.Keys(layers), widest) {
		list = append(list, Request{
			Strategy: cfg.Parallel.Strategy, Of: layersOf(w, len(layers)), Layers: layers[w], DType: DType(cfg),
			Batch: cfg.Train.MicroBatchSize, SeqQ: cfg.Data.SeqLen, SeqKV: cfg.Data.SeqLen,
			Heads: cfg.Model.NumAttentionHeads, KVHeads: cfg.Model.NumKeyValueHeads,
			HeadDim: cfg.Model.HeadDim, HeadDimV: cfg.Model.HeadDim,
			Causal: true, Window: w, Documents: cfg.Data.PackDocuments,
			Softcap:  cfg.Model.AttnLogitSoftcapping > 0,
			Training: true, Deterministic: cfg.Train.Deterministic,
			Ranks: cfg.Parallel.Context,
		})
	}
	return list
}

// Disabled returns the bits of backends.Params for backends that are switched off.
func Disabled(flash, fused bool) (bits uint8) {
	if flash {
		bits |= 1 << backends.Flash
	}
	if fused {
		bits |= 1 << backends.Fused
	}
	return bits
}
