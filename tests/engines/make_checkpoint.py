"""Write a tiny random checkpoint (3 layers, 8 experts) to a directory. Runs in an engine's environment.

``python make_checkpoint.py FOLDER [llama4|many]`` writes a Qwen3-MoE with top-2 routing, a Llama 4 with top-1 routing,
or a Qwen3-MoE with 4 layers, 32 experts and top-4 routing, whose expert popularity differs between layers.
"""

import sys

import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

torch.manual_seed(0)
shared = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "max_position_embeddings": 512}
shared |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
shared |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}
if "llama4" in sys.argv:
    sizes = {"intermediate_size": 64, "intermediate_size_mlp": 256, "num_local_experts": 8}
    whole_attention = {"no_rope_layers": [0] * 3, "attn_temperature_tuning": False}
    config = Llama4TextConfig(**shared, **sizes, **whole_attention, num_experts_per_tok=1)
    model = Llama4ForCausalLM(config)
else:
    experts, choices = (32, 4) if "many" in sys.argv else (8, 2)
    if "many" in sys.argv:
        shared |= {"num_hidden_layers": 4, "num_key_value_heads": 4}
    sizes = {"intermediate_size": 256, "moe_intermediate_size": 64, "num_experts": experts}
    config = Qwen3MoeConfig(
        **shared, **sizes, num_experts_per_tok=choices, norm_topk_prob=True, mlp_only_layers=[]
    )
    model = Qwen3MoeForCausalLM(config)
with torch.no_grad():
    for name, parameter in model.to(torch.bfloat16).named_parameters():
        if "norm" not in name:
            # Spread the router weights widely, so that some experts are far more popular than others.
            router = name.endswith(("gate.weight", "router.weight"))
            parameter.normal_(0, 0.5 if router else 0.08)
model.save_pretrained(sys.argv[1], safe_serialization=True)
