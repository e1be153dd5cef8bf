"""One small operator call, on any device, for each form that 16-bit layers use. On ``meta``, the calls cost nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from eplb_lab.layer.operators import DispatchQuantMode, GroupListType, Operators, QuantMode, reference

T = 5
K = 2
E = 4
H = 16
INNER = 12
ALONE = ("", 1, 0, E)
ROUTING: dict[str, Any] = {
    "active_num": T * K,
    "expert_num": E,
    "expert_tokens_num_type": GroupListType.COUNTS,
    "expert_tokens_num_flag": True,
    "active_expert_range": [0, E],
    "quant_mode": QuantMode.NONE,
}


class Call(NamedTuple):
    """An operator and its arguments."""

    operator: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def calls(device: str) -> dict[str, Call]:
    """Return the calls, keyed by the form that they demonstrate."""
    call_by_title = {}
    for dtype, suffix in ((torch.bfloat16, ""), (torch.float16, ", float16")):
        each = [*_local(device, dtype), *_travelling(device, dtype)]
        call_by_title |= {
            f"{title}{suffix}": Call(operator, args, kwargs) for title, operator, args, kwargs in each
        }
    return call_by_title


_Titled = tuple[str, str, tuple[Any, ...], dict[str, Any]]


def _local(device: str, dtype: torch.dtype) -> list[_Titled]:
    def floats(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    ids_TK = (torch.arange(T * K, dtype=torch.int32) % E).view(T, K).to(device)
    counts_E = torch.tensor([3, 3, 2, 2], device=device)
    tokens = floats(T, H)
    rows = floats(T * K, H)
    row_of_choice = ids_TK.flatten()
    permute = "npu_moe_token_permute"
    unpermute = "npu_moe_token_unpermute"
    routing = "npu_moe_init_routing_v2"
    product = "npu_grouped_matmul"
    scaled = {"scale": floats(T, dtype=torch.float32)}
    titled_calls: list[_Titled] = [
        ("permute", permute, (tokens, ids_TK.long()), {}),
        ("permute, fewer rows", permute, (tokens, ids_TK.long(), 7), {}),
        ("unpermute", unpermute, (rows, row_of_choice), {}),
        ("unpermute, weighed", unpermute, (rows, row_of_choice, floats(T, K)), {}),
        ("routing", routing, (tokens, ids_TK), ROUTING),
        (
            "routing, part of the experts",
            routing,
            (tokens, ids_TK),
            ROUTING | {"active_expert_range": [1, 3]},
        ),
        ("routing, quantizing", routing, (tokens, ids_TK), ROUTING | {"quant_mode": QuantMode.DYNAMIC}),
        ("routing, quantized before", routing, (tokens.to(torch.int8), ids_TK), ROUTING | scaled),
        ("dynamic quant", "npu_dynamic_quant", (tokens,), {}),
        ("swiglu", "npu_swiglu", (floats(T, 2 * INNER),), {}),
    ]
    bfloat16 = dtype == torch.bfloat16
    weight = floats(E, 2 * INNER, H).transpose(1, 2)
    bias = {"bias": [floats(E, 2 * INNER, dtype=torch.float32 if bfloat16 else dtype)]}
    w8a8 = {
        "scale": [floats(E, 2 * INNER, dtype=dtype if bfloat16 else torch.float32)],
        "per_token_scale": [floats(T * K, dtype=torch.float32)],
        "output_dtype": dtype,
    }
    for name, kind, group_list_E in (("", 1, counts_E), (", cumulative", 0, counts_E.cumsum(0))):
        arguments = {"split_item": 2, "group_type": 0, "group_list": group_list_E, "group_list_type": kind}
        int8 = [rows.to(torch.int8)], [weight.to(torch.int8)]
        titled_calls += [
            (f"grouped matmul{name}", product, ([rows], [weight]), arguments),
            (f"grouped matmul, biased{name}", product, ([rows], [weight]), arguments | bias),
            (f"grouped matmul, W8A8{name}", product, int8, arguments | w8a8),
        ]
    return titled_calls


def _travelling(device: str, dtype: torch.dtype) -> list[_Titled]:
    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    rows = T * min(K, E)
    weights_TK = zeros(T, K, dtype=torch.float32)
    ids_TK = (torch.arange(T * K, dtype=torch.int32) % E).view(T, K).to(device)
    counts_E = torch.tensor([3, 6, 8, 10], dtype=torch.int32, device=device)
    a3 = {"group_tp": "", "tp_world_size": 1, "tp_rank_id": 0}
    # Only A3 supports masks.
    masked = a3 | {"x_active_mask": zeros(T, K, dtype=torch.bool)}
    tp_counts = {"tp_send_counts": zeros(1, dtype=torch.int32)}
    two_levels = {"expert_scales": weights_TK}, {"expand_scales": zeros(rows, dtype=torch.float32)}
    machines: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "_v2": ({}, {}),
        "_v2, A3": (a3, a3 | tp_counts),
        "_v2, A3, masked": (masked, masked | tp_counts),
        "_v2, two levels": two_levels,
    }
    dispatch = "npu_moe_distribute_dispatch_v2"
    combine = "npu_moe_distribute_combine_v2"
    sent = (zeros(T, H), ids_TK, *ALONE)
    returned = (zeros(rows, H), ids_TK, zeros(rows * 128, dtype=torch.int32), counts_E, weights_TK, *ALONE)
    titled_calls: list[_Titled] = []
    for title, (sending, returning) in machines.items():
        sending = sending | {"expert_token_nums_type": GroupListType.CUMULATIVE}
        quantizing = sending | {"quant_mode": DispatchQuantMode.DYNAMIC}
        titled_calls += [
            (f"dispatch{title}", dispatch, sent, sending),
            (f"dispatch{title}, quantizing", dispatch, sent, quantizing),
            (f"combine{title}", combine, returned, returning),
        ]
    return titled_calls


def results(device: str, operator_of: Callable[[str], Any]) -> dict[str, list[list[Any]]]:
    """Return the dtype and shape of every tensor that each call returns."""
    result_by_title = {}
    for title, call in calls(device).items():
        result = operator_of(call.operator)(*call.args, **call.kwargs)
        tensors = [result] if isinstance(result, torch.Tensor) else list(result)
        result_by_title[title] = [
            [str(each.dtype).removeprefix("torch."), list(each.shape)] for each in tensors
        ]
    return result_by_title


OPERATORS = sorted(name for name in vars(Operators) if name.startswith("npu_"))

SIZES = {
    "num_out_tokens",
    "active_num",
    "expert_num",
    "active_expert_range",
    "group_ep",
    "ep_world_size",
    "ep_rank_id",
    "moe_expert_num",
    "group_tp",
}
"""Arguments that specify sizes and ranks, which do not change a call's form."""


def form_of(operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return a call's tensor dtypes, tensor dimensions and modes, which do not depend on sizes."""
    signature = inspect.signature(getattr(reference, operator))
    arguments = signature.bind(*args, **kwargs).arguments
    form = []
    for name, value in arguments.items():
        if name in SIZES or value == signature.parameters[name].default:
            continue
        form.append((name, *map(_kind, value if isinstance(value, list) else [value])))
    return operator, *form


def _kind(value: Any) -> tuple[str, int]:
    """Return a tensor's dtype and number of dimensions. For any other value, return its type. Modes are numbers."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.ndim
    return str(int(value) if isinstance(value, int) else value), 0
