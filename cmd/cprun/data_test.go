package main

import (
	"encoding/json"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// A run, its plan.json, cprun plan and the report describe the data equally. A run on many ranks prints it once.
func TestHowMuchDataThereIs(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"in/a.jsonl": `{"text":"` + strings.Repeat("a", 29) + `","label":1}` + "\n" +
			`{"text":"` + strings.Repeat("b", 11) + `"}`,
		"b.jsonl": `{"input_ids":[1,2,3,4,5,6,7,8,9],"loss_mask":[0,0,0,1,1,1,1,1,1],` +
			`"position_ids":[0,1,2,3,4,5,6,7,8]}`,
		".c.jsonl": `not JSON`,
	} {
		write(t, dir, name, text)
	}
	args := []string{"--set", "data.path=" + filepath.Join(dir, "**", "*.jsonl"), "--set", "data.seq_len=16",
		"--set", "train.global_batch_size=4", small(t, 1)}
	run, stderr := trains(t, append(args, "--nproc", "2")...)
	// A file with a mask makes all records whole. The one with 29 tokens is too long.
	const line = "data: 2 files, 3 documents, 49 tokens; 1 document dropped\nsamples: 2 of 16 tokens (62.5 % filled), " +
		"16 targets; an epoch is 1 step\ndocuments by data.seq_len: 16 keeps 66.6 %, 32 100 %"
	if strings.Count(stderr, line) != 1 || !strings.Contains(stderr, "label, position_ids") {
		t.Errorf("stderr has not once %q:\n%s", line, stderr)
	}
	want := map[string]any{"files": 2.0, "documents": 3.0, "tokens": 49.0, "targets": 16.0, "samples": 2.0,
		"sample_tokens": 20.0, "sample_pairs": 55.5, "dropped_documents": 1.0, "steps_per_epoch": 1.0, "retention": []any{
			map[string]any{"seq_len": 16.0, "kept": 2.0 / 3}, map[string]any{"seq_len": 32.0, "kept": 1.0}},
		"ignored_keys": []any{"label", "position_ids"}}
	stdout, _ := must(t, append([]string{"plan", "--json", "--nproc", "2"}, args...)...)
	for what, text := range map[string]string{"plan": stdout, "plan.json": content(t, run, "plan.json")} {
		var plan struct{ Data map[string]any }
		decode(t, text, &plan)
		for _, key := range []string{"held_bytes", "encoding_bytes"} {
			if bytes, _ := plan.Data[key].(float64); bytes < 49 {
				t.Errorf("%s has %s %v", what, key, plan.Data[key])
			}
			delete(plan.Data, key)
		}
		if !reflect.DeepEqual(plan.Data, want) {
			t.Errorf("%s has %v, want %v", what, plan.Data, want)
		}
	}
	stdout, _ = must(t, append([]string{"plan"}, args...)...)
	// it has columns, and wraps lines
	words := strings.Fields(strings.ReplaceAll(line, ":", ""))
	contains(t, "the plan", strings.Join(strings.Fields(stdout), " "), strings.Join(words, " "))
	_, stderr = must(t, append([]string{"--dry-run"}, args...)...)
	if strings.Count(stderr, line) != 1 {
		t.Errorf("a dry run does not say %q:\n%s", line, stderr)
	}
	page := filepath.Join(t.TempDir(), "report.html")
	must(t, "report", "--out", page, run)
	contains(t, "the report", content(t, page), "targets 16; samples 2")
	// Without the files, a plan does not describe the data.
	stdout, _ = must(t, "plan", "--json", "--assume", "gpus=1,arch=sm90", "--set", "data.path=/nowhere/x.bin",
		small(t, 1))
	var plan struct{ Data json.RawMessage }
	if decode(t, stdout, &plan); string(plan.Data) != "null" {
		t.Errorf("data that are not there: %s", plan.Data)
	}
}

// A run encodes its data once for all ranks; before it, a plan says that nothing is counted. The losses equal a run
// without the cache.
func TestDataIsEncodedOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := write(t, dir, "a.jsonl", `{"input_ids":[1,2,3,4,5,6],"loss_mask":[0,0,1,1,1,1]}`+"\n"+
		`{"input_ids":[7,8,9],"loss_mask":[0,1,1]}`)
	config := small(t, 2)
	args := []string{"--nproc", "2", "--set", "data={path: " + file + ", seq_len: 8}", "--set",
		"data.cache=" + filepath.Join(dir, "cache")}
	const unknown, counted = "not counted yet", "2 documents, 9 tokens"
	plan := func(want string) {
		t.Helper()
		stdout, _ := must(t, append([]string{"plan", config}, args...)...)
		contains(t, "the plan", strings.Join(strings.Fields(stdout), " "), want)
	}
	plan(unknown)
	var losses []string
	for _, set := range []string{"data.cache=null", "data.shuffle=true", "data.shuffle=true"} {
		run, stderr := trains(t, append(args[:len(args):len(args)], "--set", set, config)...)
		if strings.Contains(stderr, "encoding ") != (len(losses) == 1) || !strings.Contains(stderr, counted) {
			t.Errorf("%s: stderr\n%s", set, stderr)
		}
		losses = append(losses, curve(t, run))
	}
	if losses[0] != losses[1] || losses[1] != losses[2] {
		t.Errorf("losses without the cache, as it is written, and from it: %q", losses)
	}
	plan(counted)
}

func TestTokenizeNamesKeysThatItDoesNotRead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := write(t, dir, "a.jsonl", `{"input_ids":[1,2,0],"attention_mask":[1,1,0],"token_type_ids":[0,0,0]}`)
	_, stderr := must(t, "tokenize", "--tokenizer", "bytes", "--to", filepath.Join(dir, "out"), file)
	if strings.Count(stderr, "token_type_ids") != 1 {
		t.Errorf("stderr does not name the key once:\n%s", stderr)
	}
	if got := tokensOf(t, filepath.Join(dir, "out.bin")); !slices.Equal(got, []int32{1, 2}) {
		t.Errorf("tokens %v, want those that are no padding", got)
	}
	file = write(t, dir, "b.jsonl", `{"input_ids":[1,2],"completion_mask":[0,1]}`)
	invalid(t, []string{"tokenize", "--tokenizer", "bytes", "--to", filepath.Join(dir, "b"), file}, "labels")
}

// With the weights of a model, train.seed only sets the order of the data.
func TestSeedsOrderTheDataOfAModel(t *testing.T) {
	t.Parallel()
	dir, text := fitting(t), write(t, t.TempDir(), "a.txt", strings.Repeat("four score and seven years ago ", 20))
	yaml := write(t, t.TempDir(), "train.yaml", "model: {from: "+dir+"}\ndata: {path: "+text+", seq_len: 16}\n")
	seen := map[string]string{}
	for _, seed := range []string{"train.seed=1", "train.seed=2", "train.seed=3", "data.seed=1"} {
		run, _ := trains(t, "--set", "train.steps=3", "--set", seed, yaml)
		losses := curve(t, run)
		other, ok := seen[losses]
		if ok != (seed == "data.seed=1") {
			t.Errorf("%s has the losses of %s: %s", seed, other, losses)
		}
		seen[losses] = seed
	}
}
