"""The search through all objects of an engine's layer for per-expert values that would not move with their experts."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from worker_agent.adapters import reachable, unmoved
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.unmoved import refuse_unlike_ranks, refuse_unmoved

SLOTS = 6
HIDDEN = 10
KNOWN = frozenset({"w13_input_scale", "e_score_correction_bias"})


@dataclass
class Description:
    scale: object


class Slotted:
    __slots__ = ("__factor", "_kept")

    def __init__(self, kept):
        self._kept = kept
        self.__factor = None


class Wrapper:
    """Object that holds a tensor but is not one, like Triton's wrapper."""

    def __init__(self, data):
        self.storage = SimpleNamespace(data=data)


class Cache:
    of_all_layers = None


def per_expert(*shape):
    return torch.rand(SLOTS, *shape)


def module():
    layer = torch.nn.Module()
    layer.w13_weight = torch.nn.Parameter(per_expert(8, HIDDEN), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(per_expert(HIDDEN, 4), requires_grad=False)
    return layer


def moved_of(layer):
    return [layer.w13_weight.data.view(SLOTS, -1), layer.w2_weight.data.view(SLOTS, -1)]


def check(layer, **options):
    return refuse_unmoved(layer, moved_of(layer), SLOTS, KNOWN, **options)


def in_closure(tensor):
    def apply(x):
        return x * tensor

    return apply


def in_default(tensor):
    def apply(x, factor=tensor):
        return x * factor

    return apply


def with_class_attribute(tensor):
    return type("Kernel", (Cache,), {"of_all_layers": tensor})()


def on_parameter(layer, tensor):
    layer.w13_weight.scales = tensor


def in_submodule(layer, tensor):
    layer.inner = torch.nn.Sequential(torch.nn.Identity())
    layer.inner[0].register_buffer("scales", tensor)


HOMES = {
    "attribute": lambda layer, tensor: setattr(layer, "g1_alphas", tensor),
    "parameter": lambda layer, tensor: layer.register_parameter("a", torch.nn.Parameter(tensor)),
    "submodule": in_submodule,
    "method": lambda layer, tensor: setattr(
        layer, "quant_method", SimpleNamespace(config=Description(tensor))
    ),
    "kernel": lambda layer, tensor: setattr(
        layer, "quant_method", SimpleNamespace(kernel=SimpleNamespace(impl=SimpleNamespace(_factor=tensor)))
    ),
    "wrapper": lambda layer, tensor: setattr(layer, "w13_scale", Wrapper(tensor)),
    "list": lambda layer, tensor: setattr(layer, "kept", [None, tensor]),
    "tuple": lambda layer, tensor: setattr(layer, "kept", (1, (tensor, 2))),
    "dict": lambda layer, tensor: setattr(layer, "kept", {"scales": {"w13": tensor}}),
    "set": lambda layer, tensor: setattr(layer, "kept", {Wrapper(tensor)}),
    "deque": lambda layer, tensor: setattr(layer, "kept", deque([tensor])),
    "slots": lambda layer, tensor: setattr(layer, "kept", Slotted(tensor)),
    "closure": lambda layer, tensor: setattr(layer, "run", in_closure(tensor)),
    "default": lambda layer, tensor: setattr(layer, "run", in_default(tensor)),
    "partial": lambda layer, tensor: setattr(layer, "run", functools.partial(torch.mul, other=tensor)),
    "partial with the layer": lambda layer, tensor: setattr(
        layer, "run", functools.partial(torch.mul, layer, tensor)
    ),
    "bound method": lambda layer, tensor: setattr(layer, "run", Wrapper(tensor).__init__),
    "class attribute": lambda layer, tensor: setattr(layer, "kernel", with_class_attribute(tensor)),
    "attribute of a parameter": on_parameter,
    "array": lambda layer, tensor: setattr(layer, "kept", SimpleNamespace(scales=tensor.numpy())),
}


@pytest.mark.parametrize("home", HOMES)
def test_a_tensor_with_a_value_per_expert_is_found_in_every_container(home):
    layer = module()
    HOMES[home](layer, per_expert())
    with pytest.raises(UnsupportedEngineError, match=r"per-expert.*stay behind"):
        check(layer)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(3, SLOTS),
        torch.rand(2, 4, 1, SLOTS),
        torch.ones(SLOTS),
        torch.zeros(SLOTS, 0x10, dtype=torch.uint8),
        torch.rand(SLOTS * 8, 2),
        torch.rand(SLOTS, 5).to(torch.float8_e4m3fn),
        torch.randint(0, 9, (SLOTS, 4), dtype=torch.int32),
    ],
    ids=["last axis", "last of four axes", "equal values", "bytes", "flat", "fp8", "packed integers"],
)
def test_per_expert_tensors_are_found_whatever_their_expert_axis_and_type(tensor):
    layer = module()
    layer.quant_method = SimpleNamespace(kernel=SimpleNamespace(w1_scale=tensor))
    with pytest.raises(UnsupportedEngineError, match=r"quant_method\.kernel\.w1_scale"):
        check(layer)


@pytest.mark.parametrize(
    "make_values",
    [
        lambda: [torch.rand(3) for _ in range(SLOTS)],
        lambda: tuple(torch.rand(3) for _ in range(SLOTS)),
        lambda: {expert + 12: torch.rand(3) for expert in range(SLOTS)},
        lambda: {f"expert_{expert}": torch.rand(3) for expert in range(SLOTS)},
        lambda: SimpleNamespace(**{f"scale_{expert}": torch.rand(3) for expert in range(SLOTS)}),
        lambda: torch.nn.ModuleList(torch.nn.Linear(3, 2) for _ in range(SLOTS)),
        lambda: torch.nn.ParameterList(torch.rand(3) for _ in range(SLOTS)),
        lambda: [in_closure(torch.rand(3)) for _ in range(SLOTS)],
        lambda: [Description(torch.rand(3)) for _ in range(SLOTS)],
        lambda: [0.5 + expert for expert in range(SLOTS)],
    ],
    ids=[
        "list",
        "tuple",
        "by number",
        "by name",
        "attributes",
        "modules",
        "parameters",
        "closures",
        "objects",
        "floats",
    ],
)
def test_containers_and_attributes_with_one_value_per_expert_are_found(make_values):
    layer = module()
    layer.kept = make_values()
    with pytest.raises(UnsupportedEngineError, match="kept"):
        check(layer)


def test_the_unmoved_half_of_a_partly_moved_tensor_is_found():
    """Only half of each expert's row moves."""
    layer = module()
    scales = per_expert(8)
    layer.register_buffer("w2_scale", scales)
    with pytest.raises(UnsupportedEngineError, match="w2_scale"):
        refuse_unmoved(layer, [*moved_of(layer), *scales[:, :4]], SLOTS, KNOWN)


def test_a_tensor_with_one_factor_per_routed_and_shared_expert_is_found():
    """A fused shared expert occupies the slot after the routed experts' slots."""
    layer = module()
    layer.w13_weight = torch.nn.Parameter(torch.rand(SLOTS + 1, 8, HIDDEN), requires_grad=False)
    moved = [layer.w13_weight.data[:SLOTS], layer.w2_weight.data]
    refuse_unmoved(layer, moved, SLOTS, KNOWN)
    layer.quant_method = SimpleNamespace(g1_alphas=torch.rand(SLOTS + 1))
    with pytest.raises(UnsupportedEngineError, match="g1_alphas"):
        refuse_unmoved(layer, moved, SLOTS, KNOWN)


def layer_of_an_engine():
    """Return a layer like vLLM's and SGLang's in which every value moves, with the moved tensors and the model."""
    layer = module()
    weight = layer.w13_weight
    factors = torch.nn.Parameter(per_expert(), requires_grad=False)
    layer.w13_weight_scale_2 = factors
    layer.register_buffer("_expert_map", torch.arange(4 * SLOTS))
    layer.register_buffer("expert_local_to_global", torch.arange(SLOTS))
    layer.e_score_correction_bias = torch.rand(SLOTS)
    layer.w13_input_scale = torch.nn.Parameter(torch.full((SLOTS,), 0.5), requires_grad=False)
    weight.weight_loader = layer.forward
    kernel = SimpleNamespace(
        a_strides1=torch.full((SLOTS,), 8, dtype=torch.int64),
        s_strides1=torch.tensor([[8, 0]] * SLOTS),
        b_ptr=torch.randint(0, 1 << 40, (SLOTS,)),
        problem_sizes1=torch.randint(0, 99, (SLOTS, 3), dtype=torch.int32),
        gemm1_alpha=torch.full((SLOTS,), 1.702),
        a2_gscale=torch.tensor(0.5).expand(SLOTS),
        views=[weight[slot] for slot in range(SLOTS)],
        turned=weight.transpose(1, 2),
        g1_alphas=factors,
        workspace=torch.rand(SLOTS, 30),
        block_shape=[128, 128],
        layer=weakref.ref(layer),
        itself=None,
    )
    kernel.itself = kernel
    layer.quant_method = SimpleNamespace(
        moe_kernel=kernel, run=functools.partial(torch.mul, layer.w2_weight), quant=Description(factors)
    )
    model = torch.nn.Module()
    model.norm = torch.nn.Parameter(torch.rand(SLOTS))
    model.mlp = torch.nn.Module()
    model.mlp.experts = layer
    model.mlp.shared_experts = torch.nn.Linear(SLOTS, SLOTS)
    layer.shared_experts = model.mlp.shared_experts
    layer.gate = torch.nn.Linear(3, SLOTS)
    layer.custom_routing = model.mlp.forward
    layer.all_layers = {"model.mlp": layer, "model.norm": torch.nn.LayerNorm(SLOTS)}
    return layer, [*moved_of(layer), factors], model


def test_a_layer_whose_values_all_move_is_accepted():
    layer, moved, _ = layer_of_an_engine()
    allowed = KNOWN | {"expert_local_to_global"}
    facts = refuse_unmoved(
        layer, moved, SLOTS, allowed, roots={"layer": SimpleNamespace(routed_experts=layer)}
    )
    assert {"w13_input_scale", "quant_method.moe_kernel.gemm1_alpha"} <= set(facts)


def test_tables_that_the_agent_writes_are_accepted():
    layer = module()
    table = torch.rand(SLOTS, 8)
    layer.eplb_state = SimpleNamespace(load=table[:, :3])
    with pytest.raises(UnsupportedEngineError):
        check(layer)
    check(layer, tables=[table])


def test_a_search_that_reaches_its_limit_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(reachable, "MAX_OBJECTS", 40)
    layer = module()
    layer.kept = [[number] for number in range(100)]
    check(layer)
    assert "stopped early, at kept" in caplog.text


def test_a_search_at_its_maximum_depth_continues_elsewhere(monkeypatch):
    layer = module()
    inner = [per_expert()]
    for _ in range(reachable.MAX_DEPTH + 1):
        inner = [inner]
    layer.deep = inner
    layer.later = {"a": {"b": {"scales": per_expert()}}}
    with pytest.raises(UnsupportedEngineError, match=r"'b'.*'scales'"):
        check(layer)


def compare_scales(per_rank):
    layer = module()
    value = 0.5 + (dist.get_rank() if per_rank else 0)
    layer.w13_input_scale = torch.full((SLOTS,), value)
    layer.quant_method = SimpleNamespace(config=Description(torch.tensor(value)))
    try:
        refuse_unlike_ranks(check(layer), dist.group.WORLD)
    except UnsupportedEngineError as error:
        return str(error)


def test_scales_that_differ_between_ranks_are_rejected_on_every_rank():
    assert run_ranks(2, compare_scales, False) == [None, None]
    for message in run_ranks(2, compare_scales, True):
        assert "quant_method.config.scale differs between rank 0 and rank 1" in message


def test_read_only_arrays_are_read():
    array = np.arange(6.0)
    array.flags.writeable = False
    assert unmoved._as_tensor(array).tolist() == [0, 1, 2, 3, 4, 5]
