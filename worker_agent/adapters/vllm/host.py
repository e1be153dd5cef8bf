"""vLLM host: runs one rank's agent on a model's EPLB state after every forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb_core.placement import Int32, Placement, with_entries
from worker_agent.adapters.batch import share_of_rank, step_of
from worker_agent.adapters.compat import UnsupportedEngineError, refuse
from worker_agent.adapters.engine_host import EngineHost, EngineLayer, HeatRings, entry_periods, log
from worker_agent.adapters.unmoved import SharedValues, refuse_unmoved
from worker_agent.adapters.vllm.dispatch import TokenGroup, dispatch_of, token_group
from worker_agent.adapters.vllm.experts import local_experts
from worker_agent.adapters.vllm.step_split import RouterSplit, choose_for_model, start_splits
from worker_agent.device import on_host
from worker_agent.settings import AgentSettings

_NO_EXPERTS = frozenset(
    {
        "w13_input_scale",
        "w2_input_scale",
        "e_score_correction_bias",
        "hash_indices_table",
        "expert_local_to_global",
    }
)
"""Tensors that vLLM's balancer deliberately does not move: scales shared by all experts, router tensors, and maps of
physical experts."""


_NO_EXCHANGE = (
    "with pipeline parallelism or a pooling model, vLLM does not call the agent after every pass, so ranks cannot "
    "exchange their counts; use EPLB_AGENT_MODE=policy"
)
_MAX_ENTRIES = 16
"""Maximum number of table entries per expert on ranks that share tokens. Additional replicas receive no tokens."""
_PROBED_ROWS = 64

_ALL_ROWS = 1 << 24
"""Number larger than any pass's token count. Multiplied by the choices per token, it still fits in the 32-bit integers
of vLLM's kernel."""


class VllmHost(EngineHost):
    """One rank's agent, operating on one model's EPLB state.

    A layer's ``log2phy`` is a view of vLLM's ``logical_to_physical_map``. If each rank has its own tokens, the view is
    the first column, and vLLM's replica count is set to one for every expert so that the router always reads that
    column. If ranks share tokens, the view has as many columns as an expert may have replicas. The router then selects
    a column by hashing the token's row, so all of these ranks select the same column. vLLM does not count tokens per
    slot; the service derives these counts from all ranks' choices.

    Parameters
    ----------
    model_state
        vLLM's ``EplbModelState``.
    parallel_config
        vLLM's ``ParallelConfig``.
    group
        vLLM's coordinator for the EP group.
    is_pooling
        True if vLLM runs the model for pooling. The MoE part of a multimodal model does not know this itself.
    """

    def __init__(
        self, model_state: Any, parallel_config: Any, group: Any, *, is_pooling: bool = False
    ) -> None:
        self._model = model_state
        self._parallel = parallel_config
        self._rank: int = group.rank_in_group
        self._ranks: int = group.world_size
        self._tokens = self._token_group()
        naive = dispatch_of(model_state.model.moe_layers[0]).naive
        self._counts_gathered = naive and self._count_all_gathered()
        data_parallel: int = parallel_config.data_parallel_size
        self._share = None
        if data_parallel == 1 or not naive:
            shared = self._tokens.number is not None
            self._share = share_of_rank(self._rank, self._ranks // data_parallel, shared)
        self._warms_up = False
        self._initial = _initial_placement(model_state, self._ranks)
        layers, experts = model_state.logical_replica_count.shape
        skips_steps = is_pooling or getattr(parallel_config, "pipeline_parallel_size", 1) > 1
        self._split_choice = choose_for_model(
            model_state,
            parallel_config,
            group,
            AgentSettings().step_split,
            no_exchange=_NO_EXCHANGE if skips_steps else None,
        )
        self._group = group.device_group if self._split_choice.exchanges else None
        self._splits: list[RouterSplit] = []
        # If replicas are chosen according to the step's own counts, tables do not determine the loads, so record them.
        self._by_slot = self._split_choice.is_on
        slots = model_state.physical_to_logical_map.shape[1] // self._ranks
        widths = {"slots": slots} if self._by_slot else {"experts": experts}
        self._heat = HeatRings(layers, model_state.expert_load_pass.device, **widths)
        self._local_slots = slice(self._rank * slots, (self._rank + 1) * slots)
        self._dispatch_confirmed = False
        self._saved_tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._entries = 1 if self._tokens.number is None else self._max_replicas()
        self._start_on_layers(group)

    def _start_on_layers(self, group: Any) -> None:
        """Check the layers, write vLLM's tables and start the agent (collective over the EP group)."""
        model = self._model
        layers = model.model.moe_layers
        # In 0.23, the layer itself owns the experts.
        owners = [getattr(layer, "routed_experts", layer) for layer in layers]
        slots = model.physical_to_logical_map.shape[1] // self._ranks
        shared_values = self._check_experts(owners, slots)
        agent_layers = self._write_initial_tables()
        if self._entries > 1:
            self._check_choices(group.cpu_group)
        self._splits = start_splits(model, group, self._split_choice)
        for agent_layer in agent_layers:
            agent_layer.splits_by_step = self._split_choice.whole and bool(self._splits)
        computes = [local_experts(owner, slots, model.expert_load_pass.device) for owner in owners]
        count = self._initial.layers
        for index in {0, count - 1}:
            layers[index].router.eplb_agent_layer = (self._heat, index, count)
        self._start(
            agent_layers,
            group.cpu_group,
            self._tokens.number,
            shared_values=shared_values,
            computes=computes,
        )

    def _check_experts(self, owners: list[Any], slots: int) -> SharedValues:
        """Reject layers with tensors that would stay behind when an expert moves.

        Parameters
        ----------
        owners
            Module that owns each layer's experts.
        slots
            S, the number of experts on this rank.

        Returns
        -------
        SharedValues
            Values that all experts of this rank share.
        """
        model = self._model
        moved = [weight for layer_weights in model.model.expert_weights for weight in layer_weights]
        tables = [value for value in vars(model).values() if isinstance(value, torch.Tensor)]
        shared_values: SharedValues = {}
        for index, owner in enumerate(owners):
            roots = {"layer": model.model.moe_layers[index]}
            values = refuse_unmoved(owner, moved, slots, _NO_EXPERTS, tables=tables, roots=roots)
            shared_values |= {f"layer {index}: {path}": value for path, value in values.items()}
        return shared_values

    def _count_all_gathered(self) -> bool:
        """Make the routers count all tokens that the naive dispatcher gathers. Return False if they cannot.

        Since 0.25, vLLM counts only as many rows as this rank has real tokens. Rank 0's tokens come first in the
        gathered batch, so the other ranks' tokens would never be counted. This method makes rank 0 count all rows,
        including graph padding.
        """
        if not hasattr(self._model, "num_unpadded_tokens_tensors"):
            return True  # 0.23 and 0.24 count all rows
        states = [getattr(layer.router, "eplb_state", None) for layer in self._model.model.moe_layers]
        limits = [getattr(state, "num_unpadded_tokens_tensors", None) for state in states]
        if not all(limits):
            log.warning(
                "with the naive dispatcher, this vLLM release counts only rank 0's tokens, so experts are balanced "
                "for that rank only: choose a different all2all backend"
            )
            return False
        for state, tensors in zip(states, limits, strict=True):
            assert state is not None
            state.num_unpadded_tokens_tensors = [
                torch.full_like(tensor, _ALL_ROWS) for tensor in tensors or ()
            ]
        return True

    def _token_group(self) -> TokenGroup:
        return token_group(self._model.model.moe_layers, self._parallel, self._rank, self._ranks)

    def set_warming_up(self, warms_up: bool) -> None:
        """Start or stop recording steps as dummy steps. All steps of the engine's warm-up are dummy steps."""
        self._warms_up = warms_up

    def _max_replicas(self) -> int:
        """Return the maximum replica count per expert, capped at ``_MAX_ENTRIES`` and at the width of vLLM's table."""
        redundant = self._initial.ranks * self._initial.slots - self._initial.experts
        return min(redundant + 1, _MAX_ENTRIES, int(self._model.logical_to_physical_map.shape[2]))

    def _write_initial_tables(self) -> list[EngineLayer]:
        """Write this rank's tables for vLLM's initial placement, and return the layers as the agent sees them."""
        model = self._model
        entries = self._entries
        table_LED = with_entries(self._initial.default_log2phy(entries)[self._tokens.first], 2)
        model.logical_to_physical_map[:, :, :entries].copy_(torch.from_numpy(table_LED.astype(np.int64)))
        self._write_counts(table_LED)
        maps_LE = torch.from_numpy(self._initial.expert_map(self._rank)).to(model.expert_load_pass.device)
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
        """Make the router hash over one period of each expert's row, so that entries receive equal shares of tokens."""
        period_LE = torch.from_numpy(np.stack([entry_periods(table_ED) for table_ED in table_LED]))
        count_LE = self._model.logical_replica_count[layers]
        count_LE.copy_(on_host(period_LE, count_LE.device), non_blocking=True)

    def _check_choices(self, group: dist.ProcessGroup) -> None:
        """Reject routers that choose different replicas for the same tokens on different ranks (collective).

        Every rank routes the same batch twice, and the batch covers all experts. A router that picks at random gives
        different results.
        """
        model = self._model
        router = self._model.model.moe_layers[0].router
        device = model.expert_load_pass.device
        experts = self._initial.experts
        rows_TK = (torch.arange(_PROBED_ROWS)[:, None] * 7 + torch.arange(2)) % experts
        table_ED = self._table(0).cpu()
        columns = []
        for _ in range(2):
            chosen_TK = router._apply_eplb_mapping(rows_TK.to(torch.int32).to(device)).cpu()
            # Tables differ between token groups, so ranks can only compare positions within a table row.
            columns.append((table_ED[rows_TK] == chosen_TK[..., None]).int().argmax(dim=-1).tolist())
        model.expert_load_pass.zero_()
        gathered: list[Any] = [None] * self._ranks
        dist.all_gather_object(gathered, columns, group=group)
        refuse(
            [
                (
                    any(remote != [gathered[0][0]] * 2 for remote in gathered),
                    "a router that picks different replicas for the same tokens",
                    "Ranks with the same tokens would compute some of them twice and others never",
                    "Start without redundant experts",
                )
            ]
        )

    def confirm_dispatch(self) -> None:
        """Check, after the model has run, that its layers still dispatch as they did when the agent started.

        Raises ``UnsupportedEngineError`` if vLLM has switched to different kernels, as release 0.23 does for
        older quantisation methods.
        """
        if self._token_group() != self._tokens:
            raise UnsupportedEngineError(
                "MoE layers whose dispatch changed after the model was loaded",
                "The agent determined from the earlier dispatch which ranks share tokens",
                "Choose another MoE backend or quantisation",
            )

    def step(self, is_dummy: bool) -> None:
        """Record a completed forward pass.

        vLLM calls this on the thread and stream that it uses to queue passes. Operations queued here therefore run
        after this pass and before the next one.

        Parameters
        ----------
        is_dummy
            True if this rank had no tokens in the pass.
        """
        if not self._dispatch_confirmed:
            self.confirm_dispatch()
            self._dispatch_confirmed = True
        model = self._model
        counts = (self._counts_gathered or not is_dummy) and not self._warms_up
        loads_LP = model.expert_load_pass
        if self._group is not None:
            # Ranks count the choices of their own tokens. All ranks call this method after each pass.
            loads_LP = loads_LP * counts
            dist.all_reduce(loads_LP, group=self._group)
            counts = not self._warms_up
        if self._by_slot:
            self._heat.record(loads_LP[:, self._local_slots] if counts else None)
        else:
            chosen_LP = loads_LP if counts and self._rank == self._tokens.first else None
            self._heat.record(chosen_LX=chosen_LP, phy2log_LP=model.physical_to_logical_map)
        self.agent.step(*step_of(self._batch, self._share, is_dummy=is_dummy or self._warms_up))

    def _follow(self, layer: int) -> None:
        new_P = self.agent.installed.placement.phy2log_LRS[layer].reshape(-1).astype(np.int64)
        phy2log_P = self._model.physical_to_logical_map[layer]
        phy2log_P.copy_(on_host(torch.from_numpy(new_P), phy2log_P.device), non_blocking=True)
        if self._entries > 1:
            table_LED = with_entries(self.agent.installed.log2phy_LE[layer][None], 2)
            self._write_counts(table_LED, slice(layer, layer + 1))
        if self._splits:
            self._splits[layer].install(self.agent.installed.placement.phy2log_LRS[layer])

    def restore(self) -> None:
        """Move every expert back to the slot that vLLM loads it into, to stay there until ``resume`` (collective)."""
        self._write_back()
        self.agent.restore(self._initial, "vLLM is loading weights")
        self._save()

    def keep_other_tables(self, model_states: Iterable[Any]) -> None:
        """Copy to the host the tables of models that the agent does not balance. ``resume`` writes them back."""
        tables = [
            getattr(state, name)
            for state in model_states
            if state is not self._model
            for name in ("physical_to_logical_map", "logical_to_physical_map", "logical_replica_count")
        ]
        self._saved_tables = [(table, table.cpu().clone()) for table in tables]

    def _write_back(self) -> None:
        for table, values in self._saved_tables:
            table.copy_(values)
        self._saved_tables = []
        self._write_counts(with_entries(self.agent.installed.log2phy_LE, 2))
        for split in self._splits:
            split.write_again()
        super()._write_back()


def _initial_placement(model_state: Any, ranks: int) -> Placement:
    """Return the placement that vLLM starts with and loads weights for."""
    layers, experts = model_state.logical_replica_count.shape
    phy2log_LRS = model_state.physical_to_logical_map.cpu().numpy().reshape(layers, ranks, -1)
    return Placement(phy2log_LRS.astype(np.int32), experts)
