"""Writes the Unicode tables that internal/text/tokenizer reads, as the Python library `tokenizers` has them.

The library mixes several versions of Unicode: Oniguruma's, Rust's, and two older crates'. Ids are only the same where each
class is the one that the library uses, so every class is asked of the library itself, code point by code point.

  pip install tokenizers==0.23.3
  python scripts/oracle/tokenizer_tables.py internal/text/tokenizer/unicode.txt
"""

import sys

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

POINTS = [p for p in range(0x110000) if not 0xD800 <= p < 0xE000]
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co".split()
SCRIPTS = "Han Hiragana Katakana Hangul Latin Greek Cyrillic Arabic Hebrew Thai Lao Khmer Myanmar Devanagari Bengali Tamil Common Inherited".split()


def matched(split):
    """The code points that a pre-tokenizer cuts out of a text of all of them."""
    found = []
    for at in range(0, len(POINTS), 4096):
        chunk = POINTS[at : at + 4096]
        for piece, _ in split.pre_tokenize_str("".join(map(chr, chunk))):
            found += map(ord, piece)
    return sorted(found)


def regex(pattern):
    return matched(pre_tokenizers.Split(Regex(pattern), "removed", invert=True))


def each(f):
    return [p for p in POINTS if f(chr(p))]


def ranges(points):
    out = []
    for p in points:
        if out and out[-1][1] == p - 1:
            out[-1][1] = p
        else:
            out.append([p, p])
    return " ".join(f"{a:x}" if a == b else f"{a:x}-{b:x}" for a, b in out)


def main(path):
    lines = [f"# Made by scripts/oracle/tokenizer_tables.py with tokenizers {tokenizers.__version__}."]
    put = lambda name, points: lines.append(f"{name} {ranges(points)}")
    for c in CATEGORIES:
        put(c, regex(rf"\p{{{c}}}"))
    for s in SCRIPTS:
        put(s, regex(rf"\p{{{s}}}"))
    put("word", regex(r"\w"))
    put("rust_word", [ord(c) for c in (chr(p) for p in POINTS) if len(pre_tokenizers.Whitespace().pre_tokenize_str("a" + c)) == 1 and pre_tokenizers.Whitespace().pre_tokenize_str("a" + c)[0][0] == "a" + c])
    digits = pre_tokenizers.Digits(individual_digits=True)
    put("rust_numeric", each(lambda c: len(digits.pre_tokenize_str(c + "a")) == 2))
    punctuation = pre_tokenizers.Punctuation("removed")
    put("punctuation", each(lambda c: punctuation.pre_tokenize_str(c) == []))
    put("mark", each(lambda c: normalizers.StripAccents().normalize_str(c) == ""))
    bert = dict(clean_text=False, handle_chinese_chars=False, strip_accents=False, lowercase=False)
    clean = normalizers.BertNormalizer(**{**bert, "clean_text": True})
    put("bert_control", each(lambda c: clean.normalize_str(c) == ""))
    strip = normalizers.BertNormalizer(**{**bert, "strip_accents": True})
    put("bert_accent", each(lambda c: normalizers.NFD().normalize_str(c) == c and strip.normalize_str(c) == ""))
    # What the library's normalization leaves as it is: in a newer Unicode some of these would change.
    nfkd, reorder = normalizers.NFKD(), [chr(0x334), chr(0x345)]  # classes 1 and 240
    still = lambda c: nfkd.normalize_str(c) == c and all(nfkd.normalize_str(a + b) == a + b for a, b in ((c, reorder[0]), (reorder[1], c)))
    parts = {part for p in POINTS for part in nfkd.normalize_str(chr(p)) if nfkd.normalize_str(chr(p)) != chr(p)}
    put("active", each(lambda c: not still(c) or c in reorder or c in parts))
    lower = normalizers.Lowercase()
    lines.append("lower " + " ".join(f"{p:x}:" + ",".join(f"{ord(c):x}" for c in lower.normalize_str(chr(p))) for p in POINTS if lower.normalize_str(chr(p)) != chr(p)))
    with open(path, "w") as f:
        f.write("\n".join(lines) + "\n")


main(sys.argv[1])
