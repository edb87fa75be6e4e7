package hf

import (
	"encoding/json"
	"io"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/safetensors"
)

// whole writes a larger model around a fixture, with tensors of images and of further tokens, and returns its
// directory.
func whole(t *testing.T, fixture string, outer map[string]any, rename func(string) string) string {
	t.Helper()
	dir, to := "../testdata/families/"+fixture, t.TempDir()
	f, err := safetensors.Open(filepath.Join(dir, singleFile))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	entries := []safetensors.Entry{
		safetensors.Floats("mtp.fc.weight", safetensors.F16, []int{2, 3}, []float32{1, 2, 3, 4, 5, 6}),
		{Name: "model.visual.steps", DType: "U8", Shape: []int{5}, Data: func(w io.Writer) error {
			_, err := w.Write([]byte{9, 8, 7, 255, 0})
			return err
		}},
	}
	for _, name := range f.Names() {
		i, _ := f.Info(name)
		entries = append(entries, filed{Tensor: Tensor{Name: name}, from: f}.copied())
		entries[len(entries)-1].Name = rename(name)
		if i.DType != safetensors.BF16 {
			t.Fatalf("%s is %s", name, i.DType)
		}
	}
	if err := safetensors.WriteFile(filepath.Join(to, singleFile), map[string]string{"format": "pt"}, entries); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	if outer != nil {
		outer["text_config"] = json.RawMessage(raw)
		if raw, err = json.Marshal(outer); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(to, "config.json"), raw, 0o600); err != nil {
		t.Fatal(err)
	}
	return to
}

// An export has the names and keys of a larger model, the trained values of its language model, and the other tensors as
// they were. A number of files has the same tensors.
func TestExportOfALargerModel(t *testing.T) {
	inner := func(name string) string { return strings.Replace(name, "model.", "model.language_model.", 1) }
	same := func(name string) string { return name }
	for _, c := range []struct {
		fixture string
		outer   map[string]any
		rename  func(string) string
	}{
		{"qwen3_5_text", map[string]any{"model_type": "qwen3_5", "architectures": []string{"Qwen3_5ForConditionalGeneration"},
			"tie_word_embeddings": false, "eos_token_id": 7, "vision_config": json.RawMessage(`{"depth":3,"scale":1.0}`)}, inner},
		{"qwen3_5_moe_text", map[string]any{"model_type": "qwen3_5_moe", "image_token_id": 5}, inner},
		{"gemma4_text", map[string]any{"model_type": "gemma4", "tie_word_embeddings": true}, inner},
		{"gemma4_unified_text", map[string]any{"model_type": "gemma4_unified"}, inner},
		{"qwen3_5_text", nil, inner}, // as transformers saves the text alone
		{"qwen3_next", nil, same},
	} {
		dir := whole(t, c.fixture, maps.Clone(c.outer), c.rename)
		cfg, err := ReadConfig(dir)
		if err != nil {
			t.Fatal(err)
		}
		w := weightsIn(t, dir)
		if err := w.Check(cfg.Tensors()); err != nil {
			t.Fatal(err)
		}
		for _, limit := range []int64{ShardLimit, 20_000} {
			out := filepath.Join(t.TempDir(), "out")
			copied, err := Export(out, Model{Config: cfg, DType: safetensors.BF16, Tensors: cfg.Tensors(), From: dir,
				EOS: -1, Read: func(t Tensor, off int64, dst []float32) error { return w.Read(t, dst, off) }}, limit)
			if err != nil || !slices.Equal(copied, []string{"model.visual.steps", "mtp.fc.weight"}) {
				t.Fatalf("%s: copied %v, %v", c.fixture, copied, err)
			}
			if limit == ShardLimit {
				sameKeys(t, dir, out)
				sameTensorBytes(t, dir, out)
			}
			if again, err := ReadConfig(out); err != nil || !reflect.DeepEqual(again, cfg) {
				t.Errorf("%s: %+v, %v, want %+v", c.fixture, again, err, cfg)
			}
			if err := weightsIn(t, out).Check(cfg.Tensors()); err != nil {
				t.Error(err)
			}
		}
	}
}

func sameTensorBytes(t *testing.T, dir, out string) {
	t.Helper()
	var all [2]map[string]string
	for i, d := range []string{dir, out} {
		f, err := safetensors.Open(filepath.Join(d, singleFile))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		all[i] = map[string]string{}
		for _, name := range f.Names() {
			info, _ := f.Info(name)
			b := make([]byte, info.Bytes())
			if err := f.ReadBytes(name, b, 0); err != nil {
				t.Fatal(err)
			}
			all[i][name] = string(info.DType) + string(b)
		}
	}
	if !maps.Equal(all[0], all[1]) {
		t.Errorf("%s: tensors %v, want %v", out, slices.Sorted(maps.Keys(all[1])), slices.Sorted(maps.Keys(all[0])))
	}
}

// Keys of the run are in text_config of the export, and keys of the outer file in both.
func TestKeysOfALargerModelFollowTheRun(t *testing.T) {
	dir := whole(t, "qwen3_5_text", map[string]any{"model_type": "qwen3_5", "eos_token_id": 7, "torch_dtype": "bfloat16"},
		func(name string) string { return name })
	cfg, err := ReadConfig(dir)
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxPositionEmbedding, cfg.TokenIDs["eos_token_id"] = 999, json.RawMessage("[8,7]")
	out := filepath.Join(t.TempDir(), "out")
	if _, err := Export(out, Model{Config: cfg, DType: safetensors.F32, Tensors: cfg.Tensors(), From: dir, EOS: -1,
		Read: fill}, ShardLimit); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(filepath.Join(out, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	type config struct {
		EOS     []int  `json:"eos_token_id"`
		DType   string `json:"torch_dtype"`
		Max     int    `json:"max_position_embeddings"`
		Version string `json:"transformers_version"` // which cprun does not write
	}
	var got struct {
		config
		Text config `json:"text_config"`
	}
	want := config{[]int{8, 7}, "float32", 999, "5.24.0"}
	if err := json.Unmarshal(raw, &got); err != nil || !reflect.DeepEqual(got.Text, want) {
		t.Errorf("text %+v, %v, want %+v", got.Text, err, want)
	}
	if want.Max, want.Version = 0, ""; !reflect.DeepEqual(got.config, want) {
		t.Errorf("outside %+v, want %+v", got.config, want)
	}
}
