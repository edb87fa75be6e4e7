package hf

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestEOSIsTheModelsOwn(t *testing.T) {
	const tokenizer = `{"added_tokens":[{"id":1,"content":"<s>"},{"id":7,"content":"</s>"}]}`
	for _, tc := range []struct {
		files map[string]string
		want  int
		fault string
	}{
		{nil, -1, ""},
		{map[string]string{"config.json": `{"eos_token_id": 2}`}, 2, ""},
		{map[string]string{"config.json": `{"eos_token_id": 2}`, "generation_config.json": `{"eos_token_id": 3}`}, 2, ""},
		{map[string]string{"config.json": `{"eos_token_id": null}`, "generation_config.json": `{"eos_token_id": [5, 6]}`}, 5, ""},
		{map[string]string{"config.json": `{}`, "tokenizer_config.json": `{"eos_token": "</s>"}`, "tokenizer.json": tokenizer}, 7, ""},
		{map[string]string{"tokenizer_config.json": `{"eos_token": {"content": "</s>"}}`, "tokenizer.json": tokenizer}, 7, ""},
		{map[string]string{"tokenizer_config.json": `{"eos_token": "<end>"}`, "tokenizer.json": tokenizer}, -1, ""},
		{map[string]string{"tokenizer_config.json": `{"eos_token": null}`, "tokenizer.json": tokenizer}, -1, ""},
		{map[string]string{"config.json": `{"eos_token_id": "2"}`}, -1, `config.json: eos_token_id: "2" is neither an id`},
		{map[string]string{"config.json": `{"eos_token_id": [-2]}`}, -1, "neither an id"},
		{map[string]string{"config.json": `{"eos_token_id": []}`}, -1, ""},
		{map[string]string{"config.json": `nothing`}, -1, "config.json: invalid character"},
	} {
		dir := t.TempDir()
		for name, text := range tc.files {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
				t.Fatal(err)
			}
		}
		got, err := EOS(dir)
		if got != tc.want || (err == nil) != (tc.fault == "") || err != nil && !strings.Contains(err.Error(), tc.fault) {
			t.Errorf("%v: %d, %v; want %d, %q", tc.files, got, err, tc.want, tc.fault)
		}
	}
}
