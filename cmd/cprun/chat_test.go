package main

import (
	"strings"
	"testing"
)

// Conversations in Parquet are planned, trained on and answered.
func TestConversations(t *testing.T) {
	t.Parallel()
	chats := absolute(t, "internal/text/data/testdata/chat")
	config := write(t, t.TempDir(), "train.yaml", `
model: {vocab_size: 422, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4}
data: {path: `+chats+`/messages.parquet, tokenizer: `+chats+`, seq_len: 128, pack_documents: true}
train: {steps: 3}
`)
	dir, said := trains(t, "--nproc", "2", "--set", "log.samples={every: 3, prompts: [Hi]}", config)
	contains(t, "stderr", said, "8 documents")
	want := generated(t, dir, "--chat", "Hi", "--max-tokens", "64", "--temperature", "0")
	if got := answers(t, dir, 3)["Hi"]; got != want {
		t.Errorf("the message is answered by %q, want %q", got, want)
	}
	for _, chat := range []string{"Hi", write(t, t.TempDir(), "chat.json", `[{"role":"user","content":"Hi"}]`)} {
		contains(t, chat, generated(t, dir, "--chat", chat, "--max-tokens", "9", "--echo"), "Hi")
	}
	_, said = must(t, "generate", dir, "--chat", "Hi", "--max-tokens", "2")
	contains(t, "generate", said, "prompt: 9 tokens")
	if out, _ := must(t, "eval", dir, "--data", chats+"/messages.parquet"); strings.Contains(out, "NaN") {
		t.Errorf("positions without targets:\n%s", out)
	}
	for want, args := range map[string][]string{
		"pass one of them":              {"generate", dir, "--chat", "a", "--prompt", "b"},
		"need the tokenizer of a model": {"generate", dir, "--chat", "a", "--tokenizer", "bytes"},
		`record 1: no key "text"`:       {"plan", "--set", "data.format=text", config},
		"no file":                       {"plan", "--set", "data.chat_template=nosuch.jinja", config},
	} {
		invalid(t, args, want)
	}
}
