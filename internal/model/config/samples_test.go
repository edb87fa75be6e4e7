package config

import (
	"strings"
	"testing"
)

// train.samples gives the steps, also after a resume with another batch, and stands beside train.steps in the config of a
// run. A flag replaces it.
func TestSamplesGiveTheSteps(t *testing.T) {
	const model = "model: {vocab_size: 8, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, " +
		"num_attention_heads: 1}\ndata: {path: none.bin}\nlr_schedule: {warmup_ratio: 0.3}\n"
	parse := func(text string, set ...string) *Config {
		t.Helper()
		c, err := Parse("train.yaml", []byte(model+text), Options{NoFiles: true, Set: set})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	want := func(what string, c *Config, steps, samples, warmup int) {
		t.Helper()
		if c.Train.Steps != steps || c.Train.Samples != samples || c.LRSchedule.WarmupSteps != warmup {
			t.Errorf("%s: %d steps, %d samples, %d steps of warmup, want %d, %d, %d", what, c.Train.Steps, c.Train.Samples,
				c.LRSchedule.WarmupSteps, steps, samples, warmup)
		}
	}
	resume := func(c *Config, step, samples int64) *Config {
		t.Helper()
		if err := c.ResumeAt(step, samples); err != nil {
			t.Fatal(err)
		}
		return c
	}
	c := parse("train: {samples: 30, global_batch_size: 4}")
	want("samples", c, 8, 30, 3)
	want("resumed", resume(c, 3, 6), 9, 30, 3)
	want("at the end", resume(c, 15, 30), 15, 30, 5)
	again, err := Parse("train.yaml", c.YAML(), Options{NoFiles: true})
	if err != nil {
		t.Fatal(err)
	}
	want("read again", again, 15, 30, 5)
	want("a flag in place of samples", parse("train: {samples: 30}", "train.steps=5"), 5, 0, 2)
	want("a flag in place of steps", parse("train: {steps: 5}", "train.samples=7"), 7, 7, 3)
	want("epochs in place of both", parse("train: {steps: 5, samples: 7}", "train.epochs=2"), 0, 0, -1)
	want("both", resume(parse("train: {steps: 5, samples: 7}"), 3, 6), 5, 7, 2)
	c = parse("train: {epochs: 3, global_batch_size: 8}")
	if err := c.ResolveEpochs(3); err != nil {
		t.Fatal(err)
	}
	want("epochs", c, 2, 9, 1)
	for text, key := range map[string]string{
		"train: {epochs: 2, samples: 3}":            "train.epochs",
		"train: {samples: 2147483648}":              "train.samples",
		"train: {samples: 0}":                       "train.samples",
		"train: {samples: 9, global_batch_size: 0}": "train.global_batch_size",
	} {
		if _, err := Parse("train.yaml", []byte(model+text), Options{NoFiles: true}); err == nil ||
			!strings.Contains(err.Error(), key+": ") {
			t.Errorf("%s: %v, want a fault of %s", text, err, key)
		}
	}
	for _, samples := range []int64{maxSamples, maxInt} {
		if err := parse("train: {epochs: 2}").ResolveEpochs(samples); err == nil ||
			!strings.Contains(err.Error(), "train.epochs: ") {
			t.Errorf("two epochs of %d samples: %v", samples, err)
		}
	}
}
