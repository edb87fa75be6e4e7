"""Packs of documents as MagiAttention's benchmark draws them, by numpy.

    python scripts/oracle/packs.py TOKENS [PACKS]

prints the first packs of TOKENS tokens as JSON, a list of lengths each: what MagiPacks in internal/run/bench draws
without numpy. It follows DatasetSampler of SandAI-org/MagiAttention, exps/dist_attn/benchmark/utils.py.
"""
import json
import sys

import numpy as np

BINS = [(0, 10, 30254), (11, 50, 391188), (51, 100, 699596), (101, 200, 1377757), (201, 500, 3794735), (501, 1024, 3316785),
        (1025, 2048, 2106566), (2049, 4096, 988525), (4097, 8192, 410002), (8193, 16384, 173574), (16385, 32768, 115007),
        (32769, 65536, 18428), (65537, 131072, 22513), (131073, 196608, 18284)]


def packs(tokens, count):
    rng = np.random.default_rng(42)
    lengths = np.array([(a + b) // 2 for a, b, _ in BINS], dtype=np.int32)
    numbers = np.array([n for _, _, n in BINS], dtype=np.int32)
    piece = tokens * 0.25
    pieces = np.repeat(piece, int((lengths // piece * numbers).sum())).astype(np.int32)
    tails = lengths % piece
    tails = np.repeat(tails[tails > 0], numbers[tails > 0]).astype(np.int32)
    samples = np.concatenate([pieces, tails])
    rng.shuffle(samples)
    out, pack, left = [], [], tokens
    for n in samples.tolist():
        while n > 0:
            part = min(n, left)
            pack.append(part)
            n, left = n - part, left - part
            if left == 0:
                out.append(pack)
                pack, left = [], tokens
    rng.shuffle(out)
    return out[:count]


if __name__ == "__main__":
    print(json.dumps(packs(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20)))
