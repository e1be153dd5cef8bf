"""What vLLM-Ascend's model runner calls instead of its ``EplbUpdator``: the agent of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch

from eplb_service.placement import Int32, Placement
from eplb_service.wire.heat import StepPhase
from worker_agent.adapters.compat import release_of
from worker_agent.adapters.errors import UnsupportedEngineError
from worker_agent.adapters.vllm_ascend.known import KNOWN
from worker_agent.adapters.vllm_ascend.layer import AscendLayer, HeatRings
from worker_agent.adapters.vllm_ascend.refusals import refuse_settings
from worker_agent.adapters.vllm_ascend.sources import SourceCounter
from worker_agent.adapters.vllm_ascend.weights import check_same_formats, expert_weights
from worker_agent.agent import Agent
from worker_agent.settings import AgentSettings

RING_ROWS = 64
"""Steps of heat kept on the device; reports are cut long before."""

_GATHERING_DEVICES = frozenset({"A2", "A5"})
"""Devices on which some steps may dispatch by all-gather: the host chooses by device, ranks and tokens of the step."""


class NoManager:
    """For ``multiprocessing.Manager``: nobody shares the dictionary that it makes."""

    @staticmethod
    def dict(initial: dict[str, Any]) -> dict[str, Any]:
        """The dictionary itself."""
        return initial


class NoProcess:
    """For ``EplbProcess``: no solver runs beside a rank, the service decides."""

    def __init__(self, shared_dict: dict[str, Any], **_: Any) -> None:
        self.shared_dict = shared_dict

    def _launch_process(self) -> NoProcess:
        return self


class LayerFinder:
    """For ``VllmEplbAdaptor``: the MoE layers of a model that the host balances; those of a draft model are left alone.

    Parameters
    ----------
    model
        The target model, its weights loaded.
    """

    def __init__(self, model: Any) -> None:
        self.quantised = getattr(model, "quant_config", None) is not None
        self.layers = [
            module
            for module in model.modules()
            if getattr(module, "dynamic_eplb", False) and getattr(module, "log2phy", None) is not None
        ]

    def clear_all_moe_loads(self) -> None:
        """What profile runs have counted is no heat."""
        for layer in self.layers:
            layer.clear_moe_load()


class AscendBalancer:
    """The agent of one rank, with the methods of ``EplbUpdator`` that the model runner calls.

    Parameters
    ----------
    eplb_config
        The host's.
    loader, eplb_process, process
        Not used.

    Raises
    ------
    UnsupportedEngineError
        Where a setting does not go with the agent.
    """

    of_this_process: ClassVar[AscendBalancer | None] = None
    adaptor: LayerFinder

    def __init__(self, eplb_config: Any, loader: Any, eplb_process: Any, process: Any) -> None:  # noqa: ARG002
        refuse_settings(eplb_config)
        self.sources: SourceCounter | None = None
        self._heat: HeatRings | None = None
        self._agent: Agent | None = None
        self._in_dummy_run = False
        self._passes = 0

    @property
    def agent(self) -> Agent:
        """This rank's agent, once ``warm_up_eplb`` has started it."""
        assert self._agent is not None, "the host has not warmed its balancer up yet"
        return self._agent

    def set_adaptor(self, adaptor: LayerFinder) -> None:
        """The model is loaded."""
        self.adaptor = adaptor

    def warm_up_eplb(self) -> None:
        """Meet the other ranks' agents; a collective over the EP group."""
        from vllm.distributed.parallel_state import get_ep_group
        from vllm_ascend._version import __version__

        layers, group = self.adaptor.layers, get_ep_group()
        if not layers:
            raise UnsupportedEngineError(
                "dynamic_eplb on a model without MoE layers that it balances",
                "There is nothing to balance",
                "Turn dynamic_eplb off",
            )
        placement, shares_tokens = _placement(layers), _may_gather()
        rank = group.rank_in_group
        if shares_tokens:
            table_LE = torch.from_numpy(placement.default_log2phy()[0])
            for layer, table_E in zip(layers, table_LE, strict=True):
                layer.log2phy.copy_(table_E)
        self._heat = HeatRings(layers, placement.experts, RING_ROWS)
        self._heat.clear()
        maps_LE = torch.from_numpy(placement.expert_map(rank)).to(layers[0].log2phy.device)
        allowed, release = AgentSettings().allow_unverified_engine, release_of(__version__, KNOWN)
        seen = [
            AscendLayer(
                layer,
                maps_LE[index],
                expert_weights(layer, self.adaptor.quantised, release=release, allow_unverified=allowed),
                self._heat,
                index,
                shares_tokens,
            )
            for index, layer in enumerate(layers)
        ]
        check_same_formats([layer.expert_weights() for layer in seen], group.cpu_group)
        self.sources = SourceCounter(
            layers,
            self._heat.chosen_LE,
            first_rank=rank == 0,
            shares_tokens=shares_tokens,
            redundant=placement.ranks * placement.slots > placement.experts,
        )
        self._agent = Agent.start(
            seen, group.cpu_group, AgentSettings(), token_group=0 if shares_tokens else None
        )
        AscendBalancer.of_this_process = self

    def forward_before(self) -> None:
        """A forward pass begins: experts move beside it."""

    def forward_end(self, eplb_heat_collection_status: bool = True) -> None:
        """A forward pass is over, on every rank, also one of dummies.

        Parameters
        ----------
        eplb_heat_collection_status
            Whether the host has collected heat of it.
        """
        if self._heat is None:
            return
        self._heat.record(eplb_heat_collection_status, own_tokens=not self._in_dummy_run)
        self._passes += 1
        # The host's own cycle counts these calls, so it makes them on every rank after every pass.
        self.agent.step(StepPhase.DUMMY if self._in_dummy_run else StepPhase.DECODE, number=self._passes)

    @contextmanager
    def dummies(self) -> Iterator[None]:
        """Forward passes within it have no tokens of this rank."""
        before, self._in_dummy_run = self._in_dummy_run, True
        try:
            yield
        finally:
            self._in_dummy_run = before

    def shutdown(self) -> None:
        """The engine ends."""
        if self._agent is not None:
            self._agent.close()
        AscendBalancer.of_this_process = None


def _placement(layers: list[Any]) -> Placement:
    """What the host's ranks serve at first, from its layers' maps."""
    rows = [_slots(layer.global_expert_map.cpu().numpy()) for layer in layers]
    return Placement(np.stack(rows), int(layers[0].log2phy.shape[0]))


def _slots(expert_map_RE: Int32) -> Int32:
    """Expert in each slot, int32 ``[R, S]``, from the slot of each expert, -1 where a rank has none."""
    slots_RS = np.zeros((len(expert_map_RE), int(expert_map_RE.max()) + 1), dtype=np.int32)
    for rank, row_E in enumerate(expert_map_RE):
        here = np.flatnonzero(row_E >= 0)
        slots_RS[rank, row_E[here]] = here
    return slots_RS


def _may_gather() -> bool:
    from vllm_ascend.utils import get_ascend_device_type

    return get_ascend_device_type().name in _GATHERING_DEVICES
