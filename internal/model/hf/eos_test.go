package hf

import (
	"os"
	"path/filepath"
	"slices"
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
		{map[string]string{"config.json": `{"eos_token_id": 2}`, "generation_config.json": `{"eos_token_id": 3}`}, 2,
			""},
		{map[string]string{"config.json": `{"eos_token_id": null}`,
			"generation_config.json": `{"eos_token_id": [5, 6]}`}, 5, ""},
		{map[string]string{"config.json": `{}`, "tokenizer_config.json": `{"eos_token": "</s>"}`,
			"tokenizer.json": tokenizer}, 7, ""},
		{map[string]string{"tokenizer_config.json": `{"eos_token": {"content": "</s>"}}`, "tokenizer.json": tokenizer},
			7, ""},
		{map[string]string{"tokenizer_config.json": `{"eos_token": "<end>"}`, "tokenizer.json": tokenizer}, -1, ""},
		{map[string]string{"tokenizer_config.json": `{"eos_token": null}`, "tokenizer.json": tokenizer}, -1, ""},
		{map[string]string{"config.json": `{"eos_token_id": "2"}`}, -1,
			`config.json: eos_token_id: "2" is neither an id`},
		{map[string]string{"config.json": `{"eos_token_id": [-2]}`}, -1, "neither an id"},
		{map[string]string{"config.json": `{"eos_token_id": []}`}, -1, ""},
		{map[string]string{"config.json": `nothing`}, -1, "config.json: invalid character"},
	} {
		got, err := EOS(dirOf(t, tc.files))
		if got != tc.want || (err == nil) != (tc.fault == "") || err != nil &&
			!strings.Contains(err.Error(), tc.fault) {
			t.Errorf("%v: %d, %v; want %d, %q", tc.files, got, err, tc.want, tc.fault)
		}
	}
}

// dirOf returns a directory with these files.
func dirOf(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// The generate of transformers stops at every id of generation_config.json, whatever config.json has.
func TestEndsAreThoseOfGenerate(t *testing.T) {
	for _, tc := range []struct {
		files map[string]string
		want  []int
	}{
		{nil, nil},
		{map[string]string{"config.json": `{"eos_token_id": 2}`, "generation_config.json": `{"eos_token_id": [5, 6]}`},
			[]int{5, 6}},
		{map[string]string{"config.json": `{"eos_token_id": [2, 3]}`,
			"generation_config.json": `{"eos_token_id": null}`}, []int{2, 3}},
		{map[string]string{"tokenizer_config.json": `{"eos_token": "</s>"}`,
			"tokenizer.json": `{"added_tokens":[{"id":7,"content":"</s>"}]}`}, []int{7}},
	} {
		if got, err := Ends(dirOf(t, tc.files)); err != nil || !slices.Equal(got, tc.want) {
			t.Errorf("%v: %v, %v; want %v", tc.files, got, err, tc.want)
		}
	}
	if _, err := Ends(dirOf(t,
		map[string]string{"generation_config.json": `{"eos_token_id": [1, "x"]}`})); err == nil ||
		!strings.Contains(err.Error(), "generation_config.json: eos_token_id") {
		t.Errorf("an id that is none: %v", err)
	}
}
