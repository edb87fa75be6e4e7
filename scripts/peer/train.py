"""PyTorch's training step beside `cprun bench train`: llama-3.2-3B's shape, FSDP2, context_parallel.

    torchrun --nproc-per-node 4 scripts/peer/train.py --seq 128K --json peer.json

FSDP2 in bfloat16 with float32 masters and reductions, the cuDNN ring, a torch.compile for each block
around it, the loss in chunks with its gradient taken on the way, fused AdamW, clipping, no recompute.
Each rank holds the head and tail chunk of one sequence of random tokens. The shape of Llama 3.1 8B, with as
little memory as FSDP2 and offloaded inputs of recomputed blocks need:

    torchrun --nproc-per-node 2 scripts/peer/train.py --seq 512K --model llama-3.1-8b --offload --reshard

Linears of blocks in bfloat16 and, by turns on the same weights, in FP8 by a recipe of torchao 0.17:

    python3 scripts/peer/train.py --seq 16K --fp8 rowwise
"""
import argparse
import dataclasses
import math
import mmap
import os
import statistics

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import common

p = argparse.ArgumentParser()
p.add_argument("--seq", default="128K")
p.add_argument("--rotate", default="allgather")
p.add_argument("--model", default="", help="a shape by name, in place of the flags up to --untied")
p.add_argument("--hidden", type=int, default=3072)
p.add_argument("--layers", type=int, default=28)
p.add_argument("--heads", type=int, default=24)
p.add_argument("--kv-heads", type=int, default=8)
p.add_argument("--intermediate", type=int, default=8192)
p.add_argument("--vocab", type=int, default=128256)
p.add_argument("--untied", action="store_true", help="the head has weights of its own")
p.add_argument("--chunk", type=int, default=4096, help="tokens whose logits stand in memory at once")
p.add_argument("--recompute", action="store_true", help="recompute whole blocks")
p.add_argument("--offload", action="store_true", help="recompute whole blocks; their inputs go to the host")
p.add_argument("--reshard", action="store_true", help="free a block's weights after its forward pass")
p.add_argument("--warmup", type=int, default=2, help="0: only one block warms up, for steps of minutes")
p.add_argument("--steps", type=int, default=4)
p.add_argument("--fp8", default="", help="also measure linears in FP8 by this recipe; --json has these")
p.add_argument("--json", default="")
a = p.parse_args()
if a.model:
    shapes = {"llama-3.1-8b": (4096, 32, 32, 8, 14336, 128256, True)}
    a.hidden, a.layers, a.heads, a.kv_heads, a.intermediate, a.vocab, a.untied = shapes[a.model]
rank, ranks, mesh = common.start()
seq = common.sizes(a.seq)[0]
tokens, dim = seq // ranks, a.hidden // a.heads
bf16 = torch.bfloat16


@torch._dynamo.disable
def attend(q, k, v):
    """[batch, tokens, heads, dim]; the ring, where it is on, runs outside of the compiled graphs."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if not attend.grouped:
        k, v = (x.repeat_interleave(a.heads // a.kv_heads, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


attend.grouped = True


def rotate(x, cos, sin):
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        h, kv = a.hidden, a.kv_heads * dim
        self.norm1, self.norm2 = nn.RMSNorm(h, eps=1e-5), nn.RMSNorm(h, eps=1e-5)
        self.q, self.k, self.v = nn.Linear(h, h, bias=False), nn.Linear(h, kv, bias=False), nn.Linear(h, kv, bias=False)
        self.o = nn.Linear(h, h, bias=False)
        self.gate, self.up = nn.Linear(h, a.intermediate, bias=False), nn.Linear(h, a.intermediate, bias=False)
        self.down = nn.Linear(a.intermediate, h, bias=False)

    def forward(self, x, cos, sin):
        y = self.norm1(x)
        q, k, v = (w(y).unflatten(-1, (-1, dim)) for w in (self.q, self.k, self.v))
        x = x + self.o(attend(rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(-2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@torch.compile
def chunk_loss(logits, targets, scale):
    """The sum of the losses, and the gradient of scale times it."""
    x = logits.float()
    lse = x.logsumexp(-1, keepdim=True)
    loss = (lse.squeeze(-1) - x.gather(-1, targets[:, None]).squeeze(-1)).sum()
    grad = torch.exp(x - lse)
    hit = torch.arange(x.shape[-1], device=x.device)[None] == targets[:, None]
    return loss, ((grad - hit.float()) * scale).to(logits.dtype)


class Loss(torch.autograd.Function):
    """Mean cross entropy of the head over chunks of tokens. All logits at once would be 34 GB."""

    @staticmethod
    def forward(ctx, x, w, targets, scale):
        dx, dw, total = torch.empty_like(x), torch.zeros_like(w, dtype=torch.float32), 0.0
        for lo in range(0, x.shape[0], a.chunk):
            part = slice(lo, min(lo + a.chunk, x.shape[0]))
            loss, grad = chunk_loss(x[part] @ w.t(), targets[part], scale)
            total = total + loss
            dx[part] = grad @ w
            dw += grad.t() @ x[part]
        ctx.save_for_backward(dx, dw.to(w.dtype))
        return total * scale

    @staticmethod
    def backward(ctx, up):
        return (*ctx.saved_tensors, None, None)  # up is 1: the loss is the root


def pinned(shape, dtype):
    """Host memory in huge pages, touched by several threads, then pinned: torch rounds pinned sizes to powers of two."""
    bytes, threads = math.prod(shape) * dtype.itemsize, torch.get_num_threads()
    memory = mmap.mmap(-1, bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    slab = torch.frombuffer(memory, dtype=dtype).zero_().view(shape)
    torch.set_num_threads(threads)
    if common.CUDA and int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), bytes, 0)):
        raise MemoryError(f"{bytes} bytes of host memory could not be pinned")
    return slab


class Host:
    """Moves the inputs of recomputed blocks to pinned memory and back, on a stream for each direction.

    Every hand-over is an event of the stream that wrote or read last. All device memory belongs to the compute
    stream: it waits for a copy before the memory that the copy used can be free.
    """

    def __init__(self):
        self.device = torch.get_device_module(common.DEVICE)
        self.compute = self.device.current_stream()  # here, since inside of a stream's context it would be that stream
        self.down, self.up = self.device.Stream(), self.device.Stream()
        self.slab = pinned((a.layers - 1, 1, tokens, a.hidden), bf16 if common.CUDA else torch.float32)
        self.leaving, self.coming = None, {}

    def __call__(self, i, block, *args):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: self.keep(i, x) if x.dim() == 3 else x, self.bring):
            return torch.utils.checkpoint.checkpoint(block, *args, use_reentrant=False)

    def keep(self, i, x):
        """Begins the copy of block i's input; the last one stays. The copy before had a whole block's time."""
        if self.leaving:
            self.compute.wait_event(self.leaving[1])
            self.leaving = None
        if i == model.depth - 1:
            return i, x
        self.down.wait_event(self.compute.record_event())
        with self.device.stream(self.down):
            self.slab[i].copy_(x, non_blocking=True)
        self.leaving = x.detach(), self.down.record_event()
        return i, None

    def bring(self, saved):
        """Returns the input of block i, and begins the copy of the one below."""
        if torch.is_tensor(saved):
            return saved
        i, x = saved
        if x is None:
            x, done = self.coming.pop(i)
            self.compute.wait_event(done)
        if i > 0:
            below = torch.empty_like(x)
            self.up.wait_event(self.compute.record_event())
            with self.device.stream(self.up):
                below.copy_(self.slab[i - 1], non_blocking=True)
            self.coming = {i - 1: (below, self.up.record_event())}
        return x


class Model(nn.Module):
    """The embedding serves as the head too, unless the model is untied."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Parameter(torch.empty(a.vocab, a.hidden))
        self.head = nn.Parameter(torch.empty(a.vocab, a.hidden)) if a.untied else self.embed
        self.blocks = nn.ModuleList(Block() for _ in range(a.layers))
        self.norm, self.depth = nn.RMSNorm(a.hidden, eps=1e-5), a.layers

    def forward(self, ids, targets, cos, sin, scale):
        x = F.embedding(ids, self.embed)
        for i, b in enumerate(self.blocks[:self.depth]):
            if a.offload:
                x = host(i, b, x, cos, sin)
                continue
            x = torch.utils.checkpoint.checkpoint(b, x, cos, sin, use_reentrant=False) if a.recompute else b(x, cos, sin)
        return Loss.apply(self.norm(x)[0], self.head, targets[0], scale)


def scaled(blocks):
    """Converts the linears of blocks so that scaled.on selects FP8 or bfloat16 for the same weights."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(a.fp8)
    convert_to_float8_training(blocks, config=dataclasses.replace(config, emulate=not common.CUDA))
    kind = type(blocks[0].q)
    convert = kind.forward
    kind.forward = lambda self, x: convert(self, x) if scaled.on else F.linear(x, self.weight)


scaled.on = False
with torch.device("meta"):
    model = Model()
if a.fp8:
    scaled(model.blocks)
policy = MixedPrecisionPolicy(param_dtype=bf16 if common.CUDA else torch.float32, reduce_dtype=torch.float32)
for b in model.blocks:
    b.compile()
    fully_shard(b, mesh=mesh, mp_policy=policy, reshard_after_forward=a.reshard)
fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # the backward pass begins with the head
model.to_empty(device=common.DEVICE)
torch.manual_seed(1 + rank)
for name, w in model.named_parameters():
    local = w.data.to_local()
    local.fill_(1.0) if "norm" in name else local.normal_(0, 0.02)
host = Host() if a.offload else None
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

gen = torch.Generator(common.DEVICE).manual_seed(1 + rank)
ids, targets = (torch.randint(0, a.vocab, (1, tokens), generator=gen, device=common.DEVICE) for _ in range(2))
half = tokens // 2  # chunk rank and chunk 2*ranks-1-rank of the sequence
at = torch.cat((torch.arange(half) + rank * half, torch.arange(half) + (2 * ranks - 1 - rank) * half))
angle = at[:, None].double() * 5e5 ** -(torch.arange(0, dim, 2).double() / dim)
cos, sin = (f(angle).float()[None, :, None].to(common.DEVICE) for f in (torch.cos, torch.sin))


def step():
    loss = model(ids, targets, cos, sin, 1 / tokens)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    step.loss = loss.detach()


def run():
    """Returns the median seconds of a step in bfloat16 and, with --fp8, in FP8: two rounds of each, by turns."""
    times = {False: [], True: []} if a.fp8 else {False: []}
    with common.backend(), common.ring(mesh, a.rotate):
        if a.warmup == 0:
            model.depth = 1
            step()
            model.depth = a.layers
        for _ in range(2 if a.fp8 else 1):
            for on in times:
                scaled.on = on
                times[on].append(common.measure(step, a.warmup, a.steps))
    return {on: statistics.median(t) for on, t in times.items()}


try:
    times = run()
except (RuntimeError, NotImplementedError, AssertionError, ValueError) as e:
    if rank == 0:
        print(f"grouped heads: {type(e).__name__}: {str(e)[:300]}; repeating K and V", flush=True)
    attend.grouped = False
    optimizer.zero_grad(set_to_none=True)
    times = run()

weights = a.vocab * a.hidden + a.layers * (2 * a.hidden * a.hidden + 2 * a.hidden * a.kv_heads * dim + 3 * a.hidden * a.intermediate)
flops = 6 * weights * seq + 12 * a.layers * a.hidden * seq * (seq + 1) / 2
peak = torch.cuda.max_memory_allocated() if common.CUDA else 0
for on, seconds in times.items():
    result = {
        "peer": "train", "seq": seq, "ranks": ranks, "rotate": a.rotate, "grouped": attend.grouped, "recompute": a.recompute or a.offload,
        "model": a.model, "linears": "fp8" if on else "bf16", "offload": a.offload, "reshard": a.reshard,
        "step_seconds": seconds, "tokens_per_second_per_device": tokens / seconds, "tflops_per_device": flops / ranks / seconds / 1e12,
        "memory_bytes": common.slowest(peak), "loss": step.loss.item(),
    }
    if rank == 0:
        print(f"torch{' fp8' if on else ''} S={seq}: step {seconds:.3f} s, {tokens / seconds:.0f} tokens/s and "
              f"{result['tflops_per_device']:.1f} TFLOP/s per GPU, "
              f"{result['memory_bytes'] / 2**30:.1f} GiB, loss {result['loss']:.3f}", flush=True)
common.report(a.json, result)
common.finish()
assert math.isfinite(result["loss"])
