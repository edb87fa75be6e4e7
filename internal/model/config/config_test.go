package config

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/ring"
)

const leastModel = "model: {vocab_size: 256, hidden_size: 64, intermediate_size: 160, num_hidden_layers: 2, num_attention_heads: 6, num_key_value_heads: 2, head_dim: 16}\n"

// parsed loads the least model with further sections, without files.
func parsed(sections string, o Options) (*Config, error) {
	o.NoFiles = true
	return load("t.yaml", []byte(leastModel+"data: {path: a.txt}\n"+sections), o, osDisk)
}

func write(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestPaths checks the order of directories: that of the file comes before the working directory, and after it for a
// flag. Brackets in the name of a directory or a file are no pattern.
func TestPaths(t *testing.T) {
	dir := t.TempDir()
	work, home := filepath.Join(dir, "work"), filepath.Join(dir, "run[1]")
	for _, f := range []string{"run[1]/both.txt", "work/both.txt", "work/only.txt", "run[1]/odd[2].txt",
		"run[1]/a{3}.txt", "run1/odd2.txt", "run[1]/star/a.txt"} {
		write(t, filepath.Join(dir, f), "text")
	}
	t.Chdir(work)
	tests := []struct{ path, flag, want string }{
		{"both.txt", "", `run\[1]/both.txt`},
		{"only.txt", "", "work/only.txt"},
		{"odd[2].txt", "", `run\[1]/odd\[2].txt`},
		{"a{3}.txt", "", `run\[1]/a\{3\}.txt`},
		{"star/*.txt", "", `run\[1]/star/*.txt`},
		{"only.txt", "both.txt", "work/both.txt"},
		{"only.txt", "star/?.txt", `run\[1]/star/?.txt`},
		{"only.txt", filepath.Join(dir, "run1", "*"), "run1/*"},
	}
	for _, tt := range tests {
		file := write(t, filepath.Join(home, "train.yaml"), leastModel+"data: {path: \""+tt.path+"\"}\n")
		var opts Options
		if tt.flag != "" {
			opts.Set = []string{"data.path=" + tt.flag}
		}
		for _, name := range []string{file, "../run[1]/train.yaml"} {
			c, err := Load(name, opts)
			if err != nil {
				t.Errorf("Load(%s) with path %s, flag %s: %v", name, tt.path, tt.flag, err)
				continue
			}
			if want := filepath.Join(dir, tt.want); c.Data.Path[0].Path != want {
				t.Errorf("Load(%s) with path %s, flag %s: data.path %v, want %s", name, tt.path, tt.flag, c.Data.Path,
					want)
			}
			if m, err := files.Glob(c.Data.Path[0].Path); err != nil || len(m) != 1 {
				t.Errorf("%s matches %q, %v, want one file", c.Data.Path[0].Path, m, err)
			}
		}
	}
}

// TestFilesElsewhere loads a resolved config on a machine without its model and data.
func TestFilesElsewhere(t *testing.T) {
	c, err := Load("testdata/from_rope.good.yaml", Options{Ranks: 1})
	if err != nil {
		t.Fatal(err)
	}
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	moved := strings.ReplaceAll(string(c.YAML()), here, "/nowhere")
	file := write(t, filepath.Join(t.TempDir(), "config.yaml"), moved)
	again, err := Load(file, Options{NoFiles: true})
	if err != nil {
		t.Fatal(err)
	}
	if got := string(again.YAML()); got != moved {
		t.Errorf("got\n%s\nwant\n%s", got, moved)
	}
	var list Errors
	if _, err := Load(file, Options{}); !errors.As(err, &list) || len(list) != 2 {
		t.Errorf("Load without NoFiles: %v, want faults of model.from and data.path", err)
	}
}

func TestLoadUnreadable(t *testing.T) {
	big := write(t, filepath.Join(t.TempDir(), "big.yaml"), strings.Repeat("# a comment\n", MaxFile/12+1))
	for _, path := range []string{"testdata/absent.yaml", "testdata", big} {
		_, err := Load(path, Options{})
		var list Errors
		if !errors.As(err, &list) || len(list) != 1 || list[0].File != path {
			t.Errorf("Load(%s) = %v, want one fault of the file", path, err)
		}
	}
}

func TestManyFaults(t *testing.T) {
	_, err := parsed(strings.Repeat("? x\n: 1\n", 300), Options{})
	var list Errors
	if !errors.As(err, &list) || len(list) != maxFaults+1 || !strings.HasPrefix(list[maxFaults].Msg, "200 more") {
		t.Errorf("got %d faults, the last %v", len(list), list[len(list)-1])
	}
}

func TestResolve(t *testing.T) {
	shared := func(context, data int, with ...func(*Parallel)) Parallel {
		p := Parallel{Context: context, Data: data, Transport: "auto",
			Strategy: ring.Strategy{Algorithm: "ring", Layout: "zigzag", Gather: "auto", Backend: "auto"}}
		for _, change := range with {
			change(&p)
		}
		return p
	}
	groups := func(inner int) func(*Parallel) {
		return func(p *Parallel) { p.Algorithm, p.Inner = "hierarchical", inner }
	}
	tests := []struct {
		name, yaml, device string
		ranks              int
		want               Parallel
		chunk              int
		fault              string
	}{
		{"one rank", "", "", 1, shared(1, 1), 1024, ""},
		{"all ranks share", "", "cpu", 3, shared(3, 1), 1024, ""},
		{"context given", "parallel: {context: 2}\ntrain: {global_batch_size: 4, micro_batch_size: 2}", "cpu", 4,
			shared(2, 2), 1024, ""},
		{"data given", "parallel: {data: 2, algorithm: allgather, layout: striped}\ntrain: {global_batch_size: 2}",
			"cpu", 8, shared(4, 2, func(p *Parallel) { p.Algorithm, p.Layout = "allgather", "striped" }), 1024, ""},
		{"both given", "parallel: {context: 1, data: 2}\ntrain: {global_batch_size: 2}\nmemory: {loss_chunk: 7}", "cpu",
			2, shared(1, 2), 7, ""},
		{"heads are traded", "parallel: {algorithm: ulysses}", "cpu", 3,
			shared(3, 1, func(p *Parallel) { p.Algorithm = "ulysses" }), 1024, ""},
		{"groups", "parallel: {algorithm: hierarchical}", "cpu", 8, shared(8, 1, groups(2)), 512, ""},
		{"groups given", "parallel: {algorithm: hierarchical, ulysses_degree: 3, data: 2}\ntrain: {global_batch_size: 2}",
			"cpu", 12, shared(6, 2, groups(3)), 683, ""},
		{"more ranks than cuts", "", "cpu", 5000, shared(5000, 1), 1, ""},
		{"batch", "parallel: {data: 2}", "cpu", 2, Parallel{}, 0,
			"train.global_batch_size: 1 is not a multiple of micro_batch_size 1 x parallel.data 2; take 2"},
		{"product", "parallel: {data: 2, context: 2}", "cpu", 8, Parallel{}, 0,
			"parallel.context: context 2 x data 2 is 4, but the number of ranks is 8"},
		{"bf16", "precision: {compute: bf16, kv_wire: bf16}", "cpu", 1, shared(1, 1), 1024, ""},
		{"fp16 on CUDA", "precision: {compute: fp16}\nattention: {backend: fused}", "cuda", 2,
			shared(2, 1, func(p *Parallel) { p.Backend = "fused" }), 0, ""},
		{"bf16 wire, one rank", "precision: {grad_wire: bf16}", "cpu", 1, shared(1, 1), 1024, ""},
		{"bf16 wire", "precision: {grad_wire: bf16}\nmemory: {shard: none}", "cuda", 2, Parallel{}, 0,
			"precision.grad_wire: bf16 needs ranks that sum parts of the gradients"},
	}
	for _, tt := range tests {
		c, err := parsed(tt.yaml, Options{})
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		err = c.Resolve(tt.ranks, tt.device)
		if tt.fault != "" {
			if err == nil || !strings.Contains(err.Error(), tt.fault) || !strings.HasPrefix(err.Error(), "t.yaml:") {
				t.Errorf("%s: error %v, want %s", tt.name, err, tt.fault)
			}
			continue
		}
		if err != nil || c.Parallel != tt.want || c.Memory.LossChunk != tt.chunk {
			t.Errorf("%s: %v, %+v, loss_chunk %d, want %+v, %d", tt.name, err, c.Parallel, c.Memory.LossChunk, tt.want,
				tt.chunk)
		}
		// Resolve leaves the backend to package backend, which knows the GPU and its libraries. On a GPU it leaves keys
		// that depend on memory to package plan. The kinds of absent files are unknown.
		text := strings.NewReplacer("backend: auto", "", "deadline: auto", "", "transport: auto", "",
			"ulysses_degree: auto", "", "gather: auto", "", "format: auto", "",
			"pack_documents: auto", "", "overlong: auto", "", "async: auto", "", "every: auto", "").
			Replace(string(c.YAML())) // deadline depends on step times
		if tt.device == "cuda" {
			text = strings.NewReplacer("recompute: auto", "", "loss_chunk: auto", "", "shard: auto", "", "offload: auto",
				"").Replace(text)
		}
		if strings.Contains(text, "auto") {
			t.Errorf("%s: an auto is left:\n%s", tt.name, c.YAML())
		}
	}
}

// A given value that has no effect on these ranks stays, and a warning says so.
func TestIdleValuesAreReported(t *testing.T) {
	for _, c := range []struct {
		section, value, device string
		ranks                  int
		want                   string
	}{
		{"memory", "shard: gradients", "cpu", 1, "memory.shard: gradients has no effect on 1 rank"},
		{"memory", "shard: gradients", "cuda", 1, "memory.shard: gradients has no effect on 1 rank"},
		{"memory", "shard: gradients", "cuda", 2, ""},
		{"memory", "shard: none", "cuda", 1, ""},
		{"memory", "offload: activations", "cpu", 2, "memory.offload: activations saves nothing on a CPU"},
		{"memory", "offload: both", "cuda", 1, ""},
		{"memory", "offload: off", "cpu", 2, ""},
		{"precision", "grad_wire: bf16", "cpu", 1, "precision.grad_wire: bf16 has no effect on 1 rank; write fp32"},
		{"precision", "grad_wire: bf16", "cpu", 2, ""},
		{"precision", "grad_wire: fp32", "cpu", 1, ""},
		{"memory", "reserve: auto", "cpu", 1, ""},
	} {
		cfg, err := parsed(c.section+": {"+c.value+"}", Options{Ranks: c.ranks, Device: c.device})
		if err != nil {
			t.Fatal(err)
		}
		warned := ""
		for _, w := range cfg.Warnings {
			warned += w.String()
		}
		if c.want == "" && warned != "" || !strings.Contains(warned, c.want) ||
			!strings.Contains(string(cfg.YAML()), c.value) && c.value != "reserve: auto" {
			t.Errorf("%s on %d ranks, %s: %q\n%s", c.value, c.ranks, c.device, warned, cfg.YAML())
		}
	}
}

// TestMapIsYAML checks that the JSON and the YAML of a config have the same keys and values.
func TestMapIsYAML(t *testing.T) {
	for _, file := range testFiles(t, "*.good.yaml", 10) {
		c, err := Load(file, readCase(t, file).opts)
		if err != nil {
			t.Fatal(err)
		}
		var fromYAML any
		if err := yaml.Unmarshal(c.YAML(), &fromYAML); err != nil {
			t.Fatal(err)
		}
		var plain [2]any
		for i, v := range []any{c.Map(), fromYAML} { // patterns have an order in JSON, which is not compared
			text, err := json.Marshal(v)
			if err == nil {
				err = json.Unmarshal(text, &plain[i])
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if !reflect.DeepEqual(plain[0], plain[1]) {
			t.Errorf("%s: JSON\n%v\nYAML\n%v", file, plain[0], plain[1])
		}
	}
}

// TestTable checks the table of keys: every default is valid, every field has one key, and every name from another
// trainer leads to a key without hiding one.
func TestTable(t *testing.T) {
	fields := map[any]string{}
	c := blankConfig()
	for i := range keys {
		k := &keys[i]
		if section, _ := split(k.path); !isSection[section] {
			t.Errorf("%s is in no section of the table", k.path)
		}
		field := k.at(c)
		if other := fields[field]; other != "" {
			t.Errorf("%s and %s have one field", k.path, other)
		}
		fields[field] = k.path
		if k.doc == "" || k.wanted() == "" || k.max < k.min {
			t.Errorf("%s: doc %q, kind %q, bounds %d to %d", k.path, k.doc, k.wanted(), k.min, k.max)
		}
		if k.def == "" {
			continue
		}
		n, err := parseValue(k.def)
		if err == nil {
			err = k.decode(n, c)
		}
		if err != nil {
			t.Errorf("%s: default %s: %v", k.path, k.def, err)
		}
	}
	if got, want := len(fields), countFields(reflect.TypeFor[Config]()); got != want {
		t.Errorf("%d keys for %d fields of Config", got, want)
	}
	for n, target := range meanings {
		if len(keysNamed[n]) > 0 {
			t.Errorf("%s is a name of ours, %v", n, keysNamed[n])
		}
		msg, meant := unknownKey("", n)
		switch isKey := keyAt[target] != nil || isSection[target]; {
		case isKey && !slices.Equal(meant, []string{target}) || !strings.Contains(msg, target):
			t.Errorf("%s: %s, want %s", n, msg, target)
		case !isKey && !strings.HasPrefix(target, "--") && len(strings.Fields(target)) < 4:
			t.Errorf("%s leads to %s, which is no key", n, target)
		}
	}
	for _, name := range foreignSections {
		if isSection[name] {
			t.Errorf("%s is a section of ours", name)
		}
	}
	for from, to := range renames {
		if keyAt[from] != nil || keyAt[to] == nil && !isSection[to] {
			t.Errorf("%s is read as %s", from, to)
		}
	}
}

// countFields counts the fields that train.yaml can set. TokenIDs, Wrapper and others come from a directory alone.
func countFields(of reflect.Type) int {
	n := 0
	for f := range of.Fields() {
		kind := f.Type
		switch {
		case !f.IsExported() ||
			slices.Contains([]string{"Warnings", "TokenIDs", "Wrapper", "DType", "PackDocuments",
				"FileVocab", "Unties", "FusedExperts", "Unused"}, f.Name):
			continue
		case kind.Kind() == reflect.Pointer && kind.Elem().Kind() == reflect.Struct:
			kind = kind.Elem()
		}
		if kind.Kind() == reflect.Struct && kind != reflect.TypeFor[hf.Modules]() {
			n += countFields(kind)
		} else {
			n++
		}
	}
	return n
}

func TestParseSize(t *testing.T) {
	good := map[string]int64{"0": 0, "7": 7, "4096": 4096, "1_000_000": 1000000, "128K": 131072, "1M": 1 << 20,
		"2G": 2 << 30, "2T": 2 << 40, "1_024K": 1 << 20,
		"9223372036854775807": 1<<63 - 1, "0K": 0}
	for s, want := range good {
		if got, err := ParseSize(s); err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v, want %d", s, got, err, want)
		}
	}
	bad := map[string]string{"": "not an integer", "K": "not an integer", "010": "write 10", "00": "write 0",
		"010K": "write 10K", "0x10": "not decimal",
		"0o17": "not decimal", "0b1": "not decimal", "1e3": "write 1000", "4096.0": "write 4096",
		"1.5": "not an integer", "-1": "negative", "-0.5": "negative",
		"+1": "write 1", "128k": "write 128K", "1MB": "write 1M", "4 GiB": "write 4G", "1TB": "write 1T",
		"9007199254740992G":   "too large",
		"9223372036854775808": "too large", "_1": "not an integer", "1_": "not an integer", "1__0": "not an integer",
		"١": "not an integer", "1K ": "not an integer"}
	for s, want := range bad {
		if got, err := ParseSize(s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("ParseSize(%q) = %d, %v, want an error with %q", s, got, err, want)
		}
	}
}

func TestParseTime(t *testing.T) {
	good := map[string]time.Duration{"0": 0, "0s": 0, "30s": 30 * time.Second, "15m": 15 * time.Minute,
		"1h30m": 90 * time.Minute, "2h": 2 * time.Hour, "1.5s": 1500 * time.Millisecond}
	for s, want := range good {
		got, err := ParseTime(s)
		if err != nil || got != want {
			t.Errorf("parseTime(%q) = %v, %v, want %v", s, got, err, want)
		}
		if again, err := ParseTime(FormatTime(got)); err != nil || again != got {
			t.Errorf("%v is written %q and read %v, %v", got, FormatTime(got), again, err)
		}
	}
	bad := map[string]string{"": "not a time", "15": "write 15s, 15m or 15h", "-3s": "negative", "3 s": "not a time",
		"5d": "not a time", "20000h": "the most is 10000h", "9999999999h": "not a time"}
	for s, want := range bad {
		if got, err := ParseTime(s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("parseTime(%q) = %v, %v, want an error with %q", s, got, err, want)
		}
	}
	for d, want := range map[time.Duration]string{0: "0s", 15 * time.Minute: "15m", 2 * time.Hour: "2h",
		90 * time.Minute: "1h30m", time.Hour + time.Second: "1h0m1s", 10 * time.Second: "10s",
		20 * time.Minute: "20m"} {
		if got := FormatTime(d); got != want {
			t.Errorf("formatTime(%v) = %q, want %q", int64(d), got, want)
		}
	}
}

func TestNearest(t *testing.T) {
	choices := []string{"zigzag", "striped", "contiguous", "document", "auto", "bf16", "fp32"}
	for word, want := range map[string]string{"zigzag": "zigzag", "ZigZag": "zigzag", "zig-zag": "zigzag",
		"stripe": "striped", "contigous": "contiguous",
		"documents": "document", "atuo": "auto", "bfloat16": "", "b16": "bf16", "": "", "x": "", "completely": "",
		strings.Repeat("zigzag", 20): ""} {
		if got := Nearest(word, choices); got != want {
			t.Errorf("nearest(%q) = %q, want %q", word, got, want)
		}
	}
	for _, d := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"a", "", 1}, {"", "ab", 2}, {"trian", "train", 1}, {"kitten", "sitting", 3}, {"abc", "abc", 0}} {
		if got := distance(d.a, d.b); got != d.want || distance(d.b, d.a) != got {
			t.Errorf("distance(%q, %q) = %d, want %d", d.a, d.b, got, d.want)
		}
	}
}

// A config written by cprun may be read with keys that have no effect; cprun does not write such keys itself.
func TestKeptConfigs(t *testing.T) {
	text, err := os.ReadFile("testdata/least.good.yaml")
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Set: []string{"parallel={algorithm: ring, inner: 2, gather_heads: 1, gather: beside}"}, NoFiles: true,
		Ranks: 2}
	if _, err := Parse("testdata/config.yaml", text, o); err != nil {
		t.Error(err)
	}
	for algorithm, want := range map[string]string{"ring": "auto", "allgather": "beside"} {
		cfg, err := Parse("testdata/config.yaml", text,
			Options{Set: []string{"parallel.algorithm=" + algorithm}, Ranks: 4, Hosts: 2})
		if err != nil || cfg.Parallel.Gather != want {
			t.Errorf("%s over two hosts: gather %q, %v, want %q", algorithm, cfg.Parallel.Gather, err, want)
		}
	}
}
