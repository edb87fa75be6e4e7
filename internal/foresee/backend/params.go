package backend

import (
	"fmt"
	"slices"

	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/tensor"
)

// computeTypes maps the words of a resolved precision.compute.
var computeTypes = map[string]tensor.DType{"bf16": tensor.BF16, "fp16": tensor.F16, "fp32": tensor.F32}

// DType returns the type that a resolved config computes in.
func DType(cfg *config.Config) tensor.DType {
	t, ok := computeTypes[cfg.Precision.Compute]
	if !ok {
		panic(fmt.Sprintf("backend: precision.compute is %q, which no resolved config says", cfg.Precision.Compute))
	}
	return t
}

// Requests returns the attentions of a resolved config, one for each distinct window of its layers, the
// widest first.
func Requests(cfg *config.Config) (list []Request) {
	ws := windows(cfg)
	for _, w := range ws {
		layers := 0
		for l := range cfg.Model.NumHiddenLayers {
			if cfg.Model.Window(l) == w {
				layers++
			}
		}
		list = append(list, Request{
			Strategy: cfg.Parallel.Strategy, Of: layersOf(w, len(ws)), Layers: layers, DType: DType(cfg),
			Batch: cfg.Train.MicroBatchSize, SeqQ: cfg.Data.SeqLen, SeqKV: cfg.Data.SeqLen,
			Heads: cfg.Model.NumAttentionHeads, KVHeads: cfg.Model.NumKeyValueHeads,
			HeadDim: cfg.Model.HeadDim, HeadDimV: cfg.Model.HeadDim,
			Causal: true, Window: w, Documents: cfg.Data.PackDocuments,
			Training: true, Deterministic: cfg.Train.Deterministic,
			Ranks: cfg.Parallel.Context,
		})
	}
	return list
}

// windows lists the distinct windows of a model's layers, the widest first.
func windows(cfg *config.Config) []int {
	var list []int
	for l := range cfg.Model.NumHiddenLayers {
		if w := cfg.Model.Window(l); !slices.Contains(list, w) {
			list = append(list, w)
		}
	}
	slices.SortFunc(list, func(a, b int) int { return width(b) - width(a) })
	return list
}

// width orders windows; -1 is the widest.
func width(window int) int {
	if window < 0 {
		return 1 << 62
	}
	return window
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
