package model

import (
	"testing"

	"github.com/cprun/cprun/internal/model/hf"
)

func TestVisiblePairsAreCounted(t *testing.T) {
	for _, docs := range [][]int{nil, {1}, {5}, {9}, {3, 1, 7, 2}} {
		for window := -1; window < 11; window++ {
			want := 0.0
			for _, n := range docs {
				for i := range n {
					for j := range i + 1 {
						if window < 0 || j >= i-window {
							want++
						}
					}
				}
			}
			if got := VisiblePairs(docs, window); got != want {
				t.Errorf("%v with window %d: %v pairs, want %v", docs, window, got, want)
			}
		}
	}
}

// Llama-3-8B takes, in GFLOP per token, 45.0 for matrix products at any length, and with exactly causal attention 51.5,
// 70.8, 148, 457 and 870.
func TestFLOPsOfLlama8B(t *testing.T) {
	cfg := &hf.Config{Architecture: "llama", VocabSize: 128256, HiddenSize: 4096, IntermediateSize: 14336,
		NumHiddenLayers: 32, NumAttentionHeads: 32, NumKeyValueHeads: 8, HeadDim: 128}
	for length, want := range map[int]float64{
		1: 45.0, 8 << 10: 51.5, 32 << 10: 70.8, 128 << 10: 148, 512 << 10: 457, 1 << 20: 870,
	} {
		perToken := WorkOf(cfg).FLOPs([]int{length}) / float64(length) / 1e9
		near(t, "GFLOP per token", perToken, want, 0.005*want)
	}
	scaled := *cfg
	scaled.Tuning.Linears = "fp8"
	near(t, "FLOPs in E4M3", WorkOf(&scaled).FLOPs([]int{4096}), WorkOf(cfg).FLOPs([]int{4096}), 0)
	whole, parts := WorkOf(cfg).FLOPs([]int{4096}), WorkOf(cfg).FLOPs([]int{1024, 3072})
	attention := 12 * 32 * 32 * 128 * float64(1024*3072) // the pairs between the documents
	near(t, "FLOPs of documents", parts, whole-attention, 1)
}

// With adapters, frozen matrices have no gradient of the weight, and q, k and v of the first layer none of their input.
func TestFLOPsOfAdapters(t *testing.T) {
	cfg := *tinyModels["smollm3"]
	cfg.Tuning = lora(0)
	attention, mlp := 6*(8+4+4)+8*6, 3*6*10
	adapters := 3 * (6 + 8 + 2*(6+4) + 8 + 6 + 2*(6+10) + 10 + 6)
	want := 2*(4*(attention+mlp)+6*adapters) - 2*6*(8+4+4) - 2*3*3*6 + 4*7*6
	near(t, "FLOPs", WorkOf(&cfg).FLOPs([]int{1}), float64(want)+2*12*2*4, 0)
}

func TestFLOPsOfSlidingLayersAndTiedHeads(t *testing.T) {
	cfg := *tinyModels["qwen3 sliding"]
	docs := []int{7}
	matrices := 3*(8*12+2*8*4+12*8+3*8*12) + 11*8
	pairs := VisiblePairs(docs, -1) + 2*VisiblePairs(docs, 2)
	near(t, "FLOPs", WorkOf(&cfg).FLOPs(docs), float64(6*matrices*7)+12*3*4*pairs, 0)
	separate := WorkOf(&cfg).FLOPs(docs)
	cfg.TieWordEmbeddings = true
	near(t, "FLOPs of a tied model", WorkOf(&cfg).FLOPs(docs), separate, 0)
}
