"""Writes a small Gemma 4 of text and images, to train in cprun and to compare its exports in transformers and peft.

Usage: python scripts/oracle/composite.py DIR
       python scripts/oracle/lora.py --check DIR ADAPTER MERGED
Needs torch and transformers. The text is that of families.py. ADAPTER and MERGED are exports of a run with LoRA from DIR.
"""

import pathlib
import shutil
import sys

import torch
from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4VisionConfig

import families


def main(out):
    torch.manual_seed(2026)
    text = {**families.FAMILIES["gemma4_text"][1].to_dict(), "pad_token_id": 0}  # which it puts in place of images
    vision = Gemma4VisionConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                                num_key_value_heads=2, head_dim=8, position_embedding_size=16)
    config = Gemma4Config(text_config=text, vision_config=vision.to_dict(), audio_config=None)
    model = Gemma4ForConditionalGeneration(config).float()
    families.randomise(model.model.language_model)
    model.bfloat16().save_pretrained(out)
    shutil.copy("internal/model/testdata/families/gemma4_text/tokens.bin", out)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
