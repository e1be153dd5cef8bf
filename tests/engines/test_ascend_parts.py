"""Tests of the parts of the vLLM-Ascend adapter that need no engine: heat under all policies, sources, hooks."""

import types

import pytest
import torch

from eplb_core.wire.heat import StepPhase
from tests.engines.ascend_layers import EXPERTS, SLOTS, HostLayer, dispatch
from worker_agent.adapters.batch import TokenShare
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.engine_host import wrap_execute_model
from worker_agent.adapters.vllm_ascend import hooks
from worker_agent.adapters.vllm_ascend.host import (
    AscendHost,
    LayerFinder,
    _HostHeat,
    _placement,
    slots_of_maps,
)


@pytest.mark.parametrize("policy", [0, 1, 2, 3])
def test_each_pass_has_its_own_row_under_every_heat_policy(policy):
    layers = [HostLayer(policy), HostLayer(policy)]
    addresses = [layer.moe_load.data_ptr() for layer in layers]
    heat = _HostHeat(layers, EXPERTS, rows=4)
    for step in range(7):
        for index, layer in enumerate(layers):
            layer.receive([step, index, 1, 0])
            heat.count_choices(dispatch(layer, [[step % EXPERTS] * 2]), gathers=False)
        heat.record(counts=step != 5, own_tokens=step != 6)
    assert int(heat.rings.passes) == 7
    # Steps 4, 5 and 6 are in rows 0 to 2, and step 3 is in row 3.
    for index in range(2):
        assert heat.rings.slots_LWS[index].tolist() == [
            [4, index, 1, 0],
            [0] * SLOTS,
            [6, index, 1, 0],
            [3, index, 1, 0],
        ]
        assert heat.rings.sources_LWE[index].sum(dim=1).tolist() == [2, 0, 0, 2]
    assert addresses == [layer.moe_load.data_ptr() for layer in layers]


def test_choices_are_counted_per_layer_and_padding_is_ignored():
    layers = [HostLayer(1), HostLayer(1)]
    heat = _HostHeat(layers, EXPERTS, redundant=True)
    heat.count_choices(dispatch(layers[1], [[0, 1], [1, 5]], torch.tensor([True, False])), gathers=False)
    heat.count_choices(dispatch(layers[1], [[0, 2]]), gathers=False)
    heat.count_choices(dispatch(HostLayer(1), [[3, 3]]), gathers=False)  # A draft model's layer.
    assert heat.chosen_LE.tolist() == [[0] * EXPERTS, [2, 1, 1, 0, 0, 0]]


def test_choices_that_are_already_physical_are_counted_by_logical_expert():
    layers = [HostLayer(1), HostLayer(1)]
    layers[0].log2phy.copy_(torch.tensor([7, 1, 2, 3, 4, 5]))
    layers[1].log2phy.copy_(torch.tensor([0, 6, 2, 3, 4, 5]))
    heat = _HostHeat(layers, EXPERTS, redundant=True, physical=8)
    for layer in layers:
        ids = [[0, 1], [1, 5]]
        heat.count_choices(
            dispatch(layer, layer.log2phy[torch.tensor(ids)].tolist(), physical=True), gathers=False
        )
    assert heat.chosen_LE.tolist() == [[1, 2, 0, 0, 0, 1]] * 2


@pytest.mark.parametrize(("first", "counted"), [(True, 2), (False, 0)])
def test_only_the_first_rank_counts_tokens_that_all_ranks_share(first, counted):
    layer = HostLayer(1)
    heat = _HostHeat([layer], EXPERTS, first_rank=first, shares_tokens=True)
    heat.count_choices(dispatch(layer, [[0, 1]]), gathers=True)
    assert int(heat.chosen_LE.sum()) == counted


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"shares_tokens": True, "redundant": True}, "all-gather dispatch with redundant experts"),
        ({"shares_tokens": False, "redundant": False}, "all-gather dispatch on a device"),
    ],
)
def test_an_all_gather_dispatch_that_would_give_wrong_outputs_is_refused(facts, reason):
    layer = HostLayer(1)
    heat = _HostHeat([layer], EXPERTS, **facts)
    with pytest.raises(UnsupportedEngineError, match=reason):
        heat.count_choices(dispatch(layer, [[0, 1]]), gathers=True)


def test_slots_are_read_from_the_maps_of_all_ranks():
    maps = torch.tensor([[0, 1, -1, 2], [2, -1, 0, 1]]).numpy()
    assert slots_of_maps(maps[None]).tolist() == [[[0, 1, 3], [2, 3, 0]]]


def test_a_slot_whose_expert_no_map_names_is_refused():
    layer = HostLayer(1)
    layer.global_expert_map = torch.tensor([[0, 2, -1], [-1, 1, 0]])
    with pytest.raises(UnsupportedEngineError, match="an expert in two slots of one rank"):
        _placement([layer])


def test_layers_that_the_host_does_not_balance_are_ignored():
    model = torch.nn.Module()
    balanced = HostLayer(1)
    dense = torch.nn.Linear(1, 1)
    static = HostLayer(1)
    static.dynamic_eplb = False
    model.layers = torch.nn.ModuleList([balanced, static, dense])
    assert LayerFinder(model).layers == [balanced]


def test_the_hosts_balancer_is_replaced_completely_or_not_at_all():
    parts = dict.fromkeys(("Manager", "EplbProcess", "EplbUpdator", "VllmEplbAdaptor"), object)
    whole = types.SimpleNamespace(**parts)
    hooks._replace_balancer(whole)
    assert whole.EplbUpdator is AscendHost
    shared = whole.Manager().dict({"moe_load": None})
    process = whole.EplbProcess(shared_dict=shared, policy_type=1, enable_d2d=True)
    assert process._launch_process().shared_dict is shared
    del parts["VllmEplbAdaptor"]
    moved = types.SimpleNamespace(**parts)
    with pytest.raises(AttributeError, match="VllmEplbAdaptor"):
        hooks._replace_balancer(moved)
    assert moved.EplbUpdator is object


def test_weight_updates_are_refused_while_experts_are_balanced(monkeypatch):
    class Worker:
        def update_weights(self, info):
            return info

    hooks._refuse_other_weights(Worker, "update_weights")
    assert Worker().update_weights("new") == "new"
    monkeypatch.setattr(AscendHost, "of_this_process", object())
    with pytest.raises(RuntimeError, match="update_weights: vLLM-Ascend loads weights into new tensors"):
        Worker().update_weights("new")
    with pytest.raises(AttributeError, match="start_weight_update"):
        hooks._refuse_other_weights(Worker, "start_weight_update")


def test_the_host_reports_phase_and_tokens_for_each_batch_but_not_for_dummy_runs():
    class Runner:
        def __init__(self, updator):
            self.eplb_updator = updator

        def execute_model(self, scheduler_output, intermediate_tensors=None):
            return (
                self.eplb_updator.forward_end() if isinstance(self.eplb_updator, AscendHost) else "unchanged"
            )

        def _dummy_run(self, tokens):
            self.eplb_updator.forward_end()

    hooks._mark_dummy_runs(Runner)
    Runner.execute_model = wrap_execute_model(Runner.execute_model, hooks._balancer_of)
    reported = []
    host = AscendHost.__new__(AscendHost)
    host.heat = _HostHeat([HostLayer(1)], EXPERTS)
    host._share = TokenShare(1, 2, divided=True)
    host._agent = types.SimpleNamespace(step=lambda *step: reported.append(step))
    runner = Runner(host)
    for counts in ({"a": 1, "b": 1}, {"a": 1, "b": 32}, {"c": 8}):
        drafts = {"scheduled_spec_decode_tokens": {}, "total_num_scheduled_tokens": sum(counts.values())}
        runner.execute_model(types.SimpleNamespace(num_scheduled_tokens=counts, **drafts))
    runner._dummy_run(64)
    assert reported == [
        (StepPhase.DECODE, 1),
        (StepPhase.MIXED, 16),
        (StepPhase.PREFILL, 4),
        (StepPhase.DUMMY, 0),
    ]
    assert Runner("static placement").execute_model("schedule") == "unchanged"
