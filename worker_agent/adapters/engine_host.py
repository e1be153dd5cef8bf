"""The agent of one rank inside an engine: its layers, their heat, and the calls that an engine's hooks make."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from eplb_core.placement import Int32
from worker_agent.adapters.batch import Batch, batch_of
from worker_agent.adapters.trial import Compute, exchange_and_compare, move_and_back
from worker_agent.adapters.unmoved import Facts, refuse_unlike_ranks, refuse_unmoved
from worker_agent.agent import Agent
from worker_agent.device import host_view
from worker_agent.live_layer import ExpertWeights
from worker_agent.settings import AgentSettings, misspelt

__all__ = [
    "RING_ROWS",
    "EngineHost",
    "EngineLayer",
    "HeatRings",
    "around",
    "entry_periods",
    "ignored_settings",
    "log",
    "move_and_back",
    "noting_batches",
    "refuse_unmoved",
]

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
    """Per-step counts of all layers on the device, and the forward passes that the model itself counts there.

    ``passes`` is an int64 scalar. ``slots`` and ``experts`` are S and E; zero for a ring that the engine's counts
    cannot fill.
    """

    def __init__(
        self, layers: int, device: torch.device, *, slots: int = 0, experts: int = 0, rows: int = RING_ROWS
    ) -> None:
        # Step by step in memory: a pass writes one piece, and a report copies one.
        self._rings_WLX = [
            torch.zeros((rows, layers, width), dtype=torch.int32, device=device) for width in (slots, experts)
        ]
        self._rows = rows
        slots_WLS, sources_WLE = self._rings_WLX
        self.slots_LWS = slots_WLS.transpose(0, 1) if slots else None
        self.sources_LWE = sources_WLE.transpose(0, 1) if experts else None
        self.passes = torch.zeros((), dtype=torch.int64, device=device)
        self._begun = torch.zeros((), dtype=torch.int64, device=device)
        self._row = torch.zeros((), dtype=torch.int64, device=device)
        # On the host the count is known without waiting; on a device it is an operand.
        self._known, self._known_begun = host_view(self.passes), host_view(self._begun)
        self._remembered: int | None = None

    def remember(self) -> None:
        """Keep the count of passes on the host, and wait for it: the engine may discard the device's memory next."""
        self._remembered = int(self.passes)

    def bring_back(self) -> None:
        """Write the count that was remembered, unless passes were recorded since, and empty the rings."""
        if self._remembered is None:
            return
        for counter in (self.passes, self._begun):
            counter.fill_(self._remembered)
        self._row.fill_(self._remembered % self._rows)
        for ring_WLX in self._rings_WLX:
            ring_WLX.zero_()

    def layer_runs(self, index: int, layers: int) -> None:
        """Count a pass in which the first and the last of ``layers`` run, however many parts each is cut into.

        Called where the model runs that layer and nowhere else, on its stream and inside what a graph captures: a pass
        is counted when the device gets there. One that fails half-way is not.
        """
        known, begun = self._known, self._known_begun
        if known is None or begun is None or torch.compiler.is_dynamo_compiling():
            if index == 0:
                torch.add(self.passes, 1, out=self._begun)
                torch.remainder(self.passes, self._rows, out=self._row)
            if index == layers - 1:
                self.passes.copy_(self._begun)
            return
        if index == 0:
            begun[0] = known[0] + 1
        if index == layers - 1:
            known[0] = begun[0]

    def record(
        self,
        received_LS: torch.Tensor | None = None,
        chosen_LX: torch.Tensor | None = None,
        phy2log_LP: torch.Tensor | None = None,
    ) -> None:
        """Write the row of the pass that is over: a few operations for all layers, on the current stream.

        The row is that of the pass, as the device counts them: one that no call is made for keeps what it was.

        ``received_LS`` are tokens that each local slot received, ``None`` where none are to be counted; ``chosen_LX``
        choices of this rank's own tokens by logical expert, or by physical one where ``phy2log_LP``, int64 ``[L,
        R*S]``, has the logical expert of each during the pass; ``None`` where it had none or another rank counts them.
        """
        self._remembered = None
        slots_WLS, sources_WLE = self._rings_WLX
        for ring_WLX, counts_LX, physical in (
            (slots_WLS, received_LS, None),
            (sources_WLE, chosen_LX, phy2log_LP),
        ):
            if not ring_WLX.shape[2]:
                continue
            at = None if self._known is None else (self._known[0] - 1) % self._rows
            row_LX = torch.empty_like(ring_WLX[0]) if at is None else ring_WLX[at]
            row_LX.zero_()
            if counts_LX is not None and physical is not None:
                row_LX.scatter_add_(1, physical, counts_LX)
            elif counts_LX is not None:
                row_LX.copy_(counts_LX)
            if at is None:
                ring_WLX.index_copy_(0, self._row.reshape(1), row_LX[None])


def entry_periods(table_ED: Int32) -> npt.NDArray[np.int64]:
    """Return the period of each expert's row in a dealing table ``[E, D]``, int64 ``[E]``.

    A host that picks entries by a token's row spreads tokens evenly over the entries that it reads. It must therefore
    read exactly one period.
    """
    width = table_ED.shape[1]
    period_E = np.full(len(table_ED), width, dtype=np.int64)
    for period in range(width - 1, 0, -1):
        again_E = (table_ED[:, period:] == table_ED[:, :-period]).all(axis=1)
        period_E[again_E] = period
    return period_E


class EngineLayer:
    """A ``LiveLayer`` over an engine's own tensors.

    ``log2phy`` is the table that the engine's router reads, ``expert_map`` the agent's own: engines read theirs by
    physical id, whose owner never changes. ``index`` is the layer's place in the rings. If ``entry_by_row``
    is True, the engine picks a table entry by the token's row in the batch.
    """

    def __init__(
        self,
        log2phy: torch.Tensor,
        expert_map: torch.Tensor,
        weights: Sequence[ExpertWeights],
        heat: HeatRings,
        index: int,
        shares_tokens: bool,
        *,
        entry_by_row: bool = False,
    ) -> None:
        self.log2phy = log2phy
        self.expert_map = expert_map
        self.moe_load = None if heat.slots_LWS is None else heat.slots_LWS[index]
        self.source_load = None if heat.sources_LWE is None else heat.sources_LWE[index]
        self.load_counter = heat.passes
        self.shares_tokens = shares_tokens
        self.entry_by_row = entry_by_row
        self.rings = heat
        self._weights = weights

    def expert_weights(self) -> Sequence[ExpertWeights]:
        """Return every tensor that the engine's own balancer would move."""
        return self._weights


class EngineHost:
    """The agent of one rank inside its engine; engines' hosts add what they read and write."""

    _agent: Agent | None = None
    _has_switched = False
    _layers: Sequence[EngineLayer] = ()
    _batch: Batch | None = None

    @property
    def agent(self) -> Agent:
        """This rank's agent."""
        assert self._agent is not None, "the engine has not loaded its model yet"
        return self._agent

    def note_batch(self, scheduled: Any) -> None:
        """Keep the phase and tokens of the ``SchedulerOutput`` that the engine is about to execute."""
        self._batch = batch_of(scheduled)

    def _start(
        self,
        layers: Sequence[EngineLayer],
        group: dist.ProcessGroup,
        token_group: int | None,
        *,
        facts: Facts | None = None,
        computes: Sequence[Compute | None] = (),
    ) -> None:
        """Try how experts move, then meet the other ranks' agents. A collective over ``group``.

        Parameters
        ----------
        layers
            This rank's layers.
        group
            A process group that takes tensors of the CPU.
        token_group
            The ranks that share this rank's tokens, or ``None``.
        facts
            What ``refuse_unmoved`` found to be one value for all experts.
        computes
            The expert computation of each layer, if the engine lets it run without the rest of the layer.
        """
        settings = AgentSettings()
        for complaint in misspelt(os.environ):
            log.warning("%s", complaint)
        refuse_unlike_ranks(facts or {}, group)
        for layer in layers:
            move_and_back(layer)
        _try_experts(layers, computes)
        self._layers = layers
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
        self._remember()

    def resume(self) -> None:
        """Balance again, with the placement that is installed, even if the engine has discarded its memory."""
        self._bring_back()
        self.agent.resume()

    def go_on(self) -> None:
        """Balance again after a call that failed; memory is left as it is, since it may not be there."""
        self.agent.resume()

    def _remember(self) -> None:
        """Copy to the host the state that exists only on the device."""
        for rings in {id(layer.rings): layer.rings for layer in self._layers}.values():
            rings.remember()

    def _bring_back(self) -> None:
        """Rewrite all tables and counts in place, because engines may discard device memory while they sleep."""
        if not self._layers:
            return
        installed = self.agent.installed
        rank = self.agent.identity.rank
        maps_LE = installed.placement.expert_map(rank)
        tables_LEX = installed.log2phy_LE
        for rings in {id(layer.rings): layer.rings for layer in self._layers}.values():
            rings.bring_back()
        for index, layer in enumerate(self._layers):
            layer.expert_map.copy_(torch.from_numpy(maps_LE[index]))
            layer.log2phy.copy_(torch.from_numpy(tables_LEX[index]).view(layer.log2phy.shape))
            self._follow(index)

    def close(self) -> None:
        """End the agent; the engine serves on with what is installed."""
        if self._agent is not None:
            self._agent.close()


def _try_experts(layers: Sequence[EngineLayer], computes: Sequence[Compute | None]) -> None:
    """Reject layers whose outputs depend on the slots of experts, and log the layers that cannot be tested."""
    untried = []
    for index, (layer, compute) in enumerate(zip(layers, computes, strict=False)):
        reason = "the engine has no computation that runs alone"
        if compute is not None:
            reason = exchange_and_compare(layer, compute, f"MoE layer {index}") or ""
        if reason:
            untried.append(f"layer {index}: {reason}")
    if untried:
        log.info("experts of %d MoE layers could not be tried alone; %s", len(untried), untried[0])


def around(
    host_of: Callable[[Any], EngineHost | None],
    before: Callable[[Any], None] | None = None,
    after: Callable[[Any], None] | None = None,
    failed: Callable[[Any], None] | None = None,
) -> Callable[..., Any]:
    """Make a hook around an engine's call: what its host does before it, after it, and where one of these two raises.

    A hook is given the call, its owner, in which ``host_of`` finds the host if there is one, and the other arguments.
    """

    def hook(call: Callable[..., Any], owner: Any, *arguments: Any, **named: Any) -> Any:
        host = host_of(owner)
        try:
            if host is not None and before is not None:
                before(host)
            result = call(owner, *arguments, **named)
        except BaseException:
            if host is not None and failed is not None:
                failed(host)
            raise
        if host is not None and after is not None:
            after(host)
        return result

    return hook


def noting_batches(execute_model: Callable[..., Any], host_of: Callable[[Any], EngineHost | None]) -> Any:
    """Wrap an engine's ``execute_model`` so that its owner's host, if any, notes each batch before it runs."""

    @wraps(execute_model)
    def execute_noted(owner: Any, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        host = host_of(owner)
        if host is not None:
            host.note_batch(scheduler_output)
        return execute_model(owner, scheduler_output, *arguments, **named)

    return execute_noted
