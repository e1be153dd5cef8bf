"""The SGLang adapter on SGLang's tensors alone: tables, maps and weights follow a switch, on two ranks, in place."""

import pytest
import torch
import torch.distributed as dist

from eplb_service.placement import Placement
from tests.adapters import sglang_fakes as fakes
from tests.agent import live
from tests.ranks import run_ranks
from worker_agent.adapters.errors import UnsupportedEngineError
from worker_agent.adapters.sglang import balancer as sglang_balancer
from worker_agent.adapters.sglang.options import SglangOptions

MOE_LAYERS = range(fakes.DENSE_LAYERS, fakes.DENSE_LAYERS + fakes.MOE_LAYERS)


def options(dispatch):
    shares_tokens = dispatch == "dynamic"
    return SglangOptions(dispatch, "none" if shares_tokens else "deepep", shares_tokens, "stat", 2, 2, 1, 1)


def started(dispatch, columns=fakes.PHYSICAL):
    rank = dist.get_rank()
    sglang_balancer.AgentSettings = live.settings
    runner, metadata, recorder = fakes.runner(rank), fakes.Metadata(rank, dispatch), fakes.Recorder(columns)
    balancer = sglang_balancer.SglangBalancer(runner, options(dispatch))
    balancer.start(metadata, recorder, rank, dist.group.WORLD)
    return runner, metadata, recorder, balancer


def consistent(runner, metadata, rank):
    """Whether choices are sent to slots that hold the expert, every map says so, and weights are that expert's."""
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
        mine_S = phy2log_P[rank * fakes.SLOTS : (rank + 1) * fakes.SLOTS] + 100.0 * layer_id
        for weight in runner.model.routed_experts_weights_of_layer[layer_id]:
            if not torch.equal(weight, mine_S[:, None, None].expand_as(weight)):
                return False
    return True


def switched(dispatch):
    rank = dist.get_rank()
    runner, metadata, recorder, balancer = started(dispatch)
    addresses = [tensor.data_ptr() for tensor in metadata.tensors()]
    dense = [tensor[0].clone() for tensor in metadata.tensors()]
    first = metadata.physical_to_logical_map.clone()
    found = {"at first": consistent(runner, metadata, rank)}
    for name in ("extend", "decode", "idle"):
        recorder.data.zero_()
        recorder.data[1, 3] = 5  # slot 3 of rank 0
        recorder.data[2, 7] = 4  # slot 3 of rank 1, which is expert 1
        balancer.step(fakes.batch(name))
    recorder.recording = False
    balancer.step(fakes.batch())
    other = Placement(balancer.agent.installed.placement.phy2log_LRS[:, :, ::-1].copy(), fakes.EXPERTS)
    balancer.agent.restore(other, "the test wants it so")
    balancer.agent.resume()
    found["moved"] = not torch.equal(first, metadata.physical_to_logical_map)
    found["switched"] = consistent(runner, metadata, rank)
    found["same tensors"] = addresses == [tensor.data_ptr() for tensor in metadata.tensors()]
    found["dense rows"] = all(
        torch.equal(tensor[0], row) for tensor, row in zip(metadata.tensors(), dense, strict=True)
    )
    heat = balancer._heat
    found["heat"] = (heat.sources_LWE if heat.slots_LWS is None else heat.slots_LWS)[:, :5].tolist()
    balancer.agent.close()
    return found


@pytest.mark.parametrize("dispatch", ["dynamic", "static"])
def test_tables_maps_and_weights_follow_a_switch(dispatch):
    for rank, facts in enumerate(run_ranks(fakes.RANKS, switched, dispatch)):
        heat = torch.tensor(facts.pop("heat"))
        assert set(facts.values()) == {True}, (rank, facts)
        expected = torch.zeros_like(heat)
        if dispatch == "dynamic":  # all ranks see all tokens: each counts what its own slots get
            expected[rank, :3, 3] = (5, 4)[rank]
        else:  # each counts its own tokens, by expert
            expected[0, :3, 3] = 5
            expected[1, :3, 1] = 4
        assert torch.equal(heat, expected), rank


def low_latency():
    _, _, recorder, balancer = started("static", columns=fakes.SLOTS)
    recorder.data[2] = torch.tensor([1, 2, 3, 4])
    balancer.step(fakes.batch())
    balancer.agent.close()
    return balancer._heat.slots_LWS[:, 0].tolist(), balancer._heat.sources_LWE


def test_counts_of_this_rank_s_slots_are_taken_as_they_are():
    for slots_LS, sources in run_ranks(fakes.RANKS, low_latency):
        assert slots_LS == [[0, 0, 0, 0], [1, 2, 3, 4]]
        assert sources is None


def loaded():
    """Weights that are loaded in place, then into another tensor."""
    runner, _, _, balancer = started("dynamic")
    balancer.step(fakes.batch())
    found = []
    for change in (
        lambda: None,
        lambda: setattr(runner.model.w13_1, "data", runner.model.w13_1.data.clone()),
    ):
        with balancer.paused("the test loads weights"), balancer.paused("a load within"):
            change()
        found.append(balancer._paused)
    balancer.step(fakes.batch())
    balancer.agent.close()
    return found


def test_balancing_goes_on_after_a_load_unless_experts_are_in_other_tensors():
    assert run_ranks(fakes.RANKS, loaded) == [[False, True]] * fakes.RANKS


def moved_before_the_first_pass():
    runner, _, _, balancer = started("dynamic")
    runner.model.w2_2.data = runner.model.w2_2.data.clone()
    try:
        balancer.step(fakes.batch())
    except UnsupportedEngineError as error:
        return str(error)
    finally:
        balancer.agent.close()
    return ""


def test_experts_that_a_kernel_has_put_elsewhere_are_refused():
    assert all("other tensors" in said for said in run_ranks(fakes.RANKS, moved_before_the_first_pass))


class RoutesInside(torch.nn.Module):
    class topk_config:
        class output_format:
            name = "BYPASSED"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model, _: delattr(model, "routed_experts_weights_of_layer"), "places and weights"),
        (lambda model, _: setattr(model, "topk", RoutesInside()), "topk leaves routing to a kernel"),
        (lambda _, recorder: delattr(recorder._single_pass_gatherers["primary"], "_data"), "heat counted by"),
        (
            lambda model, _: model.routed_experts_weights_of_layer[2].append(torch.zeros(fakes.SLOTS + 1, 2)),
            "experts of layer 2",
        ),
        (
            lambda model, _: model.routed_experts_weights_of_layer[1].append(
                torch.zeros(fakes.SLOTS, 4, 4)[:, :3]
            ),
            "without gaps",
        ),
    ],
)
def test_a_model_that_cannot_be_balanced_is_refused(change, said):
    runner, metadata, recorder = fakes.runner(0), fakes.Metadata(0, "dynamic"), fakes.Recorder()
    change(runner.model, recorder)
    balancer = sglang_balancer.SglangBalancer(runner, options("dynamic"))
    with pytest.raises(UnsupportedEngineError, match=said):
        balancer.start(metadata, recorder, 0, None)


def test_sglang_s_own_balancer_is_never_run():
    balancer = sglang_balancer.SglangBalancer(fakes.runner(0), options("dynamic"))
    balancer.on_forward_pass_end()
    for call in (balancer.rebalance, balancer.reset_generator, balancer.enable_rebalance):
        with pytest.raises(RuntimeError, match="elastic"):
            call()
