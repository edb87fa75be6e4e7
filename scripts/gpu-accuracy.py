"""Holds `cprun attention` on several devices to float64. scripts/gpu-accuracy says how it is run.

The error of a tensor is ||x - x64|| / ||x64||, where x64 is float64 of the same inputs, rounded to bfloat16
first. It may be at most 1.25 times that of one device with the same kernel, and of PyTorch's cuDNN attention on
one, and may not grow by more than a tenth from 2 to 4 devices. Errors below 1e-6 are those of float32 sums and
are held to nothing.
"""
import argparse
import concurrent.futures
import glob
import json
import math
import os
import struct
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--cprun", required=True)
p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
p.add_argument("--ranks", default="", help="such as 1,2,4; 1 is always among them")
p.add_argument("--seq", default="4096,16384")
p.add_argument("--jobs", type=int, default=6, help="commands at a time")
p.add_argument("--json", default="")
args = p.parse_args()
CUDA = args.device == "cuda"
HEADS, KV_HEADS, DIM = (8, 2, 128) if CUDA else (4, 2, 64)
FAST, EXACT = ("bf16", "fp32") if CUDA else ("fp32", "fp32")
RATIO, GROWTH, FLOOR, ABSURD = 1.25, 1.1, 1e-6, 0.05
TENSORS = ("out", "lse", "dq", "dk", "dv")
RANKS = [int(n) for n in args.ranks.split(",")] if args.ranks else [n for n in (1, 2, 4) if n <= torch.cuda.device_count()]
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
WORK = tempfile.TemporaryDirectory()
TYPES = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16}


def save(path, tensors, meta):
    header, at = {"__metadata__": meta}, 0
    for name, t in tensors.items():
        size = t.numel() * t.element_size()
        header[name] = {"dtype": {v: k for k, v in TYPES.items()}[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for t in tensors.values():
            f.write(t.cpu().contiguous().view(torch.uint8).numpy().tobytes())


def load(path):
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = bytearray(f.read())
    meta = header.pop("__metadata__", {})
    make = lambda h: torch.frombuffer(data, dtype=torch.uint8)[slice(*h["data_offsets"])].clone().view(TYPES[h["dtype"]]).view(h["shape"])
    return {name: make(h) for name, h in header.items()}, meta


def visible(meta, rows, seq):
    """Whether the queries of those rows see each key."""
    i, j = rows[:, None], torch.arange(seq, device=rows.device)[None]
    see = (j <= i) if meta["causal"] == "true" else torch.ones(len(rows), seq, dtype=torch.bool, device=rows.device)
    if meta.get("window"):
        see &= j >= i - int(meta["window"])
    docs = json.loads(meta.get("docs") or "[]")
    if docs:
        of = torch.repeat_interleave(torch.arange(len(docs)), torch.tensor(docs)).to(rows.device)
        see &= of[rows][:, None] == of[None]
    return see


def exact(x, meta, chunk=4096):
    """Forward and backward in float64, a head and a chunk of queries at a time."""
    q, k, v, do = (x[n][0].to(args.device, torch.float64) for n in ("q", "k", "v", "dout"))
    seq, heads, dim = q.shape
    out, lse = torch.zeros_like(do), torch.zeros(seq, heads, dtype=torch.float64, device=q.device)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    scale = float(meta.get("scale") or dim**-0.5)
    for a in range(0, seq, chunk):
        rows = torch.arange(a, min(a + chunk, seq), device=q.device)
        hidden = ~visible(meta, rows, seq)
        for h in range(heads):
            g = h // (heads // k.shape[1])
            s = (q[rows, h] @ k[:, g].T * scale).masked_fill_(hidden, -torch.inf)
            lse[rows, h] = s.logsumexp(1)
            prob = s.sub_(lse[rows, h][:, None]).exp_()
            o = prob @ v[:, g]
            dv[:, g] += prob.T @ do[rows, h]
            ds = do[rows, h] @ v[:, g].T
            ds.sub_((do[rows, h] * o).sum(1, keepdim=True)).mul_(prob).mul_(scale)
            dq[rows, h] = ds @ k[:, g]
            dk[:, g] += ds.T @ q[rows, h]
            out[rows, h] = o
    return {"out": out[None], "lse": lse.T[None], "dq": dq[None], "dk": dk[None], "dv": dv[None]}


def sdpa(x, meta):
    """PyTorch's attention on one device: cuDNN's. None where the mask is not its own."""
    if meta.get("window") or meta.get("docs"):
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x[n].to(args.device).transpose(1, 2).contiguous().requires_grad_() for n in ("q", "k", "v"))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if CUDA else SDPBackend.MATH):
        try:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        except RuntimeError:  # a PyTorch whose cuDNN backend takes no grouped heads
            group = HEADS // KV_HEADS
            o = F.scaled_dot_product_attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True)
        o.backward(x["dout"].to(args.device).transpose(1, 2))
    return {n: t.detach().transpose(1, 2) for n, t in (("out", o), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad))}


def error(got, want):
    """The norm of the error over that of the tensor, the largest error, and that over the largest value. NaN is infinitely
    far: Python's max keeps or drops a NaN by the order of its arguments."""
    if got.shape != want.shape:
        raise RuntimeError(f"a tensor of {tuple(got.shape)}, want {tuple(want.shape)}")
    got = got.to(want.device, torch.float64)
    d = got - want
    found = d.norm() / want.norm(), d.abs().max(), d.abs().max() / want.abs().max()
    return tuple(x.nan_to_num(nan=math.inf).item() for x in found)


def errors(got, want):
    return {n: error(t, want[n]) for n, t in got.items() if n in want}


def attention(path, ranks, backend, dtype, algorithm="ring"):
    """Runs the command; what it wrote, or raises with the end of what it said."""
    out = tempfile.mktemp(suffix=".safetensors", dir=WORK.name)
    command = [args.cprun, "attention", "--device", args.device, "--nproc", str(ranks), "--backend", backend, "--dtype", dtype,
               "--algorithm", algorithm, "--in", path, "--out", out, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(" ".join(command) + "\n" + (done.stdout + done.stderr)[-1500:])
    return out


def make(name, seq, **more):
    gen = torch.Generator(args.device).manual_seed(seq)
    normal = lambda heads: torch.randn(1, seq, heads, DIM, generator=gen, device=args.device).to(torch.bfloat16)
    x = {"q": normal(HEADS), "k": normal(KV_HEADS), "v": normal(KV_HEADS), "dout": normal(HEADS)}
    meta = {"causal": "true", **more}
    path = os.path.join(WORK.name, name + ".safetensors")
    save(path, x, meta)
    return name, path, x, meta


def main():
    sizes = [int(s) for s in args.seq.split(",")]
    s = sizes[0]
    docs = [s // 8, s // 2 + 3, 1, s // 4]
    made = [make(f"causal {n}", n) for n in sizes]
    masked = [make(f"window {s}", s, window=str(s // 8)), make(f"documents {s}", s, docs=json.dumps(docs + [s - sum(docs)]))]
    fast = ["fused", "flash"] if CUDA else ["flash"]
    runs = [(c, b, a, n) for c in made for b in fast for a in ("ring", "allgather") for n in RANKS if n > 1 or a == "ring"]
    runs += [(c, "flash", "ring", n) for c in masked for n in RANKS]
    files = sorted(glob.glob(os.path.join(ROOT, "attention/attentiontest/testdata/*.safetensors")))
    fixtures = [(f, b, d, n) for f in files for b, d in (("flash", FAST), ("reference", EXACT)) for n in RANKS]
    failed, table = [], []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        # Once alone, so that kernels are compiled once and the others find them.
        for b in [*fast, "reference"]:
            attention(files[0], 1, b, EXACT if b == "reference" else FAST)
        big = [pool.submit(attention, c[1], n, b, FAST, a) for c, b, a, n in runs]
        small = [pool.submit(attention, f, n, b, d) for f, b, d, n in fixtures]
        want = {c[0]: exact(c[2], c[3]) for c in made + masked}
        peers = {c[0]: errors(r, want[c[0]]) for c in made if (r := sdpa(c[2], c[3]))}
        judge(runs, big, want, peers, table, failed)
        judge_fixtures(fixtures, small, table, failed)
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"torch": torch.__version__, "rows": table, "failed": failed}, f, indent=1)
    print("\n".join("FAIL  " + f for f in failed) or "PASS  all errors are within their bounds")
    return 1 if failed else 0


def judge(runs, futures, want, peers, table, failed):
    print("||x-x64|| / ||x64||, and behind it what it is of one rank's:")
    print(f"{'case':15} {'backend':7} {'by':9} ranks" + "".join(f" {t:>15}" for t in TENSORS) + "   of PyTorch's")
    for name, peer in peers.items():
        print(f"{name:15} {'PyTorch':7} {'':9}     1" + "".join(f" {peer[t][0]:9.3e}      " if t in peer else " " * 16 for t in TENSORS))
        table += [{"case": name, "backend": "PyTorch", "ranks": 1, "tensor": t, "error": e[0], "max": e[1]} for t, e in peer.items()]
    one, before = {}, {}
    for (c, backend, algorithm, n), future in zip(runs, futures):
        name = c[0]
        try:
            got = errors(load(future.result())[0], want[name])
        except (RuntimeError, subprocess.TimeoutExpired) as e:
            failed.append(f"{name}, {backend}, {algorithm}, {n}: {e}")
            continue
        line, worst = f"{name:15} {backend:7} {algorithm:9} {n:5}", 0.0
        for t in TENSORS:
            e, most, _ = got[t]
            base = one.setdefault((name, backend, t), e if n == 1 else float("nan"))
            peer = peers.get(name, {}).get(t)
            row = {"case": name, "backend": backend, "algorithm": algorithm, "ranks": n, "tensor": t, "error": e, "max": most,
                   "to_one_rank": e / base, "to_pytorch": e / peer[0] if peer else None}
            row["growth"] = e / before.get((name, backend, algorithm, t), e) if n == 4 else None
            before[name, backend, algorithm, t] = e
            worst = max(worst, row["to_pytorch"] or 0)
            line += f" {e:9.3e} x{e / base:.2f}"
            table.append(row)
            failed += [f"{name}, {backend}, {algorithm}, {n} ranks, {t}: {why}" for why in faults(row)]
        print(line + (f"   x{worst:.2f}" if worst else ""))


def faults(row):
    e = row["error"]
    if not e < ABSURD:
        yield f"an error of {e:.3g}"
    if e <= FLOOR:
        return
    for key, bound, what in (("to_one_rank", RATIO, "one rank's"), ("to_pytorch", RATIO, "PyTorch's"), ("growth", GROWTH, "that of 2 ranks")):
        if row[key] is not None and not row[key] <= bound:
            yield f"{e:.3g} is {row[key]:.3f} times {what}, of {bound} at most"


def judge_fixtures(fixtures, futures, table, failed):
    worst = {}
    for (path, backend, dtype, n), future in zip(fixtures, futures):
        try:
            x, _ = load(path)
            want = {t: x[t].double() for t in TENSORS}
            got = errors(load(future.result())[0], want)
        except (RuntimeError, subprocess.TimeoutExpired) as e:
            failed.append(f"fixture {os.path.basename(path)}, {backend}, {dtype}, {n}: {e}")
            continue
        for t, (e, _, most) in got.items():
            worst.setdefault((backend, dtype, n), []).append((most, e, t, os.path.basename(path)))
    for (backend, dtype, n), all in worst.items():
        bound = 1e-5 if dtype == "fp32" else 2e-2
        most, e, t, name = max(all)
        print(f"fixtures, {backend}, {dtype}, {n} ranks: worst error over largest value {most:.3g} of {bound:g}, {t} of {name}; "
              f"worst ||x-x64||/||x64|| {max(a[1] for a in all):.3g}")
        table.append({"fixtures": True, "backend": backend, "dtype": dtype, "ranks": n, "worst": most, "bound": bound, "tensor": t, "file": name})
        if not most <= bound:
            failed.append(f"fixtures, {backend}, {dtype}, {n} ranks: {most:.3g} is more than {bound:g}")


sys.exit(main())
