package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// learns fails unless the validation loss of a run fell.
func learns(t *testing.T, dir string) {
	t.Helper()
	var values []float64
	for _, m := range metricsOf(t, dir) {
		if v, ok := m["val_loss"]; ok {
			values = append(values, number(t, v))
		}
	}
	if len(values) < 2 || !(values[len(values)-1] < values[0]) {
		t.Errorf("%s: validation losses %v", dir, values)
	}
}

// few holds flags that make an example run in seconds.
var few = []string{"--nproc", "2", "--set", "train.steps=6", "--set", "data.validation.samples=2", "--set",
	"log.every=1"}

// The examples for one machine train in small form.
func TestExamplesLearn(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"opticks.yaml", "documents.yaml"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, _ := trains(t, append(few, filepath.Join("../../examples", name))...)
			learns(t, dir)
		})
	}
}

// The recipes for long contexts fit their GPUs, by a plan without weights. In small form they train on traces.
func TestExamplesOfLongContexts(t *testing.T) {
	t.Parallel()
	// The file is of scripts/traces traces.parquet 24 1K.
	small := []string{"--nproc", "2", "--set", "data.path=" + absolute(t, "cmd/cprun/testdata/traces.parquet"), "--set",
		"data.seq_len=1K", "--set", "train.steps=3", "--set", "log.every=1"}
	for _, c := range []struct{ name, hub, config, gpus, small string }{
		{"llama-3.1-8b-lora-256k", "meta-llama/Llama-3.1-8B-Instruct", llama8B, "1", "parity/tiny-llama3-gqa"},
		{"llama-3.1-8b-512k", "meta-llama/Llama-3.1-8B-Instruct", llama8B, "2", "parity/tiny-llama3-gqa"},
		{"qwen3-30b-a3b-lora-64k", "Qwen/Qwen3-30B-A3B-Instruct-2507", qwen30B, "1", "families/qwen3_moe"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			file, hub := "../../examples/long/"+c.name+".yaml", t.TempDir()
			tidy(t, content(t, file))
			repo := filepath.Join(hub, "models--"+strings.ReplaceAll(c.hub, "/", "--"))
			write(t, repo, "refs/main", "0123456789abcdef")
			write(t, repo, "snapshots/0123456789abcdef/config.json", c.config)
			_, out, stderr := with(t, []string{"HF_HUB_CACHE=" + hub}, "plan", file, "--assume", "h200,ram=256G,gpus="+c.gpus)
			contains(t, "the plan", out, "traces.parquet", "\nfits: ", " of 256 GiB; about ")
			if stderr != "" {
				t.Errorf("stderr: %s", stderr)
			}
			dir, _ := trains(t, append(small, "--set", "model.from="+absolute(t, "internal/model/testdata/"+c.small), "--set",
				"model.resize_embeddings=256", file)...)
			if n := len(metricsOf(t, dir)); n != 3 {
				t.Errorf("%d steps", n)
			}
		})
	}
}

// The script of continued training at a longer context runs from a Hugging Face directory to another.
func TestExamplesContinueAtALongerContext(t *testing.T) {
	t.Parallel()
	for family, rope := range map[string]string{"llama": "llama3", "qwen3": "yarn"} {
		if testing.Short() && family == "llama" {
			continue
		}
		t.Run(family, func(t *testing.T) {
			t.Parallel()
			out := filepath.Join(t.TempDir(), "hf")
			c := process(t, append([]string{family}, few...)...)
			c.Env = append(c.Env, "CPRUN="+c.Path, "OUT="+out)
			c.Path = "../../examples/hf/run"
			text, err := c.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, text)
			}
			learns(t, filepath.Join(out, family+"-base-run"))
			learns(t, filepath.Join(out, family+"-longer"))
			if n := strings.Count(string(text), "  512 to 1023 "); n != 2 {
				t.Errorf("%d evaluations to 1,024 tokens\n%s", n, text)
			}
			var c2 struct {
				Type string `json:"model_type"`
				Max  int    `json:"max_position_embeddings"`
				Rope struct {
					Type   string  `json:"rope_type"`
					Factor float64 `json:"factor"`
				} `json:"rope_scaling"`
			}
			config := content(t, out, family+"-longer-hf", "config.json")
			if decode(t, config, &c2); c2.Type != family || c2.Max != 1024 || c2.Rope.Type != rope || c2.Rope.Factor != 4 {
				t.Errorf("%+v\n%s", c2, config)
			}
		})
	}
}

// examples/README.md lists every example, and only existing files.
func TestExamplesAreListed(t *testing.T) {
	t.Parallel()
	text := content(t, "../../examples/README.md")
	for _, m := range regexp.MustCompile(`\]\(([^)#:]+)\)`).FindAllStringSubmatch(text, -1) {
		if _, err := os.Stat(filepath.Join("../../examples", m[1])); err != nil {
			t.Errorf("it links to %s: %v", m[1], err)
		}
	}
	all, err := filepath.Glob("../../examples/*")
	if err != nil || len(all) == 0 {
		t.Fatal(all, err)
	}
	for _, path := range all {
		if name := filepath.Base(path); name != "README.md" && !strings.Contains(text, "]("+name) {
			t.Errorf("it does not name %s", name)
		}
	}
}
