"""Writes small Hugging Face models with the loss curve of plain PyTorch training in float32.

Usage: python scripts/oracle/parity.py internal/model/testdata/parity
Needs torch and transformers (pip install torch transformers); the versions are in the output.

Each directory it writes holds config.json, model.safetensors, tokens.bin (llm.c) and expect.json.
Step i trains on tokens [i*seq, (i+1)*seq) with the tokens one further as targets: AdamW, constant
learning rate, decay on matrices only, clipping by global norm (0: off). first.grad_norms are after clipping.
"""

import json
import pathlib
import struct
import sys

import torch
import torch.nn.functional as F
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

COMMON = dict(vocab_size=256, hidden_size=64, num_hidden_layers=2, max_position_embeddings=256, use_cache=False,
              attn_implementation="eager")

# Both are scaled beyond their original length, and their training sequences are longer than
# that length, so that every branch of the scaling moves the loss.
MODELS = {
    "tiny-qwen3-yarn": (
        Qwen3ForCausalLM,
        Qwen3Config(**COMMON, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                    rms_norm_eps=1e-6, tie_word_embeddings=True,
                    rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
                                         original_max_position_embeddings=64)),
        dict(seq=192, weight_decay=0.1, grad_clip=1.0),
    ),
    "tiny-llama3-gqa": (
        LlamaForCausalLM,
        LlamaConfig(**COMMON, intermediate_size=112, num_attention_heads=8, num_key_value_heads=2, head_dim=16,
                    rms_norm_eps=1e-5, tie_word_embeddings=False,
                    rope_parameters=dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
                                         high_freq_factor=4.0, original_max_position_embeddings=64)),
        dict(seq=256, weight_decay=0.1, grad_clip=0.7),
    ),
}
STEPS, LR, BETAS, EPS = 12, 3e-3, (0.9, 0.95), 1e-8


def randomise(model):
    """Weights larger than a fresh model's, so that attention is far from uniform, and norms that are not 1."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.12)
            else:
                p.uniform_(0.5, 1.5)


def tokens(n, vocab=256):
    """Some tokens are frequent and many repeat with a period: there is something to learn, near and far."""
    t = (torch.rand(n) ** 3 * vocab).long()
    copy = torch.rand(n) < 0.6
    for i in range(37, n):
        if copy[i]:
            t[i] = t[i - 37]
    return t


def write_tokens(path, t):
    header = struct.pack("<3i", 20240520, 1, len(t)).ljust(1024, b"\0")
    path.write_bytes(header + struct.pack(f"<{len(t)}H", *t.tolist()))


def train(model, t, seq, weight_decay, grad_clip, steps=STEPS, lr=None):
    is_matrix = {n: p.dim() > 1 and not n.endswith(("bias", "conv1d.weight")) for n, p in model.named_parameters()}
    matrices = [p for n, p in model.named_parameters() if is_matrix[n]]
    vectors = [p for n, p in model.named_parameters() if not is_matrix[n]]
    opt = torch.optim.AdamW([dict(params=matrices, weight_decay=weight_decay), dict(params=vectors, weight_decay=0.0)],
                            lr=lr or LR, betas=BETAS, eps=EPS)
    losses, norms, first = [], [], None
    for step in range(steps):
        ids = t[step * seq:(step + 1) * seq][None]
        targets = t[step * seq + 1:(step + 1) * seq + 1]
        logits = model(input_ids=ids).logits[0]
        loss = F.cross_entropy(logits, targets)
        opt.zero_grad()
        loss.backward()
        limit = grad_clip if grad_clip > 0 else float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        if first is None:
            first = {
                "logits_row0": logits[0, :8].tolist(),
                "logits_last": logits[-1, :8].tolist(),
                "grad_norms": {n: p.grad.norm().item() for n, p in model.named_parameters()},
            }
        opt.step()
        losses.append(loss.item())
    return losses, norms, first


def older_form(path):
    """Most published checkpoints have rope_theta and rope_scaling where transformers 5 writes rope_parameters."""
    cfg = json.loads(path.read_text())
    rope = cfg.pop("rope_parameters")
    cfg["rope_theta"] = rope.pop("rope_theta")
    cfg["rope_scaling"] = rope
    cfg["torch_dtype"] = cfg.pop("dtype")
    path.write_text(json.dumps(cfg, indent=2, sort_keys=True) + "\n")


def main(root):
    for i, (name, (cls, cfg, run)) in enumerate(MODELS.items()):
        torch.manual_seed(20240 + i)
        out = root / name
        model = cls(cfg).float()
        randomise(model)
        model.save_pretrained(out)
        (out / "model.safetensors").chmod(0o644)
        (out / "generation_config.json").unlink(missing_ok=True)
        if cls is Qwen3ForCausalLM:
            older_form(out / "config.json")
        t = tokens(STEPS * run["seq"] + 1)
        write_tokens(out / "tokens.bin", t)
        losses, norms, first = train(model, t, run["seq"], run["weight_decay"], run["grad_clip"])
        write_expect(out, run, STEPS, losses, norms, first)


def write_expect(out, run, steps, losses, norms, first):
    expect = dict(seq=run["seq"], steps=steps, lr=run.get("lr", LR), betas=BETAS, eps=EPS, weight_decay=run["weight_decay"],
                  decay="matrices only", grad_clip=run["grad_clip"], loss=losses, grad_norm=norms, first=first,
                  torch=torch.__version__, transformers=transformers.__version__)
    (out / "expect.json").write_text(json.dumps(expect, indent=1) + "\n")
    print(out.name, [round(x, 4) for x in losses], [round(x, 3) for x in norms])


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
