//go:build !portable && !cuda

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// The processes of a run never take more than 1.05 times the host line of its plan, nor does the plan say much more.
// They also train in a control group with that limit, if this user can make one.
func TestRunsTakeTheMemoryOfTheirPlans(t *testing.T) {
	text := gettysburg(t)
	shape := "{vocab_size: 256, hidden_size: 256, intermediate_size: 704, num_hidden_layers: 6, num_attention_heads: 8}"
	bytes := "{path: " + text + ", tokenizer: bytes, seq_len: 64}"
	for _, c := range []struct{ name, model, data, more string }{
		{"full", shape, bytes, ""},
		{"adapters", shape, bytes, "lora: {r: 8}"},
		{"offload", shape, bytes, "memory: {offload: both, shard: parameters, recompute: full}"},
		{"conversations", "{vocab_size: 24000, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, " +
			"num_attention_heads: 2, tie_word_embeddings: true}", conversations(t, 24000), ""},
	} {
		if testing.Short() && c.name == "adapters" { // like full, with less state
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			path := write(t, t.TempDir(), "train.yaml", fmt.Sprintf("model: %s\ndata: %s\ntrain: {steps: 2}\n"+
				"checkpoint: {every: 1, async: true}\n%s\n", c.model, c.data, c.more))
			var plan struct{ Memory struct{ Host int64 } }
			out, _ := must(t, "plan", "--device", "cpu", "--nproc", "2", "--json", path)
			decode(t, out, &plan)
			most := plan.Memory.Host * 105 / 100
			took := trainWithin(t, most, path)
			t.Logf("%d MiB of %d planned", took>>20, plan.Memory.Host>>20)
			if took > most || took < plan.Memory.Host*8/10 {
				t.Errorf("the run took %d bytes, and its plan says %d", took, plan.Memory.Host)
			}
		})
	}
}

// trainWithin trains on two ranks, in a control group with a limit if possible, and returns the memory that its processes
// took.
func trainWithin(t *testing.T, limit int64, path string) int64 {
	t.Helper()
	c := process(t, "--device", "cpu", "--nproc", "2", "--run-dir", filepath.Join(t.TempDir(), "run"), path)
	c.Env = append(c.Env, "GOGC=") // Go's default
	if dir := controlGroup(t, limit); dir != "" {
		within(c, "echo $$ >"+dir+"/cgroup.procs")
	}
	s := launched(t, c)
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	peaks := map[int]int64{} // of the ranks, without the program
	launcher, program := int64(0), int64(0)
	for {
		select {
		case err := <-ended:
			if err != nil {
				t.Fatalf("with %d bytes: %v\n%s", limit, err, s.said())
			}
			for _, n := range peaks {
				launcher += n
			}
			return launcher + program
		case <-time.After(20 * time.Millisecond):
		}
		workers := s.workers()
		if len(workers) > 0 { // before, it encodes data
			own := statusOf(s.Process.Pid)
			launcher = max(launcher, own["VmRSS"]-own["RssFile"])
		}
		for _, pid := range workers {
			w := statusOf(pid)
			peaks[pid] = max(peaks[pid], w["VmHWM"]-w["RssFile"])
			program = max(program, w["RssFile"])
		}
	}
}

// statusOf returns the numbers of /proc/PID/status, sizes in bytes.
func statusOf(pid int) map[string]int64 {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)) // nothing of an ended process
	numbers := map[string]int64{}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		field := strings.Fields(value)
		if len(field) == 0 {
			continue
		}
		n, err := strconv.ParseInt(field[0], 10, 64)
		if err != nil {
			continue
		}
		if len(field) == 2 {
			n <<= 10
		}
		numbers[name] = n
	}
	return numbers
}

// conversations writes a tokenizer of that many tokens and conversations, and returns the section data.
func conversations(t *testing.T, vocab int) string {
	t.Helper()
	dir := t.TempDir()
	tokens, merges := map[string]int{}, [][2]string{}
	for c := '!'; c <= '~'; c++ {
		tokens[string(c)] = len(tokens)
	}
	tokens["Ġ"], tokens["Ċ"] = len(tokens), len(tokens)+1
	words := []string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p"}
	for i := 0; len(tokens) < vocab-1; i++ {
		for k := 0; k < 16 && len(tokens) < vocab-1; k++ {
			tokens[words[i]+words[k]] = len(tokens)
			merges, words = append(merges, [2]string{words[i], words[k]}), append(words, words[i]+words[k])
		}
	}
	end := map[string]any{"id": vocab - 1, "content": "<|end|>", "special": true}
	put := func(name string, value any) {
		text, err := json.Marshal(value)
		if err != nil {
			t.Fatal(err)
		}
		write(t, dir, name, string(text))
	}
	put("tokenizer.json", map[string]any{"added_tokens": []any{end},
		"pre_tokenizer": map[string]any{"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
		"decoder":       map[string]any{"type": "ByteLevel"},
		"model":         map[string]any{"type": "BPE", "vocab": tokens, "merges": merges}})
	put("tokenizer_config.json", map[string]any{"eos_token": "<|end|>", "chat_template": "{% for m in messages %}" +
		"{{ m.role }}\n{% generation %}{{ m.content }}<|end|>{% endgeneration %}\n{% endfor %}"})
	var records strings.Builder
	for i := range 1200 {
		said := strings.Join(words[i:i+50], " ")
		fmt.Fprintf(&records, `{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "%s"}]}`+"\n",
			said, said)
	}
	path := write(t, dir, "talk.jsonl", records.String())
	return fmt.Sprintf("{path: %s, tokenizer: %s, eos_token_id: %d, seq_len: 256}", path, dir, vocab-1)
}
