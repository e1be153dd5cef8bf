"""One small call of each form that 16-bit layers call operators in, for any device: on ``meta`` it costs nothing."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from worker_agent.moe.operators import DispatchQuantMode, GroupListType, Operators, QuantMode, reference

ALONE = ("", 1, 0)
T, K, E, H, INNER = 5, 2, 4, 16, 12


@dataclass(frozen=True)
class Call:
    """An operator and its arguments."""

    operator: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


class _Arguments:
    """Tensors of a device, for layers of a dtype."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device = device
        self.dtype = dtype
        self.ids_TK = (torch.arange(T * K, dtype=torch.int32) % E).view(T, K).to(device)
        self.counts_E = torch.tensor([3, 3, 2, 2], device=device)

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.ones(shape, dtype=self.dtype if dtype is None else dtype, device=self._device)

    def ints(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)


def calls(device: str) -> dict[str, Call]:
    """The calls by what they show."""
    found = {}
    for dtype, name in ((torch.bfloat16, ""), (torch.float16, ", float16")):
        given = _Arguments(device, dtype)
        each = {**_permuting(given), **_multiplying(given), **_travelling(given)}
        found |= {f"{title}{name}": call for title, call in each.items()}
    return found


def _permuting(given: _Arguments) -> dict[str, Call]:
    floats, ints, ids_TK = given.floats, given.ints, given.ids_TK
    routing = {
        "active_num": T * K,
        "expert_num": E,
        "expert_tokens_num_type": GroupListType.COUNTS,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, E],
        "quant_mode": QuantMode.NONE,
    }
    return {
        "permute": Call("npu_moe_token_permute", (floats(T, H), ids_TK.long())),
        "permute, fewer rows": Call("npu_moe_token_permute", (floats(T, H), ids_TK.long(), 7)),
        "unpermute": Call("npu_moe_token_unpermute", (floats(T * K, H), ints(T * K))),
        "unpermute, weighed": Call("npu_moe_token_unpermute", (floats(T * K, H), ints(T * K), floats(T, K))),
        "routing": Call("npu_moe_init_routing_v2", (floats(T, H), ids_TK), routing),
        "routing, part of the experts": Call(
            "npu_moe_init_routing_v2", (floats(T, H), ids_TK), routing | {"active_expert_range": [1, 3]}
        ),
        "routing, quantizing": Call(
            "npu_moe_init_routing_v2", (floats(T, H), ids_TK), routing | {"quant_mode": QuantMode.DYNAMIC}
        ),
        "routing, quantized before": Call(
            "npu_moe_init_routing_v2",
            (ints(T, H, dtype=torch.int8), ids_TK),
            routing | {"scale": floats(T, dtype=torch.float32)},
        ),
    }


def _multiplying(given: _Arguments) -> dict[str, Call]:
    floats, ints, bfloat16 = given.floats, given.ints, given.dtype == torch.bfloat16
    bias_dtype, scale_dtype = (torch.float32, torch.bfloat16) if bfloat16 else (torch.float16, torch.float32)
    lists = {"": (1, given.counts_E), ", cumulative": (0, given.counts_E.cumsum(0))}
    found = {
        "dynamic quant": Call("npu_dynamic_quant", (floats(T, H),)),
        "swiglu": Call("npu_swiglu", (floats(T, 2 * INNER),)),
    }
    for name, (kind, group_list_E) in lists.items():
        product = {"split_item": 2, "group_type": 0, "group_list": group_list_E, "group_list_type": kind}
        plain = [floats(T * K, H)], [floats(E, 2 * INNER, H).transpose(1, 2)]
        bias = {"bias": [floats(E, 2 * INNER, dtype=bias_dtype)]}
        found[f"grouped matmul{name}"] = Call("npu_grouped_matmul", plain, product)
        found[f"grouped matmul, biased{name}"] = Call("npu_grouped_matmul", plain, product | bias)
        found[f"grouped matmul, W8A8{name}"] = Call(
            "npu_grouped_matmul",
            ([ints(T * K, H, dtype=torch.int8)], [ints(E, H, 2 * INNER, dtype=torch.int8)]),
            product
            | {
                "scale": [floats(E, 2 * INNER, dtype=scale_dtype)],
                "per_token_scale": [floats(T * K, dtype=torch.float32)],
                "output_dtype": given.dtype,
            },
        )
    return found


def _travelling(given: _Arguments) -> dict[str, Call]:
    floats, ints, ids_TK = given.floats, given.ints, given.ids_TK
    rows = T * min(K, E)
    weights_TK = floats(T, K, dtype=torch.float32)
    row_weights = {"expand_scales": floats(rows, dtype=torch.float32)}
    a3 = {"group_tp": "", "tp_world_size": 1, "tp_rank_id": 0}
    machines: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "": ({}, {}),
        ", A3": (a3, a3 | {"tp_send_counts": ints(1)}),
        ", two levels": ({"expert_scales": weights_TK}, row_weights),
    }
    found = {}
    for version, (machine, (sending, returning)) in itertools.product(("", "_v2"), machines.items()):
        dispatch, combine = f"npu_moe_distribute_dispatch{version}", f"npu_moe_distribute_combine{version}"
        sent = (floats(T, H), ids_TK, *ALONE, E)
        counted = sending | {"expert_token_nums_type": GroupListType.CUMULATIVE}
        assist = ints(T * K) if version == "" else ints(rows * 128)
        counts_E = given.counts_E.cumsum(0).to(torch.int32)
        returned = (floats(rows, H), ids_TK, assist, counts_E, weights_TK, *ALONE, E)
        # Hardware understands masks in version 2 on A3.
        masks: dict[str, dict[str, Any]] = {"": {}}
        if version and machine == ", A3":
            masks[", masked"] = {"x_active_mask": floats(T, K, dtype=torch.bool)}
        for masked, mask in masks.items():
            title = f"{version}{machine}{masked}"
            found[f"dispatch{title}"] = Call(dispatch, sent, counted | mask)
            quantizing = counted | mask | {"quant_mode": DispatchQuantMode.DYNAMIC}
            found[f"dispatch{title}, quantizing"] = Call(dispatch, sent, quantizing)
            found[f"combine{title}"] = Call(combine, returned, returning | mask)
    return found


def described(result: Any) -> list[list[Any]]:
    """Dtype and shape of each tensor that an operator returned."""
    tensors = [result] if isinstance(result, torch.Tensor) else list(result)
    return [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]


def results(device: str, operator_of: Callable[[str], Any]) -> dict[str, list[list[Any]]]:
    """What each call returns."""
    return {
        title: described(operator_of(call.operator)(*call.args, **call.kwargs))
        for title, call in calls(device).items()
    }


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
"""Arguments that say how much there is and where, and not in which form it comes."""


def form_of(operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What two calls have in common that differ in sizes alone: dtypes and dimensions of tensors, and modes."""
    signature = inspect.signature(getattr(reference, operator))
    given = signature.bind(*args, **kwargs).arguments
    form = []
    for name, value in given.items():
        if name in SIZES or value == signature.parameters[name].default:
            continue
        form.append((name, *map(_kind, value if isinstance(value, list) else [value])))
    return operator, *form


def _kind(value: Any) -> tuple[str, int]:
    """A tensor's dtype and dimensions, or what else it is; modes are numbers."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.ndim
    return str(int(value) if isinstance(value, int) else value), 0
