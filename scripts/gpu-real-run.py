"""Checks and draws the two halves of a run that scripts/gpu-real-run has left in a folder.

    python3 scripts/gpu-real-run.py DIR

reads DIR/first.jsonl, which ends where the worker was killed, and DIR/metrics.jsonl, which the resumed run
completed; writes DIR/loss.svg. The status is 1 where a check fails.
"""
import json
import re
import sys

TOLERANCE = 2e-2  # nats: bfloat16, and sums over atomics, give other last digits each time

folder = sys.argv[1]
first, whole = ([json.loads(line) for line in open(f"{folder}/{name}.jsonl")] for name in ("first", "metrics"))
last = int(re.search(r"^  steps: (\d+)$", open(f"{folder}/config.yaml").read(), re.M)[1])
resumed = re.search(r"going on from step (\d+)", next((line for line in open(f"{folder}/second.log") if "going on from" in line), ""))
failed = False


def verdict(ok, text):
    global failed
    failed |= not ok
    print("PASS " if ok else "FAIL ", text)


found = [m["step"] for m in whole]
verdict(found == list(range(1, last + 1)), f"metrics.jsonl has the steps {found[0]} to {found[-1]} of {last}, {len(found)} lines")
verdict(bool(resumed), f"resumed from step {resumed[1]}" if resumed else "nothing in the log about where it went on")
start = int(resumed[1]) if resumed else last
again = [(a["loss"], b["loss"]) for a, b in zip(first, whole) if a["step"] > start]
apart = [abs(a - b) for a, b in again]
worst = next((x for x in apart if not x <= TOLERANCE), max(apart, default=float("nan")))
verdict(worst <= TOLERANCE, f"{len(again)} steps were done twice, their losses differ by {worst:.2g} at most, of {TOLERANCE:g}")
same = all(a["loss"] == b["loss"] for a, b in zip(first, whole) if a["step"] <= start)
verdict(same, f"the {start} steps before were not touched")
val = [(m["step"], m["val_loss"]) for m in whole if m.get("val_loss") is not None]
verdict(len(val) > 1 and val[-1][1] < val[0][1], "validation loss: " + ", ".join(f"{y:.3f} at {x}" for x, y in val))
verdict(whole[-1]["loss"] < whole[0]["loss"], f"training loss {whole[0]['loss']:.3f} to {whole[-1]['loss']:.3f}")
rate = sorted(m["tokens_per_second"] for m in whole)[len(whole) // 2]
print(f"      median {rate:,.0f} tokens/s, {sorted(m['step_seconds'] for m in whole)[len(whole) // 2] * 1e3:.1f} ms a step")

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 800, 420, 60, 20, 30, 50
top = max(m["loss"] for m in whole) * 1.03


def at(step, loss):
    return f"{LEFT + (WIDTH - LEFT - RIGHT) * step / last:.1f},{HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * loss / top:.1f}"


def line(points, colour, more=""):
    return f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" {more} points="{" ".join(at(*p) for p in points)}"/>'


def text(where, what, more=""):
    x, y = where.split(",")
    return f'<text x="{x}" y="{y}" {more}>{what}</text>'


svg = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
       '<rect width="100%" height="100%" fill="white"/>']
for y in range(int(top) + 1):
    svg += [line([(0, y), (last, y)], "#dddddd"), text(at(-last / 40, y), y, 'text-anchor="end"')]
for x in range(0, last + 1, max(last // 8, 1)):
    svg.append(text(at(x, -top / 18), x, 'text-anchor="middle"'))
svg.append(text(at(last / 2, -top / 8), "step", 'text-anchor="middle"'))
svg.append(text(f"{LEFT},18", "loss, nats a byte: blue training, orange before the kill, red validation"))
svg += [line([(start, 0), (start, top)], "#999999", 'stroke-dasharray="4 4"'), text(at(start, top * 0.97), f" resumed from {start}")]
killed = first[-1]["step"]
svg += [line([(killed, 0), (killed, top)], "#999999", 'stroke-dasharray="4 4"'), text(at(killed, top * 0.91), f" killed after {killed}")]
svg.append(line([(m["step"], m["loss"]) for m in whole], "#1f77b4"))
svg.append(line([(m["step"], m["loss"]) for m in first if m["step"] > start], "#ff7f0e", 'stroke-dasharray="3 2"'))
svg.append(line(val, "#d62728"))
svg.append("</svg>")
open(f"{folder}/loss.svg", "w").write("\n".join(svg) + "\n")
sys.exit(failed)
