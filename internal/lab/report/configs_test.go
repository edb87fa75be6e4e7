package report

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// A page of one run lists the keys that differ from their defaults. The payload of several runs has the keys that
// differ between them.
func TestConfigs(t *testing.T) {
	t.Parallel()
	one := openInput(t, "runs/ring-packed")
	p := build(one, 100)
	if len(p.Configs) != 1 || !strings.Contains(p.Configs[0].Text, "\nlog.trace_steps: 2\n") {
		t.Errorf("of one run: configs %q", p.Configs)
	}
	differ := map[string]string{} // key: value, default
	for _, row := range p.Summary[1].Rows {
		differ[row[0].Text] = row[1].Text + ", " + row[2].Text
	}
	for key, want := range map[string]string{"optimizer.lr": "0.003, 0.0003", "data.seq_len": "1024, 4096",
		"parallel.algorithm": "ring, auto", "model.vocab_size": "256, –", "train.seed": "", "model.rope_scaling": "",
		"parallel.inner": ""} {
		if differ[key] != want {
			t.Errorf("%s differs from its default: %q, want %q", key, differ[key], want)
		}
	}
	same := openInput(t, "runs/ring-packed", "runs/ring-packed")
	for _, linears := range []string{"fp8", "bf16"} {
		for _, r := range same.Runs {
			r.Plan.Config["precision"].(map[string]any)["linears"] = linears
		}
		if p := build(same, 100); len(p.Summary) != 1 || !slices.Contains(p.Facts, [2]string{"Config",
			"the same in all runs"}) || slices.Contains(p.Facts, [2]string{"Linears", "fp8"}) != (linears == "fp8") {
			t.Errorf("of equal runs: %d tables, %q", len(p.Summary), p.Facts)
		}
	}
	lost := openInput(t, "runs/ring-packed", "runs/allgather")
	lost.Runs[0].Plan = nil
	if p := build(lost, 100); len(p.Summary) != 1 || len(p.Configs) != 1 {
		t.Errorf("with one config: %d tables, %d configs", len(p.Summary), len(p.Configs))
	}
}

// The page cuts configs of any size and depth.
func TestConfigsAreBounded(t *testing.T) {
	t.Parallel()
	in := openInput(t, "runs/ring-packed")
	section := map[string]any{"long": strings.Repeat("é", 1<<20),
		"deep": map[string]any{"er": map[string]any{"x": 1.0}}}
	for i := range 10 * maxKeys {
		section[fmt.Sprintf("key%d%s", i, strings.Repeat("x", i%2*maxSetting))] = "v" // every second is too long
	}
	in.Runs[0].Plan.Config = map[string]any{"many": section}
	s := in.Runs[0].Plan.settings()
	if len(s) != maxKeys || s["many.deep.er.x"] != "1" {
		t.Errorf("%d keys, want %d; a key of a section inside is %q", len(s), maxKeys, s["many.deep.er.x"])
	}
	for key, v := range s {
		if len(v) > maxSetting+len("…") || len(key) > maxSetting {
			t.Fatalf("a key of %d bytes has a value of %d", len(key), len(v))
		}
	}
	writePage(t, in)
}
