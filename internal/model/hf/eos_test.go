package hf

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestEOSIsTheTokenizersOrTheModels(t *testing.T) {
	const added = `"added_tokens":[{"id":1,"content":"<s>","special":true},{"id":2,"content":"</s>","special":true}]`
	const tokenizer = `{"model":{"type":"BPE","vocab":{"a":0,"<s>":1,"</s>":2,"b":3},"merges":[]},` + added + `}`
	with := func(config, settings string) map[string]string {
		return map[string]string{"config.json": config, "tokenizer_config.json": settings, "tokenizer.json": tokenizer}
	}
	for _, tc := range []struct {
		files map[string]string
		want  int
		note  bool
		fault string
	}{
		{nil, -1, false, ""},
		{map[string]string{"config.json": `{"eos_token_id": 2}`}, 2, false, ""},
		{map[string]string{"config.json": `{"eos_token_id": 2}`, "generation_config.json": `{"eos_token_id": 3}`}, 2,
			false, ""},
		{map[string]string{"config.json": `{"eos_token_id": null}`,
			"generation_config.json": `{"eos_token_id": [5, 6]}`}, 5, false, ""},
		{with(`{}`, `{"eos_token": "</s>"}`), 2, false, ""},
		{with(`{}`, `{"eos_token": {"content": "</s>"}}`), 2, false, ""},
		{with(`{"eos_token_id": 1}`, `{"eos_token": "</s>"}`), 2, true, ""},
		{with(`{"eos_token_id": [1, 2]}`, `{"eos_token": "</s>"}`), 2, false, ""},
		{with(`{"eos_token_id": 1}`, `{"eos_token": "b"}`), 3, true, ""},
		{with(`{"eos_token_id": 1}`, `{"eos_token": "<end>"}`), 4, true, ""},
		{with(`{"eos_token_id": 1}`, `{"eos_token": null}`), 1, false, ""},
		{map[string]string{"config.json": `{"eos_token_id": 2}`, "tokenizer_config.json": `{"eos_token": "<s>"}`,
			"tokenizer.json": `{"model": 1}`}, 2, false, ""},
		{map[string]string{"config.json": `{"eos_token_id": 2}`, "tokenizer_config.json": `{"eos_token": "<s>"}`}, 2,
			false, ""},
		{with(`{}`, `{"eos_token": 7}`), -1, false, "tokenizer_config.json: eos_token"},
		{map[string]string{"config.json": `{"eos_token_id": "2"}`}, -1, false,
			`config.json: eos_token_id: "2" is neither an id`},
		{map[string]string{"config.json": `{"eos_token_id": [-2]}`}, -1, false, "neither an id"},
		{map[string]string{"config.json": `{"eos_token_id": []}`}, -1, false, ""},
		{map[string]string{"config.json": `nothing`}, -1, false, "config.json: invalid character"},
	} {
		dir := dirOf(t, tc.files)
		got, err := FindEOS(filepath.Join(dir, "tokenizer.json"), dir)
		switch {
		case tc.fault != "":
			if err == nil || !strings.Contains(err.Error(), tc.fault) {
				t.Errorf("%v: %v; want %q", tc.files, err, tc.fault)
			}
		case err != nil || got.ID != tc.want || (got.Note() != "") != tc.note:
			t.Errorf("%v: %d, %q, %v; want %d, %v", tc.files, got.ID, got.Note(), err, tc.want, tc.note)
		}
	}
}

// dirOf returns a directory with these files.
func dirOf(t testing.TB, files map[string]string) string {
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

func TestSpecialIDsAreNoneOneOrSeveral(t *testing.T) {
	for raw, want := range map[string][]int{"": nil, "null": nil, "7": {7}, "[3, 4]": {3, 4}} {
		c := Config{TokenIDs: map[string]json.RawMessage{"eos_token_id": json.RawMessage(raw)}}
		if got, err := c.SpecialIDs("eos_token_id"); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %v, %v, want %v", raw, got, err, want)
		}
	}
	for _, raw := range []string{"-1", `"</s>"`, "[1, -2]"} {
		c := Config{TokenIDs: map[string]json.RawMessage{"eos_token_id": json.RawMessage(raw)}}
		if ids, err := c.SpecialIDs("eos_token_id"); err == nil || !strings.Contains(err.Error(), "eos_token_id: ") {
			t.Errorf("%s: %v, %v", raw, ids, err)
		}
	}
}
