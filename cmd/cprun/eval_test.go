package main

import (
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"testing"
)

// evaluated is the output of `cprun eval --json`.
type evaluated struct {
	Step       int64
	Samples    int
	Targets    int64
	Loss       float64
	Perplexity float64
	Buckets    []struct {
		From, To int
		Targets  int64
		Loss     float64
	}
}

func evaluate(t *testing.T, args ...string) (e evaluated) {
	t.Helper()
	out, _ := must(t, append([]string{"eval", "--json"}, args...)...)
	decode(t, out, &e)
	return e
}

// A checkpoint and its export have the validation loss of the run, on any number of ranks.
func TestEval(t *testing.T) {
	t.Parallel()
	text, hf := gettysburg(t), filepath.Join(t.TempDir(), "hf")
	dir, _ := trains(t, "--nproc", "2", "--set", fmt.Sprintf("data.validation={path: %s, every: 2, samples: 3}", text),
		"--set", "checkpoint.every=2", small(t, 4))
	must(t, "export", dir, "--to", hf)
	want := map[string]float64{}
	for _, m := range metricsOf(t, dir) {
		if v, ok := m["val_loss"]; ok {
			want[string(m["step"])] = number(t, v)
		}
	}
	for _, c := range []struct {
		step string
		args []string
	}{
		{"4", []string{dir, "--nproc", "1"}},
		{"4", []string{dir, "--nproc", "3"}},
		{"2", []string{dir, "--nproc", "2", "--step", "2"}},
		{"4", []string{hf, "--nproc", "2", "--seq-len", "200"}},
	} {
		e := evaluate(t, append(c.args, "--data", text, "--samples", "3")...)
		if d := math.Abs(e.Loss - want[c.step]); !(d <= 1e-5) || e.Samples != 3 || e.Targets != 600 ||
			!(math.Abs(e.Perplexity-math.Exp(e.Loss)) <= 1e-9) {
			t.Errorf("%v: %+v, want the loss %v", c.args, e, want[c.step])
		}
		sum, n := 0.0, int64(0)
		for _, b := range e.Buckets {
			sum, n = sum+b.Loss*float64(b.Targets), n+b.Targets
		}
		if n != e.Targets || !(math.Abs(sum/float64(n)-e.Loss) <= 1e-12) || e.Buckets[len(e.Buckets)-1].To != 200 {
			t.Errorf("%v: the parts %+v do not add up to %v", c.args, e.Buckets, e.Loss)
		}
	}
	// A base in E4M3 is evaluated so.
	base, _ := trains(t, "--nproc", "1", "--set", fmt.Sprintf("data.validation={path: %s, every: 2, samples: 3}", text),
		"--set", "precision.linears=fp8", "--set", "lora={r: 4, base: fp8}", "--set", "model.head_dim=16", small(t, 2))
	steps := metricsOf(t, base)
	trained := number(t, steps[len(steps)-1]["val_loss"])
	if e := evaluate(t, base, "--nproc", "1", "--data", text, "--samples", "3"); !(math.Abs(e.Loss-trained) <= 1e-9) {
		t.Errorf("a base in E4M3: a loss of %v, and %v in training", e.Loss, trained)
	}
	out, _ := must(t, "eval", dir, "--data", text)
	contains(t, "eval", out, "run, step 4: loss ", "100 to 199")
	for _, c := range [][]string{{t.TempDir(), "--data", text}, {dir, "--data", "/nope"}, {dir},
		{dir, "--data", text, "--step", "7"}, {"/nope", "--data", text}, {dir, "--data", text, "--samples", "-1"}} {
		if code, _, stderr := cprun(t, append([]string{"eval"}, c...)...); code != 2 ||
			strings.Count(stderr, "\n") != 1 {
			t.Errorf("eval %v: status %d\n%s", c, code, stderr)
		}
	}
}
