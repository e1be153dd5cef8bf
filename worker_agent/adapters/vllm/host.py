"""What runs in one rank of vLLM: the agent beside one model's EPLB state, called after every forward pass."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eplb_service.placement import Placement
from eplb_service.wire.heat import StepPhase
from worker_agent.adapters.errors import UnsupportedEngineError
from worker_agent.adapters.vllm.layer import HeatRings, VllmLayer
from worker_agent.agent import Agent
from worker_agent.device import on_host
from worker_agent.settings import AgentSettings

_log = logging.getLogger("eplb.agent")

RING_ROWS = 64
"""Steps of heat kept on the device; reports are cut long before."""


@dataclass(frozen=True)
class TokenGroup:
    """Which ranks of the EP group run their experts on the same tokens as this one.

    Parameters
    ----------
    number
        Equal on all ranks of the group; ``None`` where this rank's tokens are its own.
    first
        Lowest EP rank of the group: the one that counts the tokens.
    """

    number: int | None
    first: int


def token_group(layers: list[Any], parallel_config: Any, rank: int, ranks: int) -> TokenGroup:
    """Derive it from how vLLM's layers dispatch.

    Tokens are replicated over the tensor-parallel ranks of one data-parallel rank, unless the layer is sequence
    parallel; the naive dispatcher gathers the tokens of all ranks before the router runs, so that every rank routes
    all of them and needs the same table.

    Raises
    ------
    UnsupportedEngineError
        Under prefill context parallelism, or where layers differ.
    """
    if getattr(parallel_config, "prefill_context_parallel_size", 1) > 1:
        raise UnsupportedEngineError(
            "prefill context parallelism with EPLB",
            "Which ranks share tokens then changes within a step",
            "Start without --prefill-context-parallel-size",
        )
    naive = {bool(layer.do_naive_dispatch_combine) for layer in layers}
    sequence_parallel = {bool(layer.moe_config.is_sequence_parallel) for layer in layers}
    if len(naive) > 1 or len(sequence_parallel) > 1:
        raise UnsupportedEngineError(
            "MoE layers that dispatch differently in one model",
            "Ranks would share tokens in some layers only",
            "Use one MoE backend for all layers",
        )
    if naive == {True}:
        return TokenGroup(0, 0)
    tensor_parallel = ranks // parallel_config.data_parallel_size
    if sequence_parallel == {True} or tensor_parallel == 1:
        return TokenGroup(None, rank)
    first = rank - rank % tensor_parallel
    return TokenGroup(first, first)


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
        model = model_state.model
        self._check_model(model)
        self._tokens = token_group(list(model.moe_layers), parallel_config, self._rank, group.world_size)
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

    def _check_model(self, model: Any) -> None:
        for index, layer in enumerate(model.moe_layers):
            if layer.is_monolithic:
                raise UnsupportedEngineError(
                    f"MoE layer {index} runs a monolithic kernel",
                    "It routes inside the kernel and follows no table",
                    "Choose another MoE backend",
                )

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

    def step(self, is_dummy: bool) -> None:
        """A forward pass is over; ``is_dummy`` where this rank had no tokens in it.

        Called on the thread and stream on which vLLM queues its passes: what is queued here comes after this pass and
        before the next one.
        """
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
