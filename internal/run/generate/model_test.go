package generate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A whole computes attention over a whole sequence, by its definition.
type whole struct {
	cfg    *hf.Config
	kernel *attention.Reference[float64]
	*states
	delta *cpu.Kernels
}

// Halo sets rows before the text.
func (w whole) Halo(_ int, before, _ View) error {
	w.delta.Zero(before)
	return nil
}

// Recur begins with no state.
func (w whole) Recur(_ int, a delta.Args, beside func()) error {
	w.delta.Zero(a.State)
	a.Entered = []int{0}
	beside()
	return w.delta.Delta().Forward(a)
}

func (w whole) Forward(layer int, out attention.Partial, q, k, v View) error {
	band := partition.Causal()
	if n := w.cfg.Layer(layer).Mixer.Window; n >= 0 {
		band.Lo = -n
	}
	r := partition.Range{Hi: q.Len(tensor.Seq)}
	pass, err := w.kernel.Forward(out.O, out, q, model.Softmax(w.cfg))
	if err != nil {
		return err
	}
	if err := pass.Block(attention.Block{K: k, V: v, Tiles: []partition.Tile{{Q: r, K: r, Band: band}}, First: true,
		Last: true}); err != nil {
		return err
	}
	return pass.End()
}

func (whole) Backward(int, attention.Grads, View, View, View, View, attention.Partial) error {
	panic("no backward pass")
}

// A recorder keeps the logits of a loss.
type recorder struct {
	*cpu.Kernels
	logits *[][]float32
}

func (r recorder) CrossEntropy(loss, logits, targets View, scale, softcap float64, grad bool) {
	r.Stream().Do("record", func() error {
		data, n := tensor.Data[float32](logits), logits.Cols()
		for lo := 0; lo < len(data); lo += n {
			*r.logits = append(*r.logits, slices.Clone(data[lo:lo+n]))
		}
		return nil
	})
}

// trained returns the logits at each token of a sequence, from the forward pass of training.
func trained(t *testing.T, cfg *hf.Config, weights *model.Params, ids []int32) (logits [][]float32) {
	t.Helper()
	stream := tensor.NewHostStream("oracle")
	defer stream.Close()
	n := len(ids)
	b := model.Batch{
		IDs: tensor.FromSlice(ids, 1, n, 1, 1), Targets: tensor.New(tensor.I32, 1, n, 1, 1),
		Cos: tensor.New(tensor.F32, 1, n, 1, cfg.AllPairs()),
		Sin: tensor.New(tensor.F32, 1, n, 1, cfg.AllPairs()),
	}
	positions := make([]int, n)
	for i := range positions {
		positions[i] = i
	}
	model.NewRope(cfg).Fill(b.Cos, b.Sin, positions, slices.Repeat([]int{n}, n))
	ops := recorder{cpu.New(stream), &logits}
	att := whole{cfg, attention.NewReference[float64](stream.Do), &states{rows: n}, ops.Kernels}
	m := model.New(cfg, ops, att, *weights, model.Options{})
	if err := m.Forward(tensor.NewHostArena(0), b, tensor.New(tensor.F64, 1)); err != nil {
		t.Fatal(err)
	}
	if err := stream.Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
	return logits
}

// randomModel returns the shape of a small model with random options.
func randomModel(r *rand.Rand) *hf.Config {
	kv := 1 + r.IntN(3)
	families := hf.Families()
	c := &hf.Config{
		Architecture: families[r.IntN(len(families))], VocabSize: 11 + r.IntN(30), HiddenSize: 8 +
			2*r.IntN(10), IntermediateSize: 8 + r.IntN(30),
		NumHiddenLayers: 1 + r.IntN(3), NumKeyValueHeads: kv, NumAttentionHeads: kv * (1 + r.IntN(3)), HeadDim: 4 +
			2*r.IntN(7),
		RopeTheta: 100, RMSNormEps: 1e-5, TieWordEmbeddings: r.IntN(2) == 0,
	}
	if strings.HasPrefix(c.Architecture, "gemma") {
		c.QueryPreAttnScalar, c.FinalLogitSoftcapping = 3, 4
		if c.Architecture == hf.Gemma2 {
			c.AttnLogitSoftcapping = 2
		}
	}
	switch r.IntN(4) {
	case 0:
		c.RopeScaling = &hf.RopeScaling{Type: "yarn", Factor: 4, OriginalMax: 32}
	case 1:
		c.RopeScaling = &hf.RopeScaling{Type: "llama3", Factor: 8, LowFreqFactor: 1, HighFreqFactor: 4, OriginalMax: 32}
	case 2:
		c.RopeScaling = &hf.RopeScaling{Type: "linear", Factor: 2}
	}
	if r.IntN(2) == 0 {
		c.SlidingWindow = 1 + r.IntN(20)
		if r.IntN(2) == 0 {
			for range c.NumHiddenLayers {
				c.LayerTypes = append(c.LayerTypes, []string{hf.FullAttention, hf.SlidingAttention}[r.IntN(2)])
			}
		}
	}
	chooseOfFamily(c, r)
	return c
}

// chooseOfFamily sets random options that few families have.
func chooseOfFamily(c *hf.Config, r *rand.Rand) {
	f := c.Family()
	c.AttentionBias = f.Tensors[hf.Query.Bias()] != "" && r.IntN(2) == 0
	c.MLPBias = f.Tensors[hf.Gate.Bias()] != "" && r.IntN(2) == 0
	if f.NoRope > 0 {
		c.NoRopeLayers = hf.NoRopeLayers(c.NumHiddenLayers, 1+r.IntN(3))
	}
	if f.Partial && r.IntN(2) == 0 {
		c.HeadDim, c.PartialRotaryFactor = 12, 0.5
	}
	if f.Experts != nil {
		c.NumExperts, c.NumExpertsPerTok, c.MoEIntermediateSize = 4+r.IntN(5), 1+r.IntN(3), 5+r.IntN(9)
	}
	if f.Interval > 0 {
		c.LayerTypes = append(c.LayerTypes[:0], hf.FullAttention)
		for len(c.LayerTypes) < c.NumHiddenLayers {
			c.LayerTypes = append(c.LayerTypes, []string{hf.FullAttention, hf.LinearAttention}[r.IntN(2)])
		}
		keys := 1 + r.IntN(2)
		c.LinearConvKernelDim, c.LinearNumKeyHeads, c.LinearNumValueHeads = 2+r.IntN(4), keys, keys*(1+r.IntN(3))
		c.LinearKeyHeadDim, c.LinearValueHeadDim = 8+r.IntN(9), 4+r.IntN(9)
		c.RMSNormEps = 1e-2 // a result of the rule may be nearly 0
	}
	switch f.Name {
	case "glm4_moe":
		c.FirstKDenseReplace, c.NSharedExperts, c.UseQKNorm = r.IntN(2), 1, r.IntN(2) == 0
	case "qwen3_5_moe_text", "qwen3_next":
		c.SharedExpertIntermediateSize = 3 + r.IntN(9)
	case "granite":
		c.AttentionMultiplier, c.EmbeddingMultiplier, c.ResidualMultiplier, c.LogitsScaling = 0.2, 3, 0.7, 2
	case "ministral3":
		c.RopeScaling = &hf.RopeScaling{Type: "yarn", Factor: 4, OriginalMax: 8, QueryBeta: 0.5}
	}
	if pairs := c.RotaryDim() / 2; f.Partial && r.IntN(2) == 0 {
		c.RopeScaling = &hf.RopeScaling{Type: "longrope", Factor: 4, OriginalMax: 16,
			ShortFactor: slices.Repeat([]float64{1.5}, pairs), LongFactor: slices.Repeat([]float64{4}, pairs)}
	}
}

// randomWeights returns weights large enough that attention is far from uniform.
func randomWeights(cfg *hf.Config, r *rand.Rand) (all *model.Params) {
	for to, l := &all, model.NewLayout(cfg, 1); l != nil; to, l = &(*to).Frozen, l.Frozen {
		flat := tensor.New(tensor.F32, int(l.Size()))
		*to = &model.Params{Layout: l, Weights: flat, Compute: flat}
		for _, p := range l.Params {
			for i, xs := 0, tensor.Data[float32](p.View(flat)); i < len(xs); i++ {
				if xs[i] = float32(r.NormFloat64() * 0.3); len(p.Shape) == 1 {
					xs[i]++
				}
			}
		}
	}
	return all
}

// reading returns a function that reads a parameter.
func reading(weights *model.Params) func(p model.Param, dst []float32) error {
	return func(p model.Param, dst []float32) error {
		for ps := weights; ps != nil; ps = ps.Frozen {
			if slices.ContainsFunc(ps.Layout.Params, func(q model.Param) bool { return q.Name == p.Name }) {
				copy(dst, tensor.Data[float32](p.View(ps.Weights)))
			}
		}
		return nil
	}
}

// loaded returns a model with weights of a flat buffer, and room for n tokens.
func loaded(t *testing.T, cfg *hf.Config, weights *model.Params, n int) *Model {
	t.Helper()
	dev, end := host()
	m, err := New(t.Context(), cfg, dev, n, reading(weights))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := end(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// host returns the CPU device, and a function that closes it.
func host() (*device.Device, func() error) {
	stream := tensor.NewHostStream("compute")
	dev := device.CPU(stream, "flash", tensor.F32)
	return &dev, func() error { return errors.Join(dev.Close(), stream.Close()) }
}

// For any division of a sequence into a prompt and further tokens, the logits equal those of the training pass over the
// whole sequence, also after another text.
func TestReadingOnIsReadingTheWhole(t *testing.T) {
	recurrent := 0
	for seed := range uint64(120) {
		r := rand.New(rand.NewPCG(seed, 1))
		cfg := randomModel(r)
		if slices.Contains(cfg.LayerTypes, hf.LinearAttention) {
			recurrent++
		}
		n := 2 + r.IntN(60)
		if seed%8 == 0 {
			n += pieceRows // a prompt of several pieces
		}
		name := fmt.Sprintf("seed %d: %s, %d tokens", seed, cfg.Architecture, n)
		weights, ids := randomWeights(cfg, r), make([]int32, n)
		for i := range ids {
			ids[i] = int32(r.IntN(cfg.VocabSize))
		}
		want, m := trained(t, cfg, weights, ids), loaded(t, cfg, weights, n)
		if _, err := m.Read(t.Context(), ids[n/2:]); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		m.Reset()
		first := 1 + r.IntN(n)
		if s := cfg.RopeScaling; s != nil && s.Type == "longrope" {
			first = n // as in transformers, the length of the prompt selects the factors
		}
		for lo, size := 0, first; lo < n; lo, size = lo+size, 1+r.IntN(3)*r.IntN(3) {
			size = min(size, n-lo)
			got, err := m.Read(t.Context(), ids[lo:lo+size])
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			d, err := near.Of(got, want[lo+size-1], near.Finite)
			if err != nil || !(d.Abs <= 2e-5*max(1, d.Largest)) {
				t.Fatalf("%s: the logits after %d tokens are not those of the whole: %+v, %v", name, lo+size, d, err)
			}
		}
	}
	if recurrent < 3 {
		t.Errorf("%d models with a recurrence", recurrent)
	}
}

func TestThereIsNoRoomBehindTheEnd(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	cfg := randomModel(r)
	dev, end := host()
	m, err := New(t.Context(), cfg, dev, 4, func(model.Param, []float32) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Read(t.Context(), []int32{1, 2, 3, 4, 5}); err == nil {
		t.Error("5 tokens were read with room for 4")
	}
	if _, err := m.Read(t.Context(), nil); err == nil {
		t.Error("nothing was read, and it has logits")
	}
	if _, err := m.Read(t.Context(), []int32{int32(cfg.VocabSize)}); err == nil {
		t.Error("a token outside of the vocabulary was read")
	}
	if err := end(); err == nil {
		t.Error("what went wrong is forgotten at the end")
	}
}

// fixture returns a model of scripts/oracle/parity.py with a changed config.
func fixture(t *testing.T, name string, room int, change func(*hf.Config)) *Model {
	t.Helper()
	dir := filepath.Join("..", "..", "model", "testdata", "parity", name)
	cfg, err := hf.ReadConfig(dir)
	if err != nil {
		t.Fatal(err)
	}
	change(cfg)
	file, err := safetensors.Open(filepath.Join(dir, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	weights := &model.Params{Layout: model.NewLayout(cfg, 1)}
	weights.Weights = tensor.New(tensor.F32, int(weights.Layout.Size()))
	for _, p := range weights.Layout.Params {
		if err := file.ReadFloat32(p.Name, tensor.Data[float32](p.View(weights.Weights)), 0); err != nil {
			t.Fatal(err)
		}
	}
	return loaded(t, cfg, weights, room)
}

// scripts/oracle/generate.py wrote greedy.json.
func TestGreedyTextIsThatOfTransformers(t *testing.T) {
	raw, err := os.ReadFile("testdata/greedy.json")
	if err != nil {
		t.Fatal(err)
	}
	var oracle struct {
		Cases []struct {
			Model  string
			Change struct {
				SlidingWindow int      `json:"sliding_window"`
				LayerTypes    []string `json:"layer_types"`
			}
			Prompt, Tokens []int32
		}
	}
	if err := json.Unmarshal(raw, &oracle); err != nil || len(oracle.Cases) == 0 {
		t.Fatalf("%d cases: %v", len(oracle.Cases), err)
	}
	for _, c := range oracle.Cases {
		t.Run(fmt.Sprintf("%s window %d prompt %d", c.Model, c.Change.SlidingWindow, len(c.Prompt)),
			func(t *testing.T) {
				m := fixture(t, c.Model, len(c.Prompt)+len(c.Tokens), func(cfg *hf.Config) {
					if w := c.Change.SlidingWindow; w > 0 {
						cfg.SlidingWindow, cfg.LayerTypes = w, c.Change.LayerTypes
					}
				})
				got := written(t, m, Request{Prompt: c.Prompt, MaxTokens: len(c.Tokens), Sampling: Sampling{TopP: 1}},
					EndTokens)
				if !slices.Equal(got, c.Tokens) {
					t.Errorf("it writes\n%v, transformers\n%v", got, c.Tokens)
				}
			})
	}
}

// written returns the tokens of a text, and checks its end.
func written(t *testing.T, m *Model, r Request, end End) (ids []int32) {
	t.Helper()
	rep, err := m.Write(t.Context(), r, func(id int32) error { ids = append(ids, id); return nil })
	if err != nil || rep.End != end || rep.Tokens != len(ids) {
		t.Fatalf("%d tokens: %+v, %v; want it to end with %q", len(ids), rep, err, end)
	}
	return ids
}
