package main

import (
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/model/hf"
)

// A run with adapters of several ranks, a module to save and a resized vocabulary has one loss in its validation, in eval
// of the run, and in eval of its merged export. Its adapter continues as lora.from. generate reads the run and the
// merged model alike.
func TestAdaptersEndToEnd(t *testing.T) {
	t.Parallel()
	text := gettysburg(t)
	root := t.TempDir()
	in := func(name string) string { return filepath.Join(root, name) }
	must(t, "--run-dir", in("pretrained"), small(t, 1))
	must(t, "export", in("pretrained"), "--to", in("base"))
	tuned := []string{"--set", "model.from=" + in("base"), "--set", "data.tokenizer=bytes", "--set",
		"model.resize_embeddings=259", "--set",
		fmt.Sprintf("data.validation={path: %s, every: 4, samples: 2}", text)}
	const lora = "lora={r: 4, targets: [q_proj, down_proj], modules_to_save: [lm_head], rank_pattern: {down_proj: 2}, " +
		"alpha_pattern: {1.mlp.down_proj: 3}}"
	run := append([]string{"--nproc", "2", "--run-dir", in("run"), "--set", lora}, tuned...)
	must(t, append(run, "--set", "optimizer.lr=0.05", small(t, 4))...)
	steps := metricsOf(t, in("run"))
	want := number(t, steps[len(steps)-1]["val_loss"])
	out, _ := must(t, "export", in("run"), "--to", in("adapter"))
	contains(t, "export", out, "10 tensors in F32", "resize_token_embeddings(259)")
	must(t, "export", in("run"), "--merge", "--to", in("merged"))
	for _, path := range []string{in("run"), in("merged")} {
		e := evaluate(t, path, "--data", text, "--samples", "2", "--seq-len", "200")
		if d := math.Abs(e.Loss - want); !(d <= 2e-5) {
			t.Errorf("%s has loss %v, want %v", path, e.Loss, want)
		}
	}
	first, _ := must(t, "generate", in("run"), "--prompt", "Four", "--max-tokens", "8", "--temperature", "0")
	if again, _ := must(t, "generate", in("merged"), "--prompt", "Four", "--max-tokens", "8", "--temperature",
		"0"); again != first {
		t.Errorf("generated %q, and by the merged model %q", first, again)
	}
	l, err := hf.ReadAdapter(in("adapter"))
	if err != nil || l.R != 4 || l.Alpha != 8 || fmt.Sprint(l.Targets.Names) != "[down_proj q_proj]" {
		t.Errorf("the adapter is %+v, %v", l, err)
	}
	_, said := trains(t, append([]string{"--set", "lora.from=" + in("adapter"), small(t, 1)}, tuned...)...)
	contains(t, "from the adapter", said, fmt.Sprintf("validation loss at step 0: %.4f", want))
	for key, value := range map[string]string{"lora.r": "8", "lora.alpha_pattern": "{down_proj: 3}"} {
		refused(t, in("run"), []string{"of another model", key + " is "}, append(run, "--set", key+"="+value, small(t, 6))...)
	}

	weights := []byte(content(t, in("base"), "model.safetensors"))
	weights[len(weights)-1] ^= 1
	write(t, in("base"), "model.safetensors", string(weights))
	for _, args := range [][]string{{"export", in("run"), "--to", in("other")}, {"generate", in("run"), "--prompt", "a"},
		append(run, small(t, 6))} {
		if code, _, stderr := cprun(t, args...); code == 0 || !strings.Contains(stderr, "model.from to an unchanged") {
			t.Errorf("cprun %v with another base: exit status %d\n%s", args, code, stderr)
		}
	}
	invalid(t, []string{"export", in("pretrained"), "--merge", "--to", in("other")}, "no adapters")
}
