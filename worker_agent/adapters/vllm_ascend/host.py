"""The agent of one rank in place of vLLM-Ascend's ``EplbUpdator``, called by its model runner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch

from eplb_core.placement import Int32, Placement
from worker_agent.adapters.batch import TokenShare, share_of_rank, step_of
from worker_agent.adapters.compat import UnsupportedEngineError, refuse, release_of
from worker_agent.adapters.engine_host import RING_ROWS, EngineHost, HeatRings
from worker_agent.adapters.vllm_ascend.choices import ChoiceCounter
from worker_agent.adapters.vllm_ascend.refusals import KNOWN, refuse_settings
from worker_agent.adapters.vllm_ascend.weights import AscendLayer, check_same_formats, expert_weights
from worker_agent.settings import AgentSettings

_GATHERING_DEVICES = frozenset({"A2", "A5"})
"""Devices on which some steps may dispatch by all-gather: the host chooses by device, ranks and tokens of the step."""


class NoManager:
    """For ``multiprocessing.Manager``: nobody shares the dictionary that it makes."""

    @staticmethod
    def dict(initial: dict[str, Any]) -> dict[str, Any]:
        """Return the dictionary itself."""
        return initial


class NoProcess:
    """For ``EplbProcess``: no solver runs beside a rank, the service decides."""

    def __init__(self, shared_dict: dict[str, Any], **_: Any) -> None:
        self.shared_dict = shared_dict

    def _launch_process(self) -> NoProcess:
        return self


class LayerFinder:
    """For ``VllmEplbAdaptor``: the MoE layers of a loaded model that the host balances; a draft model has none."""

    def __init__(self, model: Any) -> None:
        self.quantised = getattr(model, "quant_config", None) is not None
        self.layers = [
            module
            for module in model.modules()
            if getattr(module, "dynamic_eplb", False) and getattr(module, "log2phy", None) is not None
        ]

    def clear_all_moe_loads(self) -> None:
        """Forget what profile runs have counted."""
        for layer in self.layers:
            layer.clear_moe_load()


class _HostHeat:
    """Heat as the host counts it, per pass.

    The host adds to running totals (heat policies 0 to 2) or to rows by its own count of passes (policy 3), which are
    set to zero here after every pass. Choices are counted before dispatch, where the host maps them to physical ids,
    and captured with the host's own operations in an ACL graph.
    Under all-gather dispatch every rank sees all tokens, and the ``first_rank`` counts; it needs one table of all ranks
    (``shares_tokens``) and no ``redundant`` experts.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        experts: int,
        *,
        first_rank: bool = True,
        shares_tokens: bool = False,
        redundant: bool = False,
        rows: int = RING_ROWS,
    ) -> None:
        device, slots = layers[0].log2phy.device, int(layers[0].local_num_experts)
        self.rings = HeatRings(len(layers), device, slots=slots, experts=experts, rows=rows)
        self._choices = ChoiceCounter(len(layers), experts, device)
        self._by_table = {id(layer.log2phy): index for index, layer in enumerate(layers)}
        self._loads = [layer.moe_load for layer in layers]
        self._counters = [layer.load_counter for layer in layers if hasattr(layer, "load_counter")]
        self._first_rank, self._shares_tokens, self._redundant = first_rank, shares_tokens, redundant

    def count_choices(self, fused_experts_input: Any, gathers: bool) -> None:
        """Count the choices that a layer is about to dispatch, and the pass; ``gathers`` where by all-gather.

        Raises
        ------
        UnsupportedEngineError
            Where all-gather dispatch meets replicas or tables per rank.
        """
        routing = fused_experts_input.routing
        index = self._by_table.get(id(routing.log2phy))
        if index is None:
            return
        self.rings.layer_runs(index, len(self._by_table))
        if gathers:
            self._check_gathering()
            if not self._first_rank:
                return
        self._choices.count(index, fused_experts_input.topk_ids, None if gathers else routing.mc2_mask)

    @property
    def chosen_LE(self) -> torch.Tensor:
        """Number of choices of each logical expert in this pass, int32 ``[L, E]``."""
        return self._choices.chosen_LE

    def _check_gathering(self) -> None:
        refuse(
            [
                (
                    self._redundant,
                    "all-gather dispatch with redundant experts",
                    "vLLM-Ascend looks physical ids up in a map of logical experts there",
                    "Set num_redundant_experts to 0, or keep batches within the capacity of MC2",
                ),
                (
                    not self._shares_tokens,
                    "all-gather dispatch on a device that was not expected to use it",
                    "Ranks that see the same tokens need one table",
                    "Report this device",
                ),
            ]
        )

    def record(self, counts: bool, own_tokens: bool) -> None:
        """Write the rows of a forward pass; the host ``counts`` it or not, ``own_tokens`` are no dummies."""
        received = torch.stack(self._loads) if counts else None
        if received is not None and received.dim() == 3:
            received = received.sum(dim=1)
        self.rings.record(received, self.chosen_LE if counts and own_tokens else None)
        self.clear()

    def clear(self) -> None:
        """Forget what the host has counted since the last pass."""
        torch._foreach_zero_([*self._loads, *self._counters])
        self._choices.clear()


class AscendHost(EngineHost):
    """The agent of one rank, with the methods of ``EplbUpdator`` that the model runner calls, and its arguments.

    Raises ``UnsupportedEngineError`` where a setting does not go with the agent.
    """

    of_this_process: ClassVar[AscendHost | None] = None
    heat: _HostHeat | None = None
    adaptor: LayerFinder
    _in_dummy_run = False
    _share: TokenShare | None = None

    def __init__(self, eplb_config: Any, loader: Any, eplb_process: Any, process: Any) -> None:  # noqa: ARG002
        refuse_settings(eplb_config)

    def set_adaptor(self, adaptor: LayerFinder) -> None:
        """Take the layers of a model that is loaded."""
        self.adaptor = adaptor

    def warm_up_eplb(self) -> None:
        """Meet the other ranks' agents; a collective over the EP group."""
        from vllm.distributed.parallel_state import get_dp_group, get_ep_group
        from vllm_ascend._version import __version__
        from vllm_ascend.utils import get_ascend_device_type

        layers, group = self.adaptor.layers, get_ep_group()
        if not layers:
            raise UnsupportedEngineError(
                "dynamic_eplb on a model without MoE layers that it balances",
                "There is nothing to balance",
                "Turn dynamic_eplb off",
            )
        placement, rank = _placement(layers), group.rank_in_group
        redundant = _has_redundant(placement)
        shares_tokens = may_gather(get_ascend_device_type().name, placement)
        if shares_tokens:
            table_LE = torch.from_numpy(placement.default_log2phy()[0])
            for layer, table_E in zip(layers, table_LE, strict=True):
                layer.log2phy.copy_(table_E)
        parallel = get_dp_group().world_size
        if parallel == 1 or not shares_tokens:
            self._share = share_of_rank(rank, group.world_size // parallel, shares_tokens)
        self.heat = _HostHeat(
            layers,
            placement.experts,
            first_rank=rank == 0,
            shares_tokens=shares_tokens,
            redundant=redundant,
        )
        self.heat.clear()
        maps_LE = torch.from_numpy(placement.expert_map(rank)).to(layers[0].log2phy.device)
        allowed = AgentSettings().quantised_experts
        release = release_of(__version__, KNOWN)
        seen = [
            AscendLayer(
                layer.log2phy,
                maps_LE[index],
                expert_weights(layer, self.adaptor.quantised, release=release, move_quantised=allowed),
                self.heat.rings,
                index,
                shares_tokens,
            )
            for index, layer in enumerate(layers)
        ]
        check_same_formats([layer.expert_weights() for layer in seen], group.cpu_group)
        self._start(seen, group.cpu_group, 0 if shares_tokens else None)
        AscendHost.of_this_process = self

    def forward_before(self) -> None:
        """Do nothing: experts move beside a forward pass."""

    def forward_end(self, eplb_heat_collection_status: bool = True) -> None:
        """Record a forward pass on every rank, also one of dummies, of which the host may collect no heat."""
        if self.heat is None:
            return
        self.heat.record(eplb_heat_collection_status, own_tokens=not self._in_dummy_run)
        self.agent.step(*step_of(self._batch, self._share, is_dummy=self._in_dummy_run))

    @contextmanager
    def dummies(self) -> Iterator[None]:
        """Mark forward passes as without tokens of this rank."""
        before, self._in_dummy_run = self._in_dummy_run, True
        try:
            yield
        finally:
            self._in_dummy_run = before

    def shutdown(self) -> None:
        """End the agent with the engine."""
        self.close()
        AscendHost.of_this_process = None


def may_gather(device: str, placement: Placement) -> bool:
    """Return True if a step on ``device`` may gather the tokens of all ranks, which then need the same table.

    The adapter rejects such steps if there are redundant experts. Every rank then routes only its own tokens.
    """
    return device in _GATHERING_DEVICES and not _has_redundant(placement)


def _has_redundant(placement: Placement) -> bool:
    return placement.ranks * placement.slots > placement.experts


def _placement(layers: list[Any]) -> Placement:
    """Return the first placement of the host's ranks, from its layers' maps."""
    rows = [_slots(layer.global_expert_map.cpu().numpy()) for layer in layers]
    return Placement(np.stack(rows), int(layers[0].log2phy.shape[0]))


def _slots(expert_map_RE: Int32) -> Int32:
    """Return the expert in each slot, int32 ``[R, S]``, from the slot of each expert, -1 where a rank has none."""
    slots_RS = np.zeros((len(expert_map_RE), int(expert_map_RE.max()) + 1), dtype=np.int32)
    for rank, row_E in enumerate(expert_map_RE):
        here = np.flatnonzero(row_E >= 0)
        slots_RS[rank, row_E[here]] = here
    return slots_RS
