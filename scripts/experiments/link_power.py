"""Do copies between GPUs slow attention that runs at the power limit?

    python3 scripts/experiments/link_power.py      two GPUs, PyTorch; 40 s

Both GPUs run cuDNN attention, forward and backward, without a pause. Blocks without copies, with a copy of 64 KiB
each 5 ms, and with one of 400 MiB each 40 ms, as a ring at 128K tokens makes them, follow each other in turns. For
each: the time of a step, the clock and the power, medians over the rounds.
"""
import ctypes
import os
import statistics
import threading
import time

os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # streams that share a queue would wait for each other

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

GPUS, ROUNDS, STEPS = range(2), 6, 100
SEQ, HEADS, KV_HEADS, DIM = 16384, 32, 8, 128
COPIES = {"none": (0, 0.02), "64 KiB each 5 ms": (1 << 14, 0.005), "400 MiB each 40 ms": (100 << 20, 0.04)}  # floats, seconds

nvml = ctypes.CDLL("libnvidia-ml.so.1")
nvml.nvmlInit_v2()
handles = [ctypes.c_void_p() for _ in GPUS]
for g in GPUS:
    nvml.nvmlDeviceGetHandleByIndex_v2(g, ctypes.byref(handles[g]))
samples = []  # (time, MHz and W of each GPU)


def sample():
    clock, power = ctypes.c_uint(), ctypes.c_uint()
    while True:
        row = []
        for h in handles:
            nvml.nvmlDeviceGetClockInfo(h, 1, ctypes.byref(clock))
            nvml.nvmlDeviceGetPowerUsage(h, ctypes.byref(power))
            row += [clock.value, power.value / 1e3]
        samples.append((time.time(), row))
        time.sleep(0.02)


def randn(gpu, heads):
    return torch.randn(1, heads, SEQ, DIM, device=f"cuda:{gpu}", dtype=torch.bfloat16)


inputs = [[randn(g, h).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS)] + [randn(g, HEADS)] for g in GPUS]
compute, lanes = [torch.cuda.Stream(g) for g in GPUS], [torch.cuda.Stream(g, priority=-1) for g in GPUS]
here, there = [torch.randn(100 << 20, device=f"cuda:{g}") for g in GPUS], [torch.empty(100 << 20, device=f"cuda:{g}") for g in GPUS]


def steps(gpu, events):
    q, k, v, do = inputs[gpu]
    with torch.cuda.device(gpu), torch.cuda.stream(compute[gpu]):
        events[0].record()
        for _ in range(STEPS):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            out.backward(do)
            q.grad = k.grad = v.grad = None
        events[1].record()


def block(floats, pause):
    """The milliseconds of a step on each GPU, and the mean clocks and powers."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in GPUS]
    queue = [threading.Thread(target=steps, args=(g, events[g])) for g in GPUS]
    began = time.time()
    for t in queue:
        t.start()
    while any(t.is_alive() for t in queue) or not all(e[1].query() for e in events):
        for g in GPUS if floats else ():
            with torch.cuda.device(g), torch.cuda.stream(lanes[g]):
                there[1 - g][:floats].copy_(here[g][:floats], non_blocking=True)
        time.sleep(pause)
    ended = time.time()
    for g in GPUS:
        torch.cuda.synchronize(g)
    rows = [r for t, r in samples if began + 0.3 < t < ended - 0.1]
    return [e[0].elapsed_time(e[1]) / STEPS for e in events] + [statistics.mean(c) for c in zip(*rows)]


threading.Thread(target=sample, daemon=True).start()
block(0, 0.02)  # warms up
found = {name: [] for name in COPIES}
for _ in range(ROUNDS):
    for name, c in COPIES.items():
        found[name].append(block(*c))
for name, rows in found.items():
    ms0, ms1, mhz0, w0, mhz1, w1 = (statistics.median(c) for c in zip(*rows))
    print(f"copies: {name:20} {ms0:.3f} and {ms1:.3f} ms a step, {mhz0:.0f} and {mhz1:.0f} MHz, {w0:.0f} and {w1:.0f} W")
