"""Writes what the tests of internal/text/chat and internal/text/data expect of conversations.

    pip install transformers==5.24.0 trl==1.16.0 datasets==5.2.0
    python scripts/oracle/chat.py

internal/text/chat/testdata/renders.json has the texts and generation spans of our templates by transformers;
internal/text/data/testdata/chat has a tokenizer and records, with the ids and labels of TRL's SFTTrainer;
internal/text/tokenizer/testdata/marks.json has the tokens around each place of a text.
"""

import gzip
import json
import pathlib
import shutil
import tempfile

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import templates
import torch
import transformers
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

ROOT = pathlib.Path(__file__).parents[2] / "internal/model"
CHAT, DATA = ROOT / "chat/testdata", ROOT / "data/testdata/chat"

MORE = {
    "comment": {"messages": [templates.user(), {"role": "comment", "content": "x"}, templates.assistant(), {"role": "stop"}, templates.user("y")]},
    "raise": {"messages": [templates.user("!boom!")]},
    "undefined": {"messages": [{"role": "user"}, {"role": "user", "content": "x"}]},
    "stale": {"messages": [templates.user("old"), {"role": "assistant"}]},
}
TOKENS = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
GENERATION = (CHAT / "plain.jinja").read_text().replace("(m.content or '') }}", "'' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}", 1).replace(
    "{{ '<|im_end|>\\n' }}{% endfor %}", "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ (m.content or '') + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}")


def renders():
    cases, out = templates.CASES | MORE, []
    for path in sorted(CHAT.glob("*.jinja")):
        for name, case in cases.items():
            if path.stem == "numbers" and name != "plain":
                continue
            text, spans, error = templates.expected(path.read_text(), case)
            out.append({"template": path.name, "case": name, **({"refused": error} if error else {"text": text, "spans": spans})})
    made = {n: {"tools": None, "documents": None, "add_generation_prompt": False, **c, **templates.TOKENS} for n, c in cases.items()}
    lines = ",\n".join(json.dumps(r, ensure_ascii=False) for r in out)
    (CHAT / "renders.json").write_text(f'{{"cases": {json.dumps(made, ensure_ascii=False)},\n"renders": [\n{lines}\n]}}\n')


def tokenizer():
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    text = [json.dumps(c["messages"]) for c in templates.CASES.values()] + ["assistant\nuser\nsystem\n the rain in Spain "] * 9
    t.train_from_iterator(text, trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                          special_tokens=["<s>", "<|im_start|>", "<|im_end|>"], show_progress=False))
    t.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("</tool>", normalized=False)])
    t.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)])])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=t, **TOKENS, pad_token="<s>")
    fast.chat_template = GENERATION
    fast.save_pretrained(DATA)
    for extra in DATA.glob("special_tokens_map.json"):
        extra.unlink()
    return fast


def trained(fast, rows, **config):
    """The ids and labels that TRL trains on."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(fast), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))
    with tempfile.TemporaryDirectory() as out:
        trainer = trl.SFTTrainer(model, trl.SFTConfig(out, max_length=None, use_cpu=True, report_to=[], bf16=False, **config),
                                 train_dataset=datasets.Dataset.from_list(rows), processing_class=fast)
    return [{"ids": r["input_ids"], "labels": r["labels"]} for r in trainer.train_dataset]


def records():
    fast = tokenizer()
    cases = templates.CASES
    plain = [{"messages": cases[n]["messages"]} for n in ("plain", "system", "turns", "empty", "unicode", "crlf", "markup", "order")]
    tools = [{"messages": [*cases[n]["messages"]]} for n in ("tools", "call", "think-tool")]
    for r in tools:  # of one shape and without nulls, so that no struct gains keys
        r["messages"] = [{k: m[k] for k in ("role", "content", "tool_calls") if k in m} for m in r["messages"]]
    tools = json.loads(json.dumps(tools).replace('"shift": null, ', ""))
    shapes = [{"messages": [templates.user(), {**templates.assistant(None, tool_calls=[{"function": {"name": "f", "arguments": a}}])}]}
              for a in ({"a": 1}, {"b": {"c": [1.0, 2.5], "e": True}}, {"a": 2, "b": {"d": "x"}})]
    rain = [{"role": "user", "content": "rain?"}]
    prompts = [{"prompt": rain, "completion": [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "sure?"}]},
               {"prompt": rain * 2, "completion": [{"role": "assistant", "content": " no \n"}]}]
    texts = [{"prompt": "The rain", "completion": " in Spain"}, {"prompt": "a", "completion": "b<|im_end|>"}, {"prompt": "", "completion": "x"},
             {"prompt": "x<|im_end|>", "completion": ""}]
    share = [{"conversations": [{"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]}
                                for m in r["messages"]]} for r in plain[:3]]
    sets = {"messages": (plain, dict(assistant_only_loss=True)), "tools": (tools, dict(assistant_only_loss=True)),
            "prompts": (prompts, {}), "texts": (texts, {}), "share": (plain[:3], dict(assistant_only_loss=True)), "all": (plain[:3], {}),
            "shapes": (shapes, dict(assistant_only_loss=True))}
    for name, (rows, config) in sets.items():
        want = trained(fast, rows, **config)
        if name == "shapes":  # one by one: together, each would gain the keys of the others, with nulls
            want = [trained(fast, [r], **config)[0] for r in rows]
        rows = share if name == "share" else rows
        (DATA / f"{name}.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
        (DATA / f"{name}.expect.jsonl").write_text("".join(json.dumps(r) + "\n" for r in want))
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, DATA / f"{name}.parquet")
        if name in ("tools", "shapes"):
            with pa.OSFile(str(DATA / f"{name}.arrow"), "wb") as f, pa.ipc.new_stream(f, table.schema) as w:
                w.write_table(table)


MARKED = ("Hi<|im_end|>\n<|start|>assistant\n\n  The rain in Spain isn't 123456 cafés: naïve 日本語 👩‍👩‍👧!\n\nresults==[1,  2];\t\tend</s> \n"
          "[INST] one two[/INST]three  four\u00a0x \n\n\n")


def marks():
    """For each place between two characters: the tokens that end before it, and those that begin before it."""
    out = {}
    for name in ("deepseek", "gemma", "gpt2", "llama2", "llama3", "mistral", "o200k", "qwen"):
        with gzip.open(ROOT / f"tokenizer/testdata/{name}.json.gz") as f:
            raw = json.dumps(json.load(f)["tokenizer"]).replace('"trim_offsets": true', '"trim_offsets": false')
        offsets = Tokenizer.from_str(raw).encode(MARKED, add_special_tokens=False).offsets
        out[name] = [[sum(e <= p for _, e in offsets), sum(s < p for s, _ in offsets)] for p in range(len(MARKED) + 1)]
    lines = ",\n".join(f'"{k}": {json.dumps(v, separators=(",", ":"))}' for k, v in out.items())
    (ROOT / "tokenizer/testdata/marks.json").write_text(f'{{"text": {json.dumps(MARKED)}, "marks": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    marks()
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir()
    renders()
    records()
