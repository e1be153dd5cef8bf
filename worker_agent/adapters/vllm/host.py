"""The agent beside one model's EPLB state in a rank of vLLM, called after every forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb_core.placement import Int32, Placement, with_entries
from worker_agent.adapters.batch import share_of_rank, step_of
from worker_agent.adapters.compat import UnsupportedEngineError, refuse
from worker_agent.adapters.engine_host import EngineHost, EngineLayer, HeatRings, entry_periods, log
from worker_agent.adapters.unmoved import Facts, refuse_unmoved
from worker_agent.adapters.vllm.experts import local_experts
from worker_agent.device import on_host

_NO_EXPERTS = frozenset(
    {
        "w13_input_scale",
        "w2_input_scale",
        "e_score_correction_bias",
        "hash_indices_table",
        "expert_local_to_global",
    }
)
"""What vLLM's balancer leaves behind on purpose: one value for all experts, the router's, and maps of physical ids."""


_MAX_ENTRIES = 16
"""Largest number of table entries per expert on ranks that share tokens. Further replicas get no tokens."""
_PROBED_ROWS = 64

_ALL_ROWS = 1 << 24
"""More tokens than a pass has. Times a token's choices it still fits the 32 bits that vLLM's kernel computes in."""


class VllmHost(EngineHost):
    """The agent of one rank and the model that it balances.

    A layer's ``log2phy`` is a view of vLLM's ``logical_to_physical_map``. If each rank has its own tokens, the view is
    the first column. vLLM's replica count is then one for every expert, so the router sends every choice there. If
    ranks share tokens, the view has as many columns as an expert may have replicas. The router then picks a column by a
    hash of the token's row, the same on all these ranks. vLLM does not count tokens per slot; the service derives these
    counts from every rank's choices.

    Arguments are vLLM's ``EplbModelState``, its parallel configuration and its coordinator of the EP group.
    """

    def __init__(self, model_state: Any, parallel_config: Any, group: Any) -> None:
        self._model = model_state
        self._rank: int = group.rank_in_group
        self._parallel, self._ranks = parallel_config, group.world_size
        self._tokens = self._token_group()
        naive, _, _ = _dispatch_of(model_state.model.moe_layers[0])
        self._counts_gathered = naive and self._count_all_gathered()
        parallel: int = parallel_config.data_parallel_size
        self._share = None
        if parallel == 1 or not naive:
            shared = self._tokens.number is not None
            self._share = share_of_rank(self._rank, self._ranks // parallel, shared)
        self._warms_up = False
        self._first = _first_placement(model_state, group.world_size)
        layers, experts = model_state.logical_replica_count.shape
        self._heat = HeatRings(layers, model_state.expert_load_pass.device, experts=experts)
        self._dispatch_confirmed = False
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        slots = model_state.physical_to_logical_map.shape[1] // group.world_size
        self._entries = 1 if self._tokens.number is None else self._most_replicas()
        # The experts of 0.23 are the layer's own.
        experts_of_layers = [getattr(one, "routed_experts", one) for one in model_state.model.moe_layers]
        facts = self._check_experts(experts_of_layers, slots)
        start_layers = self._start_tables()
        if self._entries > 1:
            self._check_choices(group.cpu_group)
        computes = [
            local_experts(one, slots, model_state.expert_load_pass.device) for one in experts_of_layers
        ]
        for index in {0, layers - 1}:
            router = model_state.model.moe_layers[index].router
            router.eplb_agent_layer = (self._heat, index, layers)
        self._start(start_layers, group.cpu_group, self._tokens.number, facts=facts, computes=computes)

    def _check_experts(self, experts_of_layers: list[Any], slots: int) -> Facts:
        """Reject layers with tensors that would stay behind when an expert moves; return values that all share."""
        model = self._model
        moved = [weight for of_layer in model.model.expert_weights for weight in of_layer]
        tables = [one for one in vars(model).values() if isinstance(one, torch.Tensor)]
        facts: Facts = {}
        for index, experts in enumerate(experts_of_layers):
            layer = model.model.moe_layers[index]
            found = refuse_unmoved(experts, moved, slots, _NO_EXPERTS, tables=tables, roots={"layer": layer})
            facts |= {f"layer {index}: {path}": value for path, value in found.items()}
        return facts

    def _count_all_gathered(self) -> bool:
        """Have the routers count every token that the naive dispatcher has gathered; return False if they cannot.

        Since 0.25, vLLM counts only as many rows as this rank has real tokens. Rank 0's tokens come first among the
        gathered ones, so no rank would count those of the other ranks. This method makes rank 0 count all rows,
        including the padding of a graph.
        """
        if not hasattr(self._model, "num_unpadded_tokens_tensors"):
            return True  # 0.23 and 0.24 count all rows
        states = [getattr(layer.router, "eplb_state", None) for layer in self._model.model.moe_layers]
        kept = [getattr(state, "num_unpadded_tokens_tensors", None) for state in states]
        if not all(kept):
            log.warning(
                "under the naive dispatcher only the tokens of rank 0 are counted, and experts are balanced for these: "
                "choose another all2all backend"
            )
            return False
        for state, tensors in zip(states, kept, strict=True):
            assert state is not None
            state.num_unpadded_tokens_tensors = [torch.full_like(one, _ALL_ROWS) for one in tensors or ()]
        return True

    def _token_group(self) -> _TokenGroup:
        return token_group(self._model.model.moe_layers, self._parallel, self._rank, self._ranks)

    def set_warming_up(self, warms_up: bool) -> None:
        """Count the following steps as dummy steps while the engine warms up, or as real ones again."""
        self._warms_up = warms_up

    def _most_replicas(self) -> int:
        """Return the table entries per expert: the most replicas that it can have, within the limits of the tables."""
        model = self._model
        redundant = self._first.ranks * self._first.slots - self._first.experts
        return min(redundant + 1, _MAX_ENTRIES, int(model.logical_to_physical_map.shape[2]))

    def _start_tables(self) -> list[EngineLayer]:
        """Write the replicas of vLLM's first placement that may get this rank's tokens into vLLM's tables."""
        model = self._model
        entries = self._entries
        table_LED = with_entries(self._first.default_log2phy(entries)[self._tokens.first], 2)
        model.logical_to_physical_map[:, :, :entries].copy_(torch.from_numpy(table_LED.astype(np.int64)))
        self._write_counts(table_LED)
        maps_LE = torch.from_numpy(self._first.expert_map(self._rank)).to(model.expert_load_pass.device)
        return [
            EngineLayer(
                self._table(layer),
                map_E,
                list(model.model.expert_weights[layer]),
                self._heat,
                layer,
                self._tokens.number is not None,
                entry_by_row=entries > 1,
            )
            for layer, map_E in enumerate(maps_LE)
        ]

    def _table(self, layer: int) -> torch.Tensor:
        """Return the columns that the router reads, int64 ``[E]`` or ``[E, D]``, as a view."""
        table_ED: torch.Tensor = self._model.logical_to_physical_map[layer, :, : self._entries]
        return table_ED if self._entries > 1 else table_ED[:, 0]

    def _write_counts(self, table_LED: Int32, layers: slice = slice(None)) -> None:
        """Have the router hash over one period of each expert's row, so that entries get equal shares of the tokens."""
        count_LE = torch.from_numpy(np.stack([entry_periods(table_ED) for table_ED in table_LED]))
        held_LE = self._model.logical_replica_count[layers]
        held_LE.copy_(on_host(count_LE, held_LE.device), non_blocking=True)

    def _check_choices(self, group: dist.ProcessGroup) -> None:
        """Reject routers that pick different replicas for the same tokens on two ranks. A collective over ``group``.

        Each rank routes the same batch, with all experts, twice. A router that picks at random gives two results.
        """
        model = self._model
        router = self._model.model.moe_layers[0].router
        device = model.expert_load_pass.device
        experts = self._first.experts
        rows_TK = (torch.arange(_PROBED_ROWS)[:, None] * 7 + torch.arange(2)) % experts
        table_ED = self._table(0).cpu()
        places = []
        for _ in range(2):
            chosen_TK = router._apply_eplb_mapping(rows_TK.to(torch.int32).to(device)).cpu()
            # Token groups have different tables, so only positions in a row can be compared across ranks.
            places.append((table_ED[rows_TK] == chosen_TK[..., None]).int().argmax(dim=-1).tolist())
        model.expert_load_pass.zero_()
        everyone: list[Any] = [None] * self._ranks
        dist.all_gather_object(everyone, places, group=group)
        refuse(
            [
                (
                    any(theirs != [everyone[0][0]] * 2 for theirs in everyone),
                    "a router that picks different replicas for the same tokens",
                    "Ranks that see the same tokens would compute some of them twice and others never",
                    "Start without redundant experts",
                )
            ]
        )

    def confirm_dispatch(self) -> None:
        """Compare how layers dispatch, now that the model has run, with how they did when the agent was started.

        Raises ``UnsupportedEngineError`` where vLLM has put other kernels in since, as 0.23 does with quantisation
        methods of its older kind.
        """
        if self._token_group() != self._tokens:
            raise UnsupportedEngineError(
                "MoE layers whose way of dispatching changed after the model was loaded",
                "Which ranks share tokens was derived from the way before",
                "Choose another MoE backend or quantisation",
            )

    def step(self, is_dummy: bool) -> None:
        """Record a forward pass that is over; ``is_dummy`` where this rank had no tokens in it.

        Called on the thread and stream on which vLLM queues its passes: what is queued here comes after this pass and
        before the next one.
        """
        if not self._dispatch_confirmed:
            self.confirm_dispatch()
            self._dispatch_confirmed = True
        model = self._model
        counts = self._rank == self._tokens.first and (self._counts_gathered or not is_dummy)
        counts = counts and not self._warms_up
        chosen_LP = model.expert_load_pass if counts else None
        self._heat.record(chosen_LX=chosen_LP, phy2log_LP=model.physical_to_logical_map)
        self.agent.step(*step_of(self._batch, self._share, is_dummy=is_dummy or self._warms_up))

    def _follow(self, layer: int) -> None:
        row_P = self.agent.installed.placement.phy2log_LRS[layer].reshape(-1).astype(np.int64)
        held_P = self._model.physical_to_logical_map[layer]
        held_P.copy_(on_host(torch.from_numpy(row_P), held_P.device), non_blocking=True)
        if self._entries > 1:
            table_LED = with_entries(self.agent.installed.log2phy_LE[layer][None], 2)
            self._write_counts(table_LED, slice(layer, layer + 1))

    def restore(self) -> None:
        """Bring every expert to where vLLM loads it, until ``resume``; a collective like ``drain``."""
        self._bring_back()
        self.agent.restore(self._first, "vLLM loads weights")
        self._remember()

    def keep_other_tables(self, model_states: Iterable[Any]) -> None:
        """Keep on the host the tables of models that the agent does not balance, until they are written again."""
        tables = [
            getattr(state, name)
            for state in model_states
            if state is not self._model
            for name in ("physical_to_logical_map", "logical_to_physical_map", "logical_replica_count")
        ]
        self._kept = [(table, table.cpu().clone()) for table in tables]

    def _bring_back(self) -> None:
        for table, values in self._kept:
            table.copy_(values)
        self._kept = []
        self._write_counts(with_entries(self.agent.installed.log2phy_LE, 2))
        super()._bring_back()


def _first_placement(model_state: Any, ranks: int) -> Placement:
    """Return the placement that vLLM starts with, and loads weights for."""
    layers, experts = model_state.logical_replica_count.shape
    phy2log_LRS = model_state.physical_to_logical_map.cpu().numpy().reshape(layers, ranks, -1)
    return Placement(phy2log_LRS.astype(np.int32), experts)


@dataclass(frozen=True)
class _TokenGroup:
    """The ranks of the EP group that run their experts on the same tokens as this one."""

    number: int | None
    """Equal on all ranks of the group; ``None`` where this rank's tokens are its own."""

    first: int
    """Lowest EP rank of the group: the one that counts the tokens."""


def _dispatch_of(layer: Any) -> tuple[bool, bool, bool]:
    """Read how an MoE layer dispatches, from a runner that knows all, or in 0.23 a ``FusedMoE`` and its parts.

    Returns three flags: tokens of all ranks are gathered before the router runs (naive), tensor-parallel ranks have
    tokens of their own (sequence parallel), the kernel routes inside (monolithic).
    """
    runner = getattr(layer, "runner", layer)
    if not hasattr(runner, "do_naive_dispatch_combine"):
        raise UnsupportedEngineError(
            f"MoE layers of the class {type(layer).__name__} (--moe-backend deep_gemm_mega_moe, say)",
            "They dispatch inside one kernel, whose experts and tables the agent does not know",
            "Choose another MoE backend",
        )
    method = layer.quant_method if runner is not layer else layer
    return (
        bool(runner.do_naive_dispatch_combine),
        bool(layer.moe_config.is_sequence_parallel),
        bool(method.is_monolithic),
    )


def token_group(layers: Iterable[Any], parallel_config: Any, rank: int, ranks: int) -> _TokenGroup:
    """Derive the token group from how vLLM's layers dispatch.

    Tokens are replicated over the tensor-parallel ranks of one data-parallel rank, unless the layer is sequence
    parallel; the naive dispatcher gathers the tokens of all ranks before the router runs, so that every rank routes
    all of them and needs the same table.

    Raises ``UnsupportedEngineError`` under prefill context parallelism, where a kernel routes inside, or where layers
    differ.
    """
    found = [_dispatch_of(layer) for layer in layers]
    refuse(
        [
            (
                any(monolithic for _, _, monolithic in found),
                "an MoE layer that runs a monolithic kernel",
                "It routes inside the kernel and follows no table",
                "Choose another MoE backend",
            ),
            (
                getattr(parallel_config, "prefill_context_parallel_size", 1) > 1,
                "prefill context parallelism with EPLB",
                "Which ranks share tokens then changes within a step",
                "Start without --prefill-context-parallel-size",
            ),
            (
                len(set(found)) > 1,
                "MoE layers that dispatch differently in one model",
                "Ranks would share tokens in some layers only",
                "Use one MoE backend for all layers",
            ),
        ]
    )
    naive, sequence_parallel, _ = found[0]
    if naive:
        return _TokenGroup(0, 0)
    tensor_parallel = ranks // parallel_config.data_parallel_size
    if sequence_parallel or tensor_parallel == 1:
        return _TokenGroup(None, rank)
    first = rank - rank % tensor_parallel
    return _TokenGroup(first, first)
