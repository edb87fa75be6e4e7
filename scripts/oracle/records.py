"""Compares what cprun reads from files of records with TRL's trainer and transformers.

    pip install transformers==5.24.0 trl==1.16.0 datasets==5.2.0 torch==2.15.0
    python scripts/oracle/records.py bin/cprun [--cases 5] [--seed 1] [--only KIND]

Each case is a small random data set in one of the forms that people have. TRL's SFTTrainer makes its ids and labels, and a
tiny llama of transformers the log-probability of each target in float32. cprun gives its own with `eval --logprobs`. For
files that this command does not take, a training step without a learning rate gives the loss and the counts. The exit
status is 1 if a case differs; a refusal (status 2) is no difference.
"""

import argparse
import itertools
import json
import logging
import pathlib
import random
import subprocess
import tempfile
from functools import partial, partialmethod

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = "the ring holds keys and values of each rank, so that 1,024 tokens see 2.5 halves: naïve café 日本 \U0001f642 x = {'a': [1]}; end\n".split(" ")
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
CALL = {"type": datasets.Value("string"), "function": {"name": datasets.Value("string"), "arguments": datasets.Json()}}
TURN = {"role": datasets.Value("string"), "content": datasets.Value("string"), "tool_calls": datasets.List(CALL)}
JSON = datasets.Features({"messages": datasets.List(TURN), "tools": datasets.List(datasets.Json())})  # as datasets 5 reads tools that differ


def peers(directory):
    """A byte-level tokenizer with a chat template, and a tiny llama."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator([" ".join(WORDS), "assistant user system"] * 9, trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<|im_end|>", pad_token="<|im_start|>", chat_template=TEMPLATE)
    fast.save_pretrained(directory)
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=8192, initializer_range=0.2, bos_token_id=None, eos_token_id=fast.eos_token_id)).float().eval()
    model.save_pretrained(directory)
    return fast, model


class Make:
    """Makes random records, and TRL's view of them."""
    def __init__(self, rng, fast, model):
        self.rng, self.fast, self.model = rng, fast, model

    def text(self, n=12):
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(1, n)))

    def rows(self, system=None):
        first = lambda: ["system"] * (self.rng.random() < 0.5 if system is None else system)
        roles = lambda: first() + ["user", "assistant"] * self.rng.randint(1, 3)
        return [{"messages": [{"role": role, "content": self.text()} for role in roles()]} for _ in range(self.rng.randint(2, 5))]

    def trained(self, rows, *, features=None, **config):
        """The ids and labels that TRL trains on."""
        with tempfile.TemporaryDirectory() as out:
            args = trl.SFTConfig(out, max_length=None, use_cpu=True, report_to=[], bf16=False, disable_tqdm=True, **config)
            data = datasets.Dataset.from_list(rows, features=features)
            trainer = trl.SFTTrainer(self.model, args, train_dataset=data, processing_class=self.fast)
        return [{"input_ids": r["input_ids"], "labels": r["labels"]} for r in trainer.train_dataset]

    chats = partialmethod(trained, assistant_only_loss=True)

    def chat(self, system=None):
        rows = self.rows(system)
        return rows, self.chats(rows)

    def prompts(self, text=False):
        rows = [{"prompt": r["messages"][:-1], "completion": r["messages"][-1:]} for r in self.rows()]
        for r in rows if text else []:
            r.update(prompt=self.text(), completion=self.rng.choice(["", " "]) + self.text() + self.rng.choice(["", "<|im_end|>"]))
        return rows, self.trained(rows)

    def called(self, as_text=False):
        """Conversations with tools, whose schemas and arguments differ in their keys. as_text: the call is the turn's content."""
        def tool(name):
            keys = self.rng.sample(["path", "when", "count"], self.rng.randint(1, 3))
            return {"type": "function", "function": {"name": name, "description": self.text(4), "parameters": {
                "type": "object", "properties": {k: {"type": "string", "default": None} for k in keys}, "required": keys[:1]}}}
        rows = []
        for _ in range(self.rng.randint(2, 4)):
            tools = [tool("look"), tool("add")]
            call = {"name": "look", "arguments": {k: self.text(3) for k in tools[0]["function"]["parameters"]["properties"]}}
            call = {"content": json.dumps(call)} if as_text else {"content": "", "tool_calls": [{"type": "function", "function": call}]}
            rows.append({"tools": tools, "messages": [{"role": "user", "content": self.text()}, {"role": "assistant", **call},
                         {"role": "tool", "content": self.text()}, {"role": "assistant", "content": self.text()}]})
        return rows, self.chats(rows, features=JSON)

    def flagged(self, flags):
        """Conversations with a flag on some of the assistant's turns, which are then no targets."""
        rows = self.rows()
        want = self.chats(rows)
        for row, w in zip(rows, want):
            runs = [(k, len(list(g))) for k, g in itertools.groupby(w["labels"], lambda x: x != -100)]
            turns, labels, at = [m for m in row["messages"] if m["role"] == "assistant"], w["labels"], 0
            for target, n in runs:
                if target and self.rng.random() < 0.5:
                    labels[at:at + n] = [-100] * n
                    turns[0].update([self.rng.choice(flags)])
                turns, at = turns[target:], at + n
        return rows, want

    def packed(self, strategy="bfd"):
        """TRL's packs, and their documents. Without borders each pack is one document."""
        packs = trl.pack_dataset(datasets.Dataset.from_list(self.chats(self.rows())), 600, strategy).to_list()
        docs = []
        for p in packs:
            ends = list(itertools.accumulate(p.get("seq_lengths") or [len(p["input_ids"])]))
            docs += [{k: p[k][lo:hi] for k in ("input_ids", "labels")} for lo, hi in zip([0, *ends], ends)]
        return packs, docs


def lines(d, rows, name="a.jsonl", end="\n", encoding="utf-8"):
    (d / name).write_text("".join(json.dumps(r, ensure_ascii=False) + end for r in rows), encoding, newline="")
    return d / name


def parquet(d, rows, groups=(None,), **how):
    table = pa.Table.from_pylist(rows)
    with pq.ParquetWriter(d / "a.parquet", table.schema, **how) as w:
        for g in groups:
            w.write_table(table.slice(0, g), row_group_size=2)
    return d / "a.parquet"


def saved(d, rows, features=None, **how):
    datasets.Dataset.from_list(rows, features=features).save_to_disk(d / "a", **how)
    return d / "a"


tokens = lambda m: 2 * (m.chats(m.rows()),)
# changes of a row
odd = lambda r: {**r, "score": float("nan"), "top": float("-inf"), "id": 2**70}
tools_text = lambda r: {**r, "tools": json.dumps(r["tools"])}
turns = lambda messages, froms: [{"from": k, "value": m["content"]} for k, m in zip(froms, messages)]
share = lambda r: {"conversations": turns(r["messages"], [{"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]) for m in r["messages"]])}
share_system = lambda r: {**share({"messages": r["messages"][1:]}), "system": r["messages"][0]["content"]}
share_tools = lambda r: {"conversations": turns(r["messages"], ("human", "function_call", "observation", "gpt")), "tools": json.dumps(r["tools"])}
mask = lambda *keys: lambda r: {"input_ids": r["input_ids"], **{k: [int(x != -100) for x in r["labels"]] for k in keys}}
padded = lambda r: {k: r.get(k, [1] * len(r["labels"])) + [v] * 5 for k, v in (("input_ids", 0), ("labels", -100), ("attention_mask", 0))}
positions = lambda r: {"position_ids": [i for n in r.pop("seq_lengths") for i in range(n)], **r}

KINDS = {  # by name: makes rows and TRL's documents, writes the file, changes rows before
    "jsonl": (Make.chat, lines), "jsonl, BOM": (Make.chat, partial(lines, encoding="utf-8-sig")),
    "jsonl, CRLF and empty lines": (Make.chat, partial(lines, end="\r\n\r\n")), "jsonl, NaN in unused keys": (Make.chat, lines, odd),
    "JSONL, upper case": (Make.chat, partial(lines, name="A.JSONL")), "ndjson": (Make.chat, partial(lines, name="a.ndjson")),
    "json lines in .json": (Make.chat, partial(lines, name="a.json")), "json array": (Make.chat, lambda d, rows: lines(d, [rows], "a.json", "")),
    "parquet": (Make.chat, partial(parquet, compression="zstd")), "parquet, empty row groups": (Make.chat, partial(parquet, groups=(0, None, 0))),
    "save_to_disk": (Make.chat, saved), "save_to_disk, two shards": (Make.chat, partial(saved, num_shards=2)), "tools, jsonl": (Make.called, lines),
    "tools as text, jsonl": (Make.called, lines, tools_text), "tools, save_to_disk of type json": (Make.called, partial(saved, features=JSON)),
    "sharegpt": (Make.chat, lines, share), "sharegpt, system beside": (partial(Make.chat, system=True), lines, share_system),
    "sharegpt, tools": (partial(Make.called, as_text=True), lines, share_tools), "prompt and completion, messages": (Make.prompts, lines),
    "prompt and completion, text": (partial(Make.prompts, text=True), lines),
    "turns with train: false": (partial(Make.flagged, flags=[(k, False) for k in ("train", "trainable", "loss")]), lines),
    "turns with weight 0": (partial(Make.flagged, flags=[("weight", 0)]), lines), "tokens, labels": (tokens, parquet),
    "tokens, assistant_masks": (tokens, lines, mask("assistant_masks")), "tokens, two masks": (tokens, saved, mask("completion_mask", "assistant_masks")),
    "tokens, padded": (tokens, lines, padded), "packed, seq_lengths, jsonl": (Make.packed, lines), "packed, seq_lengths, save_to_disk": (Make.packed, saved),
    "packed, position_ids": (Make.packed, parquet, positions), "packed, wrapped": (partial(Make.packed, strategy="wrapped"), parquet),
}


def scored(model, docs):
    """The ids of all documents, and the log-probability of each token, None where it is no target."""
    ids, out = [], []
    for doc in (d for d in docs if d["input_ids"]):
        x = torch.tensor([doc["input_ids"]])
        with torch.no_grad():
            p = torch.log_softmax(model(x).logits[0].double(), -1)
        ids += doc["input_ids"]
        out += [None] + [float(p[i, t]) if l != -100 else None for i, (t, l) in enumerate(zip(doc["input_ids"][1:], doc["labels"][1:]))]
    return ids, out


def compare(cprun, model, path, ids, logs, work):
    """Returns equal, differs or refused, and what."""
    run = lambda *a: subprocess.run([cprun, *map(str, a)], capture_output=True, text=True, timeout=300)
    valid = [x for x in logs if x is not None]
    right = [len(ids), len(valid), round(-sum(valid) / len(valid), 4)]
    p = run("eval", model, "--quiet", "--device", "cpu", "--logprobs", path)
    if p.returncode == 0:
        made = [json.loads(line) for line in p.stdout.splitlines()]
        g, q = sum((r["ids"] for r in made), []), sum((r["logprobs"] for r in made), [])
        valid = [x for x in q if x is not None]
        got = [len(g), len(valid), round(-sum(valid) / max(1, len(valid)), 4)]
        same = g == ids and all((a is None) == (b is None) and (a is None or abs(a - b) < 1e-4) for a, b in zip(q, logs))
    elif p.returncode == 2 and "--logprobs" in p.stderr:  # not by this command
        (work / "train.yaml").write_text(json.dumps({
            "model": {"from": str(model)}, "data": {"path": str(path), "seq_len": len(ids) + 64, "pack_documents": True, "cache": str(work / "cache")},
            "train": {"steps": 1}, "optimizer": {"lr": 0.0}, "log": {"tensorboard": False}}))
        p = run("--device", "cpu", "--run-dir", work / "run", work / "train.yaml")
        if p.returncode == 0:
            loss = json.loads((work / "run/metrics.jsonl").read_text().splitlines()[0])["loss"]
            got = [*(json.loads((work / "run/plan.json").read_text())["data"][k] for k in ("tokens", "targets")), round(loss, 4)]
            same = got[:2] == right[:2] and abs(got[2] - right[2]) < 3e-4
    if p.returncode:
        return "refused" if p.returncode == 2 else "differs", p.stderr.strip().split("\n")[-1]
    return "equal" if same else "differs", f"tokens, targets, loss {got}, want {right}"


def main():
    args = argparse.ArgumentParser()
    args.add_argument("cprun", type=lambda p: pathlib.Path(p).resolve())
    for name, n in (("--cases", 5), ("--seed", 1)):
        args.add_argument(name, type=int, default=n)
    args.add_argument("--only", default="", help="kinds with this text in their name")
    args = args.parse_args()
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    root = pathlib.Path((scratch := tempfile.TemporaryDirectory()).name)
    fast, model = peers(root / "model")
    print(f"trl {trl.__version__}, transformers {transformers.__version__}, datasets {datasets.__version__}; seed {args.seed}\n"
          f"{'kind':36} cases  equal  differ  refused")
    said, wrong = {}, 0
    for kind, (make, write, *change) in ((k, v) for k, v in KINDS.items() if args.only in k):
        count = dict.fromkeys(("equal", "differs", "refused"), 0)
        for n in range(args.cases):
            work = pathlib.Path(tempfile.mkdtemp(dir=root))
            rows, docs = make(Make(random.Random(f"{args.seed} {kind} {n}"), fast, model))
            path = write(work, [change[0](dict(r)) if change else r for r in rows])
            how, why = compare(args.cprun, root / "model", path, *scored(model, docs), work)
            count[how] += 1
            said.setdefault((kind, how), why.replace(str(root), "…"))
        wrong += count["differs"]
        print(f"{kind:36} {args.cases:5}  {count['equal']:5}  {count['differs']:6}  {count['refused']:7}", flush=True)
    print("", *(f"{kind}, {how}: {why}" for (kind, how), why in said.items() if how != "equal"), sep="\n")
    scratch.cleanup()
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
