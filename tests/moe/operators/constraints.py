"""What torch_npu 2.13 documents of its operators beyond their schemas, as checks of each call of a 16-bit layer.

``docs/operators.md`` lists them, and that (un)permute is called in float16 where bfloat16 alone is documented. A
checked operator behaves as the reference, after an assertion about its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from worker_agent.moe.operators import GroupListType, QuantMode, reference

BF16, FP16 = torch.bfloat16, torch.float16
SCALES = {BF16: BF16, FP16: torch.float32}
BIASES = {BF16: torch.float32, FP16: FP16}
INDICES = (torch.int32, torch.int64)


def permute(tokens: torch.Tensor, indices: torch.Tensor, *_: Any, **__: Any) -> None:
    assert tokens.dtype in (BF16, FP16), f"tokens are bfloat16, got {tokens.dtype}"
    assert tokens.numel(), "tokens are not empty"
    assert indices.ndim == 2, "indices are [T, K]"
    assert indices.dtype == torch.int64, f"indices are int64, got {indices.dtype}"


def unpermute(
    permuted_tokens: torch.Tensor, sorted_indices: torch.Tensor, probs: torch.Tensor | None = None
) -> None:
    assert permuted_tokens.dtype in (BF16, FP16), f"rows are bfloat16, got {permuted_tokens.dtype}"
    assert permuted_tokens.numel(), "rows are not empty"
    assert sorted_indices.dtype in INDICES
    assert sorted_indices.ndim == 1
    assert probs is None or probs.dtype == permuted_tokens.dtype, f"probs are of the rows' dtype, got {probs}"


def init_routing(x: torch.Tensor, expert_idx: torch.Tensor, **more: Any) -> None:
    assert x.dtype in (FP16, BF16, torch.float32, torch.int8)
    assert x.numel(), "tokens are not empty"
    assert expert_idx.ndim == 2
    assert expert_idx.dtype == torch.int32, f"expert_idx is int32, got {expert_idx.dtype}"
    assert int(expert_idx.max()) < more["expert_num"], "ids are below expert_num"
    assert more["active_expert_range"][1] <= more["expert_num"]
    assert x.dtype != torch.int8 or more["quant_mode"] == QuantMode.NONE, "int8 is not quantized again"
    assert more["scale"] is None or more["scale"].dtype == torch.float32


def grouped_matmul(x: list[torch.Tensor], weight: list[torch.Tensor], **more: Any) -> None:
    assert x[0].numel(), "rows are not empty"
    assert x[0].is_contiguous(), "x is not transposed"
    assert weight[0].ndim == 3
    assert more["split_item"] in (2, 3)
    assert more["group_list"].dtype == torch.int64
    if more["group_list_type"] == GroupListType.COUNTS:
        assert more["group_list"].shape[0] > 1, "a list of counts is longer than one"
    if x[0].dtype == torch.int8:
        assert weight[0].dtype == torch.int8
        assert more["output_dtype"] in SCALES
        assert more["scale"][0].dtype == SCALES[more["output_dtype"]], "scales fit the output"
        assert more["per_token_scale"][0].dtype == torch.float32
        assert "bias" not in more, "biases of int8 rows are int32, before scaling"
    else:
        assert x[0].dtype == weight[0].dtype
        assert x[0].dtype in BIASES
    if "bias" in more:
        groups, columns = weight[0].shape[0], weight[0].shape[2]
        assert more["bias"][0].shape == (groups, columns), "a bias for each column of each group"
        assert more["bias"][0].dtype == BIASES[x[0].dtype], "biases fit the rows"


def dynamic_quant(input: torch.Tensor) -> None:
    assert input.dtype in (FP16, BF16), f"the input is float16 or bfloat16, got {input.dtype}"
    assert input.ndim > 1
    assert input.numel(), "the input is not empty"


def distribute(x: torch.Tensor, expert_ids: torch.Tensor, *_: Any, **more: Any) -> None:
    assert x.dtype in (FP16, BF16), f"rows are float16 or bfloat16, got {x.dtype}"
    assert expert_ids.dtype == torch.int32
    assert expert_ids.shape[0] >= 1, "every rank has a token"
    mask = more.get("x_active_mask")
    if mask is not None:
        # What is masked is not sent, whatever its id.
        active_TK = mask if mask.ndim == 2 else mask.unsqueeze(1)
        expert_ids = torch.where(active_TK, expert_ids, -1 - torch.arange(expert_ids.shape[1]))
    sorted_TK = expert_ids.sort(dim=1).values
    assert (sorted_TK.diff(dim=1) > 0).all(), "the experts of a token are distinct"
    scales = more.get("expert_scales")
    assert scales is None or scales.dtype == torch.float32


CHECKS: dict[str, Callable[..., None]] = {
    "npu_moe_token_permute": permute,
    "npu_moe_token_unpermute": unpermute,
    "npu_moe_init_routing_v2": init_routing,
    "npu_grouped_matmul": grouped_matmul,
    "npu_dynamic_quant": dynamic_quant,
    "npu_swiglu": lambda input, dim=-1: None,
    "npu_moe_distribute_dispatch": distribute,
    "npu_moe_distribute_dispatch_v2": distribute,
    "npu_moe_distribute_combine": distribute,
    "npu_moe_distribute_combine_v2": distribute,
}


def checked(behind: Any = reference) -> tuple[SimpleNamespace, set[str]]:
    """The operators ``behind``, each call checked first, and the names of those that were called."""
    called: set[str] = set()

    def watch(name: str) -> Callable[..., Any]:
        operator = getattr(behind, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            CHECKS[name](*args, **kwargs)
            return operator(*args, **kwargs)

        return call

    return SimpleNamespace(**{name: watch(name) for name in CHECKS}), called
