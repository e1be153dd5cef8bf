"""The per-step split in vLLM's routers, with stand-ins: recorded loads, padding, outputs, commits and full mode."""

from __future__ import annotations

import logging
import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb_core.placement import Placement
from tests.adapters import vllm_fakes as fakes
from tests.adapters.sglang_fakes import put_modules
from tests.ranks import run_ranks
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.vllm import hooks, step_split
from worker_agent.adapters.vllm.step_split import RouterSplit, choose_for_model, start_splits
from worker_agent.step_split import choose_split

RANKS = 2
EXPERTS = 6
PLACED_LP = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1], [5, 1, 2, 0, 4, 3, 0, 1]])
IDS_TK = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 3], [0, 1], [4, 5], [1, 0], [0, 2]] * 3)
BASE_ROUTER = "vllm.model_executor.layers.fused_moe.router.base_router"
EPLB_STATE = "vllm.distributed.eplb.eplb_state"
UBATCHING = "vllm.v1.worker.ubatching"


def base_router():
    """Return a fake ``BaseRouter`` whose own mapping takes each expert's first replica and records nothing."""

    class BaseRouter:
        def __init__(self, state):
            self.eplb_state = state

        def _apply_eplb_mapping(self, topk_ids):
            return topk_ids + 100

    return BaseRouter


def layer_state(slots=8, real=None, record=True):
    """Return the ``EplbLayerState`` of vLLM 0.25 and later, or of earlier releases if ``real`` is ``None``."""
    state = SimpleNamespace(
        expert_load_view=torch.zeros(slots, dtype=torch.int32), should_record_tensor=torch.tensor(record)
    )
    if real is not None:
        state.num_unpadded_tokens_tensors = [torch.tensor(0), torch.tensor(real, dtype=torch.int32)]
    return state


@pytest.fixture
def patched(monkeypatch):
    """Return a patched fake ``BaseRouter``. The current micro-batch is the second one."""
    router = base_router()
    put_modules(
        monkeypatch,
        {BASE_ROUTER: {"BaseRouter": router}, UBATCHING: {"dbo_current_ubatch_id": lambda: 1}},
    )
    step_split.patch_router()
    return router


def split_of(layer=0, **options):
    return RouterSplit(PLACED_LP[layer].numpy().reshape(RANKS, -1), EXPERTS, "cpu", **options)


def test_a_router_without_a_split_is_not_affected(patched):
    router = patched(layer_state(real=4))
    assert router._apply_eplb_mapping(IDS_TK).tolist() == (IDS_TK + 100).tolist()
    router.eplb_agent_split = split_of(least_tokens=len(IDS_TK) + 1)
    assert router._apply_eplb_mapping(IDS_TK).tolist() == (IDS_TK + 100).tolist()


def test_patching_twice_has_no_effect(patched):
    mapping = patched._apply_eplb_mapping
    step_split.patch_router()
    assert patched._apply_eplb_mapping is mapping


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("real", [None, 20, len(IDS_TK)])
def test_only_real_rows_are_recorded_and_split(patched, real, dtype):
    state = layer_state(real=real)
    router = patched(state)
    router.eplb_agent_split = split_of()
    physical_TK = router._apply_eplb_mapping(IDS_TK.to(dtype))
    assert physical_TK.dtype == dtype
    assert PLACED_LP[0][physical_TK.long()].tolist() == IDS_TK.tolist()
    rows = len(IDS_TK) if real is None else real
    received_P = torch.bincount(physical_TK[:rows].reshape(-1), minlength=8)
    assert state.expert_load_view.tolist() == received_P.tolist()
    assert split_of().physical(IDS_TK[:rows])[0].tolist() == physical_TK[:rows].tolist()
    peak, mean = received_P.reshape(RANKS, -1).sum(dim=1).max(), received_P.sum() / RANKS
    assert peak <= mean + 1
    hashed_P = torch.bincount(first_replicas(IDS_TK[:rows]).reshape(-1), minlength=8)
    assert hashed_P.reshape(RANKS, -1).sum(dim=1).max() > mean + 5


def first_replicas(ids_TK):
    return torch.tensor([PLACED_LP[0].tolist().index(expert) for expert in range(EXPERTS)])[ids_TK]


def test_loads_add_up_over_passes_and_are_not_recorded_if_vllm_does_not_record(patched):
    state = layer_state(real=len(IDS_TK))
    router = patched(state)
    router.eplb_agent_split = split_of()
    for _ in range(2):
        router._apply_eplb_mapping(IDS_TK)
    assert state.expert_load_view.sum() == 2 * IDS_TK.numel()
    state.should_record_tensor.fill_(False)
    router._apply_eplb_mapping(IDS_TK)
    assert state.expert_load_view.sum() == 2 * IDS_TK.numel()


def test_gathered_batches_are_split_as_a_whole_because_ranks_know_only_their_own_padding(patched):
    chosen = []
    for real in (5, 11):  # numbers of real rows on two ranks
        state = layer_state(real=real)
        router = patched(state)
        router.eplb_agent_split = split_of()
        router.eplb_agent_split.ignores_padding = False
        chosen.append(router._apply_eplb_mapping(IDS_TK).tolist())
        assert state.expert_load_view.sum() == 2 * real  # as vLLM's kernel counts
    assert chosen[0] == chosen[1]


def test_an_empty_batch_is_not_mapped(patched):
    router = patched(layer_state(real=0))
    router.eplb_agent_split = split_of()
    assert router._apply_eplb_mapping(IDS_TK[:0]).shape == (0, 2)


def outputs_of_a_toy_moe():
    """Return this rank's loads and its outputs before and after a commit, and the outputs of a dense layer."""
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(0)
    experts_EHH = torch.randn(EXPERTS, 8, 8, generator=draw, dtype=torch.float64)
    hidden_TH = torch.randn(len(IDS_TK), 8, generator=draw, dtype=torch.float64)
    gate_TK = torch.rand(IDS_TK.shape, generator=draw, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        router_class = base_router()
        commits = []

        def _commit_eplb_maps(model_state, new_physical_to_logical_map):
            model_state.physical_to_logical_map.copy_(new_physical_to_logical_map)
            commits.append("all")

        def _commit_eplb_maps_for_layer(model_state, new_physical_to_logical_map, layer):
            model_state.physical_to_logical_map[layer].copy_(new_physical_to_logical_map)
            commits.append(layer)

        eplb_state = {
            "_commit_eplb_maps": _commit_eplb_maps,
            "_commit_eplb_maps_for_layer": _commit_eplb_maps_for_layer,
        }
        modules = {
            BASE_ROUTER: {"BaseRouter": router_class},
            UBATCHING: {"dbo_current_ubatch_id": lambda: 1},
            EPLB_STATE: eplb_state,
            "vllm": {"__version__": "0.33.0"},
            "vllm.distributed.eplb": {},
        }
        put_modules(patch, modules)
        sys.modules["vllm.distributed.eplb"].eplb_state = sys.modules[EPLB_STATE]
        step_split.check_functions()
        step_split.patch_router()
        by_state = {}
        step_split.follow_commits(by_state)
        model = model_of(router_class)
        group = SimpleNamespace(rank_in_group=rank, world_size=RANKS, cpu_group=dist.group.WORLD)
        choice = choose_for_model(model, fakes.config(), group, "on")
        by_state[id(model)] = start_splits(model, group, choice)
        outputs = []
        loads = []

        def run_layers():
            for index, layer in enumerate(model.model.moe_layers):
                physical_TK = layer.router._apply_eplb_mapping(IDS_TK)
                loads.append(layer.router.eplb_state.expert_load_view.tolist())
                layer.router.eplb_state.expert_load_view.zero_()
                own_P = torch.arange(8) // 4 == rank
                weights_PHH = experts_EHH[model.physical_to_logical_map[index]] * own_P[:, None, None]
                out_TH = torch.einsum("th,tkhg,tk->tg", hidden_TH, weights_PHH[physical_TK.long()], gate_TK)
                dist.all_reduce(out_TH)
                outputs.append(out_TH)

        run_layers()
        commit = sys.modules[EPLB_STATE]
        commit._commit_eplb_maps(model, PLACED_LP.flip(0))
        run_layers()
        commit._commit_eplb_maps_for_layer(model, torch.tensor([2, 0, 1, 5, 3, 0, 4, 1]), 1)
        run_layers()
        dense_TH = torch.einsum("th,tkhg,tk->tg", hidden_TH, experts_EHH[IDS_TK], gate_TK)
        return [bool(torch.allclose(out_TH, dense_TH)) for out_TH in outputs], loads, commits


def model_of(router_class):
    """Return vLLM's state of a model with two layers."""
    layers = [fakes.layer() for _ in PLACED_LP]
    for layer in layers:
        layer.router = router_class(layer_state(real=len(IDS_TK)))
    return SimpleNamespace(
        model=SimpleNamespace(moe_layers=layers),
        physical_to_logical_map=PLACED_LP.clone(),
        logical_replica_count=torch.ones(len(PLACED_LP), EXPERTS, dtype=torch.long),
    )


def test_the_ranks_outputs_equal_a_dense_layers_before_and_after_a_commit():
    """A token that two ranks or no rank computed would change the sum over the ranks."""
    results = run_ranks(RANKS, outputs_of_a_toy_moe)
    for equal, loads, commits in results:
        assert equal == [True] * 6
        assert commits == ["all", 1]
        assert loads == results[0][1]
        for load_P in loads:
            ranks = np.reshape(load_P, (RANKS, -1)).sum(axis=1)
            assert ranks.sum() == IDS_TK.numel()
            assert ranks.max() <= IDS_TK.numel() / RANKS + 1


@pytest.mark.parametrize(
    ("layer", "config", "message"),
    [
        (fakes.layer(), fakes.config(), "on for all passes"),
        (fakes.layer(naive=True), fakes.config(4), "on for all passes; EPLB_AGENT_STEP_SPLIT=on"),
        (fakes.layer(sequence_parallel=True), fakes.config(2), "ranks exchange their counts"),
        (fakes.layer(), fakes.config(4), "ranks exchange their counts"),
        (fakes.layer(), fakes.config(2), "off; some ranks see the same tokens and others see different ones"),
        (fakes.layer(monolithic=True), fakes.config(), "off; .*monolithic kernel"),
        (
            fakes.layer(),
            SimpleNamespace(**vars(fakes.config(4)), num_ubatches=2),
            "off; micro-batches",
        ),
        (
            fakes.layer(),
            SimpleNamespace(**vars(fakes.config()), enable_elastic_ep=True),
            "off; elastic expert parallelism",
        ),
    ],
)
def test_the_dispatch_method_determines_whether_passes_are_split(layer, config, message):
    model = SimpleNamespace(
        model=SimpleNamespace(moe_layers=[layer]), physical_to_logical_map=torch.zeros(1, 8)
    )
    group = SimpleNamespace(rank_in_group=0, world_size=4)
    choice = choose_for_model(model, config, group, "on")
    assert re.search(message, str(choice)), str(choice)


def test_a_different_interface_is_refused_before_anything_is_patched(monkeypatch):
    router = base_router()
    modules = {
        "vllm": {"__version__": "0.34.0"},
        "vllm.distributed.eplb": {"eplb_state": SimpleNamespace(_commit_eplb_maps=lambda model_state: None)},
        BASE_ROUTER: {"BaseRouter": router},
    }
    put_modules(monkeypatch, modules)
    with pytest.raises(UnsupportedEngineError, match=r"_commit_eplb_maps.*EPLB_AGENT_STEP_SPLIT=off"):
        step_split.check_functions()
    assert not hasattr(router, "eplb_agent_split")


def test_the_choice_is_logged_on_the_first_rank_with_its_reason(caplog):
    model = model_of(base_router())
    with caplog.at_level(logging.INFO, logger="eplb.agent"):
        for rank in range(2):
            group = SimpleNamespace(rank_in_group=rank, world_size=2)
            choice = choose_split("off", sees_all=True, device_type="cpu")
            assert start_splits(model, group, choice) == []
    assert [record.getMessage() for record in caplog.records] == [
        "step split: off; EPLB_AGENT_STEP_SPLIT=off"
    ]


TARGET_LRS = np.array([[[1, 2, 0, 3], [4, 5, 0, 1]], [[0, 1, 2, 3], [0, 1, 4, 5]]], dtype=np.int32)


def switched_host(data_parallel):
    """Switch a full-mode host that splits per step. Return the facts that its service and its router see.

    Data-parallel ranks have different tokens, and rank 1 has none in the last pass.
    """
    rank = dist.get_rank()
    ids_TK = IDS_TK if data_parallel == 1 or rank == 0 else (IDS_TK[:10] + 2) % EXPERTS
    os.environ["EPLB_AGENT_STEP_SPLIT"] = "on"
    try:
        with pytest.MonkeyPatch.context() as patch:
            state = fakes.model_state(dist.get_rank())
            router_class = type(state.model.moe_layers[0].router)
            put_modules(patch, {BASE_ROUTER: {"BaseRouter": router_class}})
            step_split.patch_router()
            hooks._count_passes()
            for runner in state.model.moe_layers:
                runner.router.__class__ = router_class
            for index, runner in enumerate(state.model.moe_layers):
                runner.router.eplb_state = SimpleNamespace(
                    expert_load_view=state.expert_load_pass[index], should_record_tensor=torch.tensor(True)
                )
            state, host = fakes.started(state=state, data_parallel=data_parallel)
    finally:
        del os.environ["EPLB_AGENT_STEP_SPLIT"]
    loads = []

    def step(is_dummy=False):
        state.expert_load_pass.zero_()
        for index, runner in enumerate(state.model.moe_layers):
            physical_TK = runner.router._apply_eplb_mapping(ids_TK)
            placed_P = state.physical_to_logical_map[index]
            assert placed_P[physical_TK.long()].tolist() == ids_TK.tolist()
        host.step(is_dummy)
        row = (int(host._heat.passes) - 1) % host._heat.slots_LWS.shape[1]
        loads.append(host._heat.slots_LWS[:, row].tolist())

    step()
    host.agent.restore(Placement(TARGET_LRS, fakes.EXPERTS))
    host.agent.resume()
    step()
    step(is_dummy=data_parallel > 1 and rank == 1)
    facts = host.agent.identity.shape.splits_by_step, int(host._heat.passes)
    host.close()
    return *facts, loads, state.physical_to_logical_map.tolist()


@pytest.mark.parametrize(("data_parallel", "tokens"), [(1, [24, 24, 24]), (RANKS, [34, 34, 24])])
def test_full_mode_installs_commits_in_the_splits_and_reports_received_tokens(data_parallel, tokens):
    results = run_ranks(RANKS, switched_host, data_parallel)
    for declared, passes, _, placed_LP in results:
        assert declared
        assert passes == len(tokens)
        assert placed_LP == TARGET_LRS.reshape(len(TARGET_LRS), -1).tolist()
    for step, real in enumerate(tokens):
        loads_RLS = np.array([result[2][step] for result in results])
        loads_RL = loads_RLS.sum(axis=2)
        assert loads_RL.sum(axis=0).tolist() == [2 * real] * fakes.LAYERS
        # The split also counts the tokens of a dummy pass, because ranks compute them.
        if real >= tokens[0]:
            assert loads_RL.max() <= real + 1


@pytest.mark.parametrize(("facts", "is_pooling"), [({"pipeline_parallel_size": 2}, False), ({}, True)])
def test_full_mode_exchanges_no_counts_if_vllm_skips_the_agent_after_some_passes(facts, is_pooling):
    assert run_ranks(RANKS, choice_in_full_mode, facts, is_pooling) == [True] * RANKS


def choice_in_full_mode(facts, is_pooling):
    """Return True if a full-mode host leaves the split off because vLLM does not always call the agent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPLB_AGENT_STEP_SPLIT", "on")
        parallel = SimpleNamespace(**vars(fakes.config(RANKS)), **facts)
        patch.setattr(fakes, "config", lambda _: parallel)
        _, host = fakes.started(data_parallel=RANKS, is_pooling=is_pooling)
    reason = str(host._split_choice)
    host.close()
    return "pipeline parallelism or a pooling model" in reason
