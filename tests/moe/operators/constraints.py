"""Checks of the constraints that torch_npu 2.13 documents for its operators in addition to their schemas.

The checks apply to each call of a 16-bit layer. ``docs/research/operators.md`` lists the constraints and one exception:
permute and unpermute are also called in float16, although only bfloat16 is documented. A checked operator asserts that
its arguments are allowed and then runs the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from eplb_lab.layer.operators import GroupListType, QuantMode, reference
from tests.moe.torch_npu.calls import form_of

BF16 = torch.bfloat16
FP16 = torch.float16
SCALES = {BF16: BF16, FP16: torch.float32}
BIASES = {BF16: torch.float32, FP16: FP16}
INDICES = (torch.int32, torch.int64)
MOST_INDEX = 16777215


def matrix(rows: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Check that ``rows`` is a non-empty matrix of one of these dtypes."""
    assert rows.dtype in dtypes, f"rows must have one of the dtypes {dtypes}, got {rows.dtype}"
    assert rows.ndim == 2, f"rows must have the shape [N, H], got {list(rows.shape)}"
    assert rows.numel(), "rows must not be empty"


def permute(tokens: torch.Tensor, indices: torch.Tensor, *_: Any, **__: Any) -> None:
    matrix(tokens, BF16, FP16)
    assert indices.ndim == 2, "indices must have the shape [T, K]"
    assert indices.dtype == torch.int64, f"indices must be int64, got {indices.dtype}"
    assert 0 <= int(indices.min()) <= int(indices.max()) < MOST_INDEX, "indices must fit into 24 bits"
    assert indices.numel() < MOST_INDEX, "the number of indices must fit into 24 bits"
    assert indices.shape[1] <= 512, "a token can have at most 512 choices"


def unpermute(
    permuted_tokens: torch.Tensor, sorted_indices: torch.Tensor, probs: torch.Tensor | None = None
) -> None:
    matrix(permuted_tokens, BF16, FP16)
    assert sorted_indices.dtype in INDICES, "indices must be integers"
    assert sorted_indices.shape == permuted_tokens.shape[:1], (
        "indices must have the shape [T * K], with one row each"
    )
    assert probs is None or probs.dtype == permuted_tokens.dtype, (
        f"probs must have the dtype of the rows, got {probs}"
    )


def init_routing(x: torch.Tensor, expert_idx: torch.Tensor, **more: Any) -> None:
    matrix(x, FP16, BF16, torch.float32, torch.int8)
    assert expert_idx.ndim == 2, "expert_idx must have the shape [T, K]"
    assert expert_idx.dtype == torch.int32, f"expert_idx must be int32, got {expert_idx.dtype}"
    assert 0 < more["expert_num"] <= 10240, "expert_num must be 1 to 10240"
    assert int(expert_idx.max()) < more["expert_num"], "ids must be below expert_num"
    first, end = more["active_expert_range"]
    assert 0 <= first <= end <= more["expert_num"], "the active range must be within expert_num"
    assert more["expert_tokens_num_type"] == GroupListType.COUNTS, "the group list must contain counts"
    assert more["expert_tokens_num_flag"], "counts must be returned"
    assert more["quant_mode"] in (QuantMode.NONE, QuantMode.DYNAMIC), "quantisation must be dynamic or none"
    assert more["active_num"] >= -1, "active_num must be at least -1"
    quantizes = more["quant_mode"] == QuantMode.DYNAMIC
    assert x.dtype != torch.int8 or not quantizes, "int8 rows must not be quantised again"
    scale = more.get("scale")
    if scale is not None:
        assert scale.dtype == torch.float32, f"scales must be float32, got {scale.dtype}"
        width = (end - first, x.shape[1]) if quantizes else (x.shape[0],)
        assert tuple(scale.shape) == width, (
            "there must be one scale per token, or per value of each active expert"
        )


def grouped_matmul(x: list[torch.Tensor], weight: list[torch.Tensor], **more: Any) -> None:
    rows_NK = x[0]
    weight_GKM = weight[0]
    matrix(rows_NK, FP16, BF16, torch.int8)
    assert rows_NK.is_contiguous(), "x must not be transposed"
    assert weight_GKM.ndim == 3, "weights must have the shape [G, K, M]"
    # For a transposed weight, the constraint applies to the axis that is last in memory.
    inner = weight_GKM.shape[2] if weight_GKM.is_contiguous() else weight_GKM.shape[1]
    assert max(rows_NK.shape[1], inner) < 65536, "inner axes must be shorter than 65536"
    assert more["split_item"] in (2, 3), "there must be a single result"
    assert more["group_type"] == 0, "the rows must be grouped"
    _group_list(more["group_list"], more["group_list_type"], rows_NK.shape[0], weight_GKM.shape[0])
    if rows_NK.dtype == torch.int8:
        assert weight_GKM.dtype == torch.int8, "weights for int8 rows must be int8"
        assert more["output_dtype"] in SCALES, "the output must have 16 bits"
        assert more["scale"][0].dtype == SCALES[more["output_dtype"]], (
            "scales must have the dtype that the output requires"
        )
        assert more["per_token_scale"][0].dtype == torch.float32, "scales of rows must be float32"
        assert more["per_token_scale"][0].shape == rows_NK.shape[:1], "each row must have a scale"
        assert "bias" not in more, "int8 rows must have no bias, because it would be added before scaling"
    else:
        assert rows_NK.dtype == weight_GKM.dtype, "rows and weights must have the same dtype"
    if "bias" in more:
        groups = weight_GKM.shape[0]
        columns = weight_GKM.shape[2]
        assert more["bias"][0].shape == (groups, columns), "there must be one bias per column of each group"
        assert more["bias"][0].dtype == BIASES[rows_NK.dtype], (
            "biases must have the dtype that the rows require"
        )


def _group_list(group_list_G: torch.Tensor, kind: int, rows: int, groups: int) -> None:
    assert group_list_G.dtype == torch.int64, "the group list must be int64"
    assert group_list_G.shape == (groups,), "the group list must have one number per group"
    counts_G = group_list_G
    if kind == GroupListType.COUNTS:
        assert groups > 1, "a list of counts must have more than one element"
    else:
        counts_G = group_list_G.diff(prepend=group_list_G.new_zeros(1))
    assert int(counts_G.min()) >= 0, "a group cannot have a negative number of rows"
    assert int(counts_G.sum()) <= rows, "the groups cannot have more rows than the input"


def dynamic_quant(input: torch.Tensor) -> None:
    matrix(input, FP16, BF16)


def swiglu(input: torch.Tensor, dim: int = -1) -> None:
    matrix(input, FP16, BF16, torch.float32)
    assert input.shape[dim] % 2 == 0, "the split axis must have an even length"


def distribute(x: torch.Tensor, expert_ids: torch.Tensor, *place: Any, **more: Any) -> None:
    matrix(x, FP16, BF16)
    assert expert_ids.dtype == torch.int32, f"expert_ids must be int32, got {expert_ids.dtype}"
    assert 1 <= expert_ids.shape[0] <= 512, "every rank must have 1 to 512 tokens"
    assert place[-4] in ("mc2", ""), f"the operators need a separate communication domain, got {place[-4]!r}"
    assert more.get("group_tp") or x.shape[1] % 32 == 0, "the hidden size must be a multiple of 32 on A2"
    experts = place[-1]
    assert 0 <= int(expert_ids.min()) <= int(expert_ids.max()) < experts, "ids must be expert ids"
    assert expert_ids.shape[1] <= min(16, experts), (
        "a token can have at most 16 choices, and not more than there are experts"
    )
    mask = more.get("x_active_mask")
    if mask is not None:
        assert mask.dtype == torch.bool, "the mask must be bool"
        assert mask.shape in (expert_ids.shape, expert_ids.shape[:1]), (
            "the mask must have one value per token or per choice"
        )
        # A masked choice is not sent, so its id does not matter.
        active_TK = mask if mask.ndim == 2 else mask.unsqueeze(1)
        expert_ids = torch.where(active_TK, expert_ids, -1 - torch.arange(expert_ids.shape[1]))
    sorted_TK = expert_ids.sort(dim=1).values
    assert (sorted_TK.diff(dim=1) > 0).all(), "the experts of a token must be distinct"
    scales = more.get("expert_scales")
    assert scales is None or scales.dtype == torch.float32, "weights must be float32"


CHECKS: dict[str, Callable[..., None]] = {
    "npu_moe_token_permute": permute,
    "npu_moe_token_unpermute": unpermute,
    "npu_moe_init_routing_v2": init_routing,
    "npu_grouped_matmul": grouped_matmul,
    "npu_dynamic_quant": dynamic_quant,
    "npu_swiglu": swiglu,
    "npu_moe_distribute_dispatch_v2": distribute,
    "npu_moe_distribute_combine_v2": distribute,
}


def checked(behind: Any = reference) -> tuple[SimpleNamespace, set[tuple[Any, ...]]]:
    """Return checked versions of the operators in ``behind``, and the set of call forms that they record."""
    called: set[tuple[Any, ...]] = set()

    def watch(name: str) -> Callable[..., Any]:
        operator = getattr(behind, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(form_of(name, args, kwargs))
            CHECKS[name](*args, **kwargs)
            return operator(*args, **kwargs)

        return call

    return SimpleNamespace(**{name: watch(name) for name in CHECKS}), called
