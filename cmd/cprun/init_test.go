package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// worded copies a model of the test data, and gives it a tokenizer of some words and a chat template.
func worded(t *testing.T, model string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), filepath.Base(model))
	vocab := map[string]int{}
	for i, w := range strings.Fields("[UNK] <s> </s> the of and to a in light rays colours is that be we are great war") {
		vocab[w] = i
	}
	special := func(id int, text string) string {
		return fmt.Sprintf(`{"id": %d, "content": %q, "special": true, "single_word": false, "lstrip": false, "rstrip": false, `+
			`"normalized": false}`, id, text)
	}
	words, err := json.Marshal(vocab)
	if err != nil {
		t.Fatal(err)
	}
	write(t, dir, "tokenizer.json", `{"added_tokens": [`+special(1, "<s>")+","+special(2, "</s>")+`], "pre_tokenizer": `+
		`{"type": "Whitespace"}, "model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": `+string(words)+`}}`)
	write(t, dir, "tokenizer_config.json", `{"eos_token": "</s>", "chat_template": "{% for m in messages %}<s>`+
		`{{ m.role }} {{ m.content }}</s>{% endfor %}"}`)
	for _, name := range []string{"config.json", "model.safetensors"} {
		write(t, dir, name, content(t, model, name))
	}
	return dir
}

// tidy fails unless a config of init has at most 80 columns, and each key a comment.
func tidy(t *testing.T, text string) {
	t.Helper()
	commented := false
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		key := strings.TrimLeft(line, " ")
		if len(line) > 80 && !strings.Contains(line, "/") { // a path
			t.Errorf("%d columns: %s", len(line), line)
		}
		isKey := key != "" && key[0] != '#' && !strings.HasSuffix(key, ":")
		if isKey && !strings.Contains(key, "  # ") && !commented {
			t.Errorf("no comment: %s", line)
		}
		commented = strings.HasPrefix(key, "# ")
	}
}

// A config of init plans as a run does, for every family and kind of data, and trains.
func TestInit(t *testing.T) {
	t.Parallel()
	const texts = "internal/text/data/testdata/"
	data := map[string][]string{
		"text":     {absolute(t, "examples/data/opticks-books-1-2.txt"), "text: 1 file", "of the model"},
		"jsonl":    {absolute(t, texts+"chat/messages.jsonl"), "messages: 1 file, 8 documents", "holds 100 % of the"},
		"parquet":  {absolute(t, texts+"chat/texts.parquet"), "completion: 1 file", "epochs: 2"},
		"datasets": {absolute(t, texts+"rows/text-dataset"), "text: 2 files", "seq_len: 64"},
		"short": {absolute(t, "examples/data/opticks-paragraphs.jsonl"), "text: 1 file, 184 documents", "seq_len: 256",
			"global_batch_size: 8 "},
	}
	models, err := filepath.Glob("../../internal/model/testdata/families/*")
	if err != nil || len(models) < 20 {
		t.Fatal(models, err)
	}
	models = append(models, "../../internal/model/testdata/parity/tiny-qwen3-yarn")
	kinds := slices.Sorted(func(yield func(string) bool) {
		for k := range data {
			if !yield(k) {
				return
			}
		}
	})
	for i, model := range models {
		for j, kind := range kinds {
			name := filepath.Base(model)
			if testing.Short() && i%15 != 3*j && name != "qwen2" { // each kind twice
				continue
			}
			t.Run(name+"/"+kind, func(t *testing.T) {
				t.Parallel()
				file := filepath.Join(t.TempDir(), "train.yaml")
				out, stderr := must(t, "init", worded(t, model), data[kind][0], "--to", file, "--gpus", "2")
				contains(t, "stdout", out, "wrote "+file, "fits: ", "plan "+file+" --nproc 2", "verify "+file,
					file+" --run-dir runs/"+name+" --nproc 2")
				if stderr != "" {
					t.Errorf("stderr: %s", stderr)
				}
				text := content(t, file)
				contains(t, file, text, data[kind][1:]...)
				tidy(t, text)
				if mixture := slices.Contains([]string{"gpt_oss", "mixtral", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text",
					"qwen3_next-linear", "qwen3_5_moe_text-linear"}, name); strings.Contains(text, "router_aux") != mixture {
					t.Errorf("the loss of balance:\n%s", text)
				}
				if planned, _ := must(t, "plan", file, "--nproc", "2"); strings.Contains(planned, "cannot run") {
					t.Error(planned)
				}
				dir, stderr := trains(t, "--nproc", "2", "--set", "train.steps=1", file)
				if n := len(metricsOf(t, dir)); n != 1 {
					t.Errorf("%d steps", n)
				}
				contains(t, "the end", stderr, map[bool]string{true: "--chat Hello", false: "--prompt The"}[kind == "jsonl"])
			})
		}
	}
}

// The commands that init names run, also for one rank.
func TestInitNamesCommands(t *testing.T) {
	t.Parallel()
	dir, model := t.TempDir(), worded(t, "../../internal/model/testdata/families/qwen2")
	file := filepath.Join(dir, "train.yaml")
	out, _ := must(t, "init", model, gettysburg(t), "--gpus", "1", "--to", file)
	_, next, ok := strings.Cut(out, "next:\n")
	if !ok || strings.Count(next, "\n") != 3 {
		t.Fatal(out)
	}
	shell(t, dir, next)
	if n := len(metricsOf(t, filepath.Join(dir, "runs/qwen2"))); n == 0 {
		t.Errorf("no steps")
	}
}

// The length of samples follows the data: conversations fit, nearly all of them, and short documents are packed.
func TestInitFollowsTheData(t *testing.T) {
	t.Parallel()
	model := worded(t, "../../internal/model/testdata/families/llama-bias")
	write(t, model, "config.json", strings.Replace(content(t, model, "config.json"), `"max_position_embeddings": 256`,
		`"max_position_embeddings": 16384`, 1))
	chats := func(short, long int) (file string) {
		for _, n := range []int{short, long} {
			file += strings.Repeat(`{"messages": [{"role": "user", "content": "`+strings.Repeat("light ", map[bool]int{
				true: 5000, false: 30}[n == long])+`"}, {"role": "assistant", "content": "rays"}]}`+"\n", n)
		}
		return write(t, t.TempDir(), "chats.jsonl", file)
	}
	texts := strings.Repeat(`{"text": "the colours of light"}`+"\n", 9000)
	for want, file := range map[string]string{
		"seq_len: 4K                 # tokens of a sample; holds 100 % of":             chats(30, 0),
		"seq_len: 4K                 # tokens of a sample; holds 99.5 % of":            chats(199, 1),
		"seq_len: 8K                 # tokens of a sample; holds 100 % of":             chats(10, 1),
		"pack_documents: true        # attention stays inside a document, of 5 tokens": write(t, t.TempDir(), "a.jsonl", texts),
	} {
		out, _ := must(t, "init", model, file)
		contains(t, want, out, want)
		tidy(t, out)
		must(t, "plan", write(t, t.TempDir(), "train.yaml", out))
	}
}

// llama8B is the shape of Llama-3.1-8B.
const llama8B = `{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 500000.0, "vocab_size": 128256,
"rms_norm_eps": 1e-05, "tie_word_embeddings": false, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}`

// qwen30B is the shape of Qwen3-30B-A3B-Instruct-2507.
const qwen30B = `{"model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144,
"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 48, "num_experts": 128,
"num_experts_per_tok": 8, "norm_topk_prob": true, "vocab_size": 151936, "max_position_embeddings": 262144,
"rope_theta": 10000000, "tie_word_embeddings": false}`

// Without data, init also takes full training if that fits, else adapters, else shorter samples. It overwrites no file.
func TestInitFollowsTheMachine(t *testing.T) {
	t.Parallel()
	dir, shallow := t.TempDir(), t.TempDir()
	write(t, dir, "config.json", llama8B)
	write(t, shallow, "config.json", strings.Replace(llama8B, `layers": 32`, `layers": 4`, 1)) // is planned faster
	for assume, c := range map[string]struct {
		model string
		want  []string
	}{
		"h200": {dir, []string{"llama, 8.03B parameters", "\n# lora: {r: 16} ", "seq_len: 32K ", "{lr: 1.0e-5}", "GPU",
			"plan train.yaml --assume h200", "epochs: 1"}},
		"gpu=h100,memory=24G,ram=64G": {dir, []string{"llama, 8.03B parameters", "\nlora: {r: 16} ",
			"full training lacks", "{lr: 2.0e-4}"}},
		"h200,gpus=8,hosts=2":   {shallow, []string{"\n#   srun ", "--nproc 8\n"}},
		"h100,memory=6G,ram=8G": {shallow, []string{"\nlora: {r: 16} ", "twice as many do not fit"}},
	} {
		out, stderr := must(t, "init", c.model, "--assume", assume)
		contains(t, assume, out, c.want...)
		tidy(t, out)
		if stderr != "" {
			t.Errorf("%s: %s", assume, stderr)
		}
		file := write(t, t.TempDir(), "train.yaml", out)
		planned, _ := must(t, "plan", file, "--assume", "gpu="+strings.TrimPrefix(assume, "gpu="))
		contains(t, assume, planned, "\nfits: ", "no file data.jsonl")
	}
	experts := t.TempDir()
	write(t, experts, "config.json", `{"model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768,
		"intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 2,
		"num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 1024, "max_position_embeddings": 4096}`)
	for assume, balanced := range map[string]bool{"h100": true, "h100,memory=6G,ram=12G": false} {
		out, _ := must(t, "init", experts, "--assume", assume)
		if strings.Contains(out, "output_router_logits: true") != balanced || strings.Contains(out, "\nlora:") == balanced {
			t.Errorf("experts on %s:\n%s", assume, out)
		}
	}
	invalid(t, []string{"init", shallow, "--assume", "h100,memory=2G"}, "does NOT fit")
	invalid(t, []string{"init", dir, gettysburg(t)}, "no tokenizer.json")
	invalid(t, []string{"init", "nosuch"}, "cprun: model.from: no directory nosuch")
	invalid(t, []string{"init", dir, "/nosuch"}, "cprun: data.path: no file /nosuch")
	invalid(t, []string{"init", dir, "--assume", "h201"}, "gpu=h201")
	invalid(t, []string{"init", shallow, "--gpus", "0"}, `cprun: --gpus "0": `)
	invalid(t, []string{"init"}, "the model is missing")
	invalid(t, []string{"init", dir, "a.txt", "b.txt"}, "got 3 arguments; quote a glob")
	file := write(t, t.TempDir(), "train.yaml", "mine")
	invalid(t, []string{"init", dir, "--to", file, "--assume", "h200"}, "exists")
	if text := content(t, file); text != "mine" {
		t.Errorf("it wrote %s", text)
	}
	_, stderr := must(t, "init", dir, absolute(t, "internal/text/data/testdata/chat/all.parquet"), "--assume", "h200")
	contains(t, "data that does not train", stderr, "before it trains: data.path: ", "before it trains: model.from: ")
}

// A config.json is enough for a plan, with the time of the whole run; with a config, missing data is no obstacle.
func TestAPlanNeedsOnlyAModel(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "config.json", llama8B)
	assume := []string{"--assume", "gpu=h200,gpus=8"}
	out, _ := must(t, append([]string{"plan", "--model", dir, "--seq-len", "1M"}, assume...)...)
	contains(t, "the plan", out, "fits: ", "100 steps: ", " GPU-hours", "1,048,576 tokens a sample")
	if strings.Contains(out, "counted") {
		t.Errorf("data that nobody named:\n%s", out)
	}
	out, _ = must(t, append([]string{"plan", "--json", "--model", dir, "--seq-len", "128K", "--set", "train.steps=7"},
		assume...)...)
	var p struct {
		Estimate struct {
			Steps       int
			Seconds     float64 `json:"seconds_per_step"`
			RunSeconds  float64 `json:"run_seconds"`
			DeviceHours float64 `json:"device_hours"`
		}
		Refused []string
	}
	decode(t, out, &p)
	if e := p.Estimate; e.Steps != 7 || e.Seconds <= 0 || e.RunSeconds != 7*e.Seconds ||
		e.DeviceHours != 8*e.RunSeconds/3600 || len(p.Refused) > 0 {
		t.Errorf("%+v", p)
	}
	config := write(t, t.TempDir(), "train.yaml", "model: {from: "+dir+"}\ndata: {path: none.txt}\n")
	out, stderr := must(t, append([]string{"plan", config}, assume...)...)
	if !strings.HasPrefix(out, "cannot run as it is:\n  "+config[:10]) || strings.Contains(stderr, "none.txt") {
		t.Errorf("stdout\n%s\nstderr\n%s", out, stderr)
	}
	contains(t, "a plan without data", out, "\nfits: ")
	out, _ = must(t, append([]string{"plan", config, "--set", "data.seq_len=1K", "--set", "data.pack_documents=true",
		"--set", "data.path=" + absolute(t, "cmd/cprun/testdata/traces.parquet")}, assume...)...)
	contains(t, "a plan without weights", out, "safetensors", "\nfits: ", "24 documents, 5,834 tokens", "% filled")
	invalid(t, []string{"plan", config}, "data.path: no file none.txt")
	invalid(t, []string{"plan", "--model", dir, config, config}, "takes one argument")
	invalid(t, []string{"plan", "--model", "nosuch"}, "no directory nosuch")
	cpu, _ := must(t, "plan", "--model", absolute(t, "internal/model/testdata/parity/tiny-llama"), "--set", "train.epochs=2")
	if strings.Contains(cpu, "GPU-hours") || strings.Contains(cpu, "steps:") {
		t.Errorf("a CPU, and an unknown number of steps:\n%s", cpu)
	}
}

// A Hub id in the local cache names a model for every command; otherwise the message has the command that fetches it.
func TestModelsByName(t *testing.T) {
	t.Parallel()
	hub, model := t.TempDir(), absolute(t, "internal/model/testdata/parity/tiny-llama")
	repo := filepath.Join(hub, "models--org--tiny")
	write(t, repo, "refs/main", "0123456789abcdef")
	write(t, repo, "snapshots/0123456789abcdef/config.json", content(t, model, "config.json"))
	write(t, repo, "snapshots/0123456789abcdef/model.safetensors", content(t, model, "model.safetensors"))
	for _, args := range [][]string{
		{"plan", "--model", "ORG"},
		{"init", "ORG"},
		{"eval", "ORG", "--data", filepath.Join(model, "tokens.bin"), "--seq-len", "128", "--samples", "1"},
		{"generate", "ORG", "--tokenizer", "bytes", "--prompt", "a", "--max-tokens", "1"},
	} {
		for id, want := range map[string]string{"org/tiny": "", "org/none": "hf download org/none\n"} {
			c := process(t, strings.Split(strings.ReplaceAll(strings.Join(args, "\n"), "ORG", id), "\n")...)
			c.Env = append(c.Env, "HF_HUB_CACHE="+hub)
			out, err := c.CombinedOutput()
			if (err == nil) != (want == "") || !strings.HasSuffix(string(out), want) || strings.Count(string(out), "hf download") > 1 {
				t.Errorf("%v: %v\n%s", c.Args[1:], err, out)
			}
		}
	}
	c := process(t, "plan", "--model", "org/tiny", "--set", "data.tokenizer=org/tiny", small(t, 1))
	c.Env = append(c.Env, "HF_HUB_CACHE="+hub)
	if out, _ := c.CombinedOutput(); !strings.Contains(string(out), "no tokenizer org/tiny in") {
		t.Errorf("a model without a tokenizer:\n%s", out)
	}
	gguf := write(t, t.TempDir(), "model.gguf", "GGUF")
	for _, path := range []string{gguf, filepath.Dir(gguf)} {
		invalid(t, []string{"plan", "--model", path}, "GGUF", "*.safetensors")
		invalid(t, []string{"generate", path, "--prompt", "a"}, "GGUF", "*.safetensors")
	}
}

// Flags and keys of other programs get the flag or the key of cprun, if the command has it.
func TestFlagsOfOtherPrograms(t *testing.T) {
	t.Parallel()
	good := small(t, 2)
	for args, want := range map[string]string{
		"--train.steps=3 G":           "did you mean --set train.steps=…?",
		"--training.seq_len 3 G":      "did you mean --set data.seq_len=…?",
		"--learning-rate 3 G":         "did you mean --set optimizer.lr=…?",
		"--seq_len 3 G":               "did you mean --set data.seq_len=…?",
		"eval G --seq_len 3":          "did you mean --seq-len?",
		"train.steps=3 G":             "write --set train.steps=3",
		"G train.steps=3":             "write --set train.steps=3",
		"plan G train.steps=3":        "write --set train.steps=3",
		"--gpus 2 G":                  "did you mean --nproc?",
		"--nproc_per_node=2 G":        "did you mean --nproc?",
		"--master_addr host G":        "did you mean --rendezvous?",
		"--rdzv-endpoint=host:1 G":    "did you mean --rendezvous?",
		"--standalone G":              "cprun needs none",
		"--config G":                  "the config is the argument",
		"--deepspeed ds.json G":       "did you mean --set memory.shard=…?",
		"--load_in_4bit G":            "stays in bf16; remove it",
		"--wandb_project x G":         "W&B imports",
		"plan --output_dir x G":       "unknown flag: --output_dir\n",
		"export --gpus 2 D":           "unknown flag: --gpus\n",
		"scale --nproc-per-node=2 G":  "did you mean --nproc?",
		"plan --assume gpu=h200 --np": "did you mean --nproc?",
	} {
		invalid(t, strings.Fields(strings.ReplaceAll(args, "G", good)), want)
	}
	all := rootCommand().Flags()
	for _, name := range []string{"run-dir", "device", "nproc", "nnodes", "node-rank", "rendezvous", "interface", "resume"} {
		if all.Lookup(name) == nil {
			t.Errorf("package config names --%s", name)
		}
	}
}

func TestSchemaIsPrinted(t *testing.T) {
	t.Parallel()
	out, _ := must(t, "config", "--schema")
	var s struct {
		Schema     string `json:"$schema"`
		Properties map[string]any
	}
	if decode(t, out, &s); !strings.Contains(s.Schema, "2020-12") || s.Properties["model"] == nil {
		t.Error(out)
	}
	invalid(t, []string{"config"}, "--schema is missing")
	if _, err := os.Stat("train.yaml"); err == nil {
		t.Error("a test wrote train.yaml here")
	}
}
