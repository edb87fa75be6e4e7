package main

import (
	"path/filepath"
	"strings"
	"testing"
)

// Conversations in Parquet are planned, trained on and answered.
func TestConversations(t *testing.T) {
	chats, err := filepath.Abs("../../internal/text/data/testdata/chat")
	if err != nil {
		t.Fatal(err)
	}
	config := write(t, t.TempDir(), "train.yaml", `
model: {vocab_size: 422, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4}
data: {path: `+chats+`/messages.parquet, tokenizer: `+chats+`, seq_len: 128, pack_documents: true}
train: {steps: 3}
`)
	dir := filepath.Join(t.TempDir(), "run")
	_, said := must(t, "--nproc", "2", "--run-dir", dir, config)
	if !strings.Contains(said, "8 documents") {
		t.Errorf("it says %s", said)
	}
	for _, chat := range []string{"Hi", write(t, t.TempDir(), "chat.json", `[{"role":"user","content":"Hi"}]`)} {
		out := generated(t, dir, "--chat", chat, "--max-tokens", "9", "--echo")
		if !strings.Contains(out, "Hi") {
			t.Errorf("--chat %s: %q", chat, out)
		}
	}
	_, said = must(t, "generate", dir, "--chat", "Hi", "--max-tokens", "2")
	if !strings.Contains(said, "prompt: 9 tokens") {
		t.Errorf("it says %s", said)
	}
	for want, args := range map[string][]string{
		"pass one of them":              {"generate", dir, "--chat", "a", "--prompt", "b"},
		"need the tokenizer of a model": {"generate", dir, "--chat", "a", "--tokenizer", "bytes"},
		`record 1: no key "text"`:       {"plan", "--set", "data.format=text", config},
		"no file":                       {"plan", "--set", "data.chat_template=nosuch.jinja", config},
	} {
		if code, _, said := cprun(t, args...); code != 2 || !strings.Contains(said, want) {
			t.Errorf("%v: status %d, %s, want %s", args, code, said, want)
		}
	}
}
