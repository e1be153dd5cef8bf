"""Writes a tiny random Qwen3-MoE checkpoint (3 layers, 8 experts, top-2) to the folder named; run in an engine."""

import sys

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    decoder_sparse_step=1,
    max_position_embeddings=512,
    norm_topk_prob=True,
    mlp_only_layers=[],
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            # Routers with a wide spread, so that some experts are far more popular than others.
            parameter.normal_(0, 0.5 if "gate.weight" in name else 0.08)
model.save_pretrained(sys.argv[1], safe_serialization=True)
