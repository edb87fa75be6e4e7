"""Validation losses of training in bfloat16 and with linears in FP8, on the text of examples/opticks.yaml.

    make build && python3 scripts/experiments/learning.py            one Hopper GPU; two minutes
    make build && python3 scripts/experiments/learning.py 1B 8       one model with eight seeds, in place of both with three

A model of 76 M parameters takes 400 steps of 2K bytes, Llama-3.2-1B's shape 200 steps of 4K: the text 1.9 times. The
seed gives the weights and the order of samples. Three runs share the GPU.
"""
import concurrent.futures
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MODELS = {
    "76M": ["model={hidden_size: 768, intermediate_size: 2048, num_hidden_layers: 12, num_attention_heads: 12, "
            "num_key_value_heads: 4}", "data.seq_len=2K", "train.steps=400", "optimizer.lr=1.0e-3"],
    "1B": ["model={hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 16, num_attention_heads: 32, "
           "num_key_value_heads: 8}", "data.seq_len=4K", "train.steps=200", "optimizer.lr=3.0e-4"],
}
MODELS = {name: MODELS[name] for name in sys.argv[1:2] or MODELS}
SEEDS = range(1, int(sys.argv[2]) + 1 if sys.argv[2:] else 4)
COMMON = ["lr_schedule={warmup_steps: 20, min_lr: 3.0e-5}", "data.validation={every: 1000, samples: 0}",
          "checkpoint.every=0", "log={trace_steps: 0, tensorboard: false}", "precision.compute=bf16"]


def train(model, linears, seed):
    """Returns the validation loss after the last step, and ends the run: its checkpoint would have 12 GB."""
    keys = [*MODELS[model], *COMMON, f"precision.linears={linears}", f"train.seed={seed}", f"data.seed={seed}"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as run:
        command = [ROOT / "bin/cprun", "--quiet", "--nproc", "1", "--run-dir", run + "/run"]
        for key in keys:
            command += ["--set", key]
        process = subprocess.Popen([*command, ROOT / "examples/opticks.yaml"], env=os.environ | {"TMPDIR": run})
        metrics, lines = pathlib.Path(run, "run/metrics.jsonl"), []
        while len(lines) < 2 and process.poll() is None:  # validations before the first step and after the last
            time.sleep(0.2)
            text = metrics.read_text() if metrics.exists() else ""
            lines = [line for line in map(json.loads, text.split("\n")[:-1]) if line.get("val_loss") is not None]
        process.kill()  # its workers end with it
        process.wait()
    loss = lines[1]["val_loss"]
    print(f"{model} seed {seed} {linears}: {loss:.4f}", flush=True)
    return loss


with concurrent.futures.ThreadPoolExecutor(3) as pool:
    runs = {(m, l, s): pool.submit(train, m, l, s) for m in MODELS for s in SEEDS for l in ("bf16", "fp8")}
for model in MODELS:
    bf16, fp8 = ([runs[model, linears, s].result() for s in SEEDS] for linears in ("bf16", "fp8"))
    error = math.sqrt((statistics.variance(bf16) + statistics.variance(fp8)) / len(SEEDS))
    print(f"{model}: bf16 {statistics.mean(bf16):.4f} ± {statistics.stdev(bf16):.4f}, fp8 {statistics.mean(fp8):.4f} ± "
          f"{statistics.stdev(fp8):.4f}, difference {statistics.mean(fp8) - statistics.mean(bf16):+.4f} ± {error:.4f}")
