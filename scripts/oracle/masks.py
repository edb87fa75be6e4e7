"""Writes the fixtures of masks for `cprun attention`: attention in float64, by NumPy, with every mask as a
matrix that is filled pair by pair. One .safetensors file a case, inputs and results in float32.

    pip install numpy safetensors
    python scripts/oracle/masks.py internal/run/attend/testdata/masks
"""
import json
import os
import sys

import numpy as np
from safetensors.numpy import save_file

HEADS, KV_HEADS, DIM, DIM_V = 2, 1, 8, 8  # which every backend takes
SCALE = 0.3


def diagonal(i, j, m, n, causal="false", left=-1, right=-1):
    """Whether query i of m sees key j of n."""
    at = i if causal == "top_left" else i + n - m
    if causal != "false" and j > at:
        return False
    if left >= 0 and j < at - left:
        return False
    return right < 0 or j <= at + right


def documents(seq, seq_kv, docs, docs_kv, **mask):
    sees = np.zeros((seq, seq_kv), bool)
    q0 = k0 = 0
    for m, n in zip(docs, docs_kv, strict=True):
        for i in range(m):
            for j in range(n):
                sees[q0 + i, k0 + j] = diagonal(i, j, m, n, **mask)
        q0, k0 = q0 + m, k0 + n
    assert (q0, k0) == (seq, seq_kv)
    return sees


def slices(seq, seq_kv, list_of):
    sees = np.zeros((seq, seq_kv), bool)
    for q0, q1, k0, k1, kind in list_of:
        for i in range(q0, q1):
            for j in range(k0, k1):
                below = j - k1 <= i - q1  # not behind the diagonal that ends in the bottom right corner
                above = j - k0 >= i - q0  # not before the one that begins in the top left one
                if (below or kind in ("full", "inv_causal")) and (above or kind in ("full", "causal")):
                    sees[i, j] = True
    return sees


def attention(q, k, v, dout, sees):
    """Results of one sample; q is [seq, heads, dim]. A row that sees nothing is 0, and its lse -inf."""
    out, dq = np.zeros(q.shape[:2] + v.shape[2:]), np.zeros_like(q)
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    lse = np.full((q.shape[1], q.shape[0]), -np.inf)
    seen = sees.any(axis=1)
    for h in range(q.shape[1]):
        g = h // (q.shape[1] // k.shape[1])
        s = np.where(sees, SCALE * q[:, h] @ k[:, g].T, -np.inf)
        lse[h, seen] = np.logaddexp.reduce(s[seen], axis=1)
        p = np.zeros_like(s)
        p[seen] = np.exp(s[seen] - lse[h, seen][:, None])
        out[:, h] = p @ v[:, g]
        dp = dout[:, h] @ v[:, g].T
        ds = SCALE * p * (dp - (dout[:, h] * out[:, h]).sum(axis=1, keepdims=True))
        dq[:, h] = ds @ k[:, g]
        dk[:, g] += ds.T @ q[:, h]
        dv[:, g] += p.T @ dout[:, h]
    return out, lse, dq, dk, dv


def write(directory, name, seq, seq_kv, metadata, masks):
    rng = np.random.default_rng([ord(c) for c in name])
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    batch = len(masks)
    t = {"q": draw(batch, seq, HEADS, DIM), "k": draw(batch, seq_kv, KV_HEADS, DIM), "v": draw(batch, seq_kv, KV_HEADS, DIM_V),
         "dout": draw(batch, seq, HEADS, DIM_V)}
    wide = {name: x.astype(np.float64) for name, x in t.items()}
    results = [attention(*(wide[n][b] for n in ("q", "k", "v", "dout")), masks[b]) for b in range(batch)]
    for n, parts in zip(("out", "lse", "dq", "dk", "dv"), zip(*results)):
        t[n] = np.stack(parts).astype(np.float32)
    save_file(t, os.path.join(directory, name + ".safetensors"), {"scale": str(SCALE), "description": "scripts/oracle/masks.py", **metadata})


def main(directory):
    os.makedirs(directory, exist_ok=True)

    def diagonals(name, seq, seq_kv, docs=None, docs_kv=None, causal="false", left=-1, right=None):
        """docs and docs_kv are lists of lengths, for each sample one."""
        metadata = {"causal": causal}
        if left >= 0 or right is not None:
            metadata["window"] = str(left) if right is None else f"{left},{right}"
        if docs:
            metadata["docs"] = json.dumps(docs if len(docs) > 1 else docs[0])
        if docs_kv:
            metadata["docs_kv"] = json.dumps(docs_kv if len(docs_kv) > 1 else docs_kv[0])
        docs = docs or [[seq]]
        mask = dict(causal=causal, left=left, right=-1 if right is None else right)
        pairs = zip(docs, docs_kv or ([[seq_kv]] if docs == [[seq]] else docs), strict=True)
        write(directory, name, seq, seq_kv, metadata, [documents(seq, seq_kv, d, e, **mask) for d, e in pairs])

    def sliced(name, seq, seq_kv, list_of):
        write(directory, name, seq, seq_kv, {"slices": json.dumps(list_of)}, [slices(seq, seq_kv, list_of)] * 2)

    diagonals("window_of_two_sides", 61, 61, left=7, right=4)
    diagonals("window_of_two_sides_aligned", 37, 58, left=9, right=5)
    diagonals("window_ahead", 44, 39, left=-1, right=3)
    diagonals("window_of_one_side_not_causal", 37, 51, left=6)
    diagonals("top_left", 40, 57, causal="top_left", left=12)
    diagonals("top_left_of_fewer_keys", 53, 31, causal="top_left")
    diagonals("documents_keys", 41, 41, [[13, 0, 21, 7]], [[20, 5, 0, 16]], causal="true", left=6)
    diagonals("documents_keys_not_causal", 41, 50, [[13, 0, 28]], [[20, 5, 25]], left=4, right=2)
    diagonals("documents_keys_top_left", 41, 33, [[13, 21, 7]], [[4, 24, 5]], causal="top_left")
    diagonals("documents_empty", 41, 41, [[0, 17, 0, 0, 24, 0]], causal="true")
    diagonals("documents_of_samples", 37, 37, [[37], [0, 12, 25], [1, 1, 1, 34, 0]], causal="true")
    diagonals("documents_of_samples_keys", 29, 35, [[29, 0], [9, 20], [4, 25]], [[30, 5], [25, 10], [0, 35]], causal="true", left=8)
    # A prefix that all see, behind which text is causal.
    sliced("slices_prefix", 48, 48, [[0, 48, 0, 11, "full"], [11, 48, 11, 48, "causal"]])
    # Causal by blocks: each sees its own block and all before it.
    sliced("slices_blocks", 45, 45, [[i, i + 9, 0, i + 9, "full"] for i in range(0, 45, 9)])
    # Two documents of a shared prefix, with a window in one of them, by each kind of mask.
    sliced("slices_kinds", 50, 62, [[0, 20, 5, 25, "causal"], [20, 50, 0, 5, "full"], [20, 35, 25, 50, "bi_causal"],
                                    [35, 50, 40, 62, "inv_causal"], [0, 0, 3, 9, "full"]])
    # Slices that overlap, out of order: a pair counts once.
    sliced("slices_overlap", 43, 39, [[10, 40, 5, 30, "causal"], [0, 25, 0, 20, "inv_causal"], [10, 40, 5, 30, "full"],
                                      [20, 43, 15, 39, "bi_causal"], [20, 43, 15, 39, "causal"], [3, 30, 8, 39, "bi_causal"]])


main(sys.argv[1])
