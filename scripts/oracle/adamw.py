"""Writes internal/model/optim/testdata/adamw.json: steps of torch.optim.AdamW with
torch.nn.utils.clip_grad_norm_, in float64 and float32, on a parameter that decays (a
matrix) and one that does not (a vector).

    python scripts/oracle/adamw.py internal/model/optim/testdata/adamw.json
"""
import json
import sys

import torch

STEPS, ROWS, COLS, VECTOR = 5, 3, 4, 5
HYPER = dict(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def run(dtype, max_norm):
    gen = torch.Generator().manual_seed(7)
    normal = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float32)
    matrix = torch.nn.Parameter(normal(ROWS, COLS).to(dtype))
    vector = torch.nn.Parameter(normal(VECTOR).to(dtype))
    params = [matrix, vector]
    optimizer = torch.optim.AdamW(
        [{"params": [matrix]}, {"params": [vector], "weight_decay": 0.0}], foreach=False, **HYPER
    )
    flat = lambda ts: [x for t in ts for x in t.detach().double().flatten().tolist()]
    case = {"dtype": str(dtype).removeprefix("torch."), "max_norm": max_norm, "start": flat(params), "steps": []}
    for step in range(STEPS):
        lr = HYPER["lr"] / (1 + step)  # a schedule changes it every step
        for group in optimizer.param_groups:
            group["lr"] = lr
        # Norms on both sides of max_norm, one gradient that is 0, one tiny.
        matrix.grad = (normal(ROWS, COLS) * [0.01, 3.0, 0.2, 1e-4, 10.0][step]).to(dtype)
        vector.grad = (normal(VECTOR) * [0.01, 3.0, 0.2, 1e-4, 10.0][step]).to(dtype)
        vector.grad[0] = 0
        grads = flat([matrix.grad, vector.grad])
        if max_norm > 0:
            norm = torch.nn.utils.clip_grad_norm_(params, max_norm, foreach=False).item()
        else:
            norm = torch.linalg.vector_norm(torch.tensor(grads, dtype=torch.float64)).item()
        optimizer.step()
        state = lambda key: flat([optimizer.state[p][key] for p in params])
        case["steps"].append({"lr": lr, "norm": norm, "grad": grads, "param": flat(params),
                              "m": state("exp_avg"), "v": state("exp_avg_sq")})
    return case


out = {"torch": torch.__version__, "beta1": HYPER["betas"][0], "beta2": HYPER["betas"][1], "eps": HYPER["eps"],
       "weight_decay": HYPER["weight_decay"], "decayed": ROWS * COLS,
       "cases": [run(dtype, max_norm) for dtype in (torch.float64, torch.float32) for max_norm in (0.0, 1.0)]}
with open(sys.argv[1], "w") as f:
    json.dump(out, f, indent=None, separators=(",", ":"))
    f.write("\n")
