"""Measures the regret of auto: how much slower its strategy of attention is than the best fixed one.

    scripts/regret.py                              # all of it on this machine's CPU, into regret-cpu.json
    scripts/regret.py --table docs/benchmarks/predictions.md      # also writes the section of the page

A cell of the grid is a shape of heads, a length, a mask and a number of ranks. `cprun bench attention --layout auto
--algorithm auto` reports auto's choice and the predicted times of all strategies (ways). All ways then run in turns, forward
and backward, ROUNDS times; the time of a way is the median of its rounds. Smaller differences than the spread of the rounds
mean nothing. If this binary has no cost table of the machine, `cprun bench calibrate` makes one first.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile

# Heads of q and of k and v, and their dim: of models.
SHAPES = {
    "opticks": (8, 2, 32),
    "tiny": (4, 4, 32),
    "llama-3.2-1b": (32, 8, 64),
    "llama-3.2-3b": (24, 8, 128),
    "qwen3-8b": (32, 8, 128),
    "llama-2-7b": (32, 32, 128),
}
# Grids: shapes, tokens a rank, ranks, windows as a share of a sequence, documents as shares of one.
LONG_TAIL = [0.42, 0.2, 0.11, 0.08, 0.05, 0.05, 0.03, 0.03, 0.02, 0.01]
GRIDS = {
    "cpu": {"shapes": ["opticks", "tiny"], "tokens": [256, 512], "ranks": [1, 2, 4]},
    "gpu": {"shapes": ["llama-3.2-3b", "qwen3-8b", "llama-2-7b"], "tokens": [8192, 65536], "ranks": [0]},
}
MASKS = ["causal", "window", "documents"]
# Processes that measure a cell on a CPU one after another, among which its rounds are shared.
TURNS = 5
ROWS = 4  # of a table: the cells with the largest regret, if it is not 0; the JSON has all
BEGIN, END = "<!-- {} -->", "<!-- end of {} -->"


class Cell:
    def __init__(self, shape, tokens, ranks, mask):
        self.shape, self.tokens, self.ranks, self.mask = shape, tokens, ranks, mask

    @property
    def seq(self):
        return self.tokens * self.ranks

    def name(self):
        heads, kv, dim = SHAPES[self.shape]
        return f"{self.shape} {heads}:{kv}x{dim}, {self.seq} tokens, {self.ranks} ranks, {self.mask}"

    def documents(self):
        """Lengths that sum to the sequence."""
        lengths = [max(1, int(x * self.seq)) for x in LONG_TAIL]
        lengths[0] += self.seq - sum(lengths)
        return lengths

    def flags(self, folder, packs=0):
        """Of the benchmark; with packs, of so many packs of one document that is the sequence."""
        heads, kv, dim = SHAPES[self.shape]
        flags = ["--nproc", str(self.ranks), "--heads", str(heads), "--kv-heads", str(kv), "--head-dim", str(dim)]
        if self.mask == "window":
            flags += ["--window", str(self.seq // 8)]
        if self.mask == "documents" or packs:
            path = os.path.join(folder, "documents.json")
            with open(path, "w") as f:
                json.dump([self.documents() if self.mask == "documents" else [self.seq]] * max(packs, 1), f)
            return flags + ["--documents", path, "--packs", str(max(packs, 1))]
        return flags + ["--seq", str(self.seq)]


def bench(args, flags, folder):
    """The report of one `cprun bench attention`."""
    path = os.path.join(folder, "report.json")
    run = subprocess.run([args.cprun, "bench", "attention", "--quiet", "--device", "cpu" if args.grid == "cpu" else "cuda", "--quick", "--json", path, *flags],
                         stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=args.limit)
    if run.returncode != 0:
        raise RuntimeError((run.stderr.strip().splitlines() or ["no message"])[-1])
    with open(path) as f:
        return json.load(f)


def way_of(timed):
    return (timed["layout"], timed["algorithm"], timed.get("inner", 0), timed.get("gather_heads", 0), timed.get("gather", ""), timed["backend"])


def text(way):
    layout, algorithm, inner, heads, gather, backend = way
    extra = f" (inner {inner})" if inner else f" (gather_heads {heads})" if heads else ""
    if algorithm == "allgather":
        extra += {"before": " (before)", "auto": " (before, forward)"}.get(gather, "")
    return f"{algorithm}{extra}, {layout}, {backend}"


def ways_flags(cell, way):
    layout, algorithm, inner, heads, gather, backend = way
    flags = ["--layout", layout, "--algorithm", algorithm, "--backend", backend]
    if algorithm == "allgather" or cell.mask == "window":
        flags += ["--gather", gather or "beside"]
    return flags + (["--ulysses-degree", str(inner)] if inner else []) + (["--gather-heads", str(heads)] if heads else [])


def seconds(report):
    attention = report["attention"]
    return (attention.get("rows") or attention.get("packed"))[0]["forward_backward"]["seconds"]


def selected(predicted, most):
    """The ways that are measured: the best of each layout and algorithm, and those with the least predicted time."""
    best, rest = {}, []
    for timed in predicted:  # in order: auto's own first
        key = (timed["layout"], timed["algorithm"], timed.get("gather", ""), timed["backend"])
        if key in best:
            rest.append(timed)
        else:
            best[key] = timed
    return (list(best.values()) + rest)[:most]


def rotated(names, n):
    """The names, beginning with the n-th."""
    n %= len(names)
    return names[n:] + names[:n]


def in_turns(args, cell, ways, folder):
    """Measures ways in turns, pack by pack, in one process: on a CPU a start takes longer than a measurement. TURNS processes run
    one after another, since memory placement differs between processes; each gives a way one round, the median of its packs."""
    *_, gather, backend = next(iter(ways))
    if not any(w[0] == "striped" for w in ways):  # which auto leaves out
        for algorithm in ("ring", "allgather"):
            ways[("striped", algorithm, 0, 0, gather, backend)] = {"predicted": None, "rounds": []}
    first = {"allgather": 0}  # others have the first of the list, and it is theirs
    gathers = list(dict.fromkeys(w[4] or "beside" for w in sorted(ways, key=lambda w: first.get(w[1], -1))))
    inner = max(w[2] for w in ways)
    flags = cell.flags(folder, packs=args.rounds // TURNS) + ["--gather", ",".join(gathers)] + (["--ulysses-degree", str(inner)] if inner else [])
    layouts, algorithms = (list(dict.fromkeys(w[i] for w in ways)) for i in (0, 1))
    for turn in range(TURNS):  # each begins with another way, so that auto's is not always first
        order = ["--layout", ",".join(rotated(layouts, turn)), "--algorithm", ",".join(rotated(algorithms, turn))]
        report = bench(args, flags + order + ["--iters", str(args.iters), "--warmup", "1"], folder)
        for row in report["attention"]["packed"]:
            for way, found in ways.items():
                if way[:2] == (row["layout"], row["algorithm"]) and (way[1] != "allgather" or (way[4] or "beside") == row["gather"]):
                    found["rounds"].append(row["forward_backward"]["seconds"])


def calibrate(args):
    """Measures the cost table of this machine, which cprun keeps where the benchmark looks."""
    print("regret: no cost table of this machine yet; cprun bench calibrate measures it", file=sys.stderr)
    device = "cpu" if args.grid == "cpu" else "cuda"
    run = subprocess.run([args.cprun, "bench", "calibrate", "--quiet", "--device", device], stdout=subprocess.DEVNULL, timeout=10 * args.limit)
    if run.returncode != 0:
        sys.exit("regret: cprun bench calibrate failed")


def predictions(args, flags, folder):
    """The report of auto, and the ways that it compared, the chosen one first; none: this machine has no costs."""
    report = bench(args, flags + ["--layout", "auto", "--algorithm", "auto", "--iters", "1", "--warmup", "0"], folder)
    return report, report["attention"]["spec"].get("predicted")


def measure(args, cell, folder):
    flags = cell.flags(folder)
    report, predicted = predictions(args, flags, folder)
    if not predicted:
        calibrate(args)
        report, predicted = predictions(args, flags, folder)
    if not predicted:
        sys.exit("regret: no costs of this machine are known, although cprun bench calibrate has measured them")
    ways = {way_of(t): {"predicted": t["seconds"], "rounds": []} for t in selected(predicted, args.ways)}
    auto = way_of(predicted[0])
    load = os.getloadavg()[0]
    if args.grid == "cpu":
        in_turns(args, cell, ways, folder)
    elif cell.ranks > 1:
        for algorithm in ("ring", "allgather"):
            ways.setdefault(("striped", algorithm, 0, 0, auto[4], auto[5]), {"predicted": None, "rounds": []})
    pace = ["--seconds", str(args.seconds)] if args.seconds else ["--iters", str(args.iters), "--warmup", "1"]
    for turn in range(0 if args.grid == "cpu" else args.rounds):
        for way in rotated(list(ways), turn):
            try:
                ways[way]["rounds"].append(seconds(bench(args, flags + ways_flags(cell, way) + pace, folder)))
            except (RuntimeError, subprocess.TimeoutExpired) as fault:
                print(f"  {text(way)}: {fault}", file=sys.stderr)
    return {"cell": cell.name(), "auto": text(auto), "load": load, "turns": args.rounds, "machine": report["machine"], "version": report["version"], "date": report["date"],
            "ways": {text(w): f for w, f in ways.items() if f["rounds"]}}


def medians(cell):
    return {w: statistics.median(f["rounds"]) for w, f in cell["ways"].items()}


def apart(cell):
    """The regret with the best way of one half of the rounds, compared in the other half, and vice versa. The least of many medians
    is biased low; this is not. None if there are too few rounds."""
    rounds = {w: f["rounds"] for w, f in cell["ways"].items()}
    own, n = rounds.get(cell["auto"]), min(len(r) for r in rounds.values())
    if not own or n < 4:
        return None
    halves, out = (range(0, n, 2), range(1, n, 2)), []
    for find, compare in (halves, halves[::-1]):
        best = rounds[min(rounds, key=lambda w: statistics.median(rounds[w][i] for i in find))]
        out.append(statistics.median(own[i] / best[i] for i in compare) - 1)
    return sum(out) / 2


def twins(cell, ms):
    """How far apart a ring and an all-gather of one layout were measured that are predicted alike, since they are one schedule."""
    out = []
    for way, found in cell["ways"].items():
        other = way.replace("ring, ", "allgather, ", 1)
        if way.startswith("ring, ") and other in ms and found["predicted"] and found["predicted"] == cell["ways"][other]["predicted"]:
            out.append(max(ms[way], ms[other]) / min(ms[way], ms[other]) - 1)
    return out


def scaling(cells):
    """How far the predictions of a ring in a zigzag are off."""
    off = []
    for c in cells:
        for way, found in c["ways"].items():
            if c["cell"].endswith("causal") and way.startswith("ring, zigzag"):
                off.append(found["predicted"] / statistics.median(found["rounds"]) - 1)
    if not off:
        return ""
    return (f"{len(off)} causal passes of a zigzag ring: predicted {100 * min(off):+.0f} to {100 * max(off):+.0f} % off, {100 * statistics.median(map(abs, off)):.0f} % in the median.\n")


def table(cells, command):
    """The section of the page: the cells with the largest regret, and a summary."""
    cells = [c for c in cells if ", 1 ranks, " not in c["cell"] or len({w.split(", ")[-1] for w in c["ways"]}) > 1]
    if not cells:
        return ""
    first = cells[0]
    loads = [c["load"] for c in cells]
    rounds = first["turns"]
    lines = [
        f'`{command}` on {first["machine"]["device"]}, {first["machine"]["cores"]} cores, {first["version"]}, {first["date"][:10]}: medians of {rounds} rounds in turns, '
        f"forward and backward, ms. Load: {min(loads):.1f} to {max(loads):.1f}.", ""]
    regrets, spreads, worsts, errors, noise, rows = [], [], [], [], [], []
    for c in cells:
        ms = medians(c)
        if c["auto"] not in ms:
            rows.append((math.inf, f'| {c["cell"]} | {c["auto"]} | | failed | | | |'))
            continue
        auto, best, worst = ms[c["auto"]], min(ms, key=ms.get), max(ms, key=ms.get)
        noise += twins(c, ms)
        regret, own = auto / ms[best] - 1, c["ways"][c["auto"]]["rounds"]
        regrets.append(regret)
        worsts.append(ms[worst] / ms[best] - 1)
        if len(own) > 1:
            spreads.append((max(own) - min(own)) / auto)
        predicted = c["ways"][c["auto"]]["predicted"]
        errors.append(abs(predicted / auto - 1))
        rows.append((regret, f'| {c["cell"]} | {c["auto"]} | {1e3 * predicted:.3g} | {1e3 * auto:.3g} | {best} | {1e3 * ms[best]:.3g} | {100 * regret:.1f} % |'))
    rows.sort(reverse=True)
    shown = sum(regret >= 0.0005 for regret, _ in rows[:ROWS])
    if shown:
        lines += ["| cell | auto | predicted | measured | best fixed | ms | regret |", "|---|---|--:|--:|---|--:|--:|", *(row for _, row in rows[:shown]), ""]
    if len(rows) > shown:
        lines += [f"{'The other ' if shown else ''}{len(rows) - shown} cells have a regret of at most {100 * rows[shown][0]:.1f} %.", ""]
    if regrets:
        lines += [f"Regret of auto: {100 * statistics.mean(regrets):.1f} % in the mean, {100 * statistics.median(regrets):.1f} % in the median, {100 * max(regrets):.1f} % at most. The worst "
                  f"way takes {100 * statistics.mean(worsts):.0f} % more than the best in the mean. Predictions are {100 * statistics.median(errors):.0f} % off in the median."]
        fair = [x for x in map(apart, cells) if x is not None]
        if fair:
            lines[-1] += (f" With the best way found in one half of the rounds and compared in the other: {100 * statistics.mean(fair):.1f} % in the mean, "
                          f"{100 * statistics.median(fair):.1f} % in the median, {100 * max(fair):.1f} % at most.")
        if noise:
            lines[-1] += f" Ways with equal predictions were measured {100 * statistics.median(noise):.0f} % apart in the median."
        if spreads:
            lines[-1] += f" The rounds of one way differ by {100 * statistics.median(spreads):.0f} % in the median."
    return "\n".join(lines) + "\n"


def into(path, name, section):
    with open(path) as f:
        page = f.read()
    begin, end = BEGIN.format(name), END.format(name)
    if begin not in page or end not in page:
        sys.exit(f"regret: {path} has no {begin} and {end}")
    head, tail = page.split(begin)[0], page.split(end)[1]
    with open(path, "w") as f:
        f.write(f"{head}{begin}\n{section}{end}{tail}")


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--cprun", default="bin/cprun")
    p.add_argument("--grid", choices=GRIDS, default="cpu")
    p.add_argument("--ranks", default="", help="in place of the grid's: 2,4")
    p.add_argument("--out", default="", help="JSON of all that was measured, regret-GRID.json unless named; cells that it has are not measured again")
    p.add_argument("--table", default="", help="the page whose section is written")
    p.add_argument("--rounds", type=int, default=3, help="measurements of each way; on a CPU a multiple of %d" % TURNS)
    p.add_argument("--iters", type=int, default=3)
    p.add_argument("--seconds", type=float, default=0, help="on a GPU, for so long in place of --iters: a card is warm in a step")
    p.add_argument("--ways", type=int, default=12, help="ways of a cell at most")
    p.add_argument("--limit", type=float, default=120, help="seconds of one measurement")
    p.add_argument("--cells", default="", help="only cells whose name has this")
    args = p.parse_args()
    args.out = args.out or f"regret-{args.grid}.json"
    grid = GRIDS[args.grid]
    ranks = [int(n) for n in args.ranks.split(",")] if args.ranks else grid["ranks"]
    done = []
    if os.path.exists(args.out):
        with open(args.out) as f:
            done = json.load(f)
    for shape in grid["shapes"]:
        for tokens in grid["tokens"]:
            for n in ranks:
                for mask in MASKS:
                    cell = Cell(shape, tokens, n, mask)
                    if n == 1 and mask != "causal" and args.grid == "cpu":  # for the table of ranks; there is nothing to choose
                        continue
                    if any(c["cell"] == cell.name() for c in done) or args.cells not in cell.name():
                        continue
                    with tempfile.TemporaryDirectory() as folder:
                        try:
                            found = measure(args, cell, folder)
                        except (RuntimeError, subprocess.TimeoutExpired) as fault:
                            print(f"{cell.name()}: {fault}", file=sys.stderr)
                            continue
                    done.append(found)
                    ms = medians(found)
                    print(f'{found["cell"]}: auto {found["auto"]} {1e3 * ms.get(found["auto"], float("nan")):.3g} ms, best {min(ms, key=ms.get)} {1e3 * min(ms.values()):.3g} ms', flush=True)
                    with open(args.out, "w") as f:
                        json.dump(done, f, indent=1)
    if not done:
        sys.exit("regret: nothing was measured")
    section = table(done, f"scripts/regret.py --grid {args.grid} --rounds {args.rounds} " + (f"--ranks {args.ranks} " if args.ranks else "") + (f"--seconds {args.seconds:g}" if args.seconds else f"--iters {args.iters}"))
    if args.table and args.ranks == "1":
        into(args.table, f"regret {args.grid}, one rank", section)
    elif args.table:
        into(args.table, f"regret {args.grid}", section)
        into(args.table, f"ranks {args.grid}", scaling(done))
    else:
        print(section)
        print(scaling(done))


if __name__ == "__main__":
    main()
