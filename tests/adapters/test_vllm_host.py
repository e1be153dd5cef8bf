"""The vLLM adapter's host on vLLM's objects alone: what it derives and refuses, and what follows a switch."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb_core.heat.phase import StepPhase
from eplb_core.placement import Placement
from tests.adapters.vllm_fakes import (
    EXPERTS,
    LAYERS,
    RANKS,
    SLOTS,
    config,
    layer,
    model_state,
    run_pass,
    scheduled,
    started,
)
from tests.ranks import run_ranks
from worker_agent.adapters import engine_host
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.vllm.host import VllmHost, _dispatch_of, _TokenGroup, token_group


def layer_of_023(**dispatch):
    """Release 0.23 keeps what later runners know in three objects."""
    known = layer(**dispatch)
    return SimpleNamespace(
        runner=SimpleNamespace(do_naive_dispatch_combine=known.do_naive_dispatch_combine),
        quant_method=SimpleNamespace(is_monolithic=known.is_monolithic),
        moe_config=known.moe_config,
    )


ALONE, PARALLEL, NAIVE = layer(), layer(sequence_parallel=True), layer(naive=True)


@pytest.mark.parametrize(
    ("one", "data_parallel", "rank", "group"),
    [
        (ALONE, 1, 3, _TokenGroup(0, 0)),  # tensor parallel alone
        (ALONE, 2, 1, _TokenGroup(0, 0)),  # 2 x 2: ranks 0, 1 and 2, 3 share
        (ALONE, 2, 3, _TokenGroup(2, 2)),
        (ALONE, 4, 3, _TokenGroup(None, 3)),  # data parallel alone
        (PARALLEL, 2, 3, _TokenGroup(None, 3)),
        (NAIVE, 4, 3, _TokenGroup(0, 0)),  # all tokens are gathered before routing
    ],
)
def test_ranks_that_share_tokens_are_found(one, data_parallel, rank, group):
    assert token_group([one], config(data_parallel), rank, 4) == group


@pytest.mark.parametrize(
    ("layers", "parallel", "said"),
    [
        ([ALONE], config(prefill_context=2), "prefill context"),
        ([ALONE, NAIVE], config(2), "dispatch differently"),
        ([layer(monolithic=True)], config(), "monolithic kernel"),
        ([SimpleNamespace()], config(), "of the class SimpleNamespace.*Choose another MoE backend"),
    ],
)
def test_what_cannot_be_derived_is_refused(layers, parallel, said):
    with pytest.raises(UnsupportedEngineError, match=f"{said}.*unset EPLB_AGENT_SERVICE"):
        token_group(layers, parallel, 0, 4)


@pytest.mark.parametrize("make", [layer, layer_of_023])
@pytest.mark.parametrize("fact", [None, "naive", "sequence_parallel", "monolithic"])
def test_a_layer_s_way_of_dispatching_is_read_wherever_its_release_keeps_it(make, fact):
    flags = {one: one == fact for one in ("naive", "sequence_parallel", "monolithic")}
    assert _dispatch_of(make(**flags)) == tuple(flags.values())


def consistent(state, rank):
    """Whether tables lead to slots that hold the expert, by vLLM's own map, and weights are that expert's."""
    for index in range(LAYERS):
        phy2log_P = state.physical_to_logical_map[index]
        if not torch.equal(phy2log_P[state.logical_to_physical_map[index, :, 0]], torch.arange(EXPERTS)):
            return False
        mine = phy2log_P[rank * SLOTS : (rank + 1) * SLOTS].float() + 100 * index
        if not torch.equal(state.model.expert_weights[index][0], mine[:, None].repeat(1, 8)):
            return False
    return True


def switched_and_restored():
    rank, records = dist.get_rank(), []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: records.append(record.getMessage())
    engine_host.log.addHandler(handler)
    engine_host.log.setLevel(logging.INFO)
    os.environ["EPLB_AGENT_DEPLOYMNT"] = "decode"
    state, host = started()
    tensors = (state.physical_to_logical_map, state.logical_to_physical_map, state.model.expert_weights[0][0])
    addresses = [tensor.data_ptr() for tensor in tensors]
    first = state.physical_to_logical_map.clone()
    found = {"counts": state.logical_replica_count.tolist(), "at first": consistent(state, rank)}
    reported = []
    step = host.agent.step
    host.agent.step = lambda *of_pass: (reported.append(of_pass), step(*of_pass))
    host.note_batch(scheduled([1, 6]))
    state.expert_load_pass[:, 3] = 5
    for _ in range(3):
        run_pass(state)
        host.step(is_dummy=False)
    other = Placement(host.agent.installed.placement.phy2log_LRS[:, :, ::-1].copy(), EXPERTS)
    host.agent.restore(other, "the test wants it so")
    host.resume()
    found["switched"] = not torch.equal(first, state.physical_to_logical_map) and consistent(state, rank)
    for warms_up in (False, True):
        host.set_warming_up(warms_up)
        run_pass(state)
        host.step(is_dummy=not warms_up)
    found["reported"] = reported
    host.restore()
    found["restored"] = torch.equal(first, state.physical_to_logical_map) and consistent(state, rank)
    found["same tensors"] = addresses == [tensor.data_ptr() for tensor in tensors]
    # Expert 3 was chosen five times a pass. If ranks share tokens, only the first counts them. Dummy steps
    # and warm-up requests do not count.
    found["logged"] = records
    found["heat"] = host._heat.sources_LWE[0, :5, 3].tolist()
    host.close()
    return found


def test_vllm_s_tables_maps_and_weights_follow_a_switch():
    for rank, facts in enumerate(run_ranks(RANKS, switched_and_restored)):
        assert facts.pop("heat") == ([5, 5, 5, 0, 0] if rank == 0 else [0] * 5)
        mixed = (StepPhase.MIXED, 7 if rank == 0 else 0)
        assert facts.pop("reported") == [mixed] * 3 + [(StepPhase.DUMMY, 0)] * 2
        assert facts.pop("counts") == [[2, 2, 1, 1, 1, 1]] * LAYERS
        logged = "\n".join(facts.pop("logged"))
        assert logged.count("EPLB_AGENT_DEPLOYMNT is not a setting") == 1
        attached = "balances 2 MoE layers of 6 experts over 2 ranks of 4 slots; deployment default, service 127.0.0.1"
        assert (attached in logged) is (rank == 0)
        assert logged.count("first switch: layer") == (rank == 0)
        assert set(facts.values()) == {True}, (rank, facts)


@pytest.mark.parametrize("home", ["routed_experts", None], ids=["0.32", "0.23"])
@pytest.mark.parametrize(
    ("name", "shape", "refused"),
    [
        ("w13_lora_a_stacked", (SLOTS, 2), True),
        ("g1_alphas", (SLOTS,), True),
        ("w13_weight", (SLOTS, 8), False),
        ("w13_input_scale", (SLOTS,), False),
        ("w2_input_scale", (SLOTS,), True),
        ("workspace", (SLOTS + 1,), False),
        ("factor", (), False),
    ],
)
def test_what_would_stay_behind_when_its_expert_moves_is_refused(home, name, shape, refused):
    state = model_state(0)
    one, tensor = state.model.moe_layers[1], torch.zeros(shape)
    if name == "w2_input_scale":
        # One per expert, and not one for all.
        tensor[1] = 0.5
    if name == "w13_weight":
        state.model.expert_weights[1].append(tensor)
    if home is not None:
        one.routed_experts = torch.nn.Module()
        one = one.routed_experts
        one.register_buffer(name, tensor)
    else:
        setattr(one, name, tensor)
    # The ranks would meet next, which one alone cannot.
    said = pytest.raises(UnsupportedEngineError, match=name) if refused else pytest.raises(AttributeError)
    group = SimpleNamespace(rank_in_group=0, world_size=RANKS)
    with said:
        VllmHost(state, config(), group)


def router_state(real):
    """What 0.25 and later give a router: how many of its first rows are real tokens of this rank."""
    return SimpleNamespace(num_unpadded_tokens_tensors=[torch.tensor(real, dtype=torch.int32)])


def gathered(release_counts_own, knows_router):
    """Heat of a pass in which rank 0 is idle, as vLLM's kernel counts the rows that the naive dispatcher gathered."""
    rank = dist.get_rank()
    state = model_state(rank, naive=True)
    own = torch.tensor(0 if rank == 0 else 5, dtype=torch.int32)
    if release_counts_own:
        state.num_unpadded_tokens_tensors = [own]
        for one in state.model.moe_layers:
            one.router.eplb_state = router_state(int(own)) if knows_router else None
    state, host = started(state=state)
    rows = 7  # of both ranks, two of which fill up the graph
    for one in state.model.moe_layers:
        if release_counts_own and knows_router:
            rows = min(rows, int(one.router.eplb_state.num_unpadded_tokens_tensors[0]))
    state.expert_load_pass[:, 3] = rows
    run_pass(state)
    host.step(is_dummy=rank == 0)
    host.close()
    return host._heat.sources_LWE[0, 0, 3].item()


@pytest.mark.parametrize(
    ("release_counts_own", "knows_router", "counted"),
    [(False, False, [7, 0]), (True, True, [7, 0]), (True, False, [0, 0])],
    ids=["0.23", "0.33", "a router without state"],
)
def test_tokens_gathered_from_all_ranks_count_once(release_counts_own, knows_router, counted):
    assert run_ranks(RANKS, gathered, release_counts_own, knows_router) == counted


def asleep():
    """A rank that sleeps after a switch of one layer, while everything that its engine made while loading is lost."""
    rank = dist.get_rank()
    state, host = started()
    draft = SimpleNamespace(
        physical_to_logical_map=torch.arange(3),
        logical_to_physical_map=torch.arange(3) + 5,
        logical_replica_count=torch.ones(3),
    )
    first = state.physical_to_logical_map.clone()
    for _ in range(3):
        run_pass(state)
        host.step(is_dummy=False)
    other = host.agent.installed.placement.phy2log_LRS.copy()
    other[0] = other[0, :, ::-1]
    host.agent.restore(Placement(other, EXPERTS), "the test wants it so")
    host.resume()
    state.expert_load_pass[:, 3] = 5
    run_pass(state)
    host.step(is_dummy=False)
    rings = host._heat
    host.keep_other_tables([draft, state])
    host.drain("the engine sleeps")
    lost = [
        *(state.physical_to_logical_map, state.logical_to_physical_map, state.logical_replica_count),
        *(rings.passes, rings._pass_number, rings._row, *rings._rings_WLX),
        *(layer.expert_map for layer in host._layers),
        *(draft.physical_to_logical_map, draft.logical_to_physical_map, draft.logical_replica_count),
        *(weight for of_layer in state.model.expert_weights for weight in of_layer),
    ]
    for tensor in lost:
        tensor.fill_(77)
    host.resume()
    found = {
        "passes": int(rings.passes) == 4,
        "rings": not rings.sources_LWE.any(),
        "draft": draft.logical_to_physical_map.tolist() == [5, 6, 7]
        and bool(draft.logical_replica_count.all()),
        "moved": not torch.equal(first, state.physical_to_logical_map),
        "counts": [sorted(row) for row in state.logical_replica_count.tolist()]
        == [[1, 1, 1, 1, 2, 2]] * LAYERS,
        "maps": all(
            torch.equal(
                layer.expert_map, torch.from_numpy(host.agent.installed.placement.expert_map(rank)[index])
            )
            for index, layer in enumerate(host._layers)
        ),
    }
    host.restore()
    for index in range(LAYERS):
        mine = first[index, rank * SLOTS : (rank + 1) * SLOTS].float() + 100 * index
        state.model.expert_weights[index][0].copy_(mine[:, None].repeat(1, 8))
    host.resume()
    found["reloaded"] = torch.equal(first, state.physical_to_logical_map) and consistent(state, rank)
    for _ in range(300):  # the agent compares its tables with the device's now and then
        run_pass(state)
        host.step(is_dummy=False)
    found["serves"] = host.agent.halted is None and host.agent.unheard is None
    host.close()
    return found


def test_a_sleep_in_which_memory_is_discarded_leaves_no_table_wrong():
    """vLLM's sleep level 2: layers that were never switched, and counters, are lost as well."""
    for rank, facts in enumerate(run_ranks(RANKS, asleep)):
        assert set(facts.values()) == {True}, (rank, facts)


def spread_over_replicas():
    """Return the tokens per slot under tensor parallelism, before and after a switch."""
    state, host = started()
    found = [reached(state)]
    for _ in range(3):
        run_pass(state)
        host.step(is_dummy=False)
    turned = np.array([[[0, 1, 2, 3], [0, 1, 4, 5]], [[5, 4, 3, 2], [5, 1, 0, 4]]], dtype=np.int32)
    host.agent.restore(Placement(turned, EXPERTS), "the test wants it so")
    found.append(reached(state))
    host.close()
    return found


def reached(state):
    """Return the tokens per slot of each layer for 120 tokens, 20 per expert."""
    rows_T1 = (torch.arange(120) // 20).unsqueeze(1)
    return [
        torch.bincount(one.router._apply_eplb_mapping(rows_T1).reshape(-1), minlength=8).tolist()
        for one in state.model.moe_layers
    ]


def test_ranks_that_share_tokens_use_every_replica_evenly_and_alike():
    one, other = run_ranks(RANKS, spread_over_replicas)
    assert one == other
    first, turned = one
    assert first == [[10, 10, 20, 20, 20, 20, 10, 10]] * LAYERS
    assert turned == [[10, 10, 20, 20, 10, 10, 20, 20], [10, 10, 20, 20, 10, 20, 20, 10]]


def drawn_at_random():
    state = model_state(dist.get_rank())
    for one in state.model.moe_layers:
        one.router._apply_eplb_mapping = lambda ids, tables=one.router.tables: tables[0][
            ids.long(), (torch.rand(ids.shape) * tables[1][ids.long()]).long()
        ]
    try:
        started(state=state)
    except UnsupportedEngineError as error:
        return str(error)


def test_a_router_that_draws_replicas_at_random_is_refused_where_ranks_share_tokens():
    for said in run_ranks(RANKS, drawn_at_random):
        assert "picks different replicas for the same tokens" in said


def kernels_change():
    state, host = started()
    host.confirm_dispatch()
    for one in state.model.moe_layers:
        one.moe_config.is_sequence_parallel = True
    try:
        host.step(is_dummy=False)
    except UnsupportedEngineError as error:
        return str(error)
    finally:
        host.close()


def test_kernels_that_dispatch_otherwise_than_at_the_start_are_refused():
    for said in run_ranks(RANKS, kernels_change):
        assert "changed after the model was loaded" in said
