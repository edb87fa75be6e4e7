"""Texts for tokenizer_ids.py: many scripts, code, numbers, special tokens, and what is hostile in Unicode."""

import functools
import glob
import random
import re

SAMPLES = r"""
The quick brown fox jumps over the lazy dog; it's 3.14159 o'clock, isn't it? They'll've gone, WE'RE LATE.
Ünïcödé çafé naïve façade Ångström Øresund œuvre Straße İstanbul ıspanak DŽungla ŉ ǆ ﬁnance ﬆ
Съешь же ещё этих мягких французских булок, да выпей чаю. Жълтата дюля беше щастлива.
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία· ΟΔΥΣΣΕΥΣ τέλος σίγμα
我能吞下玻璃而不伤身体。日本語のテキスト、カタカナとひらがな。한국어 문장도 있습니다. ｆｕｌｌｗｉｄｔｈ　ｔｅｘｔ１２３
أنا قادر على أكل الزجاج و هذا لا يؤلمني. אני יכול לאכול זכוכית וזה לא מזיק לי. ١٢٣٤٥
मैं काँच खा सकता हूँ और मुझे उससे कोई चोट नहीं पहुंचती. আমি কাঁচ খেতে পারি। நான் கண்ணாடி சாப்பிடுவேன்
ฉันกินกระจกได้ แต่มันไม่ทำให้ฉันเจ็บ ខ្ញុំអាចញុំកញ្ចក់បាន ကျွန်တော် မှန်စားနိုင်တယ်။ ຂ້ອຍກິນແກ້ວໄດ້
def f(x: int) -> dict[str, int]:\n    return {"a": x ** 2, 'b': [i for i in range(10) if i % 2 == 0]}\n\n\tif not x: raise ValueError(f"bad {x!r}")
#include <stdio.h>\nint main(void) { for (int i = 0; i < 0x1F; ++i) printf("%d\\n", i && ~i || i ^ 3); return 0; }
SELECT * FROM t WHERE a >= 10 AND b <> 'x''y' -- comment\n\n\n\nhttps://example.com/a?b=c&d=%20e#f user@example.org
😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ❤️ ✂︎ 1️⃣ ☺️☺ ½ ⅷ ① ㎏ ㍿ ﷺ ﷽ Ⅻ x² H₂O ℌℑ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒽𝑒𝓁𝓁𝑜 ₿ € £ ¥ § ¶ † ‡ • … — – ‑ “quotes” ‘single’ «g» ‹s›
Việt Nam: Tôi có thể ăn thủy tinh mà không hại gì. Č č Ď ď Ě ě Ň ň e\u0301 a\u0300\u0323 o\u0302\u0301 n\u0303 A\u030a \u1100\u1161\u11a8 \u0958 \u0344 \u1e9b\u0323
<|begin|> <|end|><|im_start|>user\n<pad> <s></s><unk> [UNK] [MASK] <mask> <|endoftext|> added words lonely lonelyx <eat> of light KEEP keep world peace WORLD PEACE [CLS] <0x41>
"""


@functools.cache
def base():
    unescape = lambda s: re.sub(r"\\u([0-9a-f]{4})", lambda m: chr(int(m[1], 16)), s).replace("\\n", "\n").replace("\\t", "\t")
    return [unescape(s) for s in SAMPLES.strip().split("\n")]


@functools.cache
def book():
    text = "".join(open(p, encoding="utf-8", errors="ignore").read() for p in sorted(glob.glob("examples/**/*.txt", recursive=True)))
    return [p for p in text.split("\n\n") if p.strip()]


def corpus():
    """What tokenizers are trained on: the book of the examples, the samples, and the project's own code."""
    out = list(book()[:1500]) + base() * 20
    for p in sorted(glob.glob("internal/**/*.go", recursive=True))[:60]:
        out.append(open(p, encoding="utf-8").read()[:4000])
    return out


SPACES = [" ", "  ", "    ", "\t", "\n", "\r\n", "\r", "\n\n", "\u00a0", "\u2003", "\u3000", "\u2028", "\u0085", "\u200b", "\u200d", "\u200c", "\ufeff", "\u2060", "\u180e", "\x0b", "\x0c", "\x1c", " \n ", "▁", "▁▁"]
BIDI = ["\u202a", "\u202b", "\u202c", "\u202d", "\u202e", "\u2066", "\u2067", "\u2068", "\u2069", "\u200e", "\u200f"]
SPECIAL = ["<|begin|>", "<|end|>", "<|im_start|>", "<pad>", "<s>", "</s>", "<unk>", "[MASK]", "<mask>", "<|endoftext|>", "added words", "lonely", "<eat>", "of light", "KEEP", "WORLD Peace", "world peace", "[SEP]", "<0x0A>", "<|startoftext|>", "\n\n\n", "ſ"]


def point(r):
    """A code point that is no surrogate: any plane, any state."""
    while True:
        p = r.choice([r.randrange(0x80), r.randrange(0x250), r.randrange(0x3000), r.randrange(0x10000), r.randrange(0x20000), r.randrange(0x110000), r.randrange(0xE0000, 0xE0200), r.randrange(0x1E000, 0x20000)])
        if not 0xD800 <= p < 0xE000:
            return chr(p)


def piece(r):
    kind = r.randrange(24)
    if kind < 6:
        words = r.choice(base()).split(" ")
        k = r.randrange(len(words))
        return " ".join(words[k : k + r.randrange(1, 6)])
    if kind < 9:
        p = r.choice(book())
        k = r.randrange(len(p))
        return p[k : k + r.randrange(1, 120)]
    if kind == 9:
        return "".join(point(r) for _ in range(r.randrange(1, 12)))
    if kind == 10:  # combining storm
        return r.choice("aeoAक한é\u05d0") + "".join(chr(r.choice([r.randrange(0x300, 0x370), r.randrange(0x5B0, 0x5C8), r.randrange(0x1AB0, 0x1AD0), r.randrange(0x20D0, 0x20F1), r.randrange(0x1D165, 0x1D16A), 0x345, 0x344, 0xF71, 0x3099])) for _ in range(r.randrange(1, r.choice([3, 10, 60]))))
    if kind == 11:
        return r.choice(SPECIAL)
    if kind == 12:
        return str(r.randrange(10 ** r.randrange(1, 25))) + r.choice(["", ".5", ",000", "e-7", "%", "٣٤", "½", "Ⅳ"])
    if kind == 13:  # long run
        return r.choice([" ", "\n", "a", "1", "é", "中", "!", "😀", "\u0301", "ab", " \n", "'s", "▁", "\x00", "\U0010ffff"]) * r.randrange(1, r.choice([5, 40, 300]))
    if kind == 14:
        return r.choice(BIDI) + r.choice(base())[: r.randrange(30)] + r.choice(BIDI)
    if kind == 15:  # one block
        start = r.choice([0x0, 0x80, 0x100, 0x370, 0x400, 0x590, 0x600, 0x900, 0xE00, 0x1000, 0x1100, 0x1780, 0x1E00, 0x2000, 0x2100, 0x2460, 0x3040, 0x3130, 0x3200, 0x3300, 0xA640, 0xAC00, 0xF900, 0xFB00, 0xFE00, 0xFF00, 0x10400, 0x11000, 0x16E40, 0x1D400, 0x1E900, 0x1F100, 0x1F300, 0x2F800, 0xE0000])
        return "".join(chr(start + r.randrange(0x80)) for _ in range(r.randrange(1, 20)))
    if kind == 16:
        return r.choice(["'", "’", "'"]) + r.choice(["s", "S", "ſ", "t", "re", "RE", "vE", "m", "ll", "LL", "d", "K", "\u212a", "x"]) + r.choice(["", "a", " "])
    if kind == 17:  # letters of many cases
        return "".join(r.choice("aAbBǅǈİıſßẞΣσςʼnŉﬀﬃﬆÅÅΩΩkK\u212a") for _ in range(r.randrange(1, 15)))
    if kind == 18:  # hangul
        return "".join(chr(r.choice([r.randrange(0x1100, 0x1200), r.randrange(0xAC00, 0xD7FF), r.randrange(0xA960, 0xA97D)])) for _ in range(r.randrange(1, 8)))
    if kind == 19:
        return "".join(r.choice("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¡¿§«»、。「」・！？“”") for _ in range(r.randrange(1, 12)))
    if kind == 20:
        return r.choice(["\ufffd", "\ufffe", "\uffff", "\U0001ffff", "\ufdd0", "\x00", "\x7f", "\x80", "\x9f", "\ue000", "\U000f0000", "\u0378", "\U000e0001", "\U000e0041", "\ufe0f", "\U0001f1e6"]) * r.randrange(1, 4)
    if kind == 21:
        p = r.choice(base())
        return p[r.randrange(len(p)) :]
    return r.choice(SPACES) * r.choice([1, 1, 1, 2, 7])


def lines(n, seed):
    r = random.Random(seed)
    yield ""
    yield from base()
    # Every rune once, 64 at a time, so that no class is left out.
    if n > 10000:
        points = [p for p in range(0x110000) if not 0xD800 <= p < 0xE000]
        for at in range(0, 0x30000, 64):
            yield "a".join(map(chr, points[at : at + 64]))
            yield " ".join(map(chr, points[at : at + 64]))
        for at in range(0x30000, len(points), 4096):
            yield "".join(map(chr, points[at : at + 4096]))
    for _ in range(n):
        glue = r.choice(["", " ", None])
        parts = [piece(r) for _ in range(r.choice([1, 1, 2, 3, 5, 9]))]
        yield "".join(p + (r.choice(SPACES) if glue is None else glue) for p in parts)
