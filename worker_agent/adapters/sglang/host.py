"""SGLang host: runs one rank's agent after every forward pass, in place of the EPLB manager."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from eplb_core.heat.phase import StepPhase
from eplb_core.placement import Int32, Placement, with_entries
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.engine_host import EngineHost, EngineLayer, HeatRings, entry_periods, log
from worker_agent.adapters.sglang.experts import local_experts
from worker_agent.adapters.sglang.options import SglangOptions
from worker_agent.adapters.sglang.step_split import choose_for_engine, start_splits
from worker_agent.adapters.trial import Compute
from worker_agent.adapters.unmoved import SharedValues, refuse_unmoved
from worker_agent.device import on_host
from worker_agent.settings import AgentSettings
from worker_agent.step_split import StepSplit

_NO_EXPERTS = frozenset({"correction_bias"})


class SglangHost(EngineHost):
    """One rank's agent, with the methods that SGLang calls on its ``EPLBManager``.

    Parameters
    ----------
    runner
        SGLang's ``ModelRunner`` for the target model.
    options
        SGLang's options, already checked.
    """

    def __init__(self, runner: Any, options: SglangOptions) -> None:
        self._runner = runner
        self._options = options
        self._drained = False
        self._weights_checked = False
        self._stream: Any = None
        self._splits: list[StepSplit] = []

    def start(self, metadata: Any, recorder: Any, rank: int, group: dist.ProcessGroup) -> None:
        """Start the agent on the layers of the loaded model (collective over ``group``).

        Parameters
        ----------
        metadata
            SGLang's ``ExpertLocationMetadata``, or ``None`` for a model that has none.
        recorder
            SGLang's expert distribution recorder.
        rank
            This rank's index among the EP ranks.
        group
            Process group of the EP ranks, for CPU tensors.

        Raises
        ------
        UnsupportedEngineError
            If the model cannot be balanced.
        """
        model = self._runner.model
        if metadata is None or not hasattr(model, "routed_experts_weights_of_layer"):
            raise UnsupportedEngineError(
                f"the model {type(model).__name__}",
                "SGLang does not know the locations and weights of its experts",
                "Serve it without --enable-eplb",
            )
        refuse_routing_kernels(model)
        self._metadata = metadata
        self._recorder = recorder
        if not recorder.recording:
            recorder.start_record()
        layers = self._make_layers(rank)
        weights = [weight for layer in layers for weight in layer.expert_weights()]
        self._addresses = {weight.data_ptr() for weight in weights}  # type: ignore[union-attr] # none is a list
        shared_values: SharedValues = {}
        computes: list[Compute | None] = [None] * len(layers)
        slots = self._tables.initial.slots
        tables = metadata_tensors(metadata)
        for name, module in model.named_modules():
            addresses = {parameter.data_ptr() for parameter in module.parameters(recurse=False)}
            addresses &= self._addresses
            if not addresses:
                continue
            values = refuse_unmoved(module, weights, slots, _NO_EXPERTS, tables=tables)
            shared_values |= {f"{name}: {path}": value for path, value in values.items()}
            index = _layer_of(addresses, layers)
            computes[index] = local_experts(module, slots, self._recorded_counts.device)
        layer_ids = sorted(model.routed_experts_weights_of_layer.keys())
        choice = choose_for_engine(AgentSettings().step_split, self._recorded_counts.device.type)
        self._splits = start_splits(metadata, layer_ids, group, choice)
        for layer in layers:
            layer.splits_by_step = choice.whole and bool(self._splits)
        token_group = 0 if self._options.shares_tokens else None
        self._start(layers, group, token_group, shared_values=shared_values, computes=computes)

    def _make_layers(self, rank: int) -> list[EngineLayer]:
        """Prepare SGLang's tables and the heat rings, and return the layers as the agent sees them."""
        weights = self._runner.model.routed_experts_weights_of_layer
        layer_ids = sorted(weights.keys())
        metadata = self._metadata
        shares = self._options.shares_tokens
        entries = self._options.entries(int(metadata.num_physical_experts))
        self._tables = _LocationTables(metadata, layer_ids, entries, 0 if shares else rank)
        initial = self._tables.initial
        self._recorded_counts = _recorded_counts(self._recorder)
        device = self._recorded_counts.device
        self._layer_ids_L = torch.tensor(layer_ids, device=device)
        # In DeepEP's low-latency mode, the recorder counts tokens only for this rank's slots. Otherwise it counts them
        # for the slots of all ranks: all tokens if ranks share them, else only this rank's own tokens.
        all_slots = self._recorded_counts.shape[1] != initial.slots
        by_slot = shares or not all_slots
        self._local_slots = (
            slice(rank * initial.slots, (rank + 1) * initial.slots) if all_slots else slice(None)
        )
        self._heat = HeatRings(
            len(layer_ids),
            device,
            slots=initial.slots if by_slot else 0,
            experts=0 if by_slot else initial.experts,
        )
        maps_LE = torch.from_numpy(initial.expert_map(rank)).to(device)
        return [
            EngineLayer(
                self._tables.log2phy(index),
                maps_LE[index],
                _expert_weights(weights[layer_id], initial.slots, layer_id),
                self._heat,
                index,
                shares,
                entry_by_row=entries > 1,
            )
            for index, layer_id in enumerate(layer_ids)
        ]

    def count_pass(self) -> None:
        """Count a pass on the device, on the stream that SGLang uses to run its model or replay its graph.

        The layers cannot count passes, because a rank without tokens does not select experts.
        """
        self._heat.layer_runs(0, 1)

    def step(self, forward_batch: Any) -> None:
        """Record a completed forward pass, on the current stream. All ranks call this, even those without tokens.

        Raises ``UnsupportedEngineError`` in the first pass if SGLang has replaced the weight tensors since it loaded
        the model.
        """
        if self._runner.device != "cpu":
            self._stream = torch.get_device_module(self._runner.device).current_stream()
        if not self._weights_checked and not self._weights_are_in_place():
            raise UnsupportedEngineError(
                "this MoE runner backend",
                "It moved the experts to other tensors after the model was loaded",
                "Choose another --moe-runner-backend",
            )
        self._weights_checked = True
        if self._recorder.recording and self._recorder._record_current_pass:
            counts_LP = self._recorded_counts.index_select(0, self._layer_ids_L)
            phy2log_NP = self._metadata.physical_to_logical_map
            if self._heat.slots_LWS is not None:
                self._heat.record(counts_LP[:, self._local_slots])
            else:
                phy2log_LP = phy2log_NP.index_select(0, self._layer_ids_L).long()
                self._heat.record(chosen_LX=counts_LP, phy2log_LP=phy2log_LP)
        else:
            self._heat.record()
        self.agent.step(phase_of(forward_batch.forward_mode))

    def _follow(self, layer: int) -> None:
        installed = self.agent.installed
        self._tables.follow(layer, installed.placement.phy2log_LRS[layer], installed.log2phy_LE[layer])
        if self._splits:
            self._splits[layer].install(installed.placement.phy2log_LRS[layer])

    def _write_back(self) -> None:
        for split in self._splits:
            split.write_again()
        super()._write_back()

    @contextmanager
    def drained(self, reason: str) -> Iterator[None]:
        """Keep the agent drained while the body runs, and resume afterwards unless it was already drained."""
        outer = self._drained
        self.drain(reason)
        try:
            yield
        finally:
            if not outer:
                self.resume()

    def drain(self, reason: str) -> None:
        """Finish or abort the switch in progress, and do not start a new one until ``resume``.

        All ranks must call this between the same two passes.
        """
        if self._drained:
            return
        self._drained = True
        if self._stream is None:
            super().drain(reason)
            return
        # A commit during the drain must follow the last pass, and SGLang's next operation must follow the commit.
        module = torch.get_device_module(self._runner.device)
        with module.stream(self._stream):
            super().drain(reason)
        module.current_stream().wait_stream(self._stream)

    def resume(self) -> None:
        """Resume balancing. SGLang loads each expert into its current slots, so the placement does not change."""
        if not self._drained:
            return
        if not self._weights_are_in_place():
            log.error(
                "SGLang moved the experts to other tensors: the current placement stays in use, without balancing, "
                "until the engine is restarted"
            )
            return
        self._drained = False
        if self._stream is None:
            super().resume()
            return
        # The tables must be written after the engine's own operations and before the next pass.
        module = torch.get_device_module(self._runner.device)
        self._stream.wait_stream(module.current_stream())
        with module.stream(self._stream):
            super().resume()

    def _weights_are_in_place(self) -> bool:
        return {parameter.data_ptr() for parameter in self._runner.model.parameters()} >= self._addresses

    def on_forward_pass_end(self) -> None:
        """Do nothing: the hook on ``forward`` calls ``step``."""

    def disable_rebalance(self, reason: str = "SGLang called its own balancer") -> NoReturn:
        """Raise ``RuntimeError``. Only elastic expert parallelism calls this method and its aliases."""
        raise RuntimeError(f"{reason}: eplb-agent does not support elastic expert parallelism")

    enable_rebalance = reset_generator = rebalance = disable_rebalance


def metadata_tensors(metadata: Any) -> list[torch.Tensor]:
    """Return the tables of SGLang's ``ExpertLocationMetadata``."""
    return [value for value in vars(metadata).values() if isinstance(value, torch.Tensor)]


def _layer_of(addresses: set[int], layers: Sequence[EngineLayer]) -> int:
    """Return the index of the layer whose weights are at ``addresses``."""
    for index, layer in enumerate(layers):
        if any(
            isinstance(weight, torch.Tensor) and weight.data_ptr() in addresses
            for weight in layer.expert_weights()
        ):
            return index
    raise AssertionError("the addresses belong to no layer")


def phase_of(mode: Any) -> StepPhase:
    """Return the phase of a step from SGLang's ``ForwardMode``."""
    if mode.is_idle():
        return StepPhase.DUMMY
    if mode.is_mixed():
        return StepPhase.MIXED
    return StepPhase.PREFILL if mode.is_extend() and not mode.is_target_verify() else StepPhase.DECODE


def _recorded_counts(recorder: Any) -> torch.Tensor:
    """Return the recorder's device tensor of one pass's counts, int32, by model layer and physical expert."""
    gatherer = recorder._single_pass_gatherers["primary"]
    counts: torch.Tensor | None = getattr(gatherer, "_data", None)
    if counts is None:
        raise UnsupportedEngineError(
            f"heat counted by {type(gatherer).__name__}",
            "Its counts are not on the device",
            "Omit the options of SGLang's expert distribution recorder",
        )
    return counts


def refuse_routing_kernels(model: Any) -> None:
    """Refuse kernels that choose experts themselves, because they may ignore the tables."""
    for name, module in model.named_modules():
        output_format = getattr(getattr(module, "topk_config", None), "output_format", None)
        if getattr(output_format, "name", None) in ("BYPASSED", "TRITON_KERNEL"):
            raise UnsupportedEngineError(
                f"{name} leaves routing to a kernel",
                "The kernel does not use the tables",
                "Choose another --moe-runner-backend",
            )


class _LocationTables:
    """The rows of SGLang's tables that belong to balanced layers. Dense layers have rows in the tables as well.

    Static dispatch reads ``logical_to_rank_dispatch_physical_map``, which lists one replica per expert. Dynamic
    dispatch uses the first ``logical_to_all_physical_map_num_valid`` columns of ``logical_to_all_physical_map`` in
    turn, and the agent uses these columns as a dealing table. The tables on the host always list all replicas, because
    SGLang uses them to load weights.

    Parameters
    ----------
    metadata
        SGLang's ``ExpertLocationMetadata``.
    layer_ids
        Table row of each balanced layer.
    entries
        D, the number of entries per expert.
    source_rank
        Rank whose tables are written initially: rank 0 if ranks share tokens, else this rank.
    """

    def __init__(self, metadata: Any, layer_ids: list[int], entries: int, source_rank: int) -> None:
        self._metadata = metadata
        self._rows = layer_ids
        self._deals = metadata.logical_to_rank_dispatch_physical_map is None
        self._entries = entries
        experts = int(metadata.num_logical_experts)
        phy2log_LP = metadata.physical_to_logical_map_cpu[layer_ids].numpy().astype(np.int32)
        slots = int(metadata.num_local_physical_experts)
        self.initial = Placement(phy2log_LP.reshape(len(layer_ids), -1, slots), experts)
        # If the model runs on a CPU, dynamic dispatch reads this very tensor, so replace it with a copy.
        metadata.logical_to_all_physical_map_cpu = metadata.logical_to_all_physical_map_cpu.clone()
        tables_LE = self.initial.default_log2phy(entries)[source_rank]
        for index in range(len(layer_ids)):
            self.follow(index, self.initial.phy2log_LRS[index], tables_LE[index])
        if self._deals:
            self._write_dealing_tables(tables_LE)

    def _write_dealing_tables(self, log2phy_LE: Int32) -> None:
        table_LED = torch.from_numpy(with_entries(log2phy_LE, 2).astype(np.int64))
        for index, table_ED in enumerate(table_LED):
            row = self._rows[index]
            self._metadata.logical_to_all_physical_map[row, :, : self._entries].copy_(table_ED)

    def log2phy(self, index: int) -> torch.Tensor:
        """Return the table that dispatches this rank's tokens of a layer, ``[E]`` or ``[E, D]``, as a view."""
        row = self._rows[index]
        table: torch.Tensor
        if self._deals:
            table = self._metadata.logical_to_all_physical_map[row, :, : self._entries]
        else:
            table = self._metadata.logical_to_rank_dispatch_physical_map[row]
        return table

    def follow(self, index: int, phy2log_RS: Int32, log2phy_E: Int32) -> None:
        """Update SGLang's view of the placement after a layer has switched. The agent itself writes the dispatch table.

        SGLang is set to read one period of each dealing-table row, so that the entries receive equal shares of the
        tokens.

        Parameters
        ----------
        index
            Index of the layer among the balanced layers.
        phy2log_RS
            int32 ``[R, S]``, new placement.
        log2phy_E
            int32 ``[E]`` or ``[E, D]``, new table of this rank.
        """
        metadata = self._metadata
        row = self._rows[index]
        phy2log_P = torch.from_numpy(phy2log_RS.reshape(-1).astype(np.int64))
        replicas_EP, counts_E = _replicas(phy2log_RS, self.initial.experts)
        _write(metadata.physical_to_logical_map[row], phy2log_P)
        metadata.physical_to_logical_map_cpu[row].copy_(phy2log_P)
        metadata.logical_to_all_physical_map_cpu[row].copy_(replicas_EP)
        if self._deals:
            valid_E = torch.from_numpy(entry_periods(with_entries(log2phy_E, 1)))
            _write(metadata.logical_to_all_physical_map_num_valid[row], valid_E)
        else:
            _write(metadata.logical_to_all_physical_map[row], replicas_EP)
            _write(metadata.logical_to_all_physical_map_num_valid[row], counts_E)


def _write(table: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values`` to ``table`` in place, without waiting for the device."""
    table.copy_(on_host(values, table.device), non_blocking=True)


def _replicas(phy2log_RS: Int32, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the physical experts and the replica count of each logical expert.

    Returns
    -------
    replicas_EP : torch.Tensor
        int64 ``[E, R*S]``, physical experts in ascending order, padded with -1.
    counts_E : torch.Tensor
        int64 ``[E]``.

    Examples
    --------
    >>> replicas_EP, counts_E = _replicas(np.array([[0, 1], [2, 0]], dtype=np.int32), experts=3)
    >>> replicas_EP.tolist()
    [[0, 3, -1, -1], [1, -1, -1, -1], [2, -1, -1, -1]]
    >>> counts_E.tolist()
    [2, 1, 1]
    """
    flat_P = phy2log_RS.reshape(-1)
    by_expert_P = np.argsort(flat_P, kind="stable")
    counts_E = np.bincount(flat_P, minlength=experts)
    first_E = np.cumsum(counts_E) - counts_E
    sorted_P = flat_P[by_expert_P]
    replicas_EP = np.full((experts, flat_P.size), -1, dtype=np.int64)
    replicas_EP[sorted_P, np.arange(flat_P.size) - first_E[sorted_P]] = by_expert_P
    return torch.from_numpy(replicas_EP), torch.from_numpy(counts_E.astype(np.int64))


def _expert_weights(tensors: Iterable[torch.Tensor], slots: int, layer: int) -> list[torch.Tensor]:
    """Return the tensors of one layer that SGLang's own EPLB would move.

    Each is returned as a contiguous view ``[S, ...]`` of the same memory, because kernels may store tensors transposed,
    for example scales in column order. Raises ``UnsupportedEngineError`` if a tensor has gaps between its elements, or
    if its first axis is not the slot axis.
    """
    views = [_by_slot(tensor, slots) for tensor in tensors]
    if not views or any(view is None for view in views):
        raise UnsupportedEngineError(
            f"the experts of layer {layer} in this format",
            f"Their tensors are not made up of {slots} contiguous slots",
            "Choose another quantisation or MoE runner backend",
        )
    return [view for view in views if view is not None]


def _by_slot(tensor: torch.Tensor, slots: int) -> torch.Tensor | None:
    """Return a view whose axes after the first are in memory order; ``None`` if it would not be contiguous."""
    if tensor.dim() == 0 or tensor.shape[0] != slots:
        return None
    inner = sorted(range(1, tensor.dim()), key=tensor.stride, reverse=True)
    view = tensor.permute(0, *inner)
    return view if view.is_contiguous() else None
