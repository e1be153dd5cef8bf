"""One small call of each operator and mode that the layer uses, for any device: on ``meta`` it costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from worker_agent.moe.operators import DispatchQuantMode, GroupListType, Operators, QuantMode

ALONE = ("", 1, 0)
T, K, E, H, INNER = 5, 2, 4, 16, 12


@dataclass(frozen=True)
class Call:
    """An operator and its arguments."""

    operator: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


class _Arguments:
    """Tensors of a device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.ids_TK = (torch.arange(T * K, dtype=torch.int32) % E).view(T, K).to(device)
        self.counts_E = torch.tensor([3, 3, 2, 2], device=device)

    def floats(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=self._device)

    def ints(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)


def calls(device: str) -> dict[str, Call]:
    """The calls by what they show."""
    given = _Arguments(device)
    return {**_permuting(given), **_multiplying(given), **_travelling(given)}


def _permuting(given: _Arguments) -> dict[str, Call]:
    floats, ints, ids_TK = given.floats, given.ints, given.ids_TK
    routing = {
        "active_num": T * K,
        "expert_num": E,
        "expert_tokens_num_type": GroupListType.COUNTS,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, E],
    }
    return {
        "permute": Call("npu_moe_token_permute", (floats(T, H), ids_TK)),
        "permute, one choice": Call("npu_moe_token_permute", (floats(T, H), ids_TK[:, 0])),
        "permute, fewer rows": Call("npu_moe_token_permute", (floats(T, H), ids_TK, 7)),
        "unpermute": Call("npu_moe_token_unpermute", (floats(T * K, H), ints(T * K))),
        "unpermute, weighed": Call(
            "npu_moe_token_unpermute", (floats(T * K, H), ints(T * K), floats(T, K, dtype=torch.float32))
        ),
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
    floats, ints = given.floats, given.ints
    product = {"split_item": 2, "group_type": 0, "group_list": given.counts_E, "group_list_type": 1}
    return {
        "grouped matmul": Call(
            "npu_grouped_matmul", ([floats(T * K, H)], [floats(E, 2 * INNER, H).transpose(1, 2)]), product
        ),
        "grouped matmul, biased": Call(
            "npu_grouped_matmul",
            ([floats(T * K, H)], [floats(E, 2 * INNER, H).transpose(1, 2)]),
            product | {"bias": [floats(E, 2 * INNER, dtype=torch.float32)]},
        ),
        "grouped matmul, W8A8": Call(
            "npu_grouped_matmul",
            ([ints(T * K, H, dtype=torch.int8)], [ints(E, H, 2 * INNER, dtype=torch.int8)]),
            product
            | {
                "scale": [floats(E, 2 * INNER)],
                "per_token_scale": [floats(T * K, dtype=torch.float32)],
                "output_dtype": torch.bfloat16,
            },
        ),
        "dynamic quant": Call("npu_dynamic_quant", (floats(T, H),)),
        "swiglu": Call("npu_swiglu", (floats(T, 2 * INNER),)),
    }


def _travelling(given: _Arguments) -> dict[str, Call]:
    floats, ints, ids_TK = given.floats, given.ints, given.ids_TK
    rows = T * min(K, E)
    a3 = {"group_tp": "", "tp_world_size": 1, "tp_rank_id": 0}
    found = {}
    for version in ("", "_v2"):
        dispatch, combine = f"npu_moe_distribute_dispatch{version}", f"npu_moe_distribute_combine{version}"
        sent = (floats(T, H), ids_TK, *ALONE, E)
        weights_TK = floats(T, K, dtype=torch.float32)
        assist = ints(T * K) if version == "" else ints(rows * 128)
        returned = (
            floats(rows, H),
            ids_TK,
            assist,
            given.counts_E.cumsum(0).to(torch.int32),
            weights_TK,
            *ALONE,
            E,
        )
        for mode, sending, returning in (
            ("", {}, {}),
            (", A3", a3, a3 | {"tp_send_counts": ints(1)}),
            (
                ", two levels",
                {"expert_scales": weights_TK},
                {"expand_scales": floats(rows, dtype=torch.float32)},
            ),
        ):
            found[f"dispatch{version}{mode}"] = Call(dispatch, sent, sending)
            found[f"combine{version}{mode}"] = Call(combine, returned, returning)
        found[f"dispatch{version}, quantizing"] = Call(
            dispatch, sent, {"quant_mode": DispatchQuantMode.DYNAMIC, "expert_token_nums_type": 0}
        )
        found[f"dispatch{version}, masked"] = Call(
            dispatch, sent, {"x_active_mask": floats(T, K, dtype=torch.bool)}
        )
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
