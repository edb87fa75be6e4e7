#!/usr/bin/env python3
"""Compares the expansion of host lists with that of Slurm.

    go test -c -o place.test ./internal/launch/place && python3 scripts/oracle/hostlist.py ./place.test [COUNT [SEED]]

Well-formed lists must expand alike. Damaged ones may be refused by either side; where both expand them, they
must agree. Slurm 22.05 expands two kinds that are refused here, so that no list of hosts that nobody meant
is used: a bracket that does not close, and an empty entry or a sign in brackets.
"""
import os
import random
import subprocess
import sys
import tempfile


def number(r, width):
    return str(r.randrange(10 ** r.randint(1, width)))


def entry(r):
    if r.random() < 0.5:
        return number(r, 5)
    first = r.randrange(3000)
    digits = str(first).zfill(r.choice([0, 0, 2, 3, 4, 6]))
    last = str(first + r.randrange(20))
    return digits + "-" + (last.zfill(len(digits)) if r.random() < 0.8 else last)


def host(r):
    name = r.choice(["n", "node", "gpu-a", "rack1-n", "x0y", "c", "h.example-"])
    for i in range(r.choice([0, 1, 1, 1, 2, 3])):
        if i:
            name += r.choice(["", "-", "b", "n0"])
        name += "[" + ",".join(entry(r) for _ in range(r.randint(1, 3))) + "]"
    return name


def well_formed(r):
    return r.choice([",", ",", ",", " ", ",,"]).join(host(r) for _ in range(r.randint(1, 4)))


def damaged(r):
    text = list(well_formed(r))
    for _ in range(r.randint(1, 2)):
        at = r.randrange(len(text))
        text[at] = r.choice(["", "[", "]", ",", "-", "0", "z", " "])
    return "".join(text)


def slurm(text):
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", text], capture_output=True, text=True, timeout=1)
    except subprocess.TimeoutExpired:  # some damaged lists keep Slurm busy for minutes
        return "error"
    if done.returncode or "nvalid" in done.stderr or "error" in done.stderr:
        return "error"
    return " ".join(done.stdout.split())


def ours(program, lists):
    done = subprocess.run([program, "-as", "hosts"], input="\n".join(lists) + "\n", capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[: len(lists)]


def configure(directory):
    """scontrol wants a configuration, though it asks nobody."""
    conf = os.path.join(directory, "slurm.conf")
    with open(conf, "w") as f:
        f.write("ClusterName=none\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=all Nodes=ALL\n")
    os.environ["SLURM_CONF"] = conf
    if slurm("n[1-2]") != "n1 n2":
        sys.exit("scontrol show hostnames does not run here: install slurm-client")


def main():
    program, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3000
    r = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    cases = [(well_formed(r), True) for _ in range(count)] + [(damaged(r), False) for _ in range(count // 3)]
    cases = [(text, good) for text, good in cases if text.strip(" ,")]
    same = refused = 0
    wrong = []
    directory = tempfile.TemporaryDirectory()
    configure(directory.name)
    for (text, good), here in zip(cases, ours(program, [text for text, _ in cases])):
        there = slurm(text)
        if here == there:
            same += 1
        elif not good and "error" in (here, there):
            refused += 1
        else:
            wrong.append(f"{text}\n  here  {here[:200]}\n  Slurm {there[:200]}")
    print(f"host lists: {len(cases)} compared with scontrol, {same} alike, {refused} damaged ones refused by one side, {len(wrong)} different")
    print("\n".join(wrong[:10]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
