"""The example's training step in PyTorch on the CPU, for a ratio to cprun's.

    python scripts/oracle/peer.py [threads]

prints tokens/s of the model of examples/opticks.yaml (float32, eager, SDPA attention, AdamW,
clipping), batch 1 of 1024 tokens, and the time of one causal attention, forward and backward.
"""
import statistics
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

threads = int(sys.argv[1]) if len(sys.argv) > 1 else 2
torch.set_num_threads(threads)
torch.manual_seed(1)


def median(f, runs=15):
    for _ in range(3):
        f()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


config = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=4096,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
seq = 1024
ids = torch.randint(0, 256, (1, seq))


def step():
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


print(f"torch {torch.__version__}, {threads} threads")
print(f"training step: {seq / median(step):,.0f} tokens/s")

for dim in (32, 64):
    q = torch.randn(1, 8, seq, dim, requires_grad=True)
    k = torch.randn(1, 2, seq, dim, requires_grad=True)
    v = torch.randn(1, 2, seq, dim, requires_grad=True)
    dout = torch.randn(1, 8, seq, dim)

    def attention(backward):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if backward:
            out.backward(dout)

    flops = 4 * seq * seq / 2 * 8 * dim
    fwd, both = median(lambda: attention(False)), median(lambda: attention(True))
    print(f"attention S={seq} 8:2 heads dim {dim}: forward {flops / fwd / 1e9:.1f}, both {3.5 * flops / both / 1e9:.1f} GFLOP/s")
