package tokenizer

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

// scripts/oracle/tokenizer_config.py makes the cases.
func TestFilesBesideTheTokenizer(t *testing.T) {
	raw := must.Have(os.ReadFile("testdata/config.json"))
	var o struct {
		Tokenizer json.RawMessage
		Texts     []string
		Cases     []struct {
			Name    string
			Files   map[string]json.RawMessage
			IDs     [][]int32
			Decoded []string
			EOS     *int
		}
	}
	if err := json.Unmarshal(raw, &o); err != nil || len(o.Cases) < 15 {
		t.Fatal(len(o.Cases), err)
	}
	for _, c := range o.Cases {
		path := beside(t, c.Files, o.Tokenizer)
		tok, err := Load(path)
		if err != nil {
			t.Errorf("%s: %v", c.Name, err)
			continue
		}
		for i, text := range o.Texts {
			got := encode(t, tok, text)
			if !slices.Equal(got, c.IDs[i]) {
				t.Errorf("%s: %q: %v, want %v", c.Name, text, got, c.IDs[i])
			}
			d := must.Have(tok.NewDecoder())
			var out []byte
			for _, id := range got {
				out = d.Append(out, id)
			}
			if out = d.Flush(out); c.Decoded != nil && string(out) != c.Decoded[i] {
				t.Errorf("%s: decodes to %q, want %q", c.Name, out, c.Decoded[i])
			}
		}
		want := -1
		if c.EOS != nil {
			want = *c.EOS
		}
		if _, id, err := EOS(path); id != want || err != nil {
			t.Errorf("%s: EOS %d, %v; want %d", c.Name, id, err, want)
		}
	}
}

// beside writes a tokenizer.json and the files beside it.
func beside(t *testing.T, files map[string]json.RawMessage, tokenizer []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tokenizer.json")
	for name, raw := range files {
		must.Do(t, os.WriteFile(filepath.Join(filepath.Dir(path), name), raw, 0o666))
	}
	must.Do(t, os.WriteFile(path, tokenizer, 0o666))
	return path
}

func TestFaultsOfFilesBesideNameFileAndKey(t *testing.T) {
	for _, tc := range []struct{ file, raw, want string }{
		{"tokenizer_config.json", `[]`, "not a JSON object"},
		{"tokenizer_config.json", `{"eos_token":7}`, "eos_token"},
		{"tokenizer_config.json", `{"eos_token":{"text":"a"}}`, "eos_token"},
		{"tokenizer_config.json", `{"extra_special_tokens":7}`, "cannot unmarshal"},
		{"tokenizer_config.json", `{"extra_special_tokens":[7]}`, "7 is neither"},
		{"tokenizer_config.json", `{"added_tokens_decoder":{"x":{}}}`, "added_tokens_decoder"},
		{"special_tokens_map.json", `{"pad_token":[]}`, "pad_token"},
		{"added_tokens.json", `{"a":"b"}`, "cannot unmarshal"},
	} {
		path := beside(t, map[string]json.RawMessage{tc.file: []byte(tc.raw)}, []byte(with("")))
		if _, err := Load(path); err == nil || !strings.Contains(err.Error(), tc.file) ||
			!strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s %s: %v", tc.file, tc.raw, err)
		}
	}
}
