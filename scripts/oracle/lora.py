"""Writes PEFT adapters of a small model with the loss curves of plain PyTorch training in float32.

Usage: python scripts/oracle/lora.py internal/model/testdata [NAME...]
       python scripts/oracle/lora.py --check MODEL ADAPTER MERGED
Needs torch, transformers and peft; the versions are in the output.

The first form reads models of parity and families. It writes to lora a directory for each adapter
(adapter_config.json, adapter_model.safetensors) and curves.json, or only those of the names:
AdamW on the trained parameters, constant learning rate, decay on matrices only, clipping by global norm. The second
form loads an adapter that cprun exported, and its merged model, and compares their logits. The base is resized as the
merged model is.
"""

import fnmatch
import json
import pathlib
import struct
import sys

import peft
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LLAMA = "parity/tiny-llama3-gqa"
ADAPTERS = {
    "all": (LLAMA, 256, dict(r=4, lora_alpha=6, target_modules=ALL)),
    "subset": (LLAMA, 256, dict(r=3, lora_alpha=5, target_modules=["v_proj", "layers.1.mlp.down_proj"], use_rslora=True)),
    # files join q, k and v, and gate and up, which then share A
    "phi3": ("families/phi3", 128, dict(r=2, lora_alpha=4, target_modules=["qkv_proj", "gate_up_proj", "o_proj"])),
    # the keys of a pattern are tried in the order of the file, which peft sorts
    "patterns": ("families/phi3", 128, dict(
        r=2, lora_alpha=4, use_rslora=True, target_modules=r"model\.layers\.\d+\..*(qkv|gate_up|o)_proj",
        exclude_modules=["layers.1.self_attn.o_proj"], rank_pattern={r"layers\.1\..*": 1, "qkv_proj": 3},
        alpha_pattern={"^model.layers.0.*up_proj": 7}, modules_to_save=["lm_head", "norm"])),
    "tied": ("families/qwen2", 128, dict(
        r=2, lora_alpha=4, target_modules=["q_proj", "down_proj", "model.layers.0.mlp.up_proj"], layers_to_transform=1,
        layers_pattern="layers", modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    "experts": ("families/qwen3_moe", 128, dict(
        r=2, lora_alpha=3, target_modules=["q_proj", "o_proj"], target_parameters=EXPERTS,
        rank_pattern={"down_proj": 3}, alpha_pattern={r"experts\.gate_up_proj": 5})),
    # also the router, and gate and up with twice the rank, under other names than the files of the base have
    "mixtral": ("families/mixtral", 128, dict(r=2, lora_alpha=4, target_modules="all-linear")),
    "resized": ("families/qwen2", 128, dict(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])),
    # the router is a linear layer, and an adapter of keys is one of values where these are the same
    "gemma4": ("families/gemma4_text", 128, dict(
        r=2, lora_alpha=4, target_modules="all-linear", target_parameters=["experts.gate_up_proj", "experts.down_proj"])),
}
RESIZED = ["resized", "grown"]  # the second trains all weights
ROWS = 100  # of the resized embeddings of 96 tokens
FREEZE = ["model.embed_tokens.*", "model.layers.0.*", "*.k_proj.weight", "*norm.weight"]
STEPS, LR, BETAS, EPS, DECAY, CLIP = 10, 3e-3, (0.9, 0.95), 1e-8, 0.1, 0.7


def tokens(path):
    raw = path.read_bytes()[1024:]
    return torch.tensor(struct.unpack(f"<{len(raw) // 2}H", raw))


def resized(model, rows=ROWS):
    """Resizes the embeddings. The rows of transformers are random around the mean; these are the mean."""
    old = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(rows)
    for layer in [model.get_input_embeddings(), model.get_output_embeddings()]:
        w = layer.weight.data
        mean = w[:old].double().mean(0).float()
        print(f"rows of transformers differ from the mean by {(w[old:] - mean).abs().max():.2e}")
        w[old:] = mean
    return model


def train(model, t, base, seq):
    trained = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW([dict(params=[p for p in trained if p.dim() > 1], weight_decay=DECAY),
                             dict(params=[p for p in trained if p.dim() <= 1], weight_decay=0.0)],
                            lr=LR, betas=BETAS, eps=EPS)
    losses, norms = [], []
    for step in range(STEPS):
        ids = t[step * seq:(step + 1) * seq][None]
        logits = model(input_ids=ids).logits[0]
        loss = F.cross_entropy(logits, t[step * seq + 1:(step + 1) * seq + 1])
        opt.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, CLIP).item())
        opt.step()
        losses.append(loss.item())
    return {"base": base, "seq": seq, "loss": losses, "grad_norm": norms, "trained": sum(p.numel() for p in trained)}


def load(base):
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")


def write(root, names):
    out = root / "lora"
    curves = json.loads((out / "curves.json").read_text()) if names else {}
    text = tokens(root / "families/qwen2/tokens.bin")
    text[::9] = 96 + torch.arange(len(text[::9])) % (ROWS - 96)
    header = (root / "families/qwen2/tokens.bin").read_bytes()[:1024]
    (out / "resized.bin").write_bytes(header + struct.pack(f"<{len(text)}H", *text.tolist()))
    for i, (name, (base, seq, config)) in enumerate(ADAPTERS.items()):
        if names and name not in names:
            continue
        torch.manual_seed(7 + i)
        model = resized(load(root / base)) if name in RESIZED else load(root / base)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
        for n, p in model.named_parameters():
            if "lora_" in n:  # both parts, so that every product counts
                torch.nn.init.normal_(p, 0, 0.1)
            elif p.requires_grad:  # not the weights of the base
                p.data += 0.01 * torch.randn_like(p)
        if name == "resized":  # not the means, which cprun can compute itself
            model.get_input_embeddings().weight.data[96:] += 0.1 * torch.randn(ROWS - 96, 32)
        model.save_pretrained(out / name)
        (out / name / "README.md").unlink(missing_ok=True)
        (out / name / "adapter_model.safetensors").chmod(0o644)
        file = out / name / "adapter_config.json"
        config = json.loads(file.read_text())
        config["base_model_name_or_path"] = base
        for key in ["target_modules", "target_parameters"]:
            if isinstance(config[key], list):
                config[key].sort()
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        curves[name] = train(model, text if name in RESIZED else tokens(root / base / "tokens.bin"), base, seq)
    if not names or "grown" in names:
        curves["grown"] = train(resized(load(root / "families/phi3")), text, "families/phi3", 128)
    if not names or "freeze" in names:
        model = load(root / LLAMA)
        for n, p in model.named_parameters():
            p.requires_grad = not any(fnmatch.fnmatch(n, g) for g in FREEZE)
        curves["freeze"] = train(model, tokens(root / LLAMA / "tokens.bin"), LLAMA, 256)
    curves.update(steps=STEPS, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, grad_clip=CLIP, frozen=FREEZE,
                  versions=dict(torch=torch.__version__, transformers=transformers.__version__, peft=peft.__version__))
    (out / "curves.json").write_text(json.dumps(curves, indent=1) + "\n")


def check(base, adapter, merged):
    ids = torch.arange(3, 67)[None]
    with torch.no_grad():
        b = load(merged)
        a, plain = load(base), load(base)
        rows = b.get_input_embeddings().weight.shape[0]
        if rows != a.get_input_embeddings().weight.shape[0]:
            a, plain = resized(a, rows), resized(plain, rows)
        a = PeftModel.from_pretrained(a, adapter)(input_ids=ids).logits.log_softmax(-1)
        b = b(input_ids=ids).logits.log_softmax(-1)
        plain = plain(input_ids=ids).logits.log_softmax(-1)
    print(f"adapter in peft, merged model in transformers: log-probabilities differ by {(a - b).abs().max():.2e}; "
          f"from the base by {(a - plain).abs().max():.2e}")


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        check(*sys.argv[2:])
    else:
        write(pathlib.Path(sys.argv[1]), sys.argv[2:])
