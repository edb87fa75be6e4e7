package config

// renames are other spellings that mean exactly the same and are taken as they are: the forms
// of rope_scaling in the config.json of older and newer transformers.
var renames = map[string]string{
	"model.rope_parameters":         "model.rope_scaling",
	"model.rope_scaling.type":       "model.rope_scaling.rope_type",
	"model.rope_scaling.rope_theta": "model.rope_theta",
}

// unbuiltKeys are keys and sections that are planned and not in this build, with the key to write instead.
var unbuiltKeys = map[string]string{
	"lora": "", "train.freeze": "", "train.epochs": "write train.steps", "train.early_stop": "", "lr_schedule.warmup_ratio": "write lr_schedule.warmup_steps",
	"checkpoint.best": "", "data.format": "", "data.chat_template": "", "data.train_on": "", "data.overlong": "", "data.cache": "",
	"model.partial_rotary_factor": "", "model.no_rope_layers": "",
}

// otherWords are values under the names of others.
var otherWords = map[string]string{
	"bfloat16": "bf16", "torch.bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "fp64": "fp32",
	"cudnn": "fused", "sdpa": "flash", "eager": "reference", "math": "reference",
	"p2p": "ring", "a2a": "ulysses", "alltoall": "ulysses", "all_to_all": "ulysses", "a2a+p2p": "hierarchical", "all_gather": "allgather",
	"load_balanced": "zigzag", "balanced": "zigzag", "head_tail": "zigzag",
	"zero1": "optimizer", "zero2": "gradients", "zero3": "parameters", "fsdp": "parameters",
	"block": "full", "everything": "full", "warmup_stable_decay": "wsd",
}

// otherNames are the names that other trainers use, with ours. A key without a section holds
// in every section.
var otherNames = func() map[string]string {
	m := map[string]string{
		"torch_dtype":             "the type of computation is precision.compute",
		"dtype":                   "the type of computation is precision.compute",
		"mixed_precision":         "the type of computation is precision.compute",
		"attention_bias":          "projections have no bias here; take the key out",
		"mlp_bias":                "projections have no bias here; take the key out",
		"bias":                    "projections have no bias here; take the key out",
		"hidden_act":              "the activation is always silu; take the key out",
		"attention_dropout":       "there is no dropout; take the key out",
		"dropout":                 "there is no dropout; take the key out",
		"use_cache":               "training keeps no cache; take the key out",
		"transformers_version":    "take the key out; nothing depends on it",
		"bos_token_id":            "no token is put in front of documents; take the key out",
		"pad_token_id":            "nothing is padded; take the key out",
		"partial_rotary_factor":   "rope turns the whole head; take the key out",
		"use_sliding_window":      "sliding_window alone says it: null for none",
		"max_window_layers":       "layer_types says which layers slide",
		"epochs":                  "the length of a run is train.steps",
		"num_epochs":              "the length of a run is train.steps",
		"num_train_epochs":        "the length of a run is train.steps",
		"tensor_parallel":         "there is no tensor parallelism; ranks are parallel.context x parallel.data",
		"tp":                      "there is no tensor parallelism; ranks are parallel.context x parallel.data",
		"pipeline_parallel":       "there is no pipeline parallelism; ranks are parallel.context x parallel.data",
		"pp":                      "there is no pipeline parallelism; ranks are parallel.context x parallel.data",
		"batch_size":              "did you mean train.global_batch_size (of one optimizer step) or train.micro_batch_size (of one pass)?",
		"train_batch_size":        "did you mean train.global_batch_size (of one optimizer step) or train.micro_batch_size (of one pass)?",
		"gradient_accumulation":   "it follows from train.global_batch_size / (micro_batch_size x parallel.data)",
		"grad_accum":              "it follows from train.global_batch_size / (micro_batch_size x parallel.data)",
		"output_dir":              "the run directory is the flag --run-dir",
		"run_dir":                 "the run directory is the flag --run-dir",
		"device":                  "the device is the flag --device",
		"nproc":                   "the number of processes is the flag --nproc",
		"resume":                  "where to go on is the flag --resume",
		"<<":                      "merge keys are not read; write the keys out",
		"train.max_steps":         "did you mean train.steps?",
		"train.eval_every":        "did you mean data.validation.every?",
		"validation.steps":        "validation is counted in samples: write data.validation.samples, or 0 for all",
		"data.validation.steps":   "validation is counted in samples: write data.validation.samples, or 0 for all",
		"checkpoint.save_every":   "did you mean checkpoint.every?",
		"log.interval":            "did you mean log.every?",
		"lr_schedule.type":        "did you mean lr_schedule.name?",
		"optimizer.type":          "did you mean optimizer.name?",
		"model.rope_scaling.name": "did you mean model.rope_scaling.rope_type?",

		"gradient_accumulation_steps": "it follows from train.global_batch_size / (micro_batch_size x parallel.data)",
	}
	for target, names := range foreign {
		for _, n := range names {
			m[n] = "did you mean " + target + "?"
		}
	}
	return m
}()

// foreign lists, by key of ours, what llm.c, nanoGPT, torchtitan, Megatron, DeepSpeed,
// accelerate and Hugging Face call it.
var foreign = map[string][]string{
	"model.architecture":        {"model_type", "architectures", "arch", "flavor"},
	"model.vocab_size":          {"n_vocab", "vocab", "padded_vocab_size"},
	"model.hidden_size":         {"hidden_dim", "n_embd", "d_model", "dim", "embed_dim", "embedding_dim"},
	"model.intermediate_size":   {"ffn_dim", "ffn_hidden_size", "d_ff", "mlp_dim", "ffn_size"},
	"model.num_hidden_layers":   {"n_layer", "n_layers", "num_layers", "layers"},
	"model.num_attention_heads": {"n_head", "n_heads", "num_heads", "heads"},
	"model.num_key_value_heads": {"n_kv_head", "n_kv_heads", "num_kv_heads", "kv_heads", "num_query_groups"},
	"model.head_dim":            {"d_head", "head_size", "kv_channels"},
	"model.rope_theta":          {"rope_base", "rotary_base", "theta"},
	"model.rms_norm_eps":        {"norm_eps", "layer_norm_eps", "layernorm_epsilon", "rmsnorm_eps"},
	"model.tie_word_embeddings": {"tie_embeddings", "tied_embeddings", "weight_tying"},
	"model.sliding_window":      {"window", "window_size", "attention_window"},
	"model.from":                {"model_path", "pretrained", "pretrained_model_name_or_path", "model_name", "name_or_path"},
	"data.seq_len":              {"seq_length", "sequence_length", "block_size", "context_length", "max_seq_len", "max_length"},
	"data.path":                 {"dataset", "dataset_path", "data_path", "train_data", "train_files"},
	"data.eos_token_id":         {"eos_id", "eot_token", "eod_token"},
	"data.pack_documents":       {"packing", "pack", "reset_attention_mask", "reset_position_ids", "sample_packing"},
	"data.validation.every":     {"eval_interval", "eval_every", "val_every", "val_loss_every", "eval_steps"},
	"data.validation.samples":   {"eval_iters", "val_steps", "val_max_steps", "eval_samples", "max_eval_samples"},
	"data.validation.path":      {"val_path", "val_data", "eval_path", "validation_path"},
	"train.steps":               {"max_steps", "num_steps", "max_iters", "train_iters", "num_iterations", "total_steps", "iters"},
	"train.global_batch_size":   {"global_batch", "gbs", "total_batch_size"},
	"train.micro_batch_size":    {"micro_batch", "mbs", "per_device_train_batch_size", "local_batch_size", "train_micro_batch_size_per_gpu"},
	"optimizer.lr":              {"learning_rate", "max_lr"},
	"optimizer.grad_clip":       {"clip_grad", "max_grad_norm", "max_norm", "gradient_clipping", "gradient_clip_val", "clip_norm"},
	"optimizer.eps":             {"adam_eps", "adam_epsilon", "epsilon"},
	"optimizer.betas":           {"beta1", "beta2", "adam_beta1", "adam_beta2"},
	"optimizer.weight_decay":    {"wd", "decay"},
	"lr_schedule.warmup_steps":  {"lr_warmup_steps", "warmup", "warmup_iters", "lr_warmup_iters", "num_warmup_steps"},
	"lr_schedule.name":          {"lr_scheduler", "lr_scheduler_type", "lr_decay_style", "scheduler"},
	"lr_schedule.min_lr":        {"lr_min", "end_lr", "eta_min"},
	"parallel.context":          {"cp", "cp_size", "context_parallel", "context_parallel_size", "context_parallel_degree", "sp", "sp_size", "ring_size"},
	"parallel.data":             {"dp", "dp_size", "data_parallel", "data_parallel_size", "data_parallel_degree"},
	"parallel.algorithm":        {"cp_comm_type", "cp_comm_strategy", "context_parallel_rotate_method"},
	"attention.backend":         {"attn_implementation", "attention_backend", "attn_backend"},
	"memory.recompute":          {"activation_checkpointing", "gradient_checkpointing", "activation_checkpoint", "recompute_granularity"},
	"memory.offload":            {"cpu_offload", "offload_optimizer"},
	"memory.shard":              {"zero_stage", "zero", "fsdp", "sharding_strategy"},
	"checkpoint.every":          {"save_interval", "save_every", "save_steps", "checkpoint_every"},
	"checkpoint.keep":           {"save_total_limit", "keep_latest_k", "keep_last"},
	"log.every":                 {"log_interval", "log_every", "logging_steps", "log_freq"},
}
