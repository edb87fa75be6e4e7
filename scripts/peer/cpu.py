#!/usr/bin/env python3
"""The CPU path beside its peers, in turns: products beside OpenBLAS, attention and training steps beside PyTorch.

    python3 scripts/peer/cpu.py [--rounds 5] [--only product,attention,train,ranks] [--json file]

wants Go, PyTorch, transformers and OpenBLAS (Debian: libopenblas0-pthread). Every figure is a median of rounds; in a
round ours and the peer's run after each other, each in processes of its own, on the same threads, and the ratio is the
median of those of the rounds. OpenBLAS takes virtual processors for old ones, so its core type is chosen here.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
SQUARES = (512, 1024, 2048)
SEQS, DIMS = (1024, 2048, 8192), (32, 64, 128)
MODELS = {"opticks": ("examples/opticks.yaml", 30), "llama-60m": ("examples/bench/llama-60m.yaml", 8)}  # and steps


def output(command, **env):
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}")
    return done.stdout


def peer(what, threads):
    """Rates of this file's own part of that name, in a process of its own."""
    env = {"OMP_NUM_THREADS": str(threads), "OPENBLAS_CORETYPE": coretype()}
    return json.loads(output([sys.executable, os.path.join(HERE, "cpu_peer.py"), what, str(threads)], **env).splitlines()[-1])


def coretype():
    with open("/proc/cpuinfo") as f:
        flags = next((line for line in f if line.startswith("flags")), "")
    return "SAPPHIRERAPIDS" if "avx512_bf16" in flags else "SKYLAKEX" if "avx512f" in flags else "HASWELL"


def benchmarks(binary, pattern, threads, seconds):
    """GFLOP/s of the Go benchmarks that match, by name."""
    text = output([binary, "-test.run", "^$", "-test.bench", pattern, "-test.benchtime", seconds, "-test.cpu", str(threads)])
    rates = {}
    for line in text.splitlines():
        if m := re.match(r"Benchmark(\S+?)(?:-\d+)?\s.*?([\d.]+) GFLOP/s", line):
            rates[m[1]] = float(m[2])
    return rates


def products(binary):
    ours = benchmarks(binary, "Linear/(512x|1024x1024|2048x)", 1, "0.5s")
    return {f"product {n} {form}": ours[f"Linear/{n}x{n}x{n}/{form}"] for n in SQUARES for form in ("forward", "dx", "dw")}


def attention(binary, threads):
    ours = benchmarks(binary, "Forward|Backward", threads, "0.5s")
    return {f"attention {what} {s} d {d}": ours[f"{what.capitalize()}/seq={s}/dim={d}"]
            for what in ("forward", "backward") for s in SEQS for d in DIMS}


def train(cprun, nproc, config, n):
    """Tokens/s of all ranks, by the median of n steps."""
    report = json.loads(output([cprun, "bench", "train", "--device", "cpu", "--nproc", str(nproc), "--quiet", "--steps", str(n),
                                "--json", "-", config]))
    return report["ranks"] * report["train"]["tokens_per_second_per_device"]


def steps(cprun):
    return {f"step {name}": train(cprun, 1, config, n) for name, (config, n) in MODELS.items()}


def ranks(cprun):
    """The example with 4 ranks, and with 1 on the same cores."""
    name = "4 ranks beside 1"
    return {name: train(cprun, 4, *MODELS["opticks"])}, {name: train(cprun, 1, *MODELS["opticks"])}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--only", default="product,attention,train,ranks")
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--json")
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as work:
        tests, cprun = os.path.join(work, "cpu.test"), os.path.join(work, "cprun")
        output(["go", "test", "-c", "-o", tests, "./kernels/cpu"])
        output(["go", "build", "-o", cprun, "./cmd/cprun"])
        parts = {
            "product": lambda: (products(tests), peer("product", 1)),
            "attention": lambda: (attention(tests, a.threads), peer("attention", a.threads)),
            "train": lambda: (steps(cprun), peer("train", a.threads)),
            "ranks": lambda: ranks(cprun),
        }
        pairs = {}
        for name in a.only.split(","):
            for _ in range(a.rounds):
                ours, theirs = parts[name]()
                for key in theirs:
                    pairs.setdefault(key, []).append((ours[key], theirs[key]))
        report(pairs, a)


def report(pairs, a):
    rows = []
    print(f"\n{'':32} {'cprun':>10} {'peer':>10} {'ratio':>7}   of {a.rounds} rounds")
    for key, list_ in pairs.items():
        ours, theirs = (statistics.median(x[i] for x in list_) for i in (0, 1))
        ratios = sorted(x / y for x, y in list_)
        rows.append({"what": key, "cprun": ours, "peer": theirs, "ratio": statistics.median(ratios), "ratios": ratios})
        print(f"{key:32} {ours:10,.1f} {theirs:10,.1f} {rows[-1]['ratio']:7.2f}   {ratios[0]:.2f} to {ratios[-1]:.2f}")
    print("GFLOP/s of products (beside OpenBLAS, one thread) and of attention; tokens/s of steps (beside the better of PyTorch eager and compiled)")
    if a.json:
        with open(a.json, "w") as f:
            json.dump({"rounds": a.rounds, "threads": a.threads, "rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
