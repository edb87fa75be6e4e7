package config

import (
	"maps"
	"slices"
	"strings"
)

// distance returns the edit distance of two words, with swaps of neighbours (optimal string alignment).
func distance(a, b string) int {
	before, last, row := []int(nil), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(row[j-1]+1, last[j]+1, last[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last, row = last, row, make([]int, len(b)+1)
	}
	return last[len(b)]
}

// Nearest returns the closest choice to a word, or "" if none is close. A third of the letters may differ, or one of a
// short word, but not all. The word may also be a longer form of the choice (LlamaForCausalLM).
func Nearest(word string, choices []string) string {
	if word == "" || len(word) > 64 {
		return ""
	}
	fold := func(s string) string { return strings.ReplaceAll(strings.ToLower(s), "-", "_") }
	best, bestAt := "", len(word)
	for _, c := range choices {
		w, f := fold(word), fold(c)
		d := distance(w, f)
		if shorter := min(len(w), len(f)); d > max(1, shorter/3) || d >= shorter && d > 0 {
			if len(f) < 3 || !strings.HasPrefix(w, f) {
				continue
			}
			d = len(word) - 1
		}
		if best == "" || d < bestAt {
			best, bestAt = c, d
		}
	}
	return best
}

const unknownSection = "unknown section"

// unknownKey returns the message for an unknown key, and the keys that it probably means.
func unknownKey(section, name string) (msg string, meant []string) {
	if keyAt[name] != nil && strings.Contains(name, ".") {
		return "unknown key; write it nested: " + strings.ReplaceAll(name, ".", ": {") + ": ...}", []string{name}
	}
	switch said, ok := meaning(section, name); {
	case keyAt[said] != nil || isSection[said]:
		return "unknown key; did you mean " + said + "?", []string{said}
	case strings.HasPrefix(said, "--"):
		return "unknown key; it is the flag " + said, nil
	case ok:
		return "unknown key; " + said, mentioned(said)
	}
	if meant = guesses(section, name); len(meant) > 0 {
		return "unknown key; did you mean " + strings.Join(meant, " or ") + "?", meant
	}
	if children := childrenOf[section]; section != "" && len(children) > 0 {
		return "unknown key; " + section + " has " + strings.Join(children, ", "), nil
	}
	if keyAt[section] != nil {
		return "unknown key; " + section + " has no keys within; write its whole value", []string{section}
	}
	return unknownSection + "; the sections are " + strings.Join(childrenOf[""], ", "), nil
}

// guesses returns the keys that a name may mean: a similar key of its section, the same name in a section of similar
// name or in any section, or a similar name anywhere.
func guesses(section, name string) []string {
	if s := Nearest(name, childrenOf[section]); s != "" {
		return []string{join(section, s)}
	}
	if !isSection[section] && section != "" {
		var paths []string
		for _, s := range sections {
			paths = append(paths, s.path)
		}
		if path := join(Nearest(section, paths), name); keyAt[path] != nil {
			return []string{path}
		}
	}
	if paths := keysNamed[name]; len(paths) > 0 {
		return paths
	}
	return keysNamed[Nearest(name, slices.Sorted(maps.Keys(keysNamed)))]
}

func mentioned(sentence string) []string {
	var paths []string
	for _, word := range strings.Fields(sentence) {
		if word = strings.Trim(word, "?,;:()"); keyAt[word] != nil {
			paths = append(paths, word)
		}
	}
	return paths
}

func join(section, name string) string {
	if section == "" {
		return name
	}
	return section + "." + name
}

// renames lists equivalent spellings, accepted silently: rope_scaling in the config.json of older and newer
// transformers.
var renames = map[string]string{
	"model.rope_parameters":         "model.rope_scaling",
	"model.rope_scaling.type":       "model.rope_scaling.rope_type",
	"model.rope_scaling.rope_theta": "model.rope_theta",
}

// renamed maps former names of keys to current ones. They are read with a warning.
var renamed = map[string]string{"parallel.inner": "parallel.ulysses_degree"}

// retired lists former keys and values that have no effect any more. They are ignored with a warning.
var retired = map[string][]string{
	"precision.fp8": {"off"}, "precision.kv_wire": {"auto", "bf16", "fp16", "fp32"}, "checkpoint.local": {"null"},
}

// byName reads lines "NAME… = MEANING" into a map by name.
func byName(lines string) map[string]string {
	of := map[string]string{}
	for line := range strings.Lines(strings.TrimSpace(lines)) {
		names, meaning, _ := strings.Cut(strings.TrimSpace(line), " = ")
		for name := range strings.FieldsSeq(names) {
			of[name] = meaning
		}
	}
	return of
}

// otherWords maps values of other trainers to ours.
var otherWords = byName(`
bfloat16 torch.bfloat16 = bf16
float16 half = fp16
float32 float fp64 = fp32
cudnn = fused
sdpa = flash
eager math = reference
p2p = ring
a2a alltoall all_to_all = ulysses
a2a+p2p = hierarchical
all_gather = allgather
load_balanced balanced head_tail = zigzag
zero1 = optimizer
zero2 = gradients
zero3 fsdp = parameters
block everything = full
warmup_stable_decay = wsd
`)

// foreign lists names of keys and flags in axolotl, TRL, transformers, torchtitan, torchrun, accelerate, Megatron,
// DeepSpeed, llm.c and nanoGPT. A name means a key of train.yaml, a flag of cprun, or a sentence of advice. A name
// without a section applies in every section.
const foreign = `
model_type architectures arch flavor base_model_config = model.architecture
n_vocab vocab padded_vocab_size = model.vocab_size
hidden_dim n_embd d_model dim embed_dim embedding_dim = model.hidden_size
ffn_dim ffn_hidden_size d_ff mlp_dim ffn_size = model.intermediate_size
n_layer n_layers num_layers layers = model.num_hidden_layers
n_head n_heads num_heads heads = model.num_attention_heads
n_kv_head n_kv_heads num_kv_heads kv_heads num_query_groups = model.num_key_value_heads
d_head head_size kv_channels = model.head_dim
rope_base rotary_base theta = model.rope_theta
norm_eps layer_norm_eps layernorm_epsilon rmsnorm_eps = model.rms_norm_eps
tie_embeddings tied_embeddings weight_tying = model.tie_word_embeddings
window window_size attention_window = model.sliding_window
model_path pretrained pretrained_model_name_or_path model_name name_or_path model_name_or_path = model.from
base_model hf_assets_path initial_load_path model_id checkpoint_path = model.from
seq_length sequence_length block_size context_length max_seq_len max_length = data.seq_len
sequence_len max_seq_length max_position_embedding model_max_length = data.seq_len
dataset datasets dataset_path dataset_name data_path train_data train_files = data.path
tokenizer_path tokenizer_name tokenizer_config tokenizer_name_or_path = data.tokenizer
chat_template_path chat_template_jinja = data.chat_template
train_on_inputs assistant_only_loss completion_only_loss roles_to_train = data.train_on
excess_length_strategy = data.overlong
dataset_prepared_path = data.cache
data_seed shuffle_seed = data.seed
shuffle_dataset = data.shuffle
eos_id eot_token eod_token = data.eos_token_id
packing pack reset_attention_mask reset_position_ids sample_packing padding_free = data.pack_documents
eval_interval eval_every val_every val_loss_every eval_steps train.eval_every validation.freq = data.validation.every
eval_iters val_steps val_max_steps eval_samples max_eval_samples = data.validation.samples
val_path val_data eval_path validation_path test_datasets validation.dataset_path = data.validation.path
max_steps num_steps max_iters train_iters num_iterations total_steps iters train.max_steps = train.steps
num_epochs num_train_epochs = train.epochs
global_batch gbs total_batch_size = train.global_batch_size
micro_batch mbs per_device_train_batch_size local_batch_size train_micro_batch_size_per_gpu = train.micro_batch_size
full_determinism = train.deterministic
unfrozen_parameters frozen_parameters = train.freeze
use_peft adapter peft peft_config lora_config = lora
lora_r lora_rank = lora.r
lora_alpha = lora.alpha
lora_dropout = lora.dropout
lora_target_modules target_modules lora_target_linear = lora.targets
lora_target_parameters = lora.target_parameters
lora_modules_to_save = lora.modules_to_save
lora_model_dir adapter_name_or_path = lora.from
use_rslora peft_use_rslora = lora.rslora
learning_rate max_lr = optimizer.lr
clip_grad max_grad_norm max_norm gradient_clipping gradient_clip_val clip_norm = optimizer.grad_clip
adam_eps adam_epsilon epsilon = optimizer.eps
beta1 beta2 adam_beta1 adam_beta2 = optimizer.betas
wd decay = optimizer.weight_decay
optim optimizer.type = optimizer.name
lr_warmup_steps warmup warmup_iters lr_warmup_iters num_warmup_steps = lr_schedule.warmup_steps
lr_warmup_ratio lr_warmup_fraction = lr_schedule.warmup_ratio
lr_scheduler lr_scheduler_type lr_decay_style scheduler lr_schedule.type decay_type = lr_schedule.name
lr_min end_lr eta_min cosine_min_lr_ratio min_lr_factor lr_scheduler_kwargs = lr_schedule.min_lr
cp cp_size context_parallel context_parallel_size context_parallel_degree sp sp_size ring_size = parallel.context
sequence_parallel_degree sequence_parallel_size parallelism_config = parallel.context
dp dp_size data_parallel data_parallel_size data_parallel_degree data_parallel_replicate_degree = parallel.data
cp_comm_type cp_comm_strategy context_parallel_rotate_method ring_attn_func = parallel.algorithm
heads_k_stride = parallel.gather_heads
ddp_timeout init_timeout_seconds = parallel.deadline
attn_implementation attention_backend attn_backend flash_attention sdp_attention = attention.backend
torch_dtype dtype mixed_precision bf16 fp16 mixed_precision_param = precision.compute
mixed_precision_reduce = precision.grad_wire
float8 fp8 enable_fp8 = precision.linears
activation_checkpointing gradient_checkpointing activation_checkpoint recompute_granularity = memory.recompute
activation_checkpoint.mode = memory.recompute
cpu_offload offload_optimizer activation_offloading enable_cpu_offload = memory.offload
zero_stage zero fsdp fsdp_config deepspeed sharding_strategy data_parallel_shard_degree = memory.shard
save_interval save_every save_steps checkpoint_every checkpoint.save_every saves_per_epoch = checkpoint.every
save_total_limit keep_latest_k keep_last = checkpoint.keep
async_mode = checkpoint.async
early_stopping_patience = train.early_stop.patience
early_stopping_threshold = train.early_stop.min_delta
load_best_model_at_end save_best metric_for_best_model = checkpoint.best
log_interval log_every logging_steps log_freq log.interval = log.every
enable_tensorboard logging_dir = log.tensorboard
profiling enable_profiling profile_freq = log.trace_steps
model.rope_scaling.name = model.rope_scaling.rope_type
output_dir run_dir dump_folder job.dump_folder = --run-dir
device = --device
nproc nproc_per_node num_processes num_gpus gpus ngpus gpus_per_node n_gpus = --nproc
num_nodes num_machines nodes = --nnodes
machine_rank = --node-rank
master_addr master_port rdzv_endpoint main_process_ip main_process_port = --rendezvous
local_addr = --interface
resume resume_from_checkpoint auto_resume_from_checkpoints = --resume
standalone rdzv_backend rdzv_id rdzv_conf hostfile = cprun needs none: on one node nothing, on several --rendezvous
redirects tee log_dir = each rank has a log in logs of the run directory; --log-level debug prints all
monitor_interval start_method local_ranks_filter role module no_python = cprun starts its own processes; remove it
config config_file config_name job.config_file = the config is the argument: cprun train.yaml
override overrides = to override a key, write --set key.path=value
report_to wandb wandb_project wandb_entity wandb_name = W&B imports the files of log.tensorboard; remove it
mlflow_tracking_uri = MLflow imports the files of log.tensorboard; remove it
run_name = the name of a run is that of its --run-dir; remove it
bias qkv_bias = did you mean model.attention_bias or model.mlp_bias?
hidden_act = the activation is always silu; remove it
attention_dropout = there is no dropout; remove it
use_cache = training keeps no cache; remove it
transformers_version = nothing depends on it; remove it
bos_token_id = documents get no first token; remove it
pad_token_id pad_token pad_to_sequence_len = cprun does not pad; remove it
eos_token special_tokens tokens added_tokens_decoder = tokens are those of the tokenizer's files; remove it
no_rope_layer_interval = no_rope_layers says which layers rotate
use_sliding_window = sliding_window alone says it: null for none
max_window_layers = layer_types says which layers slide
tensor_parallel tp = there is no tensor parallelism; ranks are parallel.context x parallel.data
tensor_parallel_size tensor_parallel_degree = there is no tensor parallelism; remove it
pipeline_parallel pp = there is no pipeline parallelism; ranks are parallel.context x parallel.data
pipeline_parallel_degree = there is no pipeline parallelism; remove it
expert_parallel expert_parallel_degree = there is no expert parallelism; experts are weights that memory.shard divides
load_in_4bit load_in_8bit qlora use_dora lora_fan_in_fan_out = the base of an adapter stays in bf16; remove it
batch_size train_batch_size = did you mean train.global_batch_size (of a step) or train.micro_batch_size (of a pass)?
gradient_accumulation grad_accum = it follows from train.global_batch_size / (micro_batch_size x parallel.data)
gradient_accumulation_steps = it follows from train.global_batch_size / (micro_batch_size x parallel.data)
torch_compile compile use_liger_kernel plugins tf32 xformers_attention = cprun has kernels of its own; remove it
trust_remote_code model_revision revision strict tokenizer_type = nothing depends on it; remove it
dataloader_num_workers dataset_num_proc group_by_length remove_unused_columns = data is read on all cores; remove it
val_set_size dataset_test_split eval_strategy evals_per_epoch = name held-out files in data.validation.path
push_to_hub hub_model_id = cprun uploads nothing; cprun export writes a directory, and hf upload sends it
neftune_noise_alpha label_smoothing_factor = there is none; remove it
dataset_text_field field_messages = texts are under the key text, chats under messages; remove it
<< = merge keys are not supported; write the keys themselves
validation.steps data.validation.steps = validation is counted in samples: write data.validation.samples, or 0 for all
`

// meanings maps the names of foreign to their meanings.
var meanings = byName(foreign)

// foreignSections are sections of torchtitan that hold keys of several of ours.
var foreignSections = strings.Fields("training parallelism lr_scheduler metrics job activation_checkpoint validation " +
	"debug profiling comm")

// meaning returns the meaning of a name in other programs.
func meaning(section, name string) (text string, ok bool) {
	if text, ok = meanings[join(section, name)]; !ok && len(keysNamed[name]) == 0 {
		text, ok = meanings[name]
	}
	return text, ok
}

// FlagAdvice returns the advice for an unknown flag that is a key of train.yaml, or a key or flag of another program;
// "" for other flags.
func FlagAdvice(name string) string {
	section, last := split(name)
	text, ok := meaning(section, strings.ReplaceAll(last, "-", "_"))
	switch {
	case keyAt[name] != nil:
		text = name
	case !ok && len(keysNamed[last]) > 0:
		text = strings.Join(keysNamed[last], "=… or --set ")
	case keyAt[text] == nil && !isSection[text] && !strings.HasPrefix(text, "--"):
		return text
	}
	if strings.HasPrefix(text, "--") {
		return "did you mean " + text + "?"
	}
	return "did you mean --set " + text + "=…?"
}
