"""Writes the ids of transformers' AutoTokenizer for a tokenizer.json with other files beside it.

Usage: python scripts/oracle/tokenizer_config.py internal/text/tokenizer/testdata/config.json
Needs transformers (made with 5.24.0 and tokenizers 0.23.3).

The output holds one tokenizer.json, texts, and cases: the files beside it with the ids of each text, the texts without
special tokens, and the id of eos_token (null for none). Where flags of an old token change, tokenizers 0.23 decodes it
in its former normal form, so that case has no decoded texts.
"""

import json
import os
import sys
import tempfile

import transformers
from transformers import AutoTokenizer

CHARS = ["<unk>"] + [chr(c) for c in range(32, 127)]
FIRST = len(CHARS)  # the first free id
TEXTS = ["a <X> b<x>c <Y>d </s> Foo foo <q>e <Y><Y> fxf f x </s>", "<X>", " <s> <Y> ", ""]


def token(content, special=True, **flags):
    return {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False,
            "special": special, **flags}


def tokenizer():
    added = [("<unk>", 0, True), ("<s>", FIRST, True), ("</s>", FIRST + 1, True), ("Foo", FIRST + 2, False)]
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{**token(text, special, normalized=not special), "id": id} for text, id, special in added],
        "normalizer": {"type": "Lowercase"}, "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {c: i for i, c in enumerate(CHARS)}, "merges": []},
    }


AS_OBJECT = {"__type": "AddedToken", **token("<Y>", lstrip=True, rstrip=True)}
CONFIGS = {
    "none": {},
    "an empty config": {"eos_token": "</s>"},
    "other flags": {"added_tokens_decoder": {
        str(FIRST + 1): token("</s>", special=False, lstrip=True, rstrip=True),
        str(FIRST + 2): token("Foo", special=False)}},
    "ids order new tokens": {"added_tokens_decoder": {
        "120": token("<Y>", special=False, normalized=True), "110": token("<X>", lstrip=True), "9": token("<q>")}},
    "one word": {"added_tokens_decoder": {"99": token("x", single_word=True), "100": token("<Y>", rstrip=True)}},
    "eos is a character": {"eos_token": "b"},
    "eos and pad are new": {"pad_token": "<q>", "eos_token": "<X>"},
    "eos is an object": {"eos_token": AS_OBJECT},
    "a map of extra tokens": {"extra_special_tokens": {"zz": "<Y>", "aa": "<X>"}, "zed_token": "<q>"},
    "a list of extra tokens": {"extra_special_tokens": ["<q>", "<X>", "</s>"], "eos_token": "<X>"},
    "extra before additional": {"extra_special_tokens": ["<Y>"], "additional_special_tokens": ["<X>"]},
    "additional": {"additional_special_tokens": ["<X>", AS_OBJECT], "extra_special_tokens": []},
    "decoder and names": {"added_tokens_decoder": {"99": token("<Y>", special=False)}, "eos_token": "<Y>",
                          "bos_token": "<X>", "pad_token": None, "extra_special_tokens": ["<q>"]},
    "special tokens are split": {"eos_token": "</s>", "split_special_tokens": True},
    "bos and eos around": {"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": True, "add_eos_token": True},
}
FILES = {name: {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **c}} if c else {}
         for name, c in CONFIGS.items()}
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<X>"}
FILES |= {
    "a map over the config": {"tokenizer_config.json": PLAIN, "special_tokens_map.json": {
        "eos_token": {"content": "<Y>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False},
        "additional_special_tokens": ["<q>"]}},
    "a decoder over the map": {"tokenizer_config.json": {**PLAIN, "added_tokens_decoder": {}},
                               "special_tokens_map.json": {"eos_token": "<Y>"}, "added_tokens.json": {"<q>": 99}},
    "a map alone": {"special_tokens_map.json": {"eos_token": "<Y>"}},
    "added tokens": {"tokenizer_config.json": PLAIN, "added_tokens.json": {"<q>": 101, "<X>": 100, "FXF": 99}},
}


def run(files):
    with tempfile.TemporaryDirectory() as d:
        for name, content in {"tokenizer.json": tokenizer(), **files}.items():
            with open(os.path.join(d, name), "w") as f:
                json.dump(content, f)
        t = AutoTokenizer.from_pretrained(d)
    ids = [t(text)["input_ids"] for text in TEXTS]
    return {"ids": ids, "decoded": [t.decode(i, skip_special_tokens=True) for i in ids] if files != FILES["other flags"] else None,
            "eos": t.eos_token_id}


out = {"transformers": transformers.__version__, "tokenizer": tokenizer(), "texts": TEXTS,
       "cases": [{"name": name, "files": files, **run(files)} for name, files in FILES.items()]}
with open(sys.argv[1], "w") as f:
    json.dump(out, f, separators=(",", ":"))
    f.write("\n")
