package train_test

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/hf"
)

// drift is a family for this test: it has new names, norms on the heads, and like Mistral a window on every layer
// unless config.json has null.
var drift = hf.Family{
	Name: "drift", Class: "DriftForCausalLM",
	Tensors: hf.Names{
		hf.Embedding: "wte", hf.Head: "out.weight", hf.Norm: "ln_f",
		hf.InputNorm: "ln_1", hf.PostNorm: "ln_2", hf.Query: "attn/q", hf.Key: "attn/k", hf.Value: "attn/v",
		hf.Output:    "attn/o",
		hf.QueryNorm: "attn/ln_q", hf.KeyNorm: "attn/ln_k", hf.Gate: "mlp/g", hf.Up: "mlp/u", hf.Down: "mlp/d",
	},
	Layer:    "h/%d/",
	Defaults: hf.Config{MaxPositionEmbedding: 4096, TieWordEmbeddings: true, SlidingWindow: 16},
	Windows:  hf.Windows{Use: new(true)},
	Ropes:    []string{"yarn"},
	Export:   map[string]any{"drifts": true},
}

func init() { hf.Register(drift) }

// A registered family that differs only in its description works everywhere: train.yaml names it, its weights load and
// train to the same bits as those of the family with the same computation, and its export loads again.
func TestAFamilyIsARegistration(t *testing.T) {
	shape := func(family string) *hf.Config {
		return &hf.Config{
			Architecture: family, VocabSize: 256, HiddenSize: 32, IntermediateSize: 48, NumHiddenLayers: 2,
			NumAttentionHeads: 4,
			NumKeyValueHeads:  2, HeadDim: 8, RopeTheta: 10000, RMSNormEps: 1e-6, InitializerRange: 0.02,
			MaxPositionEmbedding: 512, SlidingWindow: 16,
		}
	}
	export := func(c *hf.Config) string {
		dir, tensors := filepath.Join(t.TempDir(), c.Architecture), c.Tensors()
		_, err := hf.Export(dir, hf.Model{
			Config: c, DType: safetensors.F32, Tensors: tensors,
			Read: func(want hf.Tensor, off int64, dst []float32) error { // by position, since names differ between families
				i := slices.IndexFunc(tensors, func(t hf.Tensor) bool { return t.Name == want.Name })
				model.Param{Tensor: hf.Tensor{Name: fmt.Sprint(i)}, Std: 0.02}.Init(dst, off, 1)
				return nil
			},
		}, hf.ShardLimit)
		if err != nil {
			t.Fatal(err)
		}
		return dir
	}
	curveOf := func(family string) (string, *config.Config) {
		yaml := fmt.Sprintf(`
model: {from: %s}
data: {path: %s, tokenizer: bytes, seq_len: 64}
train: {steps: 3, global_batch_size: 2}
log: {tensorboard: false}
`, export(shape(family)), textFile(t))
		const shard = "memory.shard=gradients"
		return losses(curve(t, yaml, 2, shard)), load(t, yaml, 2, shard)
	}
	want, _ := curveOf(hf.Qwen3)
	got, cfg := curveOf(drift.Name)
	if got != want {
		t.Errorf("losses\n%s\nwant those of the same weights as qwen3\n%s", got, want)
	}
	curve(t, tiny, 1, "train.steps=1", "model.architecture=drift") // random weights
	if c := cfg.Model; c.Architecture != drift.Name || c.Layer(1).Mixer.Window != 15 {
		t.Errorf("read as %+v", c.Config)
	}
	text, err := os.ReadFile(filepath.Join(cfg.Model.From, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{`"DriftForCausalLM"`, `"model_type": "drift"`, `"drifts": true`} {
		if !strings.Contains(string(text), line) {
			t.Errorf("no %s in the export:\n%s", line, text)
		}
	}
}

// Missing keys of config.json take the family's values, and keys that the family does not have are refused.
func TestAFamilyHasItsDefaultsAndBounds(t *testing.T) {
	read := func(more string) (*hf.Config, error) {
		dir := t.TempDir()
		text := `{"model_type":"drift","vocab_size":64,"hidden_size":32,"intermediate_size":48,"num_hidden_layers":3,"num_attention_heads":4` + more + `}`
		if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return hf.ReadConfig(dir)
	}
	c, err := read("")
	if err != nil {
		t.Fatal(err)
	}
	if !c.TieWordEmbeddings || c.SlidingWindow != 16 || c.Layer(2).Mixer.Window != 15 || c.MaxPositionEmbedding != 4096 ||
		c.HeadDim != 8 || c.NumKeyValueHeads != 4 {
		t.Errorf("defaults are %+v", c)
	}
	c, err = read(`,"sliding_window":null`)
	if err != nil || c.SlidingWindow != 0 {
		t.Fatalf("a null window is %+v, %v", c, err)
	}
	out := t.TempDir()
	root, err := os.OpenRoot(out)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if err := hf.WriteConfig(root, c, safetensors.F32); err != nil {
		t.Fatal(err)
	}
	if again, err := hf.ReadConfig(out); err != nil || again.SlidingWindow != 0 {
		t.Errorf("no window, written and read: %+v, %v", again, err)
	}
	if _, err := read(`,"rope_scaling":{"rope_type":"linear","factor":2}`); err == nil ||
		!strings.Contains(err.Error(), `"linear" is not supported; cprun has default and yarn`) {
		t.Errorf("linear scaling of a family that has yarn alone: %v", err)
	}
	names := map[string]bool{}
	for _, p := range model.Layout(c) {
		names[p.Name] = true
	}
	if !names["h/2/attn/ln_k"] || names["out.weight"] || len(names) != 2+3*11 {
		t.Errorf("tensors are %v", slices.Sorted(maps.Keys(names)))
	}
}
