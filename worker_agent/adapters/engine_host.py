"""The agent of one rank inside an engine: its layers, their heat, and the calls that an engine's hooks make."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from eplb_service.wire.heat import StepPhase
from worker_agent.agent import Agent
from worker_agent.live_layer import ExpertWeights
from worker_agent.settings import AgentSettings, misspelt

log = logging.getLogger("eplb.agent")

RING_ROWS = 64
"""Steps of heat kept on the device; reports are cut long before."""


_OF_THE_HOST = frozenset(
    {"num_redundant_experts", "dynamic_eplb", "expert_map_path", "eplb_heat_collection_stage"}
)
"""Settings of engines' balancers that hold beside the agent as well: they decide which slots and counts there are."""


def ignored_settings(engine: str, given: Mapping[str, object], defaults: Mapping[str, object]) -> None:
    """Name in the log what was set of the ``engine``'s own balancer and is not read any more."""
    ignored = [f"{name}={given[name]}" for name in defaults if given[name] != defaults[name]]
    ignored = [setting for setting in ignored if setting.partition("=")[0] not in _OF_THE_HOST]
    if ignored:
        log.warning(
            "settings of %s's own balancer are ignored, as the service decides instead (eplb serve --help): %s",
            engine,
            ", ".join(ignored),
        )


class HeatRings:
    """Per-step counts of all layers on the device, filled once per forward pass.

    ``slots`` and ``experts`` are S and E; zero for a ring that the engine's counts cannot fill.
    """

    def __init__(
        self, layers: int, device: torch.device, *, slots: int = 0, experts: int = 0, rows: int = RING_ROWS
    ) -> None:
        def ring(width: int) -> torch.Tensor | None:
            # Step by step in memory: a pass writes one piece, and a report copies one.
            shape = (rows, layers, width)
            return torch.zeros(shape, dtype=torch.int32, device=device).transpose(0, 1) if width else None

        self.slots_LWS, self.sources_LWE = ring(slots), ring(experts)
        self._slot_rows = () if self.slots_LWS is None else self.slots_LWS.unbind(1)
        self._source_rows = () if self.sources_LWE is None else self.sources_LWE.unbind(1)
        self._rows = rows
        # Passes are counted by calls, on the host: on a device this would be one operation more in each of them.
        self.counter = torch.zeros((), dtype=torch.int64)
        self._steps = 0

    def record(
        self,
        received_LS: torch.Tensor | None = None,
        chosen_LX: torch.Tensor | None = None,
        phy2log_LP: torch.Tensor | None = None,
    ) -> None:
        """Write the row of a forward pass that is over: a few operations for all layers, on the current stream.

        ``received_LS`` are tokens that each local slot received, ``None`` where none are to be counted; ``chosen_LX``
        choices of this rank's own tokens by logical expert, or by physical one where ``phy2log_LP``, int64 ``[L,
        R*S]``, has the logical expert of each during the pass; ``None`` where it had none or another rank counts them.
        """
        row = self._steps % self._rows
        if self._slot_rows:
            _write(self._slot_rows[row], received_LS)
        if self._source_rows:
            _write(self._source_rows[row], None if phy2log_LP is not None else chosen_LX)
            if phy2log_LP is not None and chosen_LX is not None:
                self._source_rows[row].scatter_add_(1, phy2log_LP, chosen_LX)
        self._steps += 1
        self.counter.add_(1)


def _write(row_LX: torch.Tensor, counts_LX: torch.Tensor | None) -> None:
    if counts_LX is None:
        row_LX.zero_()
    else:
        row_LX.copy_(counts_LX)


class EngineLayer:
    """A ``LiveLayer`` over an engine's own tensors.

    ``log2phy`` is the table that the engine's router reads, ``expert_map`` the agent's own: engines read theirs by
    physical id, whose owner never changes. ``index`` is the layer's place in the rings.
    """

    def __init__(
        self,
        log2phy: torch.Tensor,
        expert_map: torch.Tensor,
        weights: Sequence[ExpertWeights],
        heat: HeatRings,
        index: int,
        shares_tokens: bool,
    ) -> None:
        self.log2phy = log2phy
        self.expert_map = expert_map
        self.moe_load = None if heat.slots_LWS is None else heat.slots_LWS[index]
        self.source_load = None if heat.sources_LWE is None else heat.sources_LWE[index]
        self.load_counter = heat.counter
        self.shares_tokens = shares_tokens
        self._weights = weights

    def expert_weights(self) -> Sequence[ExpertWeights]:
        """Return every tensor that the engine's own balancer would move."""
        return self._weights


class EngineHost:
    """The agent of one rank and the passes that its engine has made; engines' hosts add what they read and write."""

    _agent: Agent | None = None
    _passes = 0
    _has_switched = False

    @property
    def agent(self) -> Agent:
        """This rank's agent."""
        assert self._agent is not None, "the engine has not loaded its model yet"
        return self._agent

    def _start(
        self, layers: Sequence[EngineLayer], group: dist.ProcessGroup, token_group: int | None
    ) -> None:
        """Meet the other ranks' agents: a collective over ``group``, which must take tensors of the CPU."""
        settings = AgentSettings()
        for complaint in misspelt(os.environ):
            log.warning("%s", complaint)
        self._agent = Agent.start(layers, group, settings, token_group=token_group, on_commit=self._committed)
        placement, rank = self.agent.installed.placement, self.agent.identity.rank
        # All ranks have the same to report.
        log.log(
            logging.DEBUG if rank else logging.INFO,
            "eplb-agent balances %d MoE layers of %d experts over %d ranks of %d slots; deployment %s, service %s",
            placement.layers,
            placement.experts,
            placement.ranks,
            placement.slots,
            settings.deployment,
            settings.service,
        )

    def _pass_done(self, phase: StepPhase) -> None:
        """Make the agent's step: after a pass on every rank, on the thread and stream on which passes are queued."""
        self._passes += 1
        self.agent.step(phase, number=self._passes)

    def _committed(self, layer: int) -> None:
        self._follow(layer)
        if not self._has_switched and self.agent.identity.rank == 0:
            log.info("first switch: layer %d serves a placement of the service's from now on", layer)
        self._has_switched = True

    def _follow(self, layer: int) -> None:
        """Keep the engine's own view of the placement true for a layer that has just switched."""

    def drain(self, reason: str) -> None:
        """Finish or abort the switch under way; a collective, called between the same two passes on every rank."""
        self.agent.drain(reason)

    def resume(self) -> None:
        """Balance again, with the placement that is installed."""
        self.agent.resume()

    def close(self) -> None:
        """End the agent; the engine serves on with what is installed."""
        if self._agent is not None:
            self._agent.close()
