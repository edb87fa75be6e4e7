package model

import "github.com/cprun/cprun/internal/model/hf"

// FLOPs returns the model FLOPs of a forward and a backward pass over one sequence that consists
// of documents of the given lengths (one, where documents are not told apart). It counts
// what the model needs, so neither recomputed activations nor the embedding lookup:
//
//	6 * weights of all matrix products, lm_head among them, for each token, and
//	12 * heads * headDim for each visible (query, key) pair of each layer: two products
//	forward, four backward.
//
// Pairs are counted one by one, so a causal mask costs half and a window its visible part.
func FLOPs(cfg *hf.Config, docs []int) float64 {
	tokens := 0
	for _, n := range docs {
		tokens += n
	}
	flops := 6 * float64(matmulWeights(cfg)) * float64(tokens)
	for layer := range cfg.NumHiddenLayers {
		pairs := VisiblePairs(docs, cfg.Window(layer))
		flops += 12 * float64(cfg.NumAttentionHeads) * float64(cfg.HeadDim) * pairs
	}
	return flops
}

// matmulWeights returns the elements of the matrices that a token is multiplied with. A tied
// embedding serves as lm_head and counts, a separate one is only looked up.
func matmulWeights(cfg *hf.Config) int64 {
	n, flat := int64(0), NewLayout(cfg, 1)
	for i, p := range flat.Params {
		if len(p.Shape) == 2 && (flat.Of(i) != Embedding || cfg.TieWordEmbeddings) {
			n += int64(p.Size())
		}
	}
	return n
}

// VisiblePairs counts the (query, key) pairs of causal attention inside documents, where a query
// sees itself and window keys before it; -1: all before it. It is exact up to 2^53.
func VisiblePairs(docs []int, window int) float64 {
	pairs := 0.0
	for _, n := range docs {
		pairs += triangle(n)
		if window >= 0 && n > window+1 {
			pairs -= triangle(n - window - 1) // keys out of sight of the last query
		}
	}
	return pairs
}

// triangle returns 1 + 2 + ... + n, which may not fit an integer.
func triangle(n int) float64 {
	if n%2 == 0 {
		return float64(n/2) * float64(n+1)
	}
	return float64(n) * float64((n+1)/2)
}
