package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cprun/cprun/internal/text/data"
)

var verifyAll = flag.Bool("verify.all", false, "build cprun with each defect that cprun verify must find")

// A defect is a change of one line, as other stacks have had it, and a part of its report by verify.
type defect struct {
	name, file, old, new string
	config               string // of verifyConfigs
	want                 string
}

var defects = []defect{
	{"leak across documents", "internal/run/train/attend.go",
		"s.Layout, s.Mask.Docs, s.SeqQ, s.SeqKV = l.layout, l.docs, l.seqLen",
		"s.Layout, s.Mask.Docs, s.SeqQ, s.SeqKV = l.layout, nil, l.seqLen",
		"documents", "rows that its masks hide"},
	{"window ignored", "internal/run/train/attend.go",
		"masked(spec.Shape, m.Window)", "masked(spec.Shape, -1)",
		"windows", "rows that its masks hide"},
	{"a header trained", "internal/text/data/turns.go", "from, before, err := prefix(i, true)",
		"from, before, err := prefix(i, false)", "messages", "target of tokens on one rank"},
	{"labels shifted inside a shard", "internal/text/data/loader.go",
		"if k := i*stride + 1; k < asked", "if k := (i*stride + 1) % ((n-1)*stride + 1); k < asked",
		"windows", "target of tokens on 2 ranks"},
	{"loss over local targets", "internal/run/train/trainer.go",
		"f.r.Loss = out[sumLoss] / float64(f.valid)", "f.r.Loss = out[sumLoss] / float64(f.valid/t.mesh.world.Size())",
		"windows", "loss: "},
	{"positions restarted", "internal/text/data/loader.go",
		"r.positions[r.done] = id, target, r.at()", "r.positions[r.done] = id, target, r.done",
		"windows", "position of tokens on 2 ranks"},
	{"soft cap dropped", "ring/ring.go",
		"return r.forwardAdapted(out, q, k, v, s, p)",
		"return r.forwardAdapted(out, q, k, v, s, attention.Softmax{Scale: p.Scale})",
		"caps", "gradient of model.layers.0.self_attn.v_proj.weight"},
	{"gradient scaled by ranks", "internal/run/train/passes.go",
		"lossScale/float64(f.valid)", "float64(t.mesh.world.Size())*lossScale/float64(f.valid)",
		"windows", "gradient of model.layers.0.self_attn.q_proj.weight"},
	{"a dropped tile", "ring/ring.go", "Tiles: hop.Tiles,", "Tiles: hop.Tiles[len(hop.Tiles)/2:],",
		"windows", "loss: "},
	{"a masked token trained", "internal/text/data/loader.go", " && labels[k] != Ignore {", " && labels[k] < 1<<30 {",
		"documents", "target of tokens on 2 ranks"},
	{"a prompt trained", "internal/text/data/chat.go", "		labels[i] = Ignore\n", "		labels[i] |= Ignore & 0\n",
		"completions", "target of tokens on one rank"},
	{"a user's turn trained", "internal/text/data/turns.go", "from, before, err := prefix(i, true)",
		"from, before, err := prefix(max(0, i-1), false)", "messages", "target of tokens on one rank"},
	{"an answer's last token left out", "internal/text/data/chat.go", "copy(d.Labels[from:to], d.IDs[from:to])",
		"copy(d.Labels[from:to-1], d.IDs[from:to])", "messages", "target of tokens on one rank"},
	{"an answer cut short", "internal/text/data/chat.go", "To: from + e.turnEnd(m.(*chat.Dict), whole.Text[from:to])",
		"To: min(to, from+2)", "messages", "target of tokens on one rank"},
	{"an answer of a training form shifted", "internal/text/data/forms.go", "spans[i].From+at, spans[i].To+at",
		"spans[i].From+at-2, spans[i].To+at-2", "form", "target of tokens on one rank"},
	{"a block of generation shifted", "internal/text/chat/template.go", "Span{from, b.Len()}",
		"Span{max(0, from-1), b.Len() - 1}", "generation", "target of tokens on one rank"},
	{"a duplicated document", "internal/text/data/loader.go", "epoch, i := n/l.samples, n%l.samples",
		"epoch, i := n/l.samples, n/2*2%l.samples", "documents", "are repeated"},
	{"a gradient norm of own ranks", "internal/run/train/share.go",
		"	x.SumSquares(x.dev.Optim, norm2)\n	if err := x.sum(sums); err != nil {\n" +
			"		return fmt.Errorf(\"loss and gradient norm: %w\", err)\n	}\n",
		"	if err := x.sum(sums); err != nil {\n" +
			"		return fmt.Errorf(\"loss and gradient norm: %w\", err)\n	}\n	x.SumSquares(x.dev.Optim, norm2)\n",
		"windows", "gradient norm: "},
	{"updated weights never gathered", "internal/run/train/share.go", "	x.resident.Forget()\n	begin := x.resident.Fill",
		"	begin := x.resident.Fill", "windows", "weights after two steps: rank 1 reads others than rank 0"},
	{"the first samples again", "internal/run/train/trainer.go",
		"t.consumed += int64(t.batch())", "t.consumed += int64(t.batch()) * 0",
		"windows", "samples of step 2 on one rank"},
	{"a normaliser of too many targets", "internal/text/data/loader.go",
		"return l.plan.SeqLen - len(l.docEnds(sample))", "return l.plan.SeqLen", "packed", "targets of the records"},
	{"a normaliser of too many labels", "internal/text/data/loader.go", "l.valid[s] += valid[doc]",
		"l.valid[s] += valid[doc] + 1", "documents", "targets of the records"},
	{"decay of norms", "internal/model/state/state.go", "		bucket != s.Flat.Vectors(), u)", "		true, u)",
		"windows", "parameter model.norm.weight after two steps on one rank"},
	{"weights of micro batches", "internal/run/train/passes.go", "lossScale/float64(f.valid)",
		"lossScale/float64(f.valid)*float64(i+1)", "windows", "gradient of lm_head.weight"},
	{"micro batches that are no sum", "internal/run/train/share.go", "state.LeastSlots), !x.first",
		"state.LeastSlots), false", "windows", "with [memory.shard=gradients]: gradient of"},
	{"one rotary table for all layers", "internal/model/hf/layer.go", "case c.localRope() && l.", "case false && l.",
		"local", "rotation of keys of layer 0"},
	{"one rotary base for all layers", "internal/model/rope.go", "cmp.Or(cfg.RopeLocalBaseFreq, cfg.RopeTheta)",
		"cfg.RopeTheta", "local", "rotation of keys of layer 0"},
	{"a bias correction one step late", "internal/run/train/trainer.go", "Step: t.step - skipped - t.blank",
		"Step: t.step + 1 - skipped - t.blank", "windows", "AdamW of its gradients gives another one"},
	{"no clipping", "internal/model/optim/adamw.go", "MaxNorm: a.MaxNorm,", "MaxNorm: 0 * a.MaxNorm,", "windows",
		"AdamW of its gradients gives another one"},
	{"a flag of a turn ignored", "internal/text/data/chat.go", "e.withoutFlagged(c, trace, spans)",
		"e.withoutFlagged(&conversation{}, trace, spans)", "flags", "target of tokens on one rank"},
	{"a system column dropped", "internal/text/data/conversation.go", "if raw := keys[keySystem]; raw != nil {",
		"if raw := keys[keySystem+keyTools]; raw != nil {", "share", "tokens: the records have"},
	{"borders of a packer ignored", "internal/text/data/borders.go", "	{\"seq_lengths\", func(", "	{\"lengths\", func(",
		"borders", "documents: the records have"},
	{"columns of JSON as text", "internal/text/data/arrow.go", "if extension == \"arrow.json\" {",
		"if extension == \"json\" {", "columns", "tokens: the records have"},
	{"JSON lines as text", "internal/text/data/lines.go",
		"\".ndjson\", \".jsonlines\", \".json\"}\n	textExts = []string{",
		"\".jsonlines\", \".json\"}\n	textExts = []string{\".ndjson\", ", "ndjson", "tokens: the records have"},
	{"loads of own ranks alone", "internal/run/train/routes.go", "sum := func() error { return t.share.sum(r.total) }",
		"sum := func() error { return nil }", "experts", "gradient of model.layers.0.mlp.gate.weight"},
	{"routes of other tokens", "internal/model/experts.go", "p.ops.Sort(pairs, choice)",
		"p.ops.Sort(pairs, choice)\n\tif p.b.IDs.Size() < 90 {\n\t\tp.ops.Zero(pairs.Tokens)\n\t}", "experts", "loss: "},
	{"factors of the other operand", "kernels/cpu/scaled.go", "	newProduct(c, y, of(a, false),",
		"	if a.Rows() <= b.Rows() {\n		a.Factors = b.Factors\n	}\n	newProduct(c, y, of(a, false),",
		"scaled", "with linears in FP8: gradient of model.layers.1.self_attn.o_proj.weight"},
	{"gradients without factors of matrices", "internal/model/scaled.go",
		"w.scaled() && !w.g.IsZero(), w.codes.Factors)", "w.scaled() && !w.g.IsZero(), View{})",
		"scaled", "with linears in FP8: gradient of model.layers.0.self_attn.v_proj.weight"},
	{"weights that stay on the host", "internal/model/state/state.go", "s.adamw.Step(d, p, s.Copied(bucket, lo, n), Part(",
		"s.adamw.Step(d, p, View{}, Part(", "offload", "elements that differ from its optimizer's"},
}

// verifyConfigs writes the configs of the defects: records with masks, completions, conversations, windows, soft caps.
func verifyConfigs(t *testing.T) map[string]string {
	t.Helper()
	dir, records, completions, talks, texts, borders := t.TempDir(), "", "", "", "", ""
	for i := range 40 {
		ids, labels := make([]int, 5+7*i%31), make([]int, 5+7*i%31)
		for j := range ids {
			ids[j] = (i*i + 3*j + j*j*i) % 61
			if labels[j] = ids[j]; j%5 == 2 {
				labels[j] = -100
			}
		}
		line, err := json.Marshal(map[string][]int{"input_ids": ids, "labels": labels})
		if err != nil {
			t.Fatal(err)
		}
		records += string(line) + "\n"
		borders += strings.Replace(string(line), "{", fmt.Sprintf(`{"seq_lengths": [2, %d], `, len(ids)-2), 1) + "\n"
		completions += fmt.Sprintf(`{"prompt": "the square of %d", "completion": " is %d"}`+"\n", i, i*i)
		texts += fmt.Sprintf(`{"text": "%s"}`+"\n", strings.Repeat(fmt.Sprint(i), 5+7*i%11))
		talks += fmt.Sprintf(`{"messages": [{"role": "user", "content": "%d?"}, {"role": "assistant", "content": "%d"}, `+
			`{"role": "user", "content": "yes"}, {"role": "assistant", "content": "yes"}]}`+"\n", i, i*i)
	}
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		return path
	}
	text := gettysburg(t)
	chat := absolute(t, "internal/text/data/testdata/chat")
	stock := regexp.MustCompile(`\{%- (end)?generation -%\}`).ReplaceAllString(data.Forms()[0].Source, "") +
		"{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
	yaml := func(model, data string) string {
		return fmt.Sprintf("model: {vocab_size: 512, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, "+
			"num_attention_heads: 2%s}\ndata: {seq_len: 96, %s}\ntrain: {steps: 1, global_batch_size: 2}\n"+
			"optimizer: {lr: 1.0e-3}\nparallel: {algorithm: ring, layout: zigzag}\n", model, data)
	}
	return map[string]string{
		"documents": write("documents.yaml", yaml("", "pack_documents: true, eos_token_id: 60, path: "+
			write("records.jsonl", records))),
		"completions": write("completions.yaml", yaml("", "tokenizer: "+chat+", path: "+
			write("completions.jsonl", completions))),
		"generation": write("generation.yaml", yaml("", "tokenizer: "+chat+", path: "+write("talks.jsonl", talks))),
		"messages": write("messages.yaml", yaml("", "tokenizer: "+chat+", path: "+write("talks.jsonl", talks)+
			", chat_template: "+chat+"/../../../chat/testdata/plain.jinja")),
		"form": write("form.yaml", yaml("", "tokenizer: "+chat+", path: "+write("talks.jsonl", talks)+
			", chat_template: "+write("form.jinja", stock))),
		// one sample of a small source is in the batch several times; checkpoints and the end follow validation
		"mixture": write("mixture.yaml", strings.Replace(yaml("", "path: [{path: "+
			write("small.jsonl", `{"text": "`+strings.Repeat("small ", 20)+`"}`+"\n")+"}, {path: "+text+", weight: 0.3}], validation: {path: "+
			text+", every: 1}"), "size: 2}", "size: 4, early_stop: {patience: 1}}\ncheckpoint: {best: true}", 1)),
		"flags": write("flags.yaml", yaml("", "tokenizer: "+chat+", path: "+write("flags.jsonl", strings.ReplaceAll(talks,
			`{"role": "assistant", "content": "yes"}`, `{"role": "assistant", "content": "yes", "weight": 0}`)))),
		"share": write("share.yaml", yaml("", "tokenizer: "+chat+", path: "+write("share.jsonl", strings.NewReplacer(
			`{"messages"`, `{"system": "count", "conversations"`, `"role": "user"`, `"from": "human"`, `"role": "assistant"`,
			`"from": "gpt"`, `"content"`, `"value"`).Replace(talks)))),
		"borders": write("borders.yaml", yaml("", "pack_documents: true, path: "+write("borders.jsonl", borders))),
		"columns": write("columns.yaml", yaml("", "tokenizer: "+chat+", path: "+chat+"/../rows/logical.arrow, chat_template: "+
			write("columns.jinja", "{{ j | tojson }}{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"+
				"<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"))),
		"ndjson": write("ndjson.yaml", yaml("", "path: "+write("texts.ndjson", texts))),
		"packed": write("packed.yaml", yaml("", "pack_documents: true, eos_token_id: 0, path: "+
			write("texts.jsonl", texts))),
		"local": write("local.yaml", yaml(", architecture: gemma3_text, head_dim: 8, query_pre_attn_scalar: 8, "+
			"rope_theta: 1.0e6, rope_local_base_freq: 1.0e4, sliding_window: 9, layer_types: [sliding_attention, "+
			"full_attention]", "path: "+text)),
		"experts": write("experts.yaml", yaml(", architecture: qwen3_moe, head_dim: 8, num_experts: 6, "+
			"num_experts_per_tok: 2, moe_intermediate_size: 16, output_router_logits: true, router_aux_loss_coef: 0.5",
			"path: "+text)+"precision: {linears: fp8}\n"),
		"trained": write("trained.yaml", fmt.Sprintf("model: {from: %s}\ndata: {seq_len: 96, tokenizer: bytes, path: %s}\n"+
			"train: {steps: 1, global_batch_size: 2}\noptimizer: {lr: 1.0e-3}\nprecision: {linears: fp8}\nlora: {r: 4}\n",
			absolute(t, "internal/model/testdata/parity/tiny-llama"), text)),
		"scaled":  write("scaled.yaml", yaml("", "path: "+text)+"precision: {linears: fp8}\n"),
		"offload": write("offload.yaml", yaml("", "path: "+text)+"memory: {offload: optimizer}\n"),
		"windows": write("windows.yaml", yaml(", sliding_window: 9, "+
			"layer_types: [sliding_attention, sliding_attention]", "path: "+text)),
		"caps": write("caps.yaml", strings.Replace(yaml(", architecture: gemma2, num_key_value_heads: 2, head_dim: 8, "+
			"query_pre_attn_scalar: 8, attn_logit_softcapping: 0.01, final_logit_softcapping: 2, sliding_window: 9",
			"path: "+text), "algorithm: ring, layout: zigzag", "algorithm: ulysses", 1)),
	}
}

// A verification is the JSON of cprun verify.
type verification struct {
	OK        *bool
	Error     string
	Documents struct{ Records, Batch, Repeated *int }
	Targets   struct{ Records, One, Many *int }
	Loss      struct{ One, Many *float64 }
	Gradients []struct {
		Name  string
		Error *float64 `json:"relative_error"`
	}
	Leak struct {
		Allowed int `json:"rows_allowed"`
		Changed int `json:"rows_changed"`
		Wrong   int `json:"rows_wrong"`
		Probes  []struct{ Position int }
	}
	Step struct {
		Parameters []struct{ Name string }
		Samples    []int64
	}
	Rope    *struct{ Layers int }
	Varied  []string
	Linears *struct {
		Loss      *float64
		FP8       *float64 `json:"loss_fp8"`
		Gradients []struct{}
	}
	Kernels       []struct{ Backend, Kernel string }
	CheckedTokens int `json:"checked_tokens"`
	BatchTokens   int `json:"batch_tokens"`
	Differences   []string
}

// verified runs a program's verify, and returns its status and its report.
func verified(t *testing.T, program *exec.Cmd) (code int, r verification, output string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "verify.json")
	program.Args = append(program.Args, "--json", path)
	out, err := program.CombinedOutput()
	if _, none := os.Stat(path); none != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	decode(t, content(t, path), &r)
	return program.ProcessState.ExitCode(), r, string(out)
}

// userCache is the user's cache before testAll replaces it: it has the compiled packages.
var userCache = os.Getenv("XDG_CACHE_HOME")

// build builds cprun with some defects, without changing any file of the tree.
func build(t *testing.T, list ...defect) string {
	t.Helper()
	dir, overlay := t.TempDir(), map[string]string{}
	for _, d := range list {
		path, err := filepath.Abs(filepath.Join("../..", d.file))
		if err != nil {
			t.Fatal(err)
		}
		from := path
		if overlay[path] != "" {
			from = overlay[path]
		}
		text := content(t, from)
		if n := strings.Count(text, d.old); n != 1 {
			t.Fatalf("%s: %s has %d places with %q; change the table of defects", d.name, d.file, n, d.old)
		}
		overlay[path] = write(t, dir, filepath.Base(d.file), strings.Replace(text, d.old, d.new, 1))
	}
	replace, err := json.Marshal(map[string]any{"Replace": overlay})
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "cprun")
	c := exec.Command("go", "build", "-buildvcs=false", "-ldflags=-s -w", "-overlay",
		write(t, dir, "overlay.json", string(replace)), "-o", program, ".")
	c.Env = append(c.Environ(), "XDG_CACHE_HOME="+userCache)
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return program
}

// finds fails unless a program with a defect ends with 1 and names it.
func finds(t *testing.T, program string, d *defect, config string) {
	t.Helper()
	code, r, out := verified(t, exec.Command(program, "verify", "--nproc", "2", config))
	if all := strings.Join(r.Differences, "\n"); code != 1 || r.OK == nil || *r.OK || !strings.Contains(all, d.want) {
		t.Errorf("%s: status %d, without %q:\n%s", d.name, code, d.want, out)
	}
}

// Defects of masks and targets give equal losses and gradients on one rank and on several. Three of them, in one
// program, each show with another config; the short form leaves out the third, since most packages compile again for
// it, and half of the runs without a defect. -verify.all builds all defects, one by one.
func TestVerifyFindsDefects(t *testing.T) {
	t.Parallel()
	configs := verifyConfigs(t)
	for i, name := range slices.Sorted(maps.Keys(configs)) {
		if testing.Short() && i%3 > 0 {
			continue
		}
		config := configs[name]
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			code, r, out := verified(t, process(t, "verify", "--nproc", "2", config))
			if code != 0 || r.OK == nil || !*r.OK {
				t.Errorf("without a defect: status %d\n%s", code, out)
			}
			if r.Leak.Changed == 0 || r.Leak.Changed > r.Leak.Allowed || len(r.Leak.Probes) != 3 ||
				*r.Targets.Records != *r.Targets.Many || len(r.Gradients) < 21 || r.CheckedTokens <= 96 ||
				r.BatchTokens != r.CheckedTokens || r.Kernels[0].Backend != "flash" || r.Kernels[0].Kernel == "" {
				t.Errorf("%+v\n%s", r, out)
			}
			if l := r.Linears; slices.Contains([]string{"experts", "scaled", "trained"}, name) != (l != nil) || l != nil &&
				(len(l.Gradients) < 21 || *l.FP8 == *l.Loss) {
				t.Errorf("%+v\n%s", l, out)
			}
			samples := slices.Compact(slices.Sorted(slices.Values(r.Step.Samples)))
			if n := len(r.Step.Samples); len(r.Step.Parameters) != len(r.Gradients) || r.Rope == nil || r.Rope.Layers != 2 ||
				!slices.Contains(r.Varied, "memory.shard=gradients") || n%4 != 0 || len(samples) < n &&
				!slices.Contains([]string{"mixture", "columns"}, name) { // they have fewer samples
				t.Errorf("%+v, %+v, %v\n%s", r.Step, r.Rope, r.Varied, out)
			}
		})
	}
	if !*verifyAll {
		t.Run("defects", func(t *testing.T) {
			t.Parallel()
			few := defects[:3]
			if testing.Short() {
				few = few[:2]
			}
			program := build(t, few...)
			for i := range few {
				finds(t, program, &defects[i], configs[defects[i].config])
			}
		})
		return
	}
	for i := range defects {
		t.Run(defects[i].name, func(t *testing.T) {
			finds(t, build(t, defects[i]), &defects[i], configs[defects[i].config])
		})
	}
}

// A config that cannot run ends with status 2.
func TestVerifyFails(t *testing.T) {
	t.Parallel()
	config := verifyConfigs(t)["windows"]
	for args, want := range map[string]string{
		"--nproc 1":                            "--nproc 1: one rank is compared with several",
		"--set data.seq_len=1M":                "seq_len",
		"--set data.seqlen=1":                  "data.seqlen",
		"--nproc 2 --json /nonexistent/v.json": "--json: /nonexistent is not a directory",
	} {
		invalid(t, append([]string{"verify", config}, strings.Fields(args)...), want)
	}
	code, _, text := with(t, []string{"TMPDIR=/nonexistent"}, "verify", config, "--nproc", "2")
	if code != 2 || !strings.Contains(text, "TMPDIR") {
		t.Errorf("without a directory for temporary files: status %d, %s", code, text)
	}
}

// --verify verifies, then trains. After a difference it does not train.
func TestVerifyThenTrain(t *testing.T) {
	t.Parallel()
	config := verifyConfigs(t)["documents"]
	dir := filepath.Join(t.TempDir(), "run")
	out, _ := must(t, "--verify", "--nproc", "2", "--run-dir", dir, config)
	if !strings.Contains(out, "right\n") || len(metricsOf(t, dir)) == 0 {
		t.Errorf("%s", out)
	}
	s := start(t, filepath.Join(t.TempDir(), "stopped"), "--verify", "--nproc", "2", config)
	s.until("workers", func() bool { return len(s.workers()) > 0 })
	s.Process.Signal(syscall.SIGUSR1)
	s.ends(75)
}
