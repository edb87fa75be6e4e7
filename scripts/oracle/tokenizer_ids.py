"""Compares the ids of internal/text/tokenizer with those of the Python library `tokenizers`, line by line.

It trains tokenizers of every kind that models on the hub have, makes texts in many scripts, code, and everything that
is hostile in Unicode, and runs both. The first line that differs ends it with status 1.

  pip install tokenizers==0.23.3 sentencepiece
  python scripts/oracle/tokenizer_ids.py                        # 25,000 lines; --lines, --seed
  python scripts/oracle/tokenizer_ids.py --testdata internal/text/tokenizer/testdata   # what go test compares
"""

import argparse
import base64
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile

from tokenizer_lines import corpus, lines
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
SPECIAL = ["<|begin|>", "<|end|>", "<|im_start|>", "<pad>"]


def byte_bpe(pre, size, normalizer=None, special=SPECIAL, **model):
    t = Tokenizer(models.BPE(**model))
    if normalizer:
        t.normalizer = normalizer
    t.pre_tokenizer = pre
    t.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=size, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return t


def bos(t, single, pair="$A $B"):
    names = [w for w in single.split() if not w.startswith("$")]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=[(n, t.token_to_id(n)) for n in names])


def sequence(*parts):
    return pre_tokenizers.Sequence(list(parts))


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert=invert)


def plain():
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def gpt2(n):
    t = byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), n, special=["<|endoftext|>"])
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    return t


def roberta(n):
    t = byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=True), n, special=["<s>", "<pad>", "</s>", "<unk>"])
    t.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    t.post_processor = processors.RobertaProcessing(("</s>", t.token_to_id("</s>")), ("<s>", t.token_to_id("<s>")))
    return t


def llama3(n):
    t = byte_bpe(sequence(split(LLAMA3), plain()), n, ignore_merges=True)
    t.add_tokens([AddedToken("added words", normalized=True), AddedToken("lonely", single_word=True), AddedToken("<eat>", lstrip=True, rstrip=True)])
    t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos(t, "<|begin|> $A")])
    return t


def qwen(n):
    t = byte_bpe(sequence(split(QWEN), plain()), n, normalizers.NFC())
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    return t


def o200k(n):
    return byte_bpe(sequence(split(O200K), plain()), n)


def deepseek(n):
    return byte_bpe(sequence(split(r"[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split(r"[一-龥ࠀ-一가-퟿]+"), pre_tokenizers.Digits(True), plain()), n)


def digits(n):
    t = byte_bpe(sequence(pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)), n)
    t.add_tokens([AddedToken("\n\n\n"), AddedToken("    "), AddedToken("ſ")])
    return t


def thousands(n):
    """Digits in threes from the right, and a lowercase added token that is looked for after normalization."""
    t = byte_bpe(sequence(split(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))"), split(r"[^\r\n\p{L}\p{N}]?+\p{L}++|\s++$|\s+(?!\S)|\s"), plain()), n, normalizers.Lowercase())
    t.add_tokens([AddedToken("WORLD Peace", normalized=True), AddedToken("KEEP", normalized=False)])
    return t


def clip(n):
    t = Tokenizer(models.BPE(unk_token="<|endoftext|>", end_of_word_suffix="</w>", fuse_unk=False))
    t.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()])
    t.pre_tokenizer = sequence(split(r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+", "removed", True), pre_tokenizers.ByteLevel(add_prefix_space=False))
    t.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=n, special_tokens=["<|startoftext|>", "<|endoftext|>"], end_of_word_suffix="</w>", initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    t.post_processor = processors.RobertaProcessing(("<|endoftext|>", 1), ("<|startoftext|>", 0), trim_offsets=False, add_prefix_space=False)
    return t


def fallback(n, normalizer, pre, fuse=True, keep=0.97, **options):
    """Sentencepiece's BPE as in llama 2: runes that are rare are bytes."""
    t = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=fuse, unk_token="<unk>", **options))
    t.normalizer = normalizer or normalizers.Sequence([])
    if pre:
        t.pre_tokenizer = pre
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    count = {}
    for text in corpus():
        for c in text:
            count[c] = count.get(c, 0) + 1
    frequent = sorted(count, key=lambda c: (-count[c], c))[:150]
    words = [w for text in corpus() for w in ["▁" + v for v in text.split(" ")]]
    t2 = Tokenizer(models.BPE())
    t2.train_from_iterator(words, trainers.BpeTrainer(vocab_size=n, special_tokens=special, limit_alphabet=180, show_progress=False))
    model = json.loads(t2.to_str())["model"]
    vocab = dict(model["vocab"])
    for c in frequent + ["▁", "▁▁", "▁▁▁▁"]:
        vocab.setdefault(c, len(vocab))
    merges = [tuple(m) for m in model["merges"]] + [("▁", "▁"), ("▁▁", "▁▁")]
    t.model = models.BPE(vocab, merges, byte_fallback=True, fuse_unk=fuse, unk_token="<unk>", **options)
    t.add_special_tokens([AddedToken(s, normalized=False) for s in special[:3]])
    return t


def llama2(n):
    t = fallback(n, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None)
    t.add_tokens([AddedToken("of light", normalized=True)])
    t.post_processor = bos(t, "<s> $A")
    return t


def mistral(n):
    t = fallback(n, None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False))
    t.post_processor = bos(t, "<s> $A </s>")
    return t


def gemma(n):
    t = fallback(n, normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"), ignore_merges=True)
    t.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("▁▁▁▁", normalized=False)])
    t.post_processor = bos(t, "<s> $A")
    return t


def unknown(n):
    """BPE with few runes: unknown ones are fused, or not, and a prefix inside of words."""
    t = Tokenizer(models.BPE(unk_token="[UNK]", fuse_unk=True))
    t.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    t.pre_tokenizer = sequence(pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation("contiguous"))
    t.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=n, special_tokens=["[UNK]"], limit_alphabet=80, show_progress=False))
    return t


def prefixed(n):
    t = Tokenizer(models.BPE(unk_token="[UNK]", fuse_unk=False, continuing_subword_prefix="##"))
    t.normalizer = normalizers.NFD()
    t.pre_tokenizer = sequence(pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("merged_with_previous"), pre_tokenizers.CharDelimiterSplit("x"))
    t.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=n, special_tokens=["[UNK]"], limit_alphabet=80, continuing_subword_prefix="##", show_progress=False))
    return t


def charsmap(rule):
    """The map of characters of a sentencepiece model, from its protobuf: field 3 (normalizer_spec), field 2."""
    import sentencepiece

    with tempfile.TemporaryDirectory() as d:
        with open(f"{d}/in", "w") as f:
            f.writelines(line.replace("\n", " ") + "\n" for line in corpus())
        sentencepiece.SentencePieceTrainer.train(input=f"{d}/in", model_prefix=f"{d}/m", vocab_size=1000, normalization_rule_name=rule, minloglevel=2, hard_vocab_limit=False)
        raw = open(f"{d}/m.model", "rb").read()

    def fields(b):
        at = 0

        def varint():
            nonlocal at
            v = shift = 0
            while True:
                x = b[at]
                at += 1
                v |= (x & 127) << shift
                shift += 7
                if x < 128:
                    return v

        while at < len(b):
            key = varint()
            if key & 7 == 2:
                n = varint()
                yield key >> 3, b[at : at + n]
                at += n
            elif key & 7 == 0:
                yield key >> 3, varint()
            else:
                size = 8 if key & 7 == 1 else 4
                yield key >> 3, b[at : at + size]
                at += size

    spec = next(v for k, v in fields(raw) if k == 3)
    return next(v for k, v in fields(spec) if k == 2)


def precompiled(rule):
    return normalizers.Precompiled(charsmap(rule))


def unigram(n, normalizer, pre, special, **options):
    t = Tokenizer(models.Unigram())
    t.normalizer, t.pre_tokenizer = normalizer, pre
    t.train_from_iterator(corpus(), trainers.UnigramTrainer(vocab_size=n, special_tokens=special, unk_token=special[0], show_progress=False))
    if options:
        model = json.loads(t.to_str())["model"]
        vocab = [tuple(v) for v in model["vocab"]] + [(f"<0x{b:02X}>", 0.0) for b in range(256)]
        t.model = models.Unigram(vocab, model["unk_id"], options["byte_fallback"])
    return t


def t5(n):
    t = unigram(n, normalizers.Sequence([precompiled("nmt_nfkc"), normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")]), pre_tokenizers.Metaspace(prepend_scheme="always"), ["<unk>", "<pad>", "</s>"])
    t.post_processor = bos(t, "$A </s>")
    return t


def albert(n):
    parts = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"'), normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(), precompiled("nmt_nfkc_cf"), normalizers.Replace(Regex(" {2,}"), " ")]
    t = unigram(n, normalizers.Sequence(parts), sequence(pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")), ["<unk>", "[CLS]", "[SEP]"])
    t.add_special_tokens([AddedToken("[MASK]", lstrip=True, normalized=False)])
    t.post_processor = bos(t, "[CLS] $A [SEP]")
    return t


def nmt(n):
    return unigram(n, normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()]), pre_tokenizers.Metaspace(prepend_scheme="first"), ["<unk>", "</s>"], byte_fallback=True)


def bert(n, **options):
    t = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    t.normalizer, t.pre_tokenizer = normalizers.BertNormalizer(**options), pre_tokenizers.BertPreTokenizer()
    t.train_from_iterator(corpus(), trainers.WordPieceTrainer(vocab_size=n, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False))
    t.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return t


def cased(n):
    return bert(n, lowercase=False, strip_accents=None)


def wordlevel(n):
    t = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    t.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()])
    t.pre_tokenizer = sequence(pre_tokenizers.Whitespace(), pre_tokenizers.Digits(), pre_tokenizers.Punctuation("merged_with_next"))
    t.train_from_iterator(corpus(), trainers.WordLevelTrainer(vocab_size=n, special_tokens=["[UNK]"], show_progress=False))
    return t


KINDS = [gpt2, roberta, llama3, qwen, o200k, deepseek, digits, thousands, clip, llama2, mistral, gemma, unknown, prefixed, t5, albert, nmt, bert, cased, wordlevel]


def ids(t, text):
    return t.encode(text).ids


def compare(name, t, texts, binary, folder):
    """The first text whose ids differ, or None."""
    path = f"{folder}/{name}.json"
    t.save(path)
    done = subprocess.run([binary, path], input="\n".join(map(json.dumps, texts)).encode(), capture_output=True)
    got = [json.loads(line) for line in done.stdout.splitlines()]
    for text, g in zip(texts, got):
        if g != ids(t, text):
            return f"{text[:300]!r}\n  go     {g[:60]}\n  python {ids(t, text)[:60]} {t.encode(text).tokens[:60]}"
    if done.returncode or len(got) != len(texts):
        return f"{len(got)} of {len(texts)} lines: {done.stderr.decode()[-500:]}"
    return None


def campaign(args):
    with tempfile.TemporaryDirectory() as folder:
        binary = f"{folder}/tokenizer-ids"
        subprocess.run(["go", "build", "-o", binary, "./scripts/tokenizer-ids"], check=True)
        failed = 0
        for kind in KINDS:
            if args.only and kind.__name__ not in args.only:
                continue
            t = kind(args.vocab)
            texts = list(lines(args.lines, args.seed))
            fault = compare(kind.__name__, t, texts, binary, folder)
            total = sum(len(ids(t, x)) for x in texts) if not fault else 0
            print(f"{kind.__name__:10} vocab {t.get_vocab_size():6}  {len(texts):6} lines  {total:9,} ids  {'DIFFERS: ' + fault if fault else 'equal'}", flush=True)
            failed += fault is not None
        sys.exit(failed > 0)


def testdata(args):
    """Small tokenizers with some lines and their ids, one gzip file for each kind."""
    os.makedirs(args.testdata, exist_ok=True)
    texts = list(lines(150, 7))
    texts = [x for x in texts if len(x) < 400]
    for kind in KINDS:
        t = kind(600)
        cases = [{"text": x, "ids": ids(t, x)} for x in texts]
        with open(f"{args.testdata}/{kind.__name__}.json.gz", "wb") as f:
            with gzip.GzipFile(fileobj=f, mode="wb", mtime=0, filename="") as z:
                z.write(json.dumps({"tokenizer": json.loads(t.to_str()), "cases": cases}, ensure_ascii=False).encode())


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--lines", type=int, default=25000)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--vocab", type=int, default=4000)
    p.add_argument("--only", nargs="*")
    p.add_argument("--testdata")
    args = p.parse_args()
    testdata(args) if args.testdata else campaign(args)
