package hf

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/cprun/cprun/internal/base/safetensors"
)

// The export of a family has the keys, names, shapes and bytes of the files that transformers wrote.
func TestFamiliesAreExportedAsTheyWereRead(t *testing.T) {
	for _, name := range []string{"gemma4_text", "gemma4_text-dense", "gemma4_unified_text", "glm4_moe", "gpt_oss", "granite", "llama-bias", "ministral3", "mistral", "mixtral", "olmo2", "olmo3",
		"phi3", "qwen2", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed-oss", "smollm3"} {
		dir, out := filepath.Join("../testdata/families", name), filepath.Join(t.TempDir(), name)
		c, err := ReadConfig(dir)
		if err != nil {
			t.Fatal(err)
		}
		w := weightsIn(t, dir)
		if err := w.Check(c.Tensors()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		_, err = Export(out, Model{Config: c, DType: safetensors.BF16, Tensors: c.Tensors(),
			Read: func(t Tensor, off int64, dst []float32) error { return w.Read(t, dst, off) }}, ShardLimit)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := ReadConfig(out); err != nil || !reflect.DeepEqual(again, c) {
			t.Errorf("%s written and read: %v\n%+v\nwant\n%+v", name, err, again, c)
		}
		sameKeys(t, dir, out)
		sameTensors(t, dir, out)
	}
}

// transformers 4 accepts three keys in phi3's rope_scaling. A factor that does not follow from the lengths needs more.
func TestLongropeIsWrittenForBothVersions(t *testing.T) {
	c, err := ReadConfig("../testdata/families/phi3")
	if err != nil {
		t.Fatal(err)
	}
	for factor, keys := range map[float64]int{4: 3, 5: 5} {
		c.RopeScaling.Factor = factor
		m := map[string]any{}
		writeRope(m, c)
		if old := m["rope_scaling"].(map[string]any); len(old) != keys {
			t.Errorf("factor %v: rope_scaling is %v", factor, old)
		}
	}
}

// transformers reads no null as a multiplier of granite.
func TestAbsentMultipliersAreWrittenAsOnes(t *testing.T) {
	c := base()
	c.Architecture = "granite"
	m, err := c.keys("", safetensors.F32)
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]float64{"attention_multiplier": c.SoftmaxScale(), "embedding_multiplier": 1,
		"residual_multiplier": 1, "logits_scaling": 1} {
		text, _ := json.Marshal(m[key])
		if got := 0.0; json.Unmarshal(text, &got) != nil || got != want {
			t.Errorf("%s is %s, want %v", key, text, want)
		}
	}
}

// unwritten lists keys that do not describe the model, or follow from others.
var unwritten = map[string]bool{"use_cache": true, "transformers_version": true, "no_rope_layer_interval": true,
	"pretraining_tp": true, "text_config": true, "num_nextn_predict_layers": true,
	"vocab_size_per_layer_input": true, "use_bidirectional_attention": true}

func sameKeys(t *testing.T, dir, out string) {
	t.Helper()
	var keys [2]map[string]any
	for i, d := range []string{dir, out} {
		text, err := os.ReadFile(filepath.Join(d, "config.json"))
		if err == nil {
			err = json.Unmarshal(text, &keys[i])
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for key, want := range keys[0] {
		if got := keys[1][key]; !unwritten[key] && !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %s is %v, exported %v", dir, key, want, got)
		}
	}
}

func sameTensors(t *testing.T, dir, out string) {
	t.Helper()
	type stored struct {
		dtype  safetensors.DType
		shape  []int
		values []float32
	}
	all := [2]map[string]stored{{}, {}}
	for i, d := range []string{dir, out} {
		f, err := safetensors.Open(filepath.Join(d, singleFile))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for _, name := range f.Names() {
			info, _ := f.Info(name)
			values := make([]float32, info.Elements())
			if err := f.ReadFloat32(name, values, 0); err != nil {
				t.Fatal(err)
			}
			all[i][name] = stored{info.DType, info.Shape, values}
		}
	}
	if !reflect.DeepEqual(all[0], all[1]) {
		t.Errorf("%s: the tensors of the export differ", dir)
	}
}
