package main

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/safetensors"
)

// A fault of a model directory is reported once, with the path once in each line.
func TestModelsThatAreNone(t *testing.T) {
	t.Parallel()
	config := small(t, 2)
	hf := filepath.Join(t.TempDir(), "hf")
	dir, _ := trains(t, config)
	must(t, "export", dir, "--to", hf)
	weights := filepath.Join(hf, "model.safetensors")
	good := content(t, weights)
	trained := func(wantCode int, says ...string) {
		t.Helper()
		code, _, stderr := cprun(t, "--nproc", "2", "--run-dir", filepath.Join(t.TempDir(), "run"), "--set",
			"model={from: "+hf+"}", config)
		if code != wantCode {
			t.Errorf("exit status %d, want %d:\n%s", code, wantCode, stderr)
		}
		for _, w := range says {
			if strings.Count(stderr, w) != 1 {
				t.Errorf("%q is there %d times:\n%s", w, strings.Count(stderr, w), stderr)
			}
		}
	}
	write(t, hf, "model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 8\n")
	trained(2, "git lfs pull", weights)

	f, err := safetensors.Open(write(t, t.TempDir(), "good", good))
	if err != nil {
		t.Fatal(err)
	}
	var entries []safetensors.Entry
	for _, name := range f.Names() {
		info, _ := f.Info(name)
		values := make([]float32, info.Elements())
		if err := f.ReadFloat32(name, values, 0); err != nil {
			t.Fatal(err)
		}
		if name == "model.norm.weight" {
			values[3] = float32(math.NaN())
		}
		entries = append(entries, safetensors.Floats(name, safetensors.F32, info.Shape, values))
	}
	f.Close()
	if err := safetensors.WriteFile(weights, nil, entries); err != nil {
		t.Fatal(err)
	}
	trained(1, `tensor "model.norm.weight": element 3 is NaN`, weights, "failed on host")

	for _, name := range []string{"config.json", "model.safetensors"} {
		if err := os.Remove(filepath.Join(hf, name)); err != nil {
			t.Fatal(err)
		}
	}
	write(t, hf, "adapter_config.json", "{}")
	trained(2, "LoRA adapter")
	for _, args := range [][]string{{"generate", hf, "--prompt", "a"}, {"eval", hf, "--data", config}} {
		invalid(t, args, "LoRA adapter")
	}
	empty := t.TempDir()
	for _, args := range [][]string{{"generate", empty, "--prompt", "a"},
		{"export", empty, "--to", filepath.Join(empty, "x")}} {
		if code, _, stderr := cprun(t, args...); code != 2 || strings.Count(stderr, empty) != 1 {
			t.Errorf("%q: exit status %d, the path is there %d times:\n%s", args, code, strings.Count(stderr, empty),
				stderr)
		}
	}
}
