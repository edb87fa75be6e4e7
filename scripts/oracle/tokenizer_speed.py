"""Measures `cprun tokenize` against the Python library `tokenizers` on as many threads, the two in turns.

Python is given the best case: texts in memory, encode_batch_fast in batches of 2,000, ids left where they are. cprun's time is
that of the whole command: start, tokenizer.json, JSON, encoding, writing and fsync.

  pip install tokenizers==0.23.3 sentencepiece
  go build -o bin/cprun ./cmd/cprun && python scripts/oracle/tokenizer_speed.py [--megabytes 60] [--rounds 3]
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time

import tokenizer_ids
from tokenizer_lines import base, book


def texts(size):
    r, words, out = random.Random(1), " ".join(book()).split(), []
    while size > 0:
        w = [r.choice(words) for _ in range(r.randrange(50, 600))]
        out.append(r.choice(book()) + "\n\n" + " ".join(w) + " %d\n" % r.randrange(10**9) + r.choice(base()))
        size -= len(out[-1])
    return out


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--megabytes", type=int, default=60)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--kinds", nargs="*", default=["llama3", "qwen", "gpt2", "llama2", "gemma", "t5", "bert"])
    args = p.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    data = texts(args.megabytes * 10**6)
    size = sum(len(t.encode()) for t in data) / 1e6
    with tempfile.TemporaryDirectory() as d:
        with open(f"{d}/in.jsonl", "w") as f:
            f.writelines(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in data)
        for kind in args.kinds:
            t = getattr(tokenizer_ids, kind)(30000)
            t.save(f"{d}/tokenizer.json")
            ours, theirs = [], []
            for _ in range(args.rounds):
                start = time.monotonic()
                for at in range(0, len(data), 2000):
                    t.encode_batch_fast(data[at : at + 2000])
                theirs.append(size / (time.monotonic() - start))
                for end in ("bin", "idx"):
                    if os.path.exists(f"{d}/out.{end}"):
                        os.remove(f"{d}/out.{end}")
                start = time.monotonic()
                subprocess.run(["bin/cprun", "tokenize", "--quiet", "--eos=false", "--tokenizer", f"{d}/tokenizer.json", "--to", f"{d}/out", f"{d}/in.jsonl"], check=True)
                ours.append(size / (time.monotonic() - start))
            a, b = statistics.median(ours), statistics.median(theirs)
            print(f"{kind:8} vocab {t.get_vocab_size():6}  {size:.0f} MB on {os.cpu_count()} cores: cprun {a:6.1f} MB/s, tokenizers {b:6.1f} MB/s, ratio {a / b:.2f}", flush=True)


main()
