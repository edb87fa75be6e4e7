"""PyTorch's context_parallel beside `cprun bench attention`: the same shapes, FLOPs and medians.

    torchrun --nproc-per-node 4 scripts/peer/attention.py --seq 32K,128K,512K --json peer.json

SDPA with the cuDNN backend, forward and forward+backward, for both ways of moving keys and values,
and one GPU alone on as many tokens as each has. With one rank: SDPA over the whole sequence.
"""
import argparse
import gc

import torch
import torch.nn.functional as F

import common

p = argparse.ArgumentParser()
p.add_argument("--seq", default="32K,128K,512K")
p.add_argument("--rotate", default="allgather,alltoall")
p.add_argument("--heads", type=int, default=32)
p.add_argument("--kv-heads", type=int, default=8)
p.add_argument("--head-dim", type=int, default=128)
p.add_argument("--warmup", type=int, default=2)
p.add_argument("--iters", type=int, default=0)
p.add_argument("--alone", action=argparse.BooleanOptionalAction, default=True, help="also one GPU by itself")
p.add_argument("--json", default="")
args = p.parse_args()
rank, ranks, mesh = common.start()
dtype = torch.bfloat16 if common.CUDA else torch.float32


def tensors(tokens, kv_heads):
    gen = torch.Generator(common.DEVICE).manual_seed(rank)

    def make(heads, grad=True):
        shape = (1, heads, tokens, args.head_dim)
        return torch.randn(shape, generator=gen, device=common.DEVICE, dtype=dtype).requires_grad_(grad)

    return make(args.heads), make(kv_heads), make(kv_heads), make(args.heads, grad=False)


def passes(tokens, grouped):
    """forward and forward+backward over that many local tokens. Where grouped heads are not taken, K and V
    are repeated to the number of query heads, in the graph, as models do."""
    q, k, v, do = tensors(tokens, args.kv_heads)
    repeat = args.heads // args.kv_heads

    def forward():
        if grouped:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        kk, vv = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        return F.scaled_dot_product_attention(q, kk, vv, is_causal=True)

    def both():
        q.grad = k.grad = v.grad = None
        forward().backward(do)

    return forward, both


def works(grouped, rotate):
    """Whether this PyTorch takes grouped heads: every rank finds the same."""
    try:
        with common.backend(), common.ring(mesh, rotate):
            passes(1024, grouped)[1]()
        return True
    except (RuntimeError, TypeError, NotImplementedError, AssertionError, ValueError) as e:
        if rank == 0:
            print(f"grouped heads={grouped}, {rotate}: {type(e).__name__}: {str(e)[:300]}", flush=True)
        return False


def rates(seq, size, tokens, grouped):
    forward, both = passes(tokens, grouped)
    flops = common.attention_flops(seq, args.heads, args.head_dim) / size / 1e12
    f = common.measure(forward, args.warmup, args.iters)
    b = common.measure(both, args.warmup, args.iters)
    return {"forward": {"seconds": f, "tflops_per_device": flops / f},
            "forward_backward": {"seconds": b, "tflops_per_device": 3.5 * flops / b}}


def measured(rotate, seq, size):
    """A row: seq tokens over size ranks, 1 for each rank by itself; None where nothing works."""
    grouped = next((g for g in (True, False) if works(g, rotate)), None)
    if grouped is None:
        return None
    row = {"seq": seq, "ranks": size, "rotate": rotate, "grouped": grouped}
    try:
        with common.backend(), common.ring(mesh, rotate):
            row.update(rates(seq, size, seq // size, grouped))
    except torch.OutOfMemoryError:
        row["error"] = "out of memory"  # on every rank: they hold the same
    gc.collect()
    if common.CUDA:
        torch.cuda.empty_cache()
    if rank == 0:
        f, b = (row.get(k, {}).get("tflops_per_device", 0) for k in ("forward", "forward_backward"))
        print(f"torch {rotate or 'one GPU'} S={seq}: forward {f:.1f}, forward+backward {b:.1f} TFLOP/s per GPU, grouped={grouped}", flush=True)
    return row


rows = []
for seq in common.sizes(args.seq):
    for rotate in args.rotate.split(",") if ranks > 1 else []:
        rows.append(measured(rotate, seq, ranks))
    if args.alone or ranks == 1:
        rows.append(measured("", seq // ranks, 1))
rows = [row for row in rows if row]
common.report(args.json, {"peer": "attention", "heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim, "rows": rows})
common.finish()
