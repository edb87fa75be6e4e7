"""Writes what generate of Hugging Face transformers, greedy and with its cache, has the models of parity.py write.

  python scripts/oracle/generate.py internal/model/testdata/parity internal/run/generate/testdata/greedy.json

Needs torch and transformers (pip install torch transformers); the versions are in the output. Each case names a model, keys
of its config that are changed, the prompt's ids, and the ids that follow. `margin` is the smallest distance between the two
likeliest tokens' logits on the way: a case whose choice hangs on rounding is left out.
"""

import json
import pathlib
import random
import sys

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

SLIDING = dict(use_sliding_window=True, sliding_window=16, layer_types=["sliding_attention", "full_attention"])
CASES = [("tiny-llama", {}), ("tiny-llama-tied-clip", {}), ("tiny-llama3-gqa", {}), ("tiny-qwen3-yarn", {}), ("tiny-qwen3-yarn", SLIDING),
         ("../families/gemma2", {}), ("../families/gemma3", {})]
NEW, LENGTHS, MARGIN = 40, (1, 7, 40, 90), 1e-3


def greedy(model, prompt):
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False, use_cache=True,
        max_new_tokens=NEW, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_logits=True)
    top = torch.stack(out.logits)[:, 0].topk(2).values
    return out.sequences[0, len(prompt):].tolist(), (top[:, 0] - top[:, 1]).min().item()


def main(models, path):
    r, cases = random.Random(1), []
    for name, change in CASES:
        config = AutoConfig.from_pretrained(models / name, **change)
        model = AutoModelForCausalLM.from_pretrained(models / name, config=config, dtype=torch.float32, attn_implementation="eager").eval()
        for n in LENGTHS:
            margin = 0
            while margin < MARGIN:
                prompt = [r.randrange(config.vocab_size) for _ in range(n)]
                tokens, margin = greedy(model, prompt)
            cases.append(dict(model=name, change=change, prompt=prompt, tokens=tokens, margin=round(margin, 5)))
            print(name, change, n, round(margin, 5), len(set(tokens)), tokens[:8])
    out = dict(torch=torch.__version__, transformers=transformers.__version__)
    lines = ",\n  ".join(json.dumps(c) for c in cases)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(out)[:-1] + f', "cases": [\n  {lines}\n]}}\n')


main(*map(pathlib.Path, sys.argv[1:]))
