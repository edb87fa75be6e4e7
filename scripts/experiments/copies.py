"""What copies between the GPUs of two processes reach, and what mapping a peer's memory takes.

    python3 scripts/experiments/copies.py [GiB]     two GPUs; 5 s

Each process maps an allocation of the other (1 GiB or as many as are said) and copies random bytes into it, both ways
at once, back to back: on a plain stream, on an urgent one, and between waits for and writes to flags of the host, as
cprun's copy engines do, without and with each copy waiting for the one before to be known of.
"""
import ctypes
import multiprocessing
import os
import sys
import time

COUNT, MIB = 30, 1 << 20
u64, ptr, uint, size = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]


class Driver:
    """The driver's functions; an error ends the process."""

    types = {
        "cuMemcpyAsync": [u64, u64, size, ptr], "cuMemAlloc_v2": [ptr, size], "cuMemcpyHtoD_v2": [u64, ptr, size],
        "cuIpcGetMemHandle": [ptr, u64], "cuIpcOpenMemHandle_v2": [ptr, Handle, uint], "cuIpcCloseMemHandle": [u64],
        "cuStreamWaitValue64_v2": [ptr, u64, u64, uint], "cuStreamWriteValue64_v2": [ptr, u64, u64, uint],
        "cuMemHostAlloc": [ptr, size, uint], "cuStreamWaitEvent": [ptr, ptr, uint],
    }

    def __init__(self):
        self.lib = ctypes.CDLL("libcuda.so.1")

    def __getattr__(self, name):
        f = getattr(self.lib, name)
        f.argtypes = self.types.get(name)

        def call(*args):
            if r := f(*args):
                sys.exit(f"{name}: CUDA error {r}")

        return call


def rank(me, pipe, barrier, gib):
    cu = Driver()
    cu.cuInit(0)
    context, device = ptr(), ctypes.c_int()
    cu.cuDeviceGet(ctypes.byref(device), me)
    cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    cu.cuCtxSetCurrent(context)

    mine, theirs, handle = u64(), u64(), Handle()
    cu.cuMemAlloc_v2(ctypes.byref(mine), gib << 30)
    cu.cuIpcGetMemHandle(ctypes.byref(handle), mine.value)
    pipe.send(bytes(handle))
    other = Handle.from_buffer_copy(pipe.recv())
    barrier.wait()
    began = time.time()
    cu.cuIpcOpenMemHandle_v2(ctypes.byref(theirs), other, 1)
    print(f"rank {me}: {gib} GiB mapped in {1e3 * (time.time() - began):.1f} ms", flush=True)
    random = ctypes.create_string_buffer(os.urandom(64 * MIB), 64 * MIB)
    for at in range(0, 256 * MIB, 64 * MIB):
        cu.cuMemcpyHtoD_v2(mine.value + at, random, 64 * MIB)

    def make(create, *flags):
        x = ptr()
        create(ctypes.byref(x), *flags)
        return x

    least, most = ctypes.c_int(), ctypes.c_int()
    cu.cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(most))
    plain = make(cu.cuStreamCreateWithPriority, 1, 0)
    urgent, post, end = (make(cu.cuStreamCreateWithPriority, 1, most.value) for _ in range(3))
    flags = make(cu.cuMemHostAlloc, 4096, 2).value
    timed, marks = [make(cu.cuEventCreate, 0) for _ in range(2)], [make(cu.cuEventCreate, 2) for _ in range(2)]
    dst, n = theirs.value + (gib << 29), 0  # its other half

    def flagged(bytes, chained):
        nonlocal n
        n += 1
        if chained:
            cu.cuEventRecord(marks[0], plain)
            cu.cuStreamWaitEvent(post, marks[0], 0)
        cu.cuStreamWriteValue64_v2(post, flags, n, 0)
        cu.cuStreamWaitValue64_v2(urgent, flags, n, 0)
        cu.cuMemcpyAsync(dst, mine.value, bytes, urgent)
        cu.cuStreamWriteValue64_v2(urgent, flags + 64, n, 0)
        if chained:
            cu.cuStreamWaitValue64_v2(end, flags + 64, n, 0)
            cu.cuEventRecord(marks[1], end)
            cu.cuStreamWaitEvent(plain, marks[1], 0)

    ways = {
        "a plain stream": (plain, lambda b: cu.cuMemcpyAsync(dst, mine.value, b, plain)),
        "an urgent stream": (urgent, lambda b: cu.cuMemcpyAsync(dst, mine.value, b, urgent)),
        "flags": (urgent, lambda b: flagged(b, False)),
        "flags, one after the other": (plain, lambda b: flagged(b, True)),
    }
    for bytes in (16 * MIB, 64 * MIB, 256 * MIB):
        for name, (stream, copy) in ways.items():
            barrier.wait()
            for _ in range(COUNT):
                copy(bytes)
            cu.cuEventRecord(timed[0], stream)
            for _ in range(COUNT):
                copy(bytes)
            cu.cuEventRecord(timed[1], stream)
            cu.cuCtxSynchronize()
            ms = ctypes.c_float()
            cu.cuEventElapsedTime(ctypes.byref(ms), timed[0], timed[1])
            print(f"rank {me}: {bytes // MIB} MiB, {name}: {COUNT * bytes / ms.value / 1e6:.0f} GB/s", flush=True)
            barrier.wait()
    cu.cuIpcCloseMemHandle(theirs.value)


if __name__ == "__main__":
    gib = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    multiprocessing.set_start_method("spawn")
    ends, barrier = multiprocessing.Pipe(), multiprocessing.Barrier(2)
    ranks = [multiprocessing.Process(target=rank, args=(r, ends[r], barrier, gib)) for r in range(2)]
    for p in ranks:
        p.start()
    for p in ranks:
        p.join(120)
    for p in ranks:
        p.kill()
