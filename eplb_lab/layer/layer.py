"""Expert-parallel MoE layer: the experts of one rank under a placement, and their forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from eplb_core.heat.phase import StepPhase
from eplb_core.placement import Int32
from eplb_lab.layer.compose import LayerGroups, LayerOptions, LayerPath
from eplb_lab.layer.dispatch import SHARED_TOKEN_DISPATCHERS, DispatchRequest
from eplb_lab.layer.operators import check_dtype, operators_for
from eplb_lab.layer.prepare import Prepared
from eplb_lab.layer.quantization import quant_method
from eplb_lab.layer.rank_group import RankGroup
from eplb_lab.layer.shape import MicroBatch, MoEShape, masked_outputs, real_ids
from eplb_lab.layer.shared_experts import SharedExperts
from eplb_lab.layer.state import EplbState, check_grouped, checked_table
from eplb_lab.layer.weights import ExpertSource, ExpertTensors, fill_weights
from worker_agent.stepwise import StepwiseSplit


class ExpertParallelMoE(EplbState, ExpertTensors):
    """One MoE layer on one of R ranks, a ``LiveLayer`` with an interface like those of inference engines.

    On each call, the layer reads its layout from the tensors ``w13_weight``, ``w2_weight``, ``log2phy`` and
    ``expert_map``. A caller may write a new layout into them in place, on all ranks between the same two steps, without
    changing the outputs. If the layer has a stepwise split, the caller must also call ``install_placement``. Dispatch
    uses physical ids; ``expert_map`` exists for kernels that need it.

    Parameters
    ----------
    shape
        Layer index, E, H, I and activation.
    phy2log_RS
        Placement, int32 ``[R, S]``: logical expert in each slot of each rank. R is the size of ``ep_group``.
    experts
        Source of the experts' weights, called only for this rank's experts. If ``None``, load the weights with an
        ``ExpertLoader`` and call ``process_after_load``.
    biases
        Source of the experts' biases, if they have any.
    log2phy_E
        This rank's table, int32 ``[E]``, or a dealing table ``[E, D]``. With a dealing table, the rank's tokens for an
        expert are sent to its entries in turn, starting at the first entry in each step. In the default table, source
        rank ``r`` starts at replica ``r % k`` of k, or at the first replica if a dispatcher gives all ranks the same
        tokens.
    dealing_width
        D of the default table. All tables that are written later have the same number of entries.
    dispatcher
        ``"all2allv"``, ``"allgather"``, ``"mc2"`` or ``"moge"``, or a sequence of them. Each step can select any of
        them; the first is the default. MoGE is for grouped experts: each token chooses K/R experts on each rank. With
        all-gather or MoGE, the tables of all ranks must be the same.
    ep_group
        Ranks of the layer; ``None`` for a single rank.
    mc2_group
        Process group of the same ranks that is reserved for MC2's operators, as CANN requires. Layers may share it. The
        default is ``ep_group``, which MC2 rejects on an NPU.
    heat_rows
        W, the number of steps that the heat rings hold.
    quantization
        ``"none"``, ``"w8a8"`` or ``"w8a8_dynamic"``. W8A8 has int8 weights with one scale per output row, and quantises
        tokens on each call, with one scale per token. ``"w8a8"`` quantises floating-point weights after they are
        loaded; ``"w8a8_dynamic"`` loads weights that are int8 already.
    dtype
        Data type of the tokens, and of the weights unless they are quantised.
    device
        Device of the layer's tensors.
    check_ids
        Check top-k ids against E on each call. By default this is done only on a CPU, because the check would make the
        host wait for an accelerator.
    shared_experts
        Shared experts, which run while tokens are in transit. Their outputs are added to the layer's outputs.
    options
        Options that change the parts of the layer.

    Raises
    ------
    ValueError
        If the placement, table, group and shapes are inconsistent.

    Examples
    --------
    A single rank holds expert 1 in slot 0 and expert 0 in slot 1. Two of three tokens choose expert 0:

    >>> import numpy as np
    >>> from eplb_lab.layer import MoEShape, seeded_experts
    >>> shape = MoEShape(layer=0, experts=2, hidden=4, intermediate=6)
    >>> layer = ExpertParallelMoE(shape, np.array([[1, 0]], dtype=np.int32), seeded_experts(shape))
    >>> layer(torch.randn(3, 4), torch.tensor([[0], [1], [0]]), torch.ones(3, 1)).shape
    torch.Size([3, 4])
    >>> layer.moe_load[0].tolist(), layer.source_load[0].tolist()  # by slot, by expert
    ([1, 2], [2, 1])
    """

    def __init__(
        self,
        shape: MoEShape,
        phy2log_RS: Int32,
        experts: ExpertSource | None,
        *,
        biases: ExpertSource | None = None,
        log2phy_E: Int32 | None = None,
        dealing_width: int = 1,
        dispatcher: str | Sequence[str] = "all2allv",
        ep_group: dist.ProcessGroup | RankGroup | None = None,
        mc2_group: dist.ProcessGroup | RankGroup | None = None,
        heat_rows: int = 64,
        quantization: str = "none",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        check_ids: bool | None = None,
        shared_experts: SharedExperts | None = None,
        options: LayerOptions | None = None,
    ) -> None:
        super().__init__()
        self._dispatchers = [dispatcher] if isinstance(dispatcher, str) else list(dispatcher)
        self._quantization = quantization
        self.shape = shape
        self._device = device = torch.device(device)
        options = LayerOptions() if options is None else options
        options.check(self._dispatchers, quantization)
        check_dtype(shape.layer, device.type, dtype)
        self._dtype = dtype
        self._operators = operators_for(device)
        self._method = quant_method(shape.layer, quantization, self._operators, shape.activation)
        self._check_ids = device.type == "cpu" if check_ids is None else check_ids
        self._shared_experts = shared_experts
        self.shares_tokens = self.gathers_all = any(
            name in SHARED_TOKEN_DISPATCHERS for name in self._dispatchers
        )
        self.rank_bound = "moge" in self._dispatchers
        if heat_rows < 1:
            raise ValueError(f"layer {shape.layer}: heat_rows must be at least 1, got {heat_rows}")
        groups = LayerGroups.of(ep_group, mc2_group)
        self._build(groups, phy2log_RS, experts, biases, log2phy_E, dealing_width, heat_rows, options)

    def regroup(
        self,
        ep_group: dist.ProcessGroup | RankGroup | None,
        phy2log_RS: Int32,
        experts: ExpertSource | None,
        *,
        biases: ExpertSource | None = None,
        log2phy_E: Int32 | None = None,
        mc2_group: dist.ProcessGroup | RankGroup | None = None,
        options: LayerOptions | None = None,
    ) -> None:
        """Rebuild the layer for a different group of ranks, for example when a deployment grows or shrinks.

        All ranks of the new group call this between the same two steps. The expert map, tables, heat rings, exchanges
        and experts are created from scratch, as for a new layer. Their tensors have new addresses, so the caller must
        recapture graphs and start a new agent. The new agent's Hello opens a new group in the same deployment, and the
        service plans for that group once all agents of the old group have left.

        Parameters
        ----------
        ep_group
            New group of ranks; ``None`` for a single rank.
        phy2log_RS
            Placement of the new group, int32 ``[R, S]``.
        experts
            Source of the experts' weights; ``None`` if they are loaded later.
        biases
            Source of the experts' biases.
        log2phy_E
            This rank's table; the default is the same as for a new layer.
        mc2_group
            Process group for MC2; defaults to ``ep_group``.
        options
            New options; defaults to the layer's options. Options that contain groups must be replaced.

        Raises
        ------
        ValueError
            If the arguments are inconsistent, as for a new layer. Also if the layer's options contain groups of the old
            ranks and are not replaced, or if only one of the layer and the new experts has biases. In all cases,
            the layer is left unchanged.
        """
        if options is None:
            options = self._options
            if options.tp_group is not None or options.dp_groups:
                raise ValueError(
                    f"layer {self.shape.layer}: tp_group and dp_groups belong to the old group; pass options with "
                    "groups of the new ranks"
                )
        options.check(self._dispatchers, self._quantization)
        if experts is not None and (biases is not None) != (self._weights().w13_bias_SI is not None):
            raise ValueError(f"layer {self.shape.layer}: pass biases if, and only if, the layer has biases")
        width = 1 if self.log2phy.dim() == 1 else self.log2phy.shape[1]
        groups = LayerGroups.of(ep_group, mc2_group)
        rows = self.moe_load.shape[0]
        self._build(groups, phy2log_RS, experts, biases, log2phy_E, width, rows, options)

    def _build(
        self,
        groups: LayerGroups,
        phy2log_RS: Int32,
        experts: ExpertSource | None,
        biases: ExpertSource | None,
        log2phy_E: Int32 | None,
        dealing_width: int,
        heat_rows: int,
        options: LayerOptions,
    ) -> None:
        """Build everything that depends on the group and the placement.

        The layer is changed only after all arguments have been validated.
        """
        shape = self.shape
        device = self._device
        operators = self._operators
        method = self._method
        group = groups.ep
        table_E = checked_table(
            shape.layer,
            shape.experts,
            phy2log_RS,
            group.rank,
            group.size,
            log2phy_E,
            self.shares_tokens,
            dealing_width,
        )
        if self.rank_bound:
            check_grouped(shape.layer, phy2log_RS)
        slots = phy2log_RS.shape[1]
        paths = {
            name: LayerPath.of(name, shape, groups, slots, operators, device, options, method)
            for name in self._dispatchers
        }
        split = None
        if options.split == "step":
            StepwiseSplit.check(shape.layer, self._dispatchers, device.type)
            split = StepwiseSplit(phy2log_RS, shape.experts, device)
        logical_S = phy2log_RS[group.rank].tolist()
        weights = method.create_weights(shape, len(logical_S), self._dtype, device, biases is not None)
        if experts is not None:
            fill_weights(weights, shape, logical_S, experts, biases)
            weights = method.process_after_load(weights, self._dtype)
        self._group = group
        self._options = options
        self._paths = paths
        self._split = split
        self.splits_by_step = split is not None
        self._track(phy2log_RS, group.rank, table_E, heat_rows, device)
        self._hold(shape.layer, weights)

    def process_after_load(self) -> None:
        """Convert the weights to the layer's compute format after a checkpoint has been loaded.

        Call this before an agent starts, because it may replace tensors. Their addresses are final afterwards.
        """
        self._hold(self.shape.layer, self._method.process_after_load(self._weights(), self._dtype))

    def extra_repr(self) -> str:
        """Return a summary of the layer, the rank, and the current expert of each slot."""
        expert_of = {int(slot): expert for expert, slot in enumerate(self.expert_map.tolist()) if slot >= 0}
        slots = ", ".join(f"{slot}->{expert_of[slot]}" for slot in sorted(expert_of))
        rank = f"layer {self.shape.layer}, rank {self.ep_rank} of {self.ep_size}"
        return f"{rank}, {len(expert_of)} of {self.shape.experts} experts by slot: {slots}"

    @property
    def ep_rank(self) -> int:
        """Index of this rank in its group."""
        return self._group.rank

    @property
    def ep_size(self) -> int:
        """Number of ranks in the group."""
        return self._group.size

    def install_placement(self, phy2log_RS: Int32) -> None:
        """Update the stepwise split for a new placement of all ranks, int32 ``[R, S]``.

        Call this on all ranks between the same two steps, when a new placement is written into the layer. It only
        writes into existing tensors.
        """
        if self._split is not None:
            self._split.install(phy2log_RS)

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
        profile: bool = False,
    ) -> torch.Tensor:
        """Run this rank's tokens through their experts on all ranks.

        All ranks of the group call this in every step, with the same ``dispatcher``, ``length`` and ``phase``. The
        number of tokens T may differ between ranks and may be 0.

        Parameters
        ----------
        hidden_TH
            Tokens ``[T, H]`` in the layer's dtype.
        topk_ids_TK
            Logical experts ``[T, K]``, int32 or int64.
        topk_weights_TK
            Weights ``[T, K]`` in any floating-point dtype.
        active
            Mask of the real tokens, bool ``[T]``, or of the real choices, ``[T, K]``. The rest is padding with
            arbitrary values, which is neither routed nor counted. The output of a padding token is zero. A token with
            masked choices still gets the output of the shared experts.
        phase
            Kind of the step. In a dummy step, no token is real.
        dispatcher
            Dispatcher for this step, by default the layer's first.
        length
            Common number of tokens to which MC2, all-gather and MoGE pad every rank. If it is ``None``, the ranks
            exchange their token counts and wait for the result. Otherwise, the host reads no device values. All-to-all
            does not pad and always waits for its counts, but a stepwise split uses ``length`` with all-to-all as well.
        profile
            True if the step only measures the machine. Its heat is then recorded as zeros.

        Returns
        -------
        torch.Tensor
            Weighted sum of each token's expert outputs, plus the shared experts' output, ``[T, H]``.

        Raises
        ------
        ValueError
            If the input is invalid. Shapes, dtypes, devices and ids are checked before any collective, but dispatcher
            limits are checked only after the preparation. See ``eplb_lab.layer.shape`` for the consequences on other
            ranks.
        """
        batch = MicroBatch(hidden_TH, topk_ids_TK, topk_weights_TK, active)
        (out_TH,) = self._step((batch,), phase, dispatcher, length, profile)
        return out_TH

    @torch.no_grad()
    def forward_two(
        self,
        first: MicroBatch,
        second: MicroBatch,
        *,
        phase: StepPhase | None = None,
        dispatcher: str | None = None,
        length: int | None = None,
        profile: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute two micro-batches as one step: the tokens of one are in transit while the experts compute the other.

        The heat of both is recorded in one row of the rings. Returns the outputs of ``first`` and of ``second``. Other
        arguments and errors are as for ``forward``.
        """
        first_TH, second_TH = self._step((first, second), phase, dispatcher, length, profile)
        return first_TH, second_TH

    def _step(
        self,
        batches: Sequence[MicroBatch],
        phase: StepPhase | None,
        dispatcher: str | None,
        length: int | None,
        profile: bool,
    ) -> list[torch.Tensor]:
        """Compute one or two micro-batches as a step. Return the outputs of each, including the shared experts'."""
        path = self._path(dispatcher)
        batch_ids = [self._checked_ids(path, batch, phase) for batch in batches]
        shared = self._shared_experts
        starts = [] if shared is None else [partial(shared.start, batch.hidden_TH) for batch in batches]
        preparations: list[Prepared] = []
        requests: list[DispatchRequest] = []
        for batch, ids_TK in zip(batches, batch_ids, strict=True):
            prepared, request = self._prepare(path, batch, ids_TK, length)
            preparations.append(prepared)
            requests.append(request.after(requests[-1]) if requests else request)
        results, received_S, shared_outputs = path.kernel.run(requests, self._weights(), self._dtype, starts)
        source_ids = [
            ids_TK[prepared.source].reshape(-1)
            for ids_TK, prepared in zip(batch_ids, preparations, strict=True)
        ]
        self._record(received_S, torch.cat(source_ids), counts=not profile)
        outputs = [prepared.finalize(out_TH) for prepared, out_TH in zip(preparations, results, strict=True)]
        if not shared_outputs:
            return outputs
        # Shared experts also compute padding tokens, so mask the outputs.
        return [
            masked_outputs(out_TH + shared_TH, batch.active, phase)
            for batch, out_TH, shared_TH in zip(batches, outputs, shared_outputs, strict=True)
        ]

    def _path(self, dispatcher: str | None) -> LayerPath:
        if dispatcher is None:
            return next(iter(self._paths.values()))
        if dispatcher not in self._paths:
            raise ValueError(
                f"layer {self.shape.layer}: dispatcher must be one of the layer's dispatchers "
                f"({', '.join(self._paths)}), got {dispatcher!r}"
            )
        return self._paths[dispatcher]

    def _checked_ids(self, path: LayerPath, batch: MicroBatch, phase: StepPhase | None) -> torch.Tensor:
        """Validate a micro-batch and return its ids, int32 ``[T, K]``, with -1 for padding choices."""
        shape = self.shape
        tokens = batch.hidden_TH, batch.topk_ids_TK, batch.topk_weights_TK, batch.active
        check_ids = self._check_ids and phase is not StepPhase.DUMMY
        shape.check_tokens(*tokens, self._dtype, self.w13_weight.device, check_ids)
        ids_TK = real_ids(batch.topk_ids_TK, batch.active, phase)
        if self._options.weigh_on_input and ids_TK.shape[1] != 1:
            raise ValueError(
                f"layer {shape.layer}: weigh_on_input requires one choice per token, got {ids_TK.shape[1]}"
            )
        if self._check_ids:
            path.check_distinct(shape.layer, ids_TK)
        return ids_TK

    def _prepare(
        self, path: LayerPath, batch: MicroBatch, ids_TK: torch.Tensor, length: int | None
    ) -> tuple[Prepared, DispatchRequest]:
        routing = ids_TK, batch.topk_weights_TK.float()
        prepared = path.preparation.prepare(batch.hidden_TH, routing, length)
        path.check_room(self.shape.layer, prepared.hidden_TH.shape[0], batch.topk_ids_TK.shape[1])
        ids_TK, weights_TK = prepared.routing
        if prepared.active_T is not None:
            ids_TK = ids_TK.masked_fill(~prepared.active_T.unsqueeze(1), -1)
        physical_TK = None
        if self._split is not None:
            group = None if path.shares_tokens else self._group
            physical_TK = self._split.split(ids_TK, group, prepared.common_tokens)
        request = DispatchRequest(
            prepared.hidden_TH,
            ids_TK,
            weights_TK,
            self.log2phy,
            scale_T=prepared.scale_T,
            quantized=self._method.quantizes_tokens,
            physical_TK=physical_TK,
            check_values=self._check_ids,
        )
        return prepared, request.weighed_on_input() if self._options.weigh_on_input else request
