package command

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/hf"
)

func TestCheckLocal(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		local string
		vocab int
		hosts int    // 0: not known
		want  string // "": nothing is wrong
	}{
		{"", 1 << 40, 1, ""},
		{dir, 256, 0, ""},
		{filepath.Join(dir, "made", "later"), 256, 2, ""},
		{file, 256, 1, "is a file"},
		{dir, 1 << 40, 1, "checkpoint.local: "},
		{dir, 1 << 40, 1 << 40, ""},
	} {
		cfg := &config.Config{Checkpoint: config.Checkpoint{Local: c.local}}
		cfg.Model.Config = hf.Config{Architecture: "llama", VocabSize: c.vocab, HiddenSize: 64, IntermediateSize: 64,
			NumHiddenLayers: 1, NumAttentionHeads: 1, NumKeyValueHeads: 1, HeadDim: 64}
		err := checkLocal(cfg, c.hosts)
		var input *InputError
		if c.want == "" && err != nil || c.want != "" && (!errors.As(err, &input) ||
			!strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
