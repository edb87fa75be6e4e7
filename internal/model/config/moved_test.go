package config

import (
	"path/filepath"
	"strings"
	"testing"
)

// modelDir writes a small model with a tokenizer of three tokens, and text.
func modelDir(t *testing.T, dir, settings string) {
	t.Helper()
	for name, text := range map[string]string{
		"config.json": `{"model_type":"llama","vocab_size":300,"hidden_size":8,"intermediate_size":8,"num_hidden_layers":1,` +
			`"num_attention_heads":2,"max_position_embeddings":64,"eos_token_id":1}`,
		"tokenizer.json": `{"model":{"type":"BPE","vocab":{"a":0,"b":1,"end":2},"merges":[]},` +
			`"added_tokens":[{"id":2,"content":"end"}]}`,
		"tokenizer_config.json": settings, "t.jinja": "x", "text.txt": "ab",
	} {
		write(t, filepath.Join(dir, name), text)
	}
}

// Files inside the model's old directory are found in the new one, unless the old one exists.
func TestFilesMoveWithTheModel(t *testing.T) {
	dir := t.TempDir()
	before, now := filepath.Join(dir, "old"), filepath.Join(dir, "new")
	modelDir(t, now, `{}`)
	text := []byte("model: {from: " + before + "}\ndata: {path: " + now + "/text.txt, tokenizer: " + before +
		"/tokenizer.json, chat_template: " + before + "/t.jinja}\n")
	load := func(set ...string) (*Config, error) {
		return Parse(filepath.Join(dir, "config.yaml"), text, Options{Set: set})
	}
	if _, err := load(); err == nil {
		t.Error("loaded without the model")
	}
	c, err := load("model.from=" + now)
	if err != nil || c.Data.Tokenizer != filepath.Join(now, "tokenizer.json") ||
		c.Data.ChatTemplate != filepath.Join(now, "t.jinja") {
		t.Fatalf("%+v, %v", c, err)
	}
	modelDir(t, before, `{}`)
	if c, err = load("model.from=" + now); err != nil || c.Data.Tokenizer != filepath.Join(before, "tokenizer.json") {
		t.Errorf("%+v, %v", c, err)
	}
}

// The tokenizer's EOS comes before that of config.json. One line reports a difference.
func TestEOSOfTheTokenizer(t *testing.T) {
	for _, tc := range []struct {
		settings, set string
		want          int
		says          string // a warning, or a fault
	}{
		{`{}`, "", 1, ""}, {`{"eos_token":"b"}`, "", 1, ""}, {`{"eos_token":"end"}`, "", 2, "config.json is 1"},
		{`{"eos_token":"end"}`, "data.eos_token_id=0", 0, ""},
		{`{"eos_token":"new"}`, "model.vocab_size=3", -1, `"new", which has the id 3, and vocab_size is 3`},
		{`{"eos_token":"new"}`, "data={path: tokens.jsonl}", 3, "config.json is 1"},
	} {
		dir := t.TempDir()
		modelDir(t, dir, tc.settings)
		write(t, filepath.Join(dir, "tokens.jsonl"), `{"input_ids":[1]}`)
		opts := Options{}
		if tc.set != "" {
			opts.Set = []string{tc.set}
		}
		c, err := Parse(filepath.Join(dir, "config.yaml"), []byte("model: {from: .}\ndata: {path: text.txt}\n"), opts)
		if tc.want < 0 {
			if err == nil || !strings.Contains(err.Error(), tc.says) || !strings.Contains(err.Error(), eosKey) {
				t.Errorf("%s: %v, want %q", tc.settings, err, tc.says)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", tc.settings, err)
			continue
		}
		said := ""
		for _, w := range c.Warnings {
			if w.Key == eosKey {
				said = w.Msg
			}
		}
		if c.Data.EOSTokenID != tc.want || (said == "") != (tc.says == "") || !strings.Contains(said, tc.says) {
			t.Errorf("%s %s: %d, %q; want %d, %q", tc.settings, tc.set, c.Data.EOSTokenID, said, tc.want, tc.says)
		}
	}
}
