package hf

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/safetensors"
)

// tensors returns the parameters of a model under the names of transformers.
func tensors(c *Config) []Tensor {
	e, d := c.HiddenSize, c.HeadDim
	q, kv := c.NumAttentionHeads*d, c.NumKeyValueHeads*d
	ts := []Tensor{{Name: "model.embed_tokens.weight", Shape: []int{c.VocabSize, e}}}
	for i := range c.NumHiddenLayers {
		p := fmt.Sprintf("model.layers.%d.", i)
		ts = append(ts, Tensor{Name: p + "input_layernorm.weight", Shape: []int{e}},
			Tensor{Name: p + "self_attn.q_proj.weight", Shape: []int{q, e}},
			Tensor{Name: p + "self_attn.k_proj.weight", Shape: []int{kv, e}},
			Tensor{Name: p + "self_attn.v_proj.weight", Shape: []int{kv, e}},
			Tensor{Name: p + "self_attn.o_proj.weight", Shape: []int{e, q}})
		if c.Architecture == Qwen3 {
			ts = append(ts, Tensor{Name: p + "self_attn.q_norm.weight", Shape: []int{d}},
				Tensor{Name: p + "self_attn.k_norm.weight", Shape: []int{d}})
		}
		ts = append(ts, Tensor{Name: p + "post_attention_layernorm.weight", Shape: []int{e}},
			Tensor{Name: p + "mlp.gate_proj.weight", Shape: []int{c.IntermediateSize, e}},
			Tensor{Name: p + "mlp.up_proj.weight", Shape: []int{c.IntermediateSize, e}},
			Tensor{Name: p + "mlp.down_proj.weight", Shape: []int{e, c.IntermediateSize}})
	}
	ts = append(ts, Tensor{Name: "model.norm.weight", Shape: []int{e}})
	if !c.TieWordEmbeddings {
		ts = append(ts, Tensor{Name: "lm_head.weight", Shape: []int{c.VocabSize, e}})
	}
	return ts
}

// fill gives every element a distinct value, exact in bfloat16.
func fill(t Tensor, off int64, dst []float32) error {
	seed := 0
	for _, b := range t.Name {
		seed = (seed*31 + int(b)) % 251
	}
	for i := range dst {
		dst[i] = float32((seed+7*(int(off)+i))%251-125) / 1024
	}
	return nil
}

func model(t testing.TB, name string, dtype safetensors.DType) Model {
	c, err := ReadConfig(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return Model{Config: c, DType: dtype, Tensors: tensors(c), Read: fill}
}

// weightsIn opens the weights of a directory until the end of the test.
func weightsIn(t testing.TB, dir string) *Weights {
	t.Helper()
	w, err := OpenWeights(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

// weightsOf writes a file of weights and opens it.
func weightsOf(t testing.TB, entries ...safetensors.Entry) *Weights {
	t.Helper()
	dir := t.TempDir()
	if err := safetensors.WriteFile(filepath.Join(dir, singleFile), nil, entries); err != nil {
		t.Fatal(err)
	}
	return weightsIn(t, dir)
}

func names(t testing.TB, dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestExportedWeightsAreReadBack(t *testing.T) {
	for _, tc := range []struct {
		config string
		dtype  safetensors.DType
		limit  int64
		files  int
	}{
		{"tiny-llama", safetensors.F32, ShardLimit, 2},
		{"qwen3-window", safetensors.BF16, ShardLimit, 2},
		{"qwen3", safetensors.F16, 20_000, 6},
		{"llama3-rope", safetensors.F32, 1, 2 + 3 + 9*3},
	} {
		t.Run(tc.config, func(t *testing.T) {
			m := model(t, tc.config, tc.dtype)
			dir := filepath.Join(t.TempDir(), "a", "out")
			if _, err := Export(dir, m, tc.limit); err != nil {
				t.Fatal(err)
			}
			if got := names(t, dir); len(got) != tc.files {
				t.Errorf("files %v, want %d", got, tc.files)
			}
			if got := names(t, filepath.Dir(dir)); len(got) != 1 {
				t.Errorf("left beside it: %v", got)
			}
			w := weightsIn(t, dir)
			if err := w.Check(m.Tensors); err != nil {
				t.Fatal(err)
			}
			for _, ts := range m.Tensors {
				want := make([]float32, ts.Size())
				_ = fill(ts, 0, want)
				got, part := make([]float32, len(want)), make([]float32, len(want)/3)
				if err := errors.Join(w.Read(ts, got, 0), w.Read(ts, part, 5)); err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(got, want) || !slices.Equal(part, want[5:5+len(part)]) {
					t.Errorf("%s differs", ts.Name)
				}
			}
			for _, f := range names(t, dir) {
				if st, _ := os.Stat(filepath.Join(dir, f)); strings.HasSuffix(f, ".safetensors") && tc.limit > 1 &&
					st.Size() > tc.limit+4096 {
					t.Errorf("%s has %d bytes", f, st.Size())
				}
			}
		})
	}
}

func TestExportLeavesOthersFilesAlone(t *testing.T) {
	m := model(t, "tiny-llama", safetensors.F32)
	dir := t.TempDir()
	if _, err := Export(dir, m, ShardLimit); err != nil {
		t.Fatalf("into an empty directory: %v", err)
	}
	if _, err := Export(dir, m, ShardLimit); err == nil || !strings.Contains(err.Error(), "has files in it") {
		t.Errorf("over an export: %v", err)
	}
	broken := errors.New("rank 3 is gone")
	m.Read = func(Tensor, int64, []float32) error { return broken }
	parent := t.TempDir()
	if _, err := Export(filepath.Join(parent, "out"), m, ShardLimit); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	if got := names(t, parent); len(got) != 0 {
		t.Errorf("left behind: %v", got)
	}
	m.DType = safetensors.F64
	if _, err := Export(filepath.Join(parent, "out"), m, ShardLimit); err == nil {
		t.Error("exported as F64")
	}
}

func TestExportBringsTheTokenizer(t *testing.T) {
	from, dir := dirOf(t, map[string]string{"tokenizer.json": "text of tokenizer.json", "generation_config.json": "text",
		"README.md": "text", "training_args.bin": "text"}), filepath.Join(t.TempDir(), "out")
	if err := os.Symlink("/etc/passwd", filepath.Join(from, "merges.txt")); err != nil {
		t.Fatal(err)
	}
	m := model(t, "tiny-llama", safetensors.F32)
	var err error
	sources := Sources{Model: from, Tokenizer: filepath.Join(from, "tokenizer.json")}
	if m.Companions, err = sources.Companions(); err == nil || !strings.Contains(err.Error(), "merges.txt") {
		t.Errorf("a link out of the directory: %v", err)
	}
	if _, err := Export(dir, m, ShardLimit); err != nil {
		t.Fatal(err)
	}
	if got, want := names(t, dir), []string{"config.json", "generation_config.json", "model.safetensors",
		"tokenizer.json"}; !slices.Equal(got, want) {
		t.Errorf("files %v, want %v", got, want)
	}
	if text, err := os.ReadFile(filepath.Join(dir, "tokenizer.json")); err != nil ||
		string(text) != "text of tokenizer.json" {
		t.Errorf("tokenizer.json is %q, %v", text, err)
	}
	sources.Model = filepath.Join(from, "none")
	if _, err := sources.Companions(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of no directory: %v", err)
	}
}

// An export has the tokenizer and the template of the run, and the run's EOS before that of the model.
func TestExportHasTheFilesOfTheRun(t *testing.T) {
	from, tok := dirOf(t, map[string]string{"generation_config.json": `{"eos_token_id":[2],"top_k":5}`,
		"tokenizer.json": "of the model"}), dirOf(t, map[string]string{"other.json": "of the run", "chat.jinja": "run's",
		"chat_template.jinja": "not this", "tokenizer.json": "tokens", "tokenizer_config.json": "settings"})
	for _, tc := range []struct {
		s    Sources
		want map[string]string
	}{
		{Sources{from, filepath.Join(tok, "tokenizer.json"), filepath.Join(tok, "chat.jinja")}, map[string]string{
			"tokenizer.json": "tokens", "tokenizer_config.json": "settings", "chat_template.jinja": "run's"}},
		{Sources{from, filepath.Join(tok, "tokenizer.json"), ""}, map[string]string{"tokenizer.json": "tokens",
			"chat_template.jinja": "not this"}},
		{Sources{from, filepath.Join(tok, "other.json"), ""}, map[string]string{"tokenizer.json": "of the run",
			"tokenizer_config.json": ""}},
	} {
		m := model(t, "tiny-llama", safetensors.F32)
		m.EOS = 7
		var err error
		if m.Companions, err = tc.s.Companions(); err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(t.TempDir(), "out")
		if _, err := Export(dir, m, ShardLimit); err != nil {
			t.Fatal(err)
		}
		for name, want := range tc.want {
			if text, _ := os.ReadFile(filepath.Join(dir, name)); string(text) != want {
				t.Errorf("%v: %s is %q, want %q", tc.s, name, text, want)
			}
		}
		if ends, err := Ends(dir); err != nil || !slices.Equal(ends, []int{7, 2}) {
			t.Errorf("generation ends at %v, %v", ends, err)
		}
	}
}

func TestChangedKeysOfTheConfig(t *testing.T) {
	from := filepath.Join("testdata", "tiny-llama")
	c := model(t, "tiny-llama", safetensors.F32).Config
	c.TokenIDs, c.DType = map[string]json.RawMessage{"eos_token_id": []byte("9")}, "bfloat16"
	if list, err := c.Changed(from); err != nil || len(list) != 0 {
		t.Errorf("%v, %v", list, err)
	}
	c.RopeTheta *= 2
	if list, err := c.Changed(from); err != nil || !slices.Contains(list, "rope_theta") {
		t.Errorf("%v, %v", list, err)
	}
}

func TestWrongWeightsAreNamedAllAtOnce(t *testing.T) {
	one := func(name string, n int) safetensors.Entry {
		return safetensors.Floats(name, safetensors.F32, []int{n}, make([]float32, n))
	}
	w := weightsOf(t,
		one("a.w", 2), one("b", 3), one("x", 1), one("a.y", 1), one("lm_head.weight", 1),
		one("a.z", 1), one("model.layers.0.self_attn.rotary_emb.inv_freq", 1),
		safetensors.Entry{Name: "i", DType: safetensors.I32, Shape: []int{1}, Data: func(w io.Writer) error {
			_, err := w.Write(make([]byte, 4))
			return err
		}},
	)
	err := w.Check([]Tensor{{Name: "a.w", Shape: []int{2}}, {Name: "b", Shape: []int{1, 3}},
		{Name: "c", Shape: []int{1}}, {Name: "d", Shape: []int{1}}, {Name: "i", Shape: []int{1}}})
	for _, want := range []string{
		`"b" [3] for [1 3]`, `"c" [1], "d" [1] are missing`, `"i" I32`, `"a.y", "a.z" are not in the model`,
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no %s in\n%v", want, err)
		}
	}
	if err != nil && (strings.Count(err.Error(), "\n") != 3 || strings.Count(err.Error(), w.path) != 1) {
		t.Errorf("other faults than expected, or a path more than once:\n%v", err)
	}
	if err := w.Read(Tensor{Name: "a.w", Shape: []int{3}}, make([]float32, 3), 0); err == nil {
		t.Error("read with a wrong shape")
	}
	if err := w.Check([]Tensor{{Name: "b", Shape: []int{3}}}); err != nil ||
		!strings.Contains(w.Note(), `5 tensors ("a.w", "a.y", "a.z" and 2 more)`) {
		t.Errorf("tensors beside the model: %q, %v", w.Note(), err)
	}
}

// The head of a tied model may be in its files, if it equals the embeddings.
func TestATiedHeadEqualsTheEmbeddings(t *testing.T) {
	want := []Tensor{{Name: "model.embed_tokens.weight", Shape: []int{2, 2}}}
	for _, last := range []float32{4, 5} {
		w := weightsOf(t,
			safetensors.Floats("model.embed_tokens.weight", safetensors.F32, []int{2, 2}, []float32{1, 2, 3, 4}),
			safetensors.Floats("lm_head.weight", safetensors.F32, []int{2, 2}, []float32{1, 2, 3, last}))
		err := w.Check(want)
		if tied := last == 4; tied != (err == nil) || !tied && !strings.Contains(err.Error(), "model.tie_word_embeddings") {
			t.Errorf("the last elements are 4 and %v: %v", last, err)
		}
		w.Close()
	}
}

// Of hundreds of wrong tensors the error names the first and counts the rest.
func TestManyWrongTensors(t *testing.T) {
	w := weightsOf(t, safetensors.Floats("a", safetensors.F32, []int{1}, []float32{1}))
	var want []Tensor
	for i := range 400 {
		want = append(want, Tensor{Name: fmt.Sprintf("layer.%03d", i), Shape: []int{4}})
	}
	err := w.Check(want)
	if err == nil || strings.Count(err.Error(), "\n") > 2 || !strings.Contains(err.Error(), "400 tensors") ||
		!strings.Contains(err.Error(), `"layer.002"`) || !strings.Contains(err.Error(), "397 more") {
		t.Errorf("%v", err)
	}
}

// The error for a directory without a model describes its content.
func TestWhatIsNoModel(t *testing.T) {
	const pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4096\n"
	for name, file := range map[string][2]string{
		"weights": {singleFile, pointer}, "config": {"config.json", pointer}, "adapter": {"adapter_config.json", "{}"},
	} {
		dir := dirOf(t, map[string]string{file[0]: file[1]})
		_, errConfig := ReadConfig(dir)
		_, errWeights := OpenWeights(dir)
		err, want := errConfig, []string{"git-lfs pointer", "git lfs pull", file[0]}
		if name == "weights" {
			err = errWeights
		} else if name == "adapter" {
			want = []string{"LoRA adapter", "adapter_config.json"}
		}
		for _, w := range want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v does not say %q", name, err, w)
			}
		}
	}
}

// A NaN or infinite weight is reported with its file and place.
func TestSpoiltWeights(t *testing.T) {
	for _, x := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		for _, dtype := range []safetensors.DType{safetensors.F32, safetensors.BF16, safetensors.F64} {
			w := weightsOf(t, safetensors.Floats("norm", dtype, []int{4}, []float32{1, 2, float32(x), 4}))
			if err := w.Read(Tensor{Name: "norm", Shape: []int{4}}, make([]float32, 3), 1); err == nil ||
				!strings.Contains(err.Error(), `"norm"`) || !strings.Contains(err.Error(), "element 2") ||
				!strings.Contains(err.Error(), singleFile) {
				t.Errorf("%v in %s: %v", x, dtype, err)
			}
			if err := w.Read(Tensor{Name: "norm", Shape: []int{4}}, make([]float32, 2), 0); err != nil {
				t.Errorf("a rank without it: %v", err)
			}
		}
	}
}

// A file holds tensors up to its limit, and not a byte more.
func TestFilesAreFilled(t *testing.T) {
	m := Model{DType: safetensors.F32, Tensors: []Tensor{{Name: "a", Shape: []int{2}}, {Name: "b", Shape: []int{3}},
		{Name: "c", Shape: []int{4}}}}
	for limit, want := range map[int64]int{36: 1, 35: 2, 28: 2, 20: 2, 19: 3} {
		if got := len(m.shards(limit)); got != want {
			t.Errorf("limit %d: %d files, want %d", limit, got, want)
		}
	}
}

func TestIndexMustAgreeWithShards(t *testing.T) {
	m := model(t, "tiny-llama", safetensors.F32)
	good := filepath.Join(t.TempDir(), "m")
	if _, err := Export(good, m, 200_000); err != nil {
		t.Fatal(err)
	}
	shard := "model-00001-of-00003.safetensors"
	for _, tc := range []struct {
		name, from, to, want string
	}{
		{"path escape", shard, "../" + shard, `"../` + shard + `" is not a plain file name`},
		{"absolute", shard, "/etc/passwd", "is not a plain file name"},
		{"up", shard, "..", "is not a plain file name"},
		{"missing shard", shard, "none.safetensors", `"model.embed_tokens.weight" [256 64] (of none.safetensors)`},
		{"no map", "weight_map", "weights", "weight_map: missing or empty"},
		{"bad JSON", "{", "[", "cannot unmarshal"},
		{"not safetensors", shard, "config.json", "safetensors file"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.CopyFS(dir, os.DirFS(good)); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, indexFile)
			raw, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			text := strings.ReplaceAll(string(raw), tc.from, tc.to)
			if tc.name == "bad JSON" {
				text = "[]"
			}
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			w, err := OpenWeights(dir)
			if err == nil {
				err = w.Check(m.Tensors)
				w.Close()
			}
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

func TestLinksMayNotLeadOutOfTheDirectory(t *testing.T) {
	m := model(t, "tiny-llama", safetensors.F32)
	real := filepath.Join(t.TempDir(), "m")
	if _, err := Export(real, m, ShardLimit); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, f := range []string{singleFile, "config.json"} {
		if err := os.Symlink(filepath.Join(real, f), filepath.Join(dir, f)); err != nil {
			t.Fatal(err)
		}
	}
	if w, err := OpenWeights(dir); err == nil {
		w.Close()
		t.Error("weights behind a link out of the directory were opened")
	}
	if _, err := ReadConfig(dir); err == nil {
		t.Error("config behind a link out of the directory was opened")
	}

	// The cache of huggingface_hub: snapshots/<revision>/file -> ../../blobs/<hash>.
	repo := t.TempDir()
	snapshot := filepath.Join(repo, "snapshots", "abc")
	if err := errors.Join(os.MkdirAll(snapshot, 0o700),
		os.CopyFS(filepath.Join(repo, "blobs"), os.DirFS(real))); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{singleFile, "config.json"} {
		if err := os.Symlink(filepath.Join("..", "..", "blobs", f), filepath.Join(snapshot, f)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := ReadConfig(snapshot); err != nil {
		t.Error(err)
	}
	w := weightsIn(t, snapshot)
	if err := w.Check(m.Tensors); err != nil {
		t.Error(err)
	}
}

func TestDirectoryWithoutWeights(t *testing.T) {
	dir := t.TempDir()
	if _, err := OpenWeights(dir); err == nil || !strings.Contains(err.Error(), "neither model.safetensors nor") {
		t.Errorf("got %v", err)
	}
	dir = dirOf(t, map[string]string{"pytorch_model.bin": ""})
	if _, err := OpenWeights(dir); err == nil || !strings.Contains(err.Error(), "pickle") {
		t.Errorf("got %v", err)
	}
	if _, err := OpenWeights(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	if err := os.Mkdir(filepath.Join(dir, singleFile), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenWeights(dir); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("got %v", err)
	}
}
