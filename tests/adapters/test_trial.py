"""Experts that change slots compute what they did before, and engines whose experts do not are refused at the start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.adapters import sglang_fakes, vllm_fakes
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.sglang import experts as sglang_experts
from worker_agent.adapters.trial import exchange_and_compare, move_and_back
from worker_agent.adapters.vllm import experts as vllm_experts

SLOTS, HIDDEN, FIRST = 5, 8, 10
OUT_OF_SIGHT: dict[int, torch.Tensor] = {}
"""What a kernel keeps where no search gets to."""


class Experts(torch.nn.Module):
    """Owner of the weights; its ids are physical ones, of which this rank has those from ``FIRST`` on."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.w13_weight = torch.nn.Parameter(
            torch.randn(SLOTS, HIDDEN, HIDDEN).to(dtype), requires_grad=False
        )
        map_P = torch.full((2 * FIRST,), -1, dtype=torch.int32)
        map_P[FIRST : FIRST + SLOTS] = torch.arange(SLOTS)
        self.register_buffer("_expert_map", map_P)
        self.moe_config = SimpleNamespace(in_dtype=dtype)
        self.hidden_size = HIDDEN
        self.quant_method = Method()

    def live(self):
        """The agent's view of it."""
        tables = {"expert_map": torch.arange(SLOTS), "log2phy": torch.arange(SLOTS)}
        return SimpleNamespace(expert_weights=lambda: [self.w13_weight.data], **tables)


class Method:
    """A quantisation method whose experts multiply, by a factor of its own if ``factors_S`` is set."""

    def __init__(self):
        self.moe_kernel = None
        self.calls = 0
        self.noise = 0.0

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        """As vLLM's; it may write to its input."""
        assert shared_experts is None
        assert shared_experts_input is None
        self.calls += 1
        local_TK = layer._expert_map[topk_ids.long()]
        assert (local_TK >= 0).all()
        output = torch.einsum(
            "th,tkhj,tk->tj", x, layer.w13_weight[local_TK.long()], topk_weights.to(x.dtype)
        )
        if id(self) in OUT_OF_SIGHT:
            output *= OUT_OF_SIGHT[id(self)][local_TK[:, 0].long()].to(x.dtype)
        x.zero_()
        return output + self.noise * torch.rand_like(output)


def tried(experts):
    compute = vllm_experts.local_experts(experts, SLOTS, torch.device("cpu"))
    before = experts.w13_weight.clone()
    try:
        return exchange_and_compare(experts.live(), compute, "MoE layer 3")
    finally:
        assert torch.equal(experts.w13_weight, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_move_whole_compute_the_same_in_other_slots(dtype):
    experts = Experts(dtype)
    assert tried(experts) is None
    assert experts.quant_method.calls == 3


@pytest.mark.parametrize("factors", [[1, 1.1, 1, 1, 1], [1, 2, 3, 4, 5]])
def test_a_factor_that_no_search_finds_is_seen_in_the_outputs(factors):
    experts = Experts()
    OUT_OF_SIGHT[id(experts.quant_method)] = torch.tensor(factors)[:, None]
    with pytest.raises(
        UnsupportedEngineError, match=r"MoE layer 3, whose experts in slots .*1.* different outputs"
    ):
        tried(experts)


def test_a_copy_of_the_weights_elsewhere_is_seen_in_the_outputs():
    experts = Experts()
    copied = experts.w13_weight.clone()

    def apply(layer, x, topk_weights, topk_ids):
        return torch.einsum("th,thj->tj", x, copied[layer._expert_map[topk_ids[:, 0].long()].long()])

    experts.quant_method.apply = apply
    with pytest.raises(UnsupportedEngineError, match="different outputs"):
        tried(experts)


def test_a_kernel_that_is_not_deterministic_is_no_reason_to_refuse():
    experts = Experts()
    experts.quant_method.noise = 1e-3
    tried(experts)


@pytest.mark.parametrize("fails", [1, 3])
def test_a_computation_that_fails_proves_nothing_and_leaves_the_weights_as_they_were(fails):
    experts = Experts()
    works = experts.quant_method.apply

    def apply(*arguments, **named):
        if experts.quant_method.calls == fails - 1:
            raise RuntimeError("needs a forward context")
        return works(*arguments, **named)

    experts.quant_method.apply = lambda layer, x, topk_weights, topk_ids: apply(
        layer, x, topk_weights, topk_ids, None, None
    )
    assert tried(experts) == "RuntimeError: needs a forward context"


def test_dummy_weights_that_are_not_numbers_prove_nothing():
    experts = Experts()
    experts.w13_weight.data[1] = float("nan")
    tried_before = experts.quant_method.calls
    compute = vllm_experts.local_experts(experts, SLOTS, torch.device("cpu"))
    exchange_and_compare(experts.live(), compute, "MoE layer 3")
    assert experts.quant_method.calls == tried_before + 3


def test_experts_without_any_bytes_are_refused():
    layer = Experts().live()
    layer.expert_weights = lambda: [torch.empty(SLOTS, 0)]
    with pytest.raises(UnsupportedEngineError, match="empty"):
        move_and_back(layer)


def test_a_kernel_runs_without_the_exchange_between_ranks(monkeypatch):
    class Local:
        pass

    sglang_fakes.put_modules(monkeypatch, {vllm_experts._LOCAL: {vllm_experts._LOCAL_CLASS: Local}})
    experts, used = Experts(), []
    exchange = SimpleNamespace(activation_format=SimpleNamespace(name="Standard"))
    kernel = SimpleNamespace(prepare_finalize=exchange)
    experts.quant_method.moe_kernel = SimpleNamespace(impl=kernel)
    works = experts.quant_method.apply

    def apply(layer, x, topk_weights, topk_ids):
        used.append(type(kernel.prepare_finalize))
        return works(layer, x, topk_weights, topk_ids, None, None)

    experts.quant_method.apply = apply
    tried(experts)
    assert used == [Local] * 3
    assert kernel.prepare_finalize is exchange
    exchange.activation_format.name = "BatchedExperts"
    assert vllm_experts.local_experts(experts, SLOTS, torch.device("cpu")) is None


def test_vllm_s_layers_are_tried_before_the_ranks_meet(monkeypatch):
    state = vllm_fakes.model_state(0)
    for index, layer in enumerate(state.model.moe_layers):
        experts = Experts()
        state.model.expert_weights[index] = [experts.w13_weight.data.view(SLOTS, -1)]
        layer.routed_experts = experts
    broken = state.model.moe_layers[1].routed_experts.quant_method
    OUT_OF_SIGHT[id(broken)] = torch.arange(1.0, SLOTS + 1)[:, None]
    physical = torch.arange(2 * SLOTS) % 6
    state.physical_to_logical_map = physical.repeat(vllm_fakes.LAYERS, 1)
    monkeypatch.setattr("worker_agent.adapters.engine_host.refuse_unlike_ranks", lambda *_: None)
    group = SimpleNamespace(rank_in_group=0, world_size=2, cpu_group=None)
    with pytest.raises(UnsupportedEngineError, match="MoE layer 1, whose experts"):
        vllm_fakes.VllmHost(state, vllm_fakes.config(data_parallel=2), group)


class StandardDispatcher:
    """SGLang's, which hands tokens over with local slots."""


@pytest.mark.parametrize("keeps", [False, True])
def test_sglang_s_layers_are_tried(keeps, monkeypatch):
    named = {
        "token_dispatcher.standard": {"StandardDispatchOutput": lambda x, _, choice: (x, choice)},
        "topk": {"StandardTopKOutput": lambda weights, ids, _: (weights, ids)},
    }
    sglang_fakes.put_modules(
        monkeypatch, {f"sglang.srt.layers.moe.{name}": one for name, one in named.items()}
    )
    experts = Experts()
    kept = experts.w13_weight.clone() if keeps else None
    experts.dispatcher, experts.params_dtype = StandardDispatcher(), torch.float32

    def apply(layer, dispatch_output):
        x, (weights, ids) = dispatch_output
        weight = layer.w13_weight if kept is None else kept
        return SimpleNamespace(
            hidden_states=torch.einsum("th,thj->tj", x * weights, weight[ids[:, 0].long()])
        )

    experts.quant_method.apply = apply
    compute = sglang_experts.local_experts(experts, SLOTS, torch.device("cpu"))
    if keeps:
        with pytest.raises(UnsupportedEngineError, match="different outputs"):
            exchange_and_compare(experts.live(), compute, "MoE layer 0")
    else:
        exchange_and_compare(experts.live(), compute, "MoE layer 0")
    experts.dispatcher = object()
    assert sglang_experts.local_experts(experts, SLOTS, torch.device("cpu")) is None
