"""What the two peers share: the group of ranks, medians by events, and FLOPs counted as cprun does."""
import contextlib
import json
import os
import statistics

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def start():
    """Joins the ranks that torchrun has started; returns the rank, their number and a mesh of them."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if CUDA else "gloo")
    mesh = dist.device_mesh.init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("cp",))
    return dist.get_rank(), dist.get_world_size(), mesh


def sizes(text):
    units = {"K": 1 << 10, "M": 1 << 20}
    return [int(s[:-1]) * units[s[-1]] if s[-1] in units else int(s) for s in text.split(",")]


def backend():
    """cuDNN's attention on a GPU; whatever there is on a CPU, which is for trying the scripts."""
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if CUDA else contextlib.nullcontext()


def ring(mesh, rotate):
    """PyTorch's ring over the mesh. Tensors are this rank's part already, head and tail of the sequence,
    so that only a dummy is handed over for cutting. rotate "": no ring, every rank by itself."""
    if mesh.size() == 1 or not rotate or not CUDA:
        return contextlib.nullcontext()
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotate)
    dummy = torch.zeros(1, 2 * mesh.size(), device=DEVICE)
    return context_parallel(mesh, buffers=[dummy], buffer_seq_dims=[1], no_restore_buffers={dummy})


def slowest(x):
    t = torch.tensor([x], dtype=torch.float64, device=DEVICE)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t.item()


class Clock:
    """Times between marks, in seconds, by events of the device."""

    def __init__(self):
        self.marks = []

    def mark(self):
        if CUDA:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            import time

            self.marks.append(time.perf_counter())

    def times(self):
        if not CUDA:
            return [b - a for a, b in zip(self.marks, self.marks[1:])]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(self.marks, self.marks[1:])]


def measure(f, warmup=2, iters=0, budget=2.0):
    """The median time of f on the slowest rank, as cprun's bench takes it: iterations follow each other
    without a pause, as many as fit the budget where their number is not given."""
    clock = Clock()
    clock.mark()
    for _ in range(warmup if iters else max(warmup, 1)):
        f()
        clock.mark()
    iters = iters or min(max(int(budget / slowest(clock.times()[-1])), 3), 30)
    dist.barrier()
    clock = Clock()
    clock.mark()
    for _ in range(iters):
        f()
        clock.mark()
    return slowest(statistics.median(clock.times()))


def attention_flops(seq, heads, dim):
    """Of a causal forward pass; forward and backward are 3.5 times that."""
    return 4 * seq * (seq + 1) / 2 * heads * dim


def report(path, result):
    """Rank 0 writes all that was found."""
    result["torch"], result["cudnn"] = torch.__version__, torch.backends.cudnn.version() if CUDA else None
    result["device"] = torch.cuda.get_device_name() if CUDA else "cpu"
    if dist.get_rank() == 0 and path:
        with open(path, "w") as f:
            json.dump(result, f, indent=2)


def finish():
    dist.barrier()
    dist.destroy_process_group()
