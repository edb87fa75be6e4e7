package main

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
)

// answers returns the answers of a step in metrics.jsonl, by prompt.
func answers(t *testing.T, dir string, step int) map[string]string {
	t.Helper()
	found := map[string]string{}
	var all []struct{ Prompt, Text string }
	for _, m := range metricsOf(t, dir) {
		if number(t, m["step"]) == float64(step) && m["samples"] != nil {
			decode(t, string(m["samples"]), &all)
		}
	}
	for _, a := range all {
		found[a.Prompt] = a.Text
	}
	return found
}

// Answers during training are those of the saved weights, for each way to divide them, and change no loss.
func TestSamples(t *testing.T) {
	t.Parallel()
	config := small(t, 3)
	plain, _ := trains(t, "--nproc", "3", config)
	prompts := []string{"--set", "log.samples={every: 2, prompts: [Four score, 'a\\b \"c\"', the]}"}
	for _, set := range [][]string{
		{"--nproc", "1", "--set", "data.eos_token_id=32", "--set", "log.every=3"}, {"--nproc", "3"}, {"--nproc", "3", "--set", "memory.shard=parameters"},
		{"--nproc", "2", "--set", "memory={shard: parameters, offload: both}", "--set", "precision.compute=bf16"},
		{"--nproc", "2", "--set", "model={architecture: qwen3_5_text, layer_types: [linear_attention, full_attention], " +
			"linear_num_value_heads: 4, linear_num_key_heads: 2, linear_key_head_dim: 8, linear_value_head_dim: 8}"},
	} {
		dir, said := trains(t, append(append(set, prompts...), config)...)
		contains(t, "stderr", said, `sample after step 2: "Four score" -> "`, `sample after step 3: "the" -> "`)
		if early, none := len(answers(t, dir, 2)), len(answers(t, dir, 1)); early != 3 || none != 0 {
			t.Errorf("%v: %d answers after step 2 and %d after step 1", set, early, none)
		}
		last := answers(t, dir, 3)
		for i, prompt := range []string{`a\b "c"`, "Four score", "the"} {
			if testing.Short() && i > 0 {
				break
			}
			text, ok := last[prompt]
			want := generated(t, dir, "--prompt", prompt, "--max-tokens", "64", "--temperature", "0")
			if strings.Contains(text, " ") && set[1] == "1" {
				t.Errorf("%q has the token that ends texts", text)
			}
			if half := strings.Contains(fmt.Sprint(set), "bf16"); !ok || text != want && !half || half && text == "" {
				t.Errorf("%v: %q is answered by %q, want %q", set, prompt, text, want)
			}
		}
		if len(set) != 2 || set[1] != "3" {
			continue
		}
		for i, m := range metricsOf(t, plain) {
			if got := metricsOf(t, dir)[i]["loss"]; string(got) != string(m["loss"]) {
				t.Errorf("step %d: loss %s, without answers %s", i+1, got, m["loss"])
			}
		}
		must(t, "report", dir)
		contains(t, "the report", content(t, dir, "report.html"), "Answers to prompts", "Four score")
		events, _ := filepath.Glob(filepath.Join(dir, "events.out.tfevents.*"))
		contains(t, "the event file", content(t, events[0]), "samples/1", "    Four score")
	}
	// Lines of metrics have 512 bytes of a prompt, six each in JSON, and are far below the limit of readers.
	long := "['" + strings.TrimSuffix(strings.Repeat(strings.Repeat("<", 1000)+"', '", 10), ", '") + "]"
	dir, _ := trains(t, "--set", "log.samples={every: 2, prompts: "+long+"}", config)
	for line := range strings.Lines(content(t, dir, "metrics.jsonl")) {
		if len(line) > 40<<10 {
			t.Errorf("a line of metrics has %d bytes", len(line))
		}
	}
	set := append([]string{"plan"}, prompts...)
	for want, value := range map[string]string{
		"log.samples.prompts: missing":     "log.samples.prompts=[]",
		`prompt "": it is empty`:           "log.samples.prompts=['']",
		"it has 1025 tokens, and the most": "log.samples.prompts=[" + strings.Repeat("x", 1025) + "]",
	} {
		invalid(t, append(set, "--set", value, config), want)
	}
}
