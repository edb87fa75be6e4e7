package backend

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// Request is one attention of a run, as training, `cprun attention` and `cprun bench` alike ask for it.
type Request struct {
	Strategy        ring.Strategy // a Backend of "auto" or "" is open
	Of              string        // names it among several: "layers without a window"
	Layers          int           // that run it; 0: one
	backends.Params               // Select fills the fields of the machine and of Strategy
}

// Mixer returns the mixer of layers that run r.
func (r *Request) Mixer() hf.Mixer {
	return hf.Mixer{Heads: r.Heads, KVHeads: r.KVHeads, Dim: r.HeadDim, DimV: r.HeadDimV, Window: r.WindowLeft}
}

// Plain reports whether r is causal self-attention of a training run, which cost tables are of.
func (r *Request) Plain() bool {
	mask := r.TopLeft || r.DocumentKeys || r.Slices
	scores := r.Softcap || r.ScaleNotAbove0 || r.Sink || r.Bias || r.MaxLogit
	return r.Training && r.Causal && r.SeqQ == r.SeqKV && !mask && !scores
}

// params returns the parameters of r on a machine. No other code fills them for a run.
func (r *Request) params(m machine.Machine, disabled uint8) (backends.Params, error) {
	p, s := On(r.Params, m, disabled), &r.Strategy
	p.Algorithm, p.Gather, p.Layout = s.Algorithm, s.Gather, s.Layout
	if s.Algorithm == "hierarchical" {
		p.InnerSize = s.Inner
	}
	if p.Causal {
		p.WindowRight = 0
	}
	var err error
	p.Want, err = backends.ParseBackend(cmp.Or(s.Backend, "auto"))
	return p, err
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

// Requests returns the attentions of a resolved config, one for each distinct mixer of its layers, the widest window
// first.
func Requests(cfg *config.Config) (list []Request) {
	layers := map[hf.Mixer]int{}
	for _, l := range cfg.Model.Layers() {
		layers[l.Mixer]++
	}
	mixers := cfg.Model.Mixers()
	slices.SortStableFunc(mixers, func(a, b hf.Mixer) int {
		return cmp.Compare(uint(b.Window), uint(a.Window)) // -1 is all keys
	})
	for _, m := range mixers {
		list = append(list, Request{
			Strategy: cfg.Parallel.Strategy, Of: layersOf(m.Window, len(mixers)), Layers: layers[m],
			Params: backends.Params{
				DType: DType(cfg), Batch: cfg.Train.MicroBatchSize, SeqQ: cfg.Data.SeqLen, SeqKV: cfg.Data.SeqLen,
				Heads: m.Heads, KVHeads: m.KVHeads, HeadDim: m.Dim, HeadDimV: m.DimV,
				Causal: true, WindowLeft: m.Window, Documents: cfg.Data.PackDocuments,
				Softcap:  cfg.Model.AttnLogitSoftcapping > 0,
				Training: true, Deterministic: cfg.Train.Deterministic, ContextSize: cfg.Parallel.Context,
			},
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
