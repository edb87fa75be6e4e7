package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// exportedConfig holds the config.json of an export.
func exportedConfig(t *testing.T, dir string) map[string]any {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	var c map[string]any
	if err := json.Unmarshal(text, &c); err != nil {
		t.Fatal(err)
	}
	return c
}

// An export has the keys of the run's config, and the other files of the model in model.from.
func TestExportIsWholeForTransformers(t *testing.T) {
	root := t.TempDir()
	first, hf := filepath.Join(root, "first"), filepath.Join(root, "hf")
	must(t, "--run-dir", first, "--set", "data.eos_token_id=10",
		"--set", "model.rope_scaling={rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, "+
			"original_max_position_embeddings: 64}", small(t, 1))
	must(t, "export", first, "--to", hf)
	if c := exportedConfig(t, hf); c["eos_token_id"] != 10.0 || c["max_position_embeddings"] != 512.0 {
		t.Errorf("eos_token_id %v, max_position_embeddings %v; want 10, 512", c["eos_token_id"],
			c["max_position_embeddings"])
	}

	if err := os.Mkdir(filepath.Join(hf, "additional_chat_templates"), 0o777); err != nil {
		t.Fatal(err)
	}
	carried := []string{"tokenizer_config.json", "generation_config.json",
		"additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja"}
	for _, f := range carried {
		if err := os.WriteFile(filepath.Join(hf, f), []byte(`{"of": "`+f+`"}`), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	second, again := filepath.Join(root, "second"), filepath.Join(root, "again")
	must(t, "--run-dir", second, "--set", "model.from="+hf, "--set", "data.tokenizer=auto", "--set",
		"data.eos_token_id=32", small(t, 1))
	said, _ := must(t, "export", second, "--to", again)
	for _, f := range carried {
		text, err := os.ReadFile(filepath.Join(again, f))
		if err != nil || !strings.Contains(string(text), f) || !strings.Contains(said, f) {
			t.Errorf("%s: %q, %v; it said\n%s", f, text, err, said)
		}
	}
	c := exportedConfig(t, again)
	if fmt.Sprint(c["eos_token_id"]) != "[32 10]" || c["max_position_embeddings"] != 512.0 {
		t.Errorf("eos_token_id %v, max_position_embeddings %v; want the run's and the model's, and 512", c["eos_token_id"],
			c["max_position_embeddings"])
	}
	if text, _ := os.ReadFile(filepath.Join(again, "tokenizer.json")); !strings.Contains(string(text), "ByteLevel") {
		t.Errorf("tokenizer.json is %.100q", text)
	}

	if err := os.RemoveAll(hf); err != nil {
		t.Fatal(err)
	}
	said, _ = must(t, "export", second, "--to", filepath.Join(root, "third"))
	if !strings.Contains(said, "tokenizer") || !strings.Contains(said, hf) {
		t.Errorf("the directory is gone, and it said\n%s", said)
	}
}

// export takes the checkpoint of a step, and by default the element type of the model in model.from.
func TestExportOfAStepInTheModelsType(t *testing.T) {
	config, dir := trained(t)
	root := t.TempDir()
	hf, second := filepath.Join(root, "hf"), filepath.Join(root, "second")
	if out, _ := must(t, "export", dir, "--step", "2", "--to", hf, "--dtype", "bf16"); !strings.Contains(out,
		"of step 2,") || !strings.Contains(out, "in BF16") {
		t.Errorf("it said %s", out)
	}
	code, _, stderr := cprun(t, "export", dir, "--step", "3", "--to", filepath.Join(root, "none"))
	if code != 2 || !strings.Contains(stderr, "no checkpoint of step 3; there are those of 2, 4") {
		t.Errorf("status %d: %s", code, stderr)
	}
	none := filepath.Join(root, "none")
	for want, args := range map[string][]string{"name a run": {"export", none, "--to", none},
		"auto, never": {"--run-dir", filepath.Join(root, "third"), "--resume", none, config}} {
		if code, _, stderr := cprun(t, args...); code != 2 || !strings.Contains(stderr, want) {
			t.Errorf("%q: status %d: %s", args, code, stderr)
		}
	}
	must(t, "--run-dir", second, "--set", "model.from="+hf, "--set", "data.tokenizer=bytes", config)
	for flag, want := range map[string]string{"auto": "bfloat16", "fp32": "float32"} {
		to := filepath.Join(root, flag)
		must(t, "export", second, "--to", to, "--dtype", flag)
		if c := exportedConfig(t, to); c["torch_dtype"] != want {
			t.Errorf("--dtype %s of a model in bfloat16 is %v", flag, c["torch_dtype"])
		}
	}
}
