"""Writes rotary frequencies and tables as Hugging Face transformers computes them.

Usage: python scripts/oracle/rope.py > internal/model/testdata/rope.json
Needs torch and transformers (pip install torch transformers); the versions are in the output.
"""

import json

import torch
import transformers
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

POSITIONS = [0, 1, 2, 3, 17, 127, 1000, 4095, 8192, 32767, 131071, 524288, 1048575]

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)

# name: (head_dim, rope_theta, max_position_embeddings, scaling)
CASES = {
    "default-10k": (64, 10000.0, 4096, dict(rope_type="default")),
    "default-500k": (128, 500000.0, 8192, dict(rope_type="default")),
    "default-1m-dim80": (80, 1000000.0, 8192, dict(rope_type="default")),
    "linear-4": (64, 10000.0, 16384, dict(rope_type="linear", factor=4.0)),
    "linear-2.7": (32, 10000.0, 16384, dict(rope_type="linear", factor=2.7)),
    "llama3-8": (128, 500000.0, 131072, LLAMA3),
    "llama3-32-dim64": (64, 500000.0, 131072, dict(LLAMA3, factor=32.0)),
    "llama3-odd": (32, 10000.0, 4096, dict(rope_type="llama3", factor=3.5, low_freq_factor=1.3,
                                          high_freq_factor=5.5, original_max_position_embeddings=1000)),
    "yarn-4": (128, 1000000.0, 131072, dict(rope_type="yarn", factor=4.0,
                                            original_max_position_embeddings=32768)),
    "yarn-betas": (64, 10000.0, 65536, dict(rope_type="yarn", factor=16.0, beta_fast=16.0, beta_slow=2.0,
                                            original_max_position_embeddings=4096)),
    "yarn-attention-factor": (64, 10000.0, 65536, dict(rope_type="yarn", factor=16.0, attention_factor=1.5,
                                                       original_max_position_embeddings=4096)),
    "yarn-mscale": (64, 10000.0, 163840, dict(rope_type="yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.707,
                                              original_max_position_embeddings=4096)),
    "yarn-no-truncate": (64, 150000.0, 131072, dict(rope_type="yarn", factor=32.0, truncate=False,
                                                    original_max_position_embeddings=4096)),
    "yarn-factor-1": (16, 10000.0, 64, dict(rope_type="yarn", factor=1.0, mscale=1.0, mscale_all_dim=0.5,
                                            original_max_position_embeddings=64)),
    "yarn-no-ramp": (16, 10000.0, 8, dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=4)),
    "longrope": (16, 10000.0, 131072, dict(rope_type="longrope", original_max_position_embeddings=4096,
                                           short_factor=[1.0, 1.05, 1.1, 1.3, 1.7, 2.0, 2.2, 2.8],
                                           long_factor=[1.08, 1.5, 2.25, 4.0, 9.1, 20.0, 47.3, 64.5])),
    "longrope-factor": (12, 500000.0, 8192, dict(rope_type="longrope", original_max_position_embeddings=1000,
                                                 factor=12.0, short_factor=[1.0, 1.3, 1.1, 2.0, 2.2, 2.8],
                                                 long_factor=[1.08, 1.5, 4.0, 9.1, 47.3, 64.5])),
    "longrope-attention": (8, 10000.0, 8192, dict(rope_type="longrope", original_max_position_embeddings=4096,
                                                  attention_factor=1.25, short_factor=[1.0, 1.3, 1.1, 2.0],
                                                  long_factor=[1.08, 1.5, 4.0, 9.1])),
    "partial": (16, 10000.0, 4096, dict(rope_type="default", partial_rotary_factor=0.75)),
    "partial-longrope": (20, 10000.0, 16384, dict(rope_type="longrope", original_max_position_embeddings=4096,
                                                  partial_rotary_factor=0.4, short_factor=[1.0, 1.3, 1.1, 2.0],
                                                  long_factor=[1.08, 1.5, 4.0, 9.1])),
    "yarn-short": (16, 10000.0, 256, dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
}


def case(head_dim, theta, longest, scaling):
    shape = dict(hidden_size=4 * head_dim, num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim,
                 max_position_embeddings=longest, rope_parameters=dict(scaling, rope_theta=theta))
    trained = scaling.get("original_max_position_embeddings", longest)
    if "partial_rotary_factor" in scaling:
        rope = Phi3RotaryEmbedding(Phi3Config(**shape, original_max_position_embeddings=trained, pad_token_id=None))
    else:
        rope = LlamaRotaryEmbedding(LlamaConfig(**shape))
    short = rope.inv_freq.tolist()
    cos, sin = rope(torch.zeros(1, dtype=torch.float32), torch.tensor([POSITIONS]))
    half = len(short)
    return {
        "head_dim": head_dim,
        "rope_theta": theta,
        "max_position_embeddings": longest,
        "partial_rotary_factor": scaling.get("partial_rotary_factor", 0),
        "rope_scaling": {k: v for k, v in scaling.items() if k != "partial_rotary_factor"},
        "attention_factor": float(rope.attention_scaling),
        "short_inv_freq": short,
        "inv_freq": rope.inv_freq.tolist(),
        "cos": cos[0, :, :half].tolist(),
        "sin": sin[0, :, :half].tolist(),
    }


def short(x):
    """Nine digits are enough to tell one float32 from the next."""
    if isinstance(x, float):
        return float(f"{x:.9g}")
    if isinstance(x, list):
        return [short(e) for e in x]
    if isinstance(x, dict):
        return {k: short(v) for k, v in x.items()}
    return x


print(json.dumps({
    "torch": torch.__version__,
    "transformers": transformers.__version__,
    "positions": POSITIONS,
    "cases": short({name: case(*c) for name, c in CASES.items()}),
}))
