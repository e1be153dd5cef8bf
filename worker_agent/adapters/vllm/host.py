"""What runs in one rank of vLLM: the agent beside one model's EPLB state, called after every forward pass."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from eplb_service.placement import Placement
from eplb_service.wire.heat import StepPhase
from worker_agent.adapters.errors import UnsupportedEngineError
from worker_agent.adapters.vllm.dispatch import TokenGroup, token_group
from worker_agent.adapters.vllm.layer import HeatRings, VllmLayer
from worker_agent.agent import Agent
from worker_agent.device import on_host
from worker_agent.settings import AgentSettings

_log = logging.getLogger("eplb.agent")

RING_ROWS = 64
"""Steps of heat kept on the device; reports are cut long before."""


class VllmHost:
    """The agent of one rank and the model that it balances.

    Parameters
    ----------
    model_state
        vLLM's ``EplbModelState`` of the model.
    parallel_config
        Its parallel configuration.
    group
        Its coordinator of the expert-parallel group.
    """

    def __init__(self, model_state: Any, parallel_config: Any, group: Any) -> None:
        self._model = model_state
        self._rank: int = group.rank_in_group
        self._parallel, self._ranks = parallel_config, group.world_size
        self._tokens = self._token_group()
        self._first = _first_placement(model_state, group.world_size)
        self._passes = 0
        self._layers: list[VllmLayer] = []
        self._heat = self._start_tables()
        self._agent = Agent.start(
            self._layers,
            group.cpu_group,
            AgentSettings(),
            token_group=self._tokens.number,
            on_commit=self._follow,
        )

    @property
    def agent(self) -> Agent:
        """This rank's agent."""
        return self._agent

    def _token_group(self) -> TokenGroup:
        return token_group(self._model.model.moe_layers, self._parallel, self._rank, self._ranks)

    def _start_tables(self) -> HeatRings:
        """One replica per expert and source in vLLM's tables, from the placement that vLLM starts with."""
        model = self._model
        layers, experts = model.logical_replica_count.shape
        table_LE = torch.from_numpy(self._first.default_log2phy()[self._tokens.first].astype(np.int64))
        model.logical_to_physical_map[:, :, 0].copy_(table_LE)
        model.logical_replica_count.fill_(1)
        device = model.expert_load_pass.device
        heat = HeatRings(layers, experts, RING_ROWS, device)
        maps_LE = torch.from_numpy(self._first.expert_map(self._rank)).to(device)
        self._layers = [
            VllmLayer(
                model.logical_to_physical_map[layer, :, 0],
                maps_LE[layer],
                model.model.expert_weights[layer],
                heat.sources_LWE[layer],
                heat.counter,
                self._tokens.number is not None,
            )
            for layer in range(layers)
        ]
        return heat

    # After every forward pass

    def confirm_dispatch(self) -> None:
        """The model has run: its layers must dispatch as they did when the agent was started.

        Raises
        ------
        UnsupportedEngineError
            Where vLLM has put other kernels in since, as 0.23 does with quantisation methods of its older kind.
        """
        if self._token_group() != self._tokens:
            raise UnsupportedEngineError(
                "MoE layers whose way of dispatching changed after the model was loaded",
                "Which ranks share tokens was derived from the way before",
                "Choose another MoE backend or quantisation",
            )

    def step(self, is_dummy: bool) -> None:
        """A forward pass is over; ``is_dummy`` where this rank had no tokens in it.

        Called on the thread and stream on which vLLM queues its passes: what is queued here comes after this pass and
        before the next one.
        """
        if self._passes == 0:
            self.confirm_dispatch()
        model = self._model
        counts = not is_dummy and self._rank == self._tokens.first
        self._heat.record(model.expert_load_pass if counts else None, model.physical_to_logical_map)
        self._passes += 1
        # vLLM itself relies on every rank making this call after every pass.
        self._agent.step(StepPhase.DUMMY if is_dummy else StepPhase.DECODE, number=self._passes)

    def _follow(self, layer: int) -> None:
        """Keep vLLM's own view of the placement true for a layer that has just switched."""
        row_P = self._agent.installed.placement.phy2log_LRS[layer].reshape(-1).astype(np.int64)
        held_P = self._model.physical_to_logical_map[layer]
        held_P.copy_(on_host(torch.from_numpy(row_P), held_P.device), non_blocking=True)

    # Around sleep and other weights

    def drain(self, reason: str) -> None:
        """Finish or abort the switch under way; a collective, called between the same two passes on every rank."""
        self._agent.drain(reason)

    def restore(self) -> None:
        """Bring every expert to where vLLM loads it, until ``resume``; a collective like ``drain``."""
        self._agent.restore(self._first, "vLLM loads weights")

    def resume(self) -> None:
        """Balance again, with the placement that was there."""
        self._agent.resume()

    def close(self) -> None:
        """End the agent; vLLM serves on with what is installed."""
        self._agent.close()


def _first_placement(model_state: Any, ranks: int) -> Placement:
    """What vLLM starts with, and loads weights for."""
    layers, experts = model_state.logical_replica_count.shape
    phy2log_LRS = model_state.physical_to_logical_map.cpu().numpy().reshape(layers, ranks, -1)
    return Placement(phy2log_LRS.astype(np.int32), experts)
