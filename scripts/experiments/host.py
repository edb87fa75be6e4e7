"""How fast host memory is pinned, and how fast GPUs copy to and from it, all at once.

    python3 scripts/experiments/host.py [GiB [MiB]]     every GPU; slabs of 64 GiB, copies of 64 MiB; about 4 minutes on 2 GPUs

One process for each GPU. First each touches its slab once, since the memory of a virtual machine may grow only then. Next
come the rates of copies back to back between 8 GiB of host memory and the GPU: each direction, then both at once; then
the host's own rate; then the seconds that each way of pinning takes. Each is measured on the first GPU alone, then on all
together.
"""
import ctypes
import mmap
import multiprocessing
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from copies import MIB, Driver, ptr, size, u64, uint

GIB, CORES = 1 << 30, len(os.sched_getaffinity(0))
HUGEPAGE, POPULATE_WRITE = 14, 23  # of madvise
Driver.types |= {
    "cuMemcpyDtoHAsync_v2": [ptr, u64, size, ptr], "cuMemcpyHtoDAsync_v2": [u64, ptr, size, ptr], "cuMemFreeHost": [ptr],
    "cuMemHostRegister_v2": [ptr, size, uint], "cuMemHostUnregister": [ptr], "cuStreamSynchronize": [ptr],
    "cuEventRecord": [ptr, ptr], "cuEventSynchronize": [ptr],
}
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.argtypes, libc.mmap.restype = [ptr, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long], ptr
libc.madvise.argtypes, libc.munmap.argtypes = [ptr, size, ctypes.c_int], [ptr, size]


def threads(f, at, n, count):
    """Calls f(address, bytes) for pieces of 512 MiB, on count threads: ctypes runs C without Python's lock."""
    piece = min(n, GIB // 2)
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda lo: f(at + lo, min(piece, n - lo)), range(0, n, piece)))


def populate(at, n):
    if libc.madvise(at, n, POPULATE_WRITE):
        sys.exit(f"madvise: {os.strerror(ctypes.get_errno())}")


def anonymous(n, huge):
    at = libc.mmap(None, n, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if huge:
        libc.madvise(at, n, HUGEPAGE)
    return at


def huge_pages():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next((int(l.split()[1]) / (1 << 20) for l in lines if l.startswith("AnonHugePages")), 0)


class Slab:
    """Pinned memory, made in one of the ways."""

    ways = {  # name: (registered, in huge pages, touched by, threads)
        "cuMemHostAlloc": (False, False, None, 0),
        "mmap, huge pages, register": (True, True, None, 0),
        "mmap, huge pages, populate on all cores, register": (True, True, populate, CORES),
        "mmap, huge pages, memset on all cores, register": (True, True, lambda at, n: ctypes.memset(at, 0, n), CORES),
    }

    def __init__(self, cu, way, n):
        self.cu, self.n = cu, n
        self.registered, huge, touch, count = self.ways[way]
        began = touched = time.time()
        if self.registered:
            self.at = anonymous(n, huge)
            if touch:
                threads(touch, self.at, n, count)
            touched = time.time()
            cu.cuMemHostRegister_v2(self.at, n, 3)
        else:
            at = ptr()
            cu.cuMemHostAlloc(ctypes.byref(at), n, 3)
            self.at = at.value
        self.seconds, self.touch = time.time() - began, touched - began

    def free(self):
        began = time.time()
        if self.registered:
            self.cu.cuMemHostUnregister(self.at)
            libc.munmap(self.at, self.n)
        else:
            self.cu.cuMemFreeHost(self.at)
        return time.time() - began


def make(create, *flags):
    x = ptr()
    create(ctypes.byref(x), *flags)
    return x


def rank(me, ranks, barrier, n, bytes):
    cu = Driver()
    cu.cuInit(0)
    context, device = ptr(), ctypes.c_int()
    cu.cuDeviceGet(ctypes.byref(device), me)
    cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    cu.cuCtxSetCurrent(context)

    def say(text):
        print(f"gpu {me}: {text}", flush=True)

    def groups(f):
        """Calls f on the first rank alone, then on all together."""
        barrier.wait()
        if me == 0:
            f("alone")
        barrier.wait()
        if ranks > 1:
            f("together")
        barrier.wait()

    barrier.wait()
    began = time.time()
    at = anonymous(n, True)
    threads(populate, at, n, CORES)
    say(f"first touch of {n / GIB:g} GiB: {time.time() - began:.2f} s, {huge_pages():.1f} GiB in huge pages")
    began = time.time()
    libc.munmap(at, n)
    say(f"unmapped in {time.time() - began:.2f} s")

    there = u64()
    cu.cuMemAlloc_v2(ctypes.byref(there), 2 * bytes)
    lanes = [make(cu.cuStreamCreate, 1) for _ in range(2)]
    for way in ("cuMemHostAlloc", "mmap, huge pages, populate on all cores, register"):
        slab = Slab(cu, way, min(n, 8 * GIB))
        half = slab.n // 2 // bytes * bytes

        def queue(direction, i):
            where = i * bytes % half
            if direction == 0:
                cu.cuMemcpyDtoHAsync_v2(slab.at + where, there.value, bytes, lanes[0])
            else:
                cu.cuMemcpyHtoDAsync_v2(there.value + bytes, slab.at + half + where, bytes, lanes[1])

        for name, directions in {"to the host": [0], "to the GPU": [1], "both ways": [0, 1]}.items():
            def copy(group):
                count = max(1, 16 * GIB // bytes)
                marks = {d: [make(cu.cuEventCreate, 0) for _ in range(2)] for d in directions}
                for i in range(-2, count):
                    for d in directions:
                        queue(d, i % count)
                        if i in (-1, count - 1):
                            cu.cuEventRecord(marks[d][i > 0], lanes[d])
                rates = []
                for d in directions:
                    ms = ctypes.c_float()
                    cu.cuEventSynchronize(marks[d][1])
                    cu.cuEventElapsedTime(ctypes.byref(ms), *marks[d])
                    rates.append(f"{count * bytes / ms.value / 1e6:.1f}")
                say(f"copies of {bytes // MIB} MiB {name} {group}, {way}: {' and '.join(rates)} GB/s")
            groups(copy)
        slab.free()

    def host(group):
        n = 8 * GIB
        at = anonymous(n, True)
        threads(populate, at, n, CORES)
        began = time.time()
        for _ in range(3):
            threads(lambda lo, m: ctypes.memmove(lo, lo + n // 2, m), at, n // 2, CORES)
        say(f"memmove on all cores {group}: {3 * n / (time.time() - began) / 1e9:.0f} GB/s read and written")
        libc.munmap(at, n)
    groups(host)

    for way in Slab.ways:
        def pin(group):
            slab = Slab(cu, way, n)
            huge = huge_pages()
            say(f"pin {n / GIB:g} GiB {group}, {way}: {slab.seconds:.2f} s (touching {slab.touch:.2f}), "
                f"{huge:.1f} GiB in huge pages, freed in {slab.free():.2f} s")
        groups(pin)


if __name__ == "__main__":
    gib = float(sys.argv[1]) if len(sys.argv) > 1 else 64
    bytes = (int(sys.argv[2]) if len(sys.argv) > 2 else 64) * MIB
    count = ctypes.c_int()
    cu = Driver()
    cu.cuInit(0)
    cu.cuDeviceGetCount(ctypes.byref(count))
    os.system("grep -E 'MemTotal|MemAvailable' /proc/meminfo; cat /sys/kernel/mm/transparent_hugepage/enabled")
    os.system("ls -d /sys/devices/system/node/node*; ulimit -l; nproc")
    multiprocessing.set_start_method("spawn")
    barrier = multiprocessing.Barrier(count.value, timeout=300)  # a failed rank ends the others
    ranks = [multiprocessing.Process(target=rank, args=(r, count.value, barrier, int(gib * GIB), bytes)) for r in range(count.value)]
    for p in ranks:
        p.start()
    for p in ranks:
        p.join()
    sys.exit(any(p.exitcode for p in ranks))
