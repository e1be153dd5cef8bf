"""MC2: one fused communication operator each way, in the variant that a machine has."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from worker_agent.moe.dispatch.interface import Dispatched, DispatchRequest
from worker_agent.moe.experts import ActivationFormat, ExpertBatch
from worker_agent.moe.operators import DispatchQuantMode, GroupListType, Operators, count_ids
from worker_agent.moe.rank_group import RankGroup

_A3_CHIPS = range(250, 256)
"""Atlas A3, as ``torch_npu.npu.get_soc_version`` numbers chips."""


@dataclass(frozen=True)
class MC2Variant:
    """Version and arguments of the fused operators."""

    version: int = 2
    """1 or 2: without or with ``_v2``."""

    a3: bool = True
    """A tensor-parallel group is named, as A3 demands; together with version 2 a mask is understood as well."""

    hierarchical: bool = False
    """Nodes talk in two levels, as A2 can: the weights then travel with the tokens."""

    def __post_init__(self) -> None:
        if self.version not in (1, 2):
            raise ValueError(f"MC2 has versions 1 and 2, got {self.version}")

    @property
    def masks(self) -> bool:
        """True where choices that are not real can be masked; otherwise they must go somewhere."""
        return self.a3 and self.version == 2

    @classmethod
    def of(cls, operators: Operators, device: torch.device) -> MC2Variant:
        """Return the variant that the operators and the machine of ``device`` offer."""
        version = 2 if hasattr(operators, "npu_moe_distribute_dispatch_v2") else 1
        if device.type != "npu":
            return cls(version)
        import torch_npu

        a3 = torch_npu.npu.get_soc_version() in _A3_CHIPS
        two_levels = os.environ.get("HCCL_INTRA_PCIE_ENABLE"), os.environ.get("HCCL_INTRA_ROCE_ENABLE")
        return cls(version, a3, hierarchical=not a3 and two_levels == ("1", "0"))


class MC2Dispatcher:
    """Every rank gives the same number of tokens, at least one: ``MC2Preparation`` pads. Counts come cumulative.

    The operators quantize what they send, and weigh what they bring back. Choices that are not real are masked,
    or, where a variant understands no mask, computed with the others and kept out of the heat.
    """

    format = ActivationFormat.STANDARD
    brings_weights = False

    def __init__(
        self, group: RankGroup, slots: int, operators: Operators, variant: MC2Variant | None = None
    ) -> None:
        self._group = group
        self._slots = slots
        self._experts = group.size * slots
        self._operators = operators
        self._variant = MC2Variant() if variant is None else variant

    def dispatch(self, request: DispatchRequest) -> Callable[[], Dispatched]:
        """Let the fused operator send, receive and sort."""
        physical_TK, active_TK = request.physical(nowhere=0), request.active_TK
        weights_TK = request.real_weights()
        idle_S = None
        if active_TK is not None and not self._variant.masks:
            own = self._group.rank * self._slots
            physical_TK = _spread_out(physical_TK, active_TK, own, self._experts)
            idle_S = _arriving_padding(self._group, physical_TK, active_TK, self._experts)
            active_TK = None
        rows_AH, scale_A, assist_info, cumulative_S, received_counts, tp_counts, row_weights = self._operator(
            "dispatch"
        )(
            request.hidden_TH,
            physical_TK,
            *self._place(),
            quant_mode=DispatchQuantMode.DYNAMIC if request.quantized else DispatchQuantMode.NONE,
            expert_token_nums_type=GroupListType.CUMULATIVE,
            **({"expert_scales": weights_TK} if self._variant.hierarchical else {}),
            **self._shared_arguments(active_TK),
        )
        scale = scale_A if request.quantized else None
        batch = ExpertBatch(rows_AH, cumulative_S, GroupListType.CUMULATIVE, scale, idle_S=idle_S)

        def combine(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
            arguments = self._shared_arguments(active_TK)
            if self._variant.a3:
                arguments["tp_send_counts"] = tp_counts
            if self._variant.hierarchical:
                arguments["expand_scales"] = row_weights
            given = (rows, physical_TK, assist_info, received_counts, weights_TK)
            out_TH: torch.Tensor = self._operator("combine")(*given, *self._place(), **arguments)
            return lambda: out_TH

        return lambda: Dispatched(batch, combine)

    def _place(self) -> tuple[str, int, int, int]:
        return self._group.name, self._group.size, self._group.rank, self._experts

    def _shared_arguments(self, active_TK: torch.Tensor | None) -> dict[str, Any]:
        """Return the arguments that both operators share."""
        arguments: dict[str, Any] = {"expert_shard_type": 0, "shared_expert_rank_num": 0, "global_bs": 0}
        if self._variant.a3:
            arguments |= {"group_tp": self._group.name, "tp_world_size": 1, "tp_rank_id": 0}
        if active_TK is not None:
            arguments["x_active_mask"] = active_TK
        return arguments

    def _operator(self, direction: str) -> Any:
        version = "_v2" if self._variant.version == 2 else ""
        return getattr(self._operators, f"npu_moe_distribute_{direction}{version}")


def _spread_out(physical_TK: torch.Tensor, active_TK: torch.Tensor, first: int, experts: int) -> torch.Tensor:
    """Return choices ``[T, K]``, those that are not real replaced by experts that their token has not chosen.

    All are then distinct within a token, as the operators demand and as their buffers are sized for. Replacements
    begin with expert ``first`` and go on in order of id; ``experts`` are at least K.
    """
    taken_TP = torch.zeros(physical_TK.shape[0], experts + 1, dtype=torch.bool, device=physical_TK.device)
    real_TK = physical_TK.masked_fill(~active_TK, experts).long()
    taken_TP.scatter_(1, real_TK, True)
    # Free experts first, in order of their distance behind ``first``.
    distance_P = (torch.arange(experts, device=physical_TK.device) - first) % experts
    free_TP = (distance_P + experts * taken_TP[:, :experts]).argsort(dim=1)
    padding_TK = (~active_TK).cumsum(1) - 1
    spread_TK = free_TP.gather(1, padding_TK.clamp(min=0)).to(physical_TK.dtype)
    return torch.where(active_TK, physical_TK, spread_TK)


def _arriving_padding(
    group: RankGroup, physical_TK: torch.Tensor, active_TK: torch.Tensor, experts: int
) -> torch.Tensor:
    """Count the padding that comes to each of this rank's slots, int64 ``[S]``; one small exchange."""
    # What is no padding counts behind the experts.
    idle_P = count_ids(physical_TK.masked_fill(active_TK, experts), experts + 1)[:-1]
    return group.exchange(idle_P.view(group.size, -1)).sum(dim=0)
