"""Writes texts that the Python library `tokenizers` decodes from ids, for the decoder of internal/text/tokenizer.

  pip install tokenizers==0.23.3
  python scripts/oracle/tokenizer_decode.py internal/text/tokenizer/testdata

It reads the tokenizers that tokenizer_ids.py has written there, gives them the decoders that models of their kind have, and
writes decoders.json: for each its decoder, and ids with their text, special tokens left out. Ids are those of texts, and
some at random, which cut characters in two. Where bytes are tokens by name, the library gives up all bytes of a run for
one that is wrong and a stream cannot, so cases with a wrong byte are left out there.
"""

import gzip
import json
import random
import sys

from tokenizers import Tokenizer

LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
MARK = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
FALLBACK = {"type": "ByteFallback"}
META = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
DECODERS = {
    "gpt2": LEVEL, "llama3": LEVEL, "qwen": LEVEL, "roberta": LEVEL, "digits": LEVEL,
    "llama2": {"type": "Sequence", "decoders": [MARK, FALLBACK, {"type": "Fuse"}, STRIP]},
    "gemma": {"type": "Sequence", "decoders": [MARK, FALLBACK, {"type": "Fuse"}]},
    "mistral": {"type": "Sequence", "decoders": [FALLBACK, META]},
    "nmt": {"type": "Sequence", "decoders": [FALLBACK, {"type": "Fuse"}, MARK, {**STRIP, "start": 2}]},
    "t5": META,
    "albert": {"type": "Sequence", "decoders": [{**META, "prepend_scheme": "never"}, {**STRIP, "start": 0, "stop": 1}]},
    "clip": {"type": "BPEDecoder", "suffix": "</w>"},
    "bert": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "cased": {"type": "WordPiece", "prefix": "##", "cleanup": False},
    "wordlevel": None,
    "unknown": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "▁+"}, "content": "_"}, {"type": "Fuse"}]},
}


def main(folder):
    out = {}
    for kind, decoder in DECODERS.items():
        with gzip.open(f"{folder}/{kind}.json.gz") as f:
            oracle = json.load(f)
        raw = {**oracle["tokenizer"], "decoder": decoder}
        t, r = Tokenizer.from_str(json.dumps(raw)), random.Random(kind)
        lists = [c["ids"] for c in oracle["cases"] if 0 < len(c["ids"]) < 60][::6]
        lists += [[r.randrange(t.get_vocab_size()) for _ in range(r.randrange(1, 12))] for _ in range(60)]
        cases = [{"ids": ids, "text": t.decode(ids, skip_special_tokens=True)} for ids in lists]
        if "ByteFallback" in json.dumps(decoder):
            cases = [c for c in cases if "\ufffd" not in c["text"]]
        print(kind, len(cases), sum("\ufffd" in c["text"] for c in cases))
        out[kind] = {"decoder": decoder, "cases": cases}
    with open(f"{folder}/decoders.json", "w") as f:
        f.write("{\n" + ",\n".join(json.dumps(k) + ": " + json.dumps(v, ensure_ascii=False) for k, v in out.items()) + "\n}\n")


main(sys.argv[1])
