"""Base class of the engine hosts, which run one rank's agent on the engine's layers and heat counts."""

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
from worker_agent.adapters.unmoved import SharedValues, refuse_unlike_ranks, refuse_unmoved
from worker_agent.agent import Agent
from worker_agent.device import host_view
from worker_agent.live_layer import ExpertWeights
from worker_agent.settings import AgentSettings, misspelt_settings

__all__ = [
    "RING_ROWS",
    "EngineHost",
    "EngineLayer",
    "HeatRings",
    "entry_periods",
    "log",
    "make_hook",
    "move_and_back",
    "refuse_unmoved",
    "warn_of_ignored_settings",
    "wrap_execute_model",
]

log = logging.getLogger("eplb.agent")

RING_ROWS = 64
"""Number of steps whose heat is kept on the device. Agents send their reports long before a ring is full."""


_HOST_SETTINGS = frozenset(
    {"num_redundant_experts", "dynamic_eplb", "expert_map_path", "eplb_heat_collection_stage"}
)
"""Engine balancer settings that still apply when the agent runs, because they determine the slots and the counts."""


def warn_of_ignored_settings(
    engine: str, settings: Mapping[str, object], defaults: Mapping[str, object]
) -> None:
    """Log the settings of the engine's own balancer that the user changed but that the agent ignores.

    Parameters
    ----------
    engine
        Name of the engine.
    settings
        Current values by name.
    defaults
        Default values of all settings to check, by name.
    """
    ignored = [f"{name}={settings[name]}" for name in defaults if settings[name] != defaults[name]]
    ignored = [setting for setting in ignored if setting.partition("=")[0] not in _HOST_SETTINGS]
    if ignored:
        log.warning(
            "settings of %s's own balancer are ignored because the service decides instead (see eplb serve --help): %s",
            engine,
            ", ".join(ignored),
        )


class HeatRings:
    """Ring buffers on the device that hold the token counts of recent forward passes, one row per pass.

    The model counts its forward passes on the device, possibly inside a captured graph. All ranks therefore use the
    same row for a pass, even if the host misses the call for some passes.

    Parameters
    ----------
    layers
        Number of layers.
    device
        Device of the model.
    slots
        S, the width of the ring for received tokens, or 0 if the engine does not count tokens per slot.
    experts
        E, the width of the ring for chosen experts, or 0 if the engine does not count choices per expert.
    rows
        Number of rows in each ring.

    Attributes
    ----------
    slots_LWS
        int32 ``[L, W, S]``, tokens that each local slot received, or ``None`` if there is no such ring.
    sources_LWE
        int32 ``[L, W, E]``, this rank's choices by logical expert, or ``None`` if there is no such ring.
    passes
        int64 scalar on the device, number of completed forward passes.
    """

    def __init__(
        self, layers: int, device: torch.device, *, slots: int = 0, experts: int = 0, rows: int = RING_ROWS
    ) -> None:
        # Rows are the outermost axis in memory, so that passes write and reports copy contiguous memory.
        self._rings_WLX = [
            torch.zeros((rows, layers, width), dtype=torch.int32, device=device) for width in (slots, experts)
        ]
        self._rows = rows
        slots_WLS, sources_WLE = self._rings_WLX
        self.slots_LWS = slots_WLS.transpose(0, 1) if slots else None
        self.sources_LWE = sources_WLE.transpose(0, 1) if experts else None
        self.passes = torch.zeros((), dtype=torch.int64, device=device)
        # Number and row of the pass in progress.
        self._pass_number = torch.zeros((), dtype=torch.int64, device=device)
        self._row = torch.zeros((), dtype=torch.int64, device=device)
        # On a CPU, the host reads and writes the counters directly. On an accelerator, only device operators access
        # them.
        self._host_passes = host_view(self.passes)
        self._host_pass_number = host_view(self._pass_number)
        self._saved_passes: int | None = None

    def save(self) -> None:
        """Copy the pass count to the host and wait for the copy, because the engine may discard device memory next."""
        self._saved_passes = int(self.passes)

    def restore(self) -> None:
        """Restore the saved pass count and clear the rings, unless a pass has been recorded since ``save``."""
        if self._saved_passes is None:
            return
        for counter in (self.passes, self._pass_number):
            counter.fill_(self._saved_passes)
        self._row.fill_(self._saved_passes % self._rows)
        for ring_WLX in self._rings_WLX:
            ring_WLX.zero_()

    def layer_runs(self, index: int, layers: int) -> None:
        """Count a forward pass once its first and its last layer have run.

        Call this at the point where the model runs the layer, on the model's stream. A captured graph must include the
        call, so that a pass is counted when the device executes it. A layer may run in several pieces. A pass that
        fails between its first and its last layer is not counted.

        Parameters
        ----------
        index
            Index of the layer that runs, starting at 0.
        layers
            Number of layers in the model.
        """
        host_passes = self._host_passes
        host_pass_number = self._host_pass_number
        if host_passes is None or host_pass_number is None or torch.compiler.is_dynamo_compiling():
            if index == 0:
                torch.add(self.passes, 1, out=self._pass_number)
                torch.remainder(self.passes, self._rows, out=self._row)
            if index == layers - 1:
                self.passes.copy_(self._pass_number)
            return
        if index == 0:
            host_pass_number[0] = host_passes[0] + 1
        if index == layers - 1:
            host_passes[0] = host_pass_number[0]

    def record(
        self,
        received_LS: torch.Tensor | None = None,
        chosen_LX: torch.Tensor | None = None,
        phy2log_LP: torch.Tensor | None = None,
    ) -> None:
        """Write the last pass's row for all layers at once, with a few operators on the current stream.

        The device's pass count selects the row. If this method is not called for a pass, that pass's row keeps its old
        counts.

        Parameters
        ----------
        received_LS
            Tokens that each local slot received; ``None`` to write zeros.
        chosen_LX
            Choices of this rank's own tokens, by logical expert, or by physical expert if ``phy2log_LP`` is given.
            ``None`` to write zeros, because this rank had no tokens or another rank counts them.
        phy2log_LP
            int64 ``[L, R*S]``, logical expert of each physical expert during the pass.
        """
        self._saved_passes = None
        slots_WLS, sources_WLE = self._rings_WLX
        for ring_WLX, counts_LX, physical in (
            (slots_WLS, received_LS, None),
            (sources_WLE, chosen_LX, phy2log_LP),
        ):
            if not ring_WLX.shape[2]:
                continue
            row = None if self._host_passes is None else (self._host_passes[0] - 1) % self._rows
            row_LX = torch.empty_like(ring_WLX[0]) if row is None else ring_WLX[row]
            row_LX.zero_()
            if counts_LX is not None and physical is not None:
                row_LX.scatter_add_(1, physical, counts_LX)
            elif counts_LX is not None:
                row_LX.copy_(counts_LX)
            if row is None:
                ring_WLX.index_copy_(0, self._row.reshape(1), row_LX[None])


def entry_periods(table_ED: Int32) -> npt.NDArray[np.int64]:
    """Return the period of each expert's row in a dealing table.

    A host that selects entries by a token's row in the batch spreads tokens evenly over the entries that it reads, so
    the host must read exactly one period.

    Parameters
    ----------
    table_ED
        int32 ``[E, D]``, physical expert of each table entry.

    Returns
    -------
    numpy.ndarray
        int64 ``[E]``. The period is D for a row that does not repeat.

    Examples
    --------
    >>> table_ED = np.array([[3, 7, 3, 7], [5, 5, 5, 5], [1, 2, 4, 6]], dtype=np.int32)
    >>> entry_periods(table_ED).tolist()
    [2, 1, 4]
    """
    width = table_ED.shape[1]
    period_E = np.full(len(table_ED), width, dtype=np.int64)
    for period in range(width - 1, 0, -1):
        repeats_E = (table_ED[:, period:] == table_ED[:, :-period]).all(axis=1)
        period_E[repeats_E] = period
    return period_E


class EngineLayer:
    """A ``LiveLayer`` backed by an engine's own tensors.

    Parameters
    ----------
    log2phy
        Table that the engine's router reads.
    expert_map
        Map from logical expert to local slot. The agent owns this map. The engine's own map is indexed by physical
        experts, whose slots never change.
    weights
        Tensors that the engine's own balancer would move.
    heat
        Rings that hold the heat of all layers.
    index
        Index of the layer in the rings.
    shares_tokens
        True if several ranks route the same tokens.
    entry_by_row
        True if the engine selects table entries by the token's row in the batch.

    Attributes
    ----------
    splits_by_step
        True if the adapter chooses replicas according to each step's own counts.
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
        self.splits_by_step = False
        self.rings = heat
        self._weights = weights

    def expert_weights(self) -> Sequence[ExpertWeights]:
        """Return every tensor that the engine's own balancer would move."""
        return self._weights


class EngineHost:
    """Runs one rank's agent inside the engine. Each engine has a subclass that reads its heat and writes its tables."""

    _agent: Agent | None = None
    _has_switched = False
    _layers: Sequence[EngineLayer] = ()
    _batch: Batch | None = None

    @property
    def agent(self) -> Agent:
        """This rank's agent."""
        assert self._agent is not None, "the engine has not loaded its model yet"
        return self._agent

    def note_batch(self, schedule: Any) -> None:
        """Store the phase and token count of the ``SchedulerOutput`` that the engine is about to execute."""
        self._batch = batch_of(schedule)

    def _start(
        self,
        layers: Sequence[EngineLayer],
        group: dist.ProcessGroup,
        token_group: int | None,
        *,
        shared_values: SharedValues | None = None,
        computes: Sequence[Compute | None] = (),
    ) -> None:
        """Check that experts can be moved, then start the agent on all ranks (collective over ``group``).

        Parameters
        ----------
        layers
            This rank's layers.
        group
            Process group for CPU tensors.
        token_group
            ID of the group of ranks that share this rank's tokens, or ``None`` if the tokens are not shared.
        shared_values
            Values that all experts on this rank share, as returned by ``refuse_unmoved``.
        computes
            Expert computation of each layer, or ``None`` for a layer whose experts cannot be run in isolation.
        """
        settings = AgentSettings()
        for complaint in misspelt_settings(os.environ):
            log.warning("%s", complaint)
        refuse_unlike_ranks(shared_values or {}, group)
        for layer in layers:
            move_and_back(layer)
        _test_experts(layers, computes)
        self._layers = layers
        self._agent = Agent.start(layers, group, settings, token_group=token_group, on_commit=self._committed)
        placement = self.agent.installed.placement
        rank = self.agent.identity.rank
        # The message is the same on all ranks, so only rank 0 logs it at INFO.
        log.log(
            logging.DEBUG if rank else logging.INFO,
            "eplb-agent balances %d MoE layers of %d experts over %d ranks with %d slots each; deployment %s, "
            "service %s",
            placement.layers,
            placement.experts,
            placement.ranks,
            placement.slots,
            settings.deployment,
            settings.service,
        )

    def _committed(self, layer: int) -> None:
        """Update the engine after a commit, and log the first commit."""
        self._follow(layer)
        if not self._has_switched and self.agent.identity.rank == 0:
            log.info("first switch: layer %d now uses a placement from the service", layer)
        self._has_switched = True

    def _follow(self, layer: int) -> None:
        """Update the engine's own view of the placement after a layer has switched."""

    def drain(self, reason: str) -> None:
        """Finish or abort the switch in progress. All ranks must call this between the same two passes."""
        self.agent.drain(reason)
        self._save()

    def resume(self) -> None:
        """Resume balancing from the current placement, even if the engine has discarded its device memory."""
        self._write_back()
        self.agent.resume()

    def resume_after_failure(self) -> None:
        """Resume balancing after a failed call, without writing to device memory, which may be unmapped."""
        self.agent.resume()

    def _rings(self) -> list[HeatRings]:
        """Return the distinct rings of all layers."""
        return list({id(layer.rings): layer.rings for layer in self._layers}.values())

    def _save(self) -> None:
        """Copy the state that exists only on the device to the host."""
        for rings in self._rings():
            rings.save()

    def _write_back(self) -> None:
        """Rewrite all tables and counts in place, because a sleeping engine may have discarded device memory."""
        if not self._layers:
            return
        installed = self.agent.installed
        rank = self.agent.identity.rank
        maps_LE = installed.placement.expert_map(rank)
        tables_LEX = installed.log2phy_LE
        for rings in self._rings():
            rings.restore()
        for index, layer in enumerate(self._layers):
            layer.expert_map.copy_(torch.from_numpy(maps_LE[index]))
            layer.log2phy.copy_(torch.from_numpy(tables_LEX[index]).view(layer.log2phy.shape))
            self._follow(index)

    def close(self) -> None:
        """Stop the agent. The engine keeps serving the current layout."""
        if self._agent is not None:
            self._agent.close()


def _test_experts(layers: Sequence[EngineLayer], computes: Sequence[Compute | None]) -> None:
    """Reject layers whose outputs depend on which slots hold which experts, and log layers that cannot be tested."""
    untested = []
    for index, (layer, compute) in enumerate(zip(layers, computes, strict=False)):
        reason = "the engine cannot run the experts without the rest of the layer"
        if compute is not None:
            reason = exchange_and_compare(layer, compute, f"MoE layer {index}") or ""
        if reason:
            untested.append(f"layer {index}: {reason}")
    if untested:
        log.info(
            "the experts of %d MoE layers could not be tested in other slots; first reason: %s",
            len(untested),
            untested[0],
        )


def make_hook(
    host_of: Callable[[Any], EngineHost | None],
    before: Callable[[Any], None] | None = None,
    after: Callable[[Any], None] | None = None,
    failed: Callable[[Any], None] | None = None,
) -> Callable[..., Any]:
    """Make a hook that calls host methods around an engine method.

    Parameters
    ----------
    host_of
        Function that returns the host of the method's owner, or ``None`` if it has no host.
    before
        Called with the host before the method.
    after
        Called with the host after the method.
    failed
        Called with the host if ``before`` or the method raises.

    Returns
    -------
    Callable
        Hook that takes the original method, its owner and the method's arguments.
    """

    def hook(call: Callable[..., Any], owner: Any, *arguments: Any, **keywords: Any) -> Any:
        host = host_of(owner)
        try:
            if host is not None and before is not None:
                before(host)
            result = call(owner, *arguments, **keywords)
        except BaseException:
            if host is not None and failed is not None:
                failed(host)
            raise
        if host is not None and after is not None:
            after(host)
        return result

    return hook


def wrap_execute_model(execute_model: Callable[..., Any], host_of: Callable[[Any], EngineHost | None]) -> Any:
    """Wrap an engine's ``execute_model`` so that the owner's host, if there is one, stores each batch first."""

    @wraps(execute_model)
    def execute_noted(owner: Any, scheduler_output: Any, *arguments: Any, **keywords: Any) -> Any:
        host = host_of(owner)
        if host is not None:
            host.note_batch(scheduler_output)
        return execute_model(owner, scheduler_output, *arguments, **keywords)

    return execute_noted
