package main

import (
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/model/hf"
)

// The path of docs/conversations.md, docs/experts.md and docs/hybrids.md: a Hugging Face directory and conversations in
// parquet become an adapter that answers, and a merged model. Hybrids are the text of models with images.
func TestConversationsTuneAnAdapter(t *testing.T) {
	const (
		experts = "num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 16"
		hybrid  = "layer_types: [linear_attention, full_attention], head_dim: 16, linear_num_key_heads: 2, " +
			"linear_num_value_heads: 4, linear_key_head_dim: 8, linear_value_head_dim: 8"
	)
	for name, c := range map[string]struct{ shape, wrapper string }{
		"dense":   {"intermediate_size: 64", ""},
		"experts": {"intermediate_size: 64, architecture: qwen3_moe, " + experts, ""},
		"two kinds of layers": {"intermediate_size: 64, architecture: gemma4_text, head_dim: 8, global_head_dim: 16, " +
			"attention_k_eq_v: true, sliding_window: 32, layer_types: [sliding_attention, full_attention]", "gemma4"},
		"hybrid": {"intermediate_size: 64, architecture: qwen3_5_text, " + hybrid, "qwen3_5"},
		"hybrid experts": {"architecture: qwen3_5_moe_text, shared_expert_intermediate_size: 16, " + experts + ", " + hybrid,
			"qwen3_5_moe"},
	} {
		if testing.Short() && !slices.Contains([]string{"two kinds of layers", "hybrid experts"}, name) {
			continue
		}
		t.Run(name, func(t *testing.T) { conversationsTune(t, c.shape, c.wrapper) })
	}
}

// conversationsTune trains a model of a shape, in the files of a wrapper unless that is empty.
func conversationsTune(t *testing.T, shape, wrapper string) {
	t.Parallel()
	chats := absolute(t, "internal/text/data/testdata/chat")
	dir := t.TempDir()
	base, adapter, merged := filepath.Join(dir, "base"), filepath.Join(dir, "adapter"), filepath.Join(dir, "merged")
	must(t, "--nproc", "1", "--run-dir", filepath.Join(dir, "first"), write(t, dir, "first.yaml", `
model: {vocab_size: 422, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, `+shape+`}
data: {path: `+chats+`/messages.parquet, tokenizer: `+chats+`, seq_len: 256}
train: {steps: 1}
`))
	must(t, "export", filepath.Join(dir, "first"), "--to", base)
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} {
		write(t, base, name, content(t, chats, name))
	}
	if wrapper != "" {
		wrap(t, base, wrapper)
	}
	config, run := write(t, dir, "tune.yaml", `
model: {from: base}
data: {path: `+chats+`/messages.parquet, seq_len: 256}
train: {steps: 12}
lora: {r: 4}
optimizer: {lr: 1.0e-2}
`), filepath.Join(dir, "run")
	must(t, "--verify", "--nproc", "2", "--run-dir", run, config)
	steps := metricsOf(t, run)
	if n := len(steps); n != 12 || !(number(t, steps[n-1]["loss"]) < number(t, steps[0]["loss"])) {
		t.Errorf("%d steps, losses %s to %s", n, steps[0]["loss"], steps[n-1]["loss"])
	}
	said, _ := must(t, "export", run, "--to", adapter)
	if notes := strings.Contains(said, "AutoModelForCausalLM"); notes != strings.HasPrefix(wrapper, "qwen") {
		t.Errorf("export of an adapter of %q says\n%s", wrapper, said)
	}
	contains(t, "export", said, "set base_model_name_or_path")
	must(t, "export", run, "--to", merged, "--merge")
	for _, name := range []string{"adapter_config.json", "adapter_model.safetensors", "tokenizer.json",
		"tokenizer_config.json", "chat_template.jinja"} {
		if st, err := os.Stat(filepath.Join(adapter, name)); err != nil || st.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	if cfg, err := hf.ReadConfig(merged); err != nil || cfg.Wrapper != wrapper {
		t.Errorf("%+v, %v, want a config of %q", cfg, err, wrapper)
	}
	before, after := tensorsIn(t, base), tensorsIn(t, merged)
	if want, got := slices.Sorted(maps.Keys(before)), slices.Sorted(maps.Keys(after)); !slices.Equal(got, want) {
		t.Errorf("the merged model has %v, want %v", got, want)
	}
	for name, x := range before {
		if besides.MatchString(name) && (after[name].DType != x.DType || after[name].data != x.data) {
			t.Errorf("%s: %+v in the merged model, want %+v", name, after[name], x)
		}
	}
	tuned := generated(t, run, "--chat", "Hi", "--max-tokens", "8")
	if whole := generated(t, merged, "--chat", "Hi", "--max-tokens", "8"); whole != tuned {
		t.Errorf("the adapter writes %q, the merged model %q", tuned, whole)
	}
}

// besides matches the names of tensors that a model with images has beside its text.
var besides = regexp.MustCompile(`^model\.visual\.|^mtp\.`)

// wrap makes the model in a directory the text of one with images.
func wrap(t *testing.T, dir, kind string) {
	t.Helper()
	entries := []safetensors.Entry{
		safetensors.Floats("model.visual.patch_embed.proj.weight", safetensors.BF16, []int{3}, []float32{1, -2, 0.1}),
		safetensors.Floats("mtp.fc.weight", safetensors.F32, []int{2, 1}, []float32{3, -4}),
	}
	for name, x := range tensorsIn(t, dir) {
		entries = append(entries, safetensors.Entry{Name: strings.Replace(name, "model.", "model.language_model.", 1),
			DType: x.DType, Shape: x.Shape, Data: func(w io.Writer) error {
				_, err := io.WriteString(w, x.data)
				return err
			}})
	}
	if err := safetensors.WriteFile(filepath.Join(dir, "model.safetensors"), nil, entries); err != nil {
		t.Fatal(err)
	}
	write(t, dir, "config.json", `{"model_type": "`+kind+`", "text_config": `+content(t, dir, "config.json")+`}`)
}

type stored struct {
	safetensors.Info
	data string
}

// tensorsIn returns the tensors of a model by name.
func tensorsIn(t *testing.T, dir string) map[string]stored {
	t.Helper()
	f, err := safetensors.Open(filepath.Join(dir, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	all := map[string]stored{}
	for _, name := range f.Names() {
		info, _ := f.Info(name)
		data := make([]byte, info.Bytes())
		if err := f.ReadBytes(name, data, 0); err != nil {
			t.Fatal(err)
		}
		all[name] = stored{info, string(data)}
	}
	return all
}
