"""Counts the DRAM traffic of a causal backward pass by a model of the L2: blocks of 128 keys visit steps of 64 queries on
132 SMs, and a step needs Q, dO (bf16) and dQ (float32, read and written) of a query head, which stay in the L2 until
others displace them, the least recently used first. 36 MB give 6.3 and 1.3 GB at 16,384 tokens, where ncu counts 5.8
and 1.7 on H100 (docs/hopper.md).

    python3 scripts/experiments/l2.py [--tokens 8192 16384 32768] [--megabytes 36]

down: the order of longer calls, the longest blocks of a KV head first, each down the queries of one head after
      another; the shortest blocks of all heads last.
both: the longer half of a head's blocks goes down the queries, all heads at each step; then the shorter half goes up,
      each block after the one with which it fills a sweep.
"""

import argparse
import heapq
import random
from collections import OrderedDict

SMS, KEYS, STEP, KV_HEADS, GROUP = 132, 128, 64, 8, 4
READ, WRITTEN = STEP * 128 * (2 + 2 + 4), STEP * 128 * 4  # bytes of a step


def run(items, megabytes):
    """items: the steps of each block, lists of (head, row); returns gigabytes and the share of hits."""
    draw, recent, misses, steps = random.Random(1), OrderedDict(), 0, 0
    ready = [(draw.random() / 2, sm, iter(())) for sm in range(SMS)]
    heapq.heapify(ready)
    queue = iter(items)
    while ready:
        now, sm, left = heapq.heappop(ready)
        step = next(left, None)
        if step is None:
            item = next(queue, None)
            if item is not None:
                heapq.heappush(ready, (now + 4, sm, iter(item)))  # loads of K and V
            continue
        steps += 1
        if step in recent:
            recent.move_to_end(step)
        else:
            misses += 1
            recent[step] = True
            if len(recent) * READ > megabytes << 20:
                recent.popitem(last=False)
        heapq.heappush(ready, (now + 1 + draw.gauss(0, 0.03), sm, left))
    return misses * (READ + WRITTEN) / 1e9, 1 - misses / steps


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    p.add_argument("--megabytes", type=int, default=36)
    a = p.parse_args()
    for tokens in a.tokens:
        blocks = tokens // KEYS
        rows = lambda block: range(tokens // STEP - 1, block * KEYS // STEP - 1, -1)
        of = lambda kv: range(kv * GROUP, (kv + 1) * GROUP)
        by_head = lambda kv, block: [(h, r) for h in of(kv) for r in rows(block)]
        down = lambda kv, block: [(h, r) for r in rows(block) for h in of(kv)]
        up = lambda kv, block: [(h, r) for r in reversed(rows(block)) for h in of(kv)]
        last = min(32, blocks)
        today = [by_head(kv, b) for kv in range(KV_HEADS) for b in range(blocks - last)]
        today += [by_head(kv, b) for b in range(blocks - last, blocks) for kv in range(KV_HEADS)]
        half, both = blocks // 2, []
        beside = max(1, SMS // half)
        for first in range(0, KV_HEADS, beside):
            heads = range(first, min(KV_HEADS, first + beside))
            both += [down(kv, half - 1 - i) for i in range(half) for kv in heads]
            both += [up(kv, half + i) for i in range(half) for kv in heads]
        for name, items in (("down", today), ("both", both)):
            print(f"{tokens:6d} tokens, {name}: %.2f GB, %.1f %% hits" % ((x := run(items, a.megabytes))[0], 100 * x[1]))


if __name__ == "__main__":
    main()
