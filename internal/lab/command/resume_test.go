package command

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/run/train"
)

// A resume compares the data, the tokenizer and the template by content: their paths may change.
func TestResumesCompareTheData(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		must.Do(t, os.WriteFile(path, []byte(text), 0o666))
		return path
	}
	text := strings.Repeat("to be or not to be ", 20)
	a, moved, longer := write("a.txt", text), write("b.txt", text), write("c.txt", text+text)
	one, two := write("one.jinja", "{{ messages }}"), write("two.jinja", "{{ messages }}")
	other := write("three.jinja", "{{ messages }}!")
	load := func(path, template string, set ...string) *ready {
		t.Helper()
		yaml := fmt.Sprintf("model: {vocab_size: 257, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, "+
			"num_attention_heads: 1}\ndata: {path: %s, chat_template: %s, seq_len: 8}\ntrain: {steps: 9}\n", path, template)
		cfg := must.Have(config.Load(write("train.yaml", yaml), config.Options{Ranks: 1, Device: "cpu", Set: set}))
		found := must.Have(train.Check(cfg))
		id := must.Have(train.Identify(cfg, found))
		return &ready{cfg: cfg, files: id}
	}
	saved := func(path string, set ...string) *checkpoint.Checkpoint {
		was := load(path, one, set...)
		text := must.Have(json.Marshal(was.files))
		return &checkpoint.Checkpoint{Dir: dir, Manifest: &checkpoint.Manifest{Meta: checkpoint.Meta{Step: 2, Samples: 2,
			Config: string(was.cfg.YAML()), Extra: map[string]json.RawMessage{train.DataState: text}}}}
	}
	c := saved(a)
	check := func(what string, c *checkpoint.Checkpoint, now *ready, want ...string) {
		t.Helper()
		notes := must.Have(compare(c, now.cfg, now.files))
		text := strings.Join(notes, "\n")
		if len(want) == 0 && text != "" || strings.Count(text, "warning") != min(1, len(want)) {
			t.Errorf("%s: %q", what, text)
		}
		for _, word := range want {
			if !strings.Contains(text, word) {
				t.Errorf("%s: %q, want %q", what, text, word)
			}
		}
	}
	check("the same", c, load(a, one))
	check("moved", c, load(moved, two))
	check("longer", c, load(longer, one), longer, "not", "resuming at sample 2", "may repeat")
	check("another template", c, load(moved, other), "data.chat_template is ")
	check("another batch", c, load(moved, one, "train.global_batch_size=2"), "train.global_batch_size is 1")
	must.Do(t, os.Remove(a))
	check("moved, the old ones gone", c, load(moved, two))
	write("one.jinja", "{{ messages }}?")
	check("the template replaced", c, load(moved, one), "template")
	mixed := saved("[{path: " + moved + ", weight: 2}, {path: " + longer + ", weight: 1}]")
	check("another weight", mixed, load("[{path: "+moved+", weight: 1}, {path: "+longer+", weight: 1}]", one), "data.path is")
	delete(c.Manifest.Extra, train.DataState)
	check("a checkpoint without a record of its data", c, load(moved, one), "data.path is")
}
