"""The expert-parallel MoE layer: this rank's experts, and the forward pass that all ranks make together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from eplb_service.placement import Int32
from eplb_service.wire.heat import StepPhase
from worker_agent.moe.checkpoint import ExpertParameter, Granularity
from worker_agent.moe.composition import LayerOptions, LayerPath, compose
from worker_agent.moe.dispatch import SHARED_TOKEN_DISPATCHERS, DispatchRequest
from worker_agent.moe.eplb_state import EplbState, HeatStage
from worker_agent.moe.kernel import KernelResult, WorkBeside, run_two
from worker_agent.moe.maps import check_grouped, rank_placement
from worker_agent.moe.operators import check_dtype, operators_for
from worker_agent.moe.prepare import Prepared, Tokens
from worker_agent.moe.rank_group import RankGroup
from worker_agent.moe.shape import MicroBatch, MoEShape, masked_outputs, real_ids
from worker_agent.moe.shared_experts import SharedExperts
from worker_agent.moe.stepwise import StepwiseSplit, check_splittable
from worker_agent.moe.weights import ExpertSource, ExpertWeights, build_weights, movable_weights


class ExpertParallelMoE(EplbState):
    """One MoE layer on one of R ranks, in the shape that inference engines give it; a ``LiveLayer``.

    The placement lives in the tensors ``w13_weight``, ``w2_weight``, ``log2phy`` and ``expert_map`` alone,
    which are read at each call: whoever writes another placement into them in place, on all ranks
    between the same two steps, changes no output. Where tokens are split by step, ``install_placement`` must
    follow. (Dispatch goes by physical id; ``expert_map`` is kept for kernels that want it.)

    Parameters
    ----------
    shape
        Layer index, E, H and I.
    phy2log_RS
        int32 ``[R, S]``: the logical expert in each slot of each rank. R is the size of ``ep_group``.
    experts
        Builds any logical expert's weights; asked for this rank's experts only.
    log2phy_E
        int32 ``[E]``: this rank's table, or ``[E, D]`` a dealing table: its tokens of an expert go to the entries in
        turn, from the first one on in each step. By default source rank ``r`` begins at replica ``r % k``, or all ranks
        at the first where a dispatcher lets all ranks see the same tokens.
    dealing_width
        D of the default table. Every table that is written later has as many entries.
    dispatcher
        ``"all2allv"``, ``"allgather"``, ``"mc2"`` or ``"moge"``, or several of them, of which each step chooses
        one and the first is the default. MoGE is for grouped experts: each token chooses K/R experts on each rank.
        Where all-gather or MoGE is among them, the log2phy tables of all ranks must be the same.
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
    """``[S, 2*I]`` where weights are int8, bfloat16 for tokens of that type and else float32; ``None`` otherwise."""

    w2_weight_scale: torch.Tensor | None
    """``[S, H]``, as ``w13_weight_scale``."""

    def __init__(
        self,
        shape: MoEShape,
        phy2log_RS: Int32,
        experts: ExpertSource,
        *,
        log2phy_E: Int32 | None = None,
        dealing_width: int = 1,
        dispatcher: str | Sequence[str] = "all2allv",
        ep_group: dist.ProcessGroup | RankGroup | None = None,
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
        check_dtype(shape.layer, device.type, dtype)
        group = ep_group if isinstance(ep_group, RankGroup) else RankGroup(ep_group)
        names = [dispatcher] if isinstance(dispatcher, str) else list(dispatcher)
        shared = any(name in SHARED_TOKEN_DISPATCHERS for name in names)
        placed = rank_placement(
            shape.layer, shape.experts, phy2log_RS, group.rank, group.size, log2phy_E, shared, dealing_width
        )
        if "moge" in names:
            check_grouped(shape.layer, phy2log_RS)
        super().__init__(shape.layer, placed, heat_rows, heat_stage, device)
        self.shape = shape
        self.shares_tokens = shared
        self._group = group
        self._dtype = dtype
        slots = len(placed.logical_S)
        operators = operators_for(device)
        self._options = LayerOptions() if options is None else options
        self._paths = compose(names, group, slots, operators, device, quantized, self._options)
        self._split = None
        if self._options.split == "step":
            check_splittable(shape.layer, names, device.type)
            self._split = StepwiseSplit(phy2log_RS, shape.experts, device, self._options.split_rounds)
        self._shared_experts = shared_experts
        self._check_ids = device.type == "cpu" if check_ids is None else check_ids

        weights = build_weights(shape, experts, placed.logical_S, dtype, device)
        if quantized:
            weights = weights.quantize(operators, dtype)
        for name in ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"):
            self.register_buffer(name, weights.named().get(name))

    def install_placement(self, phy2log_RS: Int32) -> None:
        """Take note of where all ranks' replicas are, int32 ``[R, S]``, for splits that go by it.

        Whoever writes another placement into the layer calls this on all ranks, between the same two steps.
        """
        if self._split is not None:
            self._split.install(phy2log_RS)

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

    def checkpoint_parameters(self) -> dict[str, tuple[ExpertParameter, ExpertParameter]]:
        """What an ``ExpertLoader`` fills: by checkpoint suffix, the tensors of w1 and w3, and of w2."""
        found = {"weight": (ExpertParameter(self.w13_weight), ExpertParameter(self.w2_weight))}
        if self.w13_weight_scale is not None and self.w2_weight_scale is not None:
            found["weight_scale"] = (
                ExpertParameter(self.w13_weight_scale, Granularity.CHANNEL),
                ExpertParameter(self.w2_weight_scale, Granularity.CHANNEL),
            )
        return found

    @torch.no_grad()
    def forward(
        self,
        hidden_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        *,
        active: torch.Tensor | None = None,
        phase: StepPhase | None = None,
        dispatcher: str | None = None,
        length: int | None = None,
        workspace_set: int = 0,
    ) -> torch.Tensor:
        """This rank's tokens through their experts on all ranks; each rank has its own T >= 0.

        All ranks of the group call this at every step, with the same ``dispatcher``, ``length`` and kind of phase.

        Parameters
        ----------
        hidden_TH
            ``[T, H]`` of the layer's dtype.
        topk_ids_TK, topk_weights_TK
            ``[T, K]``, int32 or int64 by logical expert, and any float dtype.
        active
            bool ``[T]`` or ``[T, K]``: the real tokens or choices. Others are padding: routed nowhere and counted
            nowhere. A padding token's output is zeros; one whose choices alone are masked keeps its shared experts.
        phase
            What kind of step it is; in a dummy one nothing is real. Needed where ``heat_stage`` is not all.
        dispatcher
            One of the layer's, for this step; by default its first.
        length
            The tokens that MC2 pads every rank's to, where the host knows it; otherwise the ranks exchange their
            numbers and wait for them.

        Returns
        -------
        torch.Tensor
            ``[T, H]``: the weighted sum of each token's experts, and its shared experts' output.

        Raises
        ------
        ValueError
            Names layer and tensor on wrong shapes, dtypes, devices or ids, before any collective is entered;
            ``worker_agent.moe.shape`` says how that ends on the other ranks.
        """
        batch = MicroBatch(hidden_TH, topk_ids_TK, topk_weights_TK, active)
        path, own_TK = self._path(dispatcher), self._checked(batch, phase)
        prepared, request = self._prepared(path, batch, own_TK, length)
        result = path.kernel.run(
            request, self._weights(), self._dtype, beside=self._beside(batch), workspace_set=workspace_set
        )
        self._record(result.heat_S, own_TK[prepared.source].reshape(-1), phase)
        return self._finished(path, batch, prepared, result, phase)

    @torch.no_grad()
    def forward_two(
        self,
        first: MicroBatch,
        second: MicroBatch,
        *,
        phase: StepPhase | None = None,
        dispatcher: str | None = None,
        length: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two micro-batches as one step: the tokens of one travel while the experts work on the other's.

        Their heat is one row of the rings. Outputs, arguments and errors are ``forward``'s, of each micro-batch.
        """
        path = self._path(dispatcher)
        batches = (first, second)
        own = [self._checked(batch, phase) for batch in batches]
        ready = [
            self._prepared(path, batch, own_TK, length) for batch, own_TK in zip(batches, own, strict=True)
        ]
        results = run_two(
            path.kernel,
            (ready[0][1], ready[1][1].after(ready[0][1])),
            self._weights(),
            self._dtype,
            beside=(self._beside(first), self._beside(second)),
        )
        sources = [
            own_TK[prepared.source].reshape(-1) for own_TK, (prepared, _) in zip(own, ready, strict=True)
        ]
        self._record(results[0].heat_S + results[1].heat_S, torch.cat(sources), phase)
        outputs = [
            self._finished(path, batch, prepared, result, phase)
            for batch, (prepared, _), result in zip(batches, ready, results, strict=True)
        ]
        return outputs[0], outputs[1]

    def _path(self, dispatcher: str | None) -> LayerPath:
        if dispatcher is None:
            return next(iter(self._paths.values()))
        if dispatcher not in self._paths:
            raise ValueError(
                f"layer {self.shape.layer}: dispatcher must be one that the layer was built with, "
                f"{' or '.join(self._paths)}; got {dispatcher!r}"
            )
        return self._paths[dispatcher]

    def _checked(self, batch: MicroBatch, phase: StepPhase | None) -> torch.Tensor:
        """A batch's ids ``[T, K]``, -1 where a choice is not real; raises as ``forward`` does."""
        shape, device = self.shape, self.w13_weight.device
        shape.check_tokens(
            batch.hidden_TH, batch.topk_ids_TK, batch.topk_weights_TK, self._dtype, device, self._check_ids
        )
        self._check_phase(phase)
        ids_TK = real_ids(shape, batch.topk_ids_TK, batch.active, phase)
        self._options.check_choices(shape.layer, ids_TK, self._check_ids)
        return ids_TK

    def _prepared(
        self, path: LayerPath, batch: MicroBatch, own_TK: torch.Tensor, length: int | None
    ) -> tuple[Prepared[Any], DispatchRequest]:
        tokens = Tokens(batch.hidden_TH, (own_TK, batch.topk_weights_TK))
        prepared = path.preparation.prepare(tokens, length)
        path.check_room(self.shape.layer, prepared.hidden_TH.shape[0])
        ids_TK, weights_TK = prepared.routing
        masked = own_TK is not batch.topk_ids_TK
        if prepared.active_T is not None:
            masked = True
            ids_TK = ids_TK.masked_fill(~prepared.active_T.unsqueeze(1), -1)
        request = DispatchRequest(
            prepared.hidden_TH,
            ids_TK,
            weights_TK,
            self.log2phy,
            masked=masked,
            physical_TK=self._physical(path, ids_TK),
            scale_T=prepared.scale_T,
            check_values=self._check_ids,
        )
        return prepared, request.weighed_on_input() if self._options.weigh_on_input else request

    def _physical(self, path: LayerPath, ids_TK: torch.Tensor) -> torch.Tensor | None:
        """The physical expert of each choice, where they are split by step."""
        if self._split is None:
            return None
        return self._split.split(ids_TK, None if path.shares_tokens else self._group)

    def _beside(self, batch: MicroBatch) -> WorkBeside | None:
        return None if self._shared_experts is None else self._shared_experts.beside(batch.hidden_TH)

    def _finished(
        self,
        path: LayerPath,
        batch: MicroBatch,
        prepared: Prepared[Any],
        result: KernelResult,
        phase: StepPhase | None,
    ) -> torch.Tensor:
        """A batch's own outputs, with those of its shared experts; zeros for padding."""
        out_TH: torch.Tensor = path.preparation.finalize(result.out_TH, prepared.metadata)
        if result.beside_TH is None:
            return out_TH
        return masked_outputs(out_TH + result.beside_TH, batch.active, phase)

    def _weights(self) -> ExpertWeights:
        return ExpertWeights(self.w13_weight, self.w2_weight, self.w13_weight_scale, self.w2_weight_scale)
