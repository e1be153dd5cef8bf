"""The vLLM host with fake vLLM objects: token groups, rejected models, and the tables and weights after a switch."""

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
from worker_agent.adapters.vllm.dispatch import TokenGroup, dispatch_of, token_group
from worker_agent.adapters.vllm.host import VllmHost


def layer_of_023(**dispatch):
    """Return a layer as in release 0.23, which keeps the dispatch flags in three objects."""
    runner = layer(**dispatch)
    return SimpleNamespace(
        runner=SimpleNamespace(do_naive_dispatch_combine=runner.do_naive_dispatch_combine),
        quant_method=SimpleNamespace(is_monolithic=runner.is_monolithic),
        moe_config=runner.moe_config,
    )


BASIC = layer()
PARALLEL = layer(sequence_parallel=True)
NAIVE = layer(naive=True)


@pytest.mark.parametrize(
    ("runner", "data_parallel", "rank", "group"),
    [
        (BASIC, 1, 3, TokenGroup(0, 0)),  # only tensor parallel
        (BASIC, 2, 1, TokenGroup(0, 0)),  # 2 x 2: ranks 0 and 1 share tokens, and so do 2 and 3
        (BASIC, 2, 3, TokenGroup(2, 2)),
        (BASIC, 4, 3, TokenGroup(None, 3)),  # only data parallel
        (PARALLEL, 2, 3, TokenGroup(None, 3)),
        (NAIVE, 4, 3, TokenGroup(0, 0)),  # all tokens are gathered before routing
    ],
)
def test_token_groups_are_derived_from_the_dispatch(runner, data_parallel, rank, group):
    assert token_group([runner], config(data_parallel), rank, 4) == group


@pytest.mark.parametrize(
    ("layers", "parallel", "message"),
    [
        ([BASIC], config(prefill_context=2), "prefill context"),
        ([BASIC, NAIVE], config(2), "dispatch differently"),
        ([layer(monolithic=True)], config(), "monolithic kernel"),
        ([SimpleNamespace()], config(), "of the class SimpleNamespace.*Choose another MoE backend"),
    ],
)
def test_an_unknown_dispatch_is_rejected(layers, parallel, message):
    with pytest.raises(UnsupportedEngineError, match=f"{message}.*unset EPLB_AGENT_SERVICE"):
        token_group(layers, parallel, 0, 4)


@pytest.mark.parametrize("make_layer", [layer, layer_of_023])
@pytest.mark.parametrize("fact", [None, "naive", "sequence_parallel", "monolithic"])
def test_the_dispatch_flags_of_every_release_are_read(make_layer, fact):
    flags = {flag: flag == fact for flag in ("naive", "sequence_parallel", "monolithic")}
    assert dispatch_of(make_layer(**flags)) == tuple(flags.values())


def consistent(state, rank):
    """Return True if the tables, vLLM's map and the weights agree on the expert in each slot."""
    for index in range(LAYERS):
        phy2log_P = state.physical_to_logical_map[index]
        if not torch.equal(phy2log_P[state.logical_to_physical_map[index, :, 0]], torch.arange(EXPERTS)):
            return False
        expected = phy2log_P[rank * SLOTS : (rank + 1) * SLOTS].float() + 100 * index
        if not torch.equal(state.model.expert_weights[index][0], expected[:, None].repeat(1, 8)):
            return False
    return True


def switched_and_restored():
    rank = dist.get_rank()
    records = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: records.append(record.getMessage())
    engine_host.log.addHandler(handler)
    engine_host.log.setLevel(logging.INFO)
    os.environ["EPLB_AGENT_DEPLOYMNT"] = "decode"
    state, host = started()
    tensors = (state.physical_to_logical_map, state.logical_to_physical_map, state.model.expert_weights[0][0])
    addresses = [tensor.data_ptr() for tensor in tensors]
    first = state.physical_to_logical_map.clone()
    facts = {"counts": state.logical_replica_count.tolist(), "at first": consistent(state, rank)}
    reported = []
    step = host.agent.step
    host.agent.step = lambda *batch: (reported.append(batch), step(*batch))
    host.note_batch(scheduled([1, 6]))
    state.expert_load_pass[:, 3] = 5
    for _ in range(3):
        run_pass(state)
        host.step(is_dummy=False)
    reversed_placement = Placement(host.agent.installed.placement.phy2log_LRS[:, :, ::-1].copy(), EXPERTS)
    host.agent.restore(reversed_placement, "the test changes the placement")
    host.resume()
    facts["switched"] = not torch.equal(first, state.physical_to_logical_map) and consistent(state, rank)
    for warms_up in (False, True):
        host.set_warming_up(warms_up)
        run_pass(state)
        host.step(is_dummy=not warms_up)
    facts["reported"] = reported
    host.restore()
    facts["restored"] = torch.equal(first, state.physical_to_logical_map) and consistent(state, rank)
    facts["same tensors"] = addresses == [tensor.data_ptr() for tensor in tensors]
    # Expert 3 was chosen five times per pass. If ranks share tokens, only the first rank counts them. Dummy steps and
    # warm-up requests are not counted.
    facts["logged"] = records
    facts["heat"] = host._heat.sources_LWE[0, :5, 3].tolist()
    host.close()
    return facts


def test_vllm_tables_maps_and_weights_follow_a_switch():
    for rank, facts in enumerate(run_ranks(RANKS, switched_and_restored)):
        assert facts.pop("heat") == ([5, 5, 5, 0, 0] if rank == 0 else [0] * 5)
        mixed = (StepPhase.MIXED, 7 if rank == 0 else 0)
        assert facts.pop("reported") == [mixed] * 3 + [(StepPhase.DUMMY, 0)] * 2
        assert facts.pop("counts") == [[2, 2, 1, 1, 1, 1]] * LAYERS
        logged = "\n".join(facts.pop("logged"))
        assert logged.count("EPLB_AGENT_DEPLOYMNT is not a setting") == 1
        attached = (
            "balances 2 MoE layers of 6 experts over 2 ranks with 4 slots each; deployment default, "
            "service 127.0.0.1"
        )
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
def test_a_per_expert_value_that_would_not_move_is_rejected(home, name, shape, refused):
    state = model_state(0)
    holder = state.model.moe_layers[1]
    tensor = torch.zeros(shape)
    if name == "w2_input_scale":
        # The values differ per expert.
        tensor[1] = 0.5
    if name == "w13_weight":
        state.model.expert_weights[1].append(tensor)
    if home is not None:
        holder.routed_experts = torch.nn.Module()
        holder = holder.routed_experts
        holder.register_buffer(name, tensor)
    else:
        setattr(holder, name, tensor)
    # An accepted host goes on to connect to its peers, which fails here.
    outcome = pytest.raises(UnsupportedEngineError, match=name) if refused else pytest.raises(AttributeError)
    group = SimpleNamespace(rank_in_group=0, world_size=RANKS)
    with outcome:
        VllmHost(state, config(), group)


def router_state(real):
    """Return the router state of 0.25 and later: the number of leading rows that hold this rank's tokens."""
    return SimpleNamespace(num_unpadded_tokens_tensors=[torch.tensor(real, dtype=torch.int32)])


def gathered(release_counts_own, knows_router):
    """Return the heat of a pass with the naive dispatcher while rank 0 is idle, counted like vLLM's kernel does."""
    rank = dist.get_rank()
    state = model_state(rank, naive=True)
    tokens = torch.tensor(0 if rank == 0 else 5, dtype=torch.int32)
    if release_counts_own:
        state.num_unpadded_tokens_tensors = [tokens]
        for runner in state.model.moe_layers:
            runner.router.eplb_state = router_state(int(tokens)) if knows_router else None
    state, host = started(state=state)
    rows = 7  # tokens of both ranks and two rows of graph padding
    for runner in state.model.moe_layers:
        if release_counts_own and knows_router:
            rows = min(rows, int(runner.router.eplb_state.num_unpadded_tokens_tensors[0]))
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
def test_tokens_gathered_from_all_ranks_are_counted_once(release_counts_own, knows_router, counted):
    assert run_ranks(RANKS, gathered, release_counts_own, knows_router) == counted


def asleep():
    """Sleep after one layer has switched. The sleep discards all memory that the engine allocated while loading."""
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
    mixed_LRS = host.agent.installed.placement.phy2log_LRS.copy()
    mixed_LRS[0] = mixed_LRS[0, :, ::-1]
    host.agent.restore(Placement(mixed_LRS, EXPERTS), "the test changes the placement")
    host.resume()
    state.expert_load_pass[:, 3] = 5
    run_pass(state)
    host.step(is_dummy=False)
    rings = host._heat
    host.keep_other_tables([draft, state])
    host.drain("the engine is going to sleep")
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
    facts = {
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
        expected = first[index, rank * SLOTS : (rank + 1) * SLOTS].float() + 100 * index
        state.model.expert_weights[index][0].copy_(expected[:, None].repeat(1, 8))
    host.resume()
    facts["reloaded"] = torch.equal(first, state.physical_to_logical_map) and consistent(state, rank)
    for _ in range(300):  # enough passes for the agent's table check
        run_pass(state)
        host.step(is_dummy=False)
    facts["serves"] = host.agent.halted is None and host.agent.votes_lost is None
    host.close()
    return facts


def test_all_tables_are_restored_after_a_sleep_that_discards_memory():
    """vLLM's sleep level 2 also discards the pass counters and the tables of layers that were never switched."""
    for rank, facts in enumerate(run_ranks(RANKS, asleep)):
        assert set(facts.values()) == {True}, (rank, facts)


def spread_over_replicas():
    """Return the tokens per slot under tensor parallelism, before and after a switch."""
    state, host = started()
    tokens = [tokens_per_slot(state)]
    for _ in range(3):
        run_pass(state)
        host.step(is_dummy=False)
    swapped_LRS = np.array([[[0, 1, 2, 3], [0, 1, 4, 5]], [[5, 4, 3, 2], [5, 1, 0, 4]]], dtype=np.int32)
    host.agent.restore(Placement(swapped_LRS, EXPERTS), "the test changes the placement")
    tokens.append(tokens_per_slot(state))
    host.close()
    return tokens


def tokens_per_slot(state):
    """Return the tokens per slot in each layer for 120 tokens, 20 per expert."""
    rows_T1 = (torch.arange(120) // 20).unsqueeze(1)
    return [
        torch.bincount(runner.router._apply_eplb_mapping(rows_T1).reshape(-1), minlength=8).tolist()
        for runner in state.model.moe_layers
    ]


def test_ranks_that_share_tokens_use_all_replicas_evenly_and_identically():
    tokens, peer_tokens = run_ranks(RANKS, spread_over_replicas)
    assert tokens == peer_tokens
    first, swapped = tokens
    assert first == [[10, 10, 20, 20, 20, 20, 10, 10]] * LAYERS
    assert swapped == [[10, 10, 20, 20, 10, 10, 20, 20], [10, 10, 20, 20, 10, 20, 20, 10]]


def drawn_at_random():
    state = model_state(dist.get_rank())
    for runner in state.model.moe_layers:
        runner.router._apply_eplb_mapping = lambda ids, tables=runner.router.tables: tables[0][
            ids.long(), (torch.rand(ids.shape) * tables[1][ids.long()]).long()
        ]
    try:
        started(state=state)
    except UnsupportedEngineError as error:
        return str(error)


def test_a_router_that_picks_random_replicas_is_rejected_if_ranks_share_tokens():
    for message in run_ranks(RANKS, drawn_at_random):
        assert "picks different replicas for the same tokens" in message


def kernels_change():
    state, host = started()
    host.confirm_dispatch()
    for runner in state.model.moe_layers:
        runner.moe_config.is_sequence_parallel = True
    try:
        host.step(is_dummy=False)
    except UnsupportedEngineError as error:
        return str(error)
    finally:
        host.close()


def test_a_change_of_dispatch_after_loading_is_rejected():
    for message in run_ranks(RANKS, kernels_change):
        assert "changed after the model was loaded" in message
