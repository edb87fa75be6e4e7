"""One peer of scripts/peer/cpu.py: `cpu_peer.py product|attention|train THREADS` prints rates as one line of JSON."""
import ctypes
import ctypes.util
import json
import statistics
import sys
import time

from cpu import DIMS, SEQS, SQUARES


def median(f, least=0.5, runs=5):
    """Median seconds of f after a first run, over at least so many runs and seconds."""
    f()
    times, began = [], time.perf_counter()
    while len(times) < runs or time.perf_counter() - began < least:
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def product(_):
    """OpenBLAS: the forms of a layer's three products, y = x w', dx = dy w, dw = dy' x."""
    import numpy as np

    lib = ctypes.CDLL(ctypes.util.find_library("openblas") or "libopenblas.so.0")
    lib.openblas_set_num_threads(1)
    one, row, no, yes, rates = ctypes.c_float(1), 101, 111, 112, {}
    for n in SQUARES:
        a, b, c = (np.random.randn(n, n).astype(np.float32) for _ in range(3))
        pa, pb, pc = (x.ctypes.data_as(ctypes.c_void_p) for x in (a, b, c))
        for name, ta, tb in (("forward", no, yes), ("dx", no, no), ("dw", yes, no)):
            seconds = median(lambda: lib.cblas_sgemm(row, ta, tb, n, n, n, one, pa, n, pb, n, one, pc, n))
            rates[f"product {n} {name}"] = 2 * n**3 / seconds / 1e9
    return rates


def attention(threads):
    """PyTorch: causal, 8 query heads over 2 KV heads."""
    import torch

    torch.set_num_threads(threads)
    rates = {}
    for s in SEQS:
        for d in DIMS:
            q, k, v = (torch.randn(1, h, s, d, requires_grad=True) for h in (8, 2, 2))
            grad, flop = torch.randn(1, 8, s, d), 2 * 8 * d * s * (s + 1) / 2
            run = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            out = run()
            rates[f"attention forward {s} d {d}"] = 2 * flop / median(run) / 1e9
            rates[f"attention backward {s} d {d}"] = 5 * flop / median(lambda: out.backward(grad, retain_graph=True)) / 1e9
    return rates


def train(threads):
    """PyTorch: the better of eager and compiled steps of transformers' llama, AdamW and clipping."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    shapes = {
        "opticks": (1024, dict(vocab_size=256, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
                               num_key_value_heads=2, tie_word_embeddings=True)),
        "llama-60m": (1024, dict(vocab_size=32000, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8,
                                 num_key_value_heads=8, tie_word_embeddings=False)),
    }
    rates = {}
    for name, (seq, shape) in shapes.items():
        best = 0
        for compiled in (False, True):
            torch.manual_seed(1)
            model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=4096, **shape))
            run = torch.compile(model) if compiled else model
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
            ids = torch.randint(0, shape["vocab_size"], (1, seq))

            def step():
                optimizer.zero_grad()
                run(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

            best = max(best, seq / median(step, runs=8))
        rates[f"step {name}"] = best
    return rates


if __name__ == "__main__":
    print(json.dumps({"product": product, "attention": attention, "train": train}[sys.argv[1]](int(sys.argv[2]))))
