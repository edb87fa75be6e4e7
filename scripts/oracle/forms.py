"""Compares the targets of conversations under stock chat templates with TRL's training templates.

    pip install transformers==5.24.0 trl==1.16.0
    python scripts/oracle/forms.py [DIR] [-v]

It makes 240 conversations (system prompts, turns, tools, reasoning, Unicode, odd space) and encodes them by each stock
template that trl/chat_templates has of the supported families, and by the *.jinja of DIR. A row counts the conversations
that the template renders, those whose ids equal those of transformers, those whose targets equal TRL's, and those that
cprun refuses. TRL's form of Qwen3 renders reasoning that the stock template leaves out: there the texts of the answers
are compared without it. Under templates without a form of TRL a target counts as equal if each answer holds its content and ends
with a special token. No template of others is part of cprun. --write writes renderings from the first answer on, with the
answers by TRL unless its form renders another text, to internal/text/data/testdata/forms.json.
"""

import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile

import transformers
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

STOCK = pathlib.Path(trl.__file__).parent / "chat_templates"
NAMES = ["qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3", "llama3_1", "llama3_2", "gemma", "gemma3", "phi3", "phi3_5"]
SPECIAL = """<s> </s> <|endoftext|> <|im_start|> <|im_end|> <|im_sep|> <|begin_of_text|> <|start_header_id|> <|end_header_id|>
<|eot_id|> <|eom_id|> <|python_tag|> <start_of_turn> <end_of_turn> <|user|> <|assistant|> <|system|> <|end|> <|tool|> [INST] [/INST]
[TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]""".split()
TOOLS = [{"type": "function", "function": {"name": "tide", "description": "When is high tide?", "parameters": {
    "type": "object", "properties": {"port": {"type": "string"}, "days": {"type": "integer"}}, "required": ["port"]}}}]
WORDS = ["the", "tide", "Brest", "é", "日本", "👩‍👩‍👧", "x = 1;", "{}", "'a'", "\"b\"", "\n\n", "  ", "<b>", "12", "assistant", "user\n", "no_think",
         "naïve", "…", "\t", "end", "a|b", "https://x.y", "\u00a0"]


def text(r, low=0):
    s = " ".join(r.choices(WORDS, k=r.randint(low, 6)))
    return r.choice(["", "", " ", "\n"]) + s + r.choice(["", "", "\n", "  "])


def conversation(seed):
    r = random.Random(seed)
    record, messages = {}, []
    if r.random() < 0.4:
        messages.append({"role": "system", "content": text(r)})
    tools = r.random() < 0.35
    if tools or r.random() < 0.1:
        record["tools"] = TOOLS
    thinks = r.random() < 0.4
    for _ in range(r.randint(1, 4)):
        messages.append({"role": "user", "content": text(r, 1)})
        while tools and r.random() < 0.5:
            arguments = {"port": r.choice(WORDS), "days": r.randint(0, 9)}
            calls = [{"type": "function", "id": "call%05d" % k, "function": {"name": "tide", "arguments":
                      json.dumps(arguments) if seed % 5 == 4 else arguments}} for k in range(r.choice([1, 1, 1, 2]))]
            m = {"role": "assistant", "content": r.choice(["", "", text(r, 1)]), "tool_calls": calls}
            if thinks and r.random() < 0.7:
                m["reasoning_content"] = text(r, 1)
            messages.append(m)
            messages += [{"role": "tool", "name": "tide", "tool_call_id": c["id"], "content": text(r, 1)} for c in calls]
        m = {"role": "assistant", "content": text(r, seed % 7 > 0)}
        if thinks and r.random() < 0.7:
            if r.random() < 0.5:
                m["reasoning_content"] = text(r)
            else:
                m["content"] = "<think>\n" + text(r) + "\n</think>\n\n" + m["content"]
        messages.append(m)
    if r.random() < 0.15:
        messages.append({"role": "user", "content": text(r, 1)})
    if r.random() < 0.1:
        record["chat_template_kwargs"] = {"enable_thinking": r.random() < 0.5}
    return {**record, "messages": messages}


def tokenizer(directory):
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    t = Tokenizer(models.BPE(letters, []))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.add_special_tokens([AddedToken(s, normalized=False) for s in SPECIAL])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="<|endoftext|>")
    fast.save_pretrained(directory)
    return fast


def encoded(fast, record, template):
    """The ids and assistant mask of transformers; None if the template refuses."""
    record = json.loads(json.dumps(record))
    for m in record["messages"]:
        if "reasoning_content" in m:
            m["thinking"] = m["reasoning_content"]
    try:
        out = fast.apply_chat_template(record["messages"], tools=record.get("tools"), chat_template=template, return_dict=True,
                                       return_assistant_tokens_mask="generation" in template, **record.get("chat_template_kwargs", {}))
    except Exception:
        return None, None
    return out["input_ids"], out.get("assistant_masks")


def answers(fast, ids, mask):
    """The texts of the targets, one for each run of them."""
    runs, last = [], 0
    for i, m in zip(ids, mask):
        if m and not last:
            runs.append([])
        if m:
            runs[-1].append(i)
        last = m
    return [fast.decode(r) for r in runs]


def alike(mine, theirs):
    """Reports whether answers are equal, except for reasoning and line feeds before an answer that one side leaves out."""
    bare = [re.sub(r"^<think>\n.*?\n</think>\n\n", "", t, count=1, flags=re.S).lstrip("\n") for t in theirs]
    return len(mine) == len(theirs) and all(m == t or m.lstrip("\n") == b for m, t, b in zip(mine, theirs, bare))


def sound(mine, messages):
    """Reports whether the answers hold the content of each turn in order, and each ends with a special token."""
    whole, at = "".join(mine), 0
    for m in messages:
        if m["role"] == "assistant" and "tool_calls" not in m and at >= 0:
            at = whole.find(m["content"].split("</think>")[-1].strip(), at)
    return at >= 0 and len(mine) > 0 and all(any(a.strip().endswith(s) for s in SPECIAL) for a in mine)


FORMS = {"qwen2_5": "Qwen2.5", "qwen3": "Qwen3", "qwen3_instruct_2507": "Qwen3-2507", "gemma": "Gemma", "gemma3": "Gemma",
         "phi3": "Phi-3", "phi3_5": "Phi-3"}


def write(fast):
    """Writes the fixture of the tests. Texts before the first answer stay out."""
    rows = []
    for name, form in FORMS.items():
        kept = {True: 0, False: 0}
        for record in map(conversation, range(240)):
            ids, _ = encoded(fast, record, (STOCK / f"{name}.jinja").read_text())
            theirs, mask = encoded(fast, record, (STOCK / f"{name}_training.jinja").read_text())
            if ids is None or len(fast.decode(ids)) > 2000 or kept[ids == theirs] == (8 if ids == theirs else 5):
                continue
            messages = record["messages"]
            messages = messages[next(i for i, m in enumerate(messages) if m["role"] == "assistant"):]
            before, text = fast.decode(theirs[:mask.index(1)]), fast.decode(ids)
            head = max(before.rfind(t) for t in ("<|im_start|>", "<start_of_turn>", "<|assistant|>"))
            if not text.startswith(before[:head]):
                continue
            rows.append({"form": form, "messages": messages, "end": text[head:], "answers": answers(fast, ids, mask) if ids == theirs else None})
            kept[ids == theirs] += 1
    lines = ",\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
    (pathlib.Path(__file__).parents[2] / "internal/text/data/testdata/forms.json").write_text(f"[\n{lines}\n]\n")


def main():
    dirs = [pathlib.Path(a) for a in sys.argv[1:] if not a.startswith("-")]
    files = [STOCK / f"{n}.jinja" for n in NAMES] + [p for d in dirs for p in sorted(d.glob("*.jinja"))]
    records = [conversation(i) for i in range(240)]
    total = [0] * 5
    if "--write" in sys.argv:
        with tempfile.TemporaryDirectory() as work:
            return write(tokenizer(work))
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        fast = tokenizer(work)
        paths = []
        for i, r in enumerate(records):
            paths.append(work / f"{i}.jsonl")
            paths[-1].write_text(json.dumps(r, ensure_ascii=False) + "\n")
        subprocess.run(["go", "build", "-o", work / "labels", pathlib.Path(__file__).with_name("labels.go")], check=True)
        for path in files:
            got = subprocess.run([work / "labels", work / "tokenizer.json", path, *paths], capture_output=True, text=True, check=True)
            source, form = path.read_text(), path.with_name(path.stem + "_training.jinja")
            form = form.read_text() if form.exists() else source if "generation %}" in source or "generation -%}" in source else None
            row, notes = [0] * 5, set()
            for i, (record, line) in enumerate(zip(records, got.stdout.splitlines())):
                mine = json.loads(line)
                notes |= set(re.findall(r"training form \S+", " ".join(mine["notes"] or [])))
                ids, _ = encoded(fast, record, source)
                if ids is None:
                    if "error" not in mine:
                        print("   ", i, "is trained, and transformers refuses it")
                    continue
                row[0] += 1
                if "error" in mine:
                    row[4] += 1
                    if "-v" in sys.argv:
                        print("   ", i, mine["error"][:200])
                    continue
                row[1] += mine["ids"] == ids
                mask = [label != -100 for label in mine["labels"]]
                row[2] += 1
                theirs, want = encoded(fast, record, form or source)
                if form is None:
                    want = theirs
                    equal = sound(answers(fast, ids, mask), record["messages"])
                elif theirs == ids:
                    equal = mask == [bool(w) for w in want]
                else:
                    heads = [fast.decode(ids[:k]) for k in range(1, len(ids)) if mask[k] and not mask[k - 1]]
                    equal = alike(answers(fast, ids, mask), answers(fast, theirs, want)) and all(h.endswith("<|im_start|>assistant\n") for h in heads)
                row[3] += equal
                if not equal and "-v" in sys.argv:
                    print("   ", i, repr(fast.decode(ids)), "\n     got ", answers(fast, ids, mask),
                          "\n     want", answers(fast, theirs, want))
            total = [a + b for a, b in zip(total, row)]
            print(f"{path.stem:40} rendered {row[0]:3}  ids equal {row[1]:3}  targets equal {row[3]:3} of {row[2]:3}  "
                  f"refused {row[4]:3}  {', '.join(sorted(notes))}")
    print(f"{len(files)} templates: rendered {total[0]}, ids equal {total[1]}, targets equal {total[3]} of {total[2]}, refused {total[4]}")


if __name__ == "__main__":
    main()
