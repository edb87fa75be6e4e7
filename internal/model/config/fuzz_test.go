package config

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/model/hf"
)

// fuzzDisk returns an in-memory file system, so that fuzzed configs do not walk the real one.
func fuzzDisk() disk {
	model := &hf.Config{Architecture: "llama", VocabSize: 256, HiddenSize: 64, IntermediateSize: 160,
		NumHiddenLayers:   2,
		NumAttentionHeads: 4, NumKeyValueHeads: 2, HeadDim: 16, RopeTheta: 10000, RMSNormEps: 1e-5,
		MaxPositionEmbedding: 1024,
		InitializerRange:     0.02, LayerTypes: []string{},
		RopeScaling: &hf.RopeScaling{Type: "linear", Factor: 2}}
	// Files by path, nil; directories with their model.
	tree := map[string]*hf.Config{"/work/hf": model, "/cfg/hf": model, "/cfg/text.txt": nil, "/cfg/tokens.bin": nil,
		"/work/tokens.bin":  nil,
		"/cfg/corpus/a.txt": nil, "/cfg/corpus/b.jsonl": nil, "/cfg/megatron/m.bin": nil, "/cfg/megatron/m.idx": nil,
		"/cfg/odd[1].txt": nil}
	return disk{
		isDir:  func(path string) bool { return tree[path] != nil },
		isFile: func(path string) bool { c, ok := tree[path]; return ok && c == nil },
		glob: func(pattern string) (matches []string, err error) {
			for path := range tree {
				ok, err := filepath.Match(pattern, path)
				if err != nil {
					return nil, err
				}
				if ok {
					matches = append(matches, path)
				}
			}
			return matches, nil
		},
		kind:        func(path, format string) (string, error) { return "", nil },
		workDir:     func() (string, error) { return "/work", nil },
		eos:         func(_, _ string) (hf.EOS, error) { return hf.EOS{ID: -1}, nil },
		readAdapter: func(string) (*hf.LoRA, error) { return &hf.LoRA{R: 4, Alpha: 8}, nil },
		locate:      func(string) (string, error) { return "", nil },
		readConfig: func(dir string) (*hf.Config, error) {
			c := *tree[dir]
			return &c, nil
		},
	}
}

// FuzzLoad checks, for any file and flag, that Load returns faults or a valid config that survives a round trip.
func FuzzLoad(f *testing.F) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) == 0 {
		f.Fatal(files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text, "", 4, false)
	}
	least, err := os.ReadFile("testdata/least.good.yaml")
	if err != nil {
		f.Fatal(err)
	}
	for _, set := range []string{"train.steps=1K", "model.from=hf", "data.path=odd[1].txt",
		"model.rope_scaling={type: yarn, factor: 2, original_max_position_embeddings: 9}",
		"model.rope_scaling.mscale=0", "log.prometheus=:1", "optimizer.betas=[0,0]", "=", "a.b.c=1",
		"model.rope_scaling=null", "optimizer.lr=-0.0", "\x9d.\xff=\xfe", "\xff\x00t\xc7.="} {
		f.Add(least, set, 6, true)
	}
	disk := fuzzDisk()
	f.Fuzz(func(t *testing.T, text []byte, set string, ranks int, cuda bool) {
		opts := Options{Ranks: ranks}
		if cuda {
			opts.Device = "cuda"
		}
		if set != "" {
			opts.Set = []string{set}
		}
		cfg, err := load("/cfg/train.yaml", text, opts, disk)
		if err != nil {
			checkFaults(t, err)
			return
		}
		again, err := load("/run/config.yaml", cfg.YAML(), Options{}, disk)
		if err != nil {
			t.Fatalf("written config: %v\n%s", err, cfg.YAML())
		}
		if !again.Equal(cfg) {
			t.Fatalf("written config is another:\n%s\nwant\n%s", again.YAML(), cfg.YAML())
		}
		if faults := again.Model.Check(); len(faults) > 0 {
			t.Fatalf("model: %v", faults)
		}
		if _, err := json.Marshal(cfg.Map()); err != nil {
			t.Fatal(err)
		}
		if p := cfg.Parallel; ranks > 0 && p.Context*p.Data != ranks {
			t.Fatalf("context %d x data %d, want %d", p.Context, p.Data, ranks)
		}
	})
}

// checkFaults checks the form of an error: sorted faults of one line, each with a place and a message.
func checkFaults(t *testing.T, err error) {
	t.Helper()
	var list Errors
	if !errors.As(err, &list) || len(list) == 0 || len(list) > maxFaults+1 {
		t.Fatalf("error %T with %d faults", err, len(list))
	}
	last := 0
	for _, fault := range list {
		if fault.File == "" || fault.Msg == "" || strings.ContainsAny(fault.String(), "\n\r\x00") {
			t.Errorf("fault %q", fault)
		}
		if fault.Line > 0 && fault.Line < last || fault.Line == 0 && !strings.HasPrefix(fault.File, "--set") {
			t.Errorf("fault %q is out of order", fault)
		}
		last = max(last, fault.Line)
	}
}

// FuzzSize checks that a parsed size has the value of its digits and survives a round trip.
func FuzzSize(f *testing.F) {
	for _, s := range []string{"0", "1", "4096", "128K", "1M", "2G", "1_000", "010", "0x10", "1e3", "-1", "+1", "1k",
		"1KiB", "9223372036854775807",
		"9223372036854775808", "8589934591G", "8589934592G", "", "K", "_1", "1_", "1__0", "1.5", "٣", "1 K", "1T",
		"00K"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		v, err := ParseSize(s)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\n\x00") || len(err.Error()) > 1000 {
				t.Fatalf("ParseSize(%q): %q", s, err)
			}
			return
		}
		if v < 0 {
			t.Fatalf("ParseSize(%q) = %d", s, v)
		}
		if again, err := ParseSize(jsonInt(v)); err != nil || again != v {
			t.Fatalf("ParseSize(%q) = %d, and of its digits %d, %v", s, v, again, err)
		}
	})
}

func jsonInt(v int64) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(b)
}
