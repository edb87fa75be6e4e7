package model

import (
	"math"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

func TestLayoutHasNoOverlapAndIsAligned(t *testing.T) {
	for name, cfg := range tinyModels {
		params, end := Layout(cfg), int64(0)
		names := map[string]bool{}
		for _, p := range params {
			if p.Offset%Align != 0 || p.Offset < end || p.Offset >= end+Align {
				t.Errorf("%s: %s at %d after %d", name, p.Name, p.Offset, end)
			}
			if names[p.Name] {
				t.Errorf("%s: %s twice", name, p.Name)
			}
			end, names[p.Name] = p.Offset+int64(p.Size()), true
		}
		if n := NewLayout(cfg, 1).Size(); n%Align != 0 || n < end || n >= end+Align {
			t.Errorf("%s: flat size %d for %d", name, n, end)
		}
		if names["lm_head.weight"] == cfg.TieWordEmbeddings {
			t.Errorf("%s: tied %t, lm_head %t", name, cfg.TieWordEmbeddings, names["lm_head.weight"])
		}
		if heads := cfg.Family().Tensors[hf.QueryNorm] != ""; names["model.layers.1.self_attn.q_norm.weight"] != heads {
			t.Errorf("%s: q_norm is there: %t", name, !heads)
		}
	}
}

// Gemma's factor of embeddings is rounded to the type of activations: 55.4256... is 55.5 in bfloat16.
func TestTheFactorOfEmbeddingsIsRounded(t *testing.T) {
	root := math.Sqrt(3072)
	for dtype, want := range map[tensor.DType]float64{
		tensor.BF16: 55.5, tensor.F16: 55.4375, tensor.F32: float64(float32(root)), tensor.F64: root,
	} {
		if got := rounded(root, dtype); got != want {
			t.Errorf("%v: %v, want %v", dtype, got, want)
		}
	}
}

// The parameters of a model have the names and shapes of its Hugging Face file.
func TestLayoutIsThatOfTheFile(t *testing.T) {
	for _, name := range fixtures {
		f := loadFixture(t, name)
		if err := f.file.Check(f.cfg.Tensors()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Frozen parameters count, as do adapters.
func TestParametersOfATunedModel(t *testing.T) {
	cfg := *tinyModels["llama tied"]
	whole := Parameters(&cfg)
	if want := Count(Layout(&cfg)); whole != want {
		t.Errorf("%d parameters, want %d", whole, want)
	}
	cfg.Tuning = hf.Tuning{Freeze: []string{"model.embed_tokens.*"}}
	if got := Parameters(&cfg); got != whole {
		t.Errorf("with a frozen embedding: %d parameters, want %d", got, whole)
	}
	cfg.Tuning = lora(0)
	if got, adapters := Parameters(&cfg), Count(Layout(&cfg)); got != whole+adapters || adapters == 0 {
		t.Errorf("with adapters of %d: %d parameters, want %d", adapters, got, whole+adapters)
	}
}

// A model reads its vectors from Vectors, if there is one, and its matrices from Compute.
func TestVectorsReplaceWeights(t *testing.T) {
	c := tinyCase("llama tied", tensor.F64)
	want, _ := c.validate(t)
	bucket := c.params.vectors()
	c.params.Vectors = tensor.New(tensor.F64, bucket.Size())
	put(c.params.Vectors, get(bucket))
	put(bucket, make([]float64, bucket.Size()))
	if got, _ := c.validate(t); got != want {
		t.Errorf("loss %v, want %v", got, want)
	}
}

func TestInitDependsOnSeedAndNameAlone(t *testing.T) {
	cfg := &hf.Config{Architecture: "qwen3", VocabSize: 50, HiddenSize: 64, IntermediateSize: 32, NumHiddenLayers: 2,
		NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 16, InitializerRange: 0.05}
	params := Layout(cfg)
	flat := tensor.New(tensor.F32, int(NewLayout(cfg, 1).Size()))
	for _, p := range params {
		p.Init(tensor.Data[float32](p.View(flat)), 0, 3)
	}

	more := *cfg
	more.NumHiddenLayers, more.VocabSize = 3, 60
	for _, p := range Layout(&more) {
		if p.Name != "model.layers.1.self_attn.k_proj.weight" {
			continue
		}
		alone, other := make([]float32, p.Size()), make([]float32, p.Size())
		p.Init(alone, 0, 3)
		p.Init(other, 0, 4)
		var within []float32
		for _, q := range params {
			if q.Name == p.Name {
				within = tensor.Data[float32](q.View(flat))
			}
		}
		if !slices.Equal(alone, within) {
			t.Error("a parameter's first values depend on the model around it")
		}
		if slices.Equal(alone, other) {
			t.Error("a parameter's first values do not depend on the seed")
		}
	}

	for i, p := range params {
		xs := get(p.View(flat))
		if len(p.Shape) == 1 {
			if slices.Min(xs) != 1 || slices.Max(xs) != 1 {
				t.Errorf("norm %s is not 1", p.Name)
			}
			continue
		}
		if i > 0 && xs[0] == get(params[0].View(flat))[0] {
			t.Errorf("%s begins like %s", p.Name, params[0].Name)
		}
		mean, n := 0.0, float64(len(xs))
		for _, x := range xs {
			mean += x / n
		}
		std := norm(xs) / math.Sqrt(n)
		near(t, "mean of "+p.Name, mean, 0, 5*0.05/math.Sqrt(n))
		near(t, "deviation of "+p.Name, std, 0.05, 5*0.05/math.Sqrt(2*n))
	}
	for _, p := range NewLayout(tinyModels["gemma4"], 1).Frozen.Params {
		if p.Role != hf.LayerScale || p.Mean != 1 || p.Std != 0 {
			t.Errorf("a frozen %+v", p)
		}
	}
	if def := Layout(&hf.Config{Architecture: hf.Llama, VocabSize: 1, HiddenSize: 1})[0].Std; def != 0.02 {
		t.Errorf("default deviation %v", def)
	}
}
