"""The SGLang host on fake SGLang objects: its options, and the tables, maps and weights after a switch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from eplb_core.placement import Placement
from tests.adapters import sglang_fakes as fakes
from tests.adapters.sglang_fakes import PLAIN
from tests.agent import live
from tests.ranks import run_ranks
from worker_agent.adapters import engine_host
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.sglang.host import SglangHost
from worker_agent.adapters.sglang.options import SglangOptions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dispatch": "lp"}, "--ep-dispatch-algorithm lp"),
        ({"dispatch": "fake"}, "--ep-dispatch-algorithm fake"),
        ({"pipeline_parallel": 2}, "pipeline parallelism"),
        ({"expert_parallel": 4}, "--ep-size 4 with --tp-size 8"),
        ({"context_parallel": 2}, "context parallelism"),
        ({"replicas": 2}, "--dp-size 2"),
        ({"recorder": "stat_approx"}, "recorder-mode stat_approx"),
        ({"all_to_all": "mori"}, "--moe-a2a-backend mori"),
        ({"unsupported": (("--enable-pdmux", "Two passes run at once"),)}, "pdmux. Two passes run at once"),
    ],
)
def test_unsupported_options_are_rejected_by_name(changes, message):
    with pytest.raises(UnsupportedEngineError, match="unset EPLB_AGENT_SERVICE") as refusal:
        replace(PLAIN, **changes).check(allow_unverified=False)
    assert message in str(refusal.value)


def test_allowing_unverified_engines_accepts_only_untested_backends():
    for changes in ({}, {"dispatch": "static", "all_to_all": "deepep"}, {"all_to_all": "deepep"}):
        replace(PLAIN, **changes).check(allow_unverified=False)
    replace(PLAIN, all_to_all="mori").check(allow_unverified=True)
    with pytest.raises(UnsupportedEngineError):
        replace(PLAIN, all_to_all="mori", dispatch="lp").check(allow_unverified=True)


@pytest.mark.parametrize(
    ("dispatch", "slots", "entries"),
    [("static", 288, 1), ("dynamic", 288, 16), ("dynamic", 12, 8), ("dynamic", 3, 2)],
)
def test_tables_have_the_number_of_entries_that_sglang_has_room_for(dispatch, slots, entries):
    assert replace(PLAIN, dispatch=dispatch).entries(slots) == entries


MOE_LAYERS = range(fakes.DENSE_LAYERS, fakes.DENSE_LAYERS + fakes.MOE_LAYERS)


def options(dispatch):
    shares_tokens = dispatch == "dynamic"
    return SglangOptions(dispatch, "none" if shares_tokens else "deepep", shares_tokens, "stat", 2, 2, 1, 1)


def started(dispatch, columns=fakes.PHYSICAL):
    rank = dist.get_rank()
    engine_host.AgentSettings = live.settings
    runner = fakes.runner(rank)
    metadata = fakes.Metadata(rank, dispatch)
    recorder = fakes.Recorder(columns)
    host = SglangHost(runner, options(dispatch))
    host.start(metadata, recorder, rank, dist.group.WORLD)
    return runner, metadata, recorder, host


def consistent(runner, metadata, rank):
    """Return True if dispatch, all maps and the weights agree on the expert in each slot."""
    ids_TK = torch.arange(fakes.EXPERTS).repeat(20, 1)
    for layer_id in MOE_LAYERS:
        phy2log_P = metadata.physical_to_logical_map[layer_id]
        if not torch.equal(phy2log_P[metadata.to_physical(layer_id, ids_TK)], ids_TK):
            return False
        if not torch.equal(metadata.physical_to_logical_map_cpu[layer_id], phy2log_P):
            return False
        for expert, replicas_P in enumerate(metadata.logical_to_all_physical_map_cpu[layer_id].tolist()):
            holds = torch.nonzero(phy2log_P == expert).flatten().tolist()
            if [physical for physical in replicas_P if physical != -1] != holds:
                return False
        expected_S = phy2log_P[rank * fakes.SLOTS : (rank + 1) * fakes.SLOTS] + 100.0 * layer_id
        for weight in runner.model.routed_experts_weights_of_layer[layer_id]:
            if not torch.equal(weight, expected_S[:, None, None].expand_as(weight)):
                return False
    return True


def switched(dispatch):
    rank = dist.get_rank()
    runner, metadata, recorder, host = started(dispatch)
    addresses = [tensor.data_ptr() for tensor in metadata.tensors()]
    dense = [tensor[0].clone() for tensor in metadata.tensors()]
    first = metadata.physical_to_logical_map.clone()
    checks = {"at first": consistent(runner, metadata, rank)}
    for name in ("extend", "decode", "idle"):
        recorder.data.zero_()
        recorder.data[1, 3] = 5  # slot 3 of rank 0
        recorder.data[2, 7] = 4  # slot 3 of rank 1, which is expert 1
        host.count_pass()
        host.step(fakes.batch(name))
    recorder.recording = False
    host.count_pass()
    host.step(fakes.batch())
    reversed_placement = Placement(
        host.agent.installed.placement.phy2log_LRS[:, :, ::-1].copy(), fakes.EXPERTS
    )
    host.agent.restore(reversed_placement, "the test changes the placement")
    host.agent.resume()
    checks["moved"] = not torch.equal(first, metadata.physical_to_logical_map)
    checks["switched"] = consistent(runner, metadata, rank)
    checks["same tensors"] = addresses == [tensor.data_ptr() for tensor in metadata.tensors()]
    checks["dense rows"] = all(
        torch.equal(tensor[0], row) for tensor, row in zip(metadata.tensors(), dense, strict=True)
    )
    heat = host._heat
    checks["heat"] = (heat.sources_LWE if heat.slots_LWS is None else heat.slots_LWS)[:, :5].tolist()
    host.agent.close()
    return checks


@pytest.mark.parametrize("dispatch", ["dynamic", "static"])
def test_tables_maps_and_weights_follow_a_switch(dispatch):
    for rank, facts in enumerate(run_ranks(fakes.RANKS, switched, dispatch)):
        heat = torch.tensor(facts.pop("heat"))
        assert set(facts.values()) == {True}, (rank, facts)
        expected = torch.zeros_like(heat)
        if dispatch == "dynamic":  # all ranks see all tokens, so each counts the load of its slots
            expected[rank, :3, 3] = (5, 4)[rank]
        else:  # each counts its own tokens by expert
            expected[0, :3, 3] = 5
            expected[1, :3, 1] = 4
        assert torch.equal(heat, expected), rank


def count_own_slots():
    _, _, recorder, host = started("static", columns=fakes.SLOTS)
    recorder.data[2] = torch.tensor([1, 2, 3, 4])
    host.count_pass()
    host.step(fakes.batch())
    host.agent.close()
    assert host._heat.slots_LWS[:, 0].tolist() == [[0, 0, 0, 0], [1, 2, 3, 4]]
    assert host._heat.sources_LWE is None


def test_counts_that_cover_only_the_ranks_own_slots_are_used_unchanged():
    run_ranks(fakes.RANKS, count_own_slots)


def loaded():
    """Replace a weight tensor before the first pass, then load weights in place, then load them into a new tensor."""
    runner, _, _, host = started("dynamic")
    weight = runner.model.w2_2.data
    runner.model.w2_2.data = weight.clone()
    with pytest.raises(UnsupportedEngineError, match="other tensors"):
        host.step(fakes.batch())
    runner.model.w2_2.data = weight
    host.count_pass()
    host.step(fakes.batch())
    drained = []
    parameter = runner.model.w13_1
    for loaded_into in (parameter.data, parameter.data.clone()):
        with host.drained("the test loads weights"), host.drained("a load within"):
            parameter.data = loaded_into
        drained.append(host._drained)
    host.count_pass()
    host.step(fakes.batch())
    host.agent.close()
    return drained


def test_balancing_resumes_after_a_load_unless_experts_are_in_new_tensors():
    assert run_ranks(fakes.RANKS, loaded) == [[False, True]] * fakes.RANKS


def entries_that_differ(host):
    """Return the number of distinct dealing-table entries for each expert in each layer."""
    return [[len(set(row)) for row in table_ED] for table_ED in host.agent.installed.log2phy_LE.tolist()]


def resumed(dispatch):
    """Return the tables after a sleep in which they were lost."""
    rank = dist.get_rank()
    runner, metadata, _, host = started(dispatch)
    host.count_pass()
    host.step(fakes.batch())
    reversed_placement = Placement(
        host.agent.installed.placement.phy2log_LRS[:, :, ::-1].copy(), fakes.EXPERTS
    )
    host.agent.restore(reversed_placement, "the test changes the placement")
    host.agent.resume()
    dense = [tensor[0].clone() for tensor in metadata.tensors()]
    host.drain("the engine is releasing its memory")
    for tensor in (*metadata.tensors(), metadata.physical_to_logical_map_cpu, host._heat.passes):
        (tensor[fakes.DENSE_LAYERS :] if tensor.dim() else tensor).fill_(3)
    host.resume()
    checks = [consistent(runner, metadata, rank), int(host._heat.passes) == 1]
    checks.append(
        all(torch.equal(tensor[0], row) for tensor, row in zip(metadata.tensors(), dense, strict=True))
    )
    valid = metadata.logical_to_all_physical_map_num_valid[fakes.DENSE_LAYERS :]
    checks.append(dispatch == "static" or entries_that_differ(host) == valid.tolist())
    host.agent.close()
    return checks


@pytest.mark.parametrize("dispatch", ["dynamic", "static"])
def test_tables_are_restored_after_a_sleep(dispatch):
    assert run_ranks(fakes.RANKS, resumed, dispatch) == [[True] * 4] * fakes.RANKS


ROWS = torch.zeros(fakes.SLOTS + 1, 4)


class RoutesInside(torch.nn.Module):
    class topk_config:
        class output_format:
            name = "BYPASSED"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model, _: delattr(model, "routed_experts_weights_of_layer"), "locations and weights"),
        (lambda model, _: model.register_buffer("w13_lora_b", ROWS[:-1]), "per-expert .*w13_lora_b"),
        (lambda model, _: setattr(model, "topk", RoutesInside()), "topk leaves routing to a kernel"),
        (lambda _, recorder: delattr(recorder._single_pass_gatherers["primary"], "_data"), "heat counted by"),
        (lambda model, _: model.routed_experts_weights_of_layer[2].append(ROWS), "experts of layer 2"),
        (lambda model, _: model.routed_experts_weights_of_layer[1].append(ROWS[:-1, :3]), "contiguous slots"),
    ],
)
def test_a_model_that_cannot_be_balanced_is_rejected(change, message):
    runner = fakes.runner(0)
    metadata = fakes.Metadata(0, "dynamic")
    recorder = fakes.Recorder()
    change(runner.model, recorder)
    host = SglangHost(runner, options("dynamic"))
    with pytest.raises(UnsupportedEngineError, match=message):
        host.start(metadata, recorder, 0, None)


def test_methods_of_sglangs_own_manager_do_nothing_or_raise():
    host = SglangHost(fakes.runner(0), options("dynamic"))
    host.on_forward_pass_end()
    for call in (host.rebalance, host.reset_generator, host.enable_rebalance):
        with pytest.raises(RuntimeError, match="elastic"):
            call()
