"""Writes a small model of each family with the loss curve of plain PyTorch training in float32.

Usage: python scripts/oracle/families.py internal/model/testdata/families [name ...]
Needs torch and transformers; the versions are in the output. The files are as in parity.py, with weights in
bfloat16, which training begins with.
"""

import copy
import json
import pathlib
import re
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import (Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, Gemma4ForCausalLM,
                          Gemma4TextConfig, Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig, Glm4MoeConfig,
                          Glm4MoeForCausalLM, GptOssConfig, GptOssForCausalLM, GraniteConfig, GraniteForCausalLM,
                          LlamaConfig, LlamaForCausalLM, Ministral3Config, Ministral3ForCausalLM, MistralConfig,
                          MistralForCausalLM, MixtralConfig, MixtralForCausalLM, Olmo2Config, Olmo2ForCausalLM,
                          Olmo3Config, Olmo3ForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM,
                          Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig,
                          Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM, SeedOssConfig,
                          SeedOssForCausalLM, SmolLM3Config, SmolLM3ForCausalLM)

import parity

STEPS, VOCAB = 10, 96
COMMON = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2,
              num_hidden_layers=2, max_position_embeddings=256, use_cache=False, attn_implementation="eager",
              bos_token_id=1, eos_token_id=2, pad_token_id=None)
RUN = dict(seq=128, weight_decay=0.1, grad_clip=1.0)
LONGROPE = dict(rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75,
                short_factor=[1.0, 1.1, 1.3], long_factor=[1.5, 2.25, 4.0])
GEMMA = dict(COMMON, head_dim=16, sliding_window=24, layer_types=["sliding_attention", "full_attention"])
PLAIN = dict(rope_type="default", rope_theta=10000.0)
BY_LAYER = dict(full_attention=dict(rope_type="linear", rope_theta=50000.0, factor=4.0),
                sliding_attention=dict(rope_type="default", rope_theta=100.0))
SCALED = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32,
              beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5)
FULL_ONLY = dict(full_attention=dict(rope_type="yarn", rope_theta=50000.0, factor=4.0,
                                     original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0),
                 sliding_attention=dict(rope_type="default", rope_theta=100.0))
EXPERTS = dict(COMMON, num_experts_per_tok=2)
SINKS = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64, beta_fast=32.0,
             beta_slow=1.0, truncate=False)
PARTIAL = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25)
QWEN = dict(COMMON, head_dim=16, rope_parameters=dict(PARTIAL, mrope_section=[1, 1, 0], mrope_interleaved=True))
SHARED = dict({**QWEN, "num_experts_per_tok": 2}, num_experts=8, moe_intermediate_size=24,
              shared_expert_intermediate_size=20)
NEXT = dict(SHARED, rope_parameters=PARTIAL)
FULL = dict(layer_types=["full_attention"] * 2)
# A delta rule enlarges differences: at the rate of RUN, two forms of it in transformers have other losses after ten steps.
SLOW = dict(RUN, lr=1e-4)

# The length of a document is two of the chunks of the linear layers.
LINEAR = dict(num_hidden_layers=3, layer_types=["linear_attention", "linear_attention", "full_attention"],
              linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)

# Layers without a window have other heads. The rate keeps the choices of experts the same for sums in another order.
GLOBAL = dict({**COMMON, "num_hidden_layers": 3}, head_dim=16, global_head_dim=32, num_global_key_value_heads=1,
              sliding_window=24, layer_types=["sliding_attention", "sliding_attention", "full_attention"],
              attention_k_eq_v=True, final_logit_softcapping=10.0)
SIX = dict(num_hidden_layers=6, layer_types=2 * GLOBAL["layer_types"])
APART = dict(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=24)

# Windows and trained lengths are shorter than the sequences, so that each key moves the loss.
FAMILIES = {
    "llama-bias": (LlamaForCausalLM, LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True), RUN),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=24,
                                            max_window_layers=1, tie_word_embeddings=True), RUN),
    "mistral": (MistralForCausalLM, MistralConfig(**COMMON, head_dim=16, sliding_window=40), RUN),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config(**{**COMMON, "num_hidden_layers": 3}, no_rope_layer_interval=2,
                                                  use_sliding_window=True, sliding_window=30), RUN),
    "phi3": (Phi3ForCausalLM, Phi3Config(**COMMON, original_max_position_embeddings=64, sliding_window=100,
                                         rope_parameters=LONGROPE), RUN),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**GEMMA, query_pre_attn_scalar=20, attn_logit_softcapping=3.0,
                                               final_logit_softcapping=4.0, rope_parameters=PLAIN), RUN),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**GEMMA, query_pre_attn_scalar=20, final_logit_softcapping=6.0,
                                                   rope_parameters=BY_LAYER), RUN),
    "ministral3": (Ministral3ForCausalLM, Ministral3Config(**COMMON, head_dim=16, rope_parameters=SCALED), RUN),
    "seed-oss": (SeedOssForCausalLM, SeedOssConfig(**COMMON, head_dim=16, attention_dropout=0.0,
                                                   residual_dropout=0.0), RUN),
    "granite": (GraniteForCausalLM, GraniteConfig(**COMMON, embedding_multiplier=3.0, attention_multiplier=0.2,
                                                  residual_multiplier=0.6, logits_scaling=1.7), RUN),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**COMMON), RUN),
    "olmo3": (Olmo3ForCausalLM, Olmo3Config(**COMMON, sliding_window=24, rope_parameters=FULL_ONLY,
                                            layer_types=["sliding_attention", "full_attention"]), RUN),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**EXPERTS, "hidden_size": 64}, head_dim=8, num_experts=8,
                                                      moe_intermediate_size=24, mlp_only_layers=[0],
                                                      norm_topk_prob=False), RUN),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**{**EXPERTS, "intermediate_size": 24}, head_dim=8,
                                                  num_local_experts=8), RUN),
    "glm4_moe": (Glm4MoeForCausalLM, Glm4MoeConfig(**EXPERTS, head_dim=16, n_routed_experts=8, moe_intermediate_size=24,
                                                   first_k_dense_replace=1, n_shared_experts=2, n_group=2,
                                                   topk_group=1, routed_scaling_factor=1.5, use_qk_norm=True,
                                                   attention_bias=True), RUN),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig(**{**EXPERTS, "intermediate_size": 24}, head_dim=16,
                                                num_local_experts=8, sliding_window=8, rope_parameters=SINKS), RUN),
    "qwen3_5_text": (Qwen3_5ForCausalLM, Qwen3_5TextConfig(**{**QWEN, **FULL}), RUN),
    "qwen3_5_moe_text": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**{**SHARED, **FULL}), RUN),
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig(**{**NEXT, **FULL}, mlp_only_layers=[0]), RUN),
    "qwen3_5_text-linear": (Qwen3_5ForCausalLM, Qwen3_5TextConfig(**{**QWEN, **LINEAR}), SLOW),
    "qwen3_5_moe_text-linear": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**{**SHARED, **LINEAR}), SLOW),
    "qwen3_next-linear": (Qwen3NextForCausalLM, Qwen3NextConfig(**{**NEXT, **LINEAR}), SLOW),
    "gemma4_text-dense": (Gemma4ForCausalLM, Gemma4TextConfig(**{**GLOBAL, **SIX}, hidden_size_per_layer_input=0), RUN),
    "gemma4_text": (Gemma4ForCausalLM, Gemma4TextConfig(**GLOBAL, **APART, hidden_size_per_layer_input=0),
                    dict(RUN, lr=1e-3)),
    "gemma4_unified_text": (Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig(
        **{**GLOBAL, "attention_k_eq_v": False}), RUN),
}


def adds_one(model, name):
    """Whether the norms of a model add 1 to their weights; those of linear layers do not."""
    return model.config.model_type.startswith(("gemma2", "gemma3", "qwen3_5", "qwen3_next")) and "linear_attn" not in name


def randomise(model):
    """Biases and sinks are around 0, and so are norms that add 1. All other vectors are around 1. Every value is one of
    bfloat16, except those of a correction of routers. Some gates of gpt_oss are beyond their limit of 7. The first
    head of a linear layer forgets slowly, so that its state crosses chunks and ranks."""
    parity.randomise(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("bias", "sinks")) or adds_one(model, name) and p.dim() == 1:
                p.normal_(0, 0.3)
            if name.endswith("conv1d.weight"):
                p.normal_(0, 0.6)
            if name.endswith("A_log"):
                p.copy_(torch.tensor([-3.0, -1.0, 0.5, 2.0]))
            if model.config.model_type.startswith("gemma4") and name.endswith(("q_norm.weight", "k_norm.weight")):
                p.mul_(0.4)  # scores have no other factor
            if name.endswith("router.proj.weight"):
                p.mul_(8)
            if model.config.model_type == "gpt_oss" and name.endswith("gate_up_proj"):
                p.mul_(5)
            p.copy_(p.bfloat16().float())
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.normal_(0, 0.2)
            if name.endswith("layer_scalar"):
                b.copy_(b.uniform_(0.6, 1).bfloat16().float())


def save(model, out):
    """As bfloat16, with corrections of routers in float32, as transformers keeps them."""
    corrections = {n: b.clone() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    rounded = copy.deepcopy(model).bfloat16()
    for name, b in corrections.items():
        rounded.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = b
    rounded.save_pretrained(out)
    if model.config.model_type == "qwen3_5_moe_text":
        fuse(out / "model.safetensors")
    if model.config.model_type == "gemma4_text" and model.config.enable_moe_block:
        published(out / "config.json")
    (out / "model.safetensors").chmod(0o644)
    (out / "generation_config.json").unlink(missing_ok=True)


def published(path):
    """The published files of gemma4 name the heads of layers without a window; transformers lists them by layer."""
    config = json.loads(path.read_text())
    heads = list(config.pop("per_layer_config").values())[0]
    config["global_head_dim"], config["num_global_key_value_heads"] = heads["head_dim"], heads["num_key_value_heads"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def fuse(path):
    """Stacks the experts, as the published files of qwen3_5_moe have them; transformers writes one by one."""
    tensors = load_file(path)
    expert = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    parts = {}
    for name in list(tensors):
        if found := expert.fullmatch(name):
            parts.setdefault(found[1], {})[int(found[2]), found[3]] = tensors.pop(name)
    for name, of in parts.items():
        count = len(of) // 3
        tensors[name + ".gate_up_proj"] = torch.stack([torch.cat([of[e, "gate"], of[e, "up"]]) for e in range(count)])
        tensors[name + ".down_proj"] = torch.stack([of[e, "down"] for e in range(count)])
    save_file(tensors, path, metadata={"format": "pt"})


def train(model, t, run):
    """Under the names of files."""
    losses, norms, first = parity.train(model, t, **run, steps=STEPS)
    if model.config.model_type == "mixtral":
        grads = first["grad_norms"]
        first["grad_norms"] = {n.replace(".mlp.", ".block_sparse_moe."): x for n, x in grads.items()}
    return losses, norms, first


def main(root, names):
    for i, (name, (cls, cfg, run)) in enumerate(FAMILIES.items()):
        if names and name not in names:
            continue
        torch.manual_seed(2026 + i)
        out = root / name
        model = cls(cfg).float()
        randomise(model)
        save(model, out)
        t = parity.tokens(STEPS * run["seq"] + 1, VOCAB)
        parity.write_tokens(out / "tokens.bin", t)
        parity.write_expect(out, run, STEPS, *train(model, t, run))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
