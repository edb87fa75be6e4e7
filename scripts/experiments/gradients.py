"""Relative errors of gradients in bfloat16 and with linears in FP8 against float32, of each layer of a trained model.

    make build && python3 scripts/experiments/gradients.py [STEPS]      two CPU cores; a few minutes

It trains examples/opticks.yaml for STEPS (600). Then it takes one step of 8 samples from that checkpoint in each
precision: with a beta of 0, AdamW's first moment is the gradient. The last column has 8 other samples in float32.
"""
import array
import json
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 600
KINDS = {"fp32": [], "bf16": ["precision.compute=bf16"], "fp8": ["precision={compute: bf16, linears: fp8}"],
         "other samples": ["data.seed=2"]}


def cprun(run, steps, *keys, resume="never"):
    """Trains on one rank, and returns the path of the checkpoint."""
    command = [ROOT / "bin/cprun", "--quiet", "--nproc", "1", "--run-dir", run, "--resume", resume]
    for key in (f"train.steps={steps}", "checkpoint.every=0", "data.validation={every: 0}", "precision.compute=fp32", *keys):
        command += ["--set", key]
    subprocess.run([*command, ROOT / "examples/opticks.yaml"], check=True)
    return pathlib.Path(run, f"checkpoints/step-{steps:08}")


def gradients(checkpoint):
    """Returns the gradient of each parameter."""
    raw = (checkpoint / "shard-00000-of-00001.safetensors").read_bytes()
    size, = struct.unpack("<Q", raw[:8])
    fields = {k: v["data_offsets"] for k, v in json.loads(raw[8:8 + size]).items() if k.endswith(".exp_avg")}
    return {k: array.array("f", raw[8 + size + lo:8 + size + hi]) for k, (lo, hi) in fields.items()}


with tempfile.TemporaryDirectory() as work:
    trained = cprun(work + "/trained", STEPS)
    keys = ["optimizer={betas: [0, 0.95], grad_clip: 0}", "train.global_batch_size=8"]
    found = {kind: gradients(cprun(f"{work}/{kind}", STEPS + 1, *keys, *more, resume=trained))
             for kind, more in KINDS.items()}
want, sums = found.pop("fp32"), {}
for name, values in want.items():
    layer = re.search(r"layers\.\d+", name)
    row = sums.setdefault(layer[0] if layer else name.removesuffix(".exp_avg"), [0.0] * (1 + len(found)))
    row[0] += sum(x * x for x in values)
    for i, other in enumerate(found.values()):
        row[1 + i] += sum((x - y) ** 2 for x, y in zip(values, other[name]))
sums["all"] = [sum(column) for column in zip(*sums.values())]
print(f"{'':28}" + "".join(f"{kind:>15}" for kind in found))
for layer, (square, *errors) in sums.items():
    print(f"{layer:28}" + "".join(f"{100 * (e / square) ** 0.5:13.2f} %" for e in errors))
