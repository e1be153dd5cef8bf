"""The expert-parallel MoE layer: this rank's experts, and the forward pass that all ranks make together."""

from __future__ import annotations

import torch
import torch.distributed as dist

from eplb_service.placement import Int32
from worker_agent.moe.dispatch import DispatchRequest, build_dispatcher
from worker_agent.moe.dispatch.selection import SHARED_TOKEN_DISPATCHERS
from worker_agent.moe.ep_group import EpGroup
from worker_agent.moe.expert_source import ExpertSource
from worker_agent.moe.expert_weights import ExpertWeights, build_weights
from worker_agent.moe.experts import run_experts
from worker_agent.moe.heat_ring import count_ids, write_row
from worker_agent.moe.initial_placement import rank_placement
from worker_agent.moe.operators import operators_for, token_counts
from worker_agent.moe.shape import MoEShape


class ExpertParallelMoE(torch.nn.Module):
    """One MoE layer on one of R ranks, in the shape that inference engines give it; a ``LiveLayer``.

    The placement lives in the tensors ``w13_weight``, ``w2_weight``, ``log2phy`` and ``expert_map`` alone,
    which are read anew at each call: whoever writes another placement into them in place, on all ranks
    between the same two steps, changes no output. (Dispatch goes by physical id; ``expert_map`` is kept for
    kernels that want it.)

    Parameters
    ----------
    shape
        Layer index, E, H and I.
    phy2log_RS
        int32 ``[R, S]``: the logical expert in each slot of each rank. R is the size of ``ep_group``.
    experts
        Builds any logical expert's weights; asked for this rank's experts only.
    log2phy_E
        int32 ``[E]``: this rank's table. By default source rank ``r`` uses replica ``r % k``, or the first
        replica on all ranks where the dispatcher lets all ranks see the same tokens.
    dispatcher
        ``"all2allv"``, ``"allgather"``, ``"mc2"`` or ``"moge"``. The last is for grouped experts: each token
        chooses K/R experts on each rank.
    ep_group
        The ranks; ``None`` is a rank alone.
    heat_rows
        W, the steps that the heat rings hold.
    quantized
        W8A8: int8 weights with a scale per output row; tokens are quantized at each call, with a scale each.
    dtype
        The tokens' type, and the weights' unless quantized.
    check_ids
        Whether top-k ids are checked against E at each call. By default only on a CPU: elsewhere the check
        would wait for the device.

    Raises ``ValueError`` where placement, table, group and shapes do not fit together.
    """

    w13_weight: torch.Tensor
    """``[S, 2*I, H]``, the gate's rows before the up projection's."""

    w2_weight: torch.Tensor
    """``[S, H, I]``."""

    w13_weight_scale: torch.Tensor | None
    """float32 ``[S, 2*I]`` where weights are int8, else ``None``."""

    w2_weight_scale: torch.Tensor | None
    """float32 ``[S, H]`` where weights are int8, else ``None``."""

    expert_map: torch.Tensor
    log2phy: torch.Tensor
    moe_load: torch.Tensor
    """int32 ``[W, S]``: token choices that each slot worked on, from all ranks."""

    source_load: torch.Tensor | None
    """int32 ``[W, E]``: choices of the tokens that this rank passed to ``forward``, by logical expert.

    Each token counts on the one rank that passed it, under every dispatcher: a sum over ranks counts it once.
    """

    load_counter: torch.Tensor

    def __init__(
        self,
        shape: MoEShape,
        phy2log_RS: Int32,
        experts: ExpertSource,
        *,
        log2phy_E: Int32 | None = None,
        dispatcher: str = "all2allv",
        ep_group: dist.ProcessGroup | None = None,
        heat_rows: int = 64,
        quantized: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        check_ids: bool | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self._dtype = dtype
        device = torch.device(device)
        group = EpGroup(ep_group)
        if heat_rows < 1:
            raise ValueError(f"layer {shape.layer}: a heat ring has at least one row, got {heat_rows}")
        shared = dispatcher in SHARED_TOKEN_DISPATCHERS
        placed = rank_placement(
            shape.layer, shape.experts, phy2log_RS, group.rank, group.size, log2phy_E, shared
        )
        slots = len(placed.logical_S)
        self._operators = operators_for(device)
        self._dispatcher = build_dispatcher(dispatcher, group, slots, self._operators)
        self._check_ids = device.type == "cpu" if check_ids is None else check_ids

        weights = build_weights(shape, experts, placed.logical_S, dtype, device)
        if quantized:
            weights = weights.quantize(self._operators)
        self.register_buffer("w13_weight", weights.w13_SIH)
        self.register_buffer("w2_weight", weights.w2_SHI)
        self.register_buffer("w13_weight_scale", weights.w13_scale_SI)
        self.register_buffer("w2_weight_scale", weights.w2_scale_SH)
        tables = {
            "expert_map": torch.tensor(placed.expert_map_E, dtype=torch.int32, device=device),
            "log2phy": torch.tensor(placed.log2phy_E, dtype=torch.int32, device=device),
            "moe_load": torch.zeros(heat_rows, slots, dtype=torch.int32, device=device),
            "source_load": torch.zeros(heat_rows, shape.experts, dtype=torch.int32, device=device),
            "load_counter": torch.zeros((), dtype=torch.int64, device=device),
        }
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)

    def expert_weights(self) -> list[torch.Tensor]:
        """Every tensor that the expert kernels read, with the local slot as first dimension."""
        return self._weights().tensors()

    @torch.no_grad()
    def forward(
        self, hidden_TH: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """This rank's tokens through their experts on all ranks, ``[T, H]``; each rank has its own T >= 0.

        All ranks of the group call this at every step. ``topk_ids`` int32 or int64 and ``topk_weights`` (any
        float dtype) are ``[T, K]``, by logical expert. The weighted sum is made in float32. Raises
        ``ValueError`` naming layer and tensor on wrong shapes, dtypes, devices or ids, before any collective
        is entered.
        """
        self.shape.check_tokens(
            hidden_TH, topk_ids_TK, topk_weights_TK, self._dtype, self.w13_weight.device, self._check_ids
        )
        weights = self._weights()
        dispatched = self._dispatcher.dispatch(
            DispatchRequest(
                hidden_TH,
                topk_ids_TK,
                topk_weights_TK,
                self.log2phy,
                check_values=self._check_ids,
                quantized=weights.quantized,
            )
        )
        rows_NH = run_experts(self._operators, dispatched, weights, hidden_TH.dtype)
        self._record(token_counts(dispatched.group_list_S, dispatched.group_list_type), topk_ids_TK)
        return self._dispatcher.combine(rows_NH, dispatched.metadata)

    def _weights(self) -> ExpertWeights:
        return ExpertWeights(self.w13_weight, self.w2_weight, self.w13_weight_scale, self.w2_weight_scale)

    def _record(self, received_S: torch.Tensor, topk_ids_TK: torch.Tensor) -> None:
        """Write this step's heat to its row of the rings."""
        write_row(self.moe_load, received_S, self.load_counter)
        if self.source_load is not None:
            write_row(self.source_load, count_ids(topk_ids_TK, self.shape.experts), self.load_counter)
        self.load_counter.add_(1)
