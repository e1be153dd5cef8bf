"""The expert-parallel MoE layer: this rank's experts under a placement, and the forward pass of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from eplb_core.heat.phase import StepPhase
from eplb_core.placement import Int32
from eplb_lab.layer.compose import LayerOptions, LayerPath
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
    """One MoE layer on one of R ranks, in the shape that inference engines give it; a ``LiveLayer``.

    The placement lives in the tensors ``w13_weight``, ``w2_weight``, ``log2phy`` and ``expert_map`` alone, which are
    read at each call: whoever writes another placement into them in place, on all ranks between the same two steps,
    changes no output. Where tokens are split by step, ``install_placement`` must follow. (Dispatch goes by physical id;
    ``expert_map`` is kept for kernels that want it.)

    Parameters
    ----------
    shape
        Layer index, E, H, I and activation.
    phy2log_RS
        int32 ``[R, S]``: the logical expert in each slot of each rank. R is the size of ``ep_group``.
    experts
        Builds any logical expert's weights; asked for this rank's experts only. ``None`` leaves them to be loaded, by
        an ``ExpertLoader``; then ``process_after_load`` follows.
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
    mc2_group
        A process group of the same ranks that MC2's operators have to themselves, as CANN demands; layers may share
        it. By default ``ep_group``, which an NPU refuses.
    heat_rows
        W, the steps that the heat rings hold.
    quantization
        ``"none"``, or ``"w8a8"``: int8 weights with a scale per output row, made of floating-point ones; tokens are
        quantized at each call, with a scale each. ``"w8a8_dynamic"`` is the same of weights that are loaded in int8.
    dtype
        The tokens' type, and the weights' unless quantized.
    check_ids
        Whether top-k ids are checked against E at each call. By default only on a CPU: elsewhere the check
        would wait for the device.
    shared_experts
        Run beside dispatch and combine, and added to the outputs.
    options
        What the layer is made of, where it is not to be the default.

    Raises ``ValueError`` where placement, table, group and shapes do not fit together.
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
        self._names = [dispatcher] if isinstance(dispatcher, str) else list(dispatcher)
        self._quantization = quantization
        self.shape = shape
        self._device = device = torch.device(device)
        options = LayerOptions() if options is None else options
        options.check(self._names, quantization)
        check_dtype(shape.layer, device.type, dtype)
        self._dtype = dtype
        self._operators = operators_for(device)
        self._method = quant_method(shape.layer, quantization, self._operators, shape.activation)
        self._check_ids = device.type == "cpu" if check_ids is None else check_ids
        self._shared_experts = shared_experts
        self.shares_tokens = self.gathers_all = any(name in SHARED_TOKEN_DISPATCHERS for name in self._names)
        self.rank_bound = "moge" in self._names
        if heat_rows < 1:
            raise ValueError(f"layer {shape.layer}: a heat ring has at least one row, got {heat_rows}")
        groups = RankGroup.of(ep_group), mc2_group
        self._place(groups, phy2log_RS, experts, biases, log2phy_E, dealing_width, heat_rows, options)

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
        """Serve on another group of ranks, as when a deployment grows or shrinks.

        Maps, tables, heat rings, exchanges and experts are made from scratch, as a new layer's would be. Their tensors
        have other addresses: capture graphs again, and start another agent. Its Hello opens a new group of the same
        deployment, which the service plans for as soon as the agents of the old one have left. All ranks of the new
        group call this between the same two steps.

        Parameters
        ----------
        ep_group, phy2log_RS, experts, biases, log2phy_E, mc2_group
            As for a new layer.
        options
            By default the layer's own. Those with groups of ranks belong to the old group.

        Raises
        ------
        ValueError
            As for a new layer; if options with groups of the old ranks are not replaced; or if only the layer or only
            the new experts have biases. The layer is then as it was.
        """
        if options is None:
            options = self._options
            if options.tp_group is not None or options.dp_groups:
                raise ValueError(
                    f"layer {self.shape.layer}: its tp_group and dp_groups belong to the old group; give options with "
                    "those of the new one"
                )
        options.check(self._names, self._quantization)
        if experts is not None and (biases is not None) != (self._weights().w13_bias_SI is not None):
            raise ValueError(f"layer {self.shape.layer}: give biases exactly if the layer has them")
        width = 1 if self.log2phy.dim() == 1 else self.log2phy.shape[1]
        groups = RankGroup.of(ep_group), mc2_group
        rows = self.moe_load.shape[0]
        self._place(groups, phy2log_RS, experts, biases, log2phy_E, width, rows, options)

    def _place(
        self,
        groups: tuple[RankGroup, dist.ProcessGroup | RankGroup | None],
        phy2log_RS: Int32,
        experts: ExpertSource | None,
        biases: ExpertSource | None,
        log2phy_E: Int32 | None,
        dealing_width: int,
        heat_rows: int,
        options: LayerOptions,
    ) -> None:
        """Make all that depends on the group and the placement; nothing is changed before all of it fits."""
        shape = self.shape
        device = self._device
        operators = self._operators
        method = self._method
        group, mc2_group = groups
        mc2 = group if mc2_group is None else RankGroup.of(mc2_group)
        place = shape.layer, shape.experts, phy2log_RS, group.rank, group.size
        table_E = checked_table(*place, log2phy_E, self.shares_tokens, dealing_width)
        if self.rank_bound:
            check_grouped(shape.layer, phy2log_RS)
        parts = group, mc2, phy2log_RS.shape[1], operators, device, options, method
        paths = {name: LayerPath.of(name, shape, *parts) for name in self._names}
        split = None
        if options.split == "step":
            StepwiseSplit.check(shape.layer, self._names, device.type)
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
        self._track(phy2log_RS, group.rank, table_E, heat_rows, device)
        self._hold(shape.layer, weights)

    def process_after_load(self) -> None:
        """Bring weights that a checkpoint was loaded into to the form that is computed with.

        To be called before an agent starts: tensors may be others afterwards, once and for all.
        """
        self._hold(self.shape.layer, self._method.process_after_load(self._weights(), self._dtype))

    def extra_repr(self) -> str:
        """Return this rank's place, and the experts of its slots as they are now."""
        held = {int(slot): expert for expert, slot in enumerate(self.expert_map.tolist()) if slot >= 0}
        slots = ", ".join(f"{slot}->{held[slot]}" for slot in sorted(held))
        rank = f"layer {self.shape.layer}, rank {self.ep_rank} of {self.ep_size}"
        return f"{rank}, {len(held)} of {self.shape.experts} experts by slot: {slots}"

    @property
    def ep_rank(self) -> int:
        """This rank's number among those of its group."""
        return self._group.rank

    @property
    def ep_size(self) -> int:
        """The number of ranks of its group."""
        return self._group.size

    def install_placement(self, phy2log_RS: Int32) -> None:
        """Have splits by step go by another placement of all ranks, int32 ``[R, S]``, in place.

        Whoever writes another placement into the layer calls this on all ranks, between the same two steps.
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
        """Put this rank's tokens through their experts on all ranks; each rank has its own T >= 0.

        All ranks of the group call this at every step, with the same ``dispatcher``, ``length`` and kind of phase.

        Parameters
        ----------
        hidden_TH
            ``[T, H]`` of the layer's dtype.
        topk_ids_TK, topk_weights_TK
            ``[T, K]``, int32 or int64 by logical expert, and any float dtype.
        active
            bool ``[T]`` or ``[T, K]``: the real tokens or choices. Others are padding, whatever they hold: routed
            nowhere and counted nowhere. A padding token's output is zeros; one whose choices alone are masked keeps its
            shared experts.
        phase
            What kind of step it is; in a dummy one nothing is real.
        dispatcher
            One of the layer's, for this step; by default its first.
        length
            The tokens that MC2, all-gather and MoGE pad every rank's to, where the host knows it; otherwise the ranks
            exchange their numbers and wait for them. With it nothing of a step is read on the host (all-to-all
            always waits for its counts). All-to-all pads nothing; a split by step goes by it there, too.
        profile
            Whether the step measures the machine and serves nobody: its heat is a row of zeros.

        Returns
        -------
        torch.Tensor
            ``[T, H]``: the weighted sum of each token's experts, and its shared experts' output.

        Raises
        ------
        ValueError
            Names layer and tensor where they do not fit, before any collective is entered; ``eplb_lab.layer.shape``
            says how that ends on the other ranks.
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
        """Run two micro-batches as one step: the tokens of one travel while the experts work on the other's.

        Their heat is one row of the rings. Outputs and errors are ``forward``'s, of each micro-batch: ``first`` and
        ``second``. Arguments as for ``forward``.
        """
        one, two = self._step((first, second), phase, dispatcher, length, profile)
        return one, two

    def _step(
        self,
        batches: Sequence[MicroBatch],
        phase: StepPhase | None,
        dispatcher: str | None,
        length: int | None,
        profile: bool,
    ) -> list[torch.Tensor]:
        """Run one or two micro-batches as a step; each one's own outputs, with those of its shared experts."""
        path = self._path(dispatcher)
        own = [self._checked(path, batch, phase) for batch in batches]
        shared = self._shared_experts
        beside = [] if shared is None else [partial(shared.start, batch.hidden_TH) for batch in batches]
        prepared, requests = [], list[DispatchRequest]()
        for batch, own_TK in zip(batches, own, strict=True):
            ready, request = self._prepare(path, batch, own_TK, length)
            prepared.append(ready)
            requests.append(request.after(requests[-1]) if requests else request)
        results, received_S, beside_TH = path.kernel.run(requests, self._weights(), self._dtype, beside)
        sources = [own_TK[ready.source].reshape(-1) for own_TK, ready in zip(own, prepared, strict=True)]
        self._record(received_S, torch.cat(sources), counts=not profile)
        outputs = [ready.finalize(out_TH) for ready, out_TH in zip(prepared, results, strict=True)]
        if not beside_TH:
            return outputs
        # Zeros for padding, which shared experts have outputs of.
        return [
            masked_outputs(out_TH + extra_TH, batch.active, phase)
            for batch, out_TH, extra_TH in zip(batches, outputs, beside_TH, strict=True)
        ]

    def _path(self, dispatcher: str | None) -> LayerPath:
        if dispatcher is None:
            return next(iter(self._paths.values()))
        if dispatcher not in self._paths:
            raise ValueError(
                f"layer {self.shape.layer}: dispatcher must be one that the layer was built with, "
                f"{' or '.join(self._paths)}; got {dispatcher!r}"
            )
        return self._paths[dispatcher]

    def _checked(self, path: LayerPath, batch: MicroBatch, phase: StepPhase | None) -> torch.Tensor:
        """Return a batch's ids, int32 ``[T, K]``, -1 where a choice is not real; raises as ``forward`` does."""
        shape = self.shape
        tokens = batch.hidden_TH, batch.topk_ids_TK, batch.topk_weights_TK, batch.active
        checks = self._check_ids and phase is not StepPhase.DUMMY
        shape.check_tokens(*tokens, self._dtype, self.w13_weight.device, checks)
        ids_TK = real_ids(batch.topk_ids_TK, batch.active, phase)
        if self._options.weigh_on_input and ids_TK.shape[1] != 1:
            raise ValueError(
                f"layer {shape.layer}: weights can be applied to the input of one choice per token alone, "
                f"got {ids_TK.shape[1]}"
            )
        if self._check_ids:
            path.check_distinct(shape.layer, ids_TK)
        return ids_TK

    def _prepare(
        self, path: LayerPath, batch: MicroBatch, own_TK: torch.Tensor, length: int | None
    ) -> tuple[Prepared, DispatchRequest]:
        routing = own_TK, batch.topk_weights_TK.float()
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
