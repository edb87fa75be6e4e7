package model

import (
	"fmt"
	"testing"

	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// A run takes exactly the planned bytes, even after its arena had to grow.
func TestPlanIsWhatARunTakes(t *testing.T) {
	for name := range tinyModels {
		for _, mode := range []Recompute{RecomputeNone, RecomputeSelective, RecomputeFull} {
			for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16} {
				t.Run(fmt.Sprint(name, " ", mode, " ", dtype), func(t *testing.T) {
					c := tinyCase(name, tensor.F32)
					if dtype != tensor.F32 {
						c.compute(dtype)
					}
					c.opt = Options{Recompute: mode, LossChunk: 4, tile: 5}
					c.arenaSize = 3000
					c.opt.Segments = len(c.att.segments)
					plan := Plan(c.cfg, c.opt, c.batch.IDs.Len(tensor.Batch), c.batch.IDs.Len(tensor.Seq), dtype)
					_, _, trained := c.train(t, 1)
					_, validated := c.validate(t)
					if plan.Activations != trained || plan.Validation != validated {
						t.Errorf("planned %d and %d bytes, took %d and %d", plan.Activations, plan.Validation, trained,
							validated)
					}
				})
			}
		}
	}
}

// llama3b has the shape of Llama-3.2-3B.
var llama3b = &hf.Config{
	Architecture: "llama", VocabSize: 128256, HiddenSize: 3072, IntermediateSize: 8192, NumHiddenLayers: 28,
	NumAttentionHeads: 24, NumKeyValueHeads: 8, HeadDim: 128, RopeTheta: 5e5, RMSNormEps: 1e-5, TieWordEmbeddings: true,
}

func TestPlanOfARealModel(t *testing.T) {
	const tokens, layers = 32 << 10, 28
	perLayer := func(mode Recompute) float64 {
		more, less := *llama3b, *llama3b
		more.NumHiddenLayers, less.NumHiddenLayers = layers, layers-1
		opt := Options{Recompute: mode}
		m := Plan(&more, opt, 1, tokens, tensor.BF16).Activations - Plan(&less, opt, 1, tokens, tensor.BF16).Activations
		return float64(m) / tokens
	}
	// One more layer takes these bytes per token: input, O, LSE; with none also q, k, v, n1, h, n2, three tensors of the
	// MLP, and the scales of two norms.
	selective := 2.0*3072 + 2*3072 + 4*24
	for mode, want := range map[Recompute]float64{
		RecomputeFull:      2 * 3072,
		RecomputeSelective: selective,
		RecomputeNone:      selective + 2*(3072+2*1024) + 2*(3*3072) + 2*3*8192 + 2*4,
	} {
		if got := perLayer(mode); got != want {
			t.Errorf("%s: %v bytes per token and layer, want %v", mode, got, want)
		}
	}
	if n := Count(Layout(llama3b)); n != 3212749824 {
		t.Errorf("%d parameters", n)
	}
}

// llama8b has the shape of Llama-3.1-8B.
var llama8b = &hf.Config{
	Architecture: "llama", VocabSize: 128256, HiddenSize: 4096, IntermediateSize: 14336, NumHiddenLayers: 32,
	NumAttentionHeads: 32, NumKeyValueHeads: 8, HeadDim: 128, RopeTheta: 5e5, RMSNormEps: 1e-5,
}

// A very long sequence takes, beside the inputs of the layers, d, q, k, v, O, LSE, do and three gradients in float32:
// all that is computed row by row exists for one tile.
func TestLongSequencesTakeLittlePerToken(t *testing.T) {
	const tokens = 650 << 10
	plan := Plan(llama8b, Options{Recompute: RecomputeFull}, 1, tokens, tensor.BF16)
	const want = 2*(4096+4096+2*1024+4096) + 4*32 + 2*4096 + 4*(4096+2*1024)
	if got := plan.Activations/tokens - 32*2*4096; got != want {
		t.Errorf("the backward pass of a layer takes %d bytes per token, want %d", got, want)
	}
}
