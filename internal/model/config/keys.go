package config

import (
	"math"
	"reflect"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/model/hf"
)

// A key defines one key of train.yaml. Decoding, defaults, bounds, suggestions, writing and docs/config.md use this
// table. The type of its field in Config selects its kind.
type key struct {
	path string
	def  string            // as in YAML; "" for a required key
	at   func(*Config) any // a pointer to its field; nil in the table: the field with the key's name
	doc  string

	// word is "auto" or "null", if allowed. For it a number is wordIs, a text or list is empty, and a pointer is nil.
	word   string
	wordIs int

	least time.Duration // of times, except an allowed 0

	choices  []string
	known    func() []string // in place of choices: the registered names
	min, max int64           // of integers; max 0: maxInt
	within   string          // of numbers, an interval: "(0, 1]"

	json *hf.ConfigKey // the row of config.json; nil: it has no such key
	with []string      // other keys of the same rules of package hf: their faults may cause one of this key
}

func (k *key) allowed() []string {
	if k.known != nil {
		return k.known()
	}
	return k.choices
}

const (
	maxInt      = math.MaxInt32 // of widths, steps and samples
	maxHeads    = 1 << 16       // of heads, and their width
	maxLayers   = 1 << 10       // bounds lora.layers_to_transform
	maxSMMargin = 128           // below the SMs of any supported GPU
	maxLen      = 1 << 30       // of tokens of a sample
	maxRanks    = 1 << 20
	maxSamples  = 1 << 53 // a JSON number is exact
	maxSeed     = math.MaxInt64

	// maxShares bounds the parts of samples on the ranks of a context group. Each part is a message.
	maxShares = 1 << 13

	// MaxPieces bounds the chunks of memory.loss_chunk tokens in one pass of a rank.
	MaxPieces = 1 << 15
)

// sections lists the mappings of train.yaml, outer before inner.
var sections = []struct{ path, doc string }{
	{"model", "The shape of the model, as in a Hugging Face `config.json`; overrides that of `from`."},
	{"model.rope_scaling", "Rotary frequencies beyond the trained length, as in `config.json`. With `rope_type` it " +
		"replaces the section of `from`; without, it changes keys of that. `rope_parameters` of transformers 5 is the " +
		"same."},
	{"data", "Where tokens come from."},
	{"data.validation", "The loss on held-out text."},
	{"train", "The length and the batches of the run."},
	{"train.early_stop", "An end before the last step, after a checkpoint and with exit status 0. A resume continues " +
		"the count; after an early end it trains on only if `patience` is raised or 0."},
	{"lora", "Low-rank adapters (arXiv:2106.09685) as in PEFT: only they and modules_to_save train. null, the " +
		"default: none."},
	{"optimizer", "AdamW (arXiv:1711.05101): decay on every parameter of two or more axes (embeddings too), " +
		"none on vectors."},
	{"lr_schedule", "The learning rate over the steps."},
	{"parallel", "How ranks are grouped: `context` x `data` is the number of ranks."},
	{"attention", "The attention kernels."},
	{"precision", "The types of computation and transfers."},
	{"memory", "State to keep, recompute, chunk and shard."},
	{"checkpoint", "How often state is saved. A run also saves at its end and on SIGTERM or Ctrl-C."},
	{"log", "Reports during training."},
	{"log.samples", "Answers to prompts during training, of up to 64 of the likeliest tokens, in the log, " +
		"`metrics.jsonl`, TensorBoard and the report. If the data have messages, a prompt is a message of the user."},
}

var keys = append(modelKeys(), runKeys...)

// modelKeys returns the keys of model: the source of the model, and the keys of config.json.
func modelKeys() (list []key) {
	list = []key{
		{path: "model.from", def: "null", word: "null",
			doc: "Hugging Face directory, or the Hub id of a model in the local cache (`hf download Qwen/Qwen3-8B`); " +
				"null: random weights"},
		{path: "model.architecture", def: "llama", known: hf.Families,
			doc: "`model_type` of transformers"},
	}
	for i := range hf.ConfigKeys {
		h := &hf.ConfigKeys[i]
		k := key{path: "model." + h.Name, def: h.Default, doc: h.Doc, choices: h.Choices, min: h.Min, max: h.Max,
			within: h.Within, json: h, at: func(c *Config) any { return h.Field(&c.Model.Config) }}
		if h.Default == "null" {
			k.word = "null"
		}
		for name := range strings.FieldsSeq(h.With) {
			k.with = append(k.with, "model."+name)
		}
		if list = append(list, k); h.Name == "vocab_size" {
			list = append(list, resizeKey)
		}
	}
	return list
}

var resizeKey = key{path: "model.resize_embeddings", def: "null", word: "null", min: 1,
	doc: "vocab_size in place of that of `model.from`, at least as large; new rows begin as the mean of the " +
		"old; null: as in `model.from`"}

var runKeys = []key{
	{path: "data.path",
		doc: "file or glob of tokens, text or records (docs/formats.md); or a list of globs, read one after the " +
			"other, or of `{path: …, weight: …}`, mixed"},
	{path: "data.format", def: "auto", choices: []string{"text", "messages", "completion", "tokens", "auto"},
		doc: "kind of the records; auto: each by its keys"},
	{path: "data.chat_template", def: "null", word: "null",
		doc: "Jinja file that renders conversations; null: the tokenizer's"},
	{path: "data.train_on", def: "assistant", choices: []string{"assistant", "all"},
		doc: "targets in conversations: the assistant's turns, or the completion of a prompt; all: every token"},
	{path: "data.tokenizer", def: "auto", word: "auto",
		doc: "of text: `bytes`, a Hugging Face `tokenizer.json`, or its directory; auto: that of `model.from`, else " +
			"`bytes`"},
	{path: "data.seq_len", def: "4096", min: 1, max: maxLen, doc: "tokens of one sample, over all ranks"},
	{path: "data.shuffle", def: "true",
		doc: "false: sample i is tokens [i*seq_len, (i+1)*seq_len], targets shifted by one"},
	{path: "data.pack_documents", def: "auto", word: "auto", at: func(c *Config) any { return &c.Data.Pack },
		doc: "true: attention and positions stay inside documents; false: a conversation is a sample; auto: true for " +
			"messages and completions, else false"},
	{path: "data.overlong", def: "auto", choices: []string{"auto", "split", "drop"},
		doc: "split: cut documents longer than seq_len; drop: leave them out, and pack the others whole; auto: drop " +
			"for messages, completions, and tokens with masks or labels, else split"},
	{path: "data.eos_token_id", def: "null", word: "null", wordIs: -1,
		doc: "token that ends a document; needed to pack documents of `.bin` files without an `.idx`; null: " +
			"`eos_token` of the tokenizer, else that of `model.from`, else none"},
	{path: "data.cache", def: "null", word: "null",
		doc: "directory of the token cache; null: `cprun/tokens` in the user's cache directory, for files from 16 MiB"},
	{path: "data.seed", def: "null", word: "null", wordIs: -1, max: maxSeed,
		doc: "seed of the order of samples; null: train.seed, or the seed of the resumed checkpoint"},
	{path: "data.validation.path", def: "null", word: "null",
		doc: "held-out files, like data.path; a mixture is validated by source"},
	{path: "data.validation.every", def: "0", doc: "optimizer steps between two validations; 0: never"},
	{path: "data.validation.samples", def: "0", doc: "samples of one validation, the first of the files; 0: all"},

	{path: "train.steps", def: "100", word: "null", min: 1,
		doc: "optimizer steps; null: by `epochs` or `samples`, else 100"},
	{path: "train.epochs", def: "null", word: "null", min: 1,
		doc: "passes over the data (of a mixture: its largest source), in place of `steps`; the last step " +
			"takes the remainder"},
	{path: "train.samples", def: "null", word: "null", min: 1, max: maxSamples,
		doc: "samples after which the run ends, in place of `epochs`, or at `steps` if they are earlier; the last " +
			"step takes the remainder"},
	{path: "train.global_batch_size", def: "1", min: 1,
		doc: "samples of one optimizer step, over all data-parallel groups"},
	{path: "train.micro_batch_size", def: "1", min: 1,
		doc: "samples of one pass of one group; others are accumulated"},
	{path: "train.seed", def: "1", max: maxSeed,
		doc: "seed of random weights, and the default of data.seed"},
	{path: "train.deterministic", def: "false", doc: "the same config on as many ranks gives the same bits"},
	{path: "train.freeze", def: "[]", at: func(c *Config) any { return &c.Model.Tuning.Freeze },
		doc: "globs over names of parameters that do not train, such as `[\"model.embed_tokens.*\"]`; with lora " +
			"of adapters, `[\"base_model.*.layers.0.*\"]`"},
	{path: "train.early_stop.patience", def: "0",
		doc: "validations in a row without a new lowest loss after which the run ends; 0: off"},
	{path: "train.early_stop.min_delta", def: "0.0", within: "[0, inf)", doc: "a new lowest loss is lower by more " +
		"than this"},

	{path: "lora.r", def: "16", min: 1, max: maxHeads, doc: "rank"},
	{path: "lora.alpha", def: "null", word: "null", within: "(0, inf)",
		doc: "an adapter's product is multiplied by alpha / r; null: 2 r"},
	{path: "lora.dropout", def: "0.0", within: "[0, 1)",
		doc: "share of an adapter's inputs that training sets to 0"},
	{path: "lora.targets", def: "auto", word: "auto",
		doc: "names of modules or their last parts, such as `[q_proj, v_proj]`, or a text: a regular expression of " +
			"whole names, such as `model.layers.[0-3].*[qv]_proj`; auto or `all-linear`: all linear layers of the " +
			"blocks. Of experts: docs/experts.md"},
	{path: "lora.target_parameters", def: "null", word: "null",
		doc: "names, or their last parts, of matrices of experts and routers, such as `[mlp.experts.down_proj]`; " +
			"needs dropout 0; targets may be `[]`; null: none"},
	{path: "lora.rslora", def: "false", doc: "alpha / sqrt(r) in place of alpha / r (arXiv:2312.03732)"},
	{path: "lora.from", def: "null", word: "null",
		doc: "PEFT adapter directory to continue, with its own keys except dropout and base; null: new adapters"},
	{path: "lora.base", def: "auto", choices: []string{"bf16", "fp8", "auto"},
		doc: "type of the frozen matrices of layers; fp8: E4M3 with a factor for each row, which needs " +
			"precision.linears: fp8; bf16: the type of compute; auto: as precision.linears"},
	{path: "lora.exclude_modules", def: "null", word: "null",
		at:  func(c *Config) any { return &c.Model.Tuning.LoRA.Exclude },
		doc: "targets without an adapter, in the same forms"},
	{path: "lora.layers_to_transform", def: "null", word: "null", max: maxLayers,
		at:  func(c *Config) any { return &c.Model.Tuning.LoRA.Layers },
		doc: "layers with adapters, from 0, or one number; does not restrict whole names in targets; null: all"},
	{path: "lora.layers_pattern", def: "null", word: "null",
		doc: "lists that layers_to_transform counts, such as `layers`; null: any"},
	{path: "lora.rank_pattern", def: "null", word: "null",
		doc: "ranks in place of r, such as `{down_proj: 32, 'layers\\.[01]\\..*q_proj': 4}`, by regular expressions " +
			"of a module's last parts; the first match applies"},
	{path: "lora.alpha_pattern", def: "null", word: "null", doc: "alphas in place of alpha, likewise"},
	{path: "lora.modules_to_save", def: "null", word: "null",
		doc: "ends of the names of modules that train whole, such as `[embed_tokens, lm_head]`; a tied pair stays " +
			"tied"},

	{path: "optimizer.name", def: "adamw", choices: []string{"adamw"}, doc: "the algorithm"},
	{path: "optimizer.lr", def: "3.0e-4", within: "[0, inf)", doc: "highest learning rate"},
	{path: "optimizer.betas", def: "[0.9, 0.95]", within: "[0, 1)",
		doc: "decay of the means of gradient and square"},
	{path: "optimizer.eps", def: "1.0e-8", within: "[1e-38, inf)", doc: "added to the root of the running mean square"},
	{path: "optimizer.weight_decay", def: "0.1", within: "[0, inf)",
		doc: "each step multiplies weights by 1 - this x learning rate"},
	{path: "optimizer.grad_clip", def: "1.0", within: "[0, inf)", doc: "largest global norm of the gradient; 0: off"},

	{path: "lr_schedule.name", def: "cosine", choices: []string{"cosine", "linear", "constant", "wsd"},
		doc: "wsd is warmup, stable, decay"},
	{path: "lr_schedule.warmup_steps", def: "0", word: "null", wordIs: -1,
		doc: "steps in which the rate rises from 0 to lr; null: by `warmup_ratio`, else 0"},
	{path: "lr_schedule.warmup_ratio", def: "null", word: "null", within: "[0, 1]",
		doc: "share of train.steps, rounded up, in place of `warmup_steps`"},
	{path: "lr_schedule.min_lr", def: "null", word: "null", wordIs: -1, within: "[0, inf)",
		doc: "the rate falls to this (not with constant), one step after the last; null: a tenth of optimizer.lr"},

	{path: "parallel.context", def: "auto", word: "auto", min: 1, max: maxRanks,
		doc: "ranks that share one sequence; auto: by costs, else all ranks / data"},
	{path: "parallel.data", def: "auto", word: "auto", min: 1, max: maxRanks,
		doc: "groups of such ranks; auto: by costs, else all ranks / context"},
	{path: "parallel.algorithm", def: "auto", choices: []string{"ring", "allgather", "ulysses", "hierarchical", "auto"},
		doc: "ring: keys and values go from rank to rank; allgather: all at once; ulysses: ranks exchange rows for " +
			"heads; hierarchical: ulysses in groups of ulysses_degree ranks, a ring over groups; auto: by costs " +
			"(docs/planner.md), else ring, or allgather with layout document on a CPU"},
	{path: "parallel.ulysses_degree", def: "auto", word: "auto", min: 1, max: maxRanks,
		at: func(c *Config) any { return &c.Parallel.Inner },
		doc: "neighbouring ranks that exchange heads, a divisor of context; auto: by costs, else the most on one " +
			"host that divide the heads; only with hierarchical"},
	{path: "parallel.gather_heads", def: "0", max: maxHeads,
		doc: "key-value heads gathered at a time; fewer take less memory; 0: all, unless costs choose the algorithm; " +
			"only with allgather"},
	{path: "parallel.gather", def: "auto", choices: []string{"beside", "before", "auto"},
		doc: "ranks send rows beside a first kernel call on their own, or before the only call; only with allgather, " +
			"or with sliding windows and not ulysses"},
	{path: "parallel.layout", def: "auto",
		choices: []string{"zigzag", "striped", "contiguous", "window", "document", "document-zigzag", "auto"},
		doc: "the positions of each rank; window: a zigzag of the first window, then contiguous; document: documents " +
			"distributed by work; document-zigzag: each cut like zigzag; auto: by costs, else zigzag, or document with " +
			"pack_documents"},
	{path: "parallel.transport", def: "auto", choices: []string{"nccl", "copy", "auto"},
		doc: "moves keys and values between GPUs: nccl, or copy (copy engines of one host); auto: copy where " +
			"possible, " +
			"on CPUs the only value"},
	{path: "parallel.deadline", def: "auto", word: "auto", least: time.Second,
		doc: "how long a rank may stall before the others name it and end the run; auto: 5m, after three steps 20 " +
			"times the longest step, from 2m to 5m, and at least 5 times that step"},

	{path: "attention.backend", def: "auto", choices: []string{"flash", "fused", "reference", "auto"},
		at: func(c *Config) any { return &c.Parallel.Backend },
		doc: "flash: cprun's kernels; fused: cuDNN; reference: float64, slow; auto: the fastest that can run " +
			"(docs/backends.md)"},
	{path: "attention.sm_margin", def: "0", max: maxSMMargin,
		doc: "SMs that flash on Hopper GPUs leaves to concurrent kernels, such as NCCL's"},
	{path: "attention.debug", def: "0", max: 2,
		doc: "0: quiet; 1: the choice; 2: also every rule that rejected a backend"},

	{path: "precision.compute", def: "auto", choices: []string{"bf16", "fp16", "fp32", "auto"},
		doc: "auto: bf16 on CUDA, fp32 on CPU, where bf16 and fp16 halve activations but cost time; fp16 scales " +
			"the loss"},
	{path: "precision.grad_wire", def: "fp32", choices: []string{"fp32", "bf16"},
		doc: "gradients between ranks; bf16 halves their traffic, needs memory.shard, and keeps float32 sums"},

	{path: "precision.linears", def: "bf16", choices: []string{"bf16", "fp8"},
		at: func(c *Config) any { return &c.Model.Tuning.Linears },
		doc: "matrix products of layers; bf16: in the type of compute; fp8: of E4M3 with a factor for each row, " +
			"about twice as fast on Hopper GPUs, slower on CPU (docs/fp8.md)"},

	{path: "memory.recompute", def: "auto", choices: []string{"none", "selective", "full", "auto"},
		doc: "activations that the backward pass computes again; auto: none on CPU; on CUDA, with shard and offload, " +
			"the fastest that fits (docs/memory.md)"},
	{path: "memory.loss_chunk", def: "auto", word: "auto", min: 1, max: maxLen,
		doc: "tokens with logits in memory at once; auto: at most 1024, on CUDA 8192"},
	{path: "memory.shard", def: "auto", choices: []string{"none", "optimizer", "gradients", "parameters", "auto"},
		doc: "state divided among the ranks, each with the ones before it; auto: gradients on several GPUs, or " +
			"parameters if needed to fit; optimizer on several ranks of CPUs; else none"},
	{path: "memory.offload", def: "auto", choices: []string{"off", "activations", "optimizer", "both", "auto"},
		doc: "moves to host memory: saved activations that the device lacks memory for, float32 weights and moments, " +
			"or both; auto: off, unless a run on CUDA needs it to fit"},
	{path: "memory.reserve", def: string(autoReserve), word: "auto",
		doc: "memory of each device that plans leave free, such as 4G; auto: 3%"},

	{path: "checkpoint.every", def: "0", doc: "optimizer steps between two checkpoints; 0: not by steps"},
	{path: "checkpoint.interval", def: "15m", doc: "longest time between two checkpoints; 0: no limit"},
	{path: "checkpoint.keep", def: "3", doc: "newest checkpoints to keep; 0: all"},
	{path: "checkpoint.async", def: "auto", word: "auto",
		doc: "true: write during training, from a copy of the state in host memory; false: training waits; auto: " +
			"true if the host's memory holds the copy"},
	{path: "checkpoint.best", def: "false",
		doc: "also save after each validation with the lowest loss so far, as `checkpoints/best`, kept beyond " +
			"`keep`; needs data.validation"},

	{path: "log.every", def: "auto", word: "auto", min: 1,
		doc: "optimizer steps between two lines of the output and of `metrics.jsonl`; auto: about 60 lines of " +
			"output, but every step in `metrics.jsonl`"},
	{path: "log.samples.every", def: "0", doc: "optimizer steps between two rounds of answers; 0: none"},
	{path: "log.samples.prompts", def: "[]", doc: "at most 10 prompts of at most 1024 tokens"},
	{path: "log.tensorboard", def: "true", doc: "write TensorBoard event files to the run directory"},
	{path: "log.prometheus", def: `""`, doc: "address to serve metrics on, such as `:9090`; empty: none"},
	{path: "log.trace_steps", def: "0", doc: "steps to record in `trace.json`"},
}

// These indexes of the table are for lookups.
var (
	keyAt      = map[string]*key{}     // by path
	isSection  = map[string]bool{}     // by path
	childrenOf = map[string][]string{} // names of a section's keys and sections, in order
	keysNamed  = map[string][]string{} // paths by last name
)

func init() {
	listed := map[string]bool{}
	note := func(path string) {
		section, name := split(path)
		if !listed[path] {
			listed[path] = true
			childrenOf[section] = append(childrenOf[section], name)
		}
	}
	for _, s := range sections {
		isSection[s.path] = true
	}
	for i := range keys {
		k := &keys[i]
		if k.max == 0 {
			k.max = maxInt
		}
		if k.at == nil {
			k.at = fieldNamed(k.path)
		}
		section, name := split(k.path)
		keyAt[k.path] = k
		keysNamed[name] = append(keysNamed[name], k.path)
		if section != "" {
			note(section)
		}
		note(k.path)
	}
}

// fieldNamed returns the accessor of a path: in each struct, the field of that name without underscores.
func fieldNamed(path string) func(*Config) any {
	var index []int
	if strings.HasPrefix(path, loraSection+".") {
		path = "model.tuning." + path
	}
	t := reflect.TypeFor[Config]()
	for name := range strings.SplitSeq(path, ".") {
		name = strings.ReplaceAll(name, "_", "")
		f, ok := t.FieldByNameFunc(func(field string) bool { return strings.EqualFold(field, name) })
		if !ok {
			panic("config: no field of Config has the name of key " + path)
		}
		index = append(index, f.Index...)
		if t = f.Type; t.Kind() == reflect.Pointer {
			t = t.Elem()
		}
	}
	return func(c *Config) any { return reflect.ValueOf(c).Elem().FieldByIndex(index).Addr().Interface() }
}

func split(path string) (section, name string) {
	i := strings.LastIndexByte(path, '.')
	return path[:max(i, 0)], path[i+1:]
}

// These sections may be absent.
const (
	ropeSection = "model.rope_scaling"
	loraSection = "lora"
)

func isOptional(section string) bool { return section == ropeSection || section == loraSection }

// lacks reports whether an optional section is absent.
func (c *Config) lacks(section string) bool {
	return section == ropeSection && c.Model.RopeScaling == nil || section == loraSection && c.Model.Tuning.LoRA == nil
}
