package model

import (
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// fixtures lists the directories with models of transformers, from testdata/parity.
var fixtures = []string{"tiny-llama", "tiny-llama-tied-clip", "tiny-llama3-gqa", "tiny-qwen3-yarn",
	"../families/gemma2", "../families/gemma3", "../families/gemma4_text", "../families/gemma4_text-dense",
	"../families/gemma4_unified_text", "../families/granite", "../families/llama-bias", "../families/mistral", "../families/phi3",
	"../families/ministral3", "../families/olmo2", "../families/olmo3", "../families/qwen2", "../families/seed-oss",
	"../families/smollm3", "../families/qwen3_moe", "../families/mixtral", "../families/glm4_moe", "../families/gpt_oss",
	"../families/qwen3_5_text", "../families/qwen3_5_moe_text", "../families/qwen3_next",
	"../families/qwen3_5_text-linear", "../families/qwen3_5_moe_text-linear", "../families/qwen3_next-linear"}

// A fixture is a directory written by scripts/oracle/parity.py or families.py.
type fixture struct {
	cfg    *hf.Config
	tokens []int
	file   *hf.Weights
	expect struct {
		Seq      int
		Loss     []float64
		GradNorm []float64 `json:"grad_norm"`
		GradClip float64   `json:"grad_clip"`
		First    struct {
			LogitsRow0 []float64          `json:"logits_row0"`
			LogitsLast []float64          `json:"logits_last"`
			GradNorms  map[string]float64 `json:"grad_norms"`
		}
	}
}

func readJSON(t *testing.T, path string, into any) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

func loadFixture(t *testing.T, name string) *fixture {
	t.Helper()
	dir := filepath.Join("testdata", "parity", name)
	cfg, err := hf.ReadConfig(dir)
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{cfg: cfg}
	readJSON(t, filepath.Join(dir, "expect.json"), &f.expect)
	bin, err := os.ReadFile(filepath.Join(dir, "tokens.bin"))
	if err != nil {
		t.Fatal(err)
	}
	for b := bin[1024:]; len(b) > 0; b = b[2:] {
		f.tokens = append(f.tokens, int(binary.LittleEndian.Uint16(b)))
	}
	f.file, err = hf.OpenWeights(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.file.Close() })
	return f
}

// weights returns the weights of the fixture in a flat buffer of the type.
func (f *fixture) weights(t *testing.T, layout *FlatLayout, dtype tensor.DType) View {
	t.Helper()
	flat := tensor.New(dtype, int(layout.Size()))
	for _, p := range layout.Params {
		xs, wide := make([]float32, p.Size()), make([]float64, p.Size())
		if err := f.file.Read(p.Tensor, xs, 0); err != nil {
			t.Fatal(err)
		}
		for i, x := range xs {
			wide[i] = float64(x)
		}
		put(p.View(flat), wide)
	}
	return flat
}
