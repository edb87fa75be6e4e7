"""Packed documents over ranks in PyTorch, beside `cprun bench attention --documents magi`: the same packs, FLOPs and medians.

    torchrun --nproc-per-node 2 scripts/peer/documents.py --json peer.json
    torchrun --nproc-per-node 4 scripts/peer/documents.py --check      # without a GPU too: gloo, float32

Each document is padded to a multiple of 2·ranks and dealt out in 2·ranks chunks, one from its head and one
from its tail to each rank, as TransformerEngine deals them. Two algorithms:

allgather  Keys and values of all ranks, then one varlen call for the head chunks and one for the tail chunks,
           each with the keys up to its last query (Llama Team, The Llama 3 Herd of Models, 2024, section 3.3.2).
           Gradients by reduce-scatter. Backward has the gathered keys of forward still.
zigzag     A ring of keys and values; blocks are merged by their log-sum-exp (zigzag_ring_flash_attn_varlen
           of zhuzilin/ring-flash-attention). Gradients of keys travel in float32.

with the varlen kernels that PyTorch has: flash is that of torch.nn.attention.varlen, cudnn is cuDNN's for
ragged tensors, which aligns a causal mask at the first key, so that only zigzag can use it. Every pair is first
compared with float32 attention of each document alone; one that differs or fails is named and not timed.

All work of a pass is captured in a CUDA graph, so that the host costs nothing; --eager does without, and so does
a pair that cannot be captured. With cudnn most time goes into plans, which PyTorch makes anew for every call.
"""
import argparse
import json
import os
import statistics
import sys

import torch
import torch.distributed as dist

import common

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "oracle"))

p = argparse.ArgumentParser()
p.add_argument("--packs", type=int, default=20)
p.add_argument("--packs-file", default="", help="a list of lists of lengths as JSON, in place of MagiAttention's packs")
p.add_argument("--tokens-per-rank", default="8K,32K")
p.add_argument("--algorithms", default="allgather,zigzag")
p.add_argument("--kernels", default="flash,cudnn")
p.add_argument("--heads", type=int, default=64)
p.add_argument("--kv-heads", type=int, default=8)
p.add_argument("--head-dim", type=int, default=128)
p.add_argument("--warmup", type=int, default=5)
p.add_argument("--iters", type=int, default=20)
p.add_argument("--eager", action="store_true")
p.add_argument("--check", action="store_true", help="compare with the reference, then stop")
p.add_argument("--json", default="")
args = p.parse_args()
rank, ranks, _ = common.start()
DTYPE = torch.bfloat16 if common.CUDA else torch.float32
TOLERANCE = 2e-2 if common.CUDA else 1e-5  # of the largest value
CHECKED = [37, 1, 256, 5, 129, 300]  # lengths of documents: padded ones, and one shorter than the ranks


class Flash:
    """The kernels of torch.nn.attention.varlen. A causal mask ends at the last key."""

    algorithms = ("allgather", "zigzag")

    @staticmethod
    def forward(q, k, v, rows, keys, causal):
        """Returns the output and the log-sum-exp, rows by heads."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, rows.ends, keys.ends, rows.longest, keys.longest, 0.0, causal, False)
        return out, lse.t()

    @staticmethod
    def backward(do, q, k, v, out, lse, rows, keys, causal):
        """Returns the gradients of q, k and v. out and lse are those of all keys of the rows."""
        return torch.ops.aten._flash_attention_backward(
            do, q, k, v, out, lse.t().contiguous(), rows.ends, keys.ends, rows.longest, keys.longest, 0.0, causal, no_dropout(torch.uint64), no_dropout(torch.uint8))


class CuDNN:
    """cuDNN's kernels for ragged tensors. PyTorch builds their plan anew in each call, which a graph leaves out."""

    algorithms = ("zigzag",)

    @staticmethod
    def forward(q, k, v, rows, keys, causal):
        out, lse, *_ = torch.ops.aten._cudnn_attention_forward(q, k, v, None, rows.ends, keys.ends, rows.longest, keys.longest, True, 0.0, causal, False)
        return out, lse.squeeze(-1)

    @staticmethod
    def backward(do, q, k, v, out, lse, rows, keys, causal):
        seed = no_dropout(torch.int64)
        return torch.ops.aten._cudnn_attention_backward(
            do, q, k, v, out, lse.contiguous().unsqueeze(-1), seed, seed, None, rows.ends, keys.ends, rows.longest, keys.longest, 0.0, causal)


class Plain:
    """Both in a few lines for any device, one document after the other: to try the algorithms on."""

    algorithms = ("allgather", "zigzag")

    @staticmethod
    def scores(q, k, causal):
        s = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) / q.shape[2] ** 0.5
        hidden = torch.ones(s.shape[1:], dtype=torch.bool, device=s.device).triu(s.shape[2] - s.shape[1] + 1)
        return s.masked_fill(hidden, float("-inf")) if causal else s

    @staticmethod
    def forward(q, k, v, rows, keys, causal):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        for a, b in zip(rows.slices(), keys.slices()):
            s = Plain.scores(q[a], k[b], causal)
            lse[a] = s.logsumexp(2).t()
            out[a] = torch.einsum("hqk,khd->qhd", s.softmax(2), v[b].repeat_interleave(q.shape[1] // v.shape[1], 1))
        return out, lse

    @staticmethod
    def backward(do, q, k, v, out, lse, rows, keys, causal):
        """FlashAttention-2's algorithm 2 (Dao, 2023) in one block a document."""
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        each, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
        for a, b in zip(rows.slices(), keys.slices()):
            prob = (Plain.scores(q[a], k[b], causal) - lse[a].t()[:, :, None]).exp()
            dp = torch.einsum("qhd,khd->hqk", do[a], v[b].repeat_interleave(each, 1))
            ds = prob * (dp - (do[a] * out[a]).sum(2).t()[:, :, None]) * scale
            dq[a] = torch.einsum("hqk,khd->qhd", ds, k[b].repeat_interleave(each, 1))
            dk[b] = torch.einsum("hqk,qhd->khd", ds, q[a]).unflatten(1, (-1, each)).sum(2)
            dv[b] = torch.einsum("hqk,qhd->khd", prob, do[a]).unflatten(1, (-1, each)).sum(2)
        return dq, dk, dv


KERNELS = {"flash": Flash, "cudnn": CuDNN, "plain": Plain}


def no_dropout(dtype):
    return torch.zeros(2, dtype=dtype, device=common.DEVICE)


class Rows:
    """Rows of documents one after the other, as varlen kernels take them."""

    def __init__(self, lengths):
        ends = [0]
        for n in lengths:
            ends.append(ends[-1] + n)
        self.total, self.longest, self.list = ends[-1], max(lengths), ends
        self.ends = torch.tensor(ends, dtype=torch.int32, device=common.DEVICE)

    def slices(self):
        return [slice(a, b) for a, b in zip(self.list, self.list[1:])]


class Pack:
    """Where the rows of a pack are: on this rank each document's head chunk, then its tail chunk."""

    def __init__(self, lengths):
        self.lengths = lengths
        self.chunk = [-(-n // (2 * ranks)) for n in lengths]
        self.mine, self.half = Rows([2 * c for c in self.chunk]), Rows(self.chunk)
        self.head, self.tail = self.local(0), self.local(1)
        self.number = (rank, 2 * ranks - 1 - rank)  # of this rank's two chunks in each document

    def local(self, half):
        """This rank's rows that belong to one half."""
        return self.index([range(s.start + half * c, s.start + (half + 1) * c) for s, c in zip(self.mine.slices(), self.chunk)])

    def gathered(self, number):
        """The chunks of each document up to that one: Rows, and their places in what all ranks hold, keys then values."""
        places = []
        for s, c in zip(self.mine.slices(), self.chunk):
            for i in range(number + 1):
                owner, half = (i, 0) if i < ranks else (2 * ranks - 1 - i, 1)
                first = 2 * self.mine.total * owner + s.start + half * c
                places.append(range(first, first + c))
        keys = self.index(places)
        return Rows([(number + 1) * c for c in self.chunk]), torch.cat([keys, keys + self.mine.total])

    def deal(self, x):
        """This rank's rows of a tensor of all documents; zeros where a document is padded."""
        out = x.new_zeros((self.mine.total, *x.shape[1:]))
        start = 0
        for s, c, n in zip(self.mine.slices(), self.chunk, self.lengths):
            padded = torch.cat([x[start:start + n], x.new_zeros((2 * ranks * c - n, *x.shape[1:]))])
            out[s] = torch.cat([padded[i * c:(i + 1) * c] for i in self.number])
            start += n
        return out

    @staticmethod
    def index(ranges):
        return torch.cat([torch.arange(r.start, r.stop) for r in ranges]).to(common.DEVICE)


class Passes:
    def both(self):
        self.forward()
        self.backward()


class AllGather(Passes):
    def __init__(self, pack, kernel, q, kv, do):
        self.pack, self.kernel, self.q, self.kv, self.do = pack, kernel, q, kv, do
        self.all = kv.new_empty((ranks * 2 * pack.mine.total, *kv.shape[2:]))
        self.places = [pack.gathered(n) for n in pack.number]
        self.out, self.dq, self.dkv = torch.empty_like(q), torch.empty_like(q), torch.empty_like(kv)
        self.saved = None

    def forward(self):
        dist.all_gather_into_tensor(self.all, self.kv.flatten(0, 1))
        self.saved = []
        for rows, (keys, places) in zip((self.pack.head, self.pack.tail), self.places):
            q = self.q.index_select(0, rows)
            k, v = self.all.index_select(0, places).chunk(2)
            out, lse = self.kernel.forward(q, k, v, self.pack.half, keys, True)
            self.out.index_copy_(0, rows, out)
            self.saved.append((q, k, v, out, lse))

    def backward(self):
        grads = torch.zeros_like(self.all)
        # The tail's keys are a superset of the head's: it fills, and the head adds.
        for half, rows in ((1, self.pack.tail), (0, self.pack.head)):
            keys, places = self.places[half]
            dq, dk, dv = self.kernel.backward(self.do.index_select(0, rows), *self.saved[half], self.pack.half, keys, True)
            self.dq.index_copy_(0, rows, dq)
            new = torch.cat([dk, dv])
            grads.index_copy_(0, places, new if half else new.add_(grads.index_select(0, places)))
        reduce_scatter(self.dkv.flatten(0, 1), grads)


def reduce_scatter(out, x):
    if common.CUDA:
        dist.reduce_scatter_tensor(out, x)
        return
    dist.all_reduce(x)  # gloo has no other
    out.copy_(x.chunk(ranks)[rank])


def merge(out, lse, block, block_lse):
    """Two results of the same rows over other keys as one."""
    share = torch.sigmoid(block_lse - lse).unsqueeze(-1)
    return out - share * (out - block), lse - torch.nn.functional.logsigmoid(lse - block_lse)


fused_merge = torch.compile(merge, dynamic=True) if common.CUDA else merge


class Zigzag(Passes):
    def __init__(self, pack, kernel, q, kv, do):
        self.pack, self.kernel, self.q, self.kv, self.do = pack, kernel, q, kv, do
        self.out = self.lse = self.dq = self.dkv = None

    def pass_on(self, x):
        """Starts sending x to the next rank; the other is what the previous one sends, there after wait."""
        got = torch.empty_like(x)
        ops = [dist.P2POp(dist.isend, x, (rank + 1) % ranks), dist.P2POp(dist.irecv, got, (rank - 1) % ranks)]
        return got, dist.batch_isend_irecv(ops)

    def forward(self):
        pack, kv = self.pack, self.kv
        for step in range(ranks):
            coming, work = self.pass_on(kv) if step + 1 < ranks else (None, [])
            if step == 0:
                out, lse = self.kernel.forward(self.q, *kv, pack.mine, pack.mine, True)
                out = out.float()
            elif step <= rank:  # of an earlier rank: all rows see its head chunks
                block = self.kernel.forward(self.q, *kv.index_select(1, pack.head), pack.mine, pack.half, False)
                out, lse = fused_merge(out, lse, *block)
            else:  # of a later one: the tail rows see all
                block = self.kernel.forward(self.q.index_select(0, pack.tail), *kv, pack.half, pack.mine, False)
                some, some_lse = fused_merge(out.index_select(0, pack.tail), lse.index_select(0, pack.tail), *block)
                out, lse = out.index_copy(0, pack.tail, some), lse.index_copy(0, pack.tail, some_lse)
            finish(work)
            kv = coming
        self.out, self.lse = out.to(DTYPE), lse.contiguous()

    def backward(self):
        kv, tail, work, passed = self.kv, None, [], None
        for step in range(ranks):
            coming, kv_work = self.pass_on(kv) if step + 1 < ranks else (None, [])
            if step > rank and tail is None:
                tail = [x.index_select(0, self.pack.tail) for x in (self.do, self.q, self.out, self.lse)]
            block = self.block_gradients(kv, step, tail)
            finish(work)  # what the others added for these keys
            grads = self.add(step, passed, *block)
            finish(kv_work)
            kv = coming
            passed, work = self.pass_on(grads) if ranks > 1 else (grads, [])
        finish(work)
        self.dq, self.dkv = self.dq.to(DTYPE), passed.to(DTYPE)

    def block_gradients(self, kv, step, tail):
        pack, back = self.pack, self.kernel.backward
        if step == 0:
            return back(self.do, self.q, *kv, self.out, self.lse, pack.mine, pack.mine, True)
        if step <= rank:
            return back(self.do, self.q, *kv.index_select(1, pack.head), self.out, self.lse, pack.mine, pack.half, False)
        do, q, out, lse = tail
        return back(do, q, *kv, out, lse, pack.half, pack.mine, False)

    def add(self, step, grads, dq, dk, dv):
        """Adds a block's gradients, in float32."""
        new = torch.stack([dk, dv]).float()
        if step == 0:
            self.dq = dq.float()
            return new
        if step <= rank:
            self.dq += dq
            return grads.index_add_(1, self.pack.head, new)
        self.dq.index_add_(0, self.pack.tail, dq.float())
        return grads.add_(new)


ALGORITHMS = {"allgather": AllGather, "zigzag": Zigzag}


def finish(work):
    for w in work:
        w.wait()


def check(algorithm, kernel, eager):
    """The largest difference of output and gradients from float32 attention of each document, over the largest value."""
    gen = torch.Generator().manual_seed(1)
    total = sum(CHECKED)
    full = [torch.randn((total, h, args.head_dim), generator=gen).to(common.DEVICE, DTYPE) for h in (args.heads, args.kv_heads, args.kv_heads, args.heads)]
    pack = Pack(CHECKED)
    q, k, v, do = (pack.deal(x) for x in full)
    run = ALGORITHMS[algorithm](pack, KERNELS[kernel], q, torch.stack([k, v]), do)
    captured(run.both, eager)()
    q, k, v, do = (x.float() for x in full)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = torch.cat([reference(q[s], k[s], v[s]) for s in Rows(CHECKED).slices()])
    wants = [out.detach(), *torch.autograd.grad(out, leaves, do)]
    worst = 0.0
    real = pack.deal(torch.ones(total, device=common.DEVICE)).bool()
    for got, want in zip((run.out, run.dq, *run.dkv), wants):
        worst = max(worst, ((got.float() - pack.deal(want))[real].abs().max() / want.abs().max()).nan_to_num(nan=9e9).item())
    return common.slowest(worst)


def reference(q, k, v):
    each = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def works(algorithm, kernel, eager):
    """Whether the pair is right, which all ranks find alike."""
    try:
        error = check(algorithm, kernel, eager)
        said = f"largest error {error:.1e}"
    except (RuntimeError, TypeError, NotImplementedError) as e:
        error, said = float("inf"), f"{type(e).__name__}: {str(e)[:200]}"
    if rank == 0:
        print(f"torch {algorithm} {kernel}{' eager' if eager else ''}: {said}{'' if error < TOLERANCE else ', left out'}", flush=True)
    return error < TOLERANCE


def captured(f, eager):
    """The work that f queues, as one call."""
    if eager:
        return f
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        f()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events in a thread of its own, which the stricter mode forbids.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        f()
    return graph.replay


def timed(algorithm, kernel, eager, lengths):
    """Seconds of forward, and of forward and backward, on the slowest rank."""
    pack = Pack(lengths)
    gen = torch.Generator(common.DEVICE).manual_seed(rank)

    def make(*shape):
        return torch.randn((*shape, args.head_dim), generator=gen, device=common.DEVICE, dtype=DTYPE)

    n = pack.mine.total
    run = ALGORITHMS[algorithm](pack, KERNELS[kernel], make(n, args.heads), make(2, n, args.kv_heads), make(n, args.heads))
    return [common.measure(captured(f, eager), args.warmup, args.iters) for f in (run.forward, run.both)]


def row(algorithm, kernel, eager, packs):
    """Medians over the packs, named as cprun names them."""
    rows = []
    for lengths in packs:
        flops = sum(common.attention_flops(n, args.heads, args.head_dim) for n in lengths)
        forward, both = timed(algorithm, kernel, eager, lengths)
        rows.append((flops, forward, both - forward, both))
    flops, *seconds = ([r[i] for r in rows] for i in range(4))

    def rate(times, share):
        rates = [share * f / ranks / t / 1e12 for f, t in zip(flops, times)]
        return {"seconds": statistics.median(times), "tflops_per_device": statistics.median(rates)}

    out = {name: rate(times, share) for name, times, share in zip(("forward", "backward", "forward_backward"), seconds, (1, 2.5, 3.5))}
    return {"layout": "zigzag of each document", "algorithm": algorithm, "backend": kernel, "ranks": ranks, "packs": len(packs),
            "tokens": max(sum(lengths) for lengths in packs), "iters": args.iters, "eager": eager, "flops": statistics.median(flops), **out}


def drawn(lengths):
    """Packs of each length. They take seconds to draw, so that each rank draws others."""
    if args.packs_file:
        with open(args.packs_file) as f:
            return [json.load(f)[:args.packs]]
    from packs import packs

    mine = {i: packs(n, args.packs) for i, n in enumerate(lengths) if i % ranks == rank}
    out = []
    for i in range(len(lengths)):
        box = [mine.get(i)]
        dist.broadcast_object_list(box, i % ranks, device=torch.device(common.DEVICE))
        out.append(box[0])
    return out


def announced(row):
    what = ", ".join(f"{name} {row[name]['tflops_per_device']:.1f}" for name in ("forward", "backward", "forward_backward"))
    print("torch {algorithm} {backend}, {packs} packs of {tokens}: ".format(**row) + what + " TFLOP/s per GPU", flush=True)


kernels = args.kernels.split(",") if common.CUDA else ["plain"]
pairs = [(a, k) for k in kernels for a in args.algorithms.split(",") if a in KERNELS[k].algorithms]
modes = [True] if args.eager or not common.CUDA else [False, True]
right = [(a, k, mode) for a, k in pairs for mode in [next((m for m in modes if works(a, k, m)), None)] if mode is not None]
lists = drawn([ranks * n for n in common.sizes(args.tokens_per_rank)]) if not args.check else []
rows = []
for pair in right:
    for packs in lists:
        rows.append(row(*pair, packs))
        if rank == 0:
            announced(rows[-1])
        # After each, so that a limit of time leaves those before.
        common.report(args.json, {"peer": "documents", "heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim, "packed": rows})
common.finish()
sys.exit(bool(args.check and len(right) < len(pairs)))
