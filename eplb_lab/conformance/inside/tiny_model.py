"""Writes a small random Qwen3-MoE checkpoint: ``python -m eplb_lab.conformance.inside.tiny_model FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

VOCABULARY = 512


def write_tiny_model(folder: Path) -> None:
    """Write a checkpoint with 3 layers of 8 experts. Needs transformers."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        # Blocks of quantised weights have 128 rows and columns.
        moe_intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[],
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                # Large weights make every expert affect the answers, and spread the routers' scores.
                parameter.normal_(0, 0.5 if name.endswith("gate.weight") else 0.08)
    model.save_pretrained(folder, safe_serialization=True)


if __name__ == "__main__":
    write_tiny_model(Path(sys.argv[1]))
