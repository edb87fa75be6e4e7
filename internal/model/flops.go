package model

import "github.com/cprun/cprun/internal/hf"

// FLOPs is the model FLOPs of a forward and a backward pass over one sequence that consists
// of documents of the given lengths (one, where documents are not told apart). It counts
// what the model needs, so neither recomputed activations nor the embedding lookup:
//
//	6 * weights of all matrix products, lm_head among them, for each token, and
//	12 * heads * headDim for each visible (query, key) pair of each layer: two products
//	forward, four backward.
//
// Pairs are counted one by one, so a causal mask costs half and a window what it shows.
func FLOPs(cfg *hf.Config, docs []int) float64 {
	tokens := 0
	for _, n := range docs {
		tokens += n
	}
	flops := 6 * float64(matmulWeights(cfg)) * float64(tokens)
	for layer := range cfg.NumHiddenLayers {
		pairs := VisiblePairs(docs, cfg.Window(layer))
		flops += 12 * float64(cfg.NumAttentionHeads) * float64(cfg.HeadDim) * float64(pairs)
	}
	return flops
}

// matmulWeights is the elements of the matrices that a token is multiplied with. A tied
// embedding serves as lm_head and counts, a separate one is only looked up.
func matmulWeights(cfg *hf.Config) int64 {
	n := int64(0)
	for _, p := range Layout(cfg) {
		if len(p.Shape) == 2 && (p.Name != "model.embed_tokens.weight" || cfg.TieWordEmbeddings) {
			n += int64(p.Size())
		}
	}
	return n
}

// VisiblePairs is the (query, key) pairs of causal attention inside documents, where a query
// sees itself and window keys before it; -1: all before it.
func VisiblePairs(docs []int, window int) int64 {
	pairs := int64(0)
	for _, n := range docs {
		l := int64(n)
		pairs += l * (l + 1) / 2
		if window >= 0 && n > window+1 {
			hidden := l - int64(window) - 1 // keys out of sight of the last query
			pairs -= hidden * (hidden + 1) / 2
		}
	}
	return pairs
}
