"""MC2: one fused communication operator each way, in the variant that a machine has."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad

from eplb_lab.layer.dispatch.interface import Dispatched, DispatchRequest
from eplb_lab.layer.experts import ActivationFormat, ExpertBatch
from eplb_lab.layer.operators import DispatchQuantMode, GroupListType, Operators
from eplb_lab.layer.rank_group import RankGroup
from worker_agent.counting import count_ids

_A3_CHIPS = range(250, 256)
"""Atlas A3, as ``torch_npu.npu.get_soc_version`` numbers chips."""


_DEFAULT_BUFFER = 200
"""MB of HCCL's buffers where HCCL_BUFFSIZE is not set."""

_MEGABYTE = 2**20
_MAX_CHOICES, _MAX_EXPERTS, _MAX_A2_SLOTS = 16, 1024, 24


@dataclass(frozen=True)
class MC2Variant:
    """Arguments that the fused operators take on a machine."""

    a3: bool = True
    """A tensor-parallel group is named, as A3 demands; and choices that are not real are masked."""

    hierarchical: bool = False
    """Nodes talk in two levels, as A2 can: the weights then travel with the tokens."""

    buffer_megabytes: int | None = None
    """MB of the communication domain's buffers; with it CANN's limits are held (``MC2Limits``). On an NPU by default
    what HCCL_BUFFSIZE says; elsewhere there are no limits."""

    @classmethod
    def of(cls, device: torch.device) -> MC2Variant:
        """Return the variant of the machine of ``device``."""
        if device.type != "npu":
            return cls()
        import torch_npu

        a3 = torch_npu.npu.get_soc_version() in _A3_CHIPS
        two_levels = os.environ.get("HCCL_INTRA_PCIE_ENABLE"), os.environ.get("HCCL_INTRA_ROCE_ENABLE")
        return cls(a3, hierarchical=not a3 and two_levels == ("1", "0"))

    def on(self, device: torch.device) -> MC2Variant:
        """Return the same, with the buffers of HCCL where ``device`` is an NPU and no others are given."""
        if device.type != "npu" or self.buffer_megabytes is not None:
            return self
        given = os.environ.get("HCCL_BUFFSIZE", str(_DEFAULT_BUFFER))
        if not given.isdecimal():
            raise ValueError(f"HCCL_BUFFSIZE must be a whole number of MB, got {given!r}")
        return replace(self, buffer_megabytes=int(given))

    def width(self, hidden: int) -> int:
        """Return the columns that tokens travel with: on A2 H rounded up to 32 columns."""
        return hidden if self.a3 else _aligned(hidden, 32)


@dataclass(frozen=True)
class MC2Limits:
    """Limits that CANN documents of the fused operators, for R ranks with S experts each and tokens of 2 * H bytes.

    H is that of tokens as they travel. Raises ``ValueError`` naming the ``layer`` where H, R or S is past them.
    """

    layer: int
    hidden: int
    ranks: int
    slots: int
    variant: MC2Variant

    def __post_init__(self) -> None:
        experts, variant = self.ranks * self.slots, self.variant
        powers, widest = ((16, 32, 64), 10240) if variant.hierarchical else ((16, 32, 64, 128, 256), 7168)
        if variant.a3:
            machine, slots = "A3", _MAX_EXPERTS
            fits = 2 <= self.ranks <= 768, 1024 <= self.hidden <= 8192
            wanted = "2 to 768 ranks", "a hidden size of 1024 to 8192"
        else:
            machine, slots = "A2", _MAX_A2_SLOTS
            fits = self.ranks in powers, self.hidden <= widest
            wanted = f"{', '.join(map(str, powers))} ranks", f"a hidden size of 1 to {widest}"
        needs = {
            f"{wanted[0]} on {machine}, got {self.ranks}": fits[0],
            f"{wanted[1]} on {machine}, got {self.hidden}": fits[1],
            f"at most {slots} experts per rank on {machine}, got {self.slots}": self.slots <= slots,
            f"at most {_MAX_EXPERTS} physical experts, got {experts}": experts <= _MAX_EXPERTS,
        }
        for need, met in needs.items():
            if not met:
                self._refuse(f"needs {need}")

    def buffer(self, tokens: int, choices: int) -> int:
        """Return the bytes of the buffers that a step of so many tokens of each rank needs, each of K ``choices``."""
        row = 2 * self.hidden
        if self.variant.a3:
            arriving = self.slots * self.ranks * _aligned(_aligned(row, 32) + 64, 512)
            # A shared expert is the operators' own default, though no rank has any.
            return 2 * tokens * (arriving + (choices + 1) * _aligned(row, 512))
        if self.variant.hierarchical:
            return self.ranks * self.slots * tokens * (row + 16 * _aligned(choices, 8)) + 104 * _MEGABYTE
        return 2 * (tokens * self.ranks * min(self.slots, choices) * row + 2 * _MEGABYTE)

    def check_step(self, tokens: int, choices: int) -> None:
        """Raise ``ValueError`` where a step has more tokens or choices, or needs larger buffers, than there can be."""
        most = 512 if self.variant.a3 else 256
        if tokens > most:
            self._refuse(f"takes at most {most} tokens of a rank, padding among them, got {tokens}")
        if choices > _MAX_CHOICES:
            self._refuse(f"takes at most {_MAX_CHOICES} choices per token, got {choices}")
        needed, there = -(-self.buffer(tokens, choices) // _MEGABYTE), self.variant.buffer_megabytes or 0
        if needed > there:
            self._refuse(
                f"needs buffers of {needed} MB for {tokens} tokens of each of {self.ranks} ranks, and has {there}; "
                f"set HCCL_BUFFSIZE={needed} on all ranks"
            )

    def _refuse(self, problem: str) -> None:
        raise ValueError(f"layer {self.layer}: MC2 {problem}")


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


class MC2Dispatcher:
    """Every rank gives the same number of tokens, at least one: ``MC2Preparation`` pads. Counts come cumulative.

    The operators quantize what they send, and weigh what they bring back. They alone use ``domain``, whose ranks are
    those of ``group``: its buffers are the windows through which ranks write into each other's memory. Choices that are
    not real are masked, or, where a variant understands no mask, computed with the others and kept out of the heat.
    """

    format = ActivationFormat.STANDARD

    def __init__(
        self, group: RankGroup, slots: int, operators: Operators, variant: MC2Variant, domain: RankGroup
    ) -> None:
        self._group, self._domain = group, domain
        self._slots = slots
        self._operators = operators
        self._variant = variant

    def dispatch(self, request: DispatchRequest) -> Callable[[], Dispatched]:
        """Let the fused operator send, receive and sort."""
        group, variant = self._group, self._variant
        experts = group.size * self._slots
        idle_S, hidden = None, request.hidden_TH.shape[1]
        width = variant.width(hidden)
        hidden_TH = _widened(request.hidden_TH, width)
        physical_TK, weights_TK = request.physical(nowhere=0), request.real_weights_TK
        place = self._domain.name, group.size, group.rank, experts
        shared: dict[str, Any] = {"expert_shard_type": 0, "shared_expert_rank_num": 0, "global_bs": 0}
        if variant.a3:
            shared |= {"group_tp": self._domain.name, "tp_world_size": 1, "tp_rank_id": 0}
            shared["x_active_mask"] = request.active_TK
        else:
            physical_TK = _spread_out(physical_TK, request.active_TK, group.rank * self._slots, experts)
            idle_S = _arriving_padding(group, physical_TK, request.active_TK, experts)
            # What padding holds is computed with, be it NaN.
            hidden_TH = hidden_TH.masked_fill(~request.active_TK.any(dim=1, keepdim=True), 0.0)
        sent = self._operators.npu_moe_distribute_dispatch_v2(
            hidden_TH,
            physical_TK,
            *place,
            quant_mode=DispatchQuantMode.DYNAMIC if request.quantized else DispatchQuantMode.NONE,
            expert_token_nums_type=GroupListType.CUMULATIVE,
            expert_scales=weights_TK if variant.hierarchical else None,
            **shared,
        )
        rows_AH, scale_A, assist_info, cumulative_S, received_counts, tp_counts, row_weights = sent
        scale_N = scale_A if request.quantized else None
        rows_AH = rows_AH[:, :hidden].contiguous()
        batch = ExpertBatch(rows_AH, cumulative_S, GroupListType.CUMULATIVE, scale_N, idle_S)

        def combine(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
            out_TH = self._operators.npu_moe_distribute_combine_v2(
                _widened(rows, width),
                physical_TK,
                assist_info,
                received_counts,
                weights_TK,
                *place,
                tp_send_counts=tp_counts if variant.a3 else None,
                expand_scales=row_weights if variant.hierarchical else None,
                **shared,
            )
            return lambda: out_TH[:, :hidden]

        return lambda: Dispatched(batch, combine)


def _widened(rows_NH: torch.Tensor, width: int) -> torch.Tensor:
    """Append columns of zeros up to ``width``."""
    missing = width - rows_NH.shape[1]
    return pad(rows_NH, (0, missing)) if missing else rows_NH


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
