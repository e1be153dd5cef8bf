"""MC2 dispatcher: dispatch and combine use one fused communication operator each, in the machine's variant."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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
"""Chip numbers of the Atlas A3, as returned by ``torch_npu.npu.get_soc_version``."""


_DEFAULT_BUFFER = 200
"""Default size of HCCL's buffers in MB, used if HCCL_BUFFSIZE is not set."""

_MEGABYTE = 2**20
_MAX_CHOICES = 16
_MAX_EXPERTS = 1024
_MAX_A2_SLOTS = 24


@dataclass(frozen=True)
class MC2Variant:
    """Variant of the fused operators that a machine supports."""

    a3: bool = True
    """True for Atlas A3, whose operators require a tensor-parallel group and support a mask of the real choices."""

    hierarchical: bool = False
    """True if nodes communicate in two levels, which A2 supports. Weights are then sent with the tokens."""

    buffer_megabytes: int | None = None
    """Size of the communication domain's buffers in MB. If set, CANN's limits are enforced (``MC2Limits``).

    On an NPU it defaults to HCCL_BUFFSIZE. Other devices have no limits by default.
    """

    @classmethod
    def of(cls, device: torch.device) -> MC2Variant:
        """Return the variant for the machine of ``device``."""
        if device.type != "npu":
            return cls()
        import torch_npu

        a3 = torch_npu.npu.get_soc_version() in _A3_CHIPS
        two_levels = os.environ.get("HCCL_INTRA_PCIE_ENABLE"), os.environ.get("HCCL_INTRA_ROCE_ENABLE")
        return cls(a3, hierarchical=not a3 and two_levels == ("1", "0"))

    def on(self, device: torch.device) -> MC2Variant:
        """Return the variant with its default buffer size if ``device`` is an NPU.

        Raises ``ValueError`` if HCCL_BUFFSIZE is not a whole number.
        """
        if device.type != "npu" or self.buffer_megabytes is not None:
            return self
        megabytes = os.environ.get("HCCL_BUFFSIZE", str(_DEFAULT_BUFFER))
        if not megabytes.isdecimal():
            raise ValueError(f"HCCL_BUFFSIZE must be a whole number of MB, got {megabytes!r}")
        return replace(self, buffer_megabytes=int(megabytes))

    def width(self, hidden: int) -> int:
        """Return the number of columns per sent token: H, which on A2 is rounded up to a multiple of 32."""
        return hidden if self.a3 else _aligned(hidden, 32)


@dataclass(frozen=True)
class MC2Limits:
    """Limits that CANN documents for the fused operators.

    Raises ``ValueError`` if the group, the hidden size or the slots exceed them.
    """

    layer: int
    hidden: int
    """H, the number of columns per sent token, 2 bytes each."""

    ranks: int
    slots: int
    """S, the number of experts per rank."""

    variant: MC2Variant

    def __post_init__(self) -> None:
        rank_counts: Sequence[int]
        if self.variant.a3:
            machine = "A3"
            rank_counts = range(2, 768 + 1)
            ranks_rule = "2 to 768 ranks"
            hidden_sizes = range(1024, 8192 + 1)
            max_slots = _MAX_EXPERTS
        else:
            machine = "A2"
            rank_counts = (16, 32, 64) if self.variant.hierarchical else (16, 32, 64, 128, 256)
            ranks_rule = f"{', '.join(map(str, rank_counts))} ranks"
            hidden_sizes = range(1, (10240 if self.variant.hierarchical else 7168) + 1)
            max_slots = _MAX_A2_SLOTS
        experts = self.ranks * self.slots
        hidden_rule = f"a hidden size of {hidden_sizes[0]} to {hidden_sizes[-1]}"
        requirements = {
            f"{ranks_rule} on {machine}, got {self.ranks}": self.ranks in rank_counts,
            f"{hidden_rule} on {machine}, got {self.hidden}": self.hidden in hidden_sizes,
            f"at most {max_slots} experts per rank on {machine}, got {self.slots}": self.slots <= max_slots,
            f"at most {_MAX_EXPERTS} physical experts, got {experts}": experts <= _MAX_EXPERTS,
        }
        for requirement, is_met in requirements.items():
            if not is_met:
                self._reject(f"needs {requirement}")

    def buffer(self, tokens: int, choices: int) -> int:
        """Return the buffer size in bytes that a step needs.

        Parameters
        ----------
        tokens
            Number of tokens per rank, including padding.
        choices
            K, the number of choices per token.
        """
        row = 2 * self.hidden
        if self.variant.a3:
            arriving = self.slots * self.ranks * _aligned(_aligned(row, 32) + 64, 512)
            # The operators reserve room for one shared expert by default, although no rank has one.
            return 2 * tokens * (arriving + (choices + 1) * _aligned(row, 512))
        if self.variant.hierarchical:
            return self.ranks * self.slots * tokens * (row + 16 * _aligned(choices, 8)) + 104 * _MEGABYTE
        return 2 * (tokens * self.ranks * min(self.slots, choices) * row + 2 * _MEGABYTE)

    def check_step(self, tokens: int, choices: int) -> None:
        """Raise ``ValueError`` if a step has too many tokens or choices, or needs larger buffers than configured."""
        max_tokens = 512 if self.variant.a3 else 256
        if tokens > max_tokens:
            self._reject(f"supports at most {max_tokens} tokens per rank, including padding, got {tokens}")
        if choices > _MAX_CHOICES:
            self._reject(f"supports at most {_MAX_CHOICES} choices per token, got {choices}")
        required = -(-self.buffer(tokens, choices) // _MEGABYTE)
        configured = self.variant.buffer_megabytes or 0
        if required > configured:
            self._reject(
                f"needs buffers of {required} MB for {tokens} tokens on each of {self.ranks} ranks, but has "
                f"{configured} MB; set HCCL_BUFFSIZE={required} on all ranks"
            )

    def _reject(self, problem: str) -> None:
        raise ValueError(f"layer {self.layer}: MC2 {problem}")


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


class MC2Dispatcher:
    """Dispatcher that calls the fused operators.

    Every rank must pass the same number of tokens, at least one; ``MC2Preparation`` pads them. The operators quantise
    rows before sending them, and apply the weights to the outputs. Row counts are cumulative. Padding choices are
    masked if the variant supports a mask. Otherwise they are computed, but excluded from the heat.

    Parameters
    ----------
    group
        Ranks of the layer.
    slots
        Number of slots per rank.
    operators
        Operators for the device.
    variant
        Variant of the fused operators.
    domain
        Group of the same ranks that only the operators use. Through its buffers, ranks write into each other's memory.
    """

    format = ActivationFormat.STANDARD

    def __init__(
        self, group: RankGroup, slots: int, operators: Operators, variant: MC2Variant, domain: RankGroup
    ) -> None:
        self._group = group
        self._domain = domain
        self._slots = slots
        self._operators = operators
        self._variant = variant

    def dispatch(self, request: DispatchRequest) -> Callable[[], Dispatched]:
        """Send, receive and sort the rows with the fused operator."""
        group = self._group
        variant = self._variant
        experts = group.size * self._slots
        padding_S = None
        hidden = request.hidden_TH.shape[1]
        width = variant.width(hidden)
        hidden_TH = _widened(request.hidden_TH, width)
        physical_TK = request.physical(padding_id=0)
        weights_TK = request.real_weights_TK
        ranks = self._domain.name, group.size, group.rank, experts
        options: dict[str, Any] = {"expert_shard_type": 0, "shared_expert_rank_num": 0, "global_bs": 0}
        if variant.a3:
            options |= {"group_tp": self._domain.name, "tp_world_size": 1, "tp_rank_id": 0}
            options["x_active_mask"] = request.active_TK
        else:
            physical_TK = _spread_padding(physical_TK, request.active_TK, group.rank * self._slots, experts)
            padding_S = _arriving_padding(group, physical_TK, request.active_TK, experts)
            # Experts also run on the padding rows, which may contain NaN.
            hidden_TH = hidden_TH.masked_fill(~request.active_TK.any(dim=1, keepdim=True), 0.0)
        results = self._operators.npu_moe_distribute_dispatch_v2(
            hidden_TH,
            physical_TK,
            *ranks,
            quant_mode=DispatchQuantMode.DYNAMIC if request.quantized else DispatchQuantMode.NONE,
            expert_token_nums_type=GroupListType.CUMULATIVE,
            expert_scales=weights_TK if variant.hierarchical else None,
            **options,
        )
        rows_AH, scale_A, assist_info, cumulative_S, received_counts, tp_counts, row_weights = results
        scale_N = scale_A if request.quantized else None
        rows_AH = rows_AH[:, :hidden].contiguous()
        batch = ExpertBatch(rows_AH, cumulative_S, GroupListType.CUMULATIVE, scale_N, padding_S)

        def combine(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
            out_TH = self._operators.npu_moe_distribute_combine_v2(
                _widened(rows, width),
                physical_TK,
                assist_info,
                received_counts,
                weights_TK,
                *ranks,
                tp_send_counts=tp_counts if variant.a3 else None,
                expand_scales=row_weights if variant.hierarchical else None,
                **options,
            )
            return lambda: out_TH[:, :hidden]

        return lambda: Dispatched(batch, combine)


def _widened(rows_NH: torch.Tensor, width: int) -> torch.Tensor:
    """Pad the rows with zeros up to ``width`` columns."""
    missing = width - rows_NH.shape[1]
    return pad(rows_NH, (0, missing)) if missing else rows_NH


def _spread_padding(
    physical_TK: torch.Tensor, active_TK: torch.Tensor, first: int, experts: int
) -> torch.Tensor:
    """Assign the padding choices to experts that their token has not chosen.

    A token's choices are then distinct, as the operators require and as their buffer sizes assume.

    Parameters
    ----------
    physical_TK
        Physical expert of each choice.
    active_TK
        Mask of the real choices.
    first
        Expert that is assigned first; the next ids follow.
    experts
        Number of physical experts, at least K.

    Returns
    -------
    torch.Tensor
        Physical experts ``[T, K]``.
    """
    chosen_TP = torch.zeros(physical_TK.shape[0], experts + 1, dtype=torch.bool, device=physical_TK.device)
    real_TK = physical_TK.masked_fill(~active_TK, experts).long()
    chosen_TP.scatter_(1, real_TK, True)
    # Move unchosen experts to the front, sorted by their distance from ``first``.
    distance_P = (torch.arange(experts, device=physical_TK.device) - first) % experts
    free_TP = (distance_P + experts * chosen_TP[:, :experts]).argsort(dim=1)
    padding_TK = (~active_TK).cumsum(1) - 1
    spread_TK = free_TP.gather(1, padding_TK.clamp(min=0)).to(physical_TK.dtype)
    return torch.where(active_TK, physical_TK, spread_TK)


def _arriving_padding(
    group: RankGroup, physical_TK: torch.Tensor, active_TK: torch.Tensor, experts: int
) -> torch.Tensor:
    """Exchange padding counts, and return how many padding rows each local slot will receive, int64 ``[S]``."""
    # Count real choices as an additional expert.
    padding_P = count_ids(physical_TK.masked_fill(active_TK, experts), experts + 1)[:-1]
    return group.exchange(padding_P.view(group.size, -1)).sum(dim=0)
