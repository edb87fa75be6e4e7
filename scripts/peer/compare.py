"""Puts what cprun and PyTorch measured in one run beside each other.

    python3 scripts/peer/compare.py DIR        with the JSON files that scripts/gpu-figures leaves there
"""
import json
import os
import sys


def load(name):
    try:
        with open(os.path.join(sys.argv[1], name + ".json")) as f:
            return json.load(f)
    except (OSError, ValueError):
        return None


def ratio(ours, theirs):
    return f"{ours / theirs:.3f}" if ours and theirs else "-"


def table(rows):
    if len(rows) < 2:
        return
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    for r in rows:
        print("  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths))))


def number(x):
    return f"{x:.1f}" if x else "-"


ours, theirs = load("attention"), load("peer-attention")
rows = [["attention, TFLOP/s per GPU", "cprun", "torch", "best rotation", "ratio"]]
for row in (ours or {}).get("attention", {}).get("rows", []):
    same = [p for p in (theirs or {}).get("rows", []) if p["seq"] == row["seq"] and p["ranks"] == row["ranks"] and "forward" in p]
    for what in ("forward", "forward_backward"):
        best = max(same, key=lambda p: p[what]["tflops_per_device"], default=None)
        torch = best[what]["tflops_per_device"] if best else 0
        mine = row[what]["tflops_per_device"]
        rows.append([f"S={row['seq'] >> 10}K {row['algorithm']} {what}", number(mine), number(torch), best["rotate"] if best else "", ratio(mine, torch)])
table(rows)

rows = [["documents, TFLOP/s per GPU", "cprun", "torch", "of", "ratio"]]
theirs = (load("peer-documents") or {}).get("packed", [])
for size in ("8k", "32k"):
    for row in ((load("documents-" + size) or {}).get("attention") or {}).get("packed", []):
        same = [p for p in theirs if (p["tokens"], p["ranks"], p["packs"]) == (row["tokens"], row["ranks"], row["packs"])]
        for what in ("forward", "backward", "forward_backward"):
            best = max(same, key=lambda p: p[what]["tflops_per_device"], default=None)
            torch = best[what]["tflops_per_device"] if best else 0
            mine = row[what]["tflops_per_device"]
            of = f"{best['algorithm']} {best['backend']}" if best else ""
            rows.append([f"S={row['tokens'] >> 10}K {row['layout']} {row['algorithm']} {what}", number(mine), number(torch), of, ratio(mine, torch)])
table(rows)

rows = [["training step, per GPU", "cprun", "torch", "ratio", "first step s", "GiB", "planned", "torch GiB"]]
for size in ("32k", "128k"):
    ours, theirs = (load("train-" + size) or {}).get("train"), load("peer-train-" + size)
    if not ours:
        continue
    theirs = theirs or {}
    for what, label in (("tflops_per_device", "TFLOP/s"), ("tokens_per_second_per_device", "tokens/s")):
        rows.append([f"S={size.upper()} {label}", number(ours[what]), number(theirs.get(what)), ratio(ours[what], theirs.get(what)),
                     number(ours["first_step_seconds"]), *(number(b / 2**30) for b in (ours["memory_bytes"], ours["planned_memory_bytes"], theirs.get("memory_bytes", 0)))])
table(rows)
