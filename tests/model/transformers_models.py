"""Tiny transformers models with random weights, saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "max_position_embeddings": 64,
}
QWEN = {"num_key_value_heads": 1, "head_dim": 8, "num_experts": 8, "mlp_only_layers": [1]}
DEEPSEEK = {
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "routed_scaling_factor": 1.5,
}
GROUPED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
MODELS = {
    "qwen3": ("Qwen3Moe", QWEN | {"norm_topk_prob": True}),
    "qwen3 not renormalised": ("Qwen3Moe", QWEN | {"norm_topk_prob": False, "tie_word_embeddings": True}),
    "deepseek": ("DeepseekV2", DEEPSEEK | GROUPED),
    "deepseek without groups": ("DeepseekV2", DEEPSEEK | {"topk_method": "greedy"}),
}


def write_checkpoint(folder: Path, name: str, **more: Any) -> Path:
    """Write random weights to one or more files, split as transformers splits them."""
    transformers = pytest.importorskip("transformers")
    family, sizes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**(SIZES | sizes | more))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        for gate in (block.mlp.gate for block in model.model.layers if hasattr(block.mlp, "gate")):
            # Router weights are initialised to zero, so all experts would tie for every token.
            torch.nn.init.normal_(gate.weight)
    model.save_pretrained(folder, max_shard_size="8KB")
    return folder
