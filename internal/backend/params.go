package backend

import (
	"fmt"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/tensor"
)

// computeTypes are the words of precision.compute once it is resolved.
var computeTypes = map[string]tensor.DType{"bf16": tensor.BF16, "fp16": tensor.F16, "fp32": tensor.F32}

// DType is the type that a resolved config computes in.
func DType(cfg *config.Config) tensor.DType {
	return typeOf("precision.compute", cfg.Precision.Compute)
}

// WireType is the type in which keys and values travel.
func WireType(cfg *config.Config) tensor.DType {
	return typeOf("precision.kv_wire", cfg.Precision.KVWire)
}

func typeOf(key, word string) tensor.DType {
	t, ok := computeTypes[word]
	if !ok {
		panic(fmt.Sprintf("backend: %s is %q, which no resolved config says", key, word))
	}
	return t
}

// recipe is the recipe of a word of precision.fp8.
func recipe(word string) (attention.Recipe, error) {
	for r := attention.NoFP8; r <= attention.NVFP4; r++ {
		if r.String() == word {
			return r, nil
		}
	}
	return 0, fmt.Errorf("precision.fp8: no recipe %q", word)
}

// Params is what decides on the backend of the layers with that window, -1 for those that
// see every key before a query's own. The model keeps q, k and v as three dense tensors
// [batch, seq, heads, head dim], so nothing about memory is left to detect.
func Params(cfg *config.Config, m Machine, window int, disabled uint8) (attention.Params, error) {
	want, err := attention.ParseBackend(cfg.Attention.Backend)
	if err != nil {
		return attention.Params{}, fmt.Errorf("attention.backend: %w", err)
	}
	fp8, err := recipe(cfg.Precision.FP8)
	if err != nil {
		return attention.Params{}, err
	}
	return attention.Params{
		Arch: m.Arch, CUDNN: m.CUDNN, Flash: m.Flash, Memory: m.Memory, Disabled: disabled, Want: want,
		DType: DType(cfg), Format: attention.BSHD, Packing: attention.Separate, Contiguous: true,
		Batch: cfg.Train.MicroBatchSize, SeqQ: cfg.Data.SeqLen, SeqKV: cfg.Data.SeqLen,
		Heads: cfg.Model.NumAttentionHeads, KVHeads: cfg.Model.NumKeyValueHeads,
		HeadDim: cfg.Model.HeadDim, HeadDimV: cfg.Model.HeadDim,
		Causal: true, WindowLeft: window, WindowRight: 0,
		Softmax: attention.Vanilla, Bias: attention.NoBias,
		Documents: cfg.Data.PackDocuments, Training: true, Deterministic: cfg.Train.Deterministic, FP8: fp8,
		ContextSize: cfg.Parallel.Context, Algorithm: cfg.Parallel.Algorithm, Layout: cfg.Parallel.Layout,
	}, nil
}

// windows are the distinct windows of a model's layers, the widest first.
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

// Disabled is the bits of attention.Params for backends that are switched off.
func Disabled(flash, fused, unfused bool) uint8 {
	var bits uint8
	for b, off := range map[attention.Backend]bool{attention.Flash: flash, attention.Fused: fused, attention.Unfused: unfused} {
		if off {
			bits |= 1 << b
		}
	}
	return bits
}
