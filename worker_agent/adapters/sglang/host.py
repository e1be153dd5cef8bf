"""The agent of one rank in place of SGLang's EPLB manager, called after every forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from eplb_core.placement import Int32, Placement, with_entries
from eplb_core.wire.heat import StepPhase
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.engine_host import EngineHost, EngineLayer, HeatRings, entry_periods, log
from worker_agent.adapters.sglang.experts import local_experts
from worker_agent.adapters.sglang.options import SglangOptions
from worker_agent.adapters.trial import Compute
from worker_agent.adapters.unmoved import Facts, refuse_unmoved
from worker_agent.device import on_host

_NO_EXPERTS = frozenset({"correction_bias"})


class SglangHost(EngineHost):
    """The agent of one rank, with the methods of ``EPLBManager`` that SGLang calls, and no generator that rebalances.

    ``runner`` is SGLang's ``ModelRunner`` of the target model; ``options`` are checked already.
    """

    def __init__(self, runner: Any, options: SglangOptions) -> None:
        self._runner = runner
        self._options = options
        self._drained = self._placed = False
        self._stream: Any = None

    def start(self, metadata: Any, recorder: Any, rank: int, group: dist.ProcessGroup) -> None:
        """Show the layers of a loaded model to an agent, and meet the other ranks. A collective.

        ``metadata`` is SGLang's ``ExpertLocationMetadata``, ``None`` for a model without; ``rank`` and the CPU-capable
        ``group`` are those of the experts. Raises ``UnsupportedEngineError`` where the model cannot be balanced.
        """
        model = self._runner.model
        if metadata is None or not hasattr(model, "routed_experts_weights_of_layer"):
            raise UnsupportedEngineError(
                f"the model {type(model).__name__}",
                "SGLang does not know its experts' places and weights",
                "Serve it without --enable-eplb",
            )
        _refuse_routing_kernels(model)
        self._metadata, self._recorder = metadata, recorder
        if not recorder.recording:
            recorder.start_record()
        layers = self._make_layers(rank)
        weights = [weight for layer in layers for weight in layer.expert_weights()]
        self._addresses = {weight.data_ptr() for weight in weights}  # type: ignore[union-attr] # none is a list
        facts: Facts = {}
        computes: list[Compute | None] = [None] * len(layers)
        slots = self._tables.first.slots
        tables = metadata_tensors(metadata)
        for name, module in model.named_modules():
            held = {one.data_ptr() for one in module.parameters(recurse=False)} & self._addresses
            if not held:
                continue
            found = refuse_unmoved(module, weights, slots, _NO_EXPERTS, tables=tables)
            facts |= {f"{name}: {path}": value for path, value in found.items()}
            index = _layer_of(held, layers)
            computes[index] = local_experts(module, slots, self._counted.device)
        self._start(layers, group, 0 if self._options.shares_tokens else None, facts=facts, computes=computes)

    def _make_layers(self, rank: int) -> list[EngineLayer]:
        weights = self._runner.model.routed_experts_weights_of_layer
        layer_ids, metadata = sorted(weights.keys()), self._metadata
        shares = self._options.shares_tokens
        entries = self._options.entries(int(metadata.num_physical_experts))
        self._tables = _LocationTables(metadata, layer_ids, entries, 0 if shares else rank)
        first = self._tables.first
        self._counted = _counted(self._recorder)
        self._layer_ids_L = torch.tensor(layer_ids, device=self._counted.device)
        # Counted are this rank's slots (DeepEP's low-latency mode), or all: of all tokens, or of this rank's own.
        all_slots = self._counted.shape[1] != first.slots
        by_slot = shares or not all_slots
        self._own_slots = slice(rank * first.slots, (rank + 1) * first.slots) if all_slots else slice(None)
        self._heat = HeatRings(
            len(layer_ids),
            self._counted.device,
            slots=first.slots if by_slot else 0,
            experts=0 if by_slot else first.experts,
        )
        maps_LE = torch.from_numpy(first.expert_map(rank)).to(self._counted.device)
        return [
            EngineLayer(
                self._tables.log2phy(index),
                maps_LE[index],
                _expert_weights(weights[layer_id], first.slots, layer_id),
                self._heat,
                index,
                shares,
                entry_by_row=entries > 1,
            )
            for index, layer_id in enumerate(layer_ids)
        ]

    def count_pass(self) -> None:
        """Count a pass on the device, on this stream, where SGLang runs its model or replays a graph of it.

        Not in its layers: a rank without tokens selects no experts there.
        """
        self._heat.layer_runs(0, 1)

    def step(self, forward_batch: Any) -> None:
        """Record a forward pass that is over, on this stream; ranks make the same ones, also those without tokens.

        Raises ``UnsupportedEngineError`` in the first one, where SGLang has put the weights into other tensors since
        the model was loaded.
        """
        if self._runner.device != "cpu":
            self._stream = torch.get_device_module(self._runner.device).current_stream()
        if not self._placed and not self._weights_are_in_place():
            raise UnsupportedEngineError(
                "this MoE runner backend",
                "It put the experts into other tensors after the model was loaded",
                "Choose another --moe-runner-backend",
            )
        self._placed = True
        if self._recorder.recording and self._recorder._record_current_pass:
            counted_LP = self._counted.index_select(0, self._layer_ids_L)
            phy2log_NP = self._metadata.physical_to_logical_map
            if self._heat.slots_LWS is not None:
                self._heat.record(counted_LP[:, self._own_slots])
            else:
                phy2log_LP = phy2log_NP.index_select(0, self._layer_ids_L).long()
                self._heat.record(chosen_LX=counted_LP, phy2log_LP=phy2log_LP)
        else:
            self._heat.record()
        self.agent.step(_phase(forward_batch.forward_mode))

    def _follow(self, layer: int) -> None:
        installed = self.agent.installed
        self._tables.follow(layer, installed.placement.phy2log_LRS[layer], installed.log2phy_LE[layer])

    @contextmanager
    def drained(self, reason: str) -> Iterator[None]:
        """Keep switches away from the calls inside; balanced again afterwards, unless it was drained before."""
        outer = self._drained
        self.drain(reason)
        try:
            yield
        finally:
            if not outer:
                self.resume()

    def drain(self, reason: str) -> None:
        """Finish or abort the switch under way, until ``resume``; a collective, between the same two passes."""
        if self._drained:
            return
        self._drained = True
        if self._stream is None:
            super().drain(reason)
            return
        # A layer that is committed now must follow the last pass, and what SGLang does next must follow it.
        module = torch.get_device_module(self._runner.device)
        with module.stream(self._stream):
            super().drain(reason)
        module.current_stream().wait_stream(self._stream)

    def resume(self) -> None:
        """Balance again. SGLang loads each expert into the slots where it is, so the placement stays."""
        if not self._drained:
            return
        if not self._weights_are_in_place():
            log.error(
                "SGLang put the experts into other tensors: they are served as they are, and balanced no more until "
                "the engine is started again"
            )
            return
        self._drained = False
        if self._stream is None:
            super().resume()
            return
        # Tables are written after the engine's own work, and before the next pass.
        module = torch.get_device_module(self._runner.device)
        self._stream.wait_stream(module.current_stream())
        with module.stream(self._stream):
            super().resume()

    def _weights_are_in_place(self) -> bool:
        return {parameter.data_ptr() for parameter in self._runner.model.parameters()} >= self._addresses

    def on_forward_pass_end(self) -> None:
        """Do nothing: ``step`` follows the pass itself."""

    def disable_rebalance(self, reason: str = "SGLang asked its own balancer to act") -> NoReturn:
        """Raise ``RuntimeError``: only elastic expert parallelism calls this and the methods of the same kind."""
        raise RuntimeError(f"{reason}: elastic expert parallelism is not balanced by eplb-agent")

    enable_rebalance = reset_generator = rebalance = disable_rebalance


def metadata_tensors(metadata: Any) -> list[torch.Tensor]:
    """Return the tables of SGLang's ``ExpertLocationMetadata``."""
    return [one for one in vars(metadata).values() if isinstance(one, torch.Tensor)]


def _layer_of(addresses: set[int], layers: Sequence[EngineLayer]) -> int:
    """Return the index of the layer whose weights are at ``addresses``."""
    for index, layer in enumerate(layers):
        if any(
            isinstance(one, torch.Tensor) and one.data_ptr() in addresses for one in layer.expert_weights()
        ):
            return index
    raise AssertionError("these are the addresses of the layers' own weights")


def _phase(mode: Any) -> StepPhase:
    if mode.is_idle():
        return StepPhase.DUMMY
    if mode.is_mixed():
        return StepPhase.MIXED
    return StepPhase.PREFILL if mode.is_extend() and not mode.is_target_verify() else StepPhase.DECODE


def _counted(recorder: Any) -> torch.Tensor:
    """Return the recorder's counts of a pass, on the device: int32 by layer of the model and physical expert."""
    gatherer = recorder._single_pass_gatherers["primary"]
    counted: torch.Tensor | None = getattr(gatherer, "_data", None)
    if counted is None:
        raise UnsupportedEngineError(
            f"heat counted by {type(gatherer).__name__}",
            "Its counts are not on the device",
            "Leave the options of SGLang's expert distribution recorder out",
        )
    return counted


def _refuse_routing_kernels(model: Any) -> None:
    """Refuse kernels that choose experts by themselves: they may not follow the tables."""
    for name, module in model.named_modules():
        output_format = getattr(getattr(module, "topk_config", None), "output_format", None)
        if getattr(output_format, "name", None) in ("BYPASSED", "TRITON_KERNEL"):
            raise UnsupportedEngineError(
                f"{name} leaves routing to a kernel",
                "It follows no table",
                "Choose another --moe-runner-backend",
            )


class _LocationTables:
    """The rows that belong to the layers that are balanced; a model's dense layers have rows as well.

    Static dispatch reads ``logical_to_rank_dispatch_physical_map``, one replica per expert. Dynamic dispatch takes the
    first ``logical_to_all_physical_map_num_valid`` columns of ``logical_to_all_physical_map`` in turn: of them the
    agent makes a dealing table. The copies on the host always name all replicas: weights are loaded by them.
    ``layer_ids`` are the rows of the agent's layers, ``entries`` D of the tables; they begin as ``source_rank``'s, in a
    group of ranks that share tokens the first one's.
    """

    def __init__(self, metadata: Any, layer_ids: list[int], entries: int, source_rank: int) -> None:
        self._metadata = metadata
        self._rows = layer_ids
        self._deals = metadata.logical_to_rank_dispatch_physical_map is None
        self._entries = entries
        experts = int(metadata.num_logical_experts)
        placed_LP = metadata.physical_to_logical_map_cpu[layer_ids].numpy().astype(np.int32)
        slots = int(metadata.num_local_physical_experts)
        self.first = Placement(placed_LP.reshape(len(layer_ids), -1, slots), experts)
        # On CPU the copies are the tensors themselves, which dynamic dispatch reads.
        metadata.logical_to_all_physical_map_cpu = metadata.logical_to_all_physical_map_cpu.clone()
        tables_LE = self.first.default_log2phy(entries)[source_rank]
        for index in range(len(layer_ids)):
            self.follow(index, self.first.phy2log_LRS[index], tables_LE[index])
        if self._deals:
            self._deal(tables_LE)

    def _deal(self, log2phy_LE: Int32) -> None:
        table_LED = torch.from_numpy(with_entries(log2phy_LE, 2).astype(np.int64))
        for index, table_ED in enumerate(table_LED):
            row = self._rows[index]
            self._metadata.logical_to_all_physical_map[row, :, : self._entries].copy_(table_ED)

    def log2phy(self, index: int) -> torch.Tensor:
        """Return the table that sends this rank's tokens of a layer, ``[E]`` or ``[E, D]``, as a view."""
        row = self._rows[index]
        table: torch.Tensor
        if self._deals:
            table = self._metadata.logical_to_all_physical_map[row, :, : self._entries]
        else:
            table = self._metadata.logical_to_rank_dispatch_physical_map[row]
        return table

    def follow(self, index: int, phy2log_RS: Int32, log2phy_E: Int32) -> None:
        """Update SGLang's view of the placement for a layer that has just switched; the agent owns its dispatch table.

        SGLang reads one period of each row of a dealing table, so that its entries get equal shares of the tokens.
        """
        metadata, row = self._metadata, self._rows[index]
        held_P = torch.from_numpy(phy2log_RS.reshape(-1).astype(np.int64))
        replicas_EP, counts_E = _replicas(phy2log_RS, self.first.experts)
        _write(metadata.physical_to_logical_map[row], held_P)
        metadata.physical_to_logical_map_cpu[row].copy_(held_P)
        metadata.logical_to_all_physical_map_cpu[row].copy_(replicas_EP)
        if self._deals:
            valid_E = torch.from_numpy(entry_periods(with_entries(log2phy_E, 1)))
            _write(metadata.logical_to_all_physical_map_num_valid[row], valid_E)
        else:
            _write(metadata.logical_to_all_physical_map[row], replicas_EP)
            _write(metadata.logical_to_all_physical_map_num_valid[row], counts_E)


def _write(table: torch.Tensor, values: torch.Tensor) -> None:
    """In place, without waiting for the device."""
    table.copy_(on_host(values, table.device), non_blocking=True)


def _replicas(phy2log_RS: Int32, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each expert's physical ids, int64 ``[E, R*S]`` filled up with -1, and their number, int64 ``[E]``."""
    flat_P = phy2log_RS.reshape(-1)
    by_expert_P = np.argsort(flat_P, kind="stable")
    counts_E = np.bincount(flat_P, minlength=experts)
    first_E = np.cumsum(counts_E) - counts_E
    sorted_P = flat_P[by_expert_P]
    replicas_EP = np.full((experts, flat_P.size), -1, dtype=np.int64)
    replicas_EP[sorted_P, np.arange(flat_P.size) - first_E[sorted_P]] = by_expert_P
    return torch.from_numpy(replicas_EP), torch.from_numpy(counts_E.astype(np.int64))


def _expert_weights(tensors: Iterable[torch.Tensor], slots: int, layer: int) -> list[torch.Tensor]:
    """Return what SGLang's own EPLB would move of one layer, each as a contiguous ``[S, ...]`` over the same memory.

    Kernels may keep them transposed: scales, say, by column. Raises ``UnsupportedEngineError`` where one has gaps
    between its elements, or does not have a slot in front.
    """
    found = [_by_slot(tensor, slots) for tensor in tensors]
    if not found or any(tensor is None for tensor in found):
        raise UnsupportedEngineError(
            f"the experts of layer {layer} in this format",
            f"Their tensors are not one part for each of {slots} slots without gaps between them",
            "Choose another quantisation or MoE runner backend",
        )
    return [tensor for tensor in found if tensor is not None]


def _by_slot(tensor: torch.Tensor, slots: int) -> torch.Tensor | None:
    """Return a view with the axes after the first in the order in which they are in memory."""
    if tensor.dim() == 0 or tensor.shape[0] != slots:
        return None
    inner = sorted(range(1, tensor.dim()), key=tensor.stride, reverse=True)
    view = tensor.permute(0, *inner)
    return view if view.is_contiguous() else None
