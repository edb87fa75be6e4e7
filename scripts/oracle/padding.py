"""Writes small models whose text contains the token of pad_token_id, with the loss curve of plain PyTorch training.

Usage: python scripts/oracle/padding.py internal/model/testdata/padding
Needs torch and transformers; the versions are in the output. The files are those of families.py. Token 0 is frequent
in the text.
"""

import pathlib
import sys

import families

COMMON = {**families.COMMON, "pad_token_id": 0, "num_hidden_layers": 1}
GEMMA = {**families.GEMMA, "pad_token_id": 0, "num_hidden_layers": 1, "layer_types": ["full_attention"]}

families.FAMILIES = {
    "llama": (families.LlamaForCausalLM, families.LlamaConfig(**COMMON), families.RUN),
    "gemma2-tied": (families.Gemma2ForCausalLM, families.Gemma2Config(
        **GEMMA, query_pre_attn_scalar=20, rope_parameters=families.PLAIN), families.RUN),
}
families.STEPS = 6

if __name__ == "__main__":
    families.main(pathlib.Path(sys.argv[1]), [])
