"""What runs in one rank of vLLM: the agent beside one model's EPLB state, called after every forward pass."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb_service.placement import Placement
from eplb_service.wire.heat import StepPhase
from worker_agent.adapters.errors import UnsupportedEngineError
from worker_agent.adapters.vllm.layer import HeatRings, VllmLayer
from worker_agent.agent import Agent
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
    everyone
        Whether it holds all ranks, so that each rank sees every choice.
    """

    number: int | None
    first: int
    everyone: bool


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
        return TokenGroup(0, 0, everyone=True)
    tensor_parallel = ranks // parallel_config.data_parallel_size
    if sequence_parallel == {True} or tensor_parallel == 1:
        return TokenGroup(None, rank, everyone=ranks == 1)
    first = rank - rank % tensor_parallel
    return TokenGroup(first, first, everyone=tensor_parallel == ranks)


class VllmHost:
    """The agent of one rank and the model that it balances.

    Parameters
    ----------
    state
        vLLM's ``EplbState``.
    model_state
        Its ``EplbModelState`` of the model.
    """

    def __init__(self, state: Any, model_state: Any) -> None:
        from vllm.distributed.parallel_state import get_ep_group

        group = get_ep_group()
        self._state, self._model = state, model_state
        self._rank, self._ranks = group.rank_in_group, group.world_size
        self._cpu_group: dist.ProcessGroup = group.cpu_group
        model = model_state.model
        self._slots = model.num_physical_experts // self._ranks
        self._check_model(model)
        self._tokens = token_group(list(model.moe_layers), state.parallel_config, self._rank, self._ranks)
        self._layers: list[VllmLayer] = []
        self._heat = self._start_tables()
        self._agent = self._start_agent()

    @property
    def agent(self) -> Agent:
        """This rank's agent."""
        return self._agent

    def _check_model(self, model: Any) -> None:
        for index, layer in enumerate(model.moe_layers):
            if getattr(layer, "is_monolithic", False):
                raise UnsupportedEngineError(
                    f"MoE layer {index} runs a monolithic kernel",
                    "It routes inside the kernel and follows no table",
                    "Choose another MoE backend",
                )

    def _start_tables(self) -> HeatRings:
        """One replica per expert and source in vLLM's tables, from the placement that vLLM starts with."""
        model = self._model
        layers, experts = model.logical_replica_count.shape
        phy2log_LRS = model.physical_to_logical_map.cpu().numpy().reshape(layers, self._ranks, self._slots)
        placement = Placement(phy2log_LRS.astype(np.int32), experts)
        table_LE = torch.from_numpy(placement.default_log2phy()[self._tokens.first].astype(np.int64))
        model.logical_to_physical_map[:, :, 0].copy_(table_LE)
        model.logical_replica_count.fill_(1)
        device = model.expert_load_pass.device
        heat = HeatRings(layers, experts, self._slots, RING_ROWS, device)
        maps_LE = torch.from_numpy(placement.expert_map(self._rank)).to(device)
        self._layers = [
            VllmLayer(
                model.logical_to_physical_map[layer, :, 0],
                maps_LE[layer],
                model.model.expert_weights[layer],
                heat.sources_LWE[layer],
                heat.slots_LWS[layer],
                heat.counter,
                self._tokens.number is not None,
            )
            for layer in range(layers)
        ]
        return heat

    def _start_agent(self) -> Agent:
        return Agent.start(self._layers, self._cpu_group, AgentSettings(), token_group=self._tokens.number)

    # After every forward pass

    def step(self, is_dummy: bool) -> None:
        """A forward pass is over; ``is_dummy`` where this rank had no tokens in it."""
        model = self._model
        chosen_LP = model.expert_load_pass
        self._heat.record(
            None if is_dummy or self._rank != self._tokens.first else chosen_LP,
            self._received(chosen_LP, is_dummy),
            model.physical_to_logical_map,
        )
        chosen_LP.zero_()
        epochs = self._agent.installed.layer_epochs
        self._agent.step(StepPhase.DUMMY if is_dummy else StepPhase.DECODE)
        self._follow(epochs)

    def _received(self, chosen_LP: torch.Tensor, is_dummy: bool) -> torch.Tensor | None:
        """Tokens that this rank's slots received: with tokens of its own, a sum over what all ranks chose."""
        if self._tokens.everyone:
            if is_dummy:
                return None
            return chosen_LP[:, self._rank * self._slots : (self._rank + 1) * self._slots]
        mine = (
            torch.zeros_like(chosen_LP) if is_dummy or self._rank != self._tokens.first else chosen_LP.clone()
        )
        total = mine.cpu()
        dist.all_reduce(total, group=self._cpu_group)
        return total[:, self._rank * self._slots : (self._rank + 1) * self._slots].to(chosen_LP.device)

    def _follow(self, epochs: tuple[int, ...]) -> None:
        """Keep vLLM's own view of the placement true for the layers that have just switched."""
        installed = self._agent.installed
        for layer, (before, now) in enumerate(zip(epochs, installed.layer_epochs, strict=True)):
            if before != now:
                row_P = torch.from_numpy(installed.placement.phy2log_LRS[layer].reshape(-1).astype(np.int64))
                self._model.physical_to_logical_map[layer].copy_(row_P)

    # Around sleep

    def drain(self, reason: str) -> None:
        """Finish or abort the switch under way; a collective, called between the same two passes on every rank."""
        epochs = self._agent.installed.layer_epochs
        self._agent.drain(reason)
        self._follow(epochs)

    def resume(self) -> None:
        """Balance again, with the placement that was there."""
        self._agent.resume()

    def close(self) -> None:
        """End the agent; vLLM serves on with what is installed."""
        self._agent.close()
