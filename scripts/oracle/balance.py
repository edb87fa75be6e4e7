"""Writes balance.json beside small models with experts: steps of plain PyTorch with the loss of balance, in float32.

Usage: python scripts/oracle/balance.py internal/model/testdata/families qwen3_moe mixtral gpt_oss qwen3_5_moe_text \
           qwen3_next
Needs torch and transformers, and the files of families.py. Step i trains on the samples 2i and 2i+1 of seq tokens in
one batch, so the counts are over all of its tokens.
"""

import json
import pathlib
import sys

import numpy
import torch
import torch.nn.functional as F
import transformers

from parity import BETAS, EPS, LR

STEPS, SEQ, COEF = 3, 96, 0.5


def main(root, names):
    for name in names:
        model = transformers.AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32,
                                                                  attn_implementation="eager")
        raw = (root / name / "tokens.bin").read_bytes()[1024:]
        tokens = torch.from_numpy(numpy.frombuffer(raw, dtype="<u2").astype("int64"))
        opt = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
        out = dict(seq=SEQ, coef=COEF, lr=LR, betas=BETAS, eps=EPS, loss=[], aux_loss=[], grad_norm=[],
                   transformers=transformers.__version__)
        for step in range(STEPS):
            at = [(2 * step + i) * SEQ for i in range(2)]
            ids = torch.stack([tokens[a:a + SEQ] for a in at])
            targets = torch.stack([tokens[a + 1:a + 1 + SEQ] for a in at])
            result = model(input_ids=ids, output_router_logits=True)
            k = model.config.num_experts_per_tok
            experts = result.router_logits[0].shape[-1]
            aux = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func(result.router_logits, experts, k)
            loss = F.cross_entropy(result.logits.flatten(0, 1), targets.flatten())
            opt.zero_grad()
            (loss + COEF * aux).backward()
            out["grad_norm"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            opt.step()
            out["loss"].append(loss.item())
            out["aux_loss"].append(aux.item())
        (root / name / "balance.json").write_text(json.dumps(out, indent=1) + "\n")
        print(name, out["loss"], out["aux_loss"])


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
