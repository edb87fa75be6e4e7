"""Counts the DRAM traffic of a backward pass by a model of the L2: blocks of 128 keys visit steps of 64 queries on
132 SMs, and a step needs Q, dO (bf16) and dQ (float32, read and written) of a query head, which stay in the L2 until
others displace them, the least recently used first (docs/hopper.md).

    python3 scripts/experiments/l2.py [--tokens 8192 16384 32768] [--megabytes 36]
    python3 scripts/experiments/l2.py --group 8 [--miss 0.04] \\
        --documents 216 1536 1536 762 350 75 75 150 350 150 75 30 3072 30 4096 3881

The first gives 6.3 and 1.3 GB for a causal call of 16,384 tokens, where ncu counts 5.8 and 1.7 on H100, the second 12.7
and 5.7 for packed documents, where it counts 12.4 and 6.0 on H200.

down: the order of longer calls, the longest blocks of a KV head first, each down the queries of one head after
      another; the shortest blocks of all heads last.
both: the longer half of a head's blocks goes down the queries, all heads at each step; then the shorter half goes up,
      each block after the one with which it fills a sweep.

Of packed documents, with the number of the shortest blocks that run last, of all heads:

apart:    longest first, each down the queries of one head after another.
together: all heads at each step, the blocks of a document as neighbours (b2b3df5a).
fewer:    the same with fewer last (eed7cf33).

The last figure is the share of the SMs' time in steps. With --miss, the DRAM serves one step's data after another, each
in that part of a step's time, and a block waits for data that it wanted two steps before.
"""

import argparse
import heapq
import random
from collections import OrderedDict

SMS, KEYS, STEP, KV_HEADS = 132, 128, 64, 8
READ, WRITTEN = STEP * 128 * (2 + 2 + 4), STEP * 128 * 4  # bytes of a step


def run(items, a):
    """items: the steps of each block, lists of (head, row...); returns a line of figures."""
    draw, recent, misses, steps, free, end = random.Random(1), OrderedDict(), 0, 0, 0, 0
    ready = [(draw.random() / 2, sm, iter(())) for sm in range(SMS)]
    heapq.heapify(ready)
    queue = iter(items)
    while ready:
        now, sm, left = heapq.heappop(ready)
        end = max(end, now)
        step = next(left, None)
        if step is None:
            item = next(queue, None)
            if item is not None:
                heapq.heappush(ready, (now + 4, sm, iter(item)))  # loads of K and V
            continue
        steps += 1
        late = 0
        if step in recent:
            recent.move_to_end(step)
        else:
            misses += 1
            free = max(free, now) + a.miss
            late = max(0, free - now - 2) if a.miss else 0
            recent[step] = True
            if len(recent) * READ > a.megabytes << 20:
                recent.popitem(last=False)
        heapq.heappush(ready, (now + 1 + late + draw.gauss(0, 0.03), sm, left))
    gigabytes = misses * (READ + WRITTEN) / 1e9
    return f"{gigabytes:.2f} GB, {100 - 100 * misses / steps:.1f} % hits, {steps / SMS / end:.2f} of the time in steps"


def heads(kv, a):
    return range(kv * a.group, (kv + 1) * a.group)


def in_order(order, last, walk):
    """The walks of the blocks of a KV head after another, and the last blocks of all heads."""
    early, late, all_heads = order[: len(order) - last], order[len(order) - last :], range(KV_HEADS)
    return [walk(kv, b) for kv in all_heads for b in early] + [walk(kv, b) for b in late for kv in all_heads]


def causal(tokens, a):
    blocks = tokens // KEYS
    rows = lambda block: range(tokens // STEP - 1, block * KEYS // STEP - 1, -1)
    by_head = lambda kv, block: [(h, r) for h in heads(kv, a) for r in rows(block)]
    down = lambda kv, block: [(h, r) for r in rows(block) for h in heads(kv, a)]
    up = lambda kv, block: [(h, r) for r in reversed(rows(block)) for h in heads(kv, a)]
    print(f"{tokens:6d} tokens, down: {run(in_order(range(blocks), min(32, blocks), by_head), a)}")
    half, both = blocks // 2, []
    beside = max(1, SMS // half)
    for first in range(0, KV_HEADS, beside):
        some = range(first, min(KV_HEADS, first + beside))
        both += [down(kv, half - 1 - i) for i in range(half) for kv in some]
        both += [up(kv, half + i) for i in range(half) for kv in some]
    print(f"{tokens:6d} tokens, both: {run(both, a)}")


def documents(lengths, a):
    walks, longest, start = {}, {}, 0  # by block: its rows, and the steps of the longest block of its documents
    for doc, n in enumerate(lengths):
        for b in range(start // KEYS, -(-(start + n) // KEYS)):
            own = max(0, b * KEYS - start) // STEP
            walks.setdefault(b, [])[:0] = [(doc, row) for row in range((n - 1) // STEP, own - 1, -1)]
            longest[b] = max(longest.get(b, 0), -(-n // STEP))
        start += n
    steps = {b: len(w) for b, w in walks.items()}

    def shortest(factor, most):  # shortLast of hopper_order.go
        work = count = 0
        for n in sorted(steps.values()):
            if work >= SMS * min(max(steps.values()), factor * n) or n > most:
                break
            work, count = work + KV_HEADS * n, count + 1
        return count

    by_head = lambda kv, b: [(h, *r) for h in heads(kv, a) for r in walks[b]]
    at_once = lambda kv, b: [(h, *r) for r in walks[b] for h in heads(kv, a)]
    beside = (32 << 20) // (KV_HEADS * READ)  # stepsBeside of hopper.go
    for name, key, walk, last in (
        ("apart", steps, by_head, shortest(9**9, beside)),
        ("together", longest, at_once, shortest(2, beside)),
        ("fewer", longest, at_once, shortest(1.5, min(beside, max(steps.values()) // 3))),
    ):
        order = sorted(walks, key=lambda b: -key[b])
        print(f"{start:6d} tokens, {name}, {last} of {len(order)} last: {run(in_order(order, last, walk), a)}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    p.add_argument("--documents", type=int, nargs="+", help="the lengths of a pack, in place of causal calls")
    p.add_argument("--group", type=int, default=4, help="query heads to a KV head")
    p.add_argument("--megabytes", type=int, default=36, help="of the L2")
    p.add_argument("--miss", type=float, default=0, help="time of the DRAM for the data of a step, in steps; 0: none")
    a = p.parse_args()
    if a.documents:
        documents(a.documents, a)
    else:
        for tokens in a.tokens:
            causal(tokens, a)


if __name__ == "__main__":
    main()
