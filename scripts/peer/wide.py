"""PyTorch's attention with wide heads beside `go test -tags cuda -run '^$' -bench Flash512 ./kernels/gpu`, on one GPU.

    python3 scripts/peer/wide.py --seq 8K,32K --json peer.json

scaled_dot_product_attention by the backend that PyTorch chooses, and FlexAttention, compiled, by the first tile sizes
that fit the GPU: causal, bfloat16, the heads of Gemma 4's global layers.
"""
import argparse

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import common

p = argparse.ArgumentParser()
p.add_argument("--seq", default="8K,32K")
p.add_argument("--heads", default="16:2,32:4", help="query and KV heads")
p.add_argument("--head-dim", type=int, default=512)
p.add_argument("--json", default="")
args = p.parse_args()
common.start()
TILES = [None] + [
    {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_M1": n, "BLOCK_N1": m, "BLOCK_M2": m, "BLOCK_N2": n, "num_stages": 1, "num_warps": w}
    for m, n, w in [(64, 32, 8), (64, 16, 4), (32, 32, 4), (16, 16, 4)]]
compiled = torch.compile(flex_attention, dynamic=False)
chosen = None


def rates(name, attend, q, k, v, do):
    """A row, or the error's first line."""
    def both():
        q.grad = k.grad = v.grad = None
        attend(q, k, v).backward(do)

    seq, heads = q.shape[2], q.shape[1]
    row = {"attention": name, "seq": seq, "heads": heads, "kv_heads": k.shape[1]}
    try:
        flops = common.attention_flops(seq, heads, args.head_dim) / 1e12
        f, b = (common.measure(x, 2, 3) for x in (lambda: attend(q, k, v), both))
        row |= {"forward": flops / f, "backward": 2.5 * flops / (b - f), "both": 3.5 * flops / b}
    except Exception as e:  # a compiler's errors have many types
        row["error"] = f"{type(e).__name__}: {e}".split("\n")[0][:200]
    print(row, flush=True)
    return row


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


rows = []
for seq in common.sizes(args.seq):
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, seq, seq, device=common.DEVICE)
    for pair in args.heads.split(","):
        h, kv = map(int, pair.split(":"))
        q, k, v, do = (torch.randn(1, n, seq, args.head_dim, device=common.DEVICE, dtype=torch.bfloat16)
                       for n in (h, kv, kv, h))
        for x in (q, k, v):
            x.requires_grad_()
        rows.append(rates("sdpa", sdpa, q, k, v, do))
        for tiles in TILES if chosen is None else [chosen]:
            row = rates(f"flex {tiles}", lambda q, k, v: compiled(
                q, k, v, block_mask=mask, enable_gqa=True, kernel_options=tiles), q, k, v, do)
            rows.append(row)
            if "error" not in row:
                chosen = tiles
                break
common.report(args.json, {"peer": "wide", "head_dim": args.head_dim, "rows": rows})
common.finish()
