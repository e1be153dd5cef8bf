"""The parts of the vLLM-Ascend adapter that need no engine: heat of all policies, sources, weights, what is refused."""

import sys
import types

import pytest
import torch

from worker_agent.adapters.errors import UnsupportedEngineError
from worker_agent.adapters.vllm_ascend import hooks, plugin, weights
from worker_agent.adapters.vllm_ascend.balancer import AscendBalancer, LayerFinder, _slots
from worker_agent.adapters.vllm_ascend.layer import AscendLayer, HeatRings
from worker_agent.adapters.vllm_ascend.refusals import refuse_lists_that_the_host_misreads
from worker_agent.adapters.vllm_ascend.sources import SourceCounter
from worker_agent.adapters.vllm_ascend.weights import check_same_formats, expert_weights, npu_format

EXPERTS, SLOTS = 6, 4


class HostLayer(torch.nn.Module):
    """The counters of a real layer, and how it adds to them."""

    def __init__(self, policy):
        super().__init__()
        self.local_num_experts, self.dynamic_eplb = SLOTS, True
        self.log2phy = torch.arange(EXPERTS, dtype=torch.int32)
        if policy == 3:
            self.moe_load = torch.zeros(5, SLOTS, dtype=torch.int32)
            self.load_counter = torch.tensor(0, dtype=torch.int32)
        else:
            self.moe_load = torch.zeros(SLOTS, dtype=torch.int64)

    def receive(self, counts):
        if self.moe_load.dim() == 1:
            self.moe_load.add_(torch.tensor(counts))
            return
        row = torch.remainder(self.load_counter, len(self.moe_load)).reshape(1)
        self.moe_load.index_add_(0, row, torch.tensor([counts], dtype=torch.int32))
        self.load_counter.add_(1)

    def clear_moe_load(self):
        self.moe_load.zero_()


@pytest.mark.parametrize("policy", [0, 1, 2, 3])
def test_each_pass_has_its_own_row_under_every_heat_policy(policy):
    layers = [HostLayer(policy), HostLayer(policy)]
    addresses = [layer.moe_load.data_ptr() for layer in layers]
    heat = HeatRings(layers, EXPERTS, rows=4)
    for step in range(7):
        for index, layer in enumerate(layers):
            layer.receive([step, index, 1, 0])
            heat.chosen_LE[index, step % EXPERTS] += 2
        heat.record(counts=step != 5, own_tokens=step != 6)
    assert int(heat.counter) == 7
    # Steps 4, 5 and 6 are in rows 0 to 2, step 3 in row 3.
    for index in range(2):
        assert heat.slots_LWS[index].tolist() == [
            [4, index, 1, 0],
            [0] * SLOTS,
            [6, index, 1, 0],
            [3, index, 1, 0],
        ]
        assert heat.sources_LWE[index].sum(dim=1).tolist() == [2, 0, 0, 2]
    assert addresses == [layer.moe_load.data_ptr() for layer in layers]


def dispatch(layer, ids, mask=None):
    routing = types.SimpleNamespace(log2phy=layer.log2phy, mc2_mask=mask)
    return types.SimpleNamespace(topk_ids=torch.tensor(ids), routing=routing)


def counter(layers, chosen_LE, **facts):
    known = {"first_rank": True, "shares_tokens": False, "redundant": True} | facts
    return SourceCounter(layers, chosen_LE, **known)


def test_choices_are_counted_in_their_layer_without_padding():
    layers, chosen_LE = [HostLayer(1), HostLayer(1)], torch.zeros(2, EXPERTS, dtype=torch.int32)
    sources = counter(layers, chosen_LE)
    sources.count(dispatch(layers[1], [[0, 1], [1, 5]], torch.tensor([True, False])), gathers=False)
    sources.count(dispatch(layers[1], [[0, 2]]), gathers=False)
    sources.count(dispatch(HostLayer(1), [[3, 3]]), gathers=False)  # a draft model's layer
    assert chosen_LE.tolist() == [[0] * EXPERTS, [2, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize(("first", "counted"), [(True, 2), (False, 0)])
def test_one_rank_counts_tokens_that_all_ranks_see(first, counted):
    layer, chosen_LE = HostLayer(1), torch.zeros(1, EXPERTS, dtype=torch.int32)
    sources = counter([layer], chosen_LE, first_rank=first, shares_tokens=True, redundant=False)
    sources.count(dispatch(layer, [[0, 1]]), gathers=True)
    assert int(chosen_LE.sum()) == counted


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"shares_tokens": True, "redundant": True}, "all-gather dispatch with redundant experts"),
        ({"shares_tokens": False, "redundant": False}, "all-gather dispatch on a device"),
    ],
)
def test_all_gather_that_would_answer_wrongly_is_refused(facts, reason):
    layer = HostLayer(1)
    sources = counter([layer], torch.zeros(1, EXPERTS, dtype=torch.int32), **facts)
    with pytest.raises(UnsupportedEngineError, match=reason):
        sources.count(dispatch(layer, [[0, 1]]), gathers=True)


def test_slots_are_read_from_the_maps_of_all_ranks():
    maps = torch.tensor([[0, 1, -1, 2], [2, -1, 0, 1]]).numpy()
    assert _slots(maps).tolist() == [[0, 1, 3], [2, 3, 0]]


def weighted(kind, **tensors):
    layer = HostLayer(1)
    layer.quant_type = types.SimpleNamespace(name=kind)
    for name, tensor in tensors.items():
        setattr(layer, name, tensor)
    return layer


def per_expert(*shape):
    return torch.nn.Parameter(torch.zeros(SLOTS, *shape))


def test_weights_are_what_the_kernels_of_each_quantisation_read():
    plain = weighted("W8A8", w13_weight=per_expert(2, 3), w2_weight=per_expert(3, 2))
    found = expert_weights(plain, quantised=False)
    assert [weight.data_ptr() for weight in found] == [
        plain.w13_weight.data_ptr(),
        plain.w2_weight.data_ptr(),
    ]
    names = ("w13_weight_list", "w2_weight_list", "w13_weight_scale_fp32_list", "w2_weight_scale_list")
    lists = {name: [torch.zeros(2) for _ in range(SLOTS)] for name in names}
    found = expert_weights(weighted("W8A8", **lists), quantised=True, allow_unverified=True)
    assert all(
        kind[slot] is lists[name][slot]
        for kind, name in zip(found, names, strict=True)
        for slot in range(SLOTS)
    )


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (weighted("W4A8"), "quantisation W4A8"),
        (weighted("W8A8", w13_weight_list=[]), "without w2_weight_list"),
        (
            weighted("NONE", w13_weight=per_expert(1), w2_weight=per_expert(1), w13_bias=per_expert(1)),
            "w13_bias",
        ),
    ],
)
def test_experts_that_would_not_move_whole_are_refused(layer, reason):
    with pytest.raises(UnsupportedEngineError, match=reason):
        expert_weights(layer, quantised=True, allow_unverified=True)


ND, NZ = 2, 29


def in_formats(monkeypatch, *formats):
    """Tensors of an NPU count as in these formats, in turn."""
    asked = iter(formats)
    monkeypatch.setattr(weights, "npu_format", lambda _: next(asked))


def test_all_experts_in_one_tensor_of_nz_are_refused(monkeypatch):
    host = weighted("NONE", w13_weight=per_expert(2, 3), w2_weight=per_expert(3, 2))
    in_formats(monkeypatch, ND, NZ)
    with pytest.raises(
        UnsupportedEngineError, match=r"w2_weight of all experts .* format 29 .*weight_nz_mode"
    ):
        expert_weights(host, quantised=False)
    in_formats(monkeypatch, ND, ND)
    assert len(expert_weights(host, quantised=False)) == 2


def test_experts_of_their_own_may_be_nz_if_all_of_a_kind_are(monkeypatch):
    names = ("w13_weight_list", "w2_weight_list", "w13_weight_scale_fp32_list", "w2_weight_scale_list")
    host = weighted("W8A8", **{name: [torch.zeros(2) for _ in range(SLOTS)] for name in names})
    in_formats(monkeypatch, *[NZ] * 2 * SLOTS, *[ND] * 2 * SLOTS)
    assert len(expert_weights(host, quantised=True, allow_unverified=True)) == 4
    in_formats(monkeypatch, *[NZ] * SLOTS, *[NZ] * (SLOTS - 1), ND)
    with pytest.raises(UnsupportedEngineError, match=r"w2_weight_list with experts in .* formats 2 and 29"):
        expert_weights(host, quantised=True, allow_unverified=True)


@pytest.mark.parametrize(("theirs", "differ"), [(ND, True), (NZ, False)])
def test_ranks_whose_formats_differ_refuse_alike(monkeypatch, theirs, differ):
    def of_two_ranks(everyone, own, group):
        everyone[:] = [own, [[theirs, ND]]]

    monkeypatch.setattr(weights.dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(weights.dist, "all_gather_object", of_two_ranks)
    in_formats(monkeypatch, NZ, 0)
    layer = [[torch.zeros(2)] * SLOTS, [torch.zeros(2)] * SLOTS]
    if not differ:
        check_same_formats([layer], None)
        return
    with pytest.raises(UnsupportedEngineError, match=r"rank 1 keeps .* other formats .* same weight_nz_mode"):
        check_same_formats([layer], None)


def test_the_format_is_torch_npus_and_asked_of_tensors_of_an_npu_alone(monkeypatch):
    assert npu_format(torch.zeros(2)) == ND
    fake = types.SimpleNamespace(get_npu_format=lambda tensor: tensor.format)
    monkeypatch.setitem(sys.modules, "torch_npu", fake)
    assert npu_format(types.SimpleNamespace(device=torch.device("cpu"), format=NZ)) == ND
    assert npu_format(types.SimpleNamespace(device=types.SimpleNamespace(type="npu"), format=NZ)) == NZ


def test_what_the_older_balancer_does_not_move_is_refused():
    names = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
    layer = weighted("MXFP8", **{name: per_expert(1) for name in names})
    assert len(expert_weights(layer, quantised=True, allow_unverified=True)) == len(names)
    with pytest.raises(UnsupportedEngineError, match=r"vLLM-Ascend 0\.18 moves experts of NONE, W8A8 alone"):
        expert_weights(layer, quantised=True, release="0.18", allow_unverified=True)


def test_quantised_experts_are_moved_only_where_that_is_asked_for():
    with pytest.raises(UnsupportedEngineError, match="not been shown on a device"):
        expert_weights(weighted("W8A8", w13_weight_list=[]), quantised=True)


def test_tensors_that_the_host_replaces_are_noticed():
    names = ("w13_weight_list", "w2_weight_list", "w13_weight_scale_fp32_list", "w2_weight_scale_list")
    lists = {name: [torch.zeros(2) for _ in range(SLOTS)] for name in names}
    host = weighted("W8A8", **lists)
    found = expert_weights(host, quantised=True, allow_unverified=True)
    heat = HeatRings([host], EXPERTS, rows=4)
    layer = AscendLayer(host, torch.zeros(EXPERTS, dtype=torch.int32), found, heat, 0, False)
    assert layer.expert_weights() is found
    # As in quant_apply_mlp: the first expert's scales become those of another type.
    host.w13_weight_scale_fp32_list[0] = host.w13_weight_scale_fp32_list[0].to(torch.bfloat16)
    with pytest.raises(UnsupportedEngineError, match="custom operators"):
        layer.expert_weights()


SCALES = [torch.ones(2) for _ in range(SLOTS)]
OTHER_SCALES = [scale.to(torch.bfloat16) for scale in SCALES]


@pytest.mark.parametrize(
    ("scales", "mc2", "reason"),
    [((SCALES, SCALES), True, "first expert's scales"), ((SCALES, OTHER_SCALES), False, "new tensor")],
    ids=["mc2", "all2allv"],
)
def test_lists_of_experts_need_the_host_s_kernel_for_them(scales, mc2, reason):
    refuse_lists_that_the_host_misreads(*scales, mc2=mc2, kernel_for_lists=True)
    with pytest.raises(UnsupportedEngineError, match=reason):
        refuse_lists_that_the_host_misreads(*scales, mc2=mc2, kernel_for_lists=False)


@pytest.mark.parametrize(
    ("scales", "mc2"),
    [((None, None), True), (([SCALES[0]], [SCALES[0]]), True), ((SCALES, SCALES), False)],
    ids=["float", "one-tensor", "all2allv-of-one-type"],
)
def test_what_the_host_reads_rightly_without_that_kernel_is_let_through(scales, mc2):
    refuse_lists_that_the_host_misreads(*scales, mc2=mc2, kernel_for_lists=False)


def test_layers_that_the_host_does_not_balance_are_left_alone():
    model, balanced, dense = torch.nn.Module(), HostLayer(1), torch.nn.Linear(1, 1)
    static = HostLayer(1)
    static.dynamic_eplb = False
    model.layers = torch.nn.ModuleList([balanced, static, dense])
    assert LayerFinder(model).layers == [balanced]


def test_the_runner_gets_all_parts_or_none():
    names = ("Manager", "EplbProcess", "EplbUpdator", "VllmEplbAdaptor")
    whole = types.ModuleType("runner")
    for name in names:
        setattr(whole, name, object)
    hooks.replace_balancer(whole)
    assert whole.EplbUpdator is AscendBalancer
    shared = whole.Manager().dict({"moe_load": None})
    process = whole.EplbProcess(shared_dict=shared, policy_type=1, enable_d2d=True)
    assert process._launch_process().shared_dict is shared
    moved = types.ModuleType("runner of another release")
    for name in names[:3]:
        setattr(moved, name, object)
    with pytest.raises(AttributeError, match="VllmEplbAdaptor"):
        hooks.replace_balancer(moved)
    assert moved.EplbUpdator is object


def test_other_weights_are_refused_while_experts_are_balanced(monkeypatch):
    class Worker:
        def update_weights(self, info):
            return info

    hooks.refuse_other_weights(Worker, "update_weights")
    assert Worker().update_weights("new") == "new"
    monkeypatch.setattr(AscendBalancer, "of_this_process", object())
    with pytest.raises(RuntimeError, match="update_weights: vLLM-Ascend loads weights into new tensors"):
        Worker().update_weights("new")
    with pytest.raises(AttributeError, match="start_weight_update"):
        hooks.refuse_other_weights(Worker, "start_weight_update")


def test_the_plugin_does_nothing_unless_a_service_is_named(monkeypatch):
    monkeypatch.delenv("EPLB_AGENT_SERVICE", raising=False)
    monkeypatch.setattr(hooks, "install", lambda: pytest.fail("it patched"))
    plugin.register()
