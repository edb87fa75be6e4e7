package model

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// A testCase is a model with weights and a batch on one device.
type testCase struct {
	cfg       *hf.Config
	opt       Options
	params    Params
	batch     Batch
	ops       Ops
	att       refAttention
	arenaSize int64
}

// newCase returns a model that computes in the type of its weights, with a batch of sequences. Each document starts
// with position 0.
func newCase(cfg *hf.Config, weights View, batch int, ids, targets []int32, docs []int) *testCase {
	c := &testCase{cfg: cfg, ops: refOps{}, att: refAttention{docs: docs, cfg: cfg,
		alone: alone{delta.Reference{}, refOps{}, documents(docs, len(ids)/batch)}}, arenaSize: 1 << 17}
	c.params = Params{Layout: NewLayout(cfg, 1), Weights: weights, Compute: weights,
		Grads: tensor.New(weights.DType(), weights.Size())}
	c.freeze(tensor.New(weights.DType(), int(c.params.Layout.FrozenSize())))
	seq := len(ids) / batch
	positions := make([]int, len(ids))
	for i := range positions {
		positions[i] = i % seq
		if t := i % seq; docs != nil && t > 0 {
			positions[i] = positions[i-1] + 1
			if docs[t] != docs[t-1] {
				positions[i] = 0
			}
		}
	}
	c.batch = Batch{
		IDs:     tensor.FromSlice(ids, batch, seq, 1, 1),
		Targets: tensor.FromSlice(targets, batch, seq, 1, 1),
		Cos:     tensor.New(weights.DType(), batch, seq, 1, cfg.AllPairs()),
		Sin:     tensor.New(weights.DType(), batch, seq, 1, cfg.AllPairs()),
	}
	NewRope(cfg).Fill(c.batch.Cos, c.batch.Sin, positions, slices.Repeat([]int{seq}, len(positions)))
	return c
}

// freeze sets the values of frozen parameters, if there are any.
func (c *testCase) freeze(values View) {
	most := 64
	if c.params.Layout.Frozen == nil {
		return
	}
	for _, p := range c.params.Layout.Frozen.Params {
		if p.Kind != hf.Product {
			most = max(most, p.Size())
		}
	}
	c.params.Frozen = &Params{Layout: c.params.Layout.Frozen, Weights: values, Compute: values,
		Unread: tensor.New(values.DType(), most)}
}

// values returns all parameters by name.
func (c *testCase) values() map[string][]float64 {
	values := map[string][]float64{}
	for ps := &c.params; ps != nil; ps = ps.Frozen {
		for _, p := range ps.Layout.Params {
			values[p.Name] = get(p.View(ps.Weights))
		}
	}
	return values
}

// set sets all parameters by name.
func (c *testCase) set(values map[string][]float64) {
	for ps := &c.params; ps != nil; ps = ps.Frozen {
		for _, p := range ps.Layout.Params {
			put(p.View(ps.Weights), values[p.Name])
		}
	}
}

// compute sets a type for activations that differs from the type of the weights.
func (c *testCase) compute(dtype tensor.DType) {
	c.params.Compute = tensor.New(dtype, c.params.Weights.Size())
	put(c.params.Compute, get(c.params.Weights))
}

func (c *testCase) model() *Model { return New(c.cfg, c.ops, c.att, c.params, c.opt) }

// train runs one pass and returns the loss, all gradients, and the peak memory of the arena.
func (c *testCase) train(t *testing.T, scale float64) (loss float64, grads []float64, peak int64) {
	t.Helper()
	put(c.params.Grads, make([]float64, c.params.Grads.Size()))
	sum, a := tensor.New(tensor.F64, 1), c.arena()
	before := a.Mark()
	if err := c.model().ForwardBackward(a, c.batch, sum, scale); err != nil {
		t.Fatal(err)
	}
	if a.Mark() != before {
		t.Errorf("the arena stands at %v after the pass, at %v before it", a.Mark(), before)
	}
	return get(sum)[0], get(c.params.Grads), a.Peak()
}

func (c *testCase) validate(t *testing.T) (loss float64, peak int64) {
	t.Helper()
	sum, a := tensor.New(tensor.F64, 1), c.arena()
	if err := c.model().Forward(a, c.batch, sum); err != nil {
		t.Fatal(err)
	}
	return get(sum)[0], a.Peak()
}

// arena returns an arena full of NaN, which exposes reads of unwritten memory.
func (c *testCase) arena() *tensor.Arena {
	return tensor.NewArena(c.arenaSize, func(n int64) tensor.Memory {
		h := tensor.NewHost(n)
		xs := tensor.Data[float64](tensor.Dense(h, tensor.F64, 0, [4]int{1, 1, 1, int(n / 8)}))
		for i := range xs {
			xs[i] = math.NaN() // in every float type
		}
		return h
	})
}

// tinyModels lists small models in which no two dimensions are equal.
var tinyModels = map[string]*hf.Config{
	"llama tied": {
		Architecture: "llama", VocabSize: 13, HiddenSize: 10, IntermediateSize: 14, NumHiddenLayers: 2,
		NumAttentionHeads: 4, NumKeyValueHeads: 2, HeadDim: 6, RopeTheta: 100, RMSNormEps: 1e-5, TieWordEmbeddings: true,
		RopeScaling: &hf.RopeScaling{Type: "linear", Factor: 2}, AttentionBias: true, MLPBias: true,
	},
	"qwen3_5": {
		Architecture: "qwen3_5_text", VocabSize: 13, HiddenSize: 10, IntermediateSize: 14, NumHiddenLayers: 3,
		NumAttentionHeads: 4, NumKeyValueHeads: 2, HeadDim: 6, RopeTheta: 100,
		RMSNormEps:          0.05, // a result of the rule may be nearly 0
		PartialRotaryFactor: 0.4, LayerTypes: []string{"linear_attention", "full_attention", "linear_attention"},
		LinearConvKernelDim: 4, LinearKeyHeadDim: 8, LinearValueHeadDim: 5, LinearNumKeyHeads: 2, LinearNumValueHeads: 4,
	},
	"smollm3": {
		Architecture: "smollm3", VocabSize: 7, HiddenSize: 6, IntermediateSize: 10, NumHiddenLayers: 2,
		NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 4, RopeTheta: 30, RMSNormEps: 1e-5,
		NoRopeLayers: []int{0, 1},
	},
	"phi3": {
		Architecture: "phi3", VocabSize: 9, HiddenSize: 6, IntermediateSize: 8, NumHiddenLayers: 2,
		NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 10, RopeTheta: 40, RMSNormEps: 1e-5,
		PartialRotaryFactor: 0.4, RopeScaling: &hf.RopeScaling{Type: "longrope", Factor: 3, OriginalMax: 5,
			ShortFactor: []float64{1, 2}, LongFactor: []float64{3, 5}},
	},
	"qwen3 sliding": {
		Architecture: "qwen3", VocabSize: 11, HiddenSize: 8, IntermediateSize: 12, NumHiddenLayers: 3,
		NumAttentionHeads: 3, NumKeyValueHeads: 1, HeadDim: 4, RopeTheta: 50, RMSNormEps: 1e-6,
		RopeScaling:   &hf.RopeScaling{Type: "yarn", Factor: 4, OriginalMax: 32},
		SlidingWindow: 3, LayerTypes: []string{"sliding_attention", "full_attention", "sliding_attention"},
	},
	"gemma2": {
		Architecture: "gemma2", VocabSize: 13, HiddenSize: 10, IntermediateSize: 14, NumHiddenLayers: 2,
		NumAttentionHeads: 4, NumKeyValueHeads: 2, HeadDim: 6, RopeTheta: 100, RMSNormEps: 1e-5, TieWordEmbeddings: true,
		QueryPreAttnScalar: 7, AttnLogitSoftcapping: 2, FinalLogitSoftcapping: 5,
		SlidingWindow: 3, LayerTypes: []string{"sliding_attention", "full_attention"},
	},
	"gemma3": {
		Architecture: "gemma3_text", VocabSize: 11, HiddenSize: 8, IntermediateSize: 12, NumHiddenLayers: 2,
		NumAttentionHeads: 3, NumKeyValueHeads: 1, HeadDim: 4, RopeTheta: 50, RMSNormEps: 1e-6,
		RopeScaling: &hf.RopeScaling{Type: "linear", Factor: 2}, RopeLocalBaseFreq: 10,
		SlidingWindow: 3, LayerTypes: []string{"sliding_attention", "full_attention"},
	},
	"gemma4": {
		Architecture: "gemma4_text", VocabSize: 11, HiddenSize: 8, IntermediateSize: 12, NumHiddenLayers: 2,
		NumAttentionHeads: 4, NumKeyValueHeads: 2, HeadDim: 4, RopeTheta: 50, RopeLocalBaseFreq: 10,
		RMSNormEps:    0.01, // a result of experts may be nearly 0
		GlobalHeadDim: 8, NumGlobalKeyValueHeads: 1, AttentionKEqV: true, PartialRotaryFactor: 0.5, FinalLogitSoftcapping: 5,
		NumExperts: 5, NumExpertsPerTok: 2, MoEIntermediateSize: 3,
		SlidingWindow: 3, LayerTypes: []string{"sliding_attention", "full_attention"},
	},
	"olmo3": {
		Architecture: "olmo3", VocabSize: 7, HiddenSize: 10, IntermediateSize: 14, NumHiddenLayers: 2,
		NumAttentionHeads: 4, NumKeyValueHeads: 2, HeadDim: 4, RopeTheta: 30, RMSNormEps: 0.3,
		SlidingWindow: 3, LayerTypes: []string{"sliding_attention", "full_attention"},
	},
	"granite": {
		Architecture: "granite", VocabSize: 7, HiddenSize: 6, IntermediateSize: 10, NumHiddenLayers: 2,
		NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 4, RopeTheta: 30, RMSNormEps: 1e-5, TieWordEmbeddings: true,
		AttentionMultiplier: 0.4, EmbeddingMultiplier: 1.5, ResidualMultiplier: 0.7, LogitsScaling: 3,
	},
	"qwen3_moe": {
		Architecture: "qwen3_moe", VocabSize: 7, HiddenSize: 6, IntermediateSize: 10, NumHiddenLayers: 2,
		NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 4, RopeTheta: 30, RMSNormEps: 1e-5,
		NumExperts: 5, NumExpertsPerTok: 2, MoEIntermediateSize: 3, MLPOnlyLayers: []int{1},
	},
	"gpt_oss": {
		Architecture: "gpt_oss", VocabSize: 7, HiddenSize: 6, IntermediateSize: 5, NumHiddenLayers: 2,
		NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 4, RopeTheta: 30, RMSNormEps: 1e-5,
		NumExperts: 5, NumExpertsPerTok: 2, AttentionBias: true,
		SlidingWindow: 3, LayerTypes: []string{"sliding_attention", "full_attention"},
	},
	"mixtral": {
		Architecture: "mixtral", VocabSize: 7, HiddenSize: 6, IntermediateSize: 5, NumHiddenLayers: 2,
		NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 4, RopeTheta: 30, RMSNormEps: 1e-5,
		NumExperts: 3, NumExpertsPerTok: 2,
	},
	"glm4_moe": {
		Architecture: "glm4_moe", VocabSize: 7, HiddenSize: 6, IntermediateSize: 10, NumHiddenLayers: 2,
		NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 4, RopeTheta: 30, RMSNormEps: 1e-5, PartialRotaryFactor: 0.5,
		NumExperts: 8, NumExpertsPerTok: 3, MoEIntermediateSize: 3, FirstKDenseReplace: 1, NSharedExperts: 1,
		NormTopkProb: true, RoutedScalingFactor: 1.5, NGroup: 4, TopkGroup: 2, UseQKNorm: true, AttentionBias: true,
	},
	"qwen3_next": {
		Architecture: "qwen3_next", VocabSize: 7, HiddenSize: 6, IntermediateSize: 10, NumHiddenLayers: 2,
		NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 8, RopeTheta: 30, RMSNormEps: 1e-5, PartialRotaryFactor: 0.5,
		NumExperts: 5, NumExpertsPerTok: 2, MoEIntermediateSize: 3, SharedExpertIntermediateSize: 5, MLPOnlyLayers: []int{0},
		NormTopkProb: true, AttentionBias: true,
	},
}

// tinyCase returns one of tinyModels with random weights and two sequences, each of two documents, with some tokens
// without a target.
func tinyCase(name string, dtype tensor.DType) *testCase { return tinyCaseOf(tinyModels[name], dtype) }

func tinyCaseOf(cfg *hf.Config, dtype tensor.DType) *testCase {
	r := rand.New(rand.NewPCG(7, 9))
	const batch, seq = 2, 7
	ids, targets := make([]int32, batch*seq), make([]int32, batch*seq)
	for i := range ids {
		ids[i], targets[i] = int32(r.IntN(cfg.VocabSize)), int32(r.IntN(cfg.VocabSize))
	}
	targets[3], targets[11] = -1, -1
	c := newCase(cfg, randomWeights(cfg, dtype, r), batch, ids, targets, []int{0, 0, 0, 0, 1, 1, 1})
	if flat := c.params.Layout.Frozen; flat != nil {
		c.freeze(randomFlat(flat, dtype, rand.New(rand.NewPCG(3, 4))))
	}
	return c
}

// randomWeights returns weights that are large enough to make attention far from uniform.
func randomWeights(cfg *hf.Config, dtype tensor.DType, r *rand.Rand) View {
	return randomFlat(NewLayout(cfg, 1), dtype, r)
}

func randomFlat(layout *FlatLayout, dtype tensor.DType, r *rand.Rand) View {
	flat := tensor.New(dtype, int(layout.Size()))
	for _, p := range layout.Params {
		xs := make([]float64, p.Size())
		for i := range xs {
			xs[i] = r.NormFloat64() * 0.4
			if len(p.Shape) == 1 {
				xs[i] += 1
			}
		}
		put(p.View(flat), xs)
	}
	return flat
}
