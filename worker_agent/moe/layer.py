"""The expert-parallel MoE layer: this rank's experts, and the forward pass that all ranks make together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from eplb_service.placement import Int32
from eplb_service.wire.heat import StepPhase
from worker_agent.moe.composition import LayerOptions, compose
from worker_agent.moe.dispatch import SHARED_TOKEN_DISPATCHERS, DispatchRequest
from worker_agent.moe.eplb_state import EplbState, HeatStage
from worker_agent.moe.maps import check_grouped, rank_placement
from worker_agent.moe.operators import operators_for
from worker_agent.moe.prepare import Prepared, Tokens
from worker_agent.moe.rank_group import RankGroup
from worker_agent.moe.shape import MoEShape, real_ids
from worker_agent.moe.shared_experts import SharedExperts
from worker_agent.moe.weights import ExpertSource, ExpertWeights, build_weights, movable_weights


class ExpertParallelMoE(EplbState):
    """One MoE layer on one of R ranks, in the shape that inference engines give it; a ``LiveLayer``.

    The placement lives in the tensors ``w13_weight``, ``w2_weight``, ``log2phy`` and ``expert_map`` alone,
    which are read at each call: whoever writes another placement into them in place, on all ranks
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
    shared_experts
        Run beside dispatch and combine, and added to the outputs.
    heat_stage
        The steps whose heat counts; the others get rows of zeros.
    options
        What the layer is made of, where it is not to be the default.

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
        shared_experts: SharedExperts | None = None,
        heat_stage: HeatStage = HeatStage.ALL,
        options: LayerOptions | None = None,
    ) -> None:
        device = torch.device(device)
        group = RankGroup(ep_group)
        shared = dispatcher in SHARED_TOKEN_DISPATCHERS
        placed = rank_placement(
            shape.layer, shape.experts, phy2log_RS, group.rank, group.size, log2phy_E, shared
        )
        if dispatcher == "moge":
            check_grouped(shape.layer, phy2log_RS)
        super().__init__(shape.layer, placed, heat_rows, heat_stage, device)
        self.shape = shape
        self.shares_tokens = shared
        self._dtype = dtype
        slots = len(placed.logical_S)
        operators = operators_for(device)
        self._options = LayerOptions() if options is None else options
        self._parts = compose(dispatcher, group, slots, operators, device, quantized, self._options)
        self._shared_experts = shared_experts
        self._check_ids = device.type == "cpu" if check_ids is None else check_ids

        weights = build_weights(shape, experts, placed.logical_S, dtype, device)
        if quantized:
            weights = weights.quantize(operators)
        for name in ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"):
            self.register_buffer(name, weights.named().get(name))

    def expert_weights(self) -> list[torch.Tensor]:
        """Every tensor that the expert kernels read, with the local slot as first dimension."""
        return self._weights().tensors()

    def get_expert_weights(self) -> list[torch.Tensor]:
        """The same tensors as one ``[S, -1]`` view each, in place: what balancing moves."""
        return list(
            movable_weights(
                self.shape.layer, self.w13_weight.shape[0], self._weights().named().items()
            ).values()
        )

    @torch.no_grad()
    def forward(
        self,
        hidden_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        *,
        active: torch.Tensor | None = None,
        phase: StepPhase | None = None,
        workspace_set: int = 0,
    ) -> torch.Tensor:
        """This rank's tokens through their experts on all ranks, ``[T, H]``; each rank has its own T >= 0.

        All ranks of the group call this at every step. ``topk_ids`` int32 or int64 and ``topk_weights`` (any
        float dtype) are ``[T, K]``, by logical expert. ``active`` (bool ``[T]`` or ``[T, K]``) marks the real tokens or
        choices; the rest is padding, which is routed nowhere, gives zeros and counts nowhere; in a dummy ``phase``
        nothing is real. Shared experts' outputs are added. The weighted sum is made in float32.

        Raises ``ValueError`` naming layer and tensor on wrong shapes, dtypes, devices or ids, before any collective
        is entered; ``worker_agent.moe.shape`` says how that ends on the other ranks.
        """
        device, dtype = self.w13_weight.device, self._dtype
        self.shape.check_tokens(hidden_TH, topk_ids_TK, topk_weights_TK, dtype, device, self._check_ids)
        self._options.check_call(self.shape.layer, topk_ids_TK, self._check_ids)
        self._check_phase(phase)
        ids_TK = real_ids(self.shape, topk_ids_TK, active, phase)
        prepared = self._parts.preparation.prepare(Tokens(hidden_TH, (ids_TK, topk_weights_TK)))
        result = self._parts.kernel.run(
            self._request(prepared, ids_TK is not topk_ids_TK),
            self._weights(),
            dtype,
            beside=None if self._shared_experts is None else self._shared_experts.beside(hidden_TH),
            workspace_set=workspace_set,
        )
        self._record(result.heat_S, ids_TK[prepared.source], phase)
        out_TH = self._parts.preparation.finalize(result.out_TH, prepared.metadata)
        return out_TH if result.beside_TH is None else out_TH + result.beside_TH

    def _weights(self) -> ExpertWeights:
        return ExpertWeights(self.w13_weight, self.w2_weight, self.w13_weight_scale, self.w2_weight_scale)

    def _request(self, prepared: Prepared[Any], masked: bool) -> DispatchRequest:
        ids_TK, weights_TK = prepared.routing
        if prepared.active_T is not None:
            masked = True
            ids_TK = ids_TK.masked_fill(~prepared.active_T.unsqueeze(1), -1)
        request = DispatchRequest(
            prepared.hidden_TH,
            ids_TK,
            weights_TK,
            self.log2phy,
            masked=masked,
            scale_T=prepared.scale_T,
            check_values=self._check_ids,
        )
        return request.weighed_on_input() if self._options.weigh_on_input else request
