"""The operators in plain torch, for CPU and CUDA."""

from worker_agent.moe.operators.reference.distribute import (
    npu_moe_distribute_combine_v2,
    npu_moe_distribute_dispatch_v2,
)
from worker_agent.moe.operators.reference.local import (
    npu_dynamic_quant,
    npu_grouped_matmul,
    npu_moe_init_routing_v2,
    npu_moe_token_permute,
    npu_moe_token_unpermute,
    npu_swiglu,
)

__all__ = [
    "npu_dynamic_quant",
    "npu_grouped_matmul",
    "npu_moe_distribute_combine_v2",
    "npu_moe_distribute_dispatch_v2",
    "npu_moe_init_routing_v2",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
    "npu_swiglu",
]
