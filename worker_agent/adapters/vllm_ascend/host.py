"""vLLM-Ascend host, which runs one rank's agent. The model runner calls it in place of ``EplbUpdator``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from eplb_core.placement import Int32, Placement
from worker_agent.adapters.batch import TokenShare, share_of_rank, step_of
from worker_agent.adapters.compat import UnsupportedEngineError, refuse
from worker_agent.adapters.engine_host import RING_ROWS, EngineHost, HeatRings
from worker_agent.adapters.vllm_ascend.choices import ChoiceCounter
from worker_agent.adapters.vllm_ascend.refusals import refuse_settings, release
from worker_agent.adapters.vllm_ascend.weights import AscendLayer, check_same_formats, expert_weights
from worker_agent.settings import AgentSettings

_GATHERING_DEVICES = frozenset({"A2", "A5"})
"""Devices on which vLLM-Ascend may dispatch by all-gather, depending on the number of ranks and the step's tokens."""


class NoManager:
    """Replacement for ``multiprocessing.Manager``: its dictionary is not shared, because there is no subprocess."""

    @staticmethod
    def dict(initial: dict[str, Any]) -> dict[str, Any]:
        """Return ``initial`` itself."""
        return initial


class NoProcess:
    """Replacement for ``EplbProcess``: the service decides, so ranks run no solver process."""

    def __init__(self, shared_dict: dict[str, Any], **_: Any) -> None:
        self.shared_dict = shared_dict

    def _launch_process(self) -> NoProcess:
        return self


class LayerFinder:
    """Replacement for ``VllmEplbAdaptor`` that only finds the MoE layers that vLLM-Ascend would balance.

    A draft model has no such layers.
    """

    def __init__(self, model: Any) -> None:
        self.quantised = getattr(model, "quant_config", None) is not None
        self.layers = [
            module
            for module in model.modules()
            if getattr(module, "dynamic_eplb", False) and getattr(module, "log2phy", None) is not None
        ]

    def clear_all_moe_loads(self) -> None:
        """Discard the counts of profile runs."""
        for layer in self.layers:
            layer.clear_moe_load()


class _HostHeat:
    """Heat of each forward pass, from vLLM-Ascend's own counters and from the choices before dispatch.

    vLLM-Ascend adds received tokens to running totals (heat policies 0 to 2), or to rows selected by its own pass count
    (policy 3). This class resets both to zero after every pass. Choices are counted before dispatch. In
    release 0.23, they are still logical experts at that point. In release 0.30, they are physical experts, and the
    layer's table, which does not change during a pass, gives their logical experts. An ACL graph captures the counting
    with vLLM-Ascend's own operators.

    With all-gather dispatch, every rank sees all tokens. All ranks then need the same table, redundant experts are
    refused, and only the first rank counts.

    Parameters
    ----------
    layers
        vLLM-Ascend's MoE layers.
    experts
        E, the number of logical experts.
    first_rank
        True on EP rank 0.
    shares_tokens
        True if a step may dispatch by all-gather, so that all ranks have the same table.
    redundant
        True if some experts have several replicas.
    physical
        Number of physical experts if the counted choices are physical experts; ``None`` if they are logical ones.
    rows
        Number of rows in each ring.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        experts: int,
        *,
        first_rank: bool = True,
        shares_tokens: bool = False,
        redundant: bool = False,
        physical: int | None = None,
        rows: int = RING_ROWS,
    ) -> None:
        device = layers[0].log2phy.device
        slots = int(layers[0].local_num_experts)
        self.rings = HeatRings(len(layers), device, slots=slots, experts=experts, rows=rows)
        self._choices = ChoiceCounter(len(layers), physical or experts, device)
        self._tables = [layer.log2phy for layer in layers]
        self._index_by_table = {id(table): index for index, table in enumerate(self._tables)}
        self._physical = physical is not None
        self._loads = [layer.moe_load for layer in layers]
        counters = [getattr(layer, "load_counter", None) for layer in layers]
        self._counters = [counter for counter in counters if counter is not None]
        self._first_rank = first_rank
        self._shares_tokens = shares_tokens
        self._redundant = redundant

    def count_choices(self, fused_experts_input: Any, gathers: bool) -> None:
        """Count the pass, and the choices that a layer is about to dispatch.

        Parameters
        ----------
        fused_experts_input
            Input of vLLM-Ascend's communication method.
        gathers
            True if the layer dispatches by all-gather.

        Raises
        ------
        UnsupportedEngineError
            If the layer dispatches by all-gather although there are redundant experts or the ranks have different
            tables.
        """
        routing = fused_experts_input.routing
        owner = fused_experts_input.layer if self._physical else routing
        index = self._index_by_table.get(id(owner.log2phy))
        if index is None:
            return
        self.rings.layer_runs(index, len(self._index_by_table))
        if gathers:
            self._check_gathering()
            if not self._first_rank:
                return
        self._choices.count(index, fused_experts_input.topk_ids, None if gathers else routing.mc2_mask)

    @property
    def chosen_LE(self) -> torch.Tensor:
        """Number of choices of each logical expert in this pass, int32 ``[L, E]``."""
        chosen_LX = self._choices.chosen_LE
        return chosen_LX.gather(1, torch.stack(self._tables).long()) if self._physical else chosen_LX

    def _check_gathering(self) -> None:
        refuse(
            [
                (
                    self._redundant,
                    "all-gather dispatch with redundant experts",
                    "This dispatch looks up physical experts in a map of logical experts",
                    "Set num_redundant_experts to 0, or keep batches within MC2's capacity",
                ),
                (
                    not self._shares_tokens,
                    "all-gather dispatch on a device that was not expected to use it",
                    "Ranks with the same tokens need the same table",
                    "Report this device",
                ),
            ]
        )

    def record(self, counts: bool, own_tokens: bool) -> None:
        """Write the rows of a forward pass.

        Parameters
        ----------
        counts
            True if vLLM-Ascend collects the heat of the pass.
        own_tokens
            True if this rank has real tokens in the pass, False for a dummy run.
        """
        received = torch.stack(self._loads) if counts else None
        if received is not None and received.dim() == 3:
            received = received.sum(dim=1)
        self.rings.record(received, self.chosen_LE if counts and own_tokens else None)
        self.clear()

    def clear(self) -> None:
        """Discard the counts since the last pass."""
        torch._foreach_zero_([*self._loads, *self._counters])
        self._choices.clear()


class AscendHost(EngineHost):
    """One rank's agent, with the parameters and methods of ``EplbUpdator`` that the model runner uses.

    Raises ``UnsupportedEngineError`` if a setting does not work with the agent.
    """

    of_this_process: ClassVar[AscendHost | None] = None
    heat: _HostHeat | None = None
    adaptor: LayerFinder
    _in_dummy_run = False
    _share: TokenShare | None = None

    def __init__(self, eplb_config: Any, loader: Any, eplb_process: Any, process: Any) -> None:  # noqa: ARG002
        refuse_settings(eplb_config)

    def set_adaptor(self, adaptor: LayerFinder) -> None:
        """Store the layers of the loaded model."""
        self.adaptor = adaptor

    def warm_up_eplb(self) -> None:
        """Start the agent on all ranks (collective over the EP group)."""
        from vllm.distributed.parallel_state import get_dp_group, get_ep_group
        from vllm_ascend.utils import get_ascend_device_type

        layers = self.adaptor.layers
        group = get_ep_group()
        if not layers:
            raise UnsupportedEngineError(
                "dynamic_eplb on a model in which vLLM-Ascend balances no MoE layers",
                "There is nothing to balance",
                "Turn dynamic_eplb off",
            )
        placement = _placement(layers)
        rank = group.rank_in_group
        shares_tokens = may_gather(get_ascend_device_type().name, placement)
        if shares_tokens:
            table_LE = torch.from_numpy(placement.default_log2phy()[0])
            for layer, table_E in zip(layers, table_LE, strict=True):
                layer.log2phy.copy_(table_E)
        data_parallel = get_dp_group().world_size
        if data_parallel == 1 or not shares_tokens:
            self._share = share_of_rank(rank, group.world_size // data_parallel, shares_tokens)
        self.heat = _HostHeat(
            layers,
            placement.experts,
            first_rank=rank == 0,
            shares_tokens=shares_tokens,
            redundant=_has_redundant(placement),
            physical=None if release() == "0.23" else placement.ranks * placement.slots,
        )
        self.heat.clear()
        agent_layers = self._agent_layers(self.heat, placement, rank, shares_tokens, group.cpu_group)
        self._start(agent_layers, group.cpu_group, 0 if shares_tokens else None)
        AscendHost.of_this_process = self

    def _agent_layers(
        self, heat: _HostHeat, placement: Placement, rank: int, shares_tokens: bool, group: dist.ProcessGroup
    ) -> list[AscendLayer]:
        """Return the layers as the agent sees them. Their formats must be the same on all ranks (collective)."""
        layers = self.adaptor.layers
        maps_LE = torch.from_numpy(placement.expert_map(rank)).to(layers[0].log2phy.device)
        move_quantised = AgentSettings().quantised_experts
        agent_layers = [
            AscendLayer(
                layer.log2phy,
                maps_LE[index],
                expert_weights(layer, self.adaptor.quantised, move_quantised=move_quantised),
                heat.rings,
                index,
                shares_tokens,
            )
            for index, layer in enumerate(layers)
        ]
        check_same_formats([layer.expert_weights() for layer in agent_layers], group)
        return agent_layers

    def forward_before(self) -> None:
        """Do nothing: transfers run concurrently with forward passes."""

    def forward_end(self, eplb_heat_collection_status: bool = True) -> None:
        """Record a forward pass. Every rank calls this, even after dummy runs and passes without heat collection."""
        if self.heat is None:
            return
        self.heat.record(eplb_heat_collection_status, own_tokens=not self._in_dummy_run)
        self.agent.step(*step_of(self._batch, self._share, is_dummy=self._in_dummy_run))

    @contextmanager
    def dummies(self) -> Iterator[None]:
        """Mark the forward passes in the body as having no tokens on this rank."""
        before = self._in_dummy_run
        self._in_dummy_run = True
        try:
            yield
        finally:
            self._in_dummy_run = before

    def shutdown(self) -> None:
        """Stop the agent, because the engine is stopping."""
        self.close()
        AscendHost.of_this_process = None


def may_gather(device: str, placement: Placement) -> bool:
    """Return True if a step on ``device`` may gather the tokens of all ranks, which then need the same table.

    The result is False if there are redundant experts. The adapter then rejects such steps, so every rank routes only
    its own tokens.
    """
    return device in _GATHERING_DEVICES and not _has_redundant(placement)


def _has_redundant(placement: Placement) -> bool:
    return placement.ranks * placement.slots > placement.experts


def _placement(layers: list[Any]) -> Placement:
    """Return the initial placement of all ranks, from the maps of vLLM-Ascend's layers.

    Raises ``UnsupportedEngineError`` if the maps do not say which expert is in a slot.
    """
    maps_LRE = np.stack([layer.global_expert_map.cpu().numpy() for layer in layers])
    slots_LRS = slots_of_maps(maps_LRE)
    refuse(
        [
            (
                bool((slots_LRS < 0).any()),
                "an expert in two slots of one rank",
                "vLLM-Ascend's expert map names only one of the two slots, so the other one's expert is unknown",
                "Start with a placement that has each expert at most once per rank",
            )
        ]
    )
    return Placement(slots_LRS, maps_LRE.shape[2])


def slots_of_maps(maps_LRE: Int32) -> Int32:
    """Return the expert in each slot of each rank, int32 ``[L, R, S]``; -1 in slots that no map names.

    Parameters
    ----------
    maps_LRE
        Integers ``[L, R, E]``, slot of each expert on each rank, -1 if the rank does not hold it.

    Examples
    --------
    >>> slots_of_maps(np.array([[[0, 1, -1, 2], [2, -1, 0, 1]]])).tolist()
    [[[0, 1, 3], [2, 3, 0]]]
    """
    slots_LRS = np.full((*maps_LRE.shape[:2], int(maps_LRE.max()) + 1), -1, dtype=np.int32)
    layer_X, rank_X, expert_X = np.nonzero(maps_LRE >= 0)
    slots_LRS[layer_X, rank_X, maps_LRE[layer_X, rank_X, expert_X]] = expert_X
    return slots_LRS
