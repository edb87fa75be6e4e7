package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// exportedConfig holds the config.json of an export.
func exportedConfig(t *testing.T, dir string) map[string]any {
	t.Helper()
	var c map[string]any
	decode(t, content(t, dir, "config.json"), &c)
	return c
}

// An export has the keys of the run's config, and the other files of the model in model.from.
func TestExportIsWholeForTransformers(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	hf, again := filepath.Join(root, "hf"), filepath.Join(root, "again")
	first, _ := trains(t, "--set", "data.eos_token_id=10",
		"--set", "model.rope_scaling={rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, "+
			"original_max_position_embeddings: 64}", small(t, 1))
	must(t, "export", first, "--to", hf)
	if c := exportedConfig(t, hf); c["eos_token_id"] != 10.0 || c["max_position_embeddings"] != 512.0 {
		t.Errorf("eos_token_id %v, max_position_embeddings %v; want 10, 512", c["eos_token_id"],
			c["max_position_embeddings"])
	}

	carried := []string{"tokenizer_config.json", "generation_config.json",
		"additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja"}
	for _, f := range carried {
		write(t, hf, f, `{"of": "`+f+`"}`)
	}
	second, _ := trains(t, "--set", "model.from="+hf, "--set", "data.tokenizer=auto", "--set", "data.eos_token_id=32",
		small(t, 1))
	said, _ := must(t, "export", second, "--to", again)
	for _, f := range carried {
		contains(t, f, content(t, again, f), f)
		contains(t, "export", said, f)
	}
	c := exportedConfig(t, again)
	if fmt.Sprint(c["eos_token_id"]) != "[32 10]" || c["max_position_embeddings"] != 512.0 {
		t.Errorf("eos_token_id %v, max_position_embeddings %v; want the run's and the model's, and 512", c["eos_token_id"],
			c["max_position_embeddings"])
	}
	contains(t, "tokenizer.json", content(t, again, "tokenizer.json"), "ByteLevel")

	if err := os.RemoveAll(hf); err != nil {
		t.Fatal(err)
	}
	said, _ = must(t, "export", second, "--to", filepath.Join(root, "third"))
	contains(t, "without the directory", said, "tokenizer", hf)
}

// export takes the checkpoint of a step, and by default the element type of the model in model.from.
func TestExportOfAStepInTheModelsType(t *testing.T) {
	t.Parallel()
	config, dir := trained(t)
	root := t.TempDir()
	hf, none := filepath.Join(root, "hf"), filepath.Join(root, "none")
	out, _ := must(t, "export", dir, "--step", "2", "--to", hf, "--dtype", "bf16")
	contains(t, "export", out, "of step 2,", "in BF16")
	for want, args := range map[string][]string{
		"no checkpoint of step 3; there are those of 2, 4": {"export", dir, "--step", "3", "--to", none},
		"name a run":  {"export", none, "--to", none},
		"auto, never": {"--run-dir", filepath.Join(root, "third"), "--resume", none, config},
	} {
		invalid(t, args, want)
	}
	second, _ := trains(t, "--set", "model.from="+hf, "--set", "data.tokenizer=bytes", config)
	for flag, want := range map[string]string{"auto": "bfloat16", "fp32": "float32"} {
		to := filepath.Join(root, flag)
		must(t, "export", second, "--to", to, "--dtype", flag)
		if c := exportedConfig(t, to); c["torch_dtype"] != want {
			t.Errorf("--dtype %s of a model in bfloat16 is %v", flag, c["torch_dtype"])
		}
	}
}
