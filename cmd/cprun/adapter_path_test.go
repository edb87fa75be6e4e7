package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/cprun/cprun/internal/model/hf"
)

// The path of docs/conversations.md and docs/experts.md: a Hugging Face directory and conversations in parquet become an
// adapter that answers, and a merged model.
func TestConversationsTuneAnAdapter(t *testing.T) {
	for name, shape := range map[string]string{
		"dense":   "intermediate_size: 64",
		"experts": "intermediate_size: 64, architecture: qwen3_moe, num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 16",
	} {
		t.Run(name, func(t *testing.T) { conversationsTune(t, shape) })
	}
}

func conversationsTune(t *testing.T, shape string) {
	t.Parallel()
	chats := absolute(t, "internal/text/data/testdata/chat")
	dir := t.TempDir()
	base, adapter, merged := filepath.Join(dir, "base"), filepath.Join(dir, "adapter"), filepath.Join(dir, "merged")
	must(t, "--nproc", "1", "--run-dir", filepath.Join(dir, "first"), write(t, dir, "first.yaml", `
model: {vocab_size: 422, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, `+shape+`}
data: {path: `+chats+`/messages.parquet, tokenizer: `+chats+`, seq_len: 256}
train: {steps: 1}
`))
	must(t, "export", filepath.Join(dir, "first"), "--to", base)
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} {
		write(t, base, name, content(t, chats, name))
	}
	config, run := write(t, dir, "tune.yaml", `
model: {from: base}
data: {path: `+chats+`/messages.parquet, seq_len: 256}
train: {steps: 12}
lora: {r: 4}
optimizer: {lr: 1.0e-2}
`), filepath.Join(dir, "run")
	must(t, "--verify", "--nproc", "2", "--run-dir", run, config)
	steps := metricsOf(t, run)
	if n := len(steps); n != 12 || !(number(t, steps[n-1]["loss"]) < number(t, steps[0]["loss"])) {
		t.Errorf("%d steps, losses %s to %s", n, steps[0]["loss"], steps[n-1]["loss"])
	}
	must(t, "export", run, "--to", adapter)
	must(t, "export", run, "--to", merged, "--merge")
	for _, name := range []string{"adapter_config.json", "adapter_model.safetensors"} {
		if st, err := os.Stat(filepath.Join(adapter, name)); err != nil || st.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := hf.ReadConfig(merged); err != nil {
		t.Error(err)
	}
	tuned := generated(t, run, "--chat", "Hi", "--max-tokens", "8")
	if whole := generated(t, merged, "--chat", "Hi", "--max-tokens", "8"); whole != tuned {
		t.Errorf("the adapter writes %q, the merged model %q", tuned, whole)
	}
}
