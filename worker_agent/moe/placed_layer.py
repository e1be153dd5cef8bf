"""What a layer is under a placement on a group of ranks: maps, tables, heat, experts, and the paths through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from eplb_service.placement import Int32
from worker_agent.moe.composition import LayerOptions, compose
from worker_agent.moe.dispatch import SHARED_TOKEN_DISPATCHERS
from worker_agent.moe.eplb_state import EplbState, HeatStage
from worker_agent.moe.expert_tensors import ExpertTensors
from worker_agent.moe.maps import check_grouped, rank_placement
from worker_agent.moe.operators import check_dtype, operators_for
from worker_agent.moe.prepare import Preparation
from worker_agent.moe.rank_group import RankGroup
from worker_agent.moe.routed_experts import RoutedExperts
from worker_agent.moe.shape import MoEShape
from worker_agent.moe.shared_experts import SharedExperts
from worker_agent.moe.side_stream import SideStream
from worker_agent.moe.stepwise import StepwiseSplit, check_splittable
from worker_agent.moe.weights import ExpertSource, build_weights


class PlacedLayer(EplbState, ExpertTensors):
    """All of an ``ExpertParallelMoE`` but its forward pass.

    Parameters
    ----------
    shape
        Layer index, E, H, I and activation.
    phy2log_RS
        int32 ``[R, S]``: the logical expert in each slot of each rank. R is the size of ``ep_group``.
    experts
        Builds any logical expert's weights; asked for this rank's experts only.
    biases
        The same of the experts' biases, where they have any.
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
    routed_experts
        Where each step's choices are recorded, if anywhere; shared with the model's other layers.
    options
        What the layer is made of, where it is not to be the default.

    Raises ``ValueError`` where placement, table, group and shapes do not fit together.
    """

    def __init__(
        self,
        shape: MoEShape,
        phy2log_RS: Int32,
        experts: ExpertSource,
        *,
        biases: ExpertSource | None = None,
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
        routed_experts: RoutedExperts | None = None,
        options: LayerOptions | None = None,
    ) -> None:
        super().__init__(shape.layer, heat_stage)
        self.shape = shape
        self._device = torch.device(device)
        check_dtype(shape.layer, self._device.type, dtype)
        self._dtype = dtype
        self._quantized = quantized
        self._dispatchers = [dispatcher] if isinstance(dispatcher, str) else list(dispatcher)
        self.shares_tokens = any(name in SHARED_TOKEN_DISPATCHERS for name in self._dispatchers)
        self.rank_bound = "moge" in self._dispatchers
        self._options = LayerOptions() if options is None else options
        if self._options.split == "step":
            check_splittable(shape.layer, self._dispatchers, self._device.type)
        self._shared_experts = shared_experts
        self._side_stream = SideStream.of(self._device) if self._options.multistream else None
        self._routed_experts = routed_experts
        self._check_ids = self._device.type == "cpu" if check_ids is None else check_ids
        group = ep_group if isinstance(ep_group, RankGroup) else RankGroup(ep_group)
        self._place(group, phy2log_RS, log2phy_E, dealing_width, heat_rows, self._options)
        self._fill(experts, biases, phy2log_RS)

    @property
    def ep_rank(self) -> int:
        """This rank's number among those of its group."""
        return self._group.rank

    @property
    def ep_size(self) -> int:
        """How many ranks its group has."""
        return self._group.size

    def regroup(
        self,
        ep_group: dist.ProcessGroup | RankGroup | None,
        phy2log_RS: Int32,
        experts: ExpertSource,
        *,
        biases: ExpertSource | None = None,
        log2phy_E: Int32 | None = None,
        preparations: Mapping[str, Preparation[Any]] | None = None,
    ) -> None:
        """Serve on another group of ranks, as when a deployment grows or shrinks.

        Maps, tables, heat rings, paths and experts are made from scratch, as a new layer's would be: their tensors have
        other addresses, so that graphs are to be captured and agents to be started again. All ranks of the new group
        call it between the same two steps, with the arguments of the constructor. Raises ``ValueError`` as that does,
        and where the layer has preparations of its own (``LayerOptions``), which belong to the old group, and none are
        given for the new one.

        Parameters
        ----------
        ep_group
            The new group of ranks.
        phy2log_RS
            int32 ``[R, S]``, its placement.
        experts, biases
            Where weights come from, and biases, if there are any.
        log2phy_E
            This rank's table; by default as for a new layer.
        preparations
            Those of the new group, where the layer has some of its own.
        """
        if preparations is None and self._options.preparations:
            raise ValueError(
                f"layer {self.shape.layer}: its preparations belong to the old group; give those of the new one"
            )
        options = replace(self._options, preparations=preparations or {})
        group = ep_group if isinstance(ep_group, RankGroup) else RankGroup(ep_group)
        width = 1 if self.log2phy.ndim == 1 else self.log2phy.shape[1]
        self._place(group, phy2log_RS, log2phy_E, width, self.moe_load.shape[0], options)
        self._fill(experts, biases, phy2log_RS)

    def install_placement(self, phy2log_RS: Int32) -> None:
        """Take note of where all ranks' replicas are; see ``EplbState``. Splits by step go by it."""
        super().install_placement(phy2log_RS)
        if self._split is not None:
            self._split.install(phy2log_RS)

    def _place(
        self,
        group: RankGroup,
        phy2log_RS: Int32,
        log2phy_E: Int32 | None,
        dealing_width: int,
        heat_rows: int,
        options: LayerOptions,
    ) -> None:
        """Maps, tables, heat rings and paths of this rank of a group; checked before anything is changed."""
        shape, device, names = self.shape, self._device, self._dispatchers
        placed = rank_placement(
            shape.layer,
            shape.experts,
            phy2log_RS,
            group.rank,
            group.size,
            log2phy_E,
            self.shares_tokens,
            dealing_width,
        )
        if "moge" in names:
            check_grouped(shape.layer, phy2log_RS)
        self._track(placed, heat_rows, device)
        self._group, self._options = group, options
        self._paths = compose(
            names,
            group,
            phy2log_RS.shape[1],
            operators_for(device),
            device,
            self._quantized,
            options,
            shape.activation,
        )
        self._split = None
        if options.split == "step":
            self._split = StepwiseSplit(phy2log_RS, shape.experts, device, options.split_rounds)

    def _fill(self, experts: ExpertSource, biases: ExpertSource | None, phy2log_RS: Int32) -> None:
        """This rank's experts."""
        shape, logical_S = self.shape, phy2log_RS[self._group.rank].tolist()
        weights = build_weights(shape, experts, logical_S, self._dtype, self._device, biases)
        if self._quantized:
            weights = weights.quantize(operators_for(self._device), self._dtype)
        self._hold(shape.layer, weights, gated=shape.activation.gated)
