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
    """Arguments that the fused operators take on a machine."""

    a3: bool = True
    """A tensor-parallel group is named, as A3 demands; and choices that are not real are masked."""

    hierarchical: bool = False
    """Nodes talk in two levels, as A2 can: the weights then travel with the tokens."""

    @classmethod
    def of(cls, device: torch.device) -> MC2Variant:
        """Return the variant of the machine of ``device``."""
        if device.type != "npu":
            return cls()
        import torch_npu

        a3 = torch_npu.npu.get_soc_version() in _A3_CHIPS
        two_levels = os.environ.get("HCCL_INTRA_PCIE_ENABLE"), os.environ.get("HCCL_INTRA_ROCE_ENABLE")
        return cls(a3, hierarchical=not a3 and two_levels == ("1", "0"))


class MC2Dispatcher:
    """Every rank gives the same number of tokens, at least one: ``MC2Preparation`` pads. Counts come cumulative.

    The operators quantize what they send, and weigh what they bring back. Choices that are not real are masked,
    or, where a variant understands no mask, computed with the others and kept out of the heat.
    """

    format = ActivationFormat.STANDARD

    def __init__(self, group: RankGroup, slots: int, operators: Operators, variant: MC2Variant) -> None:
        self._group = group
        self._slots = slots
        self._operators = operators
        self._variant = variant

    def dispatch(self, request: DispatchRequest) -> Callable[[], Dispatched]:
        """Let the fused operator send, receive and sort."""
        group, variant = self._group, self._variant
        experts = group.size * self._slots
        physical_TK, weights_TK = request.physical(nowhere=0), request.real_weights_TK
        idle_S = None
        place = group.name, group.size, group.rank, experts
        shared: dict[str, Any] = {"expert_shard_type": 0, "shared_expert_rank_num": 0, "global_bs": 0}
        if variant.a3:
            shared |= {"group_tp": group.name, "tp_world_size": 1, "tp_rank_id": 0}
            shared["x_active_mask"] = request.active_TK
        else:
            physical_TK = _spread_out(physical_TK, request.active_TK, group.rank * self._slots, experts)
            idle_S = _arriving_padding(group, physical_TK, request.active_TK, experts)
        sent = self._operators.npu_moe_distribute_dispatch_v2(
            request.hidden_TH,
            physical_TK,
            *place,
            quant_mode=DispatchQuantMode.DYNAMIC if request.quantized else DispatchQuantMode.NONE,
            expert_token_nums_type=GroupListType.CUMULATIVE,
            expert_scales=weights_TK if variant.hierarchical else None,
            **shared,
        )
        rows_AH, scale_A, assist_info, cumulative_S, received_counts, tp_counts, row_weights = sent
        scale_N = scale_A if request.quantized else None
        batch = ExpertBatch(rows_AH, cumulative_S, GroupListType.CUMULATIVE, scale_N, idle_S)

        def combine(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
            out_TH = self._operators.npu_moe_distribute_combine_v2(
                rows,
                physical_TK,
                assist_info,
                received_counts,
                weights_TK,
                *place,
                tp_send_counts=tp_counts if variant.a3 else None,
                expand_scales=row_weights if variant.hierarchical else None,
                **shared,
            )
            return lambda: out_TH

        return lambda: Dispatched(batch, combine)


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
