"""Prints what transformers makes of weights under other names and of an index that disagrees with its files.

Usage: python scripts/oracle/weights.py
Needs torch and transformers (tried with 2.15.0 and 5.24.0). TestWeightsUnderOtherNames and TestIndexOnlyNamesFiles
hold the results. Each line has the largest difference of the logits, or the error.
"""

import json
import tempfile

import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity(50)
torch.manual_seed(0)
IDS = torch.arange(10)[None]
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def model(tied):
    m = LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied, max_position_embeddings=64, initializer_range=0.3))
    tensors = {k: v.clone() for k, v in m.state_dict().items()}
    if tied:
        del tensors[HEAD]
    return m, tensors


def compare(name, m, files, index=None):
    with tempfile.TemporaryDirectory() as d:
        m.config.save_pretrained(d)
        for file, tensors in files.items():
            save_file(tensors, f"{d}/{file}", metadata={"format": "pt"})
        if index:
            with open(f"{d}/model.safetensors.index.json", "w") as f:
                json.dump({"metadata": {}, "weight_map": index}, f)
        try:
            got, info = LlamaForCausalLM.from_pretrained(d, output_loading_info=True)
            diff = float((got(IDS).logits - m(IDS).logits).abs().max())
            print(f"{name}: {diff:.3g}, missing {len(info['missing_keys'])}, unexpected {sorted(info['unexpected_keys'])[:3]}")
        except OSError as e:
            print(f"{name}: {e}")


def renamed(tensors, change):
    return {"model.safetensors": {change(k): v for k, v in tensors.items()}}


for tied in (True, False):
    m, t = model(tied)
    for name, change in {
        "without prefix": lambda k: k.removeprefix("model."),
        "prefix twice": lambda k: "model." + k,
        "one without": lambda k: k.replace("model.norm", "norm"),
        "another prefix": lambda k: "module." + k,
    }.items():
        compare(f"tied {tied}, {name}", m, renamed(t, change))
    for extra in ("mtp.fc.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"):
        compare(f"tied {tied}, {extra}", m, {"model.safetensors": t | {extra: torch.ones(16)}})
m, t = model(True)
compare("tied, as head", m, renamed(t, lambda k: k.replace("model.embed_tokens", "lm_head")))
compare("tied, both differ", m, {"model.safetensors": t | {HEAD: torch.zeros(32, 16)}})
m, t = model(False)
compare("not tied, no head", m, {"model.safetensors": {k: v for k, v in t.items() if k != HEAD}})
keys = list(t)
a, b = {k: t[k] for k in keys[:4]}, {k: t[k] for k in keys[4:]}
both, index = {"a.safetensors": a, "b.safetensors": b}, {k: "a.safetensors" if k in a else "b.safetensors" for k in t}
compare("index, a tensor too many", m, both, index | {"mtp.w": "b.safetensors"})
compare("index, a file too many", m, both, index | {"mtp.w": "c.safetensors"})
compare("index, a tensor too few", m, both, {k: v for k, v in index.items() if k != NORM})
compare("index, the other file", m, both, {k: "b.safetensors" if k in a else "a.safetensors" for k in t})
compare("index, in two files", m, {"a.safetensors": a, "b.safetensors": b | {keys[0]: t[keys[0]] * 2}}, index)
