"""Writes cases of `cprun attention` whose scores are more than scale, soft cap and mask, with results.

Usage: python scripts/oracle/scores.py internal/run/attend/testdata
Needs numpy and safetensors (pip install numpy safetensors).

Everything is computed in float64 over the whole matrix of scores, as the formulas stand: no blocks, no
ranks, no LSE that is merged. Each gradient is held against difference quotients before it is written.
The files hold float32, and the numbers were rounded to it before anything was computed.
"""

import json
import sys
import zlib

import numpy as np
from safetensors.numpy import save_file


def visible(c):
    """The pairs that see each other, and how far key j is from query i, both aligned bottom right."""
    n, m = c["seq"], c.get("seq_kv", c["seq"])
    i, j = np.arange(n)[:, None] + m - n, np.arange(m)[None, :]
    ok = np.ones((n, m), bool)
    if c.get("causal"):
        ok &= j <= i
    if "window" in c:
        ok &= j >= i - c["window"]
    if "docs" in c:
        doc = np.repeat(np.arange(len(c["docs"])), c["docs"])
        ok &= doc[:, None] == doc[None, :]
    return ok, np.abs(i - j)


def forward(c, x):
    """out, lse, largest logits, probabilities and the slope of the soft cap."""
    heads, group = c["heads"], c["heads"] // c["kv_heads"]
    ok, far = visible(c)
    k, v = np.repeat(x["k"], group, 2), np.repeat(x["v"], group, 2)
    s = np.einsum("bihd,bjhd->bhij", x["q"], k) * c["scale"]
    slope = np.ones_like(s)
    if c.get("softcap"):
        t = np.tanh(s / c["softcap"])
        s, slope = c["softcap"] * t, 1 - t * t
    if "alibi_slopes" in x:
        s = s - x["alibi_slopes"][None, :, None, None] * far
    if "bias" in x:
        s = s + x["bias"]
    s = np.where(ok, s, -np.inf)
    largest = s.max(-1)
    total = np.exp(s).sum(-1)
    sink = x.get("sink", np.zeros(heads) if c.get("sink") == "off_by_one" else np.full(heads, -np.inf))
    with np.errstate(divide="ignore"):
        lse = np.log(total + np.exp(sink)[None, :, None])
    p = np.where(ok, np.exp(s - np.where(np.isinf(lse), 0, lse)[..., None]), 0)
    return np.einsum("bhij,bjhd->bihd", p, v), lse, largest.max(-1), p, slope, sink


def backward(c, x):
    heads, group = c["heads"], c["heads"] // c["kv_heads"]
    out, lse, largest, p, slope, sink = forward(c, x)
    k, v = np.repeat(x["k"], group, 2), np.repeat(x["v"], group, 2)
    delta = np.einsum("bihd,bihd->bhi", x["dout"], out)
    ds = p * (np.einsum("bihd,bjhd->bhij", x["dout"], v) - delta[..., None])
    dx = ds * slope * c["scale"]
    fold = lambda g: g.reshape(g.shape[0], g.shape[1], c["kv_heads"], group, -1).sum(3)
    y = {
        "out": out, "lse": lse,
        "dq": np.einsum("bhij,bjhd->bihd", dx, k),
        "dk": fold(np.einsum("bhij,bihd->bjhd", dx, x["q"])),
        "dv": fold(np.einsum("bhij,bihd->bjhd", p, x["dout"])),
    }
    if "sink" in x:
        y["dsink"] = -(np.exp(sink[None, :, None] - lse) * delta).sum((0, 2))
    if "bias" in x:
        g = ds
        for axis in (0, 1):
            if x["bias"].shape[axis] == 1:
                g = g.sum(axis, keepdims=True)
        y["dbias"] = g
    if c.get("max_logit"):
        y["max_logit"] = largest
    return y


def check(c, x, y, rng):
    """Each gradient against central differences at some places."""
    loss = lambda: (forward(c, x)[0] * x["dout"]).sum()
    for name, grad in (("q", "dq"), ("k", "dk"), ("v", "dv"), ("sink", "dsink"), ("bias", "dbias")):
        if name not in x:
            continue
        for at in rng.integers(0, x[name].size, 12):
            h, flat = 1e-5, x[name].reshape(-1)
            was = flat[at]
            flat[at] = was + h
            up = loss()
            flat[at] = was - h
            down = loss()
            flat[at] = was
            got, want = y[grad].reshape(-1)[at], (up - down) / (2 * h)
            assert abs(got - want) < 1e-7 * (1 + abs(want)), (c["name"], name, at, got, want)


BASE = dict(batch=2, seq=37, heads=4, kv_heads=2, dim=8, dim_v=6, causal=True)
CASES = [
    dict(BASE, name="sink"),
    dict(BASE, name="sink_window_docs", window=5, docs=[3, 17, 1, 16], softcap=3.0),
    dict(BASE, name="sink_cross", seq_kv=21),  # the first rows see the sink alone
    dict(BASE, name="sink_wide", batch=1, seq=50, dim=64, dim_v=64, window=15, docs=[11, 30, 9], scale=0.125),
    dict(BASE, name="off_by_one", causal=False, sink="off_by_one"),
    dict(BASE, name="off_by_one_window", window=9, sink="off_by_one", kv_heads=4),
    dict(BASE, name="max_logit", max_logit=True, softcap=4.0),
    dict(BASE, name="max_logit_docs", max_logit=True, docs=[1, 30, 6], window=4, causal=False),
    dict(BASE, name="alibi", alibi=True),
    dict(BASE, name="alibi_docs", alibi=True, causal=False, docs=[9, 1, 20, 7], softcap=2.5),
    dict(BASE, name="alibi_cross", alibi=True, seq_kv=50, window=20),
    dict(BASE, name="bias", bias=(2, 4, 37, 37)),
    dict(BASE, name="bias_shared", bias=(1, 1, 37, 37), causal=False, window=8, softcap=3.0),
    dict(BASE, name="bias_heads_cross", bias=(1, 4, 37, 29), seq_kv=29, causal=False),
    dict(BASE, name="bias_batch_docs", bias=(2, 1, 37, 37), docs=[12, 25]),
    dict(BASE, name="all_cross", learnable=True, alibi=True, bias=(1, 4, 37, 45), seq_kv=45, max_logit=True, softcap=5.0, window=30),
    dict(BASE, name="all", learnable=True, alibi=True, bias=(2, 1, 37, 37), docs=[5, 20, 12], max_logit=True, softcap=5.0),
]


def main(to):
    for c in CASES:
        rng = np.random.default_rng(zlib.crc32(c["name"].encode()))
        c = dict(c, scale=c.get("scale", 0.25))
        draw = lambda *shape: rng.standard_normal(shape).astype(np.float32).astype(np.float64)
        b, s, h, g, d, e = (c[k] for k in ("batch", "seq", "heads", "kv_heads", "dim", "dim_v"))
        m = c.get("seq_kv", s)
        x = {"q": 2 * draw(b, s, h, d), "k": 2 * draw(b, m, g, d), "v": draw(b, m, g, e), "dout": draw(b, s, h, e)}
        if c["name"].startswith("sink") or c.get("learnable"):
            x["sink"] = draw(h)
        if c.get("alibi"):
            x["alibi_slopes"] = np.float32(2.0 ** -np.arange(1, h + 1)).astype(np.float64)
        if "bias" in c:
            x["bias"] = draw(*c["bias"])
        y = backward(c, x)
        check(c, x, y, rng)
        meta = {"causal": "true" if c.get("causal") else "false", "scale": repr(c["scale"])}
        for key in ("window", "softcap", "sink"):
            if key in c:
                meta[key] = str(c[key])
        if "docs" in c:
            meta["docs"] = json.dumps(c["docs"])
        if c.get("max_logit"):
            meta["max_logit"] = "true"
        tensors = {k: np.ascontiguousarray(v.astype(np.float32)) for k, v in {**x, **y}.items()}
        save_file(tensors, f"{to}/{c['name']}.safetensors", metadata=meta)
        print(c["name"], {k: v.shape for k, v in tensors.items()})


main(sys.argv[1])
